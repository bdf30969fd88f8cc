"""Rows, and parts along the first axis, taken without decoding the rest."""

from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.kernels.formats import EncodedTensor, check, decode
from nstf.kernels.torch.rows import decode_rows, expert, row_wise, take


def matrices(samples: ModuleType) -> dict[str, Any]:
    leaf, node = samples.leaf, samples.node
    dense = leaf("dense", dtype="float32")
    view = (3, 4, 4, 6)
    return {
        "int": leaf("int", bits=3, group=8, symmetric=False, scale_bits=8),
        "grid": leaf("grid", group=8),
        "fp8": leaf("fp8"),
        "mxfp4": leaf("mxfp4"),
        "dense": dense,
        "low_rank": node("low_rank", {"a": leaf("int", bits=4, group=0), "b": dense}, rank=5),
        "add": node("add", {"x": leaf("int", bits=2, group=8), "y": dense}),
        "cp": node("cp", {f"factor{i}": dense for i in range(4)}, rank=3, view=view),
        "tucker": node(
            "tucker", {"core": dense, "factor1": dense, "factor3": dense}, ranks=(3, 2, 4, 3), view=view
        ),
        "tensor_train": node(
            "tensor_train", {f"core{i}": dense for i in range(4)}, ranks=(2, 3, 4), view=view
        ),
        "permute": node("permute", {"x": leaf("int", bits=4, group=8)}, dims=(1, 0)),
    }


def test_rows_are_those_of_the_decoded_tensor(samples: ModuleType) -> None:
    for name, tree in matrices(samples).items():
        encoded = samples.random_encoded(tree, (12, 24))
        weight = decode(encoded)
        for rows in (torch.tensor([0, 5, 5, 11]), torch.tensor([7]), slice(2, 5), slice(0, 12)):
            assert torch.allclose(decode_rows(encoded, rows), weight[rows], atol=1e-4), (name, rows)
        assert row_wise(encoded) == (name != "permute")


def test_only_the_rows_asked_for_are_decoded(samples: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf.kernels.formats import bitpack

    seen = []
    unpack = bitpack.unpack

    def watched(packed: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
        seen.append(len(packed))
        return unpack(packed, bits, cols)

    monkeypatch.setattr(bitpack, "unpack", watched)
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32), (1000, 64))
    decode_rows(encoded, torch.tensor([3, 999]))
    assert seen == [2]


def stacks(samples: ModuleType) -> dict[str, Any]:
    leaf, node = samples.leaf, samples.node
    dense = leaf("dense", dtype="float32")
    int4 = leaf("int", bits=4, group=8, lead=2)
    return {
        "int": int4,
        "dense": dense,
        "permute": node("permute", {"x": int4}, dims=(0, 2, 1)),
        "low_rank": node("low_rank", {"a": leaf("int", bits=8), "b": dense}, rank=3, lead=2),
        "add": node("add", {"x": int4, "y": node("low_rank", {"a": dense, "b": dense}, rank=3, lead=2)}),
    }


def test_one_expert_of_a_stack_stays_encoded(samples: ModuleType) -> None:
    for name, tree in stacks(samples).items():
        encoded = samples.random_encoded(tree, (4, 12, 24))
        weight = decode(encoded)
        for index in (0, 3):
            part = take(encoded, index)
            assert part is not None, name
            check(part)
            assert torch.allclose(decode(part), weight[index], atol=1e-5), name
        rows = torch.tensor([3, 1])
        assert torch.allclose(decode_rows(encoded, rows), weight[rows], atol=1e-5), name
        assert expert(encoded, 2) is expert(encoded, 2)


def test_one_expert_of_trellis_codes_stays_encoded(samples: ModuleType) -> None:
    codes = samples.leaf("trellis", quarter_bits=(10,), lead=2)
    tree = samples.node("rotated", {"x": codes}, block_in=32, lead=2)
    for shape, whole in (
        ((4, 32, 64), True),
        ((4, 24, 64), False),
    ):  # tiles have 16 rows, of one expert or of two
        encoded = samples.random_encoded(tree, shape)
        for index in (0, 3):
            part = expert(encoded, index)
            assert (part is not None) == whole
            if part is not None:
                check(part)
                assert torch.allclose(decode(part), decode(encoded)[index], atol=1e-5)
    turned = samples.node("rotated", {"x": codes}, block_in=32, block_out=32, lead=2)
    assert take(samples.random_encoded(turned, (4, 32, 64)), 0) is None


@pytest.mark.parametrize("scale_bits", [8, 16])
def test_experts_that_share_a_matrix_stay_encoded(samples: ModuleType, scale_bits: int) -> None:
    shared = samples.leaf("int", bits=4, group=8, scale_bits=scale_bits, lead=2)
    numbers = samples.leaf("int", bits=4, group=8)
    whole = {"ranks": (1, 12, 24), "view": (4, 12, 24)}
    tree = samples.node("tucker", {"core": shared, "factor0": numbers}, **whole)
    both = samples.node("add", {"x": samples.leaf("int", bits=2, group=8, lead=2), "y": tree})
    for node in (tree, both):
        encoded = samples.random_encoded(node, (4, 12, 24))
        for index in range(4):
            part = expert(encoded, index)
            assert part is not None
            check(part)
            wanted = decode(encoded)[index]
            assert float((decode(part) - wanted).norm()) <= 1e-3 * float(wanted.norm())  # float16's rounding
    # Of other cores nothing can be taken apart.
    cut = samples.node("tucker", {"core": shared, "factor0": numbers}, **{**whole, "ranks": (2, 12, 24)})
    assert take(samples.random_encoded(cut, (4, 12, 24)), 0) is None


@pytest.mark.parametrize("factor", [2.0**-17, 2.0**20])
def test_an_expert_whose_scales_float16_does_not_hold_is_not_taken_apart(
    samples: ModuleType, factor: float
) -> None:
    core = samples.leaf("int", bits=4, group=8, lead=2)
    tree = samples.node(
        "tucker", {"core": core, "factor0": samples.leaf("dense", dtype="float32")},
        ranks=(1, 12, 24), view=(4, 12, 24),
    )  # fmt: skip
    encoded = samples.random_encoded(tree, (4, 12, 24))
    arrays = {**encoded.arrays, "factor0.values": encoded.arrays["factor0.values"] * factor}
    extreme = EncodedTensor(encoded.tree, encoded.shape, arrays)
    assert take(encoded, 1) is not None and take(extreme, 1) is None
    wanted = decode(extreme)[1]
    assert torch.equal(decode_rows(extreme, slice(1, 2))[0], wanted) and bool(wanted.isfinite().all())


def test_a_part_that_the_encoding_does_not_have_is_none(samples: ModuleType) -> None:
    flat = samples.random_encoded(samples.leaf("int", bits=4, group=8, lead=1), (4, 12, 24))
    dense = samples.leaf("dense", dtype="float32")
    wide = samples.node("low_rank", {"a": dense, "b": dense}, rank=20, lead=2)
    assert take(flat, 0) is None
    assert take(samples.random_encoded(wide, (4, 12, 24)), 0) is None
    assert take(flat, 4) is None
