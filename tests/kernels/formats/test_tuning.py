"""Tuning: scales, tables and dense factors may change, codes and bytes may not."""

import pytest
import torch

from nstf.kernels.formats import EncodedTensor, Node, array_specs, bitpack, check, decode
from nstf.kernels.formats.scales import narrow
from nstf.kernels.formats.tree import format_of
from nstf.kernels.formats.tuning import is_scale, prepare, retuned, tunable


def node(kind, *args, **children) -> Node:
    return Node(kind, format_of(kind).Params(*args), children)


TREES = {
    "int symmetric": (node("int", 3, 16, True, 16), (6, 40)),
    "int asymmetric, 8-bit scales": (node("int", 4, 16, False, 8), (6, 40)),
    "int of whole rows": (node("int", 8, 0, True, 16), (5, 24)),
    "int with two leading axes": (node("int", 2, 8, True, 8, 2), (2, 3, 16)),
    "fp8": (node("fp8", "e4m3fn", 8, 32), (4, 24)),
    "grid": (node("grid", 16, 8, 16), (4, 20)),
    "grid, 8-bit scales": (node("grid", 16, 8, 8), (4, 20)),
    "dense": (node("dense", "bfloat16"), (7,)),
    "mxfp4": (node("mxfp4"), (4, 32)),
    "low rank": (
        node("low_rank", 2, a=node("dense", "float16"), b=node("int", 4, 8, True, 16)),
        (6, 16),
    ),
    "permuted sum": (
        node(
            "permute", (1, 0),
            x=node("add", x=node("int", 2, 8, True, 8), y=node("low_rank", 1, a=node("dense"), b=node("dense"))),
        ),
        (16, 6),
    ),
    "trellis": (node("trellis", (10,), (), 16), (16, 32)),
    "rotated trellis, 8-bit scales": (
        node("rotated", 32, 0, 3, x=node("trellis", (12, 8), (10, 8), 8)),
        (18, 32),
    ),
    "shuffle": (node("shuffle", 12, 16), (40, 70)),
    "rotated shuffle, 8-bit scales": (node("rotated", 32, 0, 3, x=node("shuffle", 16, 8)), (18, 32)),
    "cp": (node("cp", 2, (4, 3, 2), **{f"factor{i}": node("dense") for i in range(3)}), (4, 6)),
}  # fmt: skip


def encoded(name: str) -> EncodedTensor:
    """Random arrays for a tree, scales and codes in their ranges."""
    tree, shape = TREES[name]
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for path, spec in array_specs(tree, shape).items():
        if spec.dtype == torch.uint8 and path.endswith("zeros"):
            groups = torch.full((spec.shape[0], 3), 7, dtype=torch.uint8)
            arrays[path] = bitpack.pack(groups, 4)
        elif path.endswith("section"):
            numbers = torch.tensor([[0] * 10 + [1] * 8], dtype=torch.uint8)
            arrays[path] = bitpack.pack(numbers, 1)[0]
        elif spec.dtype == torch.uint8:
            arrays[path] = torch.randint(0, 120, spec.shape, generator=generator, dtype=torch.uint8)
            if path.endswith("scale_codes"):
                arrays[path][..., 0] = 255
        else:
            arrays[path] = (torch.rand(spec.shape, generator=generator) + 0.5).to(spec.dtype)
            if tree.kind in ("shuffle", "trellis") and path == "scale":
                arrays[path] /= arrays[path].max()  # the largest is 1 under `scale_super`
    return EncodedTensor(tree, shape, arrays)


@pytest.mark.parametrize("name", TREES)
def test_stored_values_decode_to_the_tensor_itself(name) -> None:
    one = encoded(name)
    assert torch.allclose(prepare(one).decode(tunable(one)), decode(one), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", TREES)
def test_retuning_with_the_stored_values_changes_no_byte(name) -> None:
    one = encoded(name)
    same = retuned(one, tunable(one))
    check(same)
    assert all(torch.equal(same.arrays[k], one.arrays[k]) for k in one.arrays)


@pytest.mark.parametrize("name", [n for n in TREES if n != "mxfp4"])
def test_other_values_are_stored_in_the_same_bytes_and_come_back_rounded(name) -> None:
    one = encoded(name)
    wanted = {
        k: v * (1 + 0.05 * torch.sin(torch.arange(v.numel()).view_as(v))) for k, v in tunable(one).items()
    }
    other = retuned(one, wanted)
    check(other)
    assert other.size_bytes == one.size_bytes
    found = tunable(other)
    for path, value in wanted.items():
        assert torch.allclose(found[path], value, rtol=1.2e-2, atol=6e-3), path
        assert not torch.equal(found[path], tunable(one)[path])
    codes = [k for k in one.arrays if k.rpartition(".")[2] in ("codes", "zeros")]
    assert all(torch.equal(other.arrays[k], one.arrays[k]) for k in codes)
    assert torch.allclose(prepare(one).decode(found), decode(other), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [n for n in TREES if n != "mxfp4"])
def test_gradients_are_those_of_the_decoded_tensor(name) -> None:
    one = encoded(name)
    values = {k: v.clone().requires_grad_() for k, v in tunable(one).items()}
    prepared = prepare(one)
    out = prepared.decode(values)
    direction = torch.linspace(-1, 1, out.numel()).view_as(out)
    (out * direction).sum().backward()
    for path, value in values.items():
        step = torch.zeros_like(value)
        step.view(-1)[-1] = 1e-2
        with torch.no_grad():
            up, down = (prepared.decode({**values, path: value + sign * step}) for sign in (1, -1))
        slope = float(((up - down) * direction).double().sum()) / 2e-2
        assert float(value.grad.view(-1)[-1]) == pytest.approx(slope, rel=5e-3, abs=5e-3), path


def test_partial_values_leave_the_rest() -> None:
    one = encoded("low rank")
    other = retuned(one, {"b.scale": tunable(one)["b.scale"] * 2})
    assert torch.equal(other.arrays["a.values"], one.arrays["a.values"])
    assert torch.allclose(decode(other), 2 * decode(one))


def test_a_row_of_zero_scales_stays_zero() -> None:
    one = encoded("int with two leading axes")
    values = tunable(one)
    values["scale"][1] = 0.0
    other = retuned(one, values)
    assert bool((tunable(other)["scale"][1] == 0).all())
    assert all(torch.equal(a, other.arrays[k]) for k, a in retuned(other, tunable(other)).arrays.items())


def test_units_are_kept_narrow() -> None:
    assert narrow(torch.tensor([[-4.0, 3.0]])).dtype == torch.int8
    assert narrow(torch.tensor([[0.5, 1.25]])).dtype == torch.float16
    assert narrow(torch.tensor([[1e-7, 1.0]])).dtype == torch.float32


def test_scales_are_told_from_values() -> None:
    assert is_scale("scale") and is_scale("x.scale") and not is_scale("a.values") and not is_scale("table")
