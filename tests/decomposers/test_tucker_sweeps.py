"""The sweeps that improve Tucker's bases give tensorly's numbers, bit for bit."""

import pytest
import torch

from nstf.decomposers import tucker
from nstf.decomposers.modes import gram_eigen, mode_product, unfold
from nstf.decomposers.tensorly_backend import torch_backend

CASES = [
    ((6, 7, 8), (0, 1, 2), (3, 4, 5), 10),
    ((6, 7, 8), (0, 2), (2, 8), 3),
    ((3, 16, 12, 4), (1, 2), (5, 6), 10),
    ((24, 16, 3, 3), (0, 1, 3), (7, 5, 2), 1),
]


@pytest.mark.parametrize(("shape", "axes", "ranks", "sweeps"), CASES)
@pytest.mark.parametrize("zero", [False, True])
def test_sweeps_are_those_of_tensorly(shape, axes, ranks, sweeps, zero) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if zero:
        tensor[0] = 0.0
        tensor[..., -1] = 0.0
    start = [gram_eigen(unfold(tensor, a))[1][:, :r] for a, r in zip(axes, ranks, strict=True)]
    core = tensor
    for axis, basis in zip(axes, start, strict=True):
        core = mode_product(core, basis.T, axis)
    found = tucker._improved(tensor, axes, start, sweeps)
    with torch_backend():
        from tensorly.decomposition import partial_tucker

        (_, wanted), _ = partial_tucker(
            tensor, list(ranks), modes=list(axes), n_iter_max=sweeps, init=(core, start), tol=tucker.CHANGE
        )
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
