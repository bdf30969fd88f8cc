"""torch.compile of loaded models: one graph, with the same results, forwards and backwards."""

import copy
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nstf.runtime
from nstf.runtime.parameter import EncodedParameter

torch._dynamo.config.cache_size_limit = 64


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        *(pytest.param(a, marks=pytest.mark.slow) for a in ("Qwen3ForCausalLM", "GPT2LMHeadModel")),
    ],
)
def test_a_model_is_one_graph_with_the_same_results(
    tiny: ModuleType, tmp_path: Path, architecture: str
) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model(architecture)), engine="off")
    ids = tiny.inputs_of(architecture)["input_ids"]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for part in (ids, ids[:, :4]):
            found = compiled(part, use_cache=False).logits
            assert torch.allclose(found, model(part, use_cache=False).logits, atol=1e-5)


@pytest.mark.slow
def test_the_default_backend_compiles_a_model(tiny: ModuleType, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch's own backend needs a C++ compiler")
    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"]
    torch._dynamo.reset()
    compiled = torch.compile(model)
    with torch.no_grad():
        for part in (ids, ids[:, :4]):
            assert torch.allclose(compiled(part).logits, model(part).logits, atol=1e-4)


def test_gradients_go_through_a_compiled_model(tiny: ModuleType, tmp_path: Path) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")), engine="off")
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"]
    torch._dynamo.reset()
    found = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        start = model.get_input_embeddings()(ids).detach().requires_grad_()
        call(inputs_embeds=start, use_cache=False).logits.square().mean().backward()
        found.append(start.grad)
    assert torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-8)


def test_operators_keep_the_contracts_of_torch_library(tiny: ModuleType) -> None:
    stored = tiny.random_encoded(tiny.leaf("int", bits=4, group=32), (24, 64))
    parameter = EncodedParameter(stored, torch.float32)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for turned, (out, width) in ((False, (24, 64)), (True, (64, 24))):
        x = torch.randn(2, 3, width, requires_grad=True)
        given = (x, parameter.number, out, width, turned)
        torch.library.opcheck(torch.ops.nstf.linear.default, given, test_utils=checks)
        given = (torch.randn(2, 3, out), parameter.number, out, width, turned)
        torch.library.opcheck(torch.ops.nstf.input_gradient.default, given, test_utils=checks[:2])
    given = (torch.tensor([[1, 5]]), parameter.number, 64, torch.float32)
    torch.library.opcheck(torch.ops.nstf.embedding.default, given, test_utils=checks[:2])


def test_a_copy_of_a_weight_is_another_weight(tiny: ModuleType) -> None:
    parameter = EncodedParameter(
        tiny.random_encoded(tiny.leaf("int", bits=4, group=32), (24, 64)), torch.float32
    )
    twin = copy.deepcopy(parameter)
    assert twin.number != parameter.number
    twin.scale.zero_()  # type: ignore[operator]
    twin._encoded = None
    x = torch.randn(2, 64)
    assert float(torch.ops.nstf.linear(x, twin.number, 24, 64, False).abs().max()) == 0.0
    assert float(torch.ops.nstf.linear(x, parameter.number, 24, 64, False).abs().max()) > 0.0
