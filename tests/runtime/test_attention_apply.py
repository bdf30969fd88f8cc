"""A planned model against a dense model whose attention function applies the same pattern as an
explicit mask.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from nstf.errors import UnsupportedError
from nstf.runtime.attention import apply_plan, new_cache, remove_plan
from nstf.runtime.attention_banded import visible
from nstf.runtime.attention_layout import compile_layer
from nstf.runtime.attention_plan import AttentionPlan, parse_plan

SINK, RECENT, START = 3, 11, 20
TOTAL = 75


def head(pattern: str, min_length: int = 0, **params: float) -> dict[str, Any]:
    return {"pattern": pattern, "params": params, "min_length": min_length, "error": 0.0, "mass": 1.0}


def plan_dict(heads: int, kv_heads: int) -> dict[str, Any]:
    """Two layers: one evicts its last group and mixes patterns in the others, one evicts everything."""
    per_group = heads // kv_heads
    evict = {"evict": True, "sink": SINK, "recent": RECENT, "min_length": START}
    keep = {"evict": False, "sink": 0, "recent": 0, "min_length": 0}
    band = head("streaming", START, sink=SINK, window=RECENT)
    mixed = [
        head("streaming", 30, sink=1, window=17),
        head("full"),
        head("block_topk", block=8, threshold=0.9),
        head("vertical_slash", vertical=3, slash=5),
    ]
    first = [mixed[h % 4] for h in range(heads - per_group)] + [band] * per_group
    return {
        "version": 1,
        "profile_lengths": [64],
        "queries": 8,
        "error_bound": 1.0,
        "kld_budget": 1.0,
        "kld_measured": None,
        "kld_covers": ["streaming"],
        "head_dim": 8,
        "layers": [
            {"heads": first, "groups": [keep] * (kv_heads - 1) + [evict]},
            {"heads": [band] * heads, "groups": [evict] * kv_heads},
        ],
    }


def make_model(heads: int, kv_heads: int) -> LlamaForCausalLM:
    torch.manual_seed(heads * 10 + kv_heads)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=heads * 8,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def masked_attention(plan: AttentionPlan) -> Any:
    """Attention function with an explicit [T, T] mask for each head: the definition of the plan."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer = plan.layers[module.layer_idx]
        per_group = len(layer.heads) // len(layer.groups)
        key, value = key.repeat_interleave(per_group, 1), value.repeat_interleave(per_group, 1)
        batch, count, total = query.shape[0], query.shape[2], key.shape[2]
        mask = torch.zeros(batch, len(layer.heads), count, total, dtype=torch.bool)
        for row in range(batch):
            pad = 0 if attention_mask is None else int(attention_mask[row].int().argmax())
            where, keys = torch.arange(total - count, total) - pad, torch.arange(total) - pad
            for index, planned in enumerate(layer.heads):
                seen = keys <= where[:, None]
                if planned.streaming is not None:
                    sink, window, start = planned.streaming
                    seen = torch.where((where + 1 < start)[:, None], seen, visible(where, keys, sink, window))
                mask[row, index] = seen & (keys >= 0) | (where < 0)[:, None]
        scores = (query @ key.transpose(2, 3) * kwargs["scaling"]).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    return attend


