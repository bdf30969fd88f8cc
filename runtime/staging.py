"""Arrays of a mapped file onto a GPU, through pinned memory that threads read the file into.

A copy from the mapping itself waits for a page fault every 4 KiB and for the driver, which copies everything once more.
Reading the file has no page faults, several threads do it side by side, and the GPU takes pinned memory by itself.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from nstf.errors import NstfError
from nstf.runtime.artifact import Artifact

# Bytes of a read, and how many are under way: 64 MiB of pinned memory, which torch keeps for the next load.
PIECE = 8 << 20
SLOTS = 8
THREADS = 4
# Smaller arrays are copied from the mapping.
SMALLEST = 1 << 18


class _Slot(NamedTuple):
    """Pinned memory, and what says that the GPU has taken what was in it."""

    memory: Tensor
    taken: torch.cuda.Event | None


class Staging:
    """Copies arrays of one file to one device; a context. On a CPU memory is not pinned: for tests alone."""

    def __init__(self, artifact: Artifact, device: torch.device) -> None:
        self._artifact = artifact
        # With its number: each thread has a current GPU of its own.
        self._device = torch.empty(0, device=device).device
        self._on_gpu = device.type == "cuda"
        self._file = artifact.reopened()
        self._pool: ThreadPoolExecutor | None = None
        self._free: deque[_Slot] = deque()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None  # whatever is copied later comes from the mapping
        # Torch gives the pinned memory to nobody else before the GPU has taken what was in it.
        self._free.clear()

    def copy(self, array: Tensor) -> Tensor:
        """The array on the device. Raises NstfError where the disk fails or the file became shorter."""
        place = None if self._file is None else self._artifact.place_of(array)
        if place is None or array.nbytes < SMALLEST:
            return array.to(self._device)
        out = torch.empty(array.shape, dtype=array.dtype, device=self._device)
        room = out.view(-1).view(torch.uint8)
        under_way: deque[tuple[Future[None], _Slot, slice]] = deque()
        for start in range(0, len(room), PIECE):
            part = slice(start, min(start + PIECE, len(room)))
            if not self._ready():
                self._take(room, *under_way.popleft())
            slot = self._free.popleft()
            assert self._pool is not None
            under_way.append((self._pool.submit(self._read, slot, place + start, part), slot, part))
        while under_way:
            self._take(room, *under_way.popleft())
        return out

    def _ready(self) -> bool:
        """Whether a slot is free; all are made at the first call."""
        if self._pool is None:
            memory = _pinned() if self._on_gpu else torch.empty(SLOTS, PIECE, dtype=torch.uint8)
            self._pool = ThreadPoolExecutor(THREADS, "nstf-staging", initializer=self._use_device)
            self._free.extend(
                _Slot(memory[i], torch.cuda.Event() if self._on_gpu else None)  # type: ignore[no-untyped-call]
                for i in range(SLOTS)
            )
        return bool(self._free)

    def _use_device(self) -> None:
        """A new thread has the first GPU, where waiting for an event of another one would make a context of 500 MB."""
        if self._on_gpu:
            torch.cuda.set_device(self._device)

    def _read(self, slot: _Slot, place: int, part: slice) -> None:
        if slot.taken is not None:
            slot.taken.synchronize()
        assert self._file is not None
        left = slot.memory.numpy().data[: part.stop - part.start]
        while left:
            try:
                count = os.preadv(self._file, [left], place)
            except OSError as error:
                raise NstfError(
                    f"{self._artifact.where}: cannot be read ({error.strerror}); check file and disk"
                ) from error
            if not count:
                raise NstfError(f"{self._artifact.where}: became shorter while it was read; load it again")
            left, place = left[count:], place + count

    def _take(self, room: Tensor, read: Future[None], slot: _Slot, part: slice) -> None:
        read.result()
        room[part].copy_(slot.memory[: part.stop - part.start], non_blocking=True)
        if slot.taken is not None:
            slot.taken.record(torch.cuda.current_stream(self._device))
        self._free.append(slot)


def _pinned() -> Tensor:
    """Memory of all slots; plain memory, which is slower, where the system pins no more."""
    try:
        return torch.empty(SLOTS, PIECE, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(SLOTS, PIECE, dtype=torch.uint8)
