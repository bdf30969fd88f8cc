"""ggml's blocks against the `gguf` package's own dequantisation."""

from typing import Any

import numpy as np
import pytest
import torch

from nstf import quantizers
from nstf.kernels.formats import decode
from nstf_convert.export import gguf_blocks as blocks

gguf = pytest.importorskip("gguf")


def encoded(kind: str, **params: Any) -> Any:
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    module: Any = quantizers.method(kind)
    return module.encode(weight, module.Params(**params))


CASES = [
    ("int_grid", {"bits": 2, "group": 32}, "Q4_0", "widened"),
    ("int_grid", {"bits": 4, "group": 32}, "Q4_0", "exact"),
    ("int_grid", {"bits": 4, "group": 64}, "Q4_0", "exact"),
    ("int_grid", {"bits": 3, "group": 32, "symmetric": False}, "Q4_0", "widened"),
    ("int_grid", {"bits": 4, "group": 0, "symmetric": False}, "Q5_0", "widened"),
    ("int_grid", {"bits": 5, "group": 128}, "Q5_0", "exact"),
    ("int_grid", {"bits": 6, "group": 32}, "Q8_0", "widened"),
    ("int_grid", {"bits": 8, "group": 32}, "Q8_0", "exact"),
    ("mxfp4", {}, "MXFP4", "exact"),
    ("int_grid", {"bits": 6, "group": 16, "scale_bits": 8, "steps": 128}, "Q6_K", "exact"),
    ("int_grid", {"bits": 6, "group": 32, "scale_bits": 8, "steps": 128}, "Q6_K", "widened"),
    (
        "int_grid",
        {"bits": 5, "group": 0, "symmetric": False, "scale_bits": 8, "steps": 128},
        "Q6_K",
        "widened",
    ),
]


@pytest.mark.parametrize(("kind", "params", "name", "said"), CASES)
def test_a_block_type_decodes_to_the_same_values(
    kind: str, params: dict[str, Any], name: str, said: str
) -> None:
    tensor = encoded(kind, **params)
    assert blocks.type_of(tensor, "float16") == (name, said)
    rows = blocks.pack(tensor, name)
    assert rows.nbytes == blocks.size_of(name, tensor.shape)
    found = gguf.dequantize(rows, gguf.GGMLQuantizationType[name])
    assert np.array_equal(found, decode(tensor).numpy())


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("int_grid", {"bits": 4, "group": 32, "scale_bits": 8}),
        ("grid16", {"group": 32}),
        ("int_grid", {"bits": 8, "group": 32, "symmetric": False}),
        ("int_grid", {"bits": 4, "group": 24}),
    ],
)
def test_what_no_block_holds_is_lossy_or_float32(kind: str, params: dict[str, Any]) -> None:
    tensor = encoded(kind, **params)
    assert blocks.type_of(tensor, "float16")[1] == "lossy"
    assert blocks.type_of(tensor, "float32") == ("F32", "widened")
    assert np.array_equal(blocks.pack(tensor, "F32"), decode(tensor).numpy())


def test_eight_bit_scales_are_rounded_to_float16_and_no_further() -> None:
    tensor = encoded("int_grid", bits=4, group=32, scale_bits=8)
    name, _ = blocks.type_of(tensor, "float16")
    found = gguf.dequantize(blocks.pack(tensor, name), gguf.GGMLQuantizationType[name])
    exact = decode(tensor).numpy()
    assert name == "Q4_0" and not np.array_equal(found, exact)
    assert np.all(np.abs(found - exact) <= np.abs(exact) * 2.0**-11)
