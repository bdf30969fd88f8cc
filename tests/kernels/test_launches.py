"""What is compiled ahead is what runs: every launch of the Triton kernels, caught on a CPU before it is compiled.

Each launch must be one of `specs_for` (launches.py), or a server would compile again what it was given. What a captured
step of decoding launches is in tests/runtime/test_graph_launches.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
from diagonal import diagonal
from launches import catching, compiled_facts, differing, forget, pretend

from nstf.kernels.triton import linear, tuner
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.spec import specs_for

SHAPES = ((384, 512), (1000, 384))
BATCHES = (1, 3, 8, 16, 100, 600)


def trees(samples: Any, rows: int) -> dict[str, Any]:
    leaf, node = samples.leaf, samples.node
    trellis = leaf("trellis", quarter_bits=(10,))
    factors = {"a": leaf("dense", dtype="float16"), "b": leaf("dense", dtype="float16")}
    low_rank = node("low_rank", factors, rank=32)
    packed = {"a": leaf("int", bits=8, group=32), "b": leaf("int", bits=8, group=64)}
    view = (8, rows // 8, 16, 24 if rows == 1000 else 32)
    cores = {f"core{i}": leaf("dense", dtype="float32") for i in range(4)}
    tucker = {name: leaf("int", bits=8, group=0) for name in ("core", "factor1", "factor2")}
    return {
        "low rank": low_rank,
        "int8 and packed low rank": node(
            "add", {"x": leaf("int", bits=8, group=64), "y": node("low_rank", packed, rank=32)}
        ),
        "grid and low rank": node("add", {"x": leaf("grid", group=64), "y": low_rank}),
        "low rank tensor train": node("tensor_train", cores, ranks=(8, 48, 16), view=view),
        "low rank tucker": node("tucker", tucker, ranks=(8, 5, 2, view[3]), view=view),
        "int4 and low rank": node("add", {"x": leaf("int", bits=4, group=128), "y": low_rank}),
        "int4": leaf("int", bits=4, group=128),
        "int4 with zeros": leaf("int", bits=4, group=64, symmetric=False),
        "int3": leaf("int", bits=3, group=32),
        "int8 in steps": leaf("int", bits=8, group=64, scale_bits=8),
        "fp8": leaf("fp8"),
        "mxfp4": leaf("mxfp4"),
        "shuffle": leaf("shuffle", quarter_bits=14),
        "trellis": trellis,
        "rotated int4": node("rotated", {"x": leaf("int", bits=4, group=128)}, block_in=128, seed=3),
        "rotated trellis": node(
            "rotated", {"x": trellis}, block_in=128, block_out=0 if rows % 128 else 128, seed=3
        ),
    }


NAMES = (
    "int4",
    "int4 with zeros",
    "int3",
    "int8 in steps",
    "fp8",
    "mxfp4",
    "shuffle",
    "trellis",
    "rotated int4",
    "rotated trellis",
    "low rank",
    "int4 and low rank",
    "int8 and packed low rank",
    "grid and low rank",
    "low rank tensor train",
    "low rank tucker",
)


@pytest.fixture
def caught() -> Iterator[list[dict[str, Any]]]:
    with catching() as found:
        yield found


@pytest.mark.parametrize(
    ("name", "target", "dtype", "shape"),
    diagonal(NAMES, ARCHITECTURES, (torch.float16, torch.bfloat16), SHAPES),
)
def test_every_launch_is_one_that_was_compiled_ahead(
    name: str,
    target: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    samples: Any,
    caught: list[dict[str, Any]],
) -> None:
    row = ARCHITECTURES[target]
    encoded = samples.random_encoded(trees(samples, shape[0])[name], shape)
    for batch in BATCHES:
        ahead = specs_for(encoded, shape, batch, dtype, target)
        if "low rank" in name and batch > 8:
            continue  # the library's products
        assert ahead, "no kernel"
        pretend(row, ahead)
        caught.clear()
        x = torch.randn(batch, shape[1]).to(dtype)
        linear._matmul(x, encoded, target)
        expected = [compiled_facts(spec, row) for spec in ahead]
        forget(ahead)
        assert [launch["kernel"] for launch in caught] == [launch["kernel"] for launch in expected]
        for launch, compiled in zip(caught, expected, strict=True):
            assert differing(launch, compiled) == {}, f"batch {batch}"


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    "name", ["int4", "mxfp4", "shuffle", "trellis", "rotated int4", "rotated shuffle", "rotated sections"]
)
def test_every_look_up_of_rows_is_compiled_ahead(
    name: str, target: str, samples: Any, caught: list[dict[str, Any]]
) -> None:
    row, shape, leaf = ARCHITECTURES[target], (384, 512), samples.leaf
    known = trees(samples, 384) | {
        "rotated shuffle": samples.node("rotated", {"x": leaf("shuffle", quarter_bits=14)}, block_in=64),
        "rotated sections": samples.node(
            "rotated", {"x": leaf("trellis", quarter_bits=(10, 13), rows=(192, 192))}, block_in=128
        ),
    }
    encoded = samples.random_encoded(known[name], shape)
    if name == "rotated sections":
        encoded.arrays["x.section"].fill_(0b01010101)  # of as many rows as the tree says
    for count in (1, 2, 30, 64):
        ahead = linear.row_specs(encoded, count, torch.bfloat16, target)
        pretend(row, ahead)
        caught.clear()
        linear.read_rows(encoded, torch.zeros(count, dtype=torch.int64), torch.bfloat16, target)
        expected = [compiled_facts(spec, row) for spec in ahead]
        forget(ahead)
        assert expected and [a["kernel"] for a in caught] == [b["kernel"] for b in expected]
        for launch, compiled in zip(caught, expected, strict=True):
            assert differing(launch, compiled) == {}, f"{count} rows"


def test_what_no_kernel_looks_up_has_no_launches(samples: Any) -> None:
    both = samples.node("rotated", {"x": samples.leaf("int", bits=4)}, block_in=64, block_out=64)
    for tree in (both, trees(samples, 384)["low rank"], samples.leaf("dense", dtype="float16")):
        encoded = samples.random_encoded(tree, (384, 512))
        assert linear.row_specs(encoded, 1, torch.bfloat16, "sm_90") == []


def test_more_rows_than_a_grid_holds_are_turned_in_several_launches(
    samples: Any, caught: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """65,536 rows and more, as of a long prompt's table, were an invalid launch."""
    from nstf.kernels.triton import rotate

    monkeypatch.setattr(rotate, "_MOST_ROWS", 100)
    params = trees(samples, 384)["rotated int4"].params
    sizes = (100, 100, 50)
    ahead = [
        rotate.rotate_spec(rows, 512, 128, 2, torch.float32, torch.float16, False, "gfx942") for rows in sizes
    ]
    pretend(ARCHITECTURES["gfx942"], ahead)
    found = rotate.rotate(torch.zeros(250, 512), params, 2, torch.float16, "gfx942")
    forget(ahead)
    assert found.shape == (250, 512) and len(caught) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "split"),
    [
        *((name, 0) for name in ("int4", "int4 with zeros", "int3", "int8 in steps", "fp8", "mxfp4")),
        *(("rotated int4", 0), ("int4", 2), ("fp8", 3)),
    ],
)
def test_products_on_hopper_are_compiled_ahead(
    name: str,
    split: int,
    dtype: torch.dtype,
    samples: Any,
    caught: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper = pytest.importorskip("nstf.kernels.triton.hopper")
    monkeypatch.setattr(hopper, "_MIDDLE", 0)
    monkeypatch.setattr(hopper, "_split", lambda *_: split)
    monkeypatch.setattr(tuner, "packed_specs", tuner.packed_specs.__wrapped__)
    row, shape = ARCHITECTURES["sm_90"], (384, 1024)
    encoded = samples.random_encoded(trees(samples, shape[0])[name], shape)
    for batch in (100, 300):
        ahead = specs_for(encoded, shape, batch, dtype, "sm_90")
        assert ahead[-1].kind == "wgmma"
        pretend(row, ahead)
        caught.clear()
        linear._matmul(torch.randn(batch, shape[1]).to(dtype), encoded, "sm_90")
        expected = [compiled_facts(spec, row) for spec in ahead]
        forget(ahead)
        assert [launch["kernel"] for launch in caught] == [launch["kernel"] for launch in expected]
        for launch, compiled in zip(caught, expected, strict=True):
            assert differing(launch, compiled) == {}, f"batch {batch}"
