"""Evidence for low multilinear rank."""

import pytest
import tensorly
import torch

from nstf.analyzers.multilinear import evidence, natural_reshapes


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_tensor_of_low_multilinear_rank_is_kept_where_the_svd_loses() -> None:
    """Core 4 x 4 x 12 in 12 x 16 x 24: its matrix (192 x 24) has rank 12, above what half the numbers allow."""
    core = noise(4, 4, 12)
    w = torch.einsum(
        "abc,ia,jb,kc->ijk", core, noise(12, 4, seed=1), noise(16, 4, seed=2), noise(24, 12, seed=3)
    )
    e = evidence(w.reshape(192, 24), "heads", (12, 16, 24))
    assert e.tucker == pytest.approx(1.0, abs=1e-6) and e.svd < 0.999 and e.gain > 1e-3
    assert e.mode_effective_ranks[0] < 4.01 and e.mode_effective_ranks[1] < 4.01


def test_noise_gives_no_gain_over_the_svd_to_tucker_and_train() -> None:
    w = noise(64, 96)
    e = evidence(w, "heads", (8, 8, 96))
    assert e.tucker <= e.svd + 0.05 and e.tensor_train <= e.svd + 0.05
    assert all(0.0 <= x <= 1.0 for x in (e.svd, e.tucker, e.tensor_train, e.cp_bound))


def test_fitted_cp_stays_below_its_bound() -> None:
    terms = [noise(n, 3, seed=n) for n in (6, 8, 10)]
    w = torch.einsum("ir,jr,kr->ijk", *terms)
    before = tensorly.get_backend()
    e = evidence(w, "experts", (6, 8, 10))
    assert e.cp is not None and 0.999 < e.cp <= e.cp_bound + 1e-9
    assert tensorly.get_backend() == before


def test_large_tensors_have_only_the_bound_of_cp() -> None:
    assert evidence(noise(64, 1024), "heads", (8, 8, 1024)).cp is None


def test_natural_reshapes_follow_the_role() -> None:
    config = {"num_attention_heads": 9, "num_key_value_heads": 3}
    assert natural_reshapes("q", (576, 576), config) == {"heads": (9, 64, 576)}
    assert natural_reshapes("k", (192, 576), config) == {"heads": (3, 64, 576)}
    assert natural_reshapes("o", (576, 576), config) == {"heads": (576, 9, 64)}
    assert natural_reshapes("conv", (8, 4, 3, 3)) == {"kernel": (8, 4, 9)}
    assert natural_reshapes("conv", (8, 4, 1, 1)) == {}
    assert natural_reshapes("expert_stack", (4, 8, 6)) == {"experts": (4, 8, 6)}
    assert natural_reshapes("gate", (64, 32), config) == {}
    assert natural_reshapes("q", (64, 32)) == {}


def test_zero_tensor_is_kept_by_everything() -> None:
    e = evidence(torch.zeros(12, 10), "heads", (3, 4, 10))
    assert (e.svd, e.tucker, e.tensor_train, e.cp) == (1.0, 1.0, 1.0, None)


def test_what_is_not_a_reshape_is_refused() -> None:
    with pytest.raises(ValueError, match="not a reshape"):
        evidence(torch.zeros(12, 10), "heads", (3, 4, 11))
    with pytest.raises(ValueError, match="not a reshape"):
        evidence(torch.zeros(12, 10), "heads", (12, 10))
