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


def assert_near(found: torch.Tensor, wanted: torch.Tensor, layer: LayerPlan) -> None:
    """Rounding alone: queries and weights are bytes where codes have 4 bits or fewer, 15 bits for codes of 8, else float32."""
    few = any(fmt.bits <= 4 for g in layer.groups for fmt in (g.keys, g.values))
    error, scale = (found - wanted), float(wanted.square().mean().sqrt())
    assert float(error.square().mean().sqrt()) < (1e-2 if few else 5e-4) * scale
    assert float(error.abs().max()) < (0.15 if few else 1e-2) * scale


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
    assert_near(found, wanted, layer)


def generated(seed: int) -> tuple[LayerPlan, int]:
    """A layer with patterns, rings and formats drawn at random, and its head size."""
    draw = random.Random(seed)
    size = draw.choice([32, 48, 64, 80, 128, 256])
    per_group = draw.choice([1, 2, 3, 5])
    heads: list[HeadPlan] = []
    groups = []
    for _ in range(draw.choice([1, 2])):
        keys, values = draw.choice([*FORMATS, PLAIN]), draw.choice([*FORMATS, PLAIN])
        if draw.random() < 0.5:
            ring = draw.choice([0, 3, 16, 70]), draw.choice([1, 20, 64, 100, 150]), draw.choice([0, 100, 200])
            groups.append(group(keys, values, ring))
            heads += [streaming(*ring)] * per_group
            continue
        groups.append(group(keys, values))
        for _ in range(per_group):
            band = streaming(draw.choice([0, 5, 65]), draw.choice([1, 30, 128]), draw.choice([0, 150]))
            heads.append(draw.choice([full(), band, sparse(draw.choice([0.5, 0.9]), draw.choice([8, 16]), 129)]))
    return LayerPlan(tuple(heads), tuple(groups)), size


@pytest.mark.parametrize("seed", range(24))
def test_generated_plans_give_what_the_reference_gives(isa: str, seed: int) -> None:
    layer, size = generated(seed)
    tokens = 128 * 3 + 37
    q, k, v = numbers(len(layer.heads), len(layer.groups), tokens, size, seed)
    for head in range(len(layer.heads)):
        q[head] += 0.5 * k[head * len(layer.groups) // len(layer.heads)].roll(150, 0)  # so that some blocks matter more
    found, _ = run(layer, q, k, v, [*whole(tokens - 2), 1, 1])
    wanted = reference_attention(q, k, v, layer)
    assert_near(found, wanted, layer)


@pytest.mark.parametrize("seed", range(6))
def test_a_text_may_be_cut_anywhere(isa: str, seed: int) -> None:
    layer, size = generated(100 + seed)
    # Blocks are chosen for whole ones only: patterns that do not depend on cuts.
    layer = LayerPlan(tuple(full() if h.block_sparse else h for h in layer.heads), layer.groups)
    q, k, v = numbers(len(layer.heads), len(layer.groups), 330, size, seed)
    wanted = reference_attention(q, k, v, layer)
    for cuts in ([1, 90, 37, 128, 1, 1, 72], [128, 128, 74], [5] * 66):
        found, _ = run(layer, q, k, v, cuts)
        assert_near(found, wanted, layer)


def test_blocks_cut_by_a_call_are_dense(isa: str) -> None:
    layer = LayerPlan((sparse(0.3, 16),), (group(),))
    q, k, v = numbers(1, 1, 384, 64)
    found, _ = run(layer, q, k, v, [64, 128, 128, 64])
    dense = reference_attention(q, k, v, layer, prefill=False)
    assert float((found - dense).abs().max()) < 2e-3
    assert float((run(layer, q, k, v, whole(384))[0] - dense).abs().max()) > 2e-2


def test_the_numbers_do_not_depend_on_the_threads(isa: str) -> None:
    layer, size = generated(7)
    q, k, v = numbers(len(layer.heads), len(layer.groups), 402, size)
    found = [run(layer, q, k, v, [*whole(400), 1, 1], threads)[0] for threads in (1, 2, 5)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_window_of_the_model_holds_beside_the_plan(isa: str) -> None:
    layer = LayerPlan((full(), streaming(16, 80)), (group(FORMATS[4]),))
    banded = LayerPlan((streaming(0, 50), streaming(0, 50)), layer.groups)
    q, k, v = numbers(2, 1, 300, 64)
    found, _ = run(layer, q, k, v, [*whole(299), 1], window=50)
    wanted = reference_attention(q, k, v, banded)
    assert_near(found, wanted, layer)


def test_a_copy_goes_on_as_the_original_would(isa: str) -> None:
    layer, size = LayerPlan((streaming(16, 100),) * 2, (group(FORMATS[4], FORMATS[6], (16, 100, 0)),)), 64
    q, k, v = numbers(2, 1, 300, size)
    wanted, _ = run(layer, q, k, v, [*whole(280), *[1] * 20])
    _, original = run(layer, q, k, v, whole(290))
    assert original.resumable(100) == 0 and original.resumable(280) == 280
    copied = ext.LayerAttention(2, 1, size, 0, size**-0.5, layer_plan(layer))
    feed(copied, q, k, v, [7])  # another text, which must be forgotten
    copied.copy(original, 280)
    assert torch.equal(feed(copied, q, k, v, [1] * 20, first=280), wanted[:, 280:])
    with pytest.raises(ValueError, match="no longer held"):
        copied.copy(original, 100)
    with pytest.raises(ValueError, match="no longer in the cache"):
        feed(original, q, k, v, [1], first=100)


@pytest.mark.parametrize("tokens", [64, 129, 511, 700])
@pytest.mark.parametrize("ring", [(0, 0, 0), (16, 100, 0), (130, 64, 300)])
@pytest.mark.parametrize("fmt", [PLAIN, FORMATS[0], FORMATS[4], FORMATS[10]], ids=str)
def test_memory_is_what_the_plan_says_up_to_whole_pages(
    tokens: int, ring: tuple[int, int, int], fmt: KVFormat
) -> None:
    head = streaming(*ring) if ring[1] else full()
    layer = LayerPlan((head,), (group(fmt, fmt, ring),))
    q, k, v = numbers(1, 1, tokens, 64)
    _, engine = run(layer, q, k, v, [*whole(tokens - 1), 1])
    stated, page = group_bytes(layer.groups[0], 64, tokens), 2 * 2 * 64 * 64
    assert stated <= engine.cache_bytes < stated + 2 * page


def test_keys_and_values_beyond_float16_stay_finite(isa: str) -> None:
    layer = LayerPlan((full(),), (group(FORMATS[0], FORMATS[2]),))
    q, k, v = numbers(1, 1, 300, 64)
    k[:, 40:, 3] *= 2.0**20
    q[..., 3] /= 2.0**20
    v *= 2.0**20
    found, _ = run(layer, q, k, v, [*whole(299), 1])
    exact = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    assert bool(found.isfinite().all())
    assert float((found - exact).abs().max()) < 2e-2 * float(exact.abs().max())


def test_what_is_no_number_stays_none(isa: str) -> None:
    layer = LayerPlan((full(),), (group(FORMATS[0], FORMATS[2]),))
    q, k, v = numbers(1, 1, 300, 64)
    v[0, 70, 5] = torch.nan
    found, _ = run(layer, q, k, v, [*whole(299), 1])
    assert bool(found[:, 70:, 5].isnan().all()) and bool(found[:, :64].isfinite().all())
