"""Kills, power loss and errors at every call that a conversion makes into the operating system.

A kill leaves the files as they were at that call, so the log of one conversion holds every state that any kill can leave,
and every state that fsync allows after a power loss. Errors need a run each.
"""

import errno
import fnmatch
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import faults

OLD = b"the file that was there before"
# Temporary files, which the next start removes: those of the work directory, and that of the output.
LEFT_OVERS = (".*.data.*", ".*.part.*", ".nstf-????????-????????????????.tmp")
QUICK: dict[str, Any] = {
    "search": False, "prefix": False, "attention_plan": False, "formats": ["int_grid"], "samples": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """One undisturbed conversion: its folder, its file, its log, and all contents that each name ever had."""

    folder: Path
    options: dict[str, Any]
    output: bytes
    events: list[faults.Event]
    contents: dict[str, set[bytes]]

    def name(self, path: str) -> str:
        return str(Path(path).relative_to(self.folder))


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[faults.Runner]:
    root = tmp_path_factory.mktemp("faults")
    shim = faults.build(root)
    if shim is None:
        pytest.skip("needs gcc and Linux")
    place = Path(__file__).parents[1] / "nstf_convert" / "pipeline" / "conftest.py"
    spec = importlib.util.spec_from_file_location("pipeline_conftest", place)
    assert spec is not None and spec.loader is not None
    samples = importlib.util.module_from_spec(spec)
    sys.modules["pipeline_conftest"] = samples
    spec.loader.exec_module(samples)
    samples.make_llama(root / "model")
    rng = random.Random(0)
    (root / "text.txt").write_text(" ".join(rng.choice(samples.WORDS) for _ in range(3000)))
    with faults.runner(shim, root / "model", root / "text.txt") as made:
        yield made


def record(converter: faults.Runner, folder: Path, options: dict[str, Any]) -> Recorded:
    folder.mkdir()
    (folder / "out.nstf").write_bytes(OLD)
    log = folder.with_name(f"{folder.name}.log")
    answer = converter.ask(folder=str(folder), log=str(log), options=options)
    assert answer["error"] is None, answer
    events = faults.read_log(log)
    disk, contents = start(folder), {"out.nstf": {OLD}}
    for event in events:
        disk.apply(event)
        for path in {event.path, event.other} & set(disk.names):
            if event.op in ("rename", "create", "truncate"):
                contents.setdefault(str(Path(path).relative_to(folder)), set()).add(
                    bytes(disk.names[path].seen)
                )
    # The model of the disk is right: it ends with the very files that are there.
    assert disk.running() == {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return Recorded(folder, options, (folder / "out.nstf").read_bytes(), events, contents)


def start(folder: Path) -> faults.Disk:
    """The disk before the conversion: an older file under the output's name."""
    return faults.Disk({str(folder / "out.nstf"): faults.File(bytearray(OLD), OLD, False)})


@pytest.fixture(scope="module")
def quick(converter: faults.Runner, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(converter, tmp_path_factory.mktemp("quick") / "run", QUICK)


@pytest.fixture(scope="module")
def whole(converter: faults.Runner, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A default conversion: search, front to back, attention."""
    return record(converter, tmp_path_factory.mktemp("whole") / "run", {})


def temporary(name: str) -> bool:
    return any(fnmatch.fnmatch(Path(name).name, pattern) for pattern in LEFT_OVERS)


def check_state(recorded: Recorded, state: dict[str, bytes], where: str) -> frozenset[str]:
    """Every file under its name is one that was whole at some time; gives back the names."""
    names = set()
    for path, content in state.items():
        name = recorded.name(path)
        if temporary(name):
            continue
        assert content in recorded.contents[name], f"{where}: {name} is neither old nor new"
        names.add(name)
    assert state[str(recorded.folder / "out.nstf")] in (OLD, recorded.output), where
    return frozenset(names)


def states(recorded: Recorded) -> dict[frozenset[str], dict[str, bytes]]:
    """What a kill at any call can leave, by the names of the files that are complete, each with its left-overs."""
    disk, found = start(recorded.folder), {}
    for number, event in enumerate(recorded.events):
        disk.apply(event)
        state = disk.running()
        found[check_state(recorded, state, f"killed after call {number}, {event.op}")] = state
    return found


def resume(converter: faults.Runner, folder: Path, recorded: Recorded, where: str) -> None:
    answer = converter.ask(folder=str(folder), options=recorded.options)
    assert answer["error"] is None, (where, answer)
    assert (folder / "out.nstf").read_bytes() == recorded.output, where
    left = [str(p) for p in folder.rglob("*") if temporary(p.name)]
    assert left == [], where


def resume_from(
    converter: faults.Runner, recorded: Recorded, folder: Path, chosen: list[dict[str, bytes]]
) -> None:
    for number, state in enumerate(chosen):
        faults.place(state, recorded.folder, folder)
        resume(converter, folder, recorded, f"state {number} of {len(chosen)}")


def test_a_kill_at_any_call_leaves_whole_files_and_a_resume_gives_the_same_bytes(
    converter: faults.Runner, quick: Recorded, tmp_path: Path
) -> None:
    found = list(states(quick).values())
    assert len(quick.events) > 100 and len(found) > 10
    resume_from(converter, quick, tmp_path / "again", found[len(found) // 2 :: len(found)])
    # A real one, at the very rename that gives the file its name: before it is the old file, after it the new one.
    last = max(i for i, e in enumerate(quick.events, 1) if e.op == "rename")
    for mode, content in ((faults.KILL_BEFORE, OLD), (faults.KILL_AFTER, quick.output)):
        folder = tmp_path / f"killed{mode}"
        faults.place(start(quick.folder).running(), quick.folder, folder)
        answer = converter.ask(folder=str(folder), at=last, mode=mode, options=quick.options)
        assert answer["signal"] == signal.SIGKILL
        assert (folder / "out.nstf").read_bytes() == content


@pytest.mark.fuzz
def test_a_resume_from_every_state_that_a_kill_can_leave_gives_the_same_bytes(
    converter: faults.Runner, whole: Recorded, tmp_path: Path
) -> None:
    found = list(states(whole).values())
    print(f"{len(whole.events)} calls, {len(found)} states")
    resume_from(converter, whole, tmp_path / "again", found)


def power_loss(recorded: Recorded, tries: int, seed: int) -> int:
    """Checks `tries` states at every call; gives back how many there were."""
    disk, choice, number = start(recorded.folder), random.Random(seed), 0
    for at, event in enumerate(recorded.events):
        disk.apply(event)
        for _ in range(tries):
            check_state(recorded, disk.after_power_loss(choice), f"power lost after call {at}, {event.op}")
            number += 1
    return number


def test_a_power_loss_at_any_call_leaves_the_old_file_or_the_new_one(quick: Recorded) -> None:
    assert power_loss(quick, 4, 1) == 4 * len(quick.events)
    # The last fsync of the folder has happened: from then on it is the new one.
    disk = start(quick.folder)
    for event in quick.events:
        disk.apply(event)
    assert all(
        disk.after_power_loss(random.Random(i))[str(quick.folder / "out.nstf")] == quick.output
        for i in range(20)
    )


@pytest.mark.fuzz
def test_a_power_loss_in_any_order_that_fsync_allows_leaves_the_old_file_or_the_new_one(
    whole: Recorded,
) -> None:
    print(f"{power_loss(whole, 40, 2)} states")


def test_the_model_of_the_disk_finds_what_is_not_synced() -> None:
    """A file that gets its name without fsync can be empty under it: the check would see that."""
    disk = start(Path("/x"))
    for event in (
        faults.Event("create", "/x/a"),
        faults.Event("write", "/x/a", data=b"new"),
        faults.Event("rename", "/x/a", "/x/out.nstf"),
    ):
        disk.apply(event)
    found = {disk.after_power_loss(random.Random(i)).get("/x/out.nstf") for i in range(200)}
    assert {OLD, b"new", b"", bytes(3)} <= found


# What fails, how, and the calls it is tried at.
KINDS = {
    "disk full": (faults.FAIL, errno.ENOSPC, ("write", "create", "truncate", "mkdir", "rename", "fsync")),
    "input/output error": (
        faults.FAIL,
        errno.EIO,
        ("write", "create", "truncate", "mkdir", "rename", "fsync", "unlink"),
    ),
    "interrupted": (faults.INTERRUPT, 0, ("write", "read", "open", "fsync")),
    "short": (faults.SHORT, 0, ("write", "read")),
    "input/output error in reading": (faults.FAIL, errno.EIO, ("read", "open")),
}


def fail_at(converter: faults.Runner, recorded: Recorded, folder: Path, kind: str, at: int) -> str:
    """One conversion with one error, and the one that goes on; what the first said."""
    mode, number, _ = KINDS[kind]
    where = f"{kind} at call {at}, {recorded.events[at - 1].op} of {recorded.events[at - 1].path}"
    faults.place(start(recorded.folder).running(), recorded.folder, folder)
    answer = converter.ask(folder=str(folder), at=at, mode=mode, errno=number, options=recorded.options)
    assert answer.get("signal") == 0, where
    if answer["error"] is None:  # a call that may fail, or that was made again
        assert (folder / "out.nstf").read_bytes() == recorded.output, where
    else:
        assert not answer["error"].startswith("foreign"), (where, answer)
        assert answer["message"].isprintable() and str(folder) in answer["message"], (where, answer)
        assert (folder / "out.nstf").read_bytes() in (OLD, recorded.output), where
    resume(converter, folder, recorded, where)
    return str(answer["error"])


def calls(recorded: Recorded, kind: str) -> list[int]:
    return [i for i, e in enumerate(recorded.events, 1) if e.op in KINDS[kind][2]]


def test_an_error_at_a_call_is_one_line_with_the_path_and_the_work_goes_on(
    converter: faults.Runner, quick: Recorded, tmp_path: Path
) -> None:
    rng = random.Random(7)
    for kind in ("disk full", "input/output error", "interrupted"):
        said = fail_at(
            converter, quick, tmp_path / kind.replace("/", " "), kind, rng.choice(calls(quick, kind))
        )
        assert (said == "None") == (kind == "interrupted")


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_at_every_call_is_one_line_with_the_path_and_the_work_goes_on(
    converter: faults.Runner, quick: Recorded, tmp_path: Path, kind: str
) -> None:
    """NSTF_FUZZ_STRIDE: every so many calls only."""
    chosen = calls(quick, kind)[:: int(os.environ.get("NSTF_FUZZ_STRIDE", "1"))]
    wrong = []
    for at in chosen:
        try:
            fail_at(converter, quick, tmp_path / f"run{at}", kind, at)
        except AssertionError as error:
            wrong.append(str(error)[:600])
    print(f"{kind}: {len(chosen)} calls, {len(wrong)} wrong")
    assert wrong == []
