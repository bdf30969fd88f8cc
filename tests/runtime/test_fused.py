"""Convolutions that take in what follows them give what the modules give one after the other."""

import copy
import inspect
import sys
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from fused_cases import Block, both, near

from nstf.kernels.cpu import convolution as cpu
from nstf.runtime import fused as fused_module
from nstf.runtime.fused import Fused, choose_products, fuse

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the extension was not built")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Of random inputs one in fifty has an activation that rounds the other way (`near`): every run sees the same."""
    torch.manual_seed(0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("block", [Block(12, 12), Block(12, 20, 2), Block(5, 33, 2, bias=True)])
def test_a_residual_block(tiny: ModuleType, block: nn.Module, layout: torch.memory_format) -> None:
    plain, made = both(tiny, nn.Sequential(copy.deepcopy(block), nn.MaxPool2d(2)))
    assert fuse(made) == sum(isinstance(m, nn.Conv2d) for m in made.modules())
    x = torch.randn(2, plain[0].first[0].in_channels, 13, 18).contiguous(memory_format=layout)
    wanted, found = plain(x), made(x)
    assert near(found, wanted) and found.stride() == wanted.stride()
    # Changed values of a normalisation count from the next call on.
    for model in (plain, made):
        model[0].first[1].running_mean.mul_(-1)
        model[0].second[1].weight = nn.Parameter(model[0].second[1].weight + 1, requires_grad=False)
    assert near(made(x), plain(x)) and not near(made(x), found)


class Written(nn.Module):
    """A sum that is written into the input, which is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y += self.norm(self.conv(x))
        return self.other(y).relu() + y


class Late(Written):
    """A value that is written to after a convolution read it, and before what follows the convolution."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = self.conv(y)
        y.relu_()
        return self.norm(z) + y


class Twice(Written):
    """What a convolution gives is read twice, by itself and normalised, and broadcast over an image."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.other(y.mean((2, 3), keepdim=True)) + x
        return self.norm(y) + y + z + self.other(x).relu_() * 0.5


class Asking(Written):
    """Code with a condition cannot be read; its parts can."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 8:
            raise ValueError("no image")
        return self.norm(self.conv(self.block(x)))


@pytest.mark.parametrize(("kind", "fused"), [(Written, False), (Late, False), (Twice, True), (Asking, True)])
def test_what_another_part_reads_or_writes_is_not_taken_in(
    tiny: ModuleType, kind: type[nn.Module], fused: bool
) -> None:
    plain, made = both(tiny, kind())
    assert (fuse(made) > 0) == fused
    x = torch.randn(1, 8, 9, 9)
    given = x.clone()
    assert near(made(x), plain(x.clone())) and torch.equal(x, given)


def test_anything_but_plain_inference_runs_the_models_own_code(tiny: ModuleType) -> None:
    plain, made = both(tiny, Block(12, 12))
    fuse(made)
    assert isinstance(made, Block) and isinstance(made, Fused)
    x = torch.randn(1, 12, 8, 8)
    seen: list[Tensor] = []
    handle = made.first[1].register_forward_hook(lambda m, given, out: seen.append(out))
    made(x)
    assert len(seen) == 1
    handle.remove()
    made(x)
    assert len(seen) == 1
    leaf = x.clone().requires_grad_()
    made(leaf).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    wide = [copy.deepcopy(m).double()(x.double()) for m in (made, plain)]
    assert wide[0].dtype == torch.float64 and near(*wide)
    with_adapter = copy.deepcopy(made)
    with_adapter.first[0] = nn.Sequential(made.first[0], nn.Hardtanh(-0.1, 0.1))
    assert near(with_adapter(x), with_adapter.second(with_adapter.first(x)).add(x).relu())
    made.train()
    before = made.first[1].num_batches_tracked.clone()
    made(x)
    assert made.first[1].num_batches_tracked == before + 1


def test_a_loaded_model_is_fused_when_asked_and_a_copy_can_be_exact(tiny: ModuleType, tmp_path: Any) -> None:
    import nstf.runtime

    model = tiny.new_model("ResNetForImageClassification")
    path = tiny.write(tmp_path, model)
    exact, loaded = nstf.runtime.load(path, engine="exact"), nstf.runtime.load(path)
    assert not any(isinstance(m, Fused) for m in loaded.modules())
    assert fuse(loaded) > 0
    parts = [m for m in loaded.modules() if isinstance(m, Fused)]
    assert parts and not any(isinstance(m, Fused) for m in exact.modules())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted, found = exact(pixel_values=x).logits, loaded(pixel_values=x).logits
        again = copy.deepcopy(loaded)
        choose_products(again, exact=True)
        assert torch.allclose(again(pixel_values=x).logits, wanted, rtol=1e-4, atol=1e-5)
    assert (found - wanted).norm() < 0.1 * wanted.norm()


def test_what_is_changed_in_a_fused_module_counts(tiny: ModuleType) -> None:
    plain, fused = both(tiny, nn.Sequential(Block(3, 8), Block(8, 8)))
    assert fuse(fused) > 0
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        assert near(fused(x), plain(x))
        for model in (plain, fused):  # `data` has no version that would tell
            model[0].first[1].weight.data.mul_(5)
            model[1].first[1].eps = 3.0
        assert near(fused(x), plain(x))
        for model in (plain, fused):
            model.append(nn.Hardtanh(-0.1, 0.1))
        assert near(fused(x), plain(x))
        for model in (plain, fused):
            norm = model[0].first[1]
            norm.running_mean = norm.running_var = None
        assert near(fused(x), plain(x))


def test_what_was_changed_is_planned_again(tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = both(tiny, nn.Sequential(Block(3, 8), Block(8, 8)))
    before = fuse(fused)
    kind = type(fused)
    assert before == fuse(fused) > 0 and type(fused) is kind
    for model in (plain, fused):
        model[1] = nn.Hardtanh(-0.1, 0.1).eval()
    after = fuse(fused)
    assert 0 < after < before and type(fused) is kind
    runs: list[object] = []
    run = fused_module.Plan.run
    monkeypatch.setattr(fused_module.Plan, "run", lambda plan, x: runs.append(plan) or run(plan, x))
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        assert near(fused(x), plain(x)) and runs
    # Of what nothing can be fused any more the class is the module's own again.
    fused[0] = nn.Identity()
    assert fuse(fused) == 0 and type(fused) is nn.Sequential


class Shifted(nn.Module):
    """A sum with a number that the image gives."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.one(x) + x.shape[0])


def test_a_number_of_the_image_is_added(tiny: ModuleType) -> None:
    plain, fused = both(tiny, Shifted())
    assert fuse(fused) == 1
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        assert near(fused(x), plain(x))


def test_a_fused_module_is_called_as_its_own_code_says(tiny: ModuleType) -> None:
    """transformers and torch.export read the signature of `forward`; fusing twice changes nothing."""
    plain, fused = both(tiny, Block(8, 8))
    count = fuse(fused)
    assert isinstance(fused, Fused) and count > 0 and fuse(fused) == count
    assert inspect.signature(fused.forward) == inspect.signature(plain.forward)
    assert fused.forward.__name__ == "forward" and type(fused).__name__ == "Block"
    x = torch.randn(1, 8, 9, 9)
    with torch.no_grad():
        assert near(fused(x=x), plain(x)) and torch.equal(fused(x=x), fused(x))


@dataclass
class Answer(OrderedDict[str, Any]):
    """A result as transformers has them, a dataclass and a dictionary."""

    logits: Any = None
    states: Any = None

    def __post_init__(self) -> None:
        self.update(
            {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        )


class Classifier(nn.Module):
    """A model whose code looks at the channels, may be asked for more, and gives more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(4, 8), Block(8, 8)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))

    def forward(self, pixels: Tensor, states: bool | None = None, **others: Any) -> Answer:
        if pixels.shape[1] != 4:
            raise ValueError("other channels")
        seen = [self.first(pixels)]
        seen.append(self.second(seen[-1]))
        return Answer(self.head(seen[-1]), seen if states else None)


