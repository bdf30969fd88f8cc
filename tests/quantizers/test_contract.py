"""What every quantiser must do; runs over the folder's list, so a new file is tested without a line here."""

import dataclasses
import math
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf import quantizers
from nstf.kernels.formats import (
    EncodedTensor,
    check,
    decode,
    leaf_code_bits,
    node_from_json,
    node_to_json,
)
from nstf.quantizers import METHODS, method
from nstf.quantizers.rounding import matrix
from nstf.quantizers.stats import Stats, loss
from tests.quantizers.conftest import correlated_hessian, normal

# More parameters for the methods we know; every method is tested with its defaults.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "int_grid": [
        *({"bits": b} for b in (2, 3, 5, 6, 8)),
        {"bits": 4, "group": 32, "symmetric": False, "scale_bits": 8},
        {"bits": 3, "group": 0, "symmetric": False},
        {"bits": 8, "group": 0, "scale_bits": 8},
    ],
    "fp8": [{"variant": "e4m3fnuz"}, {"group": 32, "scale_bits": 32}],
    "grid16": [{"group": 32, "scale_bits": 8}, {"group": 0}],
}
CASES = [(name, kwargs) for name in METHODS for kwargs in [{}, *VARIANTS.get(name, [])]]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in kwargs.items()) or 'default'}" for name, kwargs in CASES]


@pytest.fixture(params=CASES, ids=IDS)
def case(request: pytest.FixtureRequest) -> tuple[ModuleType, Any]:
    name, kwargs = request.param
    module = method(name)
    return module, module.Params(**kwargs)


def same(a: EncodedTensor, b: EncodedTensor) -> bool:
    return set(a.arrays) == set(b.arrays) and all(torch.equal(a.arrays[k], b.arrays[k]) for k in a.arrays)


@pytest.mark.parametrize("rounding", ["nearest", "ldlq"])
def test_encoding_is_what_the_tree_declares(case, rounding, weight, stats):
    module, params = case
    params = dataclasses.replace(params, rounding=rounding)
    encoded = module.encode(weight, params, stats)
    check(encoded)
    assert encoded.tree == module.tree(params)
    assert node_from_json(node_to_json(encoded.tree)) == encoded.tree
    assert encoded.size_bytes * 8 == round(module.bits(tuple(weight.shape), params) * weight.numel())
    values = decode(encoded)
    assert values.dtype == torch.float32 and values.shape == weight.shape


def test_error_is_bounded_by_the_bits(case, weight):
    module, params = case
    encoded = module.encode(weight, params)
    bits = leaf_code_bits(encoded.tree, encoded.shape) / weight.numel()
    error = float((decode(encoded) - weight).norm() / weight.norm())
    # 2.5 steps of a grid over +-1 for integers; an E4M3 value is exact to 2**-4 of itself, 0.027 on average.
    assert error < max(2.5 * 2**-bits, 0.035 if encoded.tree.kind == "fp8" else 0)


@pytest.mark.parametrize("rounding", ["nearest", "ldlq"])
def test_same_bytes_for_every_run_and_number_of_threads(case, rounding, weight, stats):
    module, params = case
    params = dataclasses.replace(params, rounding=rounding)
    first = module.encode(weight, params, stats)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 3)
        second = module.encode(weight, params, Stats(stats.hessian))
    finally:
        torch.set_num_threads(threads)
    assert same(first, second)


def test_row_chunks_do_not_change_the_result(case, weight, stats, monkeypatch):
    module, params = case
    params = dataclasses.replace(params, rounding="ldlq")
    whole = module.encode(weight, params, stats)
    monkeypatch.setattr(matrix, "CHUNK", 7 * weight.shape[1])
    assert same(whole, module.encode(weight, params, stats))


def test_scratch_says_how_many_rows_are_rounded_at_a_time(case, weight, stats, monkeypatch):
    module, params = case
    if not getattr(module, "BY_ROWS", False):
        pytest.skip("encodes whole matrices, or has parts of its own")
    params = dataclasses.replace(params, rounding="ldlq")
    rows, cols = math.prod(weight.shape[: params.lead]), math.prod(weight.shape[params.lead :])
    monkeypatch.setattr(matrix, "CHUNK", 7 * cols)
    found, real = [], matrix.round_matrix

    def rounded(part, *given):
        found.append(len(part))
        return real(part, *given)

    monkeypatch.setattr(matrix, "round_matrix", rounded)
    name = module.__name__.rpartition(".")[2]
    whole = quantizers.encode_many([(name, weight, params, stats)], matrix.SCRATCH_BYTES * rows * cols)[0]
    assert found == [rows]
    assert same(whole, module.encode(weight, params, stats)) and sum(found) == 2 * rows and found[1] == 7


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 33), (2, 129), (17, 8)])
@pytest.mark.parametrize("rounding", ["nearest", "ldlq"])
def test_odd_sizes(case, shape, rounding):
    module, params = case
    params = dataclasses.replace(params, rounding=rounding)
    weight = normal(*shape)
    encoded = module.encode(weight, params, Stats(correlated_hessian(shape[1])))
    check(encoded)
    assert encoded.size_bytes * 8 == round(module.bits(shape, params) * weight.numel())
    assert float((decode(encoded) - weight).norm() / weight.norm()) < 0.9


