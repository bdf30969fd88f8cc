"""The quantised cache's reference: formats, the rule of pages, bytes, and attention by a plan."""

import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from nstf.runtime.attention_plan import GroupPlan, HeadPlan, LayerPlan, parse_plan
from nstf.runtime.kv_formats import (
    BLOCK,
    PAGE,
    PLAIN,
    KVFormat,
    cache_bytes,
    chosen_blocks,
    dense_bytes,
    dequantise_page,
    group_bytes,
    page_bytes,
    quantise_page,
    reference_attention,
    rotated,
    stored,
)

FORMATS = [KVFormat(*form) for form in itertools.product((8, 4, 2), ("channel", "token"), (False, True))]
FULL = HeadPlan("full", {}, 0, 0.0, 1.0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keep(keys: KVFormat = PLAIN, values: KVFormat = PLAIN) -> GroupPlan:
    return GroupPlan(0, 0, 0, keys, values)


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    total, per_group = key.shape[1], len(query) // len(key)
    key, value = (x.half().float().repeat_interleave(per_group, 0) for x in (key, value))
    mask = torch.ones(query.shape[1], total, dtype=torch.bool).tril(total - query.shape[1])
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_page_is_read_back_within_half_a_step(fmt: KVFormat) -> None:
    x = random(3, PAGE, 96) * torch.linspace(0.1, 9, 96)
    page = quantise_page(x, fmt)
    assert page.codes.dtype == torch.uint8 and int(page.codes.max()) == 2**fmt.bits - 1
    assert page.minimum.dtype == page.scale.dtype == torch.float16
    error = dequantise_page(page, fmt) - x
    # A step is as large as the range of what shares it; rounding the pair to 16 bits adds a little.
    error, basis = (rotated(t) if fmt.rotate else t for t in (error, x))
    axis = 1 if fmt.by == "channel" else 2
    step = (basis.amax(axis, keepdim=True) - basis.amin(axis, keepdim=True)) / (2**fmt.bits - 1)
    assert bool((error.abs() <= 0.5 * step + 2e-3 * basis.abs().amax()).all())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_what_is_constant_is_exact(fmt: KVFormat) -> None:
    x = torch.full((PAGE, 64), 0.5)
    page = quantise_page(x, fmt)
    back = dequantise_page(page, fmt)
    if fmt.rotate:
        # A constant rotated is one peak: what is left of it is the rounding of its pair to 16 bits.
        torch.testing.assert_close(back, x, atol=1e-3, rtol=0)
    else:
        assert not page.scale.any() and not page.codes.any()
        assert torch.equal(back, x)


def test_numbers_beyond_float16_stay_finite() -> None:
    x = random(PAGE, 32) * 1e6
    for fmt in FORMATS:
        assert bool(dequantise_page(quantise_page(x, fmt), fmt).isfinite().all())
        assert bool(stored(x, fmt).isfinite().all())
    assert float(stored(x, PLAIN).abs().max()) == 65504


def test_rotation_is_its_own_inverse_and_keeps_products() -> None:
    x, y = random(5, 96), random(5, 96, seed=1)
    torch.testing.assert_close(rotated(rotated(x)), x)
    torch.testing.assert_close((rotated(x) * rotated(y)).sum(-1), (x * y).sum(-1))
    odd = random(2, 7)
    torch.testing.assert_close(rotated(odd), odd)


def test_wrong_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="a page has 64 positions"):
        quantise_page(random(63, 8), FORMATS[0])
    with pytest.raises(ValueError, match="16 bits are stored as they are"):
        quantise_page(random(64, 8), PLAIN)


def test_the_part_of_the_last_page_stays_in_16_bits() -> None:
    x = random(2 * PAGE + 10, 64)
    back = stored(x, KVFormat(2, "token", False))
    assert torch.equal(back[2 * PAGE :], x[2 * PAGE :].half().float())
    assert not torch.equal(back[: 2 * PAGE], x[: 2 * PAGE].half().float())
    assert torch.equal(stored(x, PLAIN), x.half().float())


