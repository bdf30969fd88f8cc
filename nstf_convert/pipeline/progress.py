"""Seconds and peak memory of the stages of a conversion, one progress bar over all of them, and its log lines."""

import logging
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from nstf_convert.notice import NOTICE
from nstf_convert.report.build import Stage

log = logging.getLogger("nstf")

_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {elapsed} elapsed, {remaining} left"


def bars_off() -> bool | None:
    """What tqdm's `disable` should be: off with --quiet, and (None) where stderr is not a terminal."""
    return None if log.isEnabledFor(NOTICE) else True


def peak_memory_bytes() -> int:
    """The largest resident set of this process so far, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Peaks:
    """The most memory that a process took so far. host_bytes: resident, mapped files included; gpu_bytes: reserved on its
    GPU, None on a CPU."""

    device: str
    host_bytes: int
    gpu_bytes: int | None


def peaks(device: torch.device) -> Peaks:
    """Of this process, which computes on `device`."""
    gpu = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return Peaks(str(device), peak_memory_bytes(), gpu)


class Stages:
    """The stages so far, in order. With expected times there is a bar over the whole conversion."""

    def __init__(self) -> None:
        self.done: list[Stage] = []
        self._expected: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._now = ""
        self._bar: Any = None
        # Of all stages that have ended, those inside of others counted once.
        self._processor = 0.0

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Shows the bar: how long each stage is expected to take in all, in seconds."""
        self._expected = dict(seconds)
        total = max(sum(seconds.values()), 1e-9)
        self._bar = tqdm(total=total, bar_format=_FORMAT, disable=bars_off(), leave=False)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def tick(self, share: float) -> None:
        """A step of the running stage is done: the share of the stage's whole expected time that it is."""
        expected = self._expected.get(self._now, 0.0)
        used = self._used.get(self._now, 0.0)
        more = min(share * expected, expected - used)
        self._used[self._now] = used + more
        if self._bar is not None:
            self._bar.update(more)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block under `name`; a name used again adds up. The time of a stage inside counts there only."""
        outer, self._now = self._now, name
        shown = self._used.get(name, 0.0)
        start, inside = time.perf_counter(), sum(s.seconds for s in self.done)
        processor, within = time.process_time(), self._processor
        if self._bar is not None:
            self._bar.set_description_str(name)
        try:
            yield
        finally:
            seconds = time.perf_counter() - start - (sum(s.seconds for s in self.done) - inside)
            if self._used.get(name, 0.0) == shown and self._expected.get(name):
                self.tick(seconds / self._expected[name])  # a stage without progress steps
            worked = time.process_time() - processor - (self._processor - within)
            self._processor += worked
            self._note(name, seconds, worked)
            self._now = outer

    def _note(self, name: str, seconds: float, worked: float) -> None:
        before = next((s for s in self.done if s.name == name), None)
        total = seconds + (before.seconds if before else 0.0)
        stage = Stage(name, total, peak_memory_bytes())
        if before is None:
            self.done.append(stage)
        else:
            self.done[self.done.index(before)] = stage
        log.info(
            "%s: %.1f s, peak memory %.2f GiB, processors %.1f s",
            name, seconds, stage.peak_memory_bytes / 2**30, worked,
        )  # fmt: skip
