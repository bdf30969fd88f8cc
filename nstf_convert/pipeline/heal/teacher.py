"""What healing learns from: the original's hidden states before its head, kept between epochs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nstf_convert.streamed import StreamedModel

# Windows of tokens: ids [1, tokens] each.
Batch = Sequence[Tensor]
# Windows whose states are computed together, by name.
Together = dict[bytes, Tensor]

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
        # What is not computed yet has the windows that it is computed together with in its place.
        self._cache: dict[bytes, Tensor | Together] = {}
        self._each = 0  # bytes of a window's states

    def of(self, batch: Batch, ahead: Batch = ()) -> Tensor:
        """[tokens, hidden] of a batch.

        Computed together with that of the windows `ahead`, since reading the original's weights takes as long as using
        them.
        """
        self.pass_over(batch, ahead)
        return torch.cat([self._computed(_name(ids)).to(self.device) for ids in batch])

    def pass_over(self, batch: Batch, ahead: Batch = ()) -> None:
        """Notes what `of` computes together for a batch, as a run that was interrupted has done: with other windows beside
        it a window's states have other last bits."""
        wanted = {_name(ids) for ids in batch}
        missing = {n: ids for ids in [*batch, *ahead] if (n := _name(ids)) not in self._cache}
        if not wanted & missing.keys():
            return
        self._cache |= dict.fromkeys(missing, missing)
        if not self._each:
            self._each = self._computed(next(iter(missing))).nbytes
        room = max(len(missing) + len(batch), self._bytes // self._each)
        while len(self._cache) > room:
            self._cache.pop(next(n for n in self._cache if n not in missing and n not in wanted))

    @torch.no_grad()
    def _computed(self, name: bytes) -> Tensor:
        """[tokens, hidden] of a window in the cache."""
        found = self._cache[name]
        if isinstance(found, dict):
            with self._arithmetic():
                states = self.teacher.hidden(torch.cat(list(found.values())).to(self.device))
            for other, state in zip(found, states, strict=True):
                if self._cache.get(other) is found:
                    self._cache[other] = state.cpu()
            found = self._cache[name]
        assert isinstance(found, Tensor)
        return found


def _name(ids: Tensor) -> bytes:
    return ids.numpy().tobytes()
