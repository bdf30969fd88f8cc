"""A calibration that two processes share: the same bytes as by one, whoever does what and whoever dies. Both devices are the
CPU here."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nstf_convert.pipeline import session as sessions
from nstf_convert.pipeline.calibrate import gradients, hessians, make
from nstf_convert.pipeline.calibrate.share import Part, Pieces
from nstf_convert.pipeline.helpers import Helpers
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.workdir import WorkDir

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
    share, use = gradients._Backward.share, hessians._Pass._use

    def counted_share(self, index, batch):
        done.append("batch")
        return share(self, index, batch)

    def counted_use(self, found):
        done.extend(found)
        return use(self, found)

    monkeypatch.setattr(gradients._Backward, "share", counted_share)
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


@pytest.mark.parametrize("step", ["gradients", "hessians"])
def test_a_helper_that_dies_in_a_calibration_costs_a_warning(
    step, small, in_small_batches, two_devices, counted, monkeypatch, tmp_path, caplog
) -> None:
    start = Helpers.start_all

    def dies(self, part: Part) -> None:
        start(self, part)
        if part.step == step:
            process = self._processes[0][0]
            process.kill()
            process.join()

    taken = Pieces.take

    def take(self, name):
        # What the helper took before it died is not there.
        return name != "1" and taken(self, name)

    monkeypatch.setattr(Helpers, "start_all", dies)
    monkeypatch.setattr(Pieces, "take", take)
    with caplog.at_level(logging.WARNING, "nstf"):
        two = made(small, tmp_path / "two")
    assert caplog.text.count("another GPU's process failed (it ended") == 1
    assert counted.count("batch") >= (BATCHES if step == "gradients" else 0)
    assert any("layers.1" in name for name in counted)
    monkeypatch.undo()
    monkeypatch.setattr(Session, "tokens_per_batch", property(lambda self: 64))
    monkeypatch.setattr(make, "HESSIAN_BYTES", 1000)
    assert two == made(small, tmp_path / "one")


def test_a_helper_that_finds_nothing_says_so(small, two_devices, monkeypatch, tmp_path, caplog) -> None:
    start = Helpers.start_all
    monkeypatch.setattr(Helpers, "start_all", lambda self, p: start(self, replace(p, identity="another")))
    monkeypatch.setattr(Pieces, "take", lambda self, name: False)
    with caplog.at_level(logging.WARNING, "nstf"):
        made(small, tmp_path)
    assert "the first process left nothing to begin with" in caplog.text


def test_a_piece_is_taken_once_and_not_when_an_earlier_run_has_left_it(tmp_path) -> None:
    waited = []
    with WorkDir(tmp_path / "work", {}) as work:
        first, other = (Pieces(work, lambda: waited.append(1), "step", "identity", 64) for _ in range(2))
        assert first.take("0") and not other.take("0") and other.take("1")
        other.put("1", {"x": torch.ones(2)}, {"n": 1})
        assert first.find("0") is None
        found = first.find("1")
        assert found is not None and found[0]["x"].sum() == 2 and found[1] == {"n": 1}
        assert Pieces(work, lambda: None, "step", "identity", 128).take("1")
    with WorkDir(tmp_path / "work", {}) as work:
        again = Pieces(work, lambda: None, "step", "identity", 64)
        assert again.take("0") and not again.take("1")


def test_labels_depend_on_the_place_of_a_batch_and_not_on_what_ran_before(small, in_small_batches) -> None:
    from nstf_convert.checkpoint import open_checkpoint
    from nstf_convert.pipeline.calibrate.text import Data
    from nstf_convert.streamed import StreamedModel

    model = StreamedModel.from_checkpoint(open_checkpoint(str(small.folder)))
    ids = torch.randint(2, 60, (1, 32), generator=torch.Generator().manual_seed(0))
    data = Data(True, ({"input_ids": ids},) * 2, (), {})
    with gradients._Backward(model, data, 5) as backward:
        first, second = (backward.share(i, data.fit[i]) for i in (0, 1))
    with gradients._Backward(model, data, 5) as backward:
        again = backward.share(1, data.fit[1])
    name = "sensitivity:model.layers.0.mlp.down_proj.weight"
    assert torch.equal(second.sums[name], again.sums[name])
    assert not torch.equal(first.sums[name], second.sums[name])
