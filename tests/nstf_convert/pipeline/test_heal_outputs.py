"""Healing of a model of images: its outputs come nearer to the original's, on others too, in the same bytes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nstf.kernels.formats import array_specs, check
from nstf.kernels.formats.tuning import prepare, tunable, units, with_units
from nstf.quantizers import int_grid
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.heal.heal import heal
from nstf_convert.pipeline.heal.outputs import RATES
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.session import Session


def inputs(count: int) -> torch.Tensor:
    coarse = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.interpolate(coarse, scale_factor=2, mode="bilinear")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A ResNet whose normalisations have seen such images, and 96 of them."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=5
    )
    model = ResNetForImageClassification(config).train()
    with torch.no_grad():
        for start in range(0, 96, 32):
            model(pixel_values=inputs(96)[start : start + 32])
    model.save_pretrained(tmp_path / "model")
    save_file({"pixel_values": inputs(96)}, tmp_path / "inputs.safetensors")
    return tmp_path


def test_factors_and_scales_learn_from_the_original(folder: Path, options) -> None:
    low_rank = Recipe("svd", {"rank": 4}, {"factor": Recipe("int_grid", {"bits": 6, "group": 0})})
    changes = {
        "model": str(folder / "model"),
        "datasets": (str(folder / "inputs.safetensors"),),
        "samples": 64,
    }
    with Session(options(work_dir=folder / "work", **changes), Stages()) as session:
        mix = {
            n: low_rank if u.shape[2:] == (3, 3) else Recipe("int_grid", {"bits": 4, "group": 0})
            for n, u in session.units.items()
            if u.kept is None
        }
        quick = replace(
            RATES, scale_rate=5e-3, row_rate=5e-3, value_rate=5e-3, code_rate=0.06, evaluations=1, windows=24
        )
        healed = heal(session, mix, 1.0, steps=24, settings=quick)
        load = mixes.encoder_loader(session)
        before, after = (
            mixes.measure(session, mix, "report", given).score for given in (load, healed.loader(load))
        )
        assert healed.after.score < 0.9 * healed.before.score and after < 0.95 * before
        assert healed.facts["inputs"] == 24 * 24
        codes = 0
        for name, tensor in healed.encoded.items():
            was = load(session.units[name], mix.get(name))
            assert tensor.tree == was.tree and "running" not in name
            check(tensor)
            for path in array_specs(tensor.tree, tensor.shape):
                codes += path.endswith("codes") and not torch.equal(tensor.arrays[path], was.arrays[path])
        assert codes > 4


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_as_values_are_decoded_and_stored(symmetric: bool) -> None:
    weight = torch.randn(6, 70)
    encoded = int_grid.encode(weight, int_grid.Params(bits=3, group=32, symmetric=symmetric))
    found, least, steps = units(encoded)["units"]
    assert steps == 7 and bool(((found >= least) & (found <= least + steps)).all())
    other = (found + torch.randint(-9, 9, found.shape)).clamp(least, least + steps)
    stored = with_units(encoded, {"units": other})
    assert torch.equal(units(stored)["units"][0], other)
    prepared, scale = prepare(encoded), tunable(encoded)
    assert torch.equal(prepared.decode({**scale, "units": other}), prepare(stored).decode(tunable(stored)))
