"""Gradients through encoded weights against those of the dense twin."""

import gc
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nstf.runtime
from nstf.errors import UnsupportedError
from nstf.kernels.formats import Node, decode
from nstf.kernels.formats.tree import format_of
from nstf.runtime import gradient
from nstf.runtime.gradient import input_gradient, linear
from nstf.runtime.parameter import LazyWeight


def trees(tiny: ModuleType) -> dict[str, Node]:
    """Every way through a tree: leaves by rows, and nodes that are products."""
    int4 = tiny.leaf("int", bits=4, group=32)
    low_rank = Node(
        "low_rank",
        format_of("low_rank").Params(rank=8),
        {"a": int4, "b": tiny.leaf("dense", dtype="float32")},
    )

    def wrapped(kind: str, child: Node, **params: Any) -> Node:
        return Node(kind, format_of(kind).Params(**params), {"x": child})

    return {
        "int": int4,
        "grid": tiny.leaf("grid", levels=16, group=32),
        "trellis": tiny.leaf("trellis"),
        "add": Node("add", format_of("add").Params(), {"x": int4, "y": low_rank}),
        "low_rank": low_rank,
        "rotated": wrapped("rotated", int4, block_in=32, block_out=32, seed=3),
        "rotated_in": wrapped("rotated", int4, block_in=64, seed=3),
        "permute": wrapped("permute", int4, dims=(1, 0)),
    }


KINDS = ("int", "grid", "trellis", "add", "low_rank", "rotated", "rotated_in", "permute")


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_back_is_the_product_with_the_decoded_matrix(
    tiny: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = tiny.random_encoded(trees(tiny)[kind], (96, 128))
    weight = decode(encoded)
    x, bias = torch.randn(2, 5, 128, requires_grad=True), torch.randn(96, requires_grad=True)
    grad = torch.randn(2, 5, 96)
    # Small blocks: several of them, the last one smaller.
    monkeypatch.setattr(gradient, "BLOCK_NUMEL", 128 * 40)
    y = linear(x, encoded, bias)
    y.backward(grad)
    assert torch.allclose(y, x @ weight.T + bias, atol=2e-3, rtol=1e-3)
    assert torch.allclose(x.grad, grad @ weight, atol=1e-4, rtol=1e-4)  # type: ignore[arg-type]
    assert torch.allclose(bias.grad, grad.sum((0, 1)))  # type: ignore[arg-type]
    short = input_gradient(grad.bfloat16(), encoded)
    assert short.dtype == torch.bfloat16
    assert float((short.float() - grad @ weight).norm() / (grad @ weight).norm()) < 0.02


def test_nothing_dense_is_kept_for_the_way_back(tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = tiny.random_encoded(tiny.leaf("int", bits=4, group=32), (96, 128))
    x = torch.randn(3, 128, requires_grad=True)
    y = linear(x, encoded)
    gc.collect()
    large = [
        o for o in gc.get_objects() if type(o) is Tensor and o.is_floating_point() and o.numel() >= 96 * 128
    ]
    assert not any(o.shape == (96, 128) for o in large)
    decoded: list[int] = []
    rows = gradient.decode_rows
    monkeypatch.setattr(gradient, "BLOCK_NUMEL", 128 * 32)
    monkeypatch.setattr(
        gradient,
        "decode_rows",
        lambda e, part, dtype: decoded.append(part.stop - part.start) or rows(e, part, dtype),
    )
    y.sum().backward()
    assert decoded == [32, 32, 32]


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel", "ViTForImageClassification",
     "ResNetForImageClassification"],
)  # fmt: skip
def test_gradients_reach_the_inputs_of_whole_models(
    tiny: ModuleType, tmp_path: Path, architecture: str
) -> None:
    dense = tiny.new_model(architecture).requires_grad_(False)
    model = nstf.runtime.load(tiny.write(tmp_path, dense))
    found = []
    for each in (dense, model):
        inputs = tiny.inputs_of(architecture)
        if "input_ids" in inputs:
            inputs = {"inputs_embeds": each.get_input_embeddings()(inputs["input_ids"]).detach()}
        start: Any = next(iter(inputs.values())).requires_grad_()
        each(**inputs).logits.float().square().mean().backward()
        found.append(start.grad)
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-3


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_the_same_with_checkpointing(tiny: ModuleType, tmp_path: Path, reentrant: bool) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"]
    model.train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        start = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=start, use_cache=False).logits.square().mean().backward()
        found.append(start.grad)
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-9)


def test_writing_to_an_encoded_weight_is_refused(tiny: ModuleType) -> None:
    lazy = LazyWeight(tiny.random_encoded(tiny.leaf("int", bits=4, group=32), (24, 64)), torch.float32)
    holder = nn.Module()
    holder.weight = lazy  # type: ignore[assignment]

    def add_to_data() -> None:
        holder.weight.data += torch.ones(24, 64)  # type: ignore[operator]

    for write in (lambda: lazy.add_(1), lambda: lazy.copy_(torch.zeros(24, 64)), lazy.zero_, add_to_data):
        with pytest.raises(UnsupportedError, match="nstf export"):
            write()
    total = torch.zeros(24, 64)
    total += lazy
    assert torch.equal(total, decode(lazy.source))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_way_back_on_a_gpu(tiny: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf.kernels.triton.linear import resident

    stored = tiny.random_encoded(trees(tiny)[kind], (256, 128))
    arrays = {name: array.cuda() for name, array in stored.arrays.items()}
    encoded = resident(type(stored)(stored.tree, stored.shape, arrays))
    monkeypatch.setattr(gradient, "GPU_BLOCK_NUMEL", 128 * 96)
    weight = decode(stored).cuda()
    for dtype, bound in ((torch.float32, 5e-3), (torch.bfloat16, 0.02)):
        x = torch.randn(7, 128, device="cuda", dtype=dtype, requires_grad=True)
        grad = torch.randn(7, 256, device="cuda", dtype=dtype)
        linear(x, encoded).backward(grad)
        expected = grad.float() @ weight
        assert float((x.grad.float() - expected).norm() / expected.norm()) < bound  # type: ignore[union-attr]
