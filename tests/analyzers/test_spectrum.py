"""Spectra of matrices, plain and whitened."""

import pytest
import torch

from nstf.analyzers.spectrum import DIRECTIONS, POINTS, singular_values, spectrum


def matrix_of(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (8, 8), (1, 5), (5, 1)])
def test_singular_values_agree_with_torch(shape) -> None:
    w = matrix_of(*shape)
    torch.testing.assert_close(singular_values(w), torch.linalg.svdvals(w.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(20, 30), (30, 20)])
def test_whitened_values_are_those_of_w_times_the_root_of_h(shape) -> None:
    w, x = matrix_of(*shape), matrix_of(100, shape[1], 1)
    h = x.T @ x / 100
    damped = h.double() + 0.01 * h.double().diagonal().mean() * torch.eye(shape[1])
    expected = torch.linalg.svdvals(w.double() @ torch.linalg.cholesky(damped))
    torch.testing.assert_close(singular_values(w, h), expected, rtol=1e-6, atol=1e-6)


def test_singular_hessian_is_survived() -> None:
    assert bool(torch.isfinite(singular_values(matrix_of(30, 4), -torch.eye(4))).all())
    assert float(singular_values(matrix_of(30, 4), torch.zeros(4, 4)).max()) < 1e-10


def test_orthogonal_matrix_has_full_effective_and_stable_rank() -> None:
    q = torch.linalg.qr(matrix_of(128, 128).double())[0]
    s = spectrum(q)
    assert s.effective_rank == pytest.approx(128) and s.stable_rank == pytest.approx(128)
    assert s.concentration == pytest.approx({d: d / 128 for d in DIRECTIONS})


def test_rank_one_matrix_is_all_in_one_direction() -> None:
    s = spectrum(matrix_of(30, 1) @ matrix_of(1, 20))
    assert s.effective_rank == pytest.approx(1.0, abs=1e-3) and s.stable_rank == pytest.approx(1.0)
    assert s.concentration[1] == pytest.approx(1.0) and s.energy(1) == s.concentration[1]
    assert s.energy(5) is None


def test_curve_starts_at_one_and_falls() -> None:
    s = spectrum(matrix_of(300, 200))
    indices, values = zip(*s.curve, strict=True)
    assert indices[0] == 1 and indices[-1] == 200 and values[0] == 1.0
    assert len(indices) <= POINTS and list(values) == sorted(values, reverse=True)


def test_zero_matrix_has_no_rank() -> None:
    s = spectrum(torch.zeros(4, 6))
    assert (s.largest, s.effective_rank, s.stable_rank, s.curve) == (0.0, 0.0, 0.0, ())


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="hessian of shape"):
        spectrum(matrix_of(4, 6), torch.eye(4))
    with pytest.raises(ValueError, match="a matrix is needed"):
        spectrum(torch.zeros(3))
