"""TF32 for products of many columns on a GPU, and nowhere else."""

import pytest
import torch

from nstf.quantizers.rounding.products import MANY, products_of_errors


@pytest.mark.parametrize(
    ("device", "cols", "inside"),
    [("cuda", MANY, "high"), ("cuda", MANY - 1, "highest"), ("cpu", 2 * MANY, "highest")],
)
def test_only_wide_products_of_a_gpu_are_rounded(device: str, cols: int, inside: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with products_of_errors(torch.device(device), cols):
            assert torch.get_float32_matmul_precision() == inside
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
def test_wide_matrices_lose_no_more_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf.quantizers import int_grid
    from nstf.quantizers.stats import Stats, loss

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, MANY, generator=generator) * torch.logspace(0, -2, MANY)
    mixed = (inputs @ torch.randn(MANY, MANY, generator=generator) / MANY**0.5).cuda()
    weight = torch.randn(256, MANY, generator=generator).cuda()
    found = []
    for many in (MANY, MANY + 1):
        monkeypatch.setattr("nstf.quantizers.rounding.products.MANY", many)
        stats = Stats(mixed.T @ mixed / len(mixed))
        encoded = int_grid.encode(weight, int_grid.Params(3, 64), stats)
        from nstf.kernels.formats import decode

        found.append(loss(weight, decode(encoded).cuda(), stats))
    assert 0.99 < found[0] / found[1] < 1.01
