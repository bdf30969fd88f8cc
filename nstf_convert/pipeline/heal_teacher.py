"""What healing learns from: the original's hidden states before its head, kept between epochs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nstf_convert.streamed import StreamedModel

# Windows by number: (number, ids [1, tokens]).
Batch = Sequence[tuple[int, Tensor]]

# Teacher states kept between epochs.
CACHE_BYTES = 256 << 20


def batch_of(windows: Sequence[Tensor], seed: int, step: int, per_step: int, steps: int = 1) -> Batch:
    """(number, ids [1, tokens]) of the windows of some steps: every epoch in an order of its own."""
    out = []
    for position in range(step * per_step, (step + steps) * per_step):
        epoch, place = divmod(position, len(windows))
        generator = torch.Generator().manual_seed(seed * 1009 + epoch)
        number = int(torch.randperm(len(windows), generator=generator)[place])
        out.append((number, windows[number]))
    return out


class Targets:
    """What the original's head reads for the tokens of a batch, computed once per window where memory allows."""

    def __init__(
        self,
        teacher: StreamedModel,
        device: torch.device,
        arithmetic: Callable[[], AbstractContextManager[Any]],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """arithmetic: the autocast the original runs under, if any."""
        self.teacher, self.device, self._arithmetic = teacher, device, arithmetic
        self._bytes = cache_bytes
        self._cache: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Forgets all states."""
        self._cache.clear()

    @torch.no_grad()
    def of(self, batch: Batch, ahead: Batch = ()) -> Tensor:
        """[tokens, hidden] of a batch.

        Computed together with that of the windows `ahead`, since reading the original's weights takes as long as using
        them.
        """
        missing = {n: ids for n, ids in [*batch, *ahead] if n not in self._cache}
        if any(n in missing for n, _ in batch):
            with self._arithmetic():
                states = self.teacher.hidden(torch.cat(list(missing.values())).to(self.device))
            size = states[0].numel() * states.element_size()
            for number, state in zip(missing, states, strict=True):
                self._cache[number] = state.cpu()
            while len(self._cache) > max(len(missing) + len(batch), self._bytes // size):
                self._cache.pop(
                    next(n for n in self._cache if n not in missing and all(n != m for m, _ in batch))
                )
        return torch.cat([self._cache[n].to(self.device) for n, _ in batch])
