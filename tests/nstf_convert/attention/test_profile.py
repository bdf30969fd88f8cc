"""Expected losses against the reference, and a plan of a model whose layers slide, from profile to bytes."""

from dataclasses import replace

import pytest
import torch
import transformers

from nstf.runtime.attention_plan import GroupPlan, HeadPlan, LayerPlan
from nstf.runtime.attention_windows import windows_of
from nstf.runtime.kv_formats import PLAIN, KVFormat, group_bytes, layer_bytes, reference_attention
from nstf_convert.pipeline.attention import measured, retrieval, simulate
from nstf_convert.pipeline.attention.choose import choose
from nstf_convert.pipeline.attention.measured import Measure
from nstf_convert.pipeline.attention.options import choices, layers_of
from nstf_convert.pipeline.attention.profile import (
    FORMATS,
    SINK,
    WINDOWS,
    _Scorer,
    profile,
    profile_of_answers,
)
from nstf_convert.pipeline.attention.retrieval import Haystack
from nstf_convert.streamed import StreamedModel

FULL = HeadPlan("full", {}, 0, 0.0, 1.0)


def band(sink: int, window: int, least: int = 0) -> HeadPlan:
    return HeadPlan("streaming", {"sink": sink, "window": window}, least, 0.0, 1.0)


@pytest.mark.parametrize("own", [0, 150, 1000])
def test_expected_losses_are_those_of_what_the_reference_moves(own: int) -> None:
    generator = torch.Generator().manual_seed(own)
    q, k, v, g = (torch.randn(n, 384, 16, generator=generator).half().float() for n in (2, 1, 1, 2))
    blocks, windows = [1, 2], WINDOWS[:2]
    gradients = [g[:, b * 128 : (b + 1) * 128] for b in blocks]
    found = _Scorer(q, k[0], v[0], 0.25, windows, own).losses(blocks, gradients)
    head, kept = (band(0, own), (0, own, 0)) if own else (FULL, (0, 0, 0))

    def attended(plan: LayerPlan) -> torch.Tensor:
        return reference_attention(q, k, v, plan, scale=0.25)

    dense = attended(LayerPlan((head,) * 2, (GroupPlan(*kept, PLAIN, PLAIN),)))

    def loss(plan: LayerPlan) -> torch.Tensor:
        product = (g * (attended(plan) - dense)).sum(-1).sum(0)
        return (
            torch.stack([0.5 * product[b * 128 : (b + 1) * 128].square().mean() for b in blocks])
            .mean()
            .double()
        )

    for index, fmt in list(enumerate(FORMATS))[:: 3 if own else 1]:
        for name, formats in (("keys", (fmt, PLAIN)), ("values", (PLAIN, fmt))):
            wanted = loss(LayerPlan((head,) * 2, (GroupPlan(*kept, *formats),)))
            torch.testing.assert_close(found[name][index], wanted, rtol=2e-3, atol=1e-9)
    if own:
        assert not found["rings"].any() and not found["blocks"].any()
        return
    for index, window in enumerate(windows):
        wanted = loss(LayerPlan((band(SINK, window),) * 2, (GroupPlan(SINK, window, 0, PLAIN, PLAIN),)))
        torch.testing.assert_close(found["rings"][index], wanted, rtol=2e-3, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "mistral"])
def test_a_model_whose_layers_slide_gets_a_plan_within_its_own_bytes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gemma3_text" else {}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=200, max_position_embeddings=1024, **kinds,
    )  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if name.endswith("_proj.weight") and "self_attn" in name:
                weight *= 12
    stated = {**config.to_dict(), "architectures": [type(plain).__name__]}
    model = StreamedModel(stated, plain.state_dict().__getitem__)
    contexts = [torch.randint(0, 60, (512,), generator=torch.Generator().manual_seed(s)) for s in range(2)]
    found = profile(model, contexts, 0)
    windows = windows_of(config)
    assert found.layer_windows == windows and set(windows) - {0} == {200}
    measure = Measure(model, contexts)
    unchanged = [c for unit in choices(found) for c in unit if c.is_plain]
    assert abs(measure(layers_of(unchanged, found)).mean) < 1e-6
    dense = sum(2 * 16 * 4 * (512 if not w else 256) for w in windows)
    assert sum(group_bytes(c.group, 16, 512) for c in unchanged) == dense
    # The last two pages stay in 16 bits: of a window of 200 positions that is half.
    budget = 0.6 if kind == "gemma3_text" else 0.8
    chosen = choose(found, 16, measure, budget, None)
    assert chosen.size_bytes == sum(layer_bytes(layer, 16, 512) for layer in chosen.layers) <= budget * dense
    assert chosen.share == chosen.size_bytes / dense and 0 < chosen.loss.mean < 1
    for layer, window in zip(chosen.layers, windows, strict=True):
        if window:
            assert {(g.sink, g.recent, g.min_length) for g in layer.groups} == {(0, window, 0)}
            assert {h.streaming for h in layer.heads} == {(0, window, 0)}
    assert any(
        g.keys.bits < 16 for layer, w in zip(chosen.layers, windows, strict=True) if w for g in layer.groups
    )
    assert all("window 200" not in name for name, _, _ in chosen.rivals)
    # Two answers of two tokens, hidden in the first context.
    asked = Measure(model, contexts, [Haystack(contexts[0], ((300, 302), (510, 512)))])
    divergence = measure.divergences(chosen.layers)[0]
    right = retrieval.found(model, asked.stacks[0], simulate.dense)
    expected = divergence[[299, 300, 509, 510]].mean() * (right + 1) / 3
    assert asked(chosen.layers).answers == pytest.approx(float(expected), rel=1e-3)
    assert measure(chosen.layers).answers == 0.0
    # Logits of so many positions at a time, also where a context has more answers.
    monkeypatch.setattr(measured, "LOGITS", 3 * 60)
    rows, logits = [], model.logits
    assert asked.of_answers(chosen.layers) > 0  # what dense attention finds is counted once, before
    monkeypatch.setattr(model, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    assert asked.of_answers(chosen.layers) == pytest.approx(float(expected), rel=1e-3)
    assert rows == [3, 3, 1, 1]


def test_what_is_expected_at_answers_is_what_they_lose() -> None:
    """Second order, sampled labels: within a factor of two for small changes; options of other groups are told apart."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
    )  # fmt: skip
    plain = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if name.endswith("_proj.weight") and "self_attn" in name:
                weight *= 12
    stated = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    model = StreamedModel(stated, plain.state_dict().__getitem__)
    ids = [torch.randint(0, 60, (512,), generator=torch.Generator().manual_seed(s)) for s in range(3)]
    stacks = [Haystack(i, ((400, 440), (450, 511))) for i in ids]
    windows = (128,)
    expected = profile_of_answers(model, stacks, windows, 0)
    assert expected.context == 512 and expected.windows == windows
    measure = Measure(model, ids, stacks)
    share = (sum(retrieval.found(model, stack, simulate.dense) for stack in stacks) + 1) / 7
    for kind, fmt in (("keys", KVFormat(4, "token", False)), ("values", KVFormat(4, "channel", False))):
        for layer in range(2):
            groups = [[GroupPlan(0, 0, 0, PLAIN, PLAIN)] * 2 for _ in range(2)]
            groups[layer][1] = replace(groups[layer][1], **{kind: fmt})
            measured = measure.of_answers([LayerPlan((FULL,) * 4, tuple(g)) for g in groups])
            loss = float(getattr(expected, kind)[layer, 1, FORMATS.index(fmt)])
            assert 0.5 < share * loss / measured < 2, (kind, layer)
