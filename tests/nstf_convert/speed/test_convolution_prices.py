"""Prices of convolutions: layers found with their images, chains proposed by their multiplications, measured once."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from nstf.analyzers.signatures import Signature
from nstf.decomposers import chains
from nstf.kernels.convolution import Geometry, multiplications
from nstf.kernels.cpu import convolution as cpu
from nstf.kernels.cpu import ext
from nstf.proposals import Room, Target
from nstf.quantizers.stats import Stats
from nstf_convert.pipeline.allocate import timing
from nstf_convert.pipeline.propose import methods as registry
from nstf_convert.pipeline.propose import structure
from nstf_convert.pipeline.propose.candidates import arrays_bytes
from nstf_convert.pipeline.propose.recipe import Recipe, tree_of
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.speed import cache, convolutions, targets
from nstf_convert.speed.convolutions import Layer, layers_of
from nstf_convert.speed.prices import Prices

INT4 = Recipe("int_grid", {"bits": 4, "group": 64, "symmetric": True, "scale_bits": 8})
LOW_RANK = Recipe("svd", {"rank": 16}, {"factor": INT4})
LAYER = Layer((64, 32, 3, 3), Geometry((1, 1), (1, 1, 1, 1)), (12, 10))


def unit(*shape: int, stride: tuple[int, ...] = (1, 1)) -> Unit:
    return Unit("conv.weight", shape, "float32", "conv", uses=("linear",), stride=stride)


def test_layers_are_found_with_the_images_they_meet() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 7, stride=2, padding=(3, 2)), nn.ReLU(), nn.Conv2d(8, 16, 3, groups=2, dilation=2)
        )
        sound = nn.Sequential(nn.Conv1d(4, 6, 3, stride=2, padding=1))
        found = layers_of(model, {"input": torch.empty(1, 3, 33, 40)})
        heard = layers_of(sound, {"input": torch.empty(1, 4, 21)})
    assert found == {
        "0.weight": Layer((8, 3, 7, 7), Geometry((2, 2), (3, 3, 2, 2)), (33, 40)),
        "2.weight": Layer((16, 4, 3, 3), Geometry((1, 1), (0, 0, 0, 0), (2, 2), 2), (17, 19)),
    }
    assert found["0.weight"].pixels == 17 * 19 and found["2.weight"].pixels == 13 * 15
    assert heard == {"0.weight": Layer((6, 4, 1, 3), Geometry((1, 2), (0, 0, 1, 1)), (1, 21))}


def test_a_forward_that_fails_gives_the_layers_that_it_reached() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, input: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
            found: torch.Tensor = self.first(input)
            assert other.size(0) > 0  # type: ignore[union-attr]
            return found

    with torch.device("meta"):
        assert list(layers_of(Failing(), {"input": torch.empty(1, 3, 8, 8)})) == ["first.weight"]


@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (128, 64, 3, 3), (512, 256, 3, 3), (256, 256, 1, 1)])
def test_chains_take_the_shares_of_the_multiplications_they_are_made_for(
    shape: tuple[int, ...], stride: tuple[int, int]
) -> None:
    forms = [("svd", s, chains.low_rank_params(shape, s)) for s in chains.SHARES]
    forms += [("tucker", s, chains.tucker_params(shape, s, stride)) for s in chains.TUCKER_SHARES]
    assert any(params for method, _, params in forms if method == "svd")
    assert any(params for method, _, params in forms if method == "tucker") == (shape[2:] == (3, 3))
    for method, wanted, params in forms:
        if params is not None:
            recipe = Recipe(method, params, {"factor": INT4})
            share = multiplications(tree_of(recipe, shape, 1), shape, stride) / math.prod(shape)
            assert abs(wanted - share) < 0.09, (
                recipe,
                share,
            )  # ranks are multiples of 8, much of a small weight


def test_chains_that_spectra_rule_out_are_not_made() -> None:
    """Orthonormal rows have nothing that a low rank could leave out cheaply; channels of few directions suit both."""
    allowed, shape = frozenset({"svd", "tucker", "cp"}), (64, 64, 3, 3)
    torch.manual_seed(0)
    flat = torch.linalg.qr(torch.randn(576, 64))[0].T.reshape(shape).contiguous()
    few = torch.einsum("ar,brij->abij", torch.randn(64, 8), torch.randn(64, 8, 3, 3))
    few = few + 1e-3 * torch.randn(shape)

    def methods(weight: torch.Tensor) -> set[tuple[str, float]]:
        known = Signature(weight, Stats(), 1, "conv", stride=(1, 1))
        own = unit(*shape)
        room = Room(
            allowed, faster=True, factors=structure.row_forms(), size_of=lambda r: arrays_bytes(own, r)
        )
        made = registry.structured(known, Target(True), room)
        # What is not made has a bound that is no lower than what it would have to beat.
        assert {look.method for look in room.looks} | {r.method for r in made} == allowed
        assert all(look.reason or look.least >= look.rival for look in room.looks)
        none = registry.structured(known, Target(True), replace(room, factors=(), looks=[]))
        assert none == []
        shares = [multiplications(tree_of(r, shape, 1), shape) / math.prod(shape) for r in made]
        return {(r.method, round(s, 1)) for r, s in zip(made, shares, strict=True)}

    assert not any(method == "svd" for method, _ in methods(flat))
    assert ("svd", 0.1) in methods(few)
    # A low rank of 8 loses next to nothing there; the inputs have no few directions, which Tucker would need.
    assert not any(method == "tucker" for method, _ in methods(few))


@pytest.mark.parametrize("method", ["svd", "tucker"])
def test_the_next_ranks_of_a_chain_that_a_plan_took_lie_within_the_shares_on_both_sides(method: str) -> None:
    torch.manual_seed(0)
    shape, factor = (128, 64, 3, 3), structure.row_forms()[0].recipe
    known = Signature(torch.randn(shape), Stats(), 1, "conv", stride=(1, 1))
    params = chains.low_rank_params(shape, 0.28) if method == "svd" else chains.tucker_params(shape, 0.25)
    near = Recipe(method, {**params, "iterations": 0} if method == "tucker" else params, {"factor": factor})
    room = Room(frozenset({method}), faster=True, factors=structure.row_forms(), near=near)
    found = registry.structured(known, Target(True), room)

    def share(recipe: Recipe) -> float:
        return multiplications(tree_of(recipe, shape, 1), shape) / math.prod(shape)

    larger, smaller = found
    limits = (0.2, 0.45) if method == "svd" else (0.15, 0.35)
    assert limits[0] < share(smaller) < share(near) < share(larger) < limits[1]
    ranks = {"rank", "ranks"}
    for recipe in found:
        assert recipe.parts == near.parts
        assert {k: v for k, v in recipe.params.items() if k not in ranks} == {
            k: v for k, v in near.params.items() if k not in ranks
        }
    # Whole channels are no chain: there is nothing beyond.
    whole = {"rank": 120} if method == "svd" else {**near.params, "ranks": [120, 56, 3, 3]}
    beyond = registry.structured(known, Target(True), replace(room, near=replace(near, params=whole)))
    assert len(beyond) == 1 and share(beyond[0]) < share(replace(near, params=whole))


def test_a_layer_is_measured_once_and_found_by_the_next_conversion(monkeypatch, tmp_path) -> None:
    calls = []

    def fake(layer, trees, isa, threads, size_bytes):
        calls.append(len(trees))
        return [1e-6 * multiplications(t, layer.shape) for t in trees]

    monkeypatch.setattr(convolutions, "measure", fake)
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    trees = [tree_of(r, LAYER.shape, 1) for r in (INT4, LOW_RANK)]
    for _ in range(2):
        prices = Prices([targets.Target("cpu", "portable", True)], 1, 1 << 20)
        prices.prepare_convolutions((LAYER, t) for t in trees)
        dense, chain = (prices.convolution(LAYER, t)[0] for t in trees)
        assert dense == pytest.approx(1e-6 * 64 * 288, rel=1e-2) and chain < 0.5 * dense
    assert calls == [2]


def test_a_target_that_is_not_here_is_slower_for_larger_images_and_faster_for_chains() -> None:
    prices = Prices([targets.Target("sm_90", "", False)], 1, 1 << 20)
    larger = Layer(LAYER.shape, LAYER.geometry, (48, 40))
    dense, chain = (tree_of(r, LAYER.shape, 1) for r in (INT4, LOW_RANK))
    assert prices.convolution(larger, dense) > prices.convolution(LAYER, dense)
    assert prices.convolution(larger, chain) < prices.convolution(larger, dense)


@pytest.mark.skipif(not cpu.available(), reason="the extension was not built")
def test_every_kind_of_tree_is_measured() -> None:
    trees = [tree_of(r, LAYER.shape, 1) for r in (INT4, LOW_RANK, Recipe("dense", {"dtype": "float32"}))]
    found = convolutions.measure(LAYER, trees, ext.isa(), 1, 1 << 20)
    assert len(found) == 3 and min(found) >= 0


@pytest.mark.skipif(not cpu.available(), reason="the extension was not built")
def test_weights_are_held_a_few_at_a_time(monkeypatch) -> None:
    counts, made = [], convolutions._measure

    def counted(layer, trees, *rest):
        counts.append(len(trees))
        return made(layer, trees, *rest)

    monkeypatch.setattr(convolutions, "_measure", counted)
    monkeypatch.setattr(convolutions, "AT_ONCE", 2 * convolutions.WEIGHT_BYTES * math.prod(LAYER.shape))
    trees = [tree_of(r, LAYER.shape, 1) for r in (INT4, LOW_RANK, Recipe("dense", {"dtype": "float32"}))]
    assert len(convolutions.measure(LAYER, trees, ext.isa(), 1, 1 << 20)) == 3
    assert counts == [2, 1]


def test_a_unit_knows_the_stride_of_its_convolution() -> None:
    from nstf_convert.pipeline.propose.units import find_units
    from nstf_convert.streamed import StreamedModel

    config = {
        "architectures": ["ResNetForImageClassification"], "model_type": "resnet", "embedding_size": 8,
        "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic",
    }  # fmt: skip
    model = StreamedModel(config, {}.__getitem__, lazy=True)
    infos = {n: (tuple(p.shape), "float32") for n, p in model.module.named_parameters()}
    strides = {u.name: u.stride for u in find_units(infos, model) if u.kept is None}
    assert strides.pop("resnet.encoder.stages.1.layers.0.layer.0.convolution.weight") == (2, 2)
    assert strides["resnet.encoder.stages.1.layers.0.layer.1.convolution.weight"] == (1, 1)


@pytest.mark.parametrize(("asked", "side"), [(None, 32), (96, 96)])
def test_images_are_priced_at_the_size_that_is_asked_for(monkeypatch, asked: int | None, side: int) -> None:
    """Else at that of the config, where no dataset has another."""
    model = SimpleNamespace(
        module=SimpleNamespace(main_input_name="pixel_values", config=PretrainedConfig(image_size=32)),
        config=None,
        stored_name=lambda name: name,
    )
    unit = SimpleNamespace(uses=("linear",), shape=(8, 3, 3, 3))
    options = SimpleNamespace(datasets=(), image_size=asked)
    session = SimpleNamespace(units={"conv.weight": unit}, model=model, options=options)

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.conv(pixel_values)

    monkeypatch.setattr(timing, "build_skeleton", lambda config: Reading())
    assert timing.convolution_layers(session)["conv.weight"].image == (side, side)
