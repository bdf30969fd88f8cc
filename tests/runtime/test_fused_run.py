"""Steps that the extension runs in one call give what they give one by one."""

import copy
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from fused_cases import Block, both, encoded, near

from nstf.kernels.cpu import convolution as cpu
from nstf.runtime.fused import Fused, fuse
from nstf.runtime.fused_run import Run
from nstf.runtime.parameter import EncodedParameter

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the extension was not built")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Of random inputs one in fifty has an activation that rounds the other way (`near`): every run sees the same."""
    torch.manual_seed(0)


def runs_of(module: nn.Module) -> list[Run]:
    parts = [m for m in module.modules() if isinstance(m, Fused)]
    return [s for m in parts for s in m.__dict__["_fused_plan"].steps if isinstance(s, Run)]


def stem(pool: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 12, 5, 2, 3), nn.BatchNorm2d(12), nn.ReLU(), pool, Block(12, 12), Block(12, 20, 2)
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((2, 3), (1, 3), (0, 1)), nn.MaxPool2d(1), nn.MaxPool2d(4, 3, 2)],
)
def test_a_network_is_one_call(tiny: ModuleType, pool: nn.Module, layout: torch.memory_format) -> None:
    plain, made = both(tiny, stem(pool))
    assert fuse(made) == 6
    (run,) = runs_of(made)
    before = torch.get_num_threads()
    for count, side in ((1, 47), (5, 30), (0, 30)):
        x = torch.randn(count, 3, side, side + 5).contiguous(memory_format=layout)
        with torch.no_grad():
            wanted, found = plain(x), made(x)
            assert found.shape == wanted.shape and near(found, wanted)
            assert found.stride() == wanted.stride()
            for i in range(count):  # images do not see each other
                assert torch.equal(made(x[i : i + 1])[0], found[i])
            torch.set_num_threads(3)
            assert torch.equal(made(x), found)
            torch.set_num_threads(before)
    assert all(m is not None for m in run.made.values()) and run.made


@pytest.mark.parametrize("flat", [False, True])
def test_a_process_may_have_another_default_dtype_and_device(tiny: ModuleType, flat: bool) -> None:
    """float16 made a buffer half as long as what was written into it."""
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if flat else []
    plain, made = both(tiny, nn.Sequential(*stem(nn.MaxPool2d(3, 2, 1)), *end))
    fuse(made)
    x = torch.randn(2, 3, 47, 52)
    with torch.no_grad():
        wanted = made(x)
        try:
            for dtype in (torch.float64, torch.float16):
                torch.set_default_dtype(dtype)
                found = made(x)
                assert found.dtype == torch.float32 and torch.equal(found, wanted)
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            assert torch.equal(made(x), wanted)
    assert near(wanted, plain(x).detach())


def test_many_images_are_worked_on_some_at_a_time(tiny: ModuleType) -> None:
    plain, made = both(tiny, nn.Sequential(Block(3, 8), Block(8, 8)))
    fuse(made)
    x = torch.randn(40, 3, 160, 150)  # more than 32 MiB lie between the layers
    with torch.no_grad():
        assert near(made(x), plain(x))


@pytest.mark.parametrize("kind", ["low_rank", "tucker", "cp"])
def test_chains_are_part_of_a_run(tiny: ModuleType, kind: str) -> None:
    trees = {
        "low_rank": ({"rank": 5}, ("a", "b")),
        "tucker": ({"ranks": (6, 7, 3, 3), "view": (12, 12, 3, 3)}, ("core", "factor0", "factor1")),
        "cp": ({"rank": 9, "view": (12, 12, 3, 3)}, ("factor0", "factor1", "factor2", "factor3")),
    }
    plain = encoded(tiny, nn.Sequential(Block(12, 12), Block(12, 12)))
    params, children = trees[kind]
    tree = tiny.leaf(kind, **params)
    tree = type(tree)(tree.kind, tree.params, {c: tiny.leaf("int", bits=6, group=0) for c in children})
    for part in (plain[0].first[0], plain[1].second[0]):
        stored = tiny.random_encoded(tree, (12, 12, 3, 3), 3)
        del part._modules["weight_encoded"]
        part.add_module("weight_encoded", EncodedParameter(stored, torch.float32))
    made = copy.deepcopy(plain)
    assert fuse(made) == 4
    x = torch.randn(2, 12, 11, 9)
    with torch.no_grad():
        assert near(made(x), plain(x))
    (run,) = runs_of(made)
    # CP's kernels of one channel each are torch's.
    assert all((m is None) == (kind == "cp") for m in run.made.values())


