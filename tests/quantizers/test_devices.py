"""One code for every device: nothing is made on a device of its own, several tensors are encoded together, GPU as CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nstf import quantizers
from nstf.kernels import cpu, trellis_encode
from nstf.kernels.formats import decode
from nstf.kernels.formats import trellis as trellis_format
from nstf.kernels.torch import viterbi
from nstf.quantizers import trellis
from nstf.quantizers.rounding import block_ldlq, trellis_lanes
from nstf.quantizers.rounding.block_ldlq import block_factor
from nstf.quantizers.rounding.factor import factor, gains
from nstf.quantizers.stats import Stats, loss
from tests.quantizers.conftest import correlated_hessian, normal

CASES: list[tuple[str, dict[str, Any]]] = [
    ("int_grid", {"bits": 3, "group": 32, "scale_bits": 8}),
    ("int_grid", {"bits": 4, "group": 24, "symmetric": False, "act_order": False}),
    ("int_grid", {"bits": 2, "group": 0, "scale_bits": 16}),
    ("grid16", {"group": 32, "scale_bits": 8}),
    ("fp8", {}),
    ("mxfp4", {}),
    ("trellis", {"quarter_bits": 12, "block": 32}),
    ("trellis", {"quarter_bits": 8}),
]
IDS = [f"{name}-{'-'.join(map(str, kwargs.values()))}" for name, kwargs in CASES]


def params_of(name: str, kwargs: dict[str, Any], rounding: str = "ldlq") -> Any:
    return quantizers.method(name).Params(rounding=rounding, **kwargs)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled passes, and with tensors that are made without a device where no others are.

    Such a tensor cannot be used with the inputs, as a CPU tensor could not if those were on a GPU.
    """
    monkeypatch.setattr(cpu, "ext", None)
    monkeypatch.setattr(trellis_format, "ext", None)
    monkeypatch.setattr(trellis_encode, "encode_tiles", viterbi.viterbi)
    quantizers.method("fp8").levels(quantizers.method("fp8").Params())  # a table for all devices, made once


@pytest.mark.parametrize("rounding", ["nearest", "ldlq"])
@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=IDS)
def test_nothing_is_made_on_another_device_than_the_weights(name, kwargs, rounding, as_on_a_gpu) -> None:
    module, params = quantizers.method(name), params_of(name, kwargs, rounding)
    weight, hessian, row_weight = normal(16, 64), correlated_hessian(64), torch.rand(16) + 0.5
    with torch.device("meta"):
        stats = Stats(hessian, row_weight)
        (encoded,) = quantizers.encode_many([(name, weight, params, stats)])
        estimated = module.estimate(weight, params, stats)
    assert all(array.device.type == "cpu" for array in encoded.arrays.values())
    assert estimated == pytest.approx(loss(weight, decode(encoded), Stats(hessian, row_weight)), rel=0.6)


def problems(rows: tuple[int, ...] = (64, 48, 80)) -> list[tuple[Tensor, Stats]]:
    """Two tensors with one Hessian, and one with another."""
    shared = Stats(correlated_hessian(96))
    other = Stats(correlated_hessian(96, 3), torch.rand(rows[2], generator=torch.Generator().manual_seed(1)))
    return [
        (normal(n, 96, seed=n), s) for n, s in zip(rows, (shared, shared.for_rows(None), other), strict=True)
    ]


@pytest.mark.skipif(not hasattr(cpu.ext, "trellis_viterbi"), reason="minutes without the extension")
@pytest.mark.parametrize("scratch", [1 << 28, 1 << 17, 1])
def test_tensors_encoded_together_are_as_good_as_alone(scratch) -> None:
    kinds = (
        trellis.Params(10, block=32, rounding="ldlq"),
        trellis.Params(12, rounding="ldlq", scale_bits=16),
        trellis.Params(sections=((14, 32), (9, 48)), block=32, rounding="ldlq"),
    )
    items = [("trellis", w, p, s) for (w, s), p in zip(problems(), kinds, strict=True)]
    items.insert(1, ("int_grid", normal(20, 96), params_of("int_grid", {}), items[0][3]))
    for (name, weight, params, stats), encoded in zip(
        items, quantizers.encode_many(items, scratch), strict=True
    ):
        alone = quantizers.method(name).encode(weight, params, stats)
        assert encoded.tree == alone.tree and encoded.shape == alone.shape
        mine = loss(weight, decode(encoded), stats)
        assert mine == pytest.approx(loss(weight, decode(alone), stats), rel=0.02)


@pytest.mark.skipif(not hasattr(cpu.ext, "trellis_viterbi"), reason="minutes without the extension")
def test_together_each_block_of_columns_is_one_search_for_every_rate(monkeypatch) -> None:
    calls = []

    def counted(targets: Tensor, quarter_bits: int, codebook: Tensor) -> Tensor:
        calls.append((quarter_bits, len(targets)))
        return search(targets, quarter_bits, codebook)

    search = trellis_encode.encode_tiles
    monkeypatch.setattr(trellis_encode, "encode_tiles", counted)
    params = [trellis.Params(q, block=32, rounding="ldlq") for q in (8, 8, 12)]
    quantizers.encode_many([("trellis", w, p, s) for (w, s), p in zip(problems(), params, strict=True)])
    assert sorted(calls) == sorted([(8, 7), (12, 5)] * 6)


