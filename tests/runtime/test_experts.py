"""Modules of experts with encoded stacks: one grouped product each way, against the loop over decoded stacks."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nstf.kernels.cpu import grouped
from nstf.kernels.formats import EncodedTensor, decode
from nstf.kernels.torch import rows
from nstf.runtime import experts as runtime_experts
from nstf.runtime.fused import choose_products
from nstf.runtime.modules import attach
from nstf.runtime.parameter import EncodedParameter

pytestmark = pytest.mark.skipif(not grouped.available(), reason="the extension was not built")


def gpt_oss() -> nn.Module:
    """Stacks [experts, in, out], biases, and a gate of its own."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(0)
    experts = GptOssExperts(GptOssConfig(hidden_size=32, intermediate_size=48, num_local_experts=4))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return experts


def nemotron() -> nn.Module:
    """No gate."""
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    return NemotronHExperts(NemotronHConfig(hidden_size=32, moe_intermediate_size=48, n_routed_experts=4))


def twins(tiny: ModuleType, experts: nn.Module, tree: Any = None) -> tuple[Any, Any]:
    """(a module with decoded stacks, the same with encoded ones)."""
    dense: Any = experts.eval().requires_grad_(False)
    dense.config._experts_implementation_internal = "eager"
    encoded = copy.deepcopy(dense)
    for name in ("gate_up_proj" if dense.has_gate else "up_proj", "down_proj"):
        shape = tuple(dense.get_parameter(name).shape)
        leaf = tree or tiny.leaf("int", bits=4, group=32, lead=2)
        if tree is None and dense.is_transposed:
            from nstf.kernels.formats import Node
            from nstf.kernels.formats.permute import Params

            leaf = Node("permute", Params((0, 2, 1)), {"x": leaf})
        value = tiny.random_encoded(leaf, shape)
        dense.get_parameter(name).copy_(decode(value))
        attach(encoded, name, EncodedParameter(value, torch.float32))
    return dense, encoded


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a module was grouped."""
    seen: list[bool] = []
    products = runtime_experts.products

    def watched(*args: Any) -> Tensor | None:
        y = products(*args)
        seen.append(y is not None)
        return y

    monkeypatch.setattr(runtime_experts, "products", watched)
    return seen


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=1e-4, rtol=1e-4)


CHOICES = torch.tensor([[0, 2], [2, 3], [3, 0], [0, 3], [2, 0]])


@pytest.mark.parametrize("make", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", gpt_oss, nemotron], ids=str)
def test_a_layer_is_what_the_loop_over_its_experts_gives(
    tiny: ModuleType, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = tiny.new_model(make).model.layers[0].mlp.experts if isinstance(make, str) else make()
    dense, encoded = twins(tiny, experts)
    seen = counted(monkeypatch)
    x, weights = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)), torch.rand(5, 2)
    with torch.no_grad():
        for tokens in (1, 5):
            given = x[:tokens], CHOICES[:tokens], weights[:tokens]
            assert same(dense(*given), encoded(*given))
        low = encoded(x.bfloat16(), CHOICES, weights.bfloat16())
    assert low.dtype == torch.bfloat16 and seen == [True] * 3
    assert torch.allclose(
        low.float(), dense(x, CHOICES, weights), rtol=0.05, atol=0.05 * float(low.abs().max())
    )
    # With gradients on and nothing that wants one.
    assert same(dense(x, CHOICES, weights), encoded(x, CHOICES, weights)) and seen[-1]


def test_a_choice_of_no_expert_adds_nothing(tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, encoded = twins(tiny, tiny.new_model("MixtralForCausalLM").model.layers[0].mlp.experts)
    seen = counted(monkeypatch)
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    none = CHOICES.where(CHOICES != 2, 4)
    kept = torch.where(none < 4, weights, 0)
    assert same(encoded(x, none, weights), dense(x, CHOICES, kept))
    assert same(encoded(x, torch.full((5, 2), 4), weights), torch.zeros(5, 32)) and seen == [True, True]


def test_gradients_and_stacks_that_no_kernel_reads_go_through_the_loop(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = tiny.new_model("MixtralForCausalLM").model.layers[0].mlp.experts
    dense, encoded = twins(tiny, copy.deepcopy(experts))
    seen = counted(monkeypatch)
    x, weights = torch.randn(5, 32, requires_grad=True), torch.rand(5, 2)
    (own,) = torch.autograd.grad(encoded(x, CHOICES, weights).square().sum(), x)
    (expected,) = torch.autograd.grad(dense(x, CHOICES, weights).square().sum(), x)
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-2)
    dense, encoded = twins(tiny, experts, tiny.leaf("int", bits=4, group=8, lead=2))
    with torch.no_grad():
        assert same(dense(x, CHOICES, weights), encoded(x, CHOICES, weights))
    assert seen == [False, False]


def test_a_dense_stack_beside_an_encoded_one_goes_through_the_loop(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, encoded = twins(tiny, tiny.new_model("MixtralForCausalLM").model.layers[0].mlp.experts)
    attached = copy.deepcopy(dense)
    value: EncodedTensor = encoded.gate_up_proj_encoded.encoded
    attach(attached, "gate_up_proj", EncodedParameter(value, torch.float32))
    seen = counted(monkeypatch)
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    assert same(dense(x, CHOICES, weights), attached(x, CHOICES, weights)) and seen == [False]


def test_int8_activations_are_what_load_chooses_where_it_may(tiny: ModuleType) -> None:
    dense, encoded = twins(tiny, tiny.new_model("MixtralForCausalLM").model.layers[0].mlp.experts)
    model = nn.ModuleList([encoded])
    assert encoded.exact_products
    x, weights = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)), torch.full((5, 2), 0.5)
    expected = dense(x, CHOICES, weights)
    errors = []
    for exact in (True, False):
        choose_products(model, exact)
        errors.append(float((encoded(x, CHOICES, weights) - expected).norm() / expected.norm()))
    assert errors[0] < 1e-5 and 1e-5 < errors[1] < 0.03


def test_no_stack_and_no_expert_is_decoded(tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, encoded = twins(tiny, tiny.new_model("MixtralForCausalLM").model.layers[0].mlp.experts)
    taken: list[int] = []
    take = rows.take

    def watched(stack: EncodedTensor, index: int) -> EncodedTensor | None:
        taken.append(index)
        return take(stack, index)

    def fail(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("decoded")

    monkeypatch.setattr(rows, "take", watched)
    monkeypatch.setattr("nstf.kernels.formats.integer.decode", fail)
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    assert same(encoded(x, CHOICES, weights), dense(x, CHOICES, weights))
    assert sorted(set(taken)) == [0, 2, 3]  # nobody chose 1
