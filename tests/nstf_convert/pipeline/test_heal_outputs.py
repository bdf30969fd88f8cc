"""Healing of a model of images: its outputs come nearer to the original's, on others too, in the same bytes."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nstf.kernels.formats import array_specs, check
from nstf.kernels.formats.tuning import prepare, tunable, units, with_units
from nstf.quantizers import int_grid
from nstf_convert.pipeline import convert
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.calibrate.batches import fit_batches
from nstf_convert.pipeline.calibrate.one_input import one_input
from nstf_convert.pipeline.heal import outputs
from nstf_convert.pipeline.heal import run as healing
from nstf_convert.pipeline.heal.heal import heal
from nstf_convert.pipeline.heal.outputs import RATES, OutputRun, alike, saved_bytes
from nstf_convert.pipeline.machine import Machine
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_factors_and_scales_learn_from_the_original(folder: Path, options, device: str) -> None:
    low_rank = Recipe("svd", {"rank": 4}, {"factor": Recipe("int_grid", {"bits": 6, "group": 0})})
    changes = {
        "model": str(folder / "model"),
        "datasets": (str(folder / "inputs.safetensors"),),
        "samples": 64,
    }
    with Session(options(work_dir=folder / "work", device=device, **changes), Stages()) as session:
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
        # Other draws on a GPU.
        assert healed.after.score < (0.9 if device == "cpu" else 1.0) * healed.before.score
        if device == "cpu":
            assert after < 0.95 * before
        assert healed.facts["inputs"] == 24 * 24 and healed.facts["device"] == device
        codes = 0
        for name, tensor in healed.encoded.items():
            was = load(session.units[name], mix.get(name))
            assert tensor.tree == was.tree and "running" not in name
            check(tensor)
            for path in array_specs(tensor.tree, tensor.shape):
                codes += path.endswith("codes") and not torch.equal(tensor.arrays[path], was.arrays[path])
        assert codes > 4


def test_an_interrupted_run_goes_on_to_the_same_bytes(folder: Path, options, monkeypatch) -> None:
    changes = {
        "model": str(folder / "model"),
        "datasets": (str(folder / "inputs.safetensors"),),
        "samples": 64,
    }
    quick = replace(RATES, scale_rate=5e-3, evaluations=2, windows=24)

    def curve(work: str) -> list[dict]:
        with Session(options(work_dir=folder / work, **changes), Stages()) as session:
            mix = {
                n: Recipe("int_grid", {"bits": 3, "group": 0})
                for n, u in session.units.items()
                if u.kept is None
            }
            return heal(session, mix, 1.0, steps=6, settings=quick).facts["curve"]

    whole = curve("whole")
    monkeypatch.setattr(healing, "CHECKPOINT_SECONDS", 0.0)
    real, steps = OutputRun._one_step, []

    def failing(self, batch, ahead=(), take=True):
        if len(steps) == 3:
            raise KeyboardInterrupt
        steps.append(1)
        return real(self, batch, ahead, take)

    monkeypatch.setattr(OutputRun, "_one_step", failing)
    with pytest.raises(KeyboardInterrupt):
        curve("cut")
    monkeypatch.setattr(OutputRun, "_one_step", lambda *a: steps.append(1) or real(*a))
    assert curve("cut") == whole and len(steps) == 6


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


def test_inputs_of_several_shapes_are_all_learnt_from() -> None:
    batch = [
        {"pixel_values": torch.zeros(1, 3, 8, 8)},
        {"pixel_values": torch.zeros(1, 3, 8, 9)},
        {"pixel_values": torch.ones(1, 3, 8, 8)},
        {"pixel_values": torch.ones(1, 3, 8, 8), "mask": torch.ones(1, 8)},
    ]
    groups = alike(batch)
    assert [len(g) for g in groups] == [2, 1, 1] and groups[0][1] is batch[2]


def test_a_step_in_parts_has_the_gradients_of_the_whole(folder: Path, options, monkeypatch, caplog) -> None:
    changes = {
        "model": str(folder / "model"),
        "datasets": (str(folder / "inputs.safetensors"),),
        "samples": 64,
    }
    with Session(options(work_dir=folder / "work", **changes), Stages()) as session:
        mix = {
            n: Recipe("int_grid", {"bits": 3, "group": 0}) for n, u in session.units.items() if u.kept is None
        }
        run = OutputRun(
            session, mix, mixes.encoder_loader(session), 1.0, 4, None, mixes.measure(session, mix)
        )  # fmt: skip
        batch = [*run.fit[:5], {n: v[..., :12] for n, v in run.fit[5].items()}]
        seen: list[int] = []
        forward = run.student.outputs
        run.student.outputs = lambda **given: seen.append(len(given["pixel_values"])) or forward(**given)
        assert one_input(session.reference(), run.fit[0]).kept_bytes == pytest.approx(
            run._bytes_of(run.fit[0]), rel=0.3
        )
        found = []
        for room in (1 << 30, 2 * run._bytes_of(run.fit[0])):
            monkeypatch.setattr(outputs, "ACTIVATION_BYTES", room)
            seen.clear()
            loss = run._one_step(batch, take=False)
            found.append((loss, [p.grad.clone() for p in run.values.parameters()], list(seen)))
        # With less memory than usual the order of sums is another one: that is said, once.
        monkeypatch.setattr(outputs, "ACTIVATION_BYTES", 1 << 30)
        each = run._bytes_of(run.fit[0])
        with caplog.at_level(logging.WARNING, "nstf"), monkeypatch.context() as patch:
            patch.setattr(Machine, "activation_bytes", property(lambda self: 2 * each))
            for _ in range(2):
                run._one_step(batch, take=False)
        assert caplog.text.count("2 inputs at a time fit") == 1 and "the file may differ" in caplog.text
        # Where one input alone takes more than half of the room, two are not run to find out.
        monkeypatch.setattr(outputs, "ACTIVATION_BYTES", run._bytes_of(run.fit[0]) // 4)
        run._kept.clear()
        seen.clear()
        assert run._bytes_of(run.fit[0]) > outputs.ACTIVATION_BYTES / 2 and seen == [1]
        (whole, gradients, one), (parts, others, several) = found
        assert one == [5, 1] and several == [2, 2, 1, 1]
        assert parts == pytest.approx(whole, rel=1e-4)
        for a, b in zip(gradients, others, strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()) + 1e-9)


@pytest.mark.parametrize("given", [True, False])
def test_time_and_memory_of_healing_are_predicted(folder: Path, options, given: bool) -> None:
    datasets = (str(folder / "inputs.safetensors"),) if given else ()
    changes = {"model": str(folder / "model"), "datasets": datasets, "samples": 8, "heal_steps": 3}
    found = []
    for budget in (0.3, 0.4):
        with Session(options(("ratio", budget), work_dir=folder / "work", **changes), Stages()) as session:
            assert session.prediction is not None
            found.append(session.prediction)
            forward = one_input(session.reference(), fit_batches(session.calibration)[0])
    first, again = found
    assert first.seconds["heal"] > 3 * 32 * forward.seconds / 2 and first.host_bytes > 100 << 20
    assert first.seconds["calibration"] > 0 == again.seconds["calibration"] and again.seconds["heal"] > 0
    # 112 x 112 in the noise of a model whose config names no size, 16 x 16 here.
    assert forward.places == (64 if given else 112**2)


def test_a_report_of_another_model_has_what_was_predicted(folder: Path, options) -> None:
    changes = {
        "model": str(folder / "model"),
        "datasets": (str(folder / "inputs.safetensors"),),
        "samples": 16,
    }
    report = convert(options(("ratio", 0.5), heal_steps=3, **changes)).report["resources"]
    assert report["predicted_seconds"] > 0 and report["predicted_host_bytes"] > 100 << 20


def test_what_autograd_keeps_is_counted_once_a_storage() -> None:
    x, w = torch.ones(10, 100), torch.ones(100, requires_grad=True)
    assert saved_bytes(lambda: (x * w).sum()) == 4000
    assert saved_bytes(lambda: (x * w + x.flip(0) * w).sum()) == 8000


@pytest.fixture
def clap(tmp_path: Path) -> Path:
    """A text encoder whose types of tokens are looked up by a buffer of integers, and inputs for it."""
    from transformers import ClapTextConfig, ClapTextModel

    torch.manual_seed(0)
    config = ClapTextConfig(
        vocab_size=1 << 9, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, type_vocab_size=2, projection_dim=8,
    )  # fmt: skip
    model = ClapTextModel(config).eval()
    model.embeddings.token_type_embeddings.weight.data.normal_()
    model.embeddings.token_type_ids.fill_(1)
    model.save_pretrained(tmp_path / "model")
    save_file({"input_ids": torch.randint(3, 1 << 9, (24, 8))}, tmp_path / "inputs.safetensors")
    return tmp_path


def test_integers_of_a_model_are_read_and_stay(clap: Path, options) -> None:
    """Healing must neither round nor tune them."""
    changes = {
        "model": str(clap / "model"),
        "datasets": (str(clap / "inputs.safetensors"),),
        "samples": 16,
    }
    with Session(options(work_dir=clap / "work", **changes), Stages()) as session:
        mix = {
            n: Recipe("int_grid", {"bits": 3, "group": 0}) for n, u in session.units.items() if u.kept is None
        }
        still = replace(RATES, scale_rate=1e-9, row_rate=1e-9, value_rate=1e-9, code_rate=1e-9)
        healed = heal(session, mix, 1.0, steps=1, settings=still)
        assert healed.facts["inputs"] == 32
        assert healed.facts["curve"][0]["held_out"] == pytest.approx(healed.before.score, rel=1e-2)
        assert "embeddings.token_type_ids" not in healed.encoded


def test_a_buffer_that_a_checkpoint_lacks_is_named(clap: Path, options, caplog) -> None:
    path = clap / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["embeddings.token_type_ids"]
    save_file(tensors, path, metadata={"format": "pt"})
    changes = {"model": str(clap / "model"), "datasets": (str(clap / "inputs.safetensors"),), "samples": 16}
    with Session(options(work_dir=clap / "work", **changes), Stages()):
        assert "lacks 1 buffer, the code's own are used: embeddings.token_type_ids" in caplog.text
