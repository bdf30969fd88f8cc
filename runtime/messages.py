"""What every rank tells every other one in a few kilobytes, through gloo between CPUs: faster than its collectives.

An all-reduce of some kilobytes takes gloo 0.3 to 0.5 ms between two processes of one host, most of it threads that wake each
other: its collectives run on threads of their own, in several steps. Here each rank sends what it has to each other rank.
A message that nobody waits for yet takes three ways, since gloo first asks the receiver; so a receive for the next message
is always posted, of the size of the last one, and it arrives in one way (docs/scale.md has the times).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from nstf.kernels.cpu import ext

# What a rank sends in all; of more, collectives send less.
MOST_BYTES = 1 << 17


class Mailbox:
    """Messages of one kind between the first `size` processes, which all make the same calls. tag: of this kind alone."""

    def __init__(self, rank: int, size: int, tag: int) -> None:
        self.rank, self.size, self.tag = rank, size, tag
        self._others = [other for other in range(size) if other != rank]
        self._room = torch.empty(size, 0)  # what the posted receives write into: a row for each rank
        self._posted: list[Any] = []

    def exchange(self, values: Tensor) -> Tensor:
        """[ranks, ...]: what each has, the same on all, for the caller to keep. values: contiguous, of one shape on all."""
        flat = values.detach().view(-1)
        if (self._room.shape[1], self._room.dtype) != (len(flat), flat.dtype):
            self._resize(flat)
        sent: list[Any] = [dist.isend(flat, other, tag=self.tag) for other in self._others]
        for message in self._posted:
            message.wait()
        self._room[self.rank] = flat
        found = self._room.clone()
        for message in sent:
            message.wait()
        self._post()
        return found.view(self.size, *values.shape)

    def _resize(self, flat: Tensor) -> None:
        """Posted receives of another size are used up first: all ranks have them."""
        if self._posted:
            old = self._room[self.rank]
            for message in [*(dist.isend(old, other, tag=self.tag) for other in self._others), *self._posted]:
                message.wait()
        with torch.inference_mode(False):  # written into by later calls, whatever mode those are in
            self._room = flat.new_empty(self.size, len(flat))
        self._post()

    def _post(self) -> None:
        self._posted = [dist.irecv(self._room[other], other, tag=self.tag) for other in self._others]


# Of a group of processes, while there is one: by the number of ranks and the kind.
_BOXES: WeakKeyDictionary[Any, dict[tuple[int, int], Mailbox]] = WeakKeyDictionary()


def mailbox(rank: int, size: int, kind: int) -> Mailbox:
    """This process's box for messages of a kind, 0 or 1, between the first `size` of the default group."""
    boxes = _BOXES.setdefault(dist.group.WORLD, {})
    if (size, kind) not in boxes:
        boxes[size, kind] = Mailbox(rank, size, 1 + 2 * size + kind)
    return boxes[size, kind]


def sent_directly(values: Tensor, size: int) -> bool:
    """Whether these values go as messages: the same answer on every rank."""
    few = values.nbytes * (size - 1) <= MOST_BYTES
    return few and values.device.type == "cpu" and dist.get_backend() == "gloo"


@contextmanager
def awake() -> Iterator[None]:
    """Inside, a thread of the least priority keeps a core of this process from halting while it waits for others, where the
    extension is there. Halted processors are slow to wake: decoding takes up to twice as long (docs/scale.md). Not where
    this process has a quota of processor time (`docker --cpus`), which that thread would use up."""
    try:
        thread = None if ext is None or has_quota() else ext.Awake()
    except RuntimeError:  # no thread is left: decoding is slower
        thread = None
    try:
        yield
    finally:
        if thread is not None:
            thread.stop()


def has_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether a control group of Linux (version 2) bounds the processor time of this process."""
    try:
        own = [line[3:].lstrip("/") for line in groups.read_text().splitlines() if line.startswith("0::")]
    except (OSError, ValueError):
        return False
    for name in own:
        # Any group above bounds it as well.
        for folder in (root / name, *(root / parent for parent in Path(name).parents)):
            try:
                if (folder / "cpu.max").read_text().split()[:1] not in ([], ["max"]):
                    return True
            except (OSError, ValueError):
                continue  # no such control there
    return False