def test_the_gains_are_those_of_the_inverse(monkeypatch) -> None:
    monkeypatch.setattr("nstf.quantizers.rounding.factor._CHUNK", 32)
    way = factor(correlated_hessian(80))
    inverse = torch.linalg.inv(way.feedback.double() + torch.eye(80))
    kept, added = gains(way.feedback)
    assert torch.allclose(kept.double(), inverse.square().sum(1), rtol=1e-4)
    assert torch.allclose(added.double(), (inverse - torch.eye(80)).square().sum(0), rtol=1e-4, atol=1e-6)


def test_blocks_of_the_factor_do_not_depend_on_how_many_are_made_at_a_time(monkeypatch) -> None:
    way = factor(correlated_hessian(96))
    whole = block_factor(way)
    monkeypatch.setattr("nstf.quantizers.rounding.block_ldlq._CHUNK", 32)
    parts = block_factor(way)
    assert torch.allclose(whole.feedback, parts.feedback, atol=1e-7)
    assert torch.allclose(whole.importance, parts.importance)
    assert parts.trace == pytest.approx(whole.trace, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("act_order", [False, True])
def test_the_factor_on_a_gpu_is_the_one_on_the_cpu(act_order) -> None:
    hessian = correlated_hessian(300)
    here, there = factor(hessian, act_order=act_order), factor(hessian.cuda(), act_order=act_order)
    assert there.feedback.is_cuda and there.recovery == here.recovery
    assert torch.allclose(there.feedback.cpu(), here.feedback, atol=1e-5)
    assert torch.allclose(there.diagonal.cpu(), here.diagonal, rtol=1e-5)
    errors = normal(5, 300)
    assert torch.allclose(there.fed(errors.cuda()).cpu(), here.fed(errors), rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["nearest", "ldlq"])
@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=IDS)
def test_a_gpu_encodes_as_well_as_the_cpu(name, kwargs, rounding) -> None:
    module, params = quantizers.method(name), params_of(name, kwargs, rounding)
    weight, row_weight = normal(200, 288), torch.rand(200) + 0.5
    here = Stats(correlated_hessian(288), row_weight)
    there = Stats(correlated_hessian(288).cuda(), row_weight.cuda())
    encoded = module.encode(weight.cuda(), params, there)
    assert all(array.device.type == "cpu" for array in encoded.arrays.values())
    wanted = loss(weight, decode(module.encode(weight, params, here)), here)
    assert loss(weight, decode(encoded), here) == pytest.approx(wanted, rel=0.02)
    assert loss(weight.cuda(), decode(encoded).cuda(), there) == pytest.approx(wanted, rel=0.02)
    estimated = module.estimate(weight.cuda(), params, there)
    assert estimated == pytest.approx(module.estimate(weight, params, here), rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("sections", [(), ((8, 96), (12, 96))])
def test_blocks_of_narrow_matrices_are_captured_for_the_same_loss(sections, monkeypatch) -> None:
    weight = normal(192, 576).cuda()
    stats = Stats(correlated_hessian(576).cuda(), torch.rand(192).cuda() + 0.5)
    params = trellis.Params(10, block=64, rounding="ldlq", sections=sections)
    found = []
    for narrow in (block_ldlq.NARROW, 0, block_ldlq.NARROW):
        monkeypatch.setattr(block_ldlq, "NARROW", narrow)
        found.append(trellis.encode(weight, params, stats))
    losses = [loss(weight, decode(e).cuda(), stats) for e in found]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert all(torch.equal(a, found[2].arrays[n]) for n, a in found[0].arrays.items())


@pytest.mark.gpu
def test_a_gpu_encodes_tensors_together_as_well_as_alone() -> None:
    params = [trellis.Params(q, block=32, rounding="ldlq") for q in (8, 10, 8)]
    items: list[Any] = []
    for (w, s), p in zip(problems(), params, strict=True):
        there = Stats(s.hessian.cuda(), None if s.row_weight is None else s.row_weight.cuda())
        items.append(("trellis", w.cuda(), p, there))
    for (_, weight, p, stats), encoded in zip(items, quantizers.encode_many(items), strict=True):
        alone = decode(trellis.encode(weight, p, stats)).cuda()
        assert loss(weight, decode(encoded).cuda(), stats) == pytest.approx(
            loss(weight, alone, stats), rel=0.03
        )


@pytest.mark.gpu
@pytest.mark.parametrize("sections", [(), ((14, 208), (9, 304))])
def test_rows_side_by_side_on_a_gpu_are_as_good_as_together(sections, monkeypatch) -> None:
    weight, stats = normal(512, 1280).cuda(), Stats(correlated_hessian(1280).cuda())
    params = trellis.Params(12, sections=sections, block=64, rounding="ldlq")
    losses = []
    for tiles in (10**6, 8):
        monkeypatch.setattr(trellis_lanes, "LANE_TILES", tiles)
        losses.append(
            loss(weight.cpu(), decode(trellis.encode(weight, params, stats)), Stats(stats.hessian.cpu()))
        )
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
