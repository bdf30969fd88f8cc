"""The worked examples of CONTRIBUTING.md run as they are printed."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import nstf.decomposers
import nstf.kernels.formats
import nstf.quantizers
from nstf.decomposers.factors import dense_bytes, dense_leaf, lead_for
from nstf.kernels.formats import EncodedTensor, check, decode, stored_bytes, tree
from nstf.quantizers import int_grid
from nstf.quantizers.stats import Stats, loss

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TEXT, re.DOTALL))


@pytest.fixture
def example(tmp_path: Path) -> Iterator[dict[str, ModuleType]]:
    """The examples as modules of their packages, and the packages as they were afterwards."""
    loaded = {}
    for path, code in EXAMPLES.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
        name = "nstf." + path.removesuffix(".py").replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        if path.startswith("kernels/formats/"):  # found as every format is, by looking into the package
            nstf.kernels.formats.__path__.append(str(file.parent))
            tree._formats.cache_clear()
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
        spec.loader.exec_module(module)
        loaded[path] = module
    yield loaded
    for path in EXAMPLES:
        name = "nstf." + path.removesuffix(".py").replace("/", ".")
        parent, _, child = name.rpartition(".")
        delattr(sys.modules[parent], child)
        del sys.modules[name]
        if path.startswith("kernels/formats/"):
            nstf.kernels.formats.__path__.pop()
    tree._formats.cache_clear()


def weight_and_stats() -> tuple[torch.Tensor, Stats]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=generator)
    x = torch.randn(400, 96, generator=generator) @ torch.randn(96, 96, generator=generator)
    return weight, Stats(x.T @ x / 400)


def test_the_page_shows_one_quantiser_one_format_and_one_decomposer() -> None:
    assert list(EXAMPLES) == ["quantizers/nf4.py", "kernels/formats/kronecker.py", "decomposers/kronecker.py"]


def test_the_quantiser_of_the_page_works_and_uses_the_calibration(example: dict[str, ModuleType]) -> None:
    nf4 = example["quantizers/nf4.py"]
    weight, stats = weight_and_stats()
    losses = {}
    for rounding in ("nearest", "ldlq"):
        params = nf4.Params(group=32, rounding=rounding)
        encoded = nf4.encode(weight, params, stats)
        check(encoded)
        assert encoded.size_bytes * 8 / weight.numel() == nf4.bits(tuple(weight.shape), params)
        losses[rounding] = loss(weight, decode(encoded), stats)
        assert 0.3 < nf4.estimate(weight, params, stats) / losses[rounding] < 3
    assert losses["ldlq"] < losses["nearest"]
    plain = nf4.encode(weight, nf4.Params(group=32))
    assert float((decode(plain) - weight).norm() / weight.norm()) < 0.12


def test_the_decomposer_of_the_page_is_exact_at_full_rank_and_can_be_quantised(
    example: dict[str, ModuleType],
) -> None:
    kronecker = example["decomposers/kronecker.py"]
    weight, _ = weight_and_stats()
    full = kronecker.decompose(weight, kronecker.Params(48, 6, 8))
    assert torch.allclose(full.dense(), weight, atol=1e-4)
    errors = []
    for rank in (1, 8, 24):
        found = kronecker.decompose(weight, kronecker.Params(rank, 6, 8))
        errors.append(float((found.dense() - weight).norm() / weight.norm()))
    assert errors == sorted(errors, reverse=True)
    assert kronecker.rank_for_error(weight, errors[1] + 1e-6, 6, 8) == 8

    size = weight.numel()
    rank = kronecker.rank_for_bytes(tuple(weight.shape), size, dense_bytes("bfloat16"), 6, 8)
    stored = kronecker.decompose(weight, kronecker.Params(rank, 6, 8)).encode(dense_leaf("bfloat16"))
    check(stored)
    assert size * 0.95 < stored_bytes(stored.tree, stored.shape) <= size

    def leaf(name: str, factor: torch.Tensor, metric: torch.Tensor | None) -> EncodedTensor:
        params = int_grid.Params(bits=8, group=0, lead=lead_for(tuple(factor.shape)))
        return int_grid.encode(factor, params, Stats(metric))

    rounded = decode(full.encode(leaf))
    assert float((rounded - weight).norm() / weight.norm()) < 0.02


def test_a_kind_without_an_example_is_unknown_again() -> None:
    assert "kronecker" not in nstf.kernels.formats.kinds()
