"""What healing tunes: the continuous values of encoded tensors, as offsets from where they start."""

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nstf.kernels.formats import EncodedTensor
from nstf.kernels.formats.tuning import is_scale, retuned, tunable, units, with_units
from nstf_convert.pipeline.propose.units import Unit

# Kept tensors above this are not vectors of a layer but data of their own.
LARGEST_KEPT = 1 << 16


def tuned_paths(unit: Unit, encoded: EncodedTensor) -> list[str]:
    """The values of a tensor that healing may change.

    Everything continuous that comes with codes or in factors. Of tensors that are kept, vectors in a floating type:
    norms, biases; a router decides between experts and stays.
    """
    if encoded.tree.kind != "dense":
        return sorted(tunable(encoded))
    vector = len(encoded.shape) == 1 and encoded.arrays["values"].numel() <= LARGEST_KEPT
    return sorted(tunable(encoded)) if vector and unit.role != "router" else []


class TunedValues:
    """Offsets of all tuned values: zero is the start. Scales move by factors, everything else by differences.

    A scale is s0 exp(row + own): the row's offset is shared by all its groups, so that a whole row moves as easily as one
    group. Any other value is v0 + rms(v0) own. Codes, where they are tuned, are round(c0 + own) in every step; the gradient
    passes the rounding unchanged.
    """

    def __init__(
        self,
        known: Mapping[str, Unit],
        encoded: Mapping[str, EncodedTensor],
        device: torch.device,
        codes: bool = False,
        constant: Container[str] = (),
    ) -> None:
        """codes: whole numbers are tuned as well. constant: names of tensors that stay as they are."""
        self._encoded: dict[str, EncodedTensor] = {}
        self._start: dict[tuple[str, str], Tensor] = {}
        self._own: dict[tuple[str, str], nn.Parameter] = {}
        self._row: dict[tuple[str, str], nn.Parameter] = {}
        self._constant: dict[str, dict[str, Tensor]] = {}
        self._paths: dict[str, list[str]] = {}
        self._codes: dict[tuple[str, str], nn.Parameter] = {}
        self._units: dict[tuple[str, str], tuple[Tensor, Tensor, int]] = {}
        for name, one in encoded.items():
            moved = EncodedTensor(one.tree, one.shape, {k: a.to(device) for k, a in one.arrays.items()})
            values = tunable(moved)
            self._encoded[name] = moved
            self._constant[name] = values
            self._paths[name] = [] if name in constant else tuned_paths(known[name], one)
            for path, found in units(moved).items() if codes else ():
                self._units[name, path] = found
                self._codes[name, path] = nn.Parameter(torch.zeros_like(found[0]))
            for path in self._paths[name]:
                start = values[path]
                self._start[name, path] = start
                self._own[name, path] = nn.Parameter(torch.zeros_like(start))
                if is_scale(path) and start.ndim == 2 and start.shape[1] > 1:
                    self._row[name, path] = nn.Parameter(torch.zeros_like(start[:, :1]))

    @property
    def count(self) -> int:
        """How many values are tuned."""
        return sum(v.numel() for v in (*self._start.values(), *self._codes.values()))

    def groups(
        self, scale_rate: float, row_rate: float, value_rate: float, code_rate: float
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser, each with its learning rate."""
        scales = [p for (_, path), p in self._own.items() if is_scale(path)]
        others = [p for (_, path), p in self._own.items() if not is_scale(path)]
        rows, codes = list(self._row.values()), list(self._codes.values())
        given = ((scales, scale_rate), (rows, row_rate), (others, value_rate), (codes, code_rate))
        return [{"params": p, "lr": rate} for p, rate in given if p]

    def parameters(self) -> Iterator[nn.Parameter]:
        """All offsets, in a fixed order."""
        yield from self._own.values()
        yield from self._row.values()
        yield from self._codes.values()

    def current(self) -> dict[str, dict[str, Tensor]]:
        """The values by name and path, rounded to what can be stored; gradients pass the rounding unchanged."""
        out: dict[str, dict[str, Tensor]] = {}
        for name in self._encoded:
            exact = self._exact(name)
            out[name] = dict(self._constant[name])
            if exact:
                with torch.no_grad():
                    stored = tunable(retuned(self._encoded[name], exact))
                out[name] |= {path: v + (stored[path] - v).detach() for path, v in exact.items()}
        for (name, path), (start, *_) in self._units.items():
            v = start + self._codes[name, path]
            out[name][path] = v + (self._whole(name, path) - v).detach()
        return out

    @torch.no_grad()
    def _whole(self, name: str, path: str) -> Tensor:
        """Codes that can be stored."""
        start, least, steps = self._units[name, path]
        return (start + self._codes[name, path]).round().clamp(least, least + steps)

    @torch.no_grad()
    def encoded(self) -> dict[str, EncodedTensor]:
        """The tensors that have tuned values as they would be stored now, on the CPU."""
        out = {}
        for name in sorted({n for n, _ in (*self._start, *self._units)}):
            one = retuned(self._encoded[name], self._exact(name))
            one = with_units(one, {p: self._whole(n, p) for n, p in self._units if n == name})
            out[name] = EncodedTensor(one.tree, one.shape, {k: a.cpu() for k, a in one.arrays.items()})
        return out

    def state(self) -> dict[str, Tensor]:
        """A copy of all offsets."""
        return {str(i): p.detach().cpu().clone() for i, p in enumerate(self.parameters())}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Sets the offsets to those of a `state`."""
        for i, p in enumerate(self.parameters()):
            p.copy_(state[str(i)])

    def _exact(self, name: str) -> dict[str, Tensor]:
        """The tuned values of a tensor before rounding."""
        out = {}
        for path in self._paths[name]:
            owner, own, start = name, self._own[name, path], self._start[name, path]
            if is_scale(path):
                row = self._row.get((owner, path))
                out[path] = start * torch.exp(own if row is None else own + row)
            else:
                size = start.square().mean().sqrt()
                out[path] = start + own * torch.where(size > 0, size, torch.ones_like(size))
        return out
