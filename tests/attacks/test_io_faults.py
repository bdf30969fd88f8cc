"""Kills, power loss and errors at every call that a command makes into the operating system.

A kill leaves the files as they were at that call, so the log of one conversion holds every state that any kill can leave,
and every state that fsync allows after a power loss. Errors need a run each.
"""

import errno
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import faults
from recorded import (
    COMMANDS,
    OLD,
    Recorded,
    check_done,
    check_state,
    files_of,
    make_inputs,
    place,
    prepare,
    record,
    resume,
    resume_from,
    state_of,
    states,
    temporary,
)

Record = Callable[[str], Recorded]
WRITING = [name for name, command in COMMANDS.items() if command.output and command.seen]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """In memory where there is such a folder: the disk is a model of ours, and a real one would only be waited for."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=root) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def runner(root: Path) -> Iterator[faults.Runner]:
    shim = faults.build(root)
    if shim is None:
        pytest.skip("needs gcc and Linux")
    make_inputs(root / "inputs")
    with faults.runner(shim) as made:
        yield made


@pytest.fixture(scope="module")
def recorded(runner: faults.Runner, root: Path) -> Record:
    """recorded(name): a command of COMMANDS, run once undisturbed."""
    made: dict[str, Recorded] = {}

    def of(name: str) -> Recorded:
        if name not in made:
            command, warm = COMMANDS[name], root / f"{name} warm"
            inputs = root / "inputs"
            if "{folder}/in.nstf" in command.words and not (inputs / "in.nstf").exists():
                whole = of("convert")
                (inputs / "in.nstf").write_bytes(whole.wanted()["out.nstf"])
            prepare(warm, inputs, command)
            answer = runner.ask(folder=str(warm), words=command.words, warm=True)
            assert answer["code"] == 0, answer
            made[name] = record(runner, root / name, inputs, command)
        return made[name]

    return of


def test_a_kill_at_any_call_leaves_whole_files_and_a_resume_gives_the_same_bytes(
    runner: faults.Runner, recorded: Record, tmp_path: Path
) -> None:
    whole = recorded("whole")
    found = list(states(whole).values())
    assert len(whole.events) > 100 and len(found) > 10
    assert any(name.startswith("work/heal-") for name in whole.after)
    resume_from(runner, whole, tmp_path / "again", found[len(found) // 4 :: len(found) // 2])
    # A real one, at the very rename that gives the file its name: before it is the old file, after it the new one.
    last = max(i for i, e in enumerate(whole.events, 1) if e.op == "rename")
    for mode, content in ((faults.KILL_BEFORE, OLD), (faults.KILL_AFTER, whole.wanted()["out.nstf"])):
        folder = tmp_path / f"killed{mode}"
        place(whole.before, folder)
        answer = runner.ask(folder=str(folder), at=last, mode=mode, words=whole.command.words)
        assert answer["signal"] == signal.SIGKILL
        assert (folder / "out.nstf").read_bytes() == content


@pytest.mark.fuzz
@pytest.mark.parametrize("name", WRITING)
def test_a_resume_from_every_state_that_a_kill_can_leave_gives_the_same_bytes(
    runner: faults.Runner, recorded: Record, tmp_path: Path, name: str
) -> None:
    found = recorded(name)
    count = resume_from(runner, found, tmp_path / "again", states(found).values())
    print(f"{name}: {len(found.events)} calls, resumed from all {count} states")


def kill_at_moments(
    runner: faults.Runner, whole: Recorded, folder: Path, count: int, rng: random.Random
) -> int:
    """Kills at `count` random moments of the processor's time; how many conversions they were kills of.

    A conversion goes on after each kill until it has come to its end, where nothing may differ from one without.
    """
    done = kills = 0
    place(whole.before, folder)
    while kills < count:
        moment = max(
            0.001, rng.random() ** 2 * 1.1 * whole.cpu_s
        )  # soon, mostly: each costs less than the one before
        answer = runner.ask(folder=str(folder), words=whole.command.words, moment_s=moment)
        where = f"moment {moment:.3f} after {kills} kills of {done + 1} conversions"
        whole.check_output(files_of(folder), where)
        if answer["signal"]:
            assert answer["signal"] == signal.SIGPROF, (where, answer)
            kills += 1
        else:
            check_done(answer, folder, whole, where)
            done += 1
            place(whole.before, folder)
    resume(runner, folder, whole, f"after {kills} kills")
    return done + 1


def test_kills_at_random_moments_end_in_the_same_bytes(
    runner: faults.Runner, recorded: Record, tmp_path: Path
) -> None:
    assert kill_at_moments(runner, recorded("whole"), tmp_path / "run", 2, random.Random(1)) > 0


def interrupt_at_moments(
    runner: faults.Runner, whole: Recorded, folder: Path, count: int, rng: random.Random
) -> int:
    """Ctrl-C at `count` random moments, as with kills; how many conversions they were in."""
    done = interrupts = 0
    place(whole.before, folder)
    while interrupts < count:
        moment = 0.02 + rng.random() ** 2 * 1.1 * whole.cpu_s
        answer = runner.ask(folder=str(folder), words=whole.command.words, moment_s=moment, interrupt=True)
        where = f"moment {moment:.3f} after {interrupts} interrupts of {done + 1} conversions"
        files = files_of(folder)
        if answer["code"] == 130:
            whole.check_output(files, where)
            assert [n for n in files if temporary(n) and not n.startswith("tmp/")] == [], where
            said = "error: interrupted; run the same command again and it goes on where it stopped"
            assert [line for line in answer["lines"] if line.startswith("error: ")] == [said], (where, answer)
            assert answer["lines"][-1] == said, (where, answer)
            interrupts += 1
        else:
            check_done(answer, folder, whole, where)
            done += 1
            place(whole.before, folder)
    resume(runner, folder, whole, f"after {interrupts} interrupts")
    return done + 1


def test_an_interrupt_at_a_random_moment_is_one_line_and_the_work_goes_on(
    runner: faults.Runner, recorded: Record, tmp_path: Path
) -> None:
    assert interrupt_at_moments(runner, recorded("convert"), tmp_path / "run", 1, random.Random(1)) > 0


@pytest.mark.fuzz
def test_200_interrupts_at_random_moments_are_one_line_and_the_work_goes_on(
    runner: faults.Runner, recorded: Record, tmp_path: Path
) -> None:
    """NSTF_FUZZ_KILLS: how many instead; NSTF_FUZZ_SEED: other moments."""
    count, seed = int(os.environ.get("NSTF_FUZZ_KILLS", "200")), int(os.environ.get("NSTF_FUZZ_SEED", "2"))
    conversions = interrupt_at_moments(
        runner, recorded("whole"), tmp_path / "run", count, random.Random(seed)
    )
    print(f"{count} interrupts of {conversions} conversions")


@pytest.mark.fuzz
def test_kills_at_1000_random_moments_end_in_the_same_bytes(
    runner: faults.Runner, recorded: Record, tmp_path: Path
) -> None:
    """NSTF_FUZZ_KILLS: how many instead; NSTF_FUZZ_SEED: other moments."""
    count, seed = int(os.environ.get("NSTF_FUZZ_KILLS", "1000")), int(os.environ.get("NSTF_FUZZ_SEED", "2"))
    conversions = kill_at_moments(runner, recorded("whole"), tmp_path / "run", count, random.Random(seed))
    print(f"{count} kills of {conversions} conversions")


def damage(rng: random.Random, folder: Path) -> str:
    """Does something to one of the files in the work directory; says what."""
    files = sorted(p for p in (folder / "work").rglob("*") if p.is_file())
    file, other = rng.choice(files), rng.choice(files)
    raw = bytearray(file.read_bytes())
    kind = rng.choice(("bit", "bits", "cut", "zeros", "longer", "empty", "removed", "a folder", "another"))
    if kind in ("bit", "bits") and raw:
        for _ in range(1 if kind == "bit" else 50):
            # Headers are short beside arrays: half of the bits in the first 2 KiB.
            end = min(len(raw), 2048) if rng.random() < 0.5 else len(raw)
            raw[rng.randrange(end)] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del raw[rng.randrange(len(raw) + 1) :]
    elif kind == "zeros":
        raw[:] = bytes(len(raw))
    elif kind == "longer":
        raw += rng.randbytes(100)
    elif kind == "empty":
        raw.clear()
    elif kind == "another":
        raw[:] = other.read_bytes()
    file.unlink()
    if kind == "a folder":
        file.mkdir()
        (file / "x").write_bytes(b"x")
    elif kind != "removed":
        file.write_bytes(raw)
    return f"{kind}: {file.relative_to(folder)}"


def resume_damaged(
    runner: faults.Runner, whole: Recorded, folder: Path, count: int, rng: random.Random
) -> dict[int, int]:
    """Goes on with a work directory after damage to one to three of its files; how often it ended with which code."""
    codes = dict[int, int]()
    for _ in range(count):
        place(whole.after, folder)
        (folder / "out.nstf").write_bytes(OLD)
        done = [damage(rng, folder) for _ in range(rng.choice((1, 1, 2, 3)))]
        answer = runner.ask(folder=str(folder), words=whole.command.words)
        where = (done, answer)
        files = files_of(folder)
        if answer["code"] == 0:
            assert whole.of_output(files) == whole.wanted(), where
        else:  # what the results belong to, or the lock, is not to be read: said, and nothing is changed
            assert any("job.json" in line or "lock" in line for line in done), where
            errors = [line for line in answer["lines"] if line.startswith("error: ")]
            assert errors == answer["lines"][-1:] and f"{folder}/work" in errors[0], where
            assert "--debug" not in errors[0] and files["out.nstf"] == OLD, where
        codes[answer["code"]] = codes.get(answer["code"], 0) + 1
    return codes


@pytest.mark.fuzz
def test_a_damaged_work_directory_gives_the_same_bytes_or_one_line(
    runner: faults.Runner, recorded: Record, tmp_path: Path
) -> None:
    """NSTF_FUZZ_DAMAGES: how often instead of 300 times; NSTF_FUZZ_SEED: other damage."""
    count, seed = int(os.environ.get("NSTF_FUZZ_DAMAGES", "300")), int(os.environ.get("NSTF_FUZZ_SEED", "4"))
    codes = resume_damaged(runner, recorded("whole"), tmp_path / "run", count, random.Random(seed))
    print(f"{count} damaged work directories, exit codes {codes}")


def power_loss(of: Recorded, tries: int, seed: int) -> int:
    """Checks `tries` states at every call; gives back how many there were."""
    disk, choice, number = of.disk(), random.Random(seed), 0
    for at, event in enumerate(of.events):
        disk.apply(event)
        for _ in range(tries):
            check_state(of, disk.after_power_loss(choice), f"power lost after call {at}, {event.op}")
            number += 1
    return number


def test_a_power_loss_at_any_call_leaves_the_old_file_or_the_new_one(recorded: Record) -> None:
    whole = recorded("whole")
    assert power_loss(whole, 1, 1) == len(whole.events)
    # The last fsync of the folder has happened: from then on it is the new one.
    disk = whole.disk()
    for event in whole.events:
        disk.apply(event)
    out = str(whole.folder / "out.nstf")
    assert all(disk.after_power_loss(random.Random(i))[out] == whole.after["out.nstf"] for i in range(20))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", WRITING)
def test_a_power_loss_in_any_order_that_fsync_allows_leaves_the_old_file_or_the_new_one(
    runner: faults.Runner, recorded: Record, tmp_path: Path, name: str
) -> None:
    """And every twentieth such state, at random, is resumed from."""
    found, choice, resumed = recorded(name), random.Random(3), 0
    print(f"{name}: {power_loss(found, 40, 2)} states")
    disk = found.disk()
    for event in found.events:
        disk.apply(event)
        if choice.random() < 0.05:
            state = disk.after_power_loss(choice)
            place({found.name(path): content for path, content in state.items()}, tmp_path / "again")
            resume(runner, tmp_path / "again", found, f"power lost after {event}")
            resumed += 1
    print(f"{name}: resumed from {resumed} of them")


def test_the_model_of_the_disk_finds_what_is_not_synced() -> None:
    """A file that gets its name without fsync can be empty under it: the check would see that."""
    disk = faults.Disk({"/x/out.nstf": faults.File(bytearray(OLD), OLD, False)})
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


State = frozenset[tuple[str, str]]


def fail_at(runner: faults.Runner, of: Recorded, folder: Path, kind: str, at: int, known: set[State]) -> int:
    """One run with one error, and the one that goes on from what it leaves; the exit code of the first.

    known: states that a run has gone on from; the next one would do the same again, to the byte.
    """
    mode, number, _ = KINDS[kind]
    where = f"{kind} at call {at}, {of.events[at - 1].op} of {of.name(of.events[at - 1].path)}"
    place(of.before, folder)
    answer = runner.ask(folder=str(folder), at=at, mode=mode, errno=number, words=of.command.words)
    assert answer.get("signal") == 0, (where, answer)
    code, files = answer["code"], files_of(folder)
    if code == 0:  # a call that may fail, or that was made again
        assert of.of_output(files) == of.wanted(), where
    else:
        assert code in (1, 5), (where, answer)
        errors = [line for line in answer["lines"] if line.startswith("error: ")]
        assert len(errors) == 1 and errors[0] == answer["lines"][-1], (where, answer)
        assert errors[0].isprintable() and str(folder) in errors[0], (where, answer)
        of.check_output(files, where)
    again = of.command.resumes or not of.of_output(files)  # an export that is there is not made again
    if again and (state := state_of(files)) not in known:
        resume(runner, folder, of, where)
        known.add(state)
    return int(code)


def calls(of: Recorded, kind: str) -> list[int]:
    return [i for i, e in enumerate(of.events, 1) if e.op in KINDS[kind][2]]


def test_an_error_at_a_call_is_one_line_with_the_path_and_the_work_goes_on(
    runner: faults.Runner, recorded: Record, tmp_path: Path
) -> None:
    rng = random.Random(7)
    for name, kind, code in (
        ("convert", "disk full", 1),
        ("convert", "input/output error", 1),
        ("convert", "interrupted", 0),
        ("export hf", "disk full", 1),
    ):
        of = recorded(name)
        assert fail_at(runner, of, tmp_path / name, kind, rng.choice(calls(of, kind)), set()) == code


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "whole"])
def test_an_error_at_every_call_is_one_line_with_the_path_and_the_work_goes_on(
    runner: faults.Runner, recorded: Record, tmp_path: Path, name: str, kind: str
) -> None:
    """NSTF_FUZZ_STRIDE: every so many calls only."""
    of = recorded(name)
    chosen = calls(of, kind)[:: int(os.environ.get("NSTF_FUZZ_STRIDE", "1"))]
    wrong, codes, known = [], dict[int, int](), set[State]()
    for at in chosen:
        try:
            code = fail_at(runner, of, tmp_path / "run", kind, at, known)
            codes[code] = codes.get(code, 0) + 1
        except AssertionError as error:
            wrong.append(str(error)[:600])
    print(f"{name}, {kind}: {len(chosen)} calls, exit codes {codes}, {len(known)} states, {len(wrong)} wrong")
    assert wrong == []
