"""Healing while encoding: later layers learn to make up for earlier ones, and the file keeps its trees and bytes."""

import pytest
import torch

from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline import progressive
from nstf_convert.pipeline.calibration import fit_batches
from nstf_convert.pipeline.heal_teacher import Targets, batch_of
from nstf_convert.pipeline.job import Job
from nstf_convert.pipeline.progressive import Settings, encode_progressively
from nstf_convert.pipeline.recipe import Recipe
from nstf_convert.pipeline.stages import Stages

INT3 = Recipe("int_grid", {"bits": 3, "group": 32})
QUICK = Settings(rate=1e-2, windows=4)


@pytest.fixture
def job(options, tmp_path):
    with Job(options(work_dir=tmp_path / "work"), Stages()) as opened:
        yield opened


def uniform(job, recipe=INT3):
    return {n: recipe for n, u in job.units.items() if u.kept is None}


def run(job, mix, steps=40, settings=QUICK):
    load = mixes.encoder_loader(job)
    before = mixes.measure(job, mix)
    return load, before, encode_progressively(job, mix, load, 1.0, before.score, steps, settings)


def test_windows_that_neither_fitted_nor_chose_diverge_less(job) -> None:
    mix = uniform(job)
    load, _, made = run(job, mix)
    before, after = (mixes.measure(job, mix, "report", given).score for given in (load, made.loader(load)))
    assert after < 0.9 * before
    assert made.facts["layers"] == 2 and made.facts["steps"] == 40


def test_trees_sizes_and_dtypes_stay(job) -> None:
    mix = uniform(job)
    load, _, made = run(job, mix, steps=4)
    assert any("norm" in name for name in made.encoded)
    assert {n for n in made.encoded if n in mix} == {n for n in mix if "layers" in n}
    for name, tensor in made.encoded.items():
        before = load(job.units[name], mix.get(name))
        assert (tensor.tree, tensor.shape) == (before.tree, before.shape)
        for key, array in before.arrays.items():
            assert (tensor.arrays[key].dtype, tensor.arrays[key].shape) == (array.dtype, array.shape)


def test_codes_change_where_the_weights_learnt(job) -> None:
    mix = uniform(job)
    load, _, made = run(job, mix)
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(made.encoded[name].arrays["codes"], load(job.units[name], INT3).arrays["codes"])


def test_the_same_number_of_steps_gives_the_same_bytes(options, tmp_path) -> None:
    found = []
    for name in ("a", "b"):
        with Job(options(work_dir=tmp_path / name), Stages()) as job:
            found.append(run(job, uniform(job), steps=4)[2].encoded)
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert all(torch.equal(a, found[1][name].arrays[k]) for k, a in tensor.arrays.items())


def test_an_interrupted_run_goes_on_at_its_last_layer_and_gives_the_same_bytes(
    job, options, tmp_path, monkeypatch
) -> None:
    mix = uniform(job)
    with Job(options(work_dir=tmp_path / "other"), Stages()) as other:
        whole = run(other, mix, steps=6)[2].encoded
    monkeypatch.setattr(progressive, "CHECKPOINT_SECONDS", 0.0)
    original, calls = progressive._Run._encode, []

    def failing(self, stage):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(stage)
        original(self, stage)

    monkeypatch.setattr(progressive._Run, "_encode", failing)
    with pytest.raises(KeyboardInterrupt):
        run(job, mix, steps=6)
    monkeypatch.setattr(progressive._Run, "_encode", original)
    encoded = []
    monkeypatch.setattr(
        progressive._Run, "_encode", lambda self, stage: (encoded.append(stage), original(self, stage))
    )
    _, _, made = run(job, mix, steps=6)
    assert len(encoded) == 1
    for name, tensor in whole.items():
        assert all(torch.equal(a, made.encoded[name].arrays[k]) for k, a in tensor.arrays.items())


def test_a_timed_run_goes_on_after_a_stop(job, monkeypatch) -> None:
    mix, load = uniform(job), mixes.encoder_loader(job)
    monkeypatch.setattr(progressive, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(progressive, "MIN_STEPS_PER_STAGE", 1)
    monkeypatch.setattr(progressive, "_by_layer", lambda groups, module: [[g] for g in groups])
    original, calls = progressive._Run._encode, []

    def failing(self, stage):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(stage)
        original(self, stage)

    monkeypatch.setattr(progressive._Run, "_encode", failing)
    with pytest.raises(KeyboardInterrupt):
        encode_progressively(job, mix, load, 0.05, 1.0, None, QUICK)
    monkeypatch.setattr(progressive._Run, "_encode", original)
    made = encode_progressively(job, mix, load, 0.05, 1.0, None, QUICK)
    assert made is not None and len(made.encoded) >= len([n for n in mix if "layers" in n])


def test_fewer_steps_than_layers_are_honoured(job) -> None:
    assert run(job, uniform(job), steps=0)[2].facts["steps"] == 0


def test_too_little_time_is_said_and_changes_nothing(job, monkeypatch) -> None:
    mix = uniform(job)
    load = mixes.encoder_loader(job)
    assert encode_progressively(job, mix, load, 1e-9, 1.0, None, QUICK) is None


def test_a_model_that_does_not_fit_is_left_alone(job, monkeypatch) -> None:
    monkeypatch.setattr(progressive, "CPU_BYTES", 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not progressive.affordable(job)


def test_targets_belong_to_the_window_and_not_to_its_place(job) -> None:
    from contextlib import nullcontext

    fit = [b["input_ids"] for b in fit_batches(job.calibration)]
    targets = Targets(job.reference(), torch.device("cpu"), nullcontext)
    before = targets.of(batch_of(fit, 0, 0, 2))
    other = [w.flip(1) for w in fit]
    after = targets.of(batch_of(other, 0, 0, 2))
    assert not torch.allclose(before, after)
    assert torch.equal(targets.of(batch_of(fit, 0, 0, 2)), before)
