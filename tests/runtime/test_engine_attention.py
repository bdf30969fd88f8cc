"""The engine's attention over pages against the masked reference, over generated plans, for every instruction set."""

import json
import random
from collections.abc import Iterator
from ctypes import string_at
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nstf.runtime
from nstf.errors import CorruptError, UsageError
from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import available
from nstf.runtime.attention_plan import AttentionPlan, GroupPlan, HeadPlan, LayerPlan, PlanKLD
from nstf.runtime.engine import Engine
from nstf.runtime.engine_attention import INT8, int8_plan, layer_plan
from nstf.runtime.engine_batch import Batch, Part
from nstf.runtime.kv_formats import (
    PLAIN,
    KVFormat,
    dequantise_page,
    group_bytes,
    quantise_page,
    reference_attention,
)

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


def group(
    keys: KVFormat = PLAIN, values: KVFormat = PLAIN, ring: tuple[int, int, int] = (0, 0, 0)
) -> GroupPlan:
    return GroupPlan(*ring, keys, values)


def numbers(heads: int, groups: int, tokens: int, size: int, seed: int = 0) -> list[torch.Tensor]:
    """q [heads, tokens, size], k and v [groups, tokens, size] that float16 holds; some channels of k are large."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, tokens, size, generator=generator) for n in (heads, groups, groups))
    k[..., :: max(size // 4, 1)] *= 5
    return [q, k.half().float(), v.half().float()]


def run(
    layer: LayerPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cuts: list[int],
    threads: int = 2,
    window: int = 0,
) -> tuple[torch.Tensor, Any]:
    """[heads, tokens, size] by the engine, the tokens cut into calls of these lengths; single ones are decoded."""
    heads, _, size = q.shape
    engine = ext.LayerAttention(heads, k.shape[0], size, window, size**-0.5, layer_plan(layer))
    return feed(engine, q, k, v, cuts, threads), engine


def feed(
    engine: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cuts: list[int],
    threads: int = 2,
    first: int = 0,
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
    """Rounding alone: what codes of 8 bits are multiplied with has 15 bits, and 8 where they have fewer: at most a sixth
    of what 4 bits lose here, 0.11 of the numbers' size.
    """
    few = any(fmt.bits <= 4 for g in layer.groups for fmt in (g.keys, g.values))
    error, scale = (found - wanted), float(wanted.square().mean().sqrt())
    assert float(error.square().mean().sqrt()) < (3e-2 if few else 1e-3) * scale
    assert float(error.abs().max()) < (0.8 if few else 2e-2) * scale


FORMATS = [
    KVFormat(bits, by, rotate)
    for bits in (8, 4, 2)
    for by in ("channel", "token")
    for rotate in (False, True)
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_pages_in_few_bits_are_read_as_the_reference_says(isa: str, fmt: KVFormat, size: int) -> None:
    layer = LayerPlan((full(),) * 3, (group(fmt, fmt),))
    q, k, v = numbers(3, 1, 300, size)
    found, _ = run(layer, q, k, v, [*whole(299), 1])
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
            heads.append(
                draw.choice([full(), band, sparse(draw.choice([0.5, 0.9]), draw.choice([8, 16]), 129)])
            )
    return LayerPlan(tuple(heads), tuple(groups)), size


@pytest.mark.parametrize("seed", range(24))
def test_generated_plans_give_what_the_reference_gives(isa: str, seed: int) -> None:
    layer, size = generated(seed)
    tokens = 128 * 3 + 37
    q, k, v = numbers(len(layer.heads), len(layer.groups), tokens, size, seed)
    for head in range(len(layer.heads)):
        q[head] += 0.5 * k[head * len(layer.groups) // len(layer.heads)].roll(
            150, 0
        )  # so that some blocks matter more
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


@pytest.mark.parametrize("fmt", [FORMATS[0], FORMATS[5]], ids=str)
def test_a_query_does_not_depend_on_those_beside_it(isa: str, fmt: KVFormat) -> None:
    layer = LayerPlan((full(),) * 3, (group(fmt, FORMATS[7]),))
    q, k, v = numbers(3, 1, 330, 64)
    found = [run(layer, q, k, v, cuts)[0][:, 192:320] for cuts in (whole(330), [128, 64, *[2] * 64, 10])]
    # Pages in 16 bits are added up in another order where few queries read them.
    assert float((found[0] - found[1]).abs().max()) < 1e-5


@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_last_bits_in_16_bits_do_not_depend_on_those_beside_a_query(isa: str, size: int) -> None:
    """GCC 13 multiplied and added in two steps for a query that was alone, in one for two to four (512 bits): answers of
    `serve --reproducible` changed with where prompts were cut."""
    layer = LayerPlan((full(),), (group(),))
    q, k, v = numbers(1, 1, 61, size)
    found = {run(layer, q, k, v, [61 - n, n])[0][:, -1].numpy().tobytes() for n in range(2, 30)}
    assert len(found) == 1


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


def at_once(heads: int, groups: int, size: int, window: int = 0) -> Any:
    """A layer whose positions are in 8 bits from the start, as `kv_cache="int8"` has them."""
    return ext.LayerAttention(heads, groups, size, window, size**-0.5, int8_plan(groups))


@pytest.mark.parametrize("size", [30, 64, 128])
def test_positions_in_8_bits_from_the_start_are_read_so_by_all(isa: str, size: int) -> None:
    q, k, v = numbers(4, 2, 300, size)
    found = feed(at_once(4, 2, size), q, k, v, [*whole(290), *[1] * 10])
    k, v = (
        torch.stack(
            [dequantise_page(quantise_page(page, fmt), fmt) for page in padded.split(64, dim=1)], dim=1
        ).flatten(1, 2)[:, :300]
        for x, fmt in ((k, INT8.keys), (v, INT8.values))
        for padded in [torch.nn.functional.pad(x, (0, 0, 0, 20))]
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    wanted = attend(
        q[None], k.repeat_interleave(2, 0)[None], v.repeat_interleave(2, 0)[None], is_causal=True
    )[0]
    assert float((found - wanted).abs().max()) < 4e-3 * float(wanted.abs().max())


@pytest.mark.parametrize("first", [1, 63, 64, 100, 200, 255])
def test_another_text_goes_on_from_any_position_of_an_int8_cache(isa: str, first: int) -> None:
    q, k, v = numbers(4, 2, 300, 64)
    other = [
        torch.cat([x[:, :first], y[:, first:]], 1)
        for x, y in zip((q, k, v), numbers(4, 2, 300, 64, 7), strict=True)
    ]
    wanted = feed(at_once(4, 2, 64), *other, [*whole(first), *[1] * (300 - first)])[:, first:]
    engine = at_once(4, 2, 64)
    feed(engine, q, k, v, whole(300))
    assert engine.resumable(first) == first
    copied = at_once(4, 2, 64)
    copied.copy(engine, first)
    for each in (engine, copied):
        assert torch.equal(feed(each, *other, [1] * (300 - first), first=first), wanted)


def test_large_and_broken_numbers_in_an_int8_cache(isa: str) -> None:
    q, k, v = numbers(2, 2, 200, 64)
    k[:, 40:] *= 2.0**20
    q /= 2.0**20
    v[:, 70:] *= 2.0**20
    found = feed(at_once(2, 2, 64), q, k, v, [*whole(199), 1])
    exact = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    assert bool(found.isfinite().all())
    assert float((found[:, 80:] - exact[:, 80:]).abs().max()) < 2e-2 * float(exact.abs().max())
    v[0, 90, 5] = torch.nan
    broken = feed(at_once(2, 2, 64), q, k, v, [*whole(199), 1])
    assert bool(broken[0, 90:, 5].isnan().all()) and bool(broken[:, :64].isfinite().all())


def test_memory_that_pages_gave_back_is_still_held() -> None:
    layer = LayerPlan((streaming(0, 64),), (group(ring=(0, 64, 0)),))
    q, k, v = numbers(1, 1, 64 * 40, 64)
    _, engine = run(layer, q, k, v, whole(64 * 40))
    page = 2 * 64 * 64 * 2
    held = engine.held_bytes
    assert engine.cache_bytes <= 3 * page < 4 * page <= held
    feed(engine, q, k, v, [64])
    assert engine.held_bytes == held


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


def planned_artifact(tiny: ModuleType, folder: Path, heads: HeadPlan, kept: GroupPlan) -> Path:
    """A tiny Llama whose plan has these heads and groups in all layers."""
    layer = LayerPlan((heads,) * 4, (kept,) * 2)
    plan = AttentionPlan(2, 2048, None, 8, PlanKLD(None, None, None), (layer,) * 2)
    return tiny.write(folder, tiny.new_model("LlamaForCausalLM"), attention=json.loads(plan.to_json()))


def test_a_planned_model_generates_by_the_engine(tiny: ModuleType, tmp_path: Path) -> None:
    path = planned_artifact(tiny, tmp_path, streaming(4, 20, 24), group(ring=(4, 20, 24)))
    ids = torch.randint(0, 100, (1, 90), generator=torch.Generator().manual_seed(1))
    model: Any = nstf.runtime.load(path, attention="planned", engine="exact")
    found = model.generate(ids, max_new_tokens=8, do_sample=False)
    engine = model.nstf_engine.engine
    assert engine.plan is not None
    modules: Any = nstf.runtime.load(path, attention="planned", engine="off")
    with torch.no_grad():
        wanted = modules(ids).logits[0]
    engine.reset()
    logits = engine.forward(ids[0], all_logits=True)
    assert float((logits - wanted).abs().max()) < 2e-2 * float(wanted.std())
    dense = Engine.open(path, exact=True).forward(ids[0], all_logits=True)
    assert float((logits - dense).abs().max()) > 5e-2 * float(wanted.std())
    assert found[0, 90:].tolist() == list(
        Engine.open(path, exact=True, attention="planned").generate(ids[0], 8)
    )


def test_sequences_of_a_planned_batch_are_as_alone(tiny: ModuleType, tmp_path: Path) -> None:
    path = planned_artifact(tiny, tmp_path, full(), group(FORMATS[4], FORMATS[6]))
    engine = Engine.open(path, attention="planned")
    batch = Batch(engine, 2, reproducible=True)
    ids = torch.randint(0, 100, (2, 300), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(parts: list[Part]) -> list[bytes]:
        return [string_at(at, 4 * engine.vocab) for at in batch.step(parts)]

    def prompt(row: int, first: int, end: int) -> Part:
        return Part(row, first, ids[row][first:end], prompt=True)

    alone = [logits([prompt(row, first, first + 60)])[0] for row in (0, 1) for first in range(0, 300, 60)]
    for row in (0, 1):
        batch.release(row)
    both = [
        logits([prompt(0, first, first + 60), prompt(1, first, first + 60)]) for first in range(0, 300, 60)
    ]
    assert [pair[0] for pair in both] + [pair[1] for pair in both] == alone
    assert batch.resumable(0, 290) == 290 and batch.resumable(0, 100) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "sparse"}, "is not one of full, planned"),
        ({"attention": "planned"}, "no attention plan inside"),
        ({"attention": "planned", "kv_cache": "int8"}, "says how keys and values are kept"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tiny: ModuleType, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    with pytest.raises(UsageError, match=message):
        Engine.open(path, **options)


def test_a_plan_of_another_model_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    layer = LayerPlan((full(),) * 2, (group(),) * 2)
    plan = AttentionPlan(2, 2048, None, 8, PlanKLD(None, None, None), (layer,) * 2)
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), attention=json.loads(plan.to_json()))
    with pytest.raises(CorruptError, match="other layers or heads"):
        Engine.open(path, attention="planned")