def test_bytes_count_codes_and_scales() -> None:
    assert page_bytes(PLAIN, 64) == 64 * 64 * 2
    assert page_bytes(KVFormat(4, "channel", False), 64) == 64 * 32 + 4 * 64
    assert page_bytes(KVFormat(2, "token", True), 64) == 64 * 16 + 4 * 64
    assert page_bytes(KVFormat(8, "token", False), 128) == 64 * 128 + 4 * 128
    assert page_bytes(KVFormat(4, "token", False), 80) == 64 * 40 + 4 * 64
    for fmt in FORMATS:
        page = quantise_page(random(PAGE, 128), fmt)
        pairs = 2 * (page.minimum.numel() + page.scale.numel())
        assert page_bytes(fmt, 128) == page.codes.numel() * fmt.bits // 8 + pairs


def test_bytes_of_a_group_by_context() -> None:
    four = KVFormat(4, "channel", False)
    page, whole = page_bytes(four, 64), page_bytes(PLAIN, 64)
    assert group_bytes(keep(), 64, 1000) == 1000 * 64 * 4
    # 1000 tokens are 16 pages, the last two in 16 bits and the very last with 40 positions.
    assert group_bytes(keep(four, four), 64, 1000) == 2 * (14 * page + whole + 40 * 128)
    assert group_bytes(keep(four, four), 64, 100) == 100 * 64 * 4
    ring = GroupPlan(4, 256, 260, PLAIN, PLAIN)
    assert group_bytes(ring, 64, 259) == 259 * 64 * 4
    # The last query sees positions from 744 on: pages 11 to 15, and the sink's page.
    assert group_bytes(ring, 64, 1000) == 2 * (whole * 5 + 40 * 128)


def walked_bytes(group: GroupPlan, head_dim: int, context: int) -> int:
    """`group_bytes` by the rule itself, page by page."""
    pages = -(-context // PAGE)
    held = set(range(pages))
    if group.recent and context >= group.min_length:
        seen = {p for p in range(pages) if (p + 1) * PAGE > context - group.recent}
        held = seen | {p for p in range(pages) if p * PAGE < group.sink}
    total = 0
    for page in held:
        for fmt in (group.keys, group.values):
            positions = min(PAGE, context - page * PAGE)
            near = page >= pages - 2
            total += positions * head_dim * 2 if near else page_bytes(fmt, head_dim)
    return total


def test_bytes_of_a_group_are_those_of_its_pages_one_by_one() -> None:
    three = KVFormat(4, "channel", False), KVFormat(2, "token", True), PLAIN
    cases = itertools.product(
        (0, 1, 64, 65, 200, 10**4), (0, 1, 64, 65, 130, 10**4), (0, 129, 700), three, (three[0], PLAIN)
    )
    groups = [GroupPlan(*case) for case in cases]
    for context in (0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 700, 701, 1000):
        for group in groups:
            assert group_bytes(group, 48, context) == walked_bytes(group, 48, context), (group, context)


def test_bytes_at_a_long_context_take_no_walk_over_its_pages() -> None:
    """A plan may state 2^26 tokens and 2,048 layers: `inspect` took 20 s for four of them."""
    ring = GroupPlan(4, 1 << 25, 0, PLAIN, PLAIN)
    start = time.process_time()
    for _ in range(100):
        assert group_bytes(ring, 64, 1 << 26) == (64 + (1 << 25)) * 64 * 4
    assert time.process_time() - start < 1


def test_bytes_of_a_plan() -> None:
    plain = {"bits": 16, "by": "token", "rotate": False}
    head = {"pattern": "full", "params": {}, "min_length": 0, "error": 0.0, "mass": 1.0}
    group = {"sink": 0, "recent": 0, "min_length": 0, "keys": plain, "values": plain}
    plan: dict[str, Any] = {
        "version": 2,
        "context": 512,
        "kv_budget": None,
        "head_dim": 64,
        "kld": {"allowed": None, "choose": None, "report": None},
        "layers": [{"heads": [head] * 4, "groups": [group] * 2}] * 3,
    }
    parsed = parse_plan(plan)
    assert cache_bytes(parsed, 512) == dense_bytes(parsed, 512) == 3 * 2 * 512 * 64 * 4


@pytest.mark.parametrize("count", [300, 1])
def test_a_plan_of_full_heads_is_dense_attention(count: int) -> None:
    query, key, value = random(4, count, 32), random(2, 300, 32, seed=1), random(2, 300, 32, seed=2)
    layer = LayerPlan((FULL,) * 4, (keep(), keep()))
    torch.testing.assert_close(reference_attention(query, key, value, layer), dense(query, key, value))


def test_a_query_reads_its_page_and_the_one_before_in_16_bits() -> None:
    query, key, value = random(1, 256, 32), random(1, 256, 32, seed=1), random(1, 256, 32, seed=2)
    two = KVFormat(2, "token", False)
    out = reference_attention(query, key, value, LayerPlan((FULL,), (keep(two, two),)))
    expected = dense(query, key, value)
    torch.testing.assert_close(out[:, :128], expected[:, :128])
    assert bool(((out - expected)[0, 128:].abs().amax(-1) > 1e-3).all())
    # Position 200 is in page 3: pages 0 and 1 are read as they are stored.
    mixed = [torch.cat([stored(x[0], two)[:128], x[0, 128:201].half().float()])[None] for x in (key, value)]
    torch.testing.assert_close(out[:, 200:201], dense(query[:, 200:201], *mixed), atol=2e-3, rtol=2e-3)


def mixed_layer() -> LayerPlan:
    band = HeadPlan("streaming", {"sink": 4, "window": 40}, 44, 0.1, 0.9)
    ring = GroupPlan(4, 40, 44, KVFormat(8, "token", True), KVFormat(4, "token", False))
    sparse = HeadPlan("block_sparse", {"threshold": 0.5, "stride": 8}, 129, 0.1, 0.9)
    return LayerPlan((band, band, FULL, sparse), (ring, keep(KVFormat(4, "channel", True), PLAIN)))


def test_prefill_in_chunks_and_decoding_give_the_same_result() -> None:
    query, key, value = random(4, 600, 32), random(2, 600, 32, seed=1), random(2, 600, 32, seed=2)
    layer = mixed_layer()
    once = reference_attention(query, key, value, layer)
    ends = [0, 128, 512, *range(513, 601)]
    parts = [
        reference_attention(query[:, a:b], key[:, :b], value[:, :b], layer)
        for a, b in itertools.pairwise(ends)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), once, atol=1e-5, rtol=1e-5)