@pytest.fixture(params=[(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[LlamaForCausalLM, LlamaForCausalLM]]:
    """(planned model, reference model) with equal weights."""
    planned, reference = make_model(*request.param), make_model(*request.param)
    parsed = apply_plan(planned, plan_dict(*request.param))
    AttentionInterface.register("nstf_test_reference", masked_attention(parsed))
    ALL_MASK_ATTENTION_FUNCTIONS.register(
        "nstf_test_reference", lambda *a, attention_mask=None, **k: attention_mask
    )
    reference.config._attn_implementation = "nstf_test_reference"
    with torch.no_grad():
        yield planned, reference


def tokens(batch: int, length: int = TOTAL) -> Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(length))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_prefill_equals_the_masked_reference(pair: Any) -> None:
    planned, reference = pair
    for length in (1, 13, 20, 21, TOTAL):
        ids = tokens(2, length)
        close(planned(ids, use_cache=False).logits, reference(ids, use_cache=False).logits)


@pytest.mark.parametrize("chunks", [(TOTAL,), (7, 1, 30, 37), (40, 1, 1, 33), (1,) * TOTAL, (64, 11)])
def test_any_split_into_chunks_and_steps_gives_the_same(pair: Any, chunks: tuple[int, ...]) -> None:
    planned, reference = pair
    ids = tokens(2)
    cache, parts, first = new_cache(planned), [], 0
    for size in chunks:
        parts.append(planned(ids[:, first : first + size], past_key_values=cache, use_cache=True).logits)
        first += size
    close(torch.cat(parts, 1), reference(ids, use_cache=False).logits)
    assert cache.get_seq_length() == TOTAL


def test_an_ordinary_cache_gives_the_same_as_a_planned_one(pair: Any) -> None:
    planned, reference = pair
    ids = tokens(2)
    cache = DynamicCache(config=planned.config)
    parts = [planned(part, past_key_values=cache).logits for part in ids.split([33, 1, 1, 40], dim=1)]
    close(torch.cat(parts, 1), reference(ids, use_cache=False).logits)


@pytest.mark.parametrize("pads", [(0, 9), (25, 2), (30, 30)])
def test_left_padding_in_a_batch_gives_what_each_row_gives_alone(pair: Any, pads: tuple[int, int]) -> None:
    planned, _ = pair
    ids = tokens(2)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, parts, first = new_cache(planned), [], 0
    for size in (35, 1, 1, 20, 1, 17):
        part = slice(first, first + size)
        first += size
        out = planned(
            ids[:, part],
            attention_mask=mask[:, :first],
            position_ids=positions[:, part],
            past_key_values=cache,
        )
        parts.append(out.logits)
    got = torch.cat(parts, 1)
    for row, pad in enumerate(pads):
        alone = planned(ids[row : row + 1, pad:], use_cache=False).logits
        close(got[row : row + 1, pad:], alone)


def test_right_padding_without_a_cache_is_exact_and_with_one_is_refused(pair: Any) -> None:
    planned, _ = pair
    ids = tokens(2)
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0
    got = planned(ids, attention_mask=mask, use_cache=False).logits
    close(got[1:, :60], planned(ids[1:, :60], use_cache=False).logits)
    with pytest.raises(UnsupportedError, match="pad on the left"):
        planned(ids, attention_mask=mask, past_key_values=new_cache(planned))
    mask[1, 10] = 0
    with pytest.raises(UnsupportedError, match="holes"):
        planned(ids, attention_mask=mask, use_cache=False)


def test_generate_uses_the_rings_and_gives_the_reference_tokens(pair: Any) -> None:
    planned, reference = pair
    ids = tokens(2, 40)
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    out = planned.generate(ids, attention_mask=torch.ones_like(ids), **options)
    want = ids
    for _ in range(30):
        want = torch.cat([want, reference(want, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(out.sequences, want)
    cache = out.past_key_values
    layer = planned.config.num_key_value_heads
    kept = [[(store.keys.shape[1], store.keys.shape[2]) for store in layer.stores] for layer in cache.layers]
    assert kept[1] == [(layer, SINK + RECENT)]
    assert (1, SINK + RECENT) in kept[0]
    full = 2 * 2 * 2 * layer * 69 * 8 * 4
    assert cache.size_bytes() < full


def test_generate_with_beams_and_left_padding_equals_the_ordinary_cache(pair: Any) -> None:
    planned, _ = pair
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :15] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "num_beams": 3,
        "do_sample": False,
        "pad_token_id": 0,
    }
    rings = planned.generate(ids, **options)
    plain = planned.generate(ids, past_key_values=DynamicCache(config=planned.config), **options)
    assert torch.equal(rings, plain)


def test_below_min_length_the_model_is_the_dense_one() -> None:
    model = make_model(6, 2)
    ids = tokens(2, START - 1)
    with torch.no_grad():
        dense = model(ids).logits
        apply_plan(model, plan_dict(6, 2))
        close(model(ids).logits, dense)


def test_removing_the_plan_gives_the_former_model_back() -> None:
    model = make_model(6, 2)
    ids = tokens(1)
    with torch.no_grad():
        dense = model(ids).logits
        apply_plan(model, plan_dict(6, 2))
        assert not torch.allclose(model(ids).logits, dense)
        assert "planned attention, heads: 2 full, 4 streaming" in repr(model)
        remove_plan(model)
        assert "planned attention" not in repr(model)
        assert torch.equal(model(ids).logits, dense)
    assert model.config._attn_implementation == "sdpa"
    assert "_prepare_cache_for_generation" not in vars(model)
    with pytest.raises(ValueError, match="no attention plan"):
        new_cache(model)


def test_a_second_model_on_the_same_config_object_stays_dense() -> None:
    model = make_model(6, 2)
    other = LlamaForCausalLM(model.config).eval()
    ids = tokens(1)
    with torch.no_grad():
        dense = other(ids).logits
        apply_plan(model, plan_dict(6, 2))
        close(other(ids).logits, dense)


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\[0\] has 4 heads in 4 groups, the model has 6 in 2"):
        apply_plan(make_model(6, 2), plan_dict(4, 4))
    short = plan_dict(6, 2)
    short["layers"] = short["layers"][:1]
    with pytest.raises(ValueError, match="1 layers, the model has 2"):
        apply_plan(make_model(6, 2), short)


def test_models_outside_the_interface_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="not a transformers model"):
        apply_plan(torch.nn.Linear(2, 2), plan_dict(6, 2))
    model = make_model(6, 2)
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedError, match="linear_attention"):
        apply_plan(model, plan_dict(6, 2))


