"""Convolutions from codes against the decoded weight and the library's convolution, in every instruction set."""

import math
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nstf.kernels import convolution
from nstf.kernels.convolution import After, Geometry, convolve, multiplications
from nstf.kernels.cpu import convolution as cpu
from nstf.kernels.cpu import engine_matrix, ext
from nstf.kernels.formats import EncodedTensor, Node, decode

ISAS = [i for i in ext.isas() if i != "portable"] if engine_matrix.available() else []

# One int8 scale and zero point for each image: about a percent of the result on random images.
INT8_ERROR = 0.03

compiled = pytest.mark.skipif(not cpu.available(), reason="the extension was not built")


@pytest.fixture(params=ISAS or [""])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set with int8 products in turn."""
    if ext is None:
        yield ""
        return
    ext.use_isa(request.param)
    yield request.param
    ext.use_isa("")


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, own: Geometry) -> Tensor:
    top, bottom, left, right = own.padding
    padded = F.pad(x.double(), (left, right, top, bottom))
    added = None if bias is None else bias.double()
    return F.conv2d(padded, weight.double(), added, own.stride, 0, own.dilation, own.groups)


def error(y: Tensor, wanted: Tensor) -> float:
    assert y.shape == wanted.shape
    return float((y.double() - wanted).norm() / wanted.norm().clamp_min(1e-9))


def leaves(samples: ModuleType) -> dict[str, Node]:
    found = {
        f"int{bits} g{group} {symmetric}": samples.leaf(
            "int", bits=bits, group=group, symmetric=symmetric, scale_bits=8 if group else 16
        )
        for bits in range(2, 9)
        for group in (0, 32, 64, 96)
        for symmetric in (True, False)
    }
    found |= {f"grid g{g}": samples.leaf("grid", group=g, scale_bits=8 if g else 16) for g in (0, 32, 128)}
    return found | {f"shuffle {q}": samples.leaf("shuffle", quarter_bits=q) for q in (8, 13, 20)}


def drawn(random: random.Random) -> tuple[tuple[int, ...], tuple[int, ...], Geometry]:
    """(images, weight, geometry) of a moderate size."""
    kernel = random.choice([(1, 1), (3, 3), (1, 3), (5, 2), (7, 7)])
    stride = random.choice([(1, 1), (2, 2), (1, 2), (3, 1)])
    dilation = random.choice([(1, 1), (1, 1), (2, 1), (2, 3)])
    padding = (0, 0, 0, 0) if random.random() < 0.4 else tuple(random.randrange(3) for _ in range(4))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sides = [r + random.randrange(0, 14) for r in reach]
    groups = random.choice([1, 1, 1, 2])
    channels, out = random.choice([1, 3, 16, 21, 40]) * groups, random.choice([1, 5, 32, 37, 64]) * groups
    own = Geometry(stride, padding, dilation, groups)  # type: ignore[arg-type]
    return (random.choice([1, 2, 5]), channels, *sides), (out, channels // groups, *kernel), own


@compiled
def test_generated_shapes_and_formats(samples: ModuleType, isa: str) -> None:
    draw = random.Random(isa)
    trees = leaves(samples)
    for case, name in enumerate(trees):
        images, shape, own = drawn(draw)
        if name.startswith("shuffle"):
            own = Geometry(own.stride, own.padding, own.dilation)
            images = (images[0], shape[1], *images[2:])
        encoded = samples.random_encoded(trees[name], shape, case)
        # Groups that no kernel reads are decoded; the others must not be.
        x = torch.randn(images, generator=torch.Generator().manual_seed(case)) + 0.5
        x = x.contiguous(memory_format=torch.channels_last) if case % 2 else x
        bias = torch.randn(shape[0]) if case % 3 else None
        wanted = reference(x, decode(encoded), bias, own)
        found = error(convolve(x, encoded, bias, own), wanted)
        assert found < INT8_ERROR, (name, images, shape, own)
        assert error(convolve(x, encoded, bias, own, exact=True), wanted) < 1e-5
        assert (
            own.groups > 1
            or cpu.convolve(x, encoded, bias, own.stride, own.padding, own.dilation, 1) is not None
        )


@compiled
@pytest.mark.parametrize("threads", [1, 2])
def test_layout_batch_and_threads_do_not_change_the_values(
    samples: ModuleType, isa: str, threads: int
) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=64), (48, 24, 3, 3))
    x = torch.randn(3, 24, 17, 9).relu()
    own = Geometry((1, 1), (1, 1, 1, 1))
    whole = convolve(x, encoded, None, own)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        last = convolve(x.contiguous(memory_format=torch.channels_last), encoded, None, own)
        alone = convolve(x[1:2], encoded, None, own)
    finally:
        torch.set_num_threads(before)
    assert last.is_contiguous(memory_format=torch.channels_last) and whole.is_contiguous()
    assert torch.equal(last, whole) and torch.equal(alone, whole[1:2])


@compiled
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (7, 2)])
def test_a_weight_that_is_held_in_another_order_gives_the_same(
    samples: ModuleType, isa: str, kernel: tuple[int, int]
) -> None:
    """Small weights are unpacked once, in the order of an image with four channels side by side. One with the same rows over
    and over is too large for that."""
    own = Geometry((1, 2), (1, 0, 2, 1), (1, 2))
    for channels, tree in ((24, samples.leaf("int", bits=3, group=0)), (64, samples.leaf("grid", group=0))):
        shape = (48, channels, *kernel)
        encoded = samples.random_encoded(tree, shape)
        times = 1 + (200 << 10) // (48 * channels * math.prod(kernel))
        many = EncodedTensor(
            tree,
            (48 * times, *shape[1:]),
            {n: a if n == "table" else torch.cat([a] * times) for n, a in encoded.arrays.items()},
        )
        assert torch.equal(decode(many)[-48:], decode(encoded))
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(2, channels, 13, 21).contiguous(memory_format=layout)
            y = convolve(x, encoded, None, own)
            assert torch.equal(convolve(x, many, None, own)[:, -48:], y)


@compiled
def test_an_image_that_is_not_finite_spoils_no_other(samples: ModuleType, isa: str) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=8, group=0), (32, 16, 1, 1))
    x = torch.randn(3, 16, 5, 5)
    clean = convolve(x, encoded)
    for value in (float("nan"), float("inf")):
        x[1, 3, 2, 2] = value
        y = convolve(x, encoded)
        assert y[1].isnan().all() and torch.equal(y[0], clean[0]) and torch.equal(y[2], clean[2])
    assert torch.equal(convolve(torch.zeros(1, 16, 5, 5), encoded), torch.zeros(1, 32, 5, 5))


@compiled
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_follows_a_convolution_is_done_as_it_writes(
    samples: ModuleType, isa: str, layout: torch.memory_format, threads: int
) -> None:
    shape, own = (37, 21, 3, 3), Geometry((2, 1), (1, 1, 1, 1))
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32), shape)
    x = torch.randn(3, 21, 15, 10).contiguous(memory_format=layout)
    gain, bias = torch.randn(37), torch.randn(37)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plain = convolve(x, encoded, None, own)
        added = torch.randn_like(plain)
        for after in (
            After(gain),
            After(gain, added),
            After(None, added, 0.0),
            After(gain, added.contiguous(), 0.0, 6.0),
            After(least=0.0),
            After(gain, torch.randn(37, 1, 1), 0.0),
        ):
            wanted = after.apply(plain.clone(), bias)
            found = convolve(x, encoded, bias, own, after=after)
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4), after
            assert found.stride() == plain.stride()
    finally:
        torch.set_num_threads(before)
    x[1, 3, 2, 2] = float("nan")
    found = convolve(x, encoded, bias, own, after=After(gain, added, 0.0, 6.0))
    assert found[1].isnan().all() and not found[[0, 2]].isnan().any()


@pytest.mark.parametrize("geometry", [Geometry((1, 1), (1, 1, 1, 1)), Geometry((2, 1), (0, 2, 1, 0))])
def test_what_follows_is_done_after_chains_sums_and_decoded_weights(
    samples: ModuleType, geometry: Geometry
) -> None:
    leaf, node = samples.leaf, samples.node
    children = {c: leaf("int", bits=6, group=0) for c in ("a", "b")}
    trees = [
        node("low_rank", children, rank=9),
        node("add", {"x": leaf("int", bits=4, group=32), "y": leaf("grid", group=32)}),
        leaf("trellis", quarter_bits=(12,)),
    ]
    x = torch.randn(2, 24, 12, 10)
    for tree in trees:
        encoded = samples.random_encoded(tree, (40, 24, 3, 3))
        plain = convolve(x, encoded, None, geometry)
        after, bias = After(torch.randn(40), torch.randn_like(plain), 0.0, 6.0), torch.randn(40)
        found = convolve(x, encoded, bias, geometry, after=after)
        assert torch.allclose(found, after.apply(plain.clone(), bias), rtol=1e-4, atol=1e-4), tree.kind


CHAINS = {
    "low rank": ("low_rank", {"rank": 9}, ("a", "b")),
    "tucker-2": ("tucker", {"ranks": (20, 12, 3, 3), "view": (40, 24, 3, 3)}, ("core", "factor0", "factor1")),
    "tucker, taps": (
        "tucker",
        {"ranks": (20, 12, 4), "view": (40, 24, 9)},
        ("core", "factor0", "factor1", "factor2"),
    ),
    "tucker, out alone": ("tucker", {"ranks": (9, 24, 3, 3), "view": (40, 24, 3, 3)}, ("core", "factor0")),
    "cp": ("cp", {"rank": 17, "view": (40, 24, 3, 3)}, ("factor0", "factor1", "factor2", "factor3")),
    "cp, taps": ("cp", {"rank": 17, "view": (40, 24, 9)}, ("factor0", "factor1", "factor2")),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("geometry", [Geometry((1, 1), (1, 1, 1, 1)), Geometry((2, 1), (0, 2, 1, 0), (1, 2))])
def test_chains_are_the_convolution_with_the_decoded_weight(
    samples: ModuleType, name: str, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, params, children = CHAINS[name]
    tree = samples.node(kind, {c: samples.leaf("int", bits=6, group=0) for c in children}, **params)
    encoded = samples.random_encoded(tree, (40, 24, 3, 3))
    x, bias = torch.randn(2, 24, 12, 10).relu(), torch.randn(40)
    wanted = reference(x, decode(encoded), bias, geometry)

    whole = convolution._decoded

    def parts_alone(x: Tensor, part: EncodedTensor, *rest: Any) -> Tensor:
        assert part is not encoded, "the whole weight was decoded"
        return whole(x, part, *rest)

    monkeypatch.setattr(convolution, "_decoded", parts_alone)
    assert multiplications(tree, encoded.shape) < encoded.shape[0] * 24 * 9
    assert error(convolve(x, encoded, bias, geometry), wanted) < 2 * INT8_ERROR
    # Factors whose codes are those of the transpose are rounded to 8 bits once, which exact results are not.
    monkeypatch.setattr(convolution, "_decoded", whole)
    assert error(convolve(x, encoded, bias, geometry, exact=True), wanted) < 1e-5


def test_sums_tensor_trains_and_other_formats(samples: ModuleType) -> None:
    leaf, node = samples.leaf, samples.node
    x = torch.randn(2, 32, 6, 6)
    both = node("add", {"x": leaf("int", bits=4, group=32), "y": leaf("grid", group=32)})
    train = node(
        "tensor_train", {f"core{i}": leaf("dense") for i in range(4)}, ranks=(3, 4, 3), view=(4, 6, 8, 4)
    )
    for tree, shape, own in (
        (both, (24, 32, 3, 3), Geometry((1, 1), (1, 1, 1, 1))),
        (train, (24, 32, 1, 1), Geometry()),
        (leaf("trellis", quarter_bits=(12,)), (24, 32, 3, 3), Geometry()),
        (leaf("dense"), (24, 32, 1, 1), Geometry((2, 2))),
    ):
        encoded = samples.random_encoded(tree, shape)
        wanted = reference(x, decode(encoded), None, own)
        assert error(convolve(x, encoded, None, own), wanted) < INT8_ERROR
        assert error(convolve(x, encoded, None, own, exact=True), wanted) < 1e-5


def test_wrong_channels_and_small_images_are_refused(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=0), (8, 4, 3, 3))
    with pytest.raises(ValueError, match="do not fit an encoded convolution"):
        convolve(torch.randn(1, 5, 8, 8), encoded)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)kernel"):
        convolve(torch.randn(1, 4, 2, 2), encoded)


@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", CHAINS)
def test_multiplications_of_a_chain_are_those_of_its_stages(
    samples: ModuleType, name: str, stride: tuple[int, int]
) -> None:
    kind, params, children = CHAINS[name]
    tree = samples.node(kind, {c: samples.leaf("int", bits=6, group=0) for c in children}, **params)
    encoded = samples.random_encoded(tree, (40, 24, 3, 3))
    # A grid so large that its border counts for nothing; only strided sides shrink it.
    pixels, done = 1.0, 0.0
    for stage in convolution._STAGES[kind](encoded):
        pixels /= (stride[0] if stage.rows else 1) * (stride[1] if stage.columns else 1)
        done += math.prod(stage.weight.shape) * pixels
    assert multiplications(tree, encoded.shape, stride) == pytest.approx(
        done * stride[0] * stride[1], rel=1e-9
    )


def test_a_weight_in_the_order_of_the_gpu_kernels_is_held_once(samples: ModuleType) -> None:
    packed = pytest.importorskip("nstf.kernels.triton.packed")
    gpu = pytest.importorskip("nstf.kernels.triton.convolution")
    for shape in ((40, 24, 3, 3), (40, 24, 5)):
        encoded = samples.random_encoded(samples.leaf("int", bits=4, group=64), shape)
        kept = packed.compact(encoded)
        codes = kept.arrays["codes"]
        assert isinstance(codes, packed.PackedCodes)
        assert gpu._packed(kept).words.data_ptr() == codes.words.data_ptr()
        assert torch.equal(decode(kept), decode(encoded))
    depthwise = samples.random_encoded(samples.leaf("int", bits=4, group=64), (40, 1, 5, 5))
    assert packed.compact(depthwise).arrays["codes"] is depthwise.arrays["codes"]  # no kernel reads it
