"""What healing learns from: the original's hidden states before its head, kept between epochs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nstf_convert.streamed import StreamedModel

# Windows of tokens: ids [1, tokens] each.
Batch = Sequence[Tensor]

# Teacher states kept between epochs.
CACHE_BYTES = 256 << 20


def batch_of(windows: Sequence[Tensor], seed: int, step: int, per_step: int, steps: int = 1) -> Batch:
    """The windows of some steps: every epoch in an order of its own."""
    out = []
    for position in range(step * per_step, (step + steps) * per_step):
        epoch, place = divmod(position, len(windows))
        generator = torch.Generator().manual_seed(seed * 1009 + epoch)
        out.append(windows[int(torch.randperm(len(windows), generator=generator)[place])])
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
        self._cache: dict[bytes, Tensor] = {}

    @torch.no_grad()
    def of(self, batch: Batch, ahead: Batch = ()) -> Tensor:
        """[tokens, hidden] of a batch.

        Computed together with that of the windows `ahead`, since reading the original's weights takes as long as using
        them.
        """
        wanted = {_name(ids) for ids in batch}
        missing = {n: ids for ids in [*batch, *ahead] if (n := _name(ids)) not in self._cache}
        if wanted & missing.keys():
            with self._arithmetic():
                states = self.teacher.hidden(torch.cat(list(missing.values())).to(self.device))
            for name, state in zip(missing, states, strict=True):
                self._cache[name] = state.cpu()
            room = max(len(missing) + len(batch), self._bytes // (states[0].numel() * states.element_size()))
            while len(self._cache) > room:
                self._cache.pop(next(n for n in self._cache if n not in missing and n not in wanted))
        return torch.cat([self._cache[_name(ids)].to(self.device) for ids in batch])


def _name(ids: Tensor) -> bytes:
    return ids.numpy().tobytes()
