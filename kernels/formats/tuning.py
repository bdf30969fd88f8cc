"""Tuning what is continuous in an encoded tensor (scales, tables, dense factors) while its codes stay as they are.

A format takes part by four more names in its module; a leaf without them is constant, an inner node passes gradients on
through its `decode`:

    fixed(params, shape, arrays) -> {name: Tensor}            what tuning leaves alone, ready for decoding
    tunable(params, shape, arrays) -> {name: Tensor}          the continuous quantities, float32
    retuned(params, shape, arrays, values) -> arrays          the stored form, `values` rounded to what it can hold
    decode_tuned(params, shape, fixed, values, children)      `decode`, differentiable in `values` and `children`

Names inside a tree are paths, as for arrays: `scale` at the root, `a.scale` in child `a`.
"""

from __future__ import annotations

from collections.abc import Mapping

from nstf.kernels.formats.tree import EncodedTensor, Node, child_encoded, decode, format_of, join
from nstf.kernels.lazy import torch
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

Values = Mapping[str, "Tensor"]

# Quantities that multiply codes: they are tuned by factors. All others are tuned by differences.
SCALES = ("scale",)


def is_scale(path: str) -> bool:
    """Whether a tunable quantity multiplies codes."""
    return path.rpartition(".")[2] in SCALES


def tunable(encoded: EncodedTensor) -> dict[str, Tensor]:
    """The continuous quantities of a tensor, float32, by path; their values are those the file holds."""
    module = format_of(encoded.tree.kind)
    out: dict[str, Tensor] = {}
    if hasattr(module, "tunable"):
        out |= module.tunable(encoded.tree.params, encoded.shape, _own(encoded.arrays))
    for name in encoded.tree.children:
        out |= {join(name, key): v for key, v in tunable(child_encoded(encoded, name)).items()}
    return out


def retuned(encoded: EncodedTensor, values: Values) -> EncodedTensor:
    """The tensor with other continuous quantities, rounded to what it can hold; same tree, same bytes.

    values: as `tunable` gives them; those left out stay.
    """
    module = format_of(encoded.tree.kind)
    arrays = dict(encoded.arrays)
    own = _own(values)
    if own:
        before = module.tunable(encoded.tree.params, encoded.shape, _own(arrays))
        arrays |= module.retuned(encoded.tree.params, encoded.shape, _own(arrays), {**before, **own})
    for name in encoded.tree.children:
        child = retuned(child_encoded(encoded, name), _below(values, name))
        arrays |= {join(name, key): a for key, a in child.arrays.items()}
    return EncodedTensor(encoded.tree, encoded.shape, arrays)


def units(encoded: EncodedTensor) -> dict[str, tuple[Tensor, Tensor, int]]:
    """What scales multiply, of the leaves whose codes are whole numbers (`int`): (values, their least values, steps from
    the least to the most), float32 [rows, cols], by the path `units`. `Prepared.decode` is differentiable in them where
    they are among its values."""
    module = format_of(encoded.tree.kind)
    out: dict[str, tuple[Tensor, Tensor, int]] = {}
    if hasattr(module, "with_units"):
        params: Any = encoded.tree.params
        found, least = module.units(params, encoded.shape, _own(encoded.arrays))
        out["units"] = found, least, (1 << params.bits) - 1
    for name in encoded.tree.children:
        out |= {join(name, key): v for key, v in units(child_encoded(encoded, name)).items()}
    return out


def with_units(encoded: EncodedTensor, values: Values) -> EncodedTensor:
    """The tensor with other codes: `values` as `units` gives them, whole numbers; those left out stay."""
    arrays = dict(encoded.arrays)
    own = _own(values)
    if own:
        module = format_of(encoded.tree.kind)
        arrays |= module.with_units(encoded.tree.params, encoded.shape, _own(arrays), own["units"])
    for name in encoded.tree.children:
        child = with_units(child_encoded(encoded, name), _below(values, name))
        arrays |= {join(name, key): a for key, a in child.arrays.items()}
    return EncodedTensor(encoded.tree, encoded.shape, arrays)


@frozen
class Prepared:
    """An encoded tensor ready to be decoded many times with different values: what is fixed, by path, unpacked."""

    tree: Node
    shape: tuple[int, ...]
    fixed: Values

    def decode(self, values: Values) -> Tensor:
        """The dense tensor, float32, differentiable in `values` (all of `tunable`'s)."""
        return _decode(self.tree, self.shape, self.fixed, values)

    def widened(self) -> Prepared:
        """The same, decoding in float32 whatever it was prepared for."""
        low = torch.bfloat16
        return Prepared(
            self.tree, self.shape, {p: v.float() if v.dtype == low else v for p, v in self.fixed.items()}
        )

    def can_slice(self) -> bool:
        """Whether `rows` works: a leaf whose rows are those of the first axis, each with scales of its own."""
        return not self.tree.children and bool(self.fixed) and getattr(self.tree.params, "lead", 0) == 1

    def rows(self, values: Values, rows: Tensor) -> Tensor:
        """Some rows of the first axis without the others: int64 [n] -> [n, ...]. Only where `can_slice`."""

        def part(named: Values) -> dict[str, Tensor]:
            return {
                k: v[rows] if v.shape[0] == self.shape[0] and k != "table" else v for k, v in named.items()
            }

        return _decode(self.tree, (len(rows), *self.shape[1:]), part(self.fixed), part(values))


def prepare(
    encoded: EncodedTensor, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Prepared:
    """Unpacks the fixed part of a tensor once: one to four bytes a weight on `device`.

    dtype: bfloat16 keeps what scales multiply in it, to decode in it: faster, and as exact as its arithmetic; None is
    float32.
    """
    fixed = {path: value.to(device) for path, value in _fixed(encoded).items()}
    if dtype == torch.bfloat16:
        fixed = {p: v.to(dtype) if p.rpartition(".")[2] == "units" else v for p, v in fixed.items()}
    return Prepared(encoded.tree, encoded.shape, fixed)


def _fixed(encoded: EncodedTensor) -> dict[str, Tensor]:
    module = format_of(encoded.tree.kind)
    if hasattr(module, "decode_tuned"):
        out: dict[str, Tensor] = module.fixed(encoded.tree.params, encoded.shape, _own(encoded.arrays))
    elif not encoded.tree.children:
        return {"dense": decode(encoded)}
    else:
        out = _own(encoded.arrays)
    for name in encoded.tree.children:
        out = out | {join(name, key): v for key, v in _fixed(child_encoded(encoded, name)).items()}
    return out


def _decode(tree: Node, shape: tuple[int, ...], fixed: Values, values: Values) -> Tensor:
    module = format_of(tree.kind)
    shapes = module.children(tree.params, shape)
    children = {
        name: _decode(child, shapes[name], _below(fixed, name), _below(values, name))
        for name, child in tree.children.items()
    }
    if hasattr(module, "decode_tuned"):
        out: Tensor = module.decode_tuned(tree.params, shape, _own(fixed), _own(values), children)
    elif tree.children:
        out = module.decode(tree.params, shape, _own(fixed), children)
    else:
        out = fixed["dense"]
    return out.reshape(shape)


def _own(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in named.items() if "." not in key}


def _below(named: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    prefix = name + "."
    return {key[len(prefix) :]: value for key, value in named.items() if key.startswith(prefix)}
