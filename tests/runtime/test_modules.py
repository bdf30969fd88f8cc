"""Each kind of encoded module against its dense twin."""

import copy
import gc
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nstf.errors import UnsupportedError
from nstf.kernels.formats import EncodedTensor, decode
from nstf.runtime.modules import attach, stays_encoded
from nstf.runtime.parameter import EncodedParameter, LazyWeight


def encode_module(module: nn.Module, name: str, encoded: EncodedTensor) -> EncodedParameter:
    """Gives the dense module the decoded values, then makes `module` encoded."""
    parameter = EncodedParameter(encoded, torch.float32)
    attach(module, name, parameter)
    return parameter


def twins(module: nn.Module, name: str, encoded: EncodedTensor) -> tuple[nn.Module, nn.Module]:
    module.requires_grad_(False)
    encoded_twin = copy.deepcopy(module)
    module.get_parameter(name).copy_(decode(encoded))
    encode_module(encoded_twin, name, encoded)
    return module, encoded_twin


def int4(tiny: ModuleType, shape: tuple[int, ...], lead: int = 1) -> EncodedTensor:
    result: EncodedTensor = tiny.random_encoded(tiny.leaf("int", bits=4, group=32, lead=lead), shape)
    return result


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=2e-5, rtol=1e-5)


def test_linear(tiny: ModuleType) -> None:
    dense, encoded = twins(nn.Linear(64, 24), "weight", int4(tiny, (24, 64)))
    x = torch.randn(2, 3, 64)
    assert isinstance(encoded, nn.Linear) and same(dense(x), encoded(x))
    assert "EncodedLinear(" in repr(encoded) and "int, shape=[24, 64]" in repr(encoded)


def test_a_subclass_of_linear_keeps_what_it_does(tiny: ModuleType) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * F.linear(input, self.weight, self.bias)

    dense, encoded = twins(Doubled(64, 24), "weight", int4(tiny, (24, 64)))
    x = torch.randn(5, 64)
    assert isinstance(encoded, Doubled) and same(dense(x), encoded(x))


def test_conv1d_of_gpt2(tiny: ModuleType) -> None:
    from transformers.pytorch_utils import Conv1D

    from nstf.kernels.formats import Node
    from nstf.kernels.formats.permute import Params

    tree = Node("permute", Params((1, 0)), {"x": tiny.leaf("int", bits=4, group=32)})
    dense, encoded = twins(Conv1D(24, 64), "weight", tiny.random_encoded(tree, (64, 24)))
    x = torch.randn(2, 3, 64)
    assert same(dense(x), encoded(x))
    dense, encoded = twins(Conv1D(24, 64), "weight", int4(tiny, (64, 24)))
    assert same(dense(x), encoded(x))


