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


def test_layers_round_beside_exact_products(model) -> None:
    exact, _ = run(model, 80)
    with products.fast_products():
        rounded, _ = run(model, 80)
        with products.rounded_layers(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.equal(run(model, 80)[0], rounded)
            with products.exact_products():
                assert torch.equal(run(model, 80)[0], rounded)
            left = torch.randn(80, 24)
            assert torch.equal(products.outer(left, left), left.T @ left)
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.equal(run(model, 80)[0], exact)


def test_layers_that_torch_alone_rounds_do_so_in_its_block(monkeypatch) -> None:
    monkeypatch.setattr(products, "_own_products", lambda: False)
    monkeypatch.setattr(products, "rounded_by_torch", lambda: True)
    for device in ("cpu", "cuda"):
        assert not products.rounds_alone(torch.device(device))
        with products.rounded_layers(torch.device(device)):
            assert torch.get_float32_matmul_precision() == "medium"
    # With products of our own text is read without torch's, images are not.
    monkeypatch.setattr(products, "_own_products", lambda: True)
    for language, precision in ((True, "highest"), (False, "medium")):
        assert products.rounds_alone(torch.device("cpu"), language) is language
        with products.rounded_layers(torch.device("cpu"), language):
            assert torch.get_float32_matmul_precision() == precision


@pytest.fixture
def llama(monkeypatch) -> Iterator[nn.Module]:
    """A model whose layers work in bfloat16, on any processor."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(products, "_has", lambda name: True)
    products._own_products.cache_clear()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    made = LlamaForCausalLM(config).eval().requires_grad_(False)
    products.rounding(made, made.lm_head)
    yield made
    products._own_products.cache_clear()


def hidden(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with products.layers_in(model, ids.numel()):
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def test_a_plain_model_works_in_bfloat16_in_the_block_and_no_other_does(llama) -> None:
    ids = torch.arange(320).reshape(1, -1) % 50
    other = type(llama)(llama.config).eval().requires_grad_(False)
    other.load_state_dict(llama.state_dict())
    exact, few = hidden(llama, ids), hidden(llama, ids[:, :8])
    seen = []
    llama.model.layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].dtype)
    )
    for block in (products.rounded_layers(torch.device("cpu")), products.fast_products()):
        with block:
            rounded = hidden(llama, ids)
            assert torch.allclose(hidden(llama, ids[:, :8]), few, atol=1e-2)  # torch may round it
            assert rounded.dtype == torch.float32
            assert 1e-5 < float((rounded - exact).norm() / exact.norm()) < 2e-2
    with products.rounded_layers(torch.device("cpu")):
        assert torch.equal(hidden(other, ids), exact)
        assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(hidden(llama, ids), exact)
    assert seen == [torch.bfloat16, torch.float32] * 2 + [torch.float32]


def test_a_gradient_through_layers_in_bfloat16_is_near_the_exact_one(llama) -> None:
    from nstf.analyzers.sensitivity import OutputSensitivity, checkpoint_layers

    ids, found = torch.arange(320).reshape(1, -1) % 50, []
    llama.model.embed_tokens.register_forward_hook(lambda module, args, out: out.requires_grad_())
    checkpoint_layers(list(llama.model.layers))
    sensitivity = OutputSensitivity()
    for index, layer in enumerate(llama.model.layers):
        sensitivity.watch(str(index), layer.mlp.up_proj)
    for block in (products.exact_products(), products.rounded_layers(torch.device("cpu"))):
        with block:
            hidden(llama, ids).sin().sum().backward()
        found.append(sensitivity.take())
    exact, rounded = found
    for name, wanted in exact.items():
        assert rounded[name].dtype == torch.float64
        assert float((rounded[name] - wanted).norm() / wanted.norm()) < 0.03


def test_models_with_other_weights_have_their_linear_layers_rounded_alone(llama) -> None:
    llama.model.layers[0].mlp.conv = nn.Conv1d(2, 2, 1)
    assert products._is_plain(type(llama)(llama.config)) and not products._is_plain(llama)
    products.rounding(llama, llama.lm_head)
    assert (
        "forward" in llama.model.layers[0].mlp.down_proj.__dict__ and "forward" not in llama.lm_head.__dict__
    )


def test_positions_beyond_256_are_exact_while_layers_round(llama) -> None:
    """With AMX torch rounds the product of positions and frequencies in a block of fast products: 511 becomes 512."""
    rotary, x = llama.model.rotary_emb, torch.zeros(1, 512, 32)
    exact = rotary(x, torch.arange(512)[None])
    with products.rounded_layers(torch.device("cpu")):
        for found, wanted in zip(rotary(x, torch.arange(512)[None]), exact, strict=True):
            assert torch.equal(found, wanted)


def test_the_head_is_left_alone(model) -> None:
    hidden = torch.randn(80, 32)
    wanted = model[3](hidden)
    with products.fast_products():
        assert torch.equal(model[3](hidden), wanted)


def test_an_outer_product_rounds_in_the_block_and_only_there(monkeypatch) -> None:
    monkeypatch.setattr(products, "_own_products", lambda: True)
    monkeypatch.setattr(products, "rounded_by_torch", lambda: False)
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
