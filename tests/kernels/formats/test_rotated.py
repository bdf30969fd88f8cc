"""The randomised Hadamard basis."""

import pytest
import torch

from nstf.kernels.formats import EncodedTensor, FormatError, Node, decode, dense, rotated
from nstf.kernels.formats.tree import array_specs
from nstf.kernels.linear import linear
from nstf.kernels.torch.rows import decode_rows


def stored(params: rotated.Params, weight: torch.Tensor) -> EncodedTensor:
    tree = Node(rotated.KIND, params, {"x": Node(dense.KIND, dense.Params("float32"))})
    return EncodedTensor(tree, tuple(weight.shape), {"x.values": rotated.to_basis(params, weight)})


def weight(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows + cols))


CASES = [rotated.Params(64), rotated.Params(32, 128, 7), rotated.Params(0, 32), rotated.Params(128, 0, 1)]


@pytest.mark.parametrize("params", CASES)
def test_into_the_basis_and_back_is_the_identity(params):
    w = weight(128, 384)
    torch.testing.assert_close(decode(stored(params, w)), w, rtol=0, atol=1e-5)


@pytest.mark.parametrize("params", CASES)
def test_turned_activations_give_what_the_decoded_matrix_gives(params):
    encoded, x = stored(params, weight(128, 384)), weight(5, 384)
    torch.testing.assert_close(linear(x, encoded), x @ decode(encoded).T, rtol=1e-4, atol=1e-3)


def test_losses_are_the_same_in_both_bases():
    params, w, x = rotated.Params(64), weight(16, 192), weight(300, 192)
    hessian = x.T @ x / 300
    turned, there = rotated.to_basis(params, w), rotated.rotate_hessian(params, hessian)
    expected = ((w @ hessian) * w).sum()
    torch.testing.assert_close(((turned @ there) * turned).sum(), expected, rtol=1e-4, atol=0)


def test_outliers_are_spread_over_their_block():
    w = torch.zeros(1, 128)
    w[0, 5] = 8
    turned = rotated.to_basis(rotated.Params(64), w)
    torch.testing.assert_close(turned.abs()[0, :64], torch.ones(64))
    assert float(turned[0, 64:].abs().max()) == 0


def test_signs_do_not_depend_on_the_length_and_are_balanced():
    long = rotated.signs(4096, 3, 0)
    assert torch.equal(rotated.signs(100, 3, 0), long[:100])
    assert abs(float(long.mean())) < 0.05 and not torch.equal(long, rotated.signs(4096, 3, 1))


def test_rows_decode_alone():
    encoded = stored(rotated.Params(64), weight(40, 192))
    rows = torch.tensor([3, 39, 0])
    torch.testing.assert_close(decode_rows(encoded, rows), decode(encoded)[rows])


def test_blocks_must_divide_the_axes():
    node = Node(rotated.KIND, rotated.Params(128), {"x": Node(dense.KIND, dense.Params("float32"))})
    with pytest.raises(FormatError, match="multiple of the block"):
        array_specs(node, (16, 192))
    assert [rotated.block_for(n) for n in (576, 1536, 96, 40)] == [64, 128, 32, 0]


@pytest.mark.parametrize("arguments", [(48,), (64, 16), (64, 0, -1), (64, 0, 1 << 31)])
def test_parameters_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError):
        rotated.Params(*arguments)


def test_what_inference_has_cached_serves_gradients_as_well() -> None:
    """Healing and fine-tuning come after a measurement in the same process, which runs in inference mode."""
    for kept in (rotated._signs, rotated._hadamard_matrix):
        kept.cache_clear()
    params = rotated.Params(block_in=64, block_out=32, seed=3)
    with torch.inference_mode():
        first = rotated.from_basis(params, torch.ones(32, 64))
    given = torch.ones(32, 64, requires_grad=True)
    made = rotated.from_basis(params, given)
    made.square().sum().backward()
    assert torch.equal(made, first) and given.grad is not None and bool(given.grad.any())