def test_expert_stack_is_its_matrices_one_after_another(case):
    module, params = case
    stack, stats = normal(3, 16, 40), Stats(correlated_hessian(40))
    encoded = module.encode(stack, dataclasses.replace(params, rounding="ldlq", lead=2), stats)
    flat = module.encode(stack.reshape(48, 40), dataclasses.replace(params, rounding="ldlq"), stats)
    assert encoded.shape == (3, 16, 40)
    assert torch.equal(decode(encoded).reshape(48, 40), decode(flat))


def test_convolution_kernel_is_a_matrix_of_its_trailing_axes(case):
    module, params = case
    kernel = normal(8, 4, 3, 3)
    encoded = module.encode(kernel, params)
    check(encoded)
    assert torch.equal(decode(encoded).reshape(8, 36), decode(module.encode(kernel.reshape(8, 36), params)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype_is_taken(case, dtype, weight):
    module, params = case
    values = decode(module.encode(weight.to(dtype), params))
    assert torch.equal(values, decode(module.encode(weight.to(dtype).float(), params)))


@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e-4, 1e4, 1e30])
def test_extreme_magnitudes_stay_finite(case, scale):
    module, params = case
    weight = normal(4, 40) * scale
    values = decode(module.encode(weight, params))
    assert bool(torch.isfinite(values).all())
    assert float((values - weight).norm()) <= float(weight.norm()) * 1.001


def test_rows_and_groups_of_zeros_stay_zero(case, stats):
    module, params = case
    weight = normal(4, 96)
    weight[1] = 0
    values = decode(module.encode(weight, params))
    assert float(values[1].abs().max()) == 0


@pytest.mark.parametrize("rounding", ["nearest", "ldlq"])
def test_estimate_predicts_the_loss(case, rounding):
    module, params = case
    params = dataclasses.replace(params, rounding=rounding)
    weight, stats = normal(700, 128), Stats(correlated_hessian(128), torch.rand(700) + 0.5)
    true = loss(weight, decode(module.encode(weight, params, stats)), stats)
    assert 0.85 < module.estimate(weight, params, stats) / true < 1.18


@pytest.mark.parametrize("rounding", ["nearest", "ldlq"])
def test_estimates_of_many_are_those_of_each(case, rounding):
    module, params = case
    weight, stats = normal(60, 96), Stats(correlated_hessian(96), torch.rand(60) + 0.5)
    many = [dataclasses.replace(params, rounding=rounding, damping=damping) for damping in (0.01, 0.02)]
    many.append(dataclasses.replace(params, rounding="nearest"))
    found = module.estimate_many(weight, many, stats)
    assert found == pytest.approx([module.estimate(weight, p, stats) for p in many], rel=1e-4)


def test_ldlq_beats_nearest_in_the_norm_of_the_hessian(case, weight, stats):
    module, params = case
    losses = {}
    for rounding in ("nearest", "ldlq"):
        encoded = module.encode(weight, dataclasses.replace(params, rounding=rounding), stats)
        losses[rounding] = loss(weight, decode(encoded), stats)
    assert losses["ldlq"] < 0.85 * losses["nearest"]


def test_without_a_hessian_ldlq_is_nearest(case, weight):
    module, params = case
    assert same(
        module.encode(weight, dataclasses.replace(params, rounding="ldlq")), module.encode(weight, params)
    )


@pytest.mark.parametrize(
    ("bad", "stats", "message"),
    [
        (torch.zeros(0, 4), None, "no elements"),
        (torch.zeros(4, 0), None, "no elements"),
        (torch.zeros(2, 2, dtype=torch.int32), None, "only floating-point"),
        (torch.full((2, 8), math.nan), None, "NaN or infinite"),
        (torch.full((2, 8), math.inf), None, "NaN or infinite"),
        (torch.ones(2, 8), Stats(torch.eye(4)), r"the Hessian is \[4, 4\], the weight has 8 columns"),
        (torch.ones(2, 8), Stats(None, torch.ones(3)), "3 row weights for 2 rows"),
    ],
)
def test_bad_input_is_refused_with_its_values(case, bad, stats, message):
    module, params = case
    with pytest.raises(ValueError, match=message):
        module.encode(bad, params, stats)
    with pytest.raises(ValueError, match=message):
        module.estimate(bad, params, stats)


def test_bad_parameters_are_refused(case):
    _, params = case
    for change, message in (
        ({"rounding": "up"}, "rounding must be one of nearest, ldlq, not 'up'"),
        ({"damping": 0.0}, "damping must be above 0"),
        ({"lead": -1}, "lead must be 0 to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(params, **change)


def test_the_list_of_methods_is_the_folder():
    assert {"fp8", "grid16", "int_grid", "mxfp4"} <= set(METHODS)
    assert "stats" not in METHODS and "rounding" not in METHODS
    with pytest.raises(ValueError, match="unknown quantiser 'os'; known are fp8"):
        method("os")
