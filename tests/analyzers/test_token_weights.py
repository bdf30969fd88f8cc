"""What a token counts: gradients per token, tempered tails, and Hessians that use them."""

import pytest
import torch
from torch import nn

from nstf.analyzers.moments import InputMoments
from nstf.analyzers.sensitivity import sampled_gradient
from nstf.analyzers.token_weights import TokenGradients, temper, token_weights


def test_weights_are_the_mean_squared_gradients_of_layers_that_share_an_input() -> None:
    torch.manual_seed(0)
    q, k, o = nn.Linear(6, 4), nn.Linear(6, 2), nn.Linear(2, 3)
    tokens = TokenGradients()
    for name, layer in (("q", q), ("k", k), ("o", o)):
        tokens.watch(name, layer)
    batches = [torch.randn(2, 5, 6, requires_grad=True) for _ in range(3)]
    expected, gathered = [], []
    for x in batches:
        outs = q(x), k(x)
        last = o(outs[0][..., :2] * outs[1])
        for out in outs:
            out.retain_grad()
        (last**3).sum().backward()
        gathered.append(tokens.take())
        expected.append(torch.cat([out.grad.reshape(10, -1) for out in outs], dim=1).square().mean(dim=1))
    direct = torch.cat(expected)
    found = token_weights(gathered, 30)
    assert sorted(found) == ["o", "q"]
    assert torch.allclose(found["q"], direct / direct.mean(), rtol=1e-4)


def test_a_layer_that_saw_other_rows_than_the_tokens_has_no_weights() -> None:
    layer = nn.Linear(3, 3)
    tokens = TokenGradients()
    tokens.watch("twice", layer)
    layer(layer(torch.randn(4, 3))).sum().backward()
    assert token_weights([tokens.take()], 4) == {}


def test_a_weighted_hessian_is_the_weighted_mean_over_all_batches() -> None:
    torch.manual_seed(1)
    x, w = torch.randn(20, 5), torch.rand(20)
    moments = InputMoments({"a": w})
    for part in x.split(7):
        moments.add("a", part)
        moments.add("plain", part)
    found = moments.pop()
    assert torch.allclose(found["a"].hessian, (x * w[:, None]).T @ x / w.sum(), atol=1e-6)
    assert torch.allclose(found["plain"].hessian, x.T @ x / 20, atol=1e-6)
    assert found["a"].tokens == 20


def test_more_rows_than_weights_are_refused() -> None:
    moments = InputMoments({"a": torch.ones(3)})
    with pytest.raises(ValueError, match="more than the 3 rows"):
        moments.add("a", torch.randn(4, 2))


@pytest.mark.parametrize(("power", "cap"), [(1.0, 4.0), (0.5, 1e9), (0.25, 2.0)])
def test_tempered_weights_have_mean_one_and_no_heavy_tail(power: float, cap: float) -> None:
    torch.manual_seed(2)
    weights = torch.randn(5000).mul(3).exp()
    out = temper(weights, power, cap)
    assert float(out.mean()) == pytest.approx(1, abs=1e-4)
    assert float(out.max()) <= cap * 1.05
    order = weights.argsort()
    assert bool((out[order].diff() >= 0).all())


def test_a_power_of_zero_counts_all_tokens_the_same() -> None:
    assert torch.equal(temper(torch.tensor([1.0, 100.0, 0.5]), 0.0, 2.0), torch.ones(3))


def test_a_sampled_gradient_has_the_covariance_of_the_fisher_information() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]])
    p = torch.softmax(logits[0], -1)
    samples, diagonal = sampled_gradient(logits.expand(40_000, 4), generator, 4)
    assert torch.allclose(samples.T @ samples / 40_000, torch.diag(p) - p[:, None] * p, atol=5e-3)
    assert torch.allclose(diagonal[0], p * (1 - p))
    assert torch.allclose(samples.mean(dim=0), torch.zeros(4), atol=1e-2)
