"""Arrays of a mapped file on their way to a GPU: through pinned memory, some on the link while others are read.

A copy from memory that is not pinned waits for the driver, which reads pages one after the other in one thread: 2.6 GB/s of
int4 on an H200, where the file's pages are read at 6 GB/s and the link takes 50 (docs/scale.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor

# Of each of two pieces of pinned memory; arrays lie in them one behind the other.
PIECE_BYTES = 1 << 25
_ALIGNMENT = 256


class Staging:
    """Copies to a GPU, in order on its current stream. Its memory goes when it goes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pieces: list[Tensor] = []
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._now, self._used = 0, 0

    def encoded(self, tensor: EncodedTensor) -> EncodedTensor:
        """The tensor with its arrays on the GPU."""
        return EncodedTensor(tensor.tree, tensor.shape, {p: self.array(a) for p, a in tensor.arrays.items()})

    def array(self, array: Tensor) -> Tensor:
        """The array on the GPU; itself where it is there."""
        if array.device.type != "cpu":
            return array
        stored = array.contiguous().reshape(-1).view(torch.uint8)
        found = torch.empty(len(stored), dtype=torch.uint8, device=self.device)
        at = 0
        while at < len(stored):
            room = self._room()
            count = min(len(room), len(stored) - at)
            room[:count].copy_(stored[at : at + count])  # by all of torch's threads
            found[at : at + count].copy_(room[:count], non_blocking=True)
            self._used += -(-count // _ALIGNMENT) * _ALIGNMENT
            at += count
        return found.view(array.dtype).view(array.shape)

    def _room(self) -> Tensor:
        """What is left of the piece in use, or the other piece once what lay in it has been sent."""
        if not self._pieces:
            self._pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        if self._used >= PIECE_BYTES:
            sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.record(torch.cuda.current_stream(self.device))
            self._sent[self._now] = sent
            self._now, self._used = 1 - self._now, 0
            if (before := self._sent[self._now]) is not None:
                before.synchronize()
        return self._pieces[self._now][self._used :]