def test_embedding_decodes_the_rows_it_is_asked_for(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf.kernels.formats import bitpack

    dense, encoded = twins(nn.Embedding(50, 64), "weight", int4(tiny, (50, 64)))
    ids = torch.tensor([[3, 3, 49], [0, 7, 3]])
    expected = dense(ids)
    rows = []
    unpack = bitpack.unpack
    monkeypatch.setattr(bitpack, "unpack", lambda p, b, c: rows.append(len(p)) or unpack(p, b, c))
    assert torch.equal(encoded(ids), expected)
    assert rows == [4]
    with pytest.raises(IndexError, match="outside the 50 rows"):
        encoded(torch.tensor([50]))


def test_scaled_embedding_of_gemma(tiny: ModuleType) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    module = Gemma3TextScaledWordEmbedding(50, 64, 0, embed_scale=8.0)
    dense, encoded = twins(module, "weight", int4(tiny, (50, 64)))
    ids = torch.tensor([[3, 3, 49]])
    assert same(dense(ids), encoded(ids)) and isinstance(encoded, Gemma3TextScaledWordEmbedding)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(16, 24, 3, padding=1), (2, 16, 20)),
        (nn.Conv2d(3, 24, 8, stride=8), (2, 3, 32, 32)),
        (nn.Conv2d(16, 16, 3, groups=4, padding_mode="reflect", padding=1), (2, 16, 9, 9)),
        (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), (1, 3, 4, 8, 8)),
        (nn.ConvTranspose1d(16, 8, 4, stride=2), (2, 16, 20)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_convolutions(tiny: ModuleType, module: nn.Module, shape: tuple[int, ...]) -> None:
    weight: Any = module.weight
    dense, encoded = twins(module, "weight", int4(tiny, tuple(weight.shape)))
    x = torch.randn(shape)
    assert same(dense(x), encoded(x))


def test_experts_that_are_not_hit_are_not_decoded(tiny: ModuleType) -> None:
    model = tiny.new_model("MixtralForCausalLM")
    experts = model.model.layers[0].mlp.experts.requires_grad_(False)
    experts.config._experts_implementation_internal = "eager"
    stored = {
        name: int4(tiny, tuple(getattr(experts, name).shape), lead=2)
        for name in ("gate_up_proj", "down_proj")
    }
    encoded = copy.deepcopy(experts)
    for name, value in stored.items():
        experts.get_parameter(name).copy_(decode(value))
        encode_module(encoded, name, value)
    x = torch.randn(5, 32)
    index, weights = torch.tensor([[0, 2]] * 5), torch.full((5, 2), 0.5)
    assert same(experts(x, index, weights), encoded(x, index, weights))
    # NaN scales in the other experts: they would show in the result had they been used.
    for value in stored.values():
        value.arrays["scale"].view(4, -1)[[1, 3]] = float("nan")
    assert same(experts(x, index, weights), encoded(x, index, weights))


def test_a_tied_head_shares_the_arrays(tiny: ModuleType) -> None:
    embedding, head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
    head.weight = embedding.weight
    parameter = EncodedParameter(int4(tiny, (50, 64)), torch.float32)
    for module in (embedding, head):
        attach(module, "weight", parameter)
    both = nn.ModuleList([embedding, head]).to(torch.bfloat16)
    assert tiny.held_bytes(both) == parameter.encoded.size_bytes
    hidden = embedding(torch.tensor([7]))
    assert hidden.dtype == torch.bfloat16 and head(hidden).shape == (1, 50)


def test_arrays_move_but_keep_their_dtype(tiny: ModuleType) -> None:
    _, encoded = twins(nn.Linear(64, 24), "weight", int4(tiny, (24, 64)))
    encoded.to(torch.bfloat16)
    stored: Any = encoded.weight_encoded
    assert stored.encoded.arrays["scale"].dtype == torch.float16
    assert encoded.weight.dtype == torch.bfloat16 and encoded.bias.dtype == torch.bfloat16
    encoded.to("meta")
    assert encoded.weight.device.type == "meta" and stored.codes.device.type == "meta"


def test_state_dict_holds_the_arrays_and_goes_back_in(tiny: ModuleType) -> None:
    _, first = twins(nn.Linear(64, 24), "weight", int4(tiny, (24, 64)))
    other = tiny.random_encoded(tiny.leaf("int", bits=4, group=32), (24, 64), seed=9)
    _, second = twins(nn.Linear(64, 24), "weight", other)
    state = first.state_dict()
    assert sorted(state) == ["bias", "weight_encoded.codes", "weight_encoded.scale"]
    second.load_state_dict(state)
    x = torch.randn(3, 64)
    assert torch.equal(first(x), second(x))


def test_a_lazy_weight_is_a_tensor_to_everything_else(tiny: ModuleType) -> None:
    encoded = int4(tiny, (24, 64))
    lazy, weight = LazyWeight(encoded, torch.float32), decode(encoded)
    assert isinstance(lazy, Tensor) and lazy.shape == (24, 64) and lazy.dtype == torch.float32
    assert torch.equal(lazy.T, weight.T) and torch.equal(lazy + 1, weight + 1)
    assert type(lazy.to(torch.float16)) is Tensor and torch.equal(lazy[3:5, :7], weight[3:5, :7])
    assert torch.equal(lazy[-1], weight[-1]) and torch.equal(lazy[torch.tensor([2, -1])], weight[[2, -1]])
    x = torch.randn(3, 24)
    assert same(x @ lazy, x @ weight) and same(torch.addmm(torch.zeros(64), x, lazy), x @ weight)
    assert "LazyWeight(int" in repr(lazy)


WRITES: dict[str, Callable[[Any], object]] = {
    "itself": lambda w: w.zero_(),
    "an entry": lambda w: operator.setitem(w, 0, 0.0),
    "data": lambda w: w.data.copy_(torch.zeros(24, 64)),
    "an entry of data": lambda w: operator.setitem(w.data, 0, 0.0),
    "detached": lambda w: w.detach().zero_(),
    "a view": lambda w: w.view(-1).zero_(),
    "a view of a view": lambda w: w.data.t()[3].mul_(2),
    "one of a list": lambda w: torch._foreach_mul_([w.data], 0.0),
    "an output": lambda w: torch.add(torch.ones(24, 64), 1, out=w.data),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_to_a_lazy_weight_is_refused_and_not_lost(tiny: ModuleType, how: str) -> None:
    """PEFT merged OFT adapters through `data`: the decoded copy was written to, and the adapter taken for merged."""
    lazy = LazyWeight(int4(tiny, (24, 64)), torch.float32)
    with pytest.raises(UnsupportedError, match="cannot be written to"):
        WRITES[how](lazy)


def test_views_of_a_lazy_weight_are_read_as_its_values(tiny: ModuleType) -> None:
    encoded = int4(tiny, (24, 64))
    lazy, weight = LazyWeight(encoded, torch.float32), decode(encoded)
    for view, wanted in ((lazy.data, weight), (lazy.detach().T, weight.T), (lazy[2:5, 3], weight[2:5, 3])):
        assert torch.equal(view, wanted) and view.stride() == wanted.stride()
        assert type(view.clone()) is Tensor and type(view + 1) is Tensor
        assert (view.numpy() == wanted.numpy()).all() and view.tolist() == wanted.tolist()
        assert repr(view) == repr(wanted) and torch.equal(copy.deepcopy(view), wanted)
    x = torch.randn(3, 64, requires_grad=True)
    (x @ lazy.data.t()).sum().backward()
    assert x.grad is not None and same(x.grad, weight.sum(0).expand(3, 64))


def test_a_modules_own_weight_may_be_put_into_it_and_no_other(tiny: ModuleType) -> None:
    module = nn.Linear(64, 24, bias=False)
    attach(module, "weight", EncodedParameter(int4(tiny, (24, 64)), torch.float32))
    module.weight = module.weight  # as PEFT does where it takes adapters off
    with pytest.raises(UnsupportedError, match="cannot be written to"):
        module.weight = torch.zeros(24, 64)


def dense_tensors(numel: int) -> set[int]:
    """Identities of the living floating-point tensors with at least `numel` elements."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    return {id(o) for o in found if o.is_floating_point() and o.numel() >= numel}


@pytest.mark.parametrize("kind", ["linear", "embedding", "conv", "conv1d"])
def test_no_dense_weight_survives_a_forward(tiny: ModuleType, kind: str) -> None:
    from transformers.pytorch_utils import Conv1D

    module, x = {
        "linear": (nn.Linear(67, 41), torch.randn(2, 67)),
        "embedding": (nn.Embedding(41, 67), torch.tensor([1, 2])),
        "conv": (nn.Conv1d(67, 41, 1), torch.randn(2, 67, 3)),
        "conv1d": (Conv1D(67, 41), torch.randn(2, 41)),
    }[kind]
    shape = tuple(module.weight.shape)
    encode_module(module.requires_grad_(False), "weight", int4(tiny, shape))
    before = dense_tensors(41 * 67)
    module(x)
    assert dense_tensors(41 * 67) <= before


def test_small_weights_of_unknown_modules_become_dense() -> None:
    class Router(nn.Module):
        weight: nn.Parameter

    assert not stays_encoded(Router(), "weight", 1000)
    assert stays_encoded(Router(), "weight", 1 << 24)
    assert stays_encoded(nn.Linear(2, 2), "weight", 4)


def test_a_parameter_of_another_shape_is_refused(tiny: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"Linear.weight: shape \[24, 63\], the stored tensor is \[24, 64\]"):
        attach(nn.Linear(63, 24), "weight", EncodedParameter(int4(tiny, (24, 64)), torch.float32))


def test_a_convolution_makes_no_stand_in_for_its_weight(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's forward reads `weight`. One that a class has of its own still may."""

    class Own(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * F.conv2d(input, self.weight, None, self.stride)

    encoded = int4(tiny, (24, 3, 8, 8))
    x = torch.randn(2, 3, 32, 32)
    for module in (nn.Conv2d(3, 24, 8, stride=8), Own(3, 24, 8, stride=8, bias=False)):
        dense, own = twins(module, "weight", encoded)
        assert same(own(x), dense(x))
    plain = twins(nn.Conv1d(3, 24, 64), "weight", int4(tiny, (24, 3, 64)))[1]
    monkeypatch.setattr(EncodedParameter, "lazy", lambda _: pytest.fail("a stand-in was made"))
    assert plain(torch.randn(2, 3, 70)).shape == (2, 24, 7)
