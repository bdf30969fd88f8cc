"""Heads built to look at known places are classified correctly; the selection keeps its bounds."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from nstf.analyzers.attention import AttentionProfile, profile_attention
from nstf.analyzers.attention_patterns import Pattern, grid, score_group
from nstf.analyzers.attention_select import holding, order, select_plan
from nstf.errors import UnsupportedError
from nstf.runtime.attention_plan import parse_plan

HEAD_DIM = 32
MARK = 7
LOCAL, GLOBAL, COLUMNS = 0, 1, 2
PATTERNS = grid(sinks=(4,), windows=(32, 64), stripes=((16, 8),), thresholds=(0.9,), block=64)


def built_model(
    layers: int = 1, kv_heads: int = 4, kinds: tuple[int, ...] = (0, 1, 2, 0)
) -> LlamaForCausalLM:
    """Heads of three kinds: looking next to themselves, everywhere alike, or at tokens MARK wherever
    they are.
    """
    torch.manual_seed(0)
    hidden = 4 * HEAD_DIM
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).eval()
    embedding = model.model.embed_tokens.weight.data.normal_()
    embedding[:, :2] = torch.tensor([1.0, 0.0])
    embedding[MARK, 1] = 8.0
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.data.zero_()
        query = attention.q_proj.weight.data.view(4, HEAD_DIM, hidden)
        key = attention.k_proj.weight.data.view(kv_heads, HEAD_DIM, hidden)
        for head, kind in enumerate(kinds):
            group = head // (4 // kv_heads)
            if kind == LOCAL:
                # A constant in all rotary pairs: the score falls with the distance.
                query[head, :, 0] = key[group, :, 0] = 4.0
            if kind == COLUMNS:
                # Only the slowest rotary pairs, which hardly turn: the score is the key's content.
                query[head, [14, 15, 30, 31], 0] = 6.0
                key[group, [14, 15, 30, 31], 1] = 6.0
    return model


def windows(*lengths: int) -> list[Tensor]:
    out = []
    for seed, length in enumerate(lengths):
        ids = torch.randint(8, 64, (length,), generator=torch.Generator().manual_seed(seed))
        ids[torch.arange(10, length, 97)] = MARK
        out.append(ids)
    return out


@pytest.fixture(scope="module")
def profile() -> AttentionProfile:
    return profile_attention(built_model(), windows(256, 256, 512), queries=64, patterns=PATTERNS)


def test_a_local_head_is_streaming_a_uniform_one_full_and_a_marker_one_vertical(
    profile: AttentionProfile,
) -> None:
    plan = select_plan(profile, kld_budget=1.0, error_bound=0.2)
    names = [head["pattern"] for head in plan["layers"][0]["heads"]]
    assert names == ["streaming", "full", "vertical_slash", "streaming"]
    assert [group["evict"] for group in plan["layers"][0]["groups"]] == [True, False, False, True]
    head = plan["layers"][0]["heads"][0]
    assert head["params"] == {"sink": 4, "window": 32}
    assert head["error"] < 0.2 and head["mass"] > 0.9
    assert head["min_length"] == 256


def test_mass_and_keys_for_95_percent_are_those_of_the_construction(profile: AttentionProfile) -> None:
    scores = profile.lengths[512]
    uniform = scores.mass[0, GLOBAL, 0]
    assert float(uniform) == pytest.approx(36 / 481, rel=0.1)
    assert float(scores.keys[0, GLOBAL]) == pytest.approx(0.95 * 481 / 512, rel=0.02)
    assert float(scores.keys[0, LOCAL]) < 0.03
    assert profile.lengths[256].windows == 2
    torch.testing.assert_close(scores.weight.sum(1), torch.ones(1))


def test_the_plan_survives_the_runtime_parser(profile: AttentionProfile) -> None:
    plan = select_plan(profile, kld_budget=1.0, error_bound=0.2, measure=lambda plan: 0.5)
    parsed = parse_plan(plan)
    assert parse_plan(parsed.to_json()) == parsed
    assert parsed.kld_measured == 0.5
    assert parsed.head_dim == HEAD_DIM
    assert parsed.profile_lengths == (256, 512)


def brute(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sink: int, window: int
) -> tuple[Tensor, Tensor]:
    total, count = key.shape[0], query.shape[1]
    distance = torch.arange(total - count, total)[:, None] - torch.arange(total)
    scores = query.double() @ key.double().T * scale
    full = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)
    seen = (distance >= 0) & ((distance < window) | (torch.arange(total) < sink))
    part = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    error = ((part - full) @ value.double()).square().sum((1, 2))
    return error.float(), (full * seen).sum(-1).mean(-1).float()


def test_nested_windows_give_the_same_as_an_explicit_mask() -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 64, 16, generator=generator)
    key, value = torch.randn(2, 400, 16, generator=generator).unbind(0)
    patterns = grid(sinks=(0, 4, 30), windows=(1, 50, 300), stripes=(), thresholds=())
    scores = score_group(query, key, value, 0.3, patterns)
    for index, pattern in enumerate(patterns):
        error, mass = brute(query, key, value, 0.3, int(pattern["sink"]), int(pattern["window"]))
        torch.testing.assert_close(scores.sq_error[index], error, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(scores.mass[index], mass, atol=1e-5, rtol=1e-5)


def test_patterns_that_keep_everything_have_no_error() -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 64, 16, generator=generator)
    key, value = torch.randn(2, 200, 16, generator=generator).unbind(0)
    patterns = (
        Pattern("vertical_slash", (("vertical", 1), ("slash", 135))),
        Pattern("block_topk", (("block", 64), ("threshold", 1.0))),
        Pattern("streaming", (("sink", 4), ("window", 190))),
    )
    scores = score_group(query, key, value, 0.1, patterns)
    assert float(scores.sq_error[1, 0]) < 1e-8 * float(scores.sq_norm[0])
    assert float(scores.mass[1, 0]) == pytest.approx(1.0, abs=1e-5)
    assert float(scores.sq_error[0, 0]) > 0
    # Too long for this text: it would be exact, and that would say nothing about longer ones.
    assert scores.sq_error[2, 0] == float("inf")


def test_a_group_is_evicted_only_when_its_heads_are_local_together() -> None:
    model = built_model(kv_heads=2, kinds=(LOCAL, LOCAL, LOCAL, GLOBAL))
    model.model.layers[0].self_attn.q_proj.weight.data.view(4, HEAD_DIM, -1)[3].zero_()
    measured = profile_attention(model, windows(512), queries=64, patterns=PATTERNS)
    plan = select_plan(measured, kld_budget=1.0, error_bound=0.2)
    layer = plan["layers"][0]
    assert [head["pattern"] for head in layer["heads"]] == ["streaming", "streaming", "streaming", "full"]
    assert [group["evict"] for group in layer["groups"]] == [True, False]
    parse_plan(plan)


def streaming_heads(plan: dict[str, Any]) -> int:
    return sum(head["pattern"] == "streaming" for layer in plan["layers"] for head in layer["heads"])


@pytest.fixture(scope="module")
def wide_profile() -> AttentionProfile:
    model = built_model(layers=3, kv_heads=2, kinds=(LOCAL, LOCAL, LOCAL, LOCAL))
    return profile_attention(model, windows(256), queries=64, patterns=PATTERNS)


@pytest.mark.parametrize("budget", [0.0, 0.1, 0.35, 0.75, 5.0])
def test_the_measured_kld_of_the_plan_stays_within_the_budget(
    wide_profile: AttentionProfile, budget: float
) -> None:
    calls = []

    def measure(plan: dict[str, Any]) -> float:
        calls.append(plan)
        parse_plan(plan)
        return 0.1 * streaming_heads(plan)

    plan = select_plan(wide_profile, kld_budget=budget, error_bound=0.2, measure=measure, measured_length=512)
    assert plan["kld_measured"] <= budget
    assert plan["kld_measured"] == pytest.approx(0.1 * streaming_heads(plan))
    assert len(calls) <= 8
    if budget >= 1.2:
        assert streaming_heads(plan) == 12
        assert all(head["params"]["window"] == 32 for layer in plan["layers"] for head in layer["heads"])
    else:
        # The next step, of one head or one group of two, would not have fitted.
        assert 0.1 * streaming_heads(plan) > budget - 0.2


def test_a_measure_that_fails_to_give_a_number_accepts_nothing(wide_profile: AttentionProfile) -> None:
    plan = select_plan(
        wide_profile, kld_budget=1.0, error_bound=0.2, measure=lambda plan: float("nan"), measured_length=512
    )
    assert streaming_heads(plan) == 0 and plan["kld_measured"] == 0.0


def test_patterns_that_the_measurement_would_not_see_are_not_accepted(wide_profile: AttentionProfile) -> None:
    plan = select_plan(
        wide_profile, kld_budget=1.0, error_bound=0.2, measure=lambda plan: 0.0, measured_length=511
    )
    assert streaming_heads(plan) == 0


def test_nothing_within_the_error_bound_means_a_dense_plan(wide_profile: AttentionProfile) -> None:
    def measure(plan: dict[str, Any]) -> float:
        raise AssertionError("a dense plan needs no measurement")

    plan = select_plan(wide_profile, kld_budget=1.0, error_bound=0.0, measure=measure)
    assert all(head["pattern"] == "full" for layer in plan["layers"] for head in layer["heads"])
    assert order(wide_profile, 0.0) == []


def test_min_length_is_the_length_from_which_on_the_pattern_holds() -> None:
    patterns = tuple(Pattern("streaming", (("sink", 4), ("window", w))) for w in (64, 128))
    errors = {256: torch.tensor([0.3, 0.1]), 512: torch.tensor([0.1, 0.1]), 1024: torch.tensor([0.1, 0.1])}
    assert holding(patterns, errors, ("streaming",), 0.2) == {0: 512, 1: 256}
    errors[1024] = torch.tensor([0.3, 0.1])
    assert holding(patterns, errors, ("streaming",), 0.2) == {1: 256}
    errors[256] = torch.tensor([float("inf")] * 2)
    assert holding(patterns, errors, ("streaming",), 0.2) == {1: 512}
    errors[1024] = torch.tensor([float("inf"), float("nan")])
    assert holding(patterns, errors, ("streaming",), 0.2) == {}
    assert holding(patterns, {64: torch.tensor([0.0, 0.0])}, ("streaming",), 0.2) == {0: 68, 1: 132}


def test_the_steps_of_a_head_save_less_and_less_per_added_error(wide_profile: AttentionProfile) -> None:
    last: dict[Any, float] = {}
    steps = order(wide_profile, 0.2)
    for step in steps:
        key = (step.layer, step.heads, step.group)
        ratio = step.saved / step.added
        assert step.saved > 0 and step.added > 0 and ratio <= last.get(key, float("inf"))
        last[key] = ratio
    ratios = [step.saved / step.added for step in steps]
    assert ratios == sorted(ratios, reverse=True)


def test_profiling_leaves_the_model_as_it_was() -> None:
    model = built_model()
    before = model.config._attn_implementation
    ids = windows(256)[0]
    with torch.no_grad():
        logits = model(ids[None]).logits
    profile_attention(model, [ids], queries=64, patterns=PATTERNS)
    assert model.config._attn_implementation == before
    with torch.no_grad():
        assert torch.equal(model(ids[None]).logits, logits)


def test_weights_that_come_just_in_time_are_enough() -> None:
    model = built_model()
    want = profile_attention(model, windows(256), queries=64, patterns=PATTERNS)
    for layer in model.model.layers:
        held = {name: p.data for name, p in layer.named_parameters()}

        def bring(module: Any, args: Any, held: dict[str, Tensor] = held) -> None:
            for name, parameter in module.named_parameters():
                parameter.data = held[name]

        def drop(module: Any, args: Any, output: Any) -> None:
            for parameter in module.parameters():
                parameter.data = torch.empty(0)

        drop(layer, None, None)
        layer.register_forward_pre_hook(bring)
        layer.register_forward_hook(drop)
    got = profile_attention(model, windows(256), queries=64, patterns=PATTERNS)
    assert torch.equal(got.lengths[256].error, want.lengths[256].error)


def test_wrong_windows_and_foreign_models_are_refused() -> None:
    model = built_model()
    with pytest.raises(ValueError, match="multiple of 64"):
        profile_attention(model, windows(256), queries=100)
    with pytest.raises(ValueError, match="no windows"):
        profile_attention(model, [])
    with pytest.raises(ValueError, match="100 tokens is too short"):
        profile_attention(model, windows(100), queries=64)
    with pytest.raises(UnsupportedError, match="attention interface"):
        profile_attention(torch.nn.Linear(2, 2), windows(256), queries=64)
    with pytest.raises(ValueError, match="must not be negative"):
        select_plan(profile_attention(model, windows(256), queries=64, patterns=PATTERNS), kld_budget=-1.0)


def test_the_profile_is_json_ready(profile: AttentionProfile) -> None:
    import json

    data = json.loads(json.dumps(profile.as_dict(), allow_nan=False))
    assert set(data["lengths"]) == {"256", "512"}
    assert len(data["patterns"]) == len(PATTERNS)


class Largest(TorchDispatchMode):
    """Largest tensor, in elements, that any operation gave back."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, Tensor) and item.device.type == "cpu":
                self.elements = max(self.elements, item.untyped_storage().nbytes() // item.element_size())
        return out


def test_no_tensor_is_larger_than_the_scores_of_one_kv_group() -> None:
    model = built_model(layers=2, kv_heads=2)
    with Largest() as largest:
        profile_attention(model, windows(2048), queries=64, patterns=PATTERNS)
    # 2 heads of a group, 64 queries, 2048 keys; the weights and activations are smaller.
    assert largest.elements <= 2 * 64 * (2048 + 64)
