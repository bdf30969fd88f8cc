"""Kills, power loss and errors at every call that a command makes into the operating system.

A kill leaves the files as they were at that call, so the log of one conversion holds every state that any kill can leave,
and every state that fsync allows after a power loss. Errors need a run each.
"""

import errno
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import faults
from recorded import (
    COMMANDS,
    OLD,
    Recorded,
    check_state,
    files_of,
    make_inputs,
    place,
    prepare,
    record,
    resume,
    resume_from,
    seconds_left,
    state_of,
    states,
)

Record = Callable[[str], Recorded]
WRITING = [name for name, command in COMMANDS.items() if command.output and command.seen]


def test_a_kill_at_any_call_leaves_whole_files_and_a_resume_gives_the_same_bytes(
    runner: faults.Runner, recorded: Record, in_memory: Path
) -> None:
    whole = recorded("whole")
    found = list(states(whole).values())
    assert len(whole.events) > 100 and len(found) > 10
    assert any(name.startswith("work/heal-") for name in whole.after)
    resume_from(runner, whole, in_memory / "again", found[len(found) // 4 :: len(found) // 2])
    # A real one, at the very rename that gives the file its name: before it is the old file, after it the new one.
    last = max(i for i, e in enumerate(whole.events, 1) if e.op == "rename")
    for mode, content in ((faults.KILL_BEFORE, OLD), (faults.KILL_AFTER, whole.wanted()["out.nstf"])):
        folder = in_memory / f"killed{mode}"
        place(whole.before, folder)
        answer = runner.ask(folder=str(folder), at=last, mode=mode, words=whole.command.words)
        assert answer["signal"] == signal.SIGKILL
        assert (folder / "out.nstf").read_bytes() == content


@pytest.mark.fuzz
@pytest.mark.parametrize("name", WRITING)
def test_a_resume_from_every_state_that_a_kill_can_leave_gives_the_same_bytes(
    runner: faults.Runner, recorded: Record, in_memory: Path, name: str
) -> None:
    found = recorded(name)
    count = resume_from(runner, found, in_memory / "again", states(found).values())
    print(f"{name}: {len(found.events)} calls, resumed from all {count} states")


# Other files than those of COMMANDS: more of them, with biases, and without a copy in float32.
SHAPES: dict[str, dict[str, Any]] = {
    "two layers, untied": {"layers": 2, "tie_word_embeddings": False},
    "biases, wider": {"attention_bias": True, "mlp_bias": True, "hidden_size": 96, "num_key_value_heads": 1},
    "float32": {"dtype": torch.float32},
}


@pytest.mark.fuzz
@pytest.mark.parametrize("shape", SHAPES)
def test_a_resume_from_every_state_of_models_of_other_shapes_gives_the_same_bytes(
    runner: faults.Runner, in_memory: Path, shape: str
) -> None:
    command, inputs = COMMANDS["whole"], in_memory / "inputs"
    make_inputs(inputs, **SHAPES[shape])
    prepare(in_memory / "warm", inputs, command)
    assert runner.ask(folder=str(in_memory / "warm"), words=command.words, warm=True)["code"] == 0
    found = record(runner, in_memory / "whole", inputs, command)
    count = resume_from(runner, found, in_memory / "again", states(found).values())
    print(f"{shape}: {len(found.events)} calls, resumed from all {count} states")


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
    runner: faults.Runner, recorded: Record, in_memory: Path, name: str
) -> None:
    """And every twentieth such state, at random, is resumed from."""
    found, choice, resumed = recorded(name), random.Random(3), 0
    print(f"{name}: {power_loss(found, 40, 2)} states")
    disk = found.disk()
    for event in found.events:
        disk.apply(event)
        if choice.random() < 0.05:
            state = disk.after_power_loss(choice)
            files = {found.name(path): content for path, content in state.items()}
            if not found.command.resumes and found.of_output(files):
                continue
            place(files, in_memory / "again")
            resume(runner, in_memory / "again", found, f"power lost after {event}")
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
    runner: faults.Runner, recorded: Record, in_memory: Path
) -> None:
    rng = random.Random(7)
    for name, kind, code in (
        ("convert", "disk full", 1),
        ("convert", "input/output error", 1),
        ("convert", "interrupted", 0),
        ("export hf", "disk full", 1),
    ):
        of = recorded(name)
        assert fail_at(runner, of, in_memory / name, kind, rng.choice(calls(of, kind)), set()) == code


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "whole"])
def test_an_error_at_every_call_is_one_line_with_the_path_and_the_work_goes_on(
    runner: faults.Runner, recorded: Record, in_memory: Path, name: str, kind: str
) -> None:
    """NSTF_FUZZ_STRIDE: every so many calls only, from NSTF_FUZZ_OFFSET on; NSTF_FUZZ_SECONDS: for how long at most, each
    kind of each command."""
    of = recorded(name)
    stride, first = (
        int(os.environ.get(f"NSTF_FUZZ_{key}", usual)) for key, usual in (("STRIDE", "1"), ("OFFSET", "0"))
    )
    chosen = calls(of, kind)[first::stride]
    wrong, codes, known = [], dict[int, int](), set[State]()
    more = seconds_left()
    for at in chosen:
        if not more():
            break
        try:
            code = fail_at(runner, of, in_memory / "run", kind, at, known)
            codes[code] = codes.get(code, 0) + 1
        except AssertionError as error:
            wrong.append(str(error)[:600])
    tried = sum(codes.values()) + len(wrong)
    print(
        f"{name}, {kind}: {tried} of {len(chosen)} calls, exit codes {codes}, {len(known)} states, {len(wrong)} wrong"
    )
    assert wrong == []