def test_a_sparse_head_skips_blocks_and_only_in_whole_blocks_of_prefill() -> None:
    query, key, value = random(4, 600, 32), random(2, 600, 32, seed=1), random(2, 600, 32, seed=2)
    rule = mixed_layer().heads[3]
    layer = LayerPlan((FULL, FULL, FULL, rule), (keep(), keep()))
    expected = dense(query, key, value)
    out = reference_attention(query, key, value, layer)
    torch.testing.assert_close(out[:3], expected[:3], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out[3, 512:], expected[3, 512:], atol=1e-4, rtol=1e-4)
    # Blocks 0 and 1 are computed as a whole: the first and the diagonal block always are.
    torch.testing.assert_close(out[3, :256], expected[3, :256], atol=1e-4, rtol=1e-4)
    assert float((out - expected)[3, 256:512].abs().max()) > 1e-3
    still = reference_attention(query, key, value, layer, prefill=False)
    torch.testing.assert_close(still, expected, atol=1e-4, rtol=1e-4)


def test_a_sparse_head_finds_the_block_that_its_queries_look_for() -> None:
    query, key, value = random(1, 512, 32), random(1, 512, 32, seed=1), random(1, 512, 32, seed=2)
    key[0, 128:256] += 0.5
    query[0] += 1
    rule = HeadPlan("block_sparse", {"threshold": 0.3, "stride": 8}, 129, 0.1, 0.9)
    expected = dense(query, key, value)[0, 384:]
    out = reference_attention(query, key, value, LayerPlan((rule,), (keep(),)))[0, 384:]
    # The third block is left out, the second is not: it holds nearly all of the mass.
    assert 1e-3 < float((out - expected).norm() / expected.norm()) < 0.3


def test_the_fewest_blocks_are_chosen_and_ties_go_to_the_lower() -> None:
    mass = torch.tensor([[0.1, 0.3, 0.3, 0.1, 0.2], [0.0, 0.5, 0.5, 0.0, 0.0]])
    assert chosen_blocks(mass, 0.55).tolist() == [
        [True, True, True, False, True],
        [True, True, True, False, True],
    ]
    assert chosen_blocks(mass, 0.3).tolist() == [
        [True, True, False, False, True],
        [True, True, False, False, True],
    ]
    assert chosen_blocks(mass, 1.0)[0].all()
    assert BLOCK == 2 * PAGE
