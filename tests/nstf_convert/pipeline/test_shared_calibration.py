"""A calibration that two processes share: the same bytes as by one, whoever does what and whoever dies. Both devices are the
CPU here."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nstf.errors import NstfError
from nstf_convert.pipeline import session as sessions
from nstf_convert.pipeline.calibrate import gradients, hessians, make
from nstf_convert.pipeline.calibrate.share import Pieces, SharedStep
from nstf_convert.pipeline.helpers import Helpers
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.encoder import Encoder
from nstf_convert.pipeline.propose.methods import method_families
from nstf_convert.pipeline.propose.table import build_table
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.workdir import NAMES, WorkDir

from .conftest import make_options

CPU = torch.device("cpu")
BATCHES = 3


@pytest.fixture
def in_small_batches(monkeypatch) -> None:
    """Several batches of two windows, and Hessians that are used and not stored."""
    monkeypatch.setattr(Session, "tokens_per_batch", property(lambda self: 64))
    monkeypatch.setattr(make, "HESSIAN_BYTES", 1000)


@pytest.fixture
def two_devices(monkeypatch) -> None:
    found = sessions.machine
    monkeypatch.setattr(sessions, "machine", lambda *wanted: replace(found(*wanted), devices=(CPU, CPU)))


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """What this process does itself: `batch` for each one of the backward pass, else the keys of Hessians it used."""
    done: list[str] = []
    sums, use = gradients._Backward.sums, hessians._Pass._use

    def counted_sums(self, index, batch):
        done.append("batch")
        return sums(self, index, batch)

    def counted_use(self, found):
        done.extend(found)
        return use(self, found)

    monkeypatch.setattr(gradients._Backward, "sums", counted_sums)
    monkeypatch.setattr(hessians._Pass, "_use", counted_use)
    return done


def made(small, folder: Path) -> tuple[bytes, dict[str, bytes]]:
    """(the calibration file, the proposals by their names in the work directory) of a new calibration."""
    with Session(
        make_options(small, output=folder / "out.nstf", work_dir=folder / "work"), Stages()
    ) as session:
        assert session.calibration is not None
        content = session.calibration.path.read_bytes()
    store = (folder / "work" / "store").rglob("*.safetensors")
    return content, {f.name: f.read_bytes() for f in store if b'"losses"' in f.read_bytes()}


def test_two_processes_share_a_calibration_and_leave_the_same_bytes(
    small, in_small_batches, counted, monkeypatch, tmp_path, caplog
) -> None:
    alone = made(small, tmp_path / "one")
    by_one, counted[:] = list(counted), []
    assert by_one.count("batch") == BATCHES and any("layers.0" in name for name in by_one)
    found = sessions.machine
    monkeypatch.setattr(sessions, "machine", lambda *wanted: replace(found(*wanted), devices=(CPU, CPU)))
    # The first process takes nothing: as if the other one had been faster everywhere.
    monkeypatch.setattr(Pieces, "take", lambda self, name: False)
    with caplog.at_level(logging.WARNING, "nstf"):
        assert made(small, tmp_path / "two") == alone
    # The head's table is the embedding's too, and its Hessian is stored: that is the first process's.
    assert counted == ["head"]
    assert "failed" not in caplog.text


@pytest.mark.parametrize("step", [pytest.param("gradients", marks=pytest.mark.slow), "hessians"])
def test_a_helper_that_dies_in_a_calibration_costs_a_warning(
    step, small, in_small_batches, two_devices, counted, monkeypatch, tmp_path, caplog
) -> None:
    start = Helpers.start_all

    def dies(self, part: SharedStep) -> None:
        start(self, part)
        if part.step == step:
            process = self._processes[0][0]
            process.kill()
            process.wait()

    taken = Pieces.take

    def take(self, name):
        # What the helper took before it died is not there.
        return name != "1" and taken(self, name)

    monkeypatch.setattr(Helpers, "start_all", dies)
    monkeypatch.setattr(Pieces, "take", take)
    with caplog.at_level(logging.WARNING, "nstf"):
        two = made(small, tmp_path / "two")
    assert caplog.text.count("another GPU's process failed (it ended") == 1
    if step == "gradients":
        assert counted.count("batch") == BATCHES
    else:  # the other process has done the batch that this one may not take, and not the layer
        assert counted.count("batch") < BATCHES
    assert any("layers.1" in name for name in counted)
    monkeypatch.undo()
    monkeypatch.setattr(Session, "tokens_per_batch", property(lambda self: 64))
    monkeypatch.setattr(make, "HESSIAN_BYTES", 1000)
    assert two == made(small, tmp_path / "one")


def test_a_part_of_which_nothing_is_there_is_refused(options, tmp_path) -> None:
    with Session(options(work_dir=tmp_path / "work"), Stages()) as session:
        with pytest.raises(NstfError, match="the first process left nothing to begin with"):
            make.help_with(session, SharedStep("hessians", "another", 64))


def test_candidates_are_shared_where_all_hessians_are_kept(
    small, two_devices, monkeypatch, tmp_path, caplog
) -> None:
    taken, estimated = Pieces.take, []
    learnt = Encoder._learnt

    def take(self, name):
        # Of this process one Hessian, and the backward pass; of the other one the rest.
        return taken(self, name) if name in ("0", "model.layers.0.self_attn.q_proj") else False

    def counted(self, unit):
        estimated.append(unit.name)
        return learnt(self, unit)

    monkeypatch.setattr(Pieces, "take", take)
    monkeypatch.setattr(Encoder, "_learnt", counted)
    allowed = method_families(("int_grid", "grid16"))
    settings = {"formats": ("int_grid", "grid16"), "output": tmp_path / "out.nstf"}
    with Session(make_options(small, work_dir=tmp_path / "work", **settings), Stages()) as session:
        table = build_table(session, allowed, lambda unit: None)
    own = [n.removeprefix("model.layers.0.self_attn.") for n in estimated if n in table.candidates]
    assert sorted(own) == ["k_proj.weight", "q_proj.weight", "v_proj.weight"]
    assert len(table.candidates) > 10 and "failed" not in caplog.text


def test_a_piece_is_taken_once_and_not_when_an_earlier_run_has_left_it(tmp_path) -> None:
    with WorkDir(tmp_path / "work", {"tool": "1", "checkpoint": "2"}) as work:
        part = SharedStep("step", "identity", 64)
        first, other = (Pieces(work, part, ["dense"]) for _ in range(2))
        assert first.take("0") and not other.take("0") and other.left("01") and other.take("1")
        assert not first.left("01")
        other.put("1", {"x": torch.ones(2)}, {"n": 1})
        assert first.find("0") is None
        found = first.find("1")
        assert found is not None and found[0]["x"].sum() == 2 and found[1] == {"n": 1}
        assert Pieces(work, replace(part, tokens_per_batch=128), ["dense"]).take("1")
        assert Pieces(work, part, ["dense", "trellis"]).take("1")
    with WorkDir(tmp_path / "work", {"tool": "1", "checkpoint": "2"}) as work:
        again = Pieces(work, part, ["dense"])
        assert again.take("0") and not again.take("1")


def test_what_processes_left_for_each_other_goes_when_the_calibration_is_complete(
    small, in_small_batches, two_devices, tmp_path
) -> None:
    chosen = make_options(small, output=tmp_path / "out.nstf", work_dir=tmp_path / "work")
    left = [tmp_path / "work" / name for name in ("pieces", "claims")]
    with Session(chosen, Stages()):
        assert all(list(folder.iterdir()) for folder in left)
    assert not any(folder.exists() for folder in left)
    # A run that was killed before it could remove them: the next one does.
    job = json.loads((tmp_path / "work" / "job.json").read_text())
    job.pop(NAMES, None)
    with WorkDir(tmp_path / "work", job) as work:
        Pieces(work, SharedStep("step", "identity", 64), []).put("0", {}, {})
        assert list(left[0].iterdir())
    with Session(chosen, Stages()):
        assert not left[0].exists()


def test_labels_depend_on_the_place_of_a_batch_and_not_on_what_ran_before(small, in_small_batches) -> None:
    from nstf_convert.checkpoint import open_checkpoint
    from nstf_convert.pipeline.calibrate.text import Data
    from nstf_convert.streamed import StreamedModel

    model = StreamedModel.from_checkpoint(open_checkpoint(str(small.folder)))
    ids = torch.randint(2, 60, (1, 32), generator=torch.Generator().manual_seed(0))
    data = Data(True, ({"input_ids": ids},) * 2, (), {})
    with gradients._Backward(model, data, 5) as backward:
        first, second = (backward.sums(i, data.fit[i]) for i in (0, 1))
    with gradients._Backward(model, data, 5) as backward:
        again = backward.sums(1, data.fit[1])
    name = "sensitivity:model.layers.0.mlp.down_proj.weight"
    assert torch.equal(second.sums[name], again.sums[name])
    assert not torch.equal(first.sums[name], second.sums[name])
