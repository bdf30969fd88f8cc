"""What every rank tells every other one in a few kilobytes, between CPUs: faster than gloo's collectives.

Ranks of one host write into memory that they share (kernels/cpu/shared_box.cpp), which takes microseconds. Over several
hosts, or without the extension, each rank sends its values to each other rank through gloo. An all-reduce of some kilobytes
takes gloo 0.3 to 0.5 ms between two processes of one host, most of it threads that wake each other: its collectives run on
threads of their own, in several steps. A message with no receive posted takes three trips, since gloo first asks the
receiver; so a receive of the last message's size is always posted, and the next message takes one (docs/scale.md has the
times).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from nstf.kernels.cpu import ext

# What a rank sends in all through gloo; of more, its collectives send less.
MOST_BYTES = 1 << 17
# What a rank tells through shared memory, and the bytes of a piece.
MOST_SHARED, PIECE_BYTES = 1 << 23, 1 << 17
# Where ranks of a host share memory, and how long they poll it for a message before they sleep.
SHARED_FOLDER, SPIN_US = "/dev/shm", 500.0
# The longest wait for a message that way, as long as gloo's.
LIMIT_S = 1800.0


class Mailbox:
    """Messages of one kind between the first `size` processes, which all make the same calls. tag: of this kind alone."""

    most_bytes = MOST_BYTES

    def __init__(self, rank: int, size: int, tag: int) -> None:
        self.rank, self.size, self.tag = rank, size, tag
        self._others = [other for other in range(size) if other != rank]
        # What the posted receives write into: a row for each rank.
        self._room = torch.empty(size, 0, dtype=torch.float32, device="cpu")
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

    def sum(self, values: Tensor) -> None:
        """The sum over the ranks in the place of contiguous values, in the order of the ranks: alike on all."""
        first, *others = self.exchange(values)
        for other in others:
            first += other
        values.detach().copy_(first)

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


class SharedMailbox:
    """The same between processes of one host, for both kinds of messages. box: of `ext.SharedBox`, the memory they share."""

    most_bytes = MOST_SHARED

    def __init__(self, box: Any, size: int) -> None:
        self._box, self.size = box, size

    def exchange(self, values: Tensor) -> Tensor:
        """As `Mailbox.exchange`. Raises RuntimeError where another rank has ended, or was silent for LIMIT_S."""
        found = values.new_empty(self.size, *values.shape)
        self._box.exchange(values.data_ptr(), values.nbytes, found.data_ptr())
        return found

    def sum(self, values: Tensor) -> None:
        """As `Mailbox.sum`."""
        if values.dtype == torch.float32:
            self._box.sum(values.data_ptr(), values.numel())
            return
        first, *others = self.exchange(values)
        for other in others:
            first += other
        values.detach().copy_(first)


class Told(Protocol):
    """Ranks that tell each other a word (runtime/ranks.py)."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def tell(self, word: bytes) -> list[bytes]:
        """What every rank says, at most 255 bytes each."""


# Of a group of processes, while there is one: by the number of ranks, and the kind.
_BOXES: WeakKeyDictionary[Any, dict[tuple[int, int], Mailbox | SharedMailbox]] = WeakKeyDictionary()


def mailbox(ranks: Told, kind: int) -> Mailbox | SharedMailbox:
    """This process's box for messages of a kind, 0 or 1, between the first `size` of the default group. All ask for it first
    at the same call."""
    boxes, size = _BOXES.setdefault(dist.group.WORLD, {}), ranks.size
    if (size, kind) not in boxes:
        shared = shared_mailbox(ranks)
        for each in (0, 1):
            boxes[size, each] = shared or Mailbox(ranks.rank, size, 1 + 2 * size + each)
    return boxes[size, kind]


def shared_mailbox(ranks: Told) -> SharedMailbox | None:
    """A box in memory that all ranks share; None on all of them where one does not reach it."""
    offered = _offer(ranks.size) if ranks.rank == 0 else None
    file = offered[1] if offered else None
    try:
        path = ranks.tell(offered[0].encode() if offered else b"")[0].decode()
        if offered is None:
            file = _opened(path)
        words = ranks.tell(b"" if file is None else b"%x" % _own_cores())
        if file is None or b"" in words:
            return None
        # Where ranks share a core, one that polls keeps another from its work.
        apart = reduce(int.__or__, (int(word, 16) for word in words)).bit_count() >= ranks.size
        spin = SPIN_US if apart and not has_quota() else 0.0
        try:
            box = ext.SharedBox(file, ranks.rank, ranks.size, PIECE_BYTES, spin, LIMIT_S)
        except RuntimeError:  # no memory is left
            box = None
        if b"" in ranks.tell(b"yes" if box else b""):
            return None
        return SharedMailbox(box, ranks.size)
    finally:
        if file is not None:
            os.close(file)
        if offered:
            Path(offered[0]).unlink(missing_ok=True)


def _offer(size: int) -> tuple[str, int] | None:
    """(path, descriptor) of a file in memory for so many ranks; None where there is none, or no room for it."""
    if not hasattr(ext, "SharedBox"):
        return None
    try:
        file, path = tempfile.mkstemp(prefix="nstf-", dir=SHARED_FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, ext.SharedBox.size_bytes(size, PIECE_BYTES))
        if len(path) < 200:
            return path, file
    except OSError:
        pass
    os.close(file)
    Path(path).unlink(missing_ok=True)
    return None


def _opened(path: str) -> int | None:
    """The file that another rank offers. On another host there is none of this name: it is drawn at random."""
    if not path or not hasattr(ext, "SharedBox"):
        return None
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None


def _own_cores() -> int:
    """The processors that this process may use, a bit for each of the first 800; all where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return (1 << 800) - 1
    return sum(1 << core for core in os.sched_getaffinity(0) if core < 800)


def direct(ranks: Told, values: Tensor, kind: int) -> Mailbox | SharedMailbox | None:
    """The box that these values go through; None for gloo's or NCCL's collectives. The same on every rank."""
    size_bytes = values.nbytes * (ranks.size - 1)
    if size_bytes > MOST_SHARED or values.device.type != "cpu" or dist.get_backend() != "gloo":
        return None
    box = mailbox(ranks, kind)
    return box if size_bytes <= box.most_bytes else None


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
