"""Memory of the planned cache on a GPU: it grows without copying, and is as large as the plan says."""

import pytest
import torch

pytest.importorskip("triton")

from nstf.runtime.attention_plan import AttentionPlan, GroupPlan, HeadPlan, LayerPlan, PlanKLD
from nstf.runtime.kv_formats import PLAIN, KVFormat, cache_bytes
from nstf.runtime.paged_cache import PAGES_AT_ONCE, PagePool
from nstf.runtime.planned_heads import compiled_plan

FOUR = KVFormat(4, "channel", False), KVFormat(4, "token", False)


def plan_of(context: int) -> AttentionPlan:
    """Layers of 16 and of 4 bits, and one with a ring beside 4 bits."""
    full = HeadPlan("full", {}, 0, 0.0, 1.0)
    band = HeadPlan("streaming", {"sink": 64, "window": 256}, 0, 0.0, 1.0)
    kept, plain = GroupPlan(0, 0, 0, *FOUR), GroupPlan(0, 0, 0, PLAIN, PLAIN)
    ring = GroupPlan(64, 256, 0, *FOUR)
    layers = (
        LayerPlan((full,) * 4, (plain, plain)),
        LayerPlan((full,) * 4, (kept, kept)),
        LayerPlan((band, band, full, full), (ring, kept)),
    )
    return AttentionPlan(2, context, None, 64, PlanKLD(None, None, None), layers)


def pool_of(plan: AttentionPlan, context: int) -> PagePool:
    return PagePool(compiled_plan(plan), 1, context, torch.float16, torch.device("cpu"))


def test_pages_stay_where_they_are_when_a_cache_grows() -> None:
    pool = pool_of(plan_of(8192), 8192)
    pool.reserve(100)
    places, table, slab = pool.table.clone(), pool.table.data_ptr(), pool.slabs[0].data_ptr()
    held = pool.pages
    assert held == PAGES_AT_ONCE
    pool.reserve(held * 64)
    assert pool.pages == held
    pool.reserve(4000)
    assert pool.pages == 4 * PAGES_AT_ONCE and len(pool.slabs) == 2
    assert (pool.table.data_ptr(), pool.slabs[0].data_ptr()) == (table, slab)
    assert torch.equal(pool.table[:, :held], places[:, :held])
    assert len(pool.table[0, : pool.pages].unique()) == pool.pages
    with pytest.raises(ValueError, match="made for 8192 at most"):
        pool.reserve(8193)


@pytest.mark.parametrize("tokens", [1024, 8192, 65536])
def test_memory_is_what_the_plan_says_up_to_two_pages(tokens: int) -> None:
    plan = plan_of(tokens)
    pool = pool_of(plan, tokens)
    pool.reserve(tokens)
    said = cache_bytes(plan, tokens)
    # The last two pages of codes have their places too, and a ring two pages more than its window fills.
    more = 2 * pool.page_bytes + 4 * 2 * 64 * 64 * 2
    assert said <= pool.size_bytes <= said + more