def test_a_pooling_beside_fused_modules_uses_the_same_threads(tiny: ModuleType) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.pool = Block(8, 8), nn.MaxPool2d(3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(self.block(x)) if x.shape[2] > 2 else x

    plain, made = both(tiny, Asking())
    for _ in range(2):  # fused again it stays so
        assert fuse(made) == 2 and isinstance(made.pool, Fused) and isinstance(made.pool, nn.MaxPool2d)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 8, 21, 34).contiguous(memory_format=layout)
        x[0, 1, 2, 3], x[1, 0, 0, 0] = math.nan, -math.inf
        with torch.no_grad():
            found, wanted = made.pool(x), plain.pool(x)
            assert torch.equal(found.isnan(), wanted.isnan()) and found.stride() == wanted.stride()
            assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
    made.pool.ceil_mode = plain.pool.ceil_mode = True
    x = torch.randn(2, 8, 20, 34)
    with torch.no_grad():
        assert torch.equal(made.pool(x), plain.pool(x))
        assert torch.equal(made.pool(x[0]), plain.pool(x[0]))  # one image without a batch


def test_weights_and_numbers_that_are_changed_count(tiny: ModuleType) -> None:
    plain, made = both(tiny, nn.Sequential(Block(3, 8, bias=True), Block(8, 8)))
    fuse(made)
    x = torch.randn(2, 3, 9, 9)

    def check() -> None:
        with torch.no_grad():
            assert near(made(x), plain(x))

    check()
    for model in (plain, made):
        model[0].first[0].bias.data = torch.linspace(-1, 1, 16)[::2]  # no numbers beside each other
    check()
    norm: Any = made[0].first[1]
    norm.weight.data = norm.weight.data.double()  # which torch's own refuses
    check()
    norm.weight.data = norm.weight.data.float()
    stored = tiny.random_encoded(tiny.leaf("int", bits=4, group=0), (8, 8, 3, 3), 77)
    for model in (plain, made):
        model[1].first[0].weight_encoded = EncodedParameter(stored, torch.float32)
    fuse(made)
    check()
    stored = tiny.random_encoded(tiny.leaf("int", bits=5, group=0), (8, 8, 3, 3), 78)
    for model in (plain, made):
        model[1].first[0].weight_encoded.share(stored)
    check()
    for model in (plain, made):
        model[1].first[0].dilation = (2, 2)
        model[1].first[0].padding = (2, 2)
        model[1].first[0]._reversed_padding_repeated_twice = [2, 2, 2, 2]
    check()
    made[0].first[1].weight.data = torch.ones(3)
    with pytest.raises(RuntimeError), torch.no_grad():  # as torch refuses it
        made(x)


