"""The engine's attention over pages against the masked reference, over generated plans, for every instruction set."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import available
from nstf.runtime.attention_plan import GroupPlan, HeadPlan, LayerPlan
from nstf.runtime.engine_attention import layer_plan
from nstf.runtime.kv_formats import PLAIN, KVFormat, group_bytes, reference_attention

pytestmark = pytest.mark.skipif(not available(), reason="the CPU engine was not built")
ISAS = ext.isas() if available() else ["portable"]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    ext.use_isa(request.param)
    yield request.param
    ext.use_isa("")


def full(min_length: int = 0) -> HeadPlan:
    return HeadPlan("full", {}, min_length, 0.0, 1.0)


def streaming(sink: int, window: int, min_length: int = 0) -> HeadPlan:
    return HeadPlan("streaming", {"sink": sink, "window": window}, min_length, 0.0, 1.0)


def sparse(threshold: float, stride: int, min_length: int = 0) -> HeadPlan:
    return HeadPlan("block_sparse", {"threshold": threshold, "stride": stride}, min_length, 0.0, 1.0)


def group(keys: KVFormat = PLAIN, values: KVFormat = PLAIN, ring: tuple[int, int, int] = (0, 0, 0)) -> GroupPlan:
    return GroupPlan(*ring, keys, values)


def numbers(heads: int, groups: int, tokens: int, size: int, seed: int = 0) -> list[torch.Tensor]:
    """q [heads, tokens, size], k and v [groups, tokens, size] that float16 holds; some channels of k are large."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, tokens, size, generator=generator) for n in (heads, groups, groups))
    k[..., :: max(size // 4, 1)] *= 5
    return [q, k.half().float(), v.half().float()]


def run(
    layer: LayerPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: list[int], threads: int = 2, window: int = 0
) -> tuple[torch.Tensor, Any]:
    """[heads, tokens, size] by the engine, the tokens cut into calls of these lengths; single ones are decoded."""
    heads, tokens, size = q.shape
    engine = ext.LayerAttention(heads, k.shape[0], size, window, size**-0.5, layer_plan(layer))
    return feed(engine, q, k, v, cuts, threads), engine


def feed(
    engine: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: list[int], threads: int = 2, first: int = 0
) -> torch.Tensor:
    out, at = torch.full((q.shape[0], sum(cuts), q.shape[2]), torch.nan), first
    for count in cuts:
        parts = [x[:, at : at + count].transpose(0, 1).contiguous() for x in (q, k, v)]
        piece = torch.empty_like(parts[0])
        engine.run(*(p.numpy() for p in parts), at, piece.data_ptr(), count == 1, threads)
        out[:, at - first : at - first + count] = piece.transpose(0, 1)
        at += count
    return out


def whole(tokens: int) -> list[int]:
    return [128] * (tokens // 128) + ([tokens % 128] if tokens % 128 else [])


FORMATS = [
    KVFormat(bits, by, rotate) for bits in (8, 4, 2) for by in ("channel", "token") for rotate in (False, True)
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_pages_in_few_bits_are_read_as_the_reference_says(isa: str, fmt: KVFormat, size: int) -> None:
    layer = LayerPlan((full(),) * 3, (group(fmt, fmt),))
    q, k, v = numbers(3, 1, 300, size)
    found, _ = run(layer, q, k, v, whole(299) + [1])
    wanted = reference_attention(q, k, v, layer)
    assert float((found - wanted).abs().max()) < 2e-3 * float(wanted.abs().max())
