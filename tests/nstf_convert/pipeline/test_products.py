"""Products that may round their inputs: near the exact ones inside their block, and exact outside of it."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nstf_convert.pipeline import products


@pytest.fixture
def model(monkeypatch) -> Iterator[nn.Sequential]:
    monkeypatch.setattr(products, "_own_products", lambda: True)
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 32, bias=False), nn.Linear(32, 300))
    made.requires_grad_(False)
    products.rounding(made, made[3])
    # Where the CPU has AMX, oneDNN rounds float32 products by itself in a block of fast products: here only we do.
    with torch.backends.mkldnn.flags(enabled=False):
        yield made


def run(model: nn.Sequential, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def test_linear_layers_round_in_the_block_and_only_there(model) -> None:
    plain = nn.Sequential(*[type(p)() if isinstance(p, nn.Tanh) else p for p in model])
    y, gradient = run(plain, 80)
    with products.fast_products():
        rounded, rounded_gradient = run(model, 80)
        with products.exact_products():
            exact, _ = run(model, 80)
        few, _ = run(model, 8)
    assert torch.equal(exact, y) and torch.equal(run(model, 80)[0], y)
    for found, wanted in ((rounded, y), (rounded_gradient, gradient)):
        error = float((found - wanted).norm() / wanted.norm())
        assert 1e-5 < error < 1e-2
    assert torch.equal(few, run(model, 8)[0])


def test_linear_layers_go_on_rounding_beside_exact_products(model) -> None:
    exact, _ = run(model, 80)
    with products.exact_beside_layers():
        assert torch.equal(run(model, 80)[0], exact)
    with products.fast_products():
        rounded, _ = run(model, 80)
        with products.exact_beside_layers():
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.equal(run(model, 80)[0], rounded)
            left = torch.randn(80, 24)
            assert torch.equal(products.outer(left, left), left.T @ left)
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.equal(run(model, 80)[0], exact)


def test_the_head_is_left_alone(model) -> None:
    hidden = torch.randn(80, 32)
    wanted = model[3](hidden)
    with products.fast_products():
        assert torch.equal(model[3](hidden), wanted)


def test_an_outer_product_rounds_in_the_block_and_only_there(monkeypatch) -> None:
    monkeypatch.setattr(products, "_own_products", lambda: True)
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(80, n, generator=generator) for n in (24, 40))
    wanted = left.T @ right
    assert torch.equal(products.outer(left, right), wanted)
    with products.fast_products():
        rounded = products.outer(left, right)
    assert rounded.dtype == torch.float32
    assert 1e-5 < float((rounded - wanted).norm() / wanted.norm()) < 1e-2


def test_on_a_gpu_repeatable_operations_are_asked_for_and_settings_come_back() -> None:
    def settings() -> tuple[bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    before = settings()
    with products.repeatable(torch.device("cpu")):
        assert settings() == before
    with pytest.raises(KeyError), products.repeatable(torch.device("cuda")):
        assert settings() == (True, False, False)
        raise KeyError
    assert settings() == before
