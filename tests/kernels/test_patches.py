"""Patches that share no value (a vision transformer's stem): from the image itself, and a chain in one call."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from nstf.kernels import convolution
from nstf.kernels.convolution import After, Geometry, convolve
from nstf.kernels.cpu import convolution as cpu
from nstf.kernels.cpu import engine_matrix, ext
from nstf.kernels.formats import Node, decode

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the extension was not built")
ISAS = [i for i in ext.isas() if i != "portable"] if engine_matrix.available() else []


@pytest.fixture(params=ISAS or [""])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set with int8 products in turn."""
    ext.use_isa(request.param)
    yield request.param
    ext.use_isa("")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def leaves(samples: ModuleType) -> dict[str, Node]:
    return {
        "int4, a scale a row": samples.leaf("int", bits=4, group=0),
        "int4 g32 with zero points": samples.leaf("int", bits=4, group=32, symmetric=False),
        "int6": samples.leaf("int", bits=6, group=0),
        "int8": samples.leaf("int", bits=8, group=0),
        "grid": samples.leaf("grid", group=64),
    }


@pytest.mark.parametrize(
    ("kernel", "sides"),
    [
        ((16, 16), (67, 230)),  # what is left over at the right and below is in no patch
        ((16, 16), (16, 48)),
        ((4, 4), (21, 36)),
        ((8, 8), (24, 80)),
        ((2, 12), (7, 61)),
        ((14, 14), (28, 261)),  # no multiple of four: bytes are turned
        ((3, 5), (9, 90)),
    ],
)
def test_patches_are_the_same_however_the_image_lies(
    samples: ModuleType, isa: str, threads: None, kernel: tuple[int, int], sides: tuple[int, int]
) -> None:
    """An image with its channels last is laid out as others are; sums are whole numbers, so nothing may differ."""
    own = Geometry(kernel)
    taps = kernel[0] * kernel[1]
    for i, (name, tree) in enumerate(leaves(samples).items()):
        for out in (5, 1 + (200 << 10) // (3 * taps) if taps >= 196 else 70):  # held as bytes, and not
            encoded = samples.random_encoded(tree, (out, 3, *kernel), i)
            seeded = torch.Generator().manual_seed(i)  # few values, some of which cancel out: not any will do
            x = torch.randn(3, 3, *sides, generator=seeded)
            x = x * torch.tensor([1.0, 3.0, 0.1])[:, None, None, None] + 0.4
            bias = torch.randn(out, generator=seeded)
            wanted = convolve(x.contiguous(memory_format=torch.channels_last), encoded, bias, own)
            for count in (1, 3):
                torch.set_num_threads(count)
                assert torch.equal(convolve(x, encoded, bias, own), wanted), (name, out, count)
                assert torch.equal(convolve(x[1:2], encoded, bias, own), wanted[1:2]), (name, out, count)
            exact = F.conv2d(x, decode(encoded), bias, kernel)
            assert (wanted - exact).norm() < 0.03 * exact.norm(), (name, out)


def test_an_image_that_is_not_finite_spoils_no_other(samples: ModuleType, isa: str) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=0), (7, 3, 16, 16))
    x, own = torch.randn(2, 3, 32, 48), Geometry((16, 16))
    clean = convolve(x, encoded, None, own)
    x[1, 2, 20, 3] = float("nan")
    found = convolve(x, encoded, None, own)
    assert torch.equal(found[0], clean[0]) and found[1].isnan().all()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_chain_runs_in_one_call_and_gives_what_its_stages_give(
    samples: ModuleType, isa: str, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = {c: samples.leaf("int", bits=6, group=0) for c in ("a", "b")}
    encoded = samples.random_encoded(samples.node("low_rank", factors, rank=9), (40, 3, 16, 16))
    x, bias = torch.randn(2, 3, 48, 80).contiguous(memory_format=layout), torch.randn(40)
    own = Geometry((16, 16))
    # With a bound the stages run one by one.
    wanted = convolve(x, encoded, bias, own, after=After(least=-1e30))
    monkeypatch.setattr(convolution, "_stage", lambda *_: pytest.fail("a stage ran by itself"))
    for dtype in (torch.float32, torch.bfloat16):
        found = convolve(x.to(dtype), encoded, bias, own)
        assert found.dtype == dtype and found.stride() == wanted.stride()
        off = float((found - wanted).norm() / wanted.norm())
        assert off == 0 or (dtype == torch.bfloat16 and off < 0.02)
