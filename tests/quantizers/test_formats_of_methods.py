"""What single methods promise beyond the contract."""

import pytest
import torch

from nstf.kernels.formats import decode
from nstf.kernels.formats import fp8 as fp8_format
from nstf.kernels.formats.tuning import retuned, tunable
from nstf.quantizers import fp8, grid16, int_grid, mxfp4
from nstf.quantizers.stats import Stats, loss
from tests.quantizers.conftest import correlated_hessian, normal


@pytest.mark.parametrize(
    ("module", "params"),
    [
        (mxfp4, mxfp4.Params()),
        (fp8, fp8.Params()),
        (fp8, fp8.Params("e4m3fnuz", 32)),
        (int_grid, int_grid.Params(bits=4, group=32)),
        (int_grid, int_grid.Params(bits=3, group=32, symmetric=False)),
        (int_grid, int_grid.Params(bits=2, group=0)),
    ],
    ids=["mxfp4", "fp8", "fp8-fnuz-group", "int4", "int3-asymmetric", "int2-row"],
)
def test_encoding_a_decoded_tensor_again_changes_nothing(module, params):
    once = decode(module.encode(normal(50, 100), params))
    twice = decode(module.encode(once, params))
    assert torch.equal(once, twice)


@pytest.mark.parametrize("variant", ["e4m3fn", "e4m3fnuz"])
def test_fp8_codes_are_the_bytes_of_the_torch_cast(variant):
    """Weights on the type's own values with the largest in every row: scale 1, code = the cast's byte."""
    dtype = fp8_format.torch_dtype(variant)
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[torch.isfinite(values)].reshape(1, -1)
    encoded = fp8.encode(values, fp8.Params(variant))
    assert float(encoded.arrays["scale"]) == 1.0
    assert float(values.abs().max()) == fp8_format.LARGEST[variant]
    negative_zero = (values == 0) & values.signbit()
    bytes_of = values.to(dtype).view(torch.uint8).masked_fill(negative_zero, 0)
    assert torch.equal(encoded.arrays["codes"], bytes_of)
    assert torch.equal(decode(encoded), values)


@pytest.mark.parametrize("variant", ["e4m3fn", "e4m3fnuz"])
def test_fp8_rounds_like_the_torch_cast(variant):
    weight = normal(20, 64)
    encoded = fp8.encode(weight, fp8.Params(variant))
    scale = encoded.arrays["scale"].float()
    cast = (weight / scale).clamp(-fp8_format.LARGEST[variant], fp8_format.LARGEST[variant])
    cast = cast.to(fp8_format.torch_dtype(variant)).float() * scale
    assert torch.allclose(decode(encoded), cast, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1.0, 2.0**-5, 2.0**12])
@pytest.mark.parametrize("rounding", ["nearest", "ldlq"])
@pytest.mark.parametrize("order", [True, False])
def test_half_of_the_steps_leave_float16_the_256th_part_of_the_super_scale(size, rounding, order):
    weight, stats = normal(40, 256) * size, Stats(correlated_hessian(256))
    weight[3] = 0
    lost = []
    for steps in (256, 128):
        params = int_grid.Params(6, 16, scale_bits=8, steps=steps, rounding=rounding, act_order=order)
        encoded = int_grid.encode(weight, params, stats)
        lost.append(loss(weight, decode(encoded), stats))
        tuned = retuned(encoded, {"scale": tunable(encoded)["scale"] * 1.01})
    for one in (encoded, tuned):
        part = one.arrays["scale_super"].float() / 256
        assert int(one.arrays["scale_codes"].max()) <= 127 and torch.equal(part.half().float(), part)
    assert lost[1] <= 1.12 * lost[0]
    torch.testing.assert_close(
        decode(tuned), decode(encoded) * 1.01, rtol=0, atol=float(weight.abs().max()) / 128
    )


def test_steps_are_256_or_128_of_8_bits():
    for wrong in ({"steps": 128}, {"steps": 64, "scale_bits": 8}):
        with pytest.raises(ValueError, match="steps must be 256, or 128"):
            int_grid.Params(**wrong)


def test_mxfp4_tries_the_neighbouring_exponents():
    """With a maximum of 7.9 the specification's exponent clips it to 6; twice that scale represents 8."""
    block = torch.zeros(1, 32)
    block[0, 0] = 7.9
    encoded = mxfp4.encode(block, mxfp4.Params())
    assert int(encoded.arrays["scale"]) == 128
    assert float(decode(encoded)[0, 0]) == 8.0


def test_grid16_beats_a_uniform_grid_of_the_same_size():
    weight, stats = normal(64, 256), Stats(correlated_hessian(256))
    for rounding in ("nearest", "ldlq"):
        uniform = int_grid.Params(bits=4, group=64, rounding=rounding)
        fitted = grid16.Params(group=64, rounding=rounding)
        assert grid16.bits((4096, 256), fitted) == pytest.approx(
            int_grid.bits((4096, 256), uniform), rel=1e-4
        )
        uniform_loss = loss(weight, decode(int_grid.encode(weight, uniform, stats)), stats)
        assert loss(weight, decode(grid16.encode(weight, fitted, stats)), stats) < 0.9 * uniform_loss


def test_grid16_table_follows_the_distribution_of_the_weights():
    """Weights on sixteen uneven values are represented almost exactly."""
    points = torch.linspace(-1, 1, 16).pow(3) + torch.linspace(-0.3, 0.3, 16)
    index = torch.randint(0, 16, (200, 64), generator=torch.Generator().manual_seed(0))
    weight = points[index]
    fitted = decode(grid16.encode(weight, grid16.Params(group=0)))
    uniform = decode(int_grid.encode(weight, int_grid.Params(bits=4, group=0)))
    assert float((fitted - weight).norm()) < 0.5 * float((uniform - weight).norm())


def test_row_weights_move_the_table_towards_the_rows_that_matter():
    weight = torch.cat([normal(32, 64), torch.rand(32, 64, generator=torch.Generator().manual_seed(2)) - 0.5])
    importance = torch.cat([torch.ones(32), torch.full((32,), 1e-6)])
    stats = Stats(None, importance)
    plain = loss(weight, decode(grid16.encode(weight, grid16.Params(group=0))), stats)
    assert loss(weight, decode(grid16.encode(weight, grid16.Params(group=0), stats)), stats) < plain