def test_several_threads_run_one_network(tiny: ModuleType) -> None:
    plain, made = both(tiny, stem(nn.MaxPool2d(3, 2, 1)))
    fuse(made)
    made[1].weight.data = made[1].weight.data.double()  # its values are made anew at each call
    images = [torch.randn(1, 3, 40 + i, 33) for i in range(4)]
    with torch.no_grad():
        wanted = [plain(x) for x in images]

    def work(i: int) -> bool:
        with torch.no_grad():
            return all(near(made(images[i]), wanted[i]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_images_that_do_not_fit_are_refused_as_before(tiny: ModuleType) -> None:
    plain, made = both(tiny, nn.Sequential(nn.Conv2d(3, 8, 5), nn.BatchNorm2d(8), nn.ReLU()))
    fuse(made)
    for x in (torch.randn(1, 3, 4, 9), torch.randn(1, 4, 9, 9)):
        for model in (plain, made):
            with pytest.raises((RuntimeError, ValueError)), torch.no_grad():
                model(x)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_mean_of_each_channel_is_part_of_a_run(tiny: ModuleType, layout: torch.memory_format) -> None:
    """At the end of a network, and in the middle, where its own image is still read."""
    last = nn.Sequential(Block(3, 20), nn.AdaptiveAvgPool2d(1))
    for module in (last, Excited(), nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), Block(3, 5))):
        plain, made = both(tiny, module)
        fuse(made)
        for count, side in ((1, 7), (3, 19)):
            x = torch.randn(count, 3, side, side + 1).contiguous(memory_format=layout)
            with torch.no_grad():
                wanted, found = plain(x), made(x)
            assert found.shape == wanted.shape and near(found, wanted)
        (run,) = runs_of(made)
        assert all(m is not None for m in run.made.values()) and run.made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_plain_head_is_part_of_a_run(tiny: ModuleType, bias: bool, layout: torch.memory_format) -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(20, 33, bias=bias), nn.Linear(33, 7))
    plain, made = both(tiny, nn.Sequential(Block(3, 20), nn.AdaptiveAvgPool2d(1), head))
    assert fuse(made) == 3
    (run,) = made.__dict__["_fused_plan"].steps
    for count, side in ((1, 7), (3, 19), (0, 5)):
        x = torch.randn(count, 3, side, side + 1).contiguous(memory_format=layout)
        with torch.no_grad():
            wanted, found = plain(x), made(x)
            assert found.shape == wanted.shape and near(found, wanted)
            for model in (plain, made):  # which counts from the next call on
                model[2][1].weight.data = model[2][1].weight * 3
            assert near(made(x), plain(x))
    assert isinstance(run, Run) and all(m is not None for m in run.made.values()) and run.made
    # Others than the extension knows are torch's.
    for model in (plain, made):
        model[2][1].weight.data = model[2][1].weight.double().float().t().contiguous().t()
        model[2][2].weight.data = torch.ones(5, 33)
        model[2][2].bias.data = torch.zeros(5)
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        assert made(x).shape == (2, 5) and near(made(x), plain(x))


def test_a_head_of_several_pixels_is_torchs(tiny: ModuleType) -> None:
    plain, made = both(tiny, nn.Sequential(Block(3, 4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)))
    fuse(made)
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        assert near(made(x), plain(x))


def test_a_pooling_right_behind_a_convolution(tiny: ModuleType) -> None:
    """By the threads that make its rows, one image at a time; windows of all kinds, and values below zero."""
    for pool in (
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2),
        nn.MaxPool2d((5, 2), (2, 1), (2, 0)),
        nn.MaxPool2d(1, 3),
    ):
        for relu in (nn.ReLU(), nn.Identity()):
            net = nn.Sequential(nn.Conv2d(3, 40, 3, padding=1), nn.BatchNorm2d(40), relu, pool, Block(40, 8))
            plain, made = both(tiny, net)
            fuse(made)
            before = torch.get_num_threads()
            x = torch.randn(1, 3, 171, 95)
            with torch.no_grad():
                wanted = plain(x)
                found = made(torch.cat([x, x]))
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    assert near(made(x), wanted) and torch.equal(made(x)[0], found[1])
            torch.set_num_threads(before)


class Excited(nn.Module):
    """An image, and another made of the means of its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = (
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
            nn.AdaptiveAvgPool2d(1),
        )
        self.second = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.pool(self.first(x)))


def test_a_mean_beside_fused_modules_is_torchs_where_it_is_another(tiny: ModuleType) -> None:
    class Untraced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.pool = Block(3, 6), nn.AdaptiveAvgPool2d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(self.block(x)) if x.sum() < math.inf else x

    plain, made = both(tiny, Untraced())
    fuse(made)
    assert isinstance(made.pool, Fused) and isinstance(made.pool, nn.AdaptiveAvgPool2d)
    x = torch.randn(2, 3, 9, 8)
    with torch.no_grad():
        assert near(made(x), plain(x))
        (run,) = runs_of(made.pool)
        assert all(m is not None for m in run.made.values())
        plain.pool.output_size = made.pool.output_size = (2, 3)  # no kernel: its own code
        assert near(made(x), plain(x)) and made(x).shape == (2, 6, 2, 3)


@pytest.mark.parametrize("inputs", [1, 3, 5, 7, 9])
def test_columns_that_fill_no_chunk_of_64(tiny: ModuleType, inputs: int) -> None:
    """Rows of 9 to 81 columns: an odd number of blocks of 32 has nothing multiplied in its last chunk's other half."""
    plain = encoded(tiny, nn.Sequential(nn.Conv2d(inputs, 40, 3, padding=1), nn.ReLU()))
    x = torch.randn(1, inputs, 11, 13)
    exact = copy.deepcopy(plain)
    exact[0].exact_products = True
    with torch.no_grad():
        assert (plain(x) - exact(x)).norm() < 0.02 * exact(x).norm()