def test_a_whole_model_is_one_plan(tiny: ModuleType) -> None:
    plain, made = both(tiny, Classifier())
    assert fuse(made) == 5 and isinstance(made, Fused)
    x = torch.randn(2, 4, 11, 9)
    with torch.no_grad():
        wanted, found = plain(x), made(pixels=x)
        assert type(found) is Answer and list(found) == ["logits"] and near(found.logits, wanted.logits)
        assert torch.equal(made(x)["logits"], found.logits)
        # Asked for more it runs its own code, and its parts are fused as well.
        more = made(x, states=True)
        assert len(more.states) == 2 and near(more.logits, wanted.logits) and isinstance(made.first, Fused)
        assert near(made(x, other=1).logits, wanted.logits)
        for model in (plain, made):
            with pytest.raises(ValueError, match="other channels"):
                model(x[:, :3])
    assert near(copy.deepcopy(made)(x).logits, wanted.logits)
    assert fuse(made) == 5  # again


def test_dropout_is_read_as_in_inference(tiny: ModuleType) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.dropout(self.block(x), 0.5, self.training)

    plain, made = both(tiny, Dropped())
    made.train()
    assert fuse(made) > 0 and made.training and made.block.training
    made.eval()
    x = torch.randn(1, 8, 9, 9)
    with torch.no_grad():
        assert near(made(x), plain(x))
