"""A work directory that holds another job: what differs is said in names, and --restart discards it."""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nstf.errors import CorruptError, NstfError, UsageError
from nstf_convert.pipeline.store.tensorfile import TensorFileWriter
from nstf_convert.pipeline.store.workdir import WorkDir

JOB = {"tool": "1", "checkpoint": "9f" * 32, "datasets": ["ab" * 32], "seed": 0}
NAMES = {"checkpoint": "./model", "datasets": ["a.txt"]}


def test_differences_are_said_in_names_of_files(tmp_path):
    with WorkDir(tmp_path / "w", JOB, names=NAMES):
        pass
    other = {**JOB, "datasets": ["cd" * 32, "ef" * 32], "seed": 7}
    with pytest.raises(
        UsageError, match=r"\(datasets: a.txt, now b.txt, c.txt; seed was 0, now 7\).*`restart`"
    ) as error:
        WorkDir(tmp_path / "w", other, names={**NAMES, "datasets": ["b.txt", "c.txt"]})
    assert "cdcd" not in str(error.value) and "abab" not in str(error.value)
    with pytest.raises(UsageError, match=r"\(checkpoint: ./model has changed\)"):
        WorkDir(tmp_path / "w", {**JOB, "checkpoint": "00" * 32}, names=NAMES)
    with pytest.raises(UsageError, match=r"\(datasets: a.txt, now none\)"):
        WorkDir(tmp_path / "w", {**JOB, "datasets": []}, names={**NAMES, "datasets": []})
    # What only one of two jobs reads has not changed.
    with pytest.raises(UsageError, match=r"\(own_texts: none, now what ships\)"):
        WorkDir(tmp_path / "w", {**JOB, "own_texts": "ab"}, names={**NAMES, "own_texts": "what ships"})
    # The same job under another name of the same file goes on.
    with WorkDir(tmp_path / "w", JOB, names={**NAMES, "checkpoint": "/elsewhere/model"}):
        pass


def test_restart_discards_results_and_nothing_else(tmp_path):
    folder = tmp_path / "w"
    with WorkDir(folder, JOB, names=NAMES):
        (folder / "store" / "ab").mkdir(parents=True)
        (folder / "store" / "ab" / f"{'ab' * 32}.safetensors").write_bytes(b"1")
        (folder / "calibration.safetensors").write_bytes(b"1")
        (folder / "notes.txt").write_text("mine")
    with WorkDir(folder, {**JOB, "seed": 7}, names=NAMES, restart=True):
        assert sorted(p.name for p in folder.iterdir()) == ["job.json", "lock", "notes.txt"]
    with pytest.raises(UsageError, match="seed was 7, now 0"):
        WorkDir(folder, JOB, names=NAMES)


def test_restart_leaves_a_checkpoint_that_lies_in_the_work_directory(tmp_path):
    with WorkDir(tmp_path, JOB, names=NAMES):
        pass
    (tmp_path / "model.safetensors").write_bytes(b"1")
    with WorkDir(tmp_path, {**JOB, "seed": 7}, names=NAMES, restart=True):
        assert (tmp_path / "model.safetensors").read_bytes() == b"1"


def test_restart_in_a_folder_of_someone_else_removes_nothing(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"1")
    with WorkDir(tmp_path, JOB, names=NAMES, restart=True):
        assert (tmp_path / "weights.safetensors").read_bytes() == b"1"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_a_job_that_is_none_is_named(tmp_path, content):
    (tmp_path / "job.json").write_bytes(content)
    with pytest.raises(
        CorruptError,
        match=r"job.json cannot be read \(.*\): where it is a conversion's, remove the work directory",
    ):
        WorkDir(tmp_path, JOB, names=NAMES)