def test_what_the_band_cannot_express_is_refused() -> None:
    model = make_model(6, 2)
    apply_plan(model, plan_dict(6, 2))
    with torch.no_grad():
        with pytest.raises(UnsupportedError, match="packed"):
            model(tokens(1, 8), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), use_cache=False)
        with pytest.raises(UnsupportedError, match="2-D"):
            model(tokens(1, 8), attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool))
        with pytest.raises(UnsupportedError, match="rolled back"):
            new_cache(model).crop(-1)


def test_a_planned_cache_that_nobody_reads_is_refused_at_the_next_step() -> None:
    model = make_model(6, 2)
    apply_plan(model, plan_dict(6, 2))
    cache = new_cache(model)
    with torch.no_grad():
        model(tokens(1, 8), past_key_values=cache)
        remove_plan(model)
        model(tokens(1, 1), past_key_values=cache)
        with pytest.raises(UnsupportedError, match="not read"):
            model(tokens(1, 1), past_key_values=cache)


def test_heads_are_sorted_by_store_and_pattern() -> None:
    compiled = compile_layer(parse_plan(plan_dict(6, 2)).layers[0])
    assert [segment.kv_heads for segment in compiled.segments] == [(0,), (1,)]
    assert sorted(h for bucket in compiled.buckets for h in bucket.heads) == list(range(6))
    assert [bucket.band for bucket in compiled.buckets] == [(1, 17, 30), None, (SINK, RECENT, START)]


def test_a_plan_for_heads_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="heads of 16 channels, the model's have 8"):
        apply_plan(make_model(4, 2), {**plan_dict(4, 2), "head_dim": 16})


def test_a_plan_that_is_removed_is_noticed() -> None:
    from nstf.runtime.generation_request import fingerprint

    model = make_model(4, 2)
    apply_plan(model, plan_dict(4, 2))
    before = fingerprint(model)
    assert fingerprint(model) == before
    remove_plan(model)
    assert fingerprint(model) != before
