"""Every kernel of the registry against `decode`, over formats, shapes, dtypes and batches."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, decode, kinds
from nstf.kernels.linear import linear
from nstf.kernels.registry import choose, describe, kernels

CPU = torch.device("cpu")
SHAPES = ((1, 1), (5, 33), (16, 64), (13, 96), (24, 40))
BATCHES = (1, 2, 3, 17, 40)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def trees(samples: ModuleType, shape: tuple[int, int]) -> dict[str, Any]:
    """One or more trees of every kind for a matrix of this shape."""
    leaf, node = samples.leaf, samples.node
    dense, small = leaf("dense", dtype="float32"), leaf("int", bits=8, group=0)
    out, width = shape
    rank = min(3, out, width)
    found = {f"int{bits}": leaf("int", bits=bits, group=32) for bits in range(2, 9)}
    found |= {
        "int4_row": leaf("int", bits=4, group=0),
        "int4_odd_group": leaf("int", bits=4, group=8),
        "int3_asymmetric": leaf("int", bits=3, group=32, symmetric=False, scale_bits=8),
        "int8_asymmetric": leaf("int", bits=8, group=64, symmetric=False),
        "grid": leaf("grid", group=32),
        "grid_row": leaf("grid", group=0, scale_bits=8),
        "fp8": leaf("fp8"),
        "fp8_fnuz": leaf("fp8", variant="e4m3fnuz", group=32, scale_bits=32),
        "mxfp4": leaf("mxfp4"),
        "trellis": leaf("trellis", quarter_bits=(10,)),
        "trellis_16_bit_scales": leaf("trellis", quarter_bits=(17,), scale_bits=16),
        "shuffle": leaf("shuffle", quarter_bits=14),
        "shuffle_16_bit_scales": leaf("shuffle", quarter_bits=17, scale_bits=16),
        "rotated": node(
            "rotated", {"x": leaf("trellis", quarter_bits=(8,))}, block_in=32 if width % 32 == 0 else 0
        ),
        "dense": dense,
        "dense_bfloat16": leaf("dense", dtype="bfloat16"),
        "low_rank": node("low_rank", {"a": small, "b": leaf("int", bits=4, group=32)}, rank=rank),
        "add": node(
            "add",
            {"x": leaf("int", bits=2, group=32), "y": node("low_rank", {"a": dense, "b": dense}, rank=rank)},
        ),
        "permute": node("permute", {"x": leaf("int", bits=4, group=32)}, dims=(1, 0)),
    }
    if out % 4 == 0 and width % 4 == 0:
        view = (4, out // 4, 4, width // 4)
        ranks = (2, min(3, view[1]), 2, min(3, view[3]))
        mixed = (2, view[1], 4, min(3, view[3]))
        found |= {
            "cp": node("cp", {f"factor{i}": dense for i in range(4)}, rank=3, view=view),
            "cp_packed": node(
                "cp", {**{f"factor{i}": dense for i in range(3)}, "factor3": small}, rank=3, view=view
            ),
            "tucker": node(
                "tucker",
                {"core": small, **{f"factor{i}": dense for i in range(4) if ranks[i] < view[i]}},
                ranks=ranks,
                view=view,
            ),
            "tucker_partial": node(
                "tucker",
                {"core": dense, **{f"factor{i}": dense for i in range(4) if mixed[i] < view[i]}},
                ranks=mixed,
                view=view,
            ),
            "tensor_train": node(
                "tensor_train", {f"core{i}": dense for i in range(4)}, ranks=(2, 3, 2), view=view
            ),
            "tensor_train_across": node(
                "tensor_train",
                {f"core{i}": dense for i in range(2)},
                ranks=(3,),
                view=(out * 2, width // 2),
            ),
        }
    return found


def relative_error(y: Tensor, x: Tensor, weight: Tensor) -> float:
    """The largest error relative to the sum of absolute products: what rounding is measured against."""
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    return float(((y.double() - exact).abs() / size.clamp_min(1e-30)).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_gives_what_decode_says(samples: ModuleType, shape: tuple[int, int]) -> None:
    used = set()
    for name, tree in trees(samples, shape).items():
        encoded = samples.random_encoded(tree, shape)
        weight = decode(encoded)
        for kernel in kernels():
            if kernel.FORMATS and tree.kind not in kernel.FORMATS:
                continue
            for batch in BATCHES:
                if not kernel.supports(encoded, CPU, batch):
                    continue
                used.add(kernel.NAME)
                for dtype in DTYPES if batch in (1, 40) else DTYPES[:1]:
                    x = torch.randn(batch, shape[1], generator=torch.Generator().manual_seed(batch)).to(dtype)
                    y = kernel.matmul(x, encoded)
                    assert y.shape == (batch, shape[0]) and y.dtype == dtype
                    # A cast of every weight and result to 8 bits of mantissa, a few roundings deep.
                    limit = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
                    error = relative_error(y, x, weight)
                    assert error < limit, (kernel.NAME, name, batch, dtype, error)
    on_cpu = {kernel.NAME for kernel in kernels() if not kernel.NAME.startswith("triton.")}
    assert used == on_cpu or shape in ((1, 1), (5, 33), (13, 96))


def test_the_formats_tried_here_are_all_there_are(samples: ModuleType) -> None:
    tried = {tree.kind for tree in trees(samples, (16, 64)).values()}
    assert tried >= set(kinds()) - {"shared"}


def test_linear_keeps_leading_axes_and_adds_the_bias(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32), (16, 64))
    x, bias = torch.randn(2, 3, 64), torch.randn(16)
    expected = torch.nn.functional.linear(x, decode(encoded), bias)
    assert torch.allclose(linear(x, encoded, bias), expected, atol=1e-3, rtol=1e-4)
    assert linear(x[:0], encoded).shape == (0, 3, 16)
    assert linear(x[0, 0], encoded).shape == (16,)


def test_shapes_that_do_not_fit_are_refused_with_both_shapes(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32), (16, 64))
    with pytest.raises(ValueError, match=r"\[2, 63\] do not fit an encoded matrix \[16, 64\]"):
        linear(torch.randn(2, 63), encoded)


def test_describe_names_the_kernel_that_runs(samples: ModuleType) -> None:
    dense = samples.random_encoded(samples.leaf("dense", dtype="float32"), (16, 64))
    thin = samples.node("low_rank", {"a": dense.tree, "b": dense.tree}, rank=2)
    assert describe(dense) == "torch.reference"
    assert describe(samples.random_encoded(thin, (16, 64))) == "torch.structured"
    assert describe(samples.random_encoded(samples.leaf("mxfp4"), (16, 64)), "meta") == "torch.reference"


def test_a_chain_that_costs_more_than_the_matrix_is_left_to_the_reference(samples: ModuleType) -> None:
    dense = samples.leaf("dense", dtype="float32")
    wide = samples.random_encoded(samples.node("low_rank", {"a": dense, "b": dense}, rank=60), (64, 64))
    assert describe(wide, batch=1) == "torch.structured"
    assert describe(wide, batch=1000) == "torch.reference"


def test_a_big_matrix_is_decoded_in_blocks(samples: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf.kernels.torch import reference, structured

    monkeypatch.setattr(reference, "BLOCK_NUMEL", 200)
    monkeypatch.setattr(structured, "BLOCK_NUMEL", 200)
    x = torch.randn(3, 64)
    for tree in (samples.leaf("int", bits=3, group=8), samples.leaf("dense", dtype="float32")):
        encoded = samples.random_encoded(tree, (17, 64))
        assert relative_error(reference.matmul(x, encoded), x, decode(encoded)) < 4e-6
    turned = samples.node("permute", {"x": samples.leaf("int", bits=3, group=8)}, dims=(1, 0))
    encoded = samples.random_encoded(turned, (17, 64))
    assert relative_error(structured.matmul(x, encoded), x, decode(encoded)) < 4e-6


def test_fp8_codes_that_mean_nan_stay_nan(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("fp8"), (16, 64))
    encoded.arrays["codes"][3, 5] = 0x7F
    assert describe(encoded) == "torch.reference"
    y = linear(torch.ones(1, 64), encoded)
    assert y.isnan().nonzero().tolist() == [[0, 3]]


def test_without_the_extension_the_reference_runs(
    samples: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf.kernels import registry
    from nstf.kernels.cpu import packed_linear

    monkeypatch.setattr(packed_linear, "ext", None)
    registry.kernels.cache_clear()
    try:
        encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32), (16, 64))
        assert choose(encoded, CPU, 1).NAME == "torch.reference"
        assert relative_error(linear(torch.ones(1, 64), encoded), torch.ones(1, 64), decode(encoded)) < 4e-6
    finally:
        registry.kernels.cache_clear()


def test_what_is_remembered_of_a_tensor_goes_with_it(samples: ModuleType) -> None:
    from nstf.kernels.memo import per_encoded

    calls = []

    def count(encoded: EncodedTensor) -> int:
        calls.append(encoded.shape)
        return len(calls)

    remembered = per_encoded(count)
    first = samples.random_encoded(samples.leaf("mxfp4"), (2, 32))
    second = samples.random_encoded(samples.leaf("mxfp4"), (2, 32))
    assert [remembered(first), remembered(first), remembered(second), remembered(first)] == [1, 1, 2, 1]
    cells = remembered.__closure__ or ()
    known = next(c.cell_contents for c in cells if isinstance(c.cell_contents, dict))
    assert len(known) == 2
    del first
    assert len(known) == 1
