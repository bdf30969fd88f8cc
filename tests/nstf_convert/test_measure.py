import json
import math

import pytest
import torch

from nstf_convert.measure import (
    TokenScores,
    compare,
    compare_outputs,
    cut_windows,
    first_scored,
    score_window,
    summarise,
    summarise_outputs,
)


def logits(seed: int, rows: int = 40, vocabulary: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_a_model_against_itself_scores_zero_and_full_agreement():
    x, labels = logits(0), torch.arange(40)
    scores = compare(x, x.clone(), labels)
    assert scores.kl.abs().max() == 0
    assert scores.top1.all()
    assert torch.equal(scores.nll_ref, scores.nll_test)


def test_divergence_agrees_with_torch_and_is_in_nats():
    ref, labels = logits(0), torch.arange(40)
    for noise in (1.0, 0.1, 1e-2, 1e-4):  # divergences from 1 nat to 1e-9
        test = ref + noise * logits(1)
        assert_close_to_torch(ref, test, labels)


def assert_close_to_torch(ref, test, labels):
    expected = torch.nn.functional.kl_div(
        test.double().log_softmax(-1), ref.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    scores = compare(ref, test, labels)
    assert torch.allclose(scores.kl, expected, rtol=1e-3, atol=1e-14)
    nll = torch.nn.functional.cross_entropy(test.double(), labels, reduction="none")
    assert torch.allclose(scores.nll_test, nll, atol=1e-5)


def test_blocks_do_not_change_the_scores(monkeypatch):
    ref, test, labels = logits(0), logits(1), torch.arange(40)
    whole = compare(ref, test, labels)
    monkeypatch.setattr("nstf_convert.measure.MAX_ROWS", 7)
    assert torch.allclose(whole.kl, compare(ref, test, labels).kl, rtol=1e-6)


def test_a_nan_logit_is_never_hidden():
    ref, test = logits(0), logits(0)
    test[3, 5] = math.nan
    accuracy = summarise([compare(ref, test, torch.arange(40))])
    assert math.isnan(accuracy.mean_kl) and math.isnan(accuracy.p99_kl)
    assert accuracy.to_json()["mean_kl"] is None
    json.dumps(accuracy.to_json(), allow_nan=False)


def test_a_token_the_reference_excludes_costs_nothing_and_one_the_test_excludes_costs_everything():
    ref, test = torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    label = torch.tensor([0])
    assert compare(ref, test, label).kl.item() == pytest.approx(math.log(1.5))
    assert compare(test, ref, label).kl.item() == math.inf


def test_shapes_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match=r"\[40, 50\].*\[40, 49\]"):
        compare(logits(0), logits(0, vocabulary=49), torch.arange(40))


def test_standard_errors_are_those_of_the_mean_over_windows():
    def window(kl: float, nll: float) -> TokenScores:
        ones = torch.ones(4, dtype=torch.float64)
        return TokenScores(ones * kl, torch.ones(4, dtype=torch.bool), ones * 2.0, ones * nll)

    accuracy = summarise([window(0.1, 2.0), window(0.3, 2.2)])
    assert accuracy.mean_kl == pytest.approx(0.2)
    assert accuracy.mean_kl_se == pytest.approx(0.1)  # std 0.1414 / sqrt(2)
    assert accuracy.ppl_reference == pytest.approx(math.exp(2.0))
    assert accuracy.ppl_reference_se == 0
    assert accuracy.ppl_ratio == pytest.approx(math.exp(0.1))
    assert accuracy.ppl_ratio_se == pytest.approx(0.1 * math.exp(0.1))
    assert accuracy.windows == 2 and accuracy.tokens == 8
    assert summarise([window(0.1, 2.0)]).mean_kl_se is None


def test_percentiles_are_of_tokens_not_of_windows():
    kl = torch.arange(1, 101, dtype=torch.float64)
    same = torch.zeros(100, dtype=torch.float64)
    accuracy = summarise([TokenScores(kl, kl > 0, same, same)])
    assert (accuracy.median_kl, accuracy.p99_kl, accuracy.max_kl) == (50, 99, 100)


def test_windows_are_cut_without_overlap_and_the_last_255_of_512_are_scored():
    windows = cut_windows(range(1030), 512)
    assert windows.shape == (2, 512) and windows[1, 0] == 512
    assert 512 - 1 - first_scored(512) == 255
    assert cut_windows(range(1030), 512, count=1).shape == (1, 512)
    with pytest.raises(ValueError, match="100 tokens, less than one window of 512"):
        cut_windows(range(100), 512)
    with pytest.raises(ValueError, match="too short to score"):
        cut_windows(range(100), 2)


def test_a_window_is_scored_on_the_tokens_that_follow():
    class Table:
        def hidden(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(ids, 16).float()

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.roll(1, dims=-1) * 50  # predicts id + 1

    ids, model = torch.arange(16), Table()
    hidden = model.hidden(ids[None])[0]
    scores = score_window(model, hidden, model, hidden, ids)
    assert scores.kl.shape == (7,)
    assert scores.nll_ref.max() < 1e-9


def test_labels_are_brought_to_the_logits() -> None:
    """Windows of text stay on the CPU while a GPU computes."""
    moved = []

    class Labels(torch.Tensor):
        def to(self, device):
            moved.append(device)
            return self.as_subclass(torch.Tensor)

    logits = torch.randn(3, 5)
    scores = compare(logits, logits + 1, torch.tensor([0, 1, 4]).as_subclass(Labels))
    assert moved == [logits.device] and float(scores.kl.max()) < 1e-6


def test_no_tokens_is_an_error_not_a_perfect_score():
    with pytest.raises(ValueError, match="no scored tokens"):
        summarise([])


def test_similarity_of_encoder_outputs():
    ref = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    test = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    similarity = summarise_outputs(*compare_outputs(ref, test))
    assert similarity.mean_cosine == 0.5 and similarity.min_cosine == 0.0
    assert similarity.relative_l2 == pytest.approx(math.sqrt(2) / 2)
    with pytest.raises(ValueError, match="differ in shape"):
        compare_outputs(ref, test[:1])
