"""Drawing without torch against transformers' logits processors."""

from array import array
from collections import Counter
from typing import Any

import pytest
import torch

from nstf.errors import UsageError
from nstf.kernels.cpu.engine_matrix import available
from nstf.runtime.token_sampler import Settings, TokenSampler, Wording, log_shares

pytestmark = pytest.mark.skipif(not available(), reason="the extension was not built")

CASES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_k": 3000},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 2.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.8, "repetition_penalty": 0.7},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1},
]


def processed(scores: torch.Tensor, seen: list[int], s: Settings) -> torch.Tensor:
    """Scores [vocab] by transformers, in the order of its `generate`."""
    import transformers as t

    ids, found = torch.tensor([seen]), scores[None].clone()
    steps: list[Any] = [
        t.RepetitionPenaltyLogitsProcessor(s.repetition_penalty),
        t.TemperatureLogitsWarper(s.temperature),
    ]
    if s.top_k:
        steps.append(t.TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        steps.append(t.TopPLogitsWarper(s.top_p))
    if s.min_p:
        steps.append(t.MinPLogitsWarper(s.min_p))
    for step in steps:
        found = step(ids, found)
    return found[0]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vocab", [7, 1000])
def test_scores_are_those_of_transformers(case: dict[str, Any], vocab: int) -> None:
    settings = Settings(**case)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(vocab, generator=generator) * 4
        seen = torch.randint(0, vocab, (12,), generator=generator).tolist()
        expected = processed(logits, seen, settings)
        values = array("f", logits.tolist())
        TokenSampler(settings, seen).scores(values.buffer_info()[0], vocab)
        torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-5, atol=1e-5)


def test_equal_scores_stay_together_at_the_last_place_of_top_k() -> None:
    values = array("f", [1.0, 3.0, 2.0, 2.0, 0.0])
    TokenSampler(Settings(temperature=1, top_k=2)).scores(values.buffer_info()[0], 5)
    assert [v > float("-inf") for v in values] == [False, True, True, True, False]


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    logits = [0.0, 1.0, 2.0, 3.0]
    share = torch.tensor(logits).softmax(0).tolist()

    def draws(seed: int | None, count: int) -> list[int]:
        sampler = TokenSampler(Settings(temperature=1.0, seed=seed))
        found = []
        for _ in range(count):
            values = array("f", logits)
            found.append(sampler.choose(values.buffer_info()[0], 4))
        return found

    counts = Counter(draws(5, 20000))
    for token, expected in enumerate(share):
        assert counts[token] / 20000 == pytest.approx(expected, abs=0.015)  # four standard errors
    assert draws(5, 100) == draws(5, 100)
    assert draws(5, 100) != draws(6, 100)


def test_the_likeliest_token_is_taken_at_temperature_0_and_a_penalty_changes_it() -> None:
    def first(sampler: TokenSampler) -> int:
        values = array("f", [1.0, 4.0, 3.5, -2.0])
        return sampler.choose(values.buffer_info()[0], 4)

    assert first(TokenSampler(Settings())) == 1
    penalised = TokenSampler(Settings(repetition_penalty=2.0))
    assert [first(penalised) for _ in range(3)] == [1, 2, 1]  # 4/2 = 2 < 3.5, then 2 > 1.75


def test_only_allowed_tokens_are_drawn() -> None:
    allowed = array("I", [0b1000, 1])
    for settings in (Settings(), Settings(temperature=1.0, seed=1)):
        values = array("f", [9.0] * 32 + [1.0, 9.0])
        token = TokenSampler(settings).choose(values.buffer_info()[0], 34, allowed.buffer_info()[0])
        assert token in (3, 32)


def test_logarithms_of_probabilities_are_those_of_torch() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3
    values = array("f", logits.tolist())
    found = log_shares(values.buffer_info()[0], 500, 4, 17)
    expected = logits.log_softmax(0)
    assert [t for t, _ in found] == [*expected.topk(4).indices.tolist(), 17]
    assert [v for _, v in found] == pytest.approx([float(expected[t]) for t, _ in found], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -2), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1),
     ("repetition_penalty", 0.0), ("repetition_penalty", float("inf"))],
)  # fmt: skip
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name} is .*must be"):
        Settings(**{name: value})


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_wording_is_that_of_transformers(size: int) -> None:
    import transformers as t

    prompt, text, end = [5, 6, 7, 5, 6], [7, 5, 6], 3
    settings: dict[str, Any] = {
        "suppress_tokens": [1, 19, 40, -1],
        "begin_suppress_tokens": [2],
        "bad_words_ids": [[end], [4], [6, 8], [8, 9], [5, 6, 10], [6, 40]],
        "sequence_bias": [[[11], 2.5], [[6, 12], -3.0], [[9, 13], 9.0], [[5, 6, 4], 1.0], [[11], 1.5]],
        "no_repeat_ngram_size": size,
    }
    wording = Wording.of(settings, 20)
    assert wording and not Wording.of({}, 20)
    for made in ([], text, text[:1]):
        logits = torch.randn(20, generator=torch.Generator().manual_seed(1))
        ids, expected = torch.tensor([prompt + made]), logits[None].clone()
        steps: list[Any] = [
            t.SequenceBiasLogitsProcessor(settings["sequence_bias"]),
            t.NoBadWordsLogitsProcessor(settings["bad_words_ids"][:-1], eos_token_id=[end]),
            t.SuppressTokensLogitsProcessor([1, 19]),
            t.SuppressTokensAtBeginLogitsProcessor([2], len(prompt)),
            *([t.NoRepeatNGramLogitsProcessor(size)] if size else []),
        ]
        for step in steps:
            expected = step(ids, expected)
        values = array("f", logits.tolist())
        wording.change(values.buffer_info()[0], prompt, made, {end})
        assert torch.equal(torch.tensor(values), expected[0])
