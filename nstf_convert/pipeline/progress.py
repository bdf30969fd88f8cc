"""Seconds and peak memory of the stages of a conversion, and its log lines."""

import logging
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nstf_convert.report.build import Stage

log = logging.getLogger("nstf")


def bars_off() -> bool | None:
    """What tqdm's `disable` should be: off with --quiet, and (None) where stderr is not a terminal."""
    return None if log.isEnabledFor(logging.INFO) else True


def peak_memory_bytes() -> int:
    """The largest resident set of this process so far, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Stages:
    """The stages so far, in order."""

    def __init__(self) -> None:
        self.done: list[Stage] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block under `name`; a name used again adds up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            before = next((s for s in self.done if s.name == name), None)
            total = seconds + (before.seconds if before else 0.0)
            stage = Stage(name, total, peak_memory_bytes())
            if before is None:
                self.done.append(stage)
            else:
                self.done[self.done.index(before)] = stage
            log.info("%s: %.1f s, peak memory %.2f GiB", name, seconds, stage.peak_memory_bytes / 2**30)