def test_a_job_of_gigabytes_is_not_read(tmp_path, monkeypatch):
    """A sparse one took as much memory, and the message spoke of `--samples`."""
    with (tmp_path / "job.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptError, match="it is too large"):
        WorkDir(tmp_path, JOB, names=NAMES)


def test_a_fault_of_the_disk_is_not_the_users_mistake(tmp_path, monkeypatch):
    def fails(number):
        def mkdir(self, *_, **__):
            raise OSError(number, os.strerror(number), str(self))

        monkeypatch.setattr(Path, "mkdir", mkdir)

    for number, code in ((errno.EIO, 1), (errno.ENOSPC, 1), (errno.EACCES, 2), (errno.EROFS, 2)):
        fails(number)
        with pytest.raises(NstfError, match=str(tmp_path / "w")) as error:
            WorkDir(tmp_path / "w", JOB, names=NAMES)
        assert error.value.exit_code == code


def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WorkDir(tmp_path, JOB).close()

    def denied(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(NstfError, match=r"cannot be written \(Permission denied\)"):
        WorkDir(tmp_path, JOB)


def test_ctrl_c_while_a_temporary_file_is_removed_leaves_none(tmp_path: Path) -> None:
    """It came, at random moments, as a result's data was closed: the next run removed what it left."""
    folder = tmp_path / "w"
    with (
        pytest.raises(KeyboardInterrupt),
        WorkDir(folder, JOB),
        TensorFileWriter(folder / "store" / "ab" / f"{'ab' * 32}.safetensors") as writer,
    ):
        closed = writer._data.close

        def close() -> None:
            closed()
            raise KeyboardInterrupt

        held: Any = SimpleNamespace(close=close)
        writer._data = held
        assert list(folder.rglob(".abab*.data.*"))
        raise OSError("what ends the work")
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["job.json", "lock"]


def test_ctrl_c_as_a_temporary_file_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Path, mode: str) -> None:
        os.close(os.open(path, os.O_CREAT))
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(KeyboardInterrupt):
        TensorFileWriter(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_fault_that_also_keeps_the_temporary_file_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", fails)
    monkeypatch.setattr(Path, "unlink", fails)
    with pytest.raises(NstfError, match=r"x: cannot be written \(Input/output error\)"):
        TensorFileWriter(tmp_path / "x")


def test_one_file_that_cannot_be_removed_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WorkDir(tmp_path / "w", JOB)
    kinds = ("calibration.safetensors", "float32.safetensors", "job.json")
    names = [tmp_path / "w" / f".{n}.{end}.{os.getpid()}" for n in kinds for end in ("data", "part")]
    # In containers numbers of processes come again, and folders of the user may lie here.
    others = [tmp_path / "w" / f".notes.part.{os.getpid()}", tmp_path / "w" / "d" / names[0].name]
    others[1].parent.mkdir()
    for name in (*names, *others):
        name.write_bytes(b"")
    unlink = Path.unlink
    stuck = names[2]

    def removed(path: Path, missing_ok: bool = False) -> None:
        if path == stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", removed)
    work.close()
    assert [n for n in (*names, *others) if n.exists()] == [stuck, *others]


@pytest.mark.parametrize("name", ["lock", "job.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((UsageError, CorruptError), match=name.partition(".")[0]):
        WorkDir(tmp_path, JOB, names=NAMES)


def test_a_folder_with_the_name_of_a_half_written_file_goes(tmp_path: Path) -> None:
    (tmp_path / ".job.json.part.1").mkdir()
    WorkDir(tmp_path, JOB, names=NAMES).close()
    assert not (tmp_path / ".job.json.part.1").exists()


def test_a_file_in_the_place_of_a_folder_of_results_goes(tmp_path: Path) -> None:
    key = "ab" * 32
    with WorkDir(tmp_path, JOB, names=NAMES) as work:
        work.put(key, {"x": torch.ones(2)}, {})
        found = next(tmp_path.rglob(f"*{key[2:]}*"))
        folder = found.parent
        shutil.rmtree(folder)
        folder.symlink_to("nowhere")
        work.put(key, {"x": torch.ones(2)}, {})
        assert folder.is_dir() and not folder.is_symlink()


def test_a_folder_that_another_thread_makes_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for something in the place of a folder: its results were removed, or "Is a directory" ended the run."""
    first, second = "ab" * 32, "ab" * 31 + "cd"
    others, real = [second], Path.is_dir

    def late(path: Path) -> bool:
        found = real(path)
        if path.name == "ab" and not found and others:
            work.put(others.pop(), {"x": torch.ones(2)}, {})
        return found

    with WorkDir(tmp_path, JOB, names=NAMES) as work:
        monkeypatch.setattr(Path, "is_dir", late)
        work.put(first, {"x": torch.ones(2)}, {})
        monkeypatch.undo()
        assert work.find(first) is not None and work.find(second) is not None


@pytest.mark.parametrize("name", ["store", "pieces", "claims"])
@pytest.mark.parametrize("link", [True, False])
def test_a_file_in_the_place_of_all_results_is_named(name: str, link: bool, tmp_path: Path) -> None:
    # It may be anyone's: what was said before was "Not a directory", with exit code 1.
    if link:
        (tmp_path / name).symlink_to("nowhere")
    else:
        (tmp_path / name).write_text("notes")
    with pytest.raises(UsageError, match=rf"{name} is no folder, where results are kept: remove it"):
        WorkDir(tmp_path, JOB, names=NAMES)
    # Nothing by which the next run would take the folder for ours.
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_results_may_lie_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "store").symlink_to(tmp_path / "large disk")
    with WorkDir(tmp_path / "w", JOB, names=NAMES) as work:
        work.put("ab" * 32, {"x": torch.ones(2)}, {})
    assert (tmp_path / "large disk" / "ab").is_dir()


def test_a_folder_in_the_place_of_the_lock_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(UsageError, match="lock is a folder"):
        WorkDir(tmp_path, JOB, names=NAMES)


# Names that people use, some of them like ours: they went when a run began, ended or was begun anew.
OTHERS = (
    ".notes.part.1",
    ".my.data.old/deep",
    "sub/.b.data.c/deep",
    "claims/2026.txt",
    "pieces/mine",
    "store/ab/mine",
    "heal-the-world-today!.safetensors",
)


@pytest.mark.parametrize("restart", [True, False])
def test_what_is_not_ours_stays_in_a_folder_that_is_someones(tmp_path: Path, restart: bool) -> None:
    for name in OTHERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"mine")
    with WorkDir(tmp_path, JOB, names=NAMES) as work:
        work.put("ab" * 32, {"x": torch.ones(2)}, {})
        assert work.claim("ab" * 32)
        (tmp_path / f".calibration.safetensors.part.{2**22}").write_bytes(b"killed")
    with WorkDir(tmp_path, JOB, names=NAMES, restart=restart) as work:
        assert work.has("ab" * 32) is not restart and not work.claimed("ab" * 32)
        work.drop_pieces()
        work.useless = True
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert left == sorted(OTHERS)


def test_a_restart_discards_results_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "store").symlink_to(tmp_path / "large disk")
    with WorkDir(tmp_path / "w", JOB, names=NAMES) as work:
        work.put("ab" * 32, {"x": torch.ones(2)}, {})
    with WorkDir(tmp_path / "w", JOB, names=NAMES, restart=True) as work:
        assert not work.has("ab" * 32) and list((tmp_path / "large disk").iterdir()) == []


def test_a_useless_directory_goes_while_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the lock went first: a run that began then had its directory taken away below it."""
    seen, clear = [], WorkDir._clear

    def clear_and_look(work: WorkDir) -> None:
        clear(work)
        with pytest.raises(UsageError, match="in use"):
            WorkDir(tmp_path / "w", JOB)
        seen.append(work)

    with WorkDir(tmp_path / "w", JOB) as work:
        monkeypatch.setattr(WorkDir, "_clear", clear_and_look)
        work.useless = True
    assert seen == [work] and not (tmp_path / "w").exists()


def test_a_lock_of_a_directory_that_is_gone_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def late(file: Any, how: int) -> None:  # the other run ends between our opening of the file and the lock
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "w")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        WorkDir(tmp_path / "w", JOB),
        pytest.raises(UsageError, match="in use"),
    ):
        WorkDir(tmp_path / "w", JOB)


def test_a_job_that_the_disk_does_not_give_is_no_reason_to_remove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WorkDir(tmp_path, JOB).close()

    def fails(*_: Any, **__: Any) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_text", fails)
    with pytest.raises(NstfError, match=r"job.json cannot be read \(Input/output error\): check") as error:
        WorkDir(tmp_path, JOB)
    assert error.value.exit_code == 1


def test_a_file_system_without_locks_is_not_taken_for_another_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(NstfError, match=r"cannot be locked \(No locks available\)") as error:
        WorkDir(tmp_path, JOB)
    assert error.value.exit_code == 1


@pytest.mark.parametrize(
    "name", ["calibration.safetensors", "float32.safetensors", f"heal-{'a' * 16}.safetensors"]
)
@pytest.mark.parametrize("restart", [False, True])
def test_a_file_of_the_user_with_the_name_of_a_result_stays(name: str, restart: bool, tmp_path: Path) -> None:
    """It was taken for a damaged result, removed and written anew: a model of that name was gone."""
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(UsageError, match=f"{name} has the name of a result"):
        WorkDir(tmp_path, JOB, names=NAMES, restart=restart)
    assert (tmp_path / name).read_bytes() == b"mine" and not (tmp_path / "job.json").exists()


@pytest.mark.parametrize("restart", [False, True])
def test_a_job_of_the_user_is_no_reason_to_remove_anything(restart: bool, tmp_path: Path) -> None:
    """`--restart` took any job.json for one of ours, and what lay beside it for results."""
    (tmp_path / "job.json").write_text('{"slurm": "mine"}')
    (tmp_path / "calibration.safetensors").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"job.json is not of a conversion: move it"):
        WorkDir(tmp_path, JOB, names=NAMES, restart=restart)
    assert (tmp_path / "job.json").read_text() == '{"slurm": "mine"}'
    assert (tmp_path / "calibration.safetensors").read_bytes() == b"mine"


KEY = "ab" * 32


@pytest.mark.parametrize(
    "name", [f"claims/{KEY}", f"pieces/{KEY}", f"pieces/ab/{KEY}", f"store/ab/{KEY}.safetensors", "store/ab"]
)
@pytest.mark.parametrize("restart", [False, True])
def test_a_file_of_the_user_in_a_folder_as_of_results_stays(name: str, restart: bool, tmp_path: Path) -> None:
    """Claims went at every opening, pieces once the calibration was complete."""
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(UsageError, match=f"{name} has the name of a result"):
        WorkDir(tmp_path, JOB, names=NAMES, restart=restart)
    assert (tmp_path / name).read_bytes() == b"mine" and not (tmp_path / "job.json").exists()


def test_nothing_is_taken_for_the_users_after_results_were_discarded(tmp_path: Path) -> None:
    with WorkDir(tmp_path, JOB, names=NAMES) as work:
        for folder in ("store", "pieces"):
            work.put(KEY, {"x": torch.ones(2)}, {}, folder)
        work.claim(KEY)
        work.discard_new()
    with WorkDir(tmp_path, {**JOB, "seed": 7}, names=NAMES) as work:
        assert not work.has(KEY)


@pytest.mark.parametrize("restart", [False, True])
def test_a_lock_of_the_user_stays(restart: bool, tmp_path: Path) -> None:
    """It was opened whatever it held, and removed after success."""
    (tmp_path / "lock").write_text("my only copy")
    with pytest.raises(UsageError, match=r"lock holds something, so it is no lock of ours: move it"):
        WorkDir(tmp_path, JOB, names=NAMES, restart=restart)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("lock", "my only copy")]


def test_an_empty_lock_stays_where_no_job_is(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with WorkDir(tmp_path, JOB, names=NAMES) as work:
        work.useless = True
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def test_a_lock_beside_a_job_of_ours_goes_with_it(tmp_path: Path) -> None:
    with WorkDir(tmp_path / "w", JOB, names=NAMES):
        pass
    with WorkDir(tmp_path / "w", JOB, names=NAMES) as work:
        work.useless = True
    assert not (tmp_path / "w").exists()


def test_a_folder_that_is_refused_gets_no_lock(tmp_path: Path) -> None:
    """The next run would take it for the user's, and leave it there."""
    (tmp_path / "calibration.safetensors").write_bytes(b"mine")
    with pytest.raises(UsageError, match="has the name of a result"):
        WorkDir(tmp_path, JOB, names=NAMES)
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.safetensors"]
