"""Kills and interrupts at random moments, and damaged work directories: a conversion that goes on ends the same."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import faults
from recorded import OLD, Recorded, check_done, files_of, place, resume, seconds_left, temporary

Record = Callable[[str], Recorded]


def kill_at_moments(
    runner: faults.Runner, whole: Recorded, folder: Path, count: int, rng: random.Random
) -> tuple[int, int]:
    """Kills at `count` random moments of the processor's time; how many there were, and of how many conversions.

    A conversion goes on after each kill until it has come to its end, where nothing may differ from one without.
    """
    done = kills = 0
    more = seconds_left()
    place(whole.before, folder)
    while kills < count and more():
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
    return kills, done + 1


def test_kills_at_random_moments_end_in_the_same_bytes(
    runner: faults.Runner, recorded: Record, in_memory: Path
) -> None:
    assert kill_at_moments(runner, recorded("whole"), in_memory / "run", 2, random.Random(1))[0] == 2


def interrupt_at_moments(
    runner: faults.Runner, whole: Recorded, folder: Path, count: int, rng: random.Random
) -> tuple[int, int]:
    """Ctrl-C at `count` random moments, as with kills; how many there were, and in how many conversions."""
    done = interrupts = 0
    more = seconds_left()
    place(whole.before, folder)
    while interrupts < count and more():
        moment = 0.02 + rng.random() ** 2 * 1.1 * whole.cpu_s
        answer = runner.ask(folder=str(folder), words=whole.command.words, moment_s=moment, interrupt=True)
        where = f"moment {moment:.3f} after {interrupts} interrupts of {done + 1} conversions"
        files = files_of(folder)
        if answer["code"] == 130:
            whole.check_output(files, where)
            assert [n for n in files if temporary(n) and not n.startswith("tmp/")] == [], where
            said = "run the same command again and it goes on where it stopped"
            if answer["lines"][-1].endswith("out.nstf is complete"):
                assert "out.nstf" in files, where
                said = f"{folder / 'out.nstf'} is complete"
            errors = [line for line in answer["lines"] if line.startswith("error: ")]
            assert errors == [f"error: interrupted; {said}"] == answer["lines"][-1:], (where, answer)
            interrupts += 1
        else:
            check_done(answer, folder, whole, where)
            done += 1
            place(whole.before, folder)
    resume(runner, folder, whole, f"after {interrupts} interrupts")
    return interrupts, done + 1


def test_an_interrupt_at_a_random_moment_is_one_line_and_the_work_goes_on(
    runner: faults.Runner, recorded: Record, in_memory: Path
) -> None:
    assert interrupt_at_moments(runner, recorded("convert"), in_memory / "run", 1, random.Random(1))[0] == 1


@pytest.mark.fuzz
def test_200_interrupts_at_random_moments_are_one_line_and_the_work_goes_on(
    runner: faults.Runner, recorded: Record, in_memory: Path
) -> None:
    """NSTF_FUZZ_KILLS: how many instead; NSTF_FUZZ_SECONDS: for how long at most; NSTF_FUZZ_SEED: other moments."""
    count, seed = int(os.environ.get("NSTF_FUZZ_KILLS", "200")), int(os.environ.get("NSTF_FUZZ_SEED", "2"))
    found, of = interrupt_at_moments(runner, recorded("whole"), in_memory / "run", count, random.Random(seed))
    print(f"{found} interrupts of {of} conversions")


@pytest.mark.fuzz
def test_kills_at_1000_random_moments_end_in_the_same_bytes(
    runner: faults.Runner, recorded: Record, in_memory: Path
) -> None:
    """NSTF_FUZZ_KILLS: how many instead; NSTF_FUZZ_SECONDS: for how long at most; NSTF_FUZZ_SEED: other moments."""
    count, seed = int(os.environ.get("NSTF_FUZZ_KILLS", "1000")), int(os.environ.get("NSTF_FUZZ_SEED", "2"))
    kills, of = kill_at_moments(runner, recorded("whole"), in_memory / "run", count, random.Random(seed))
    print(f"{kills} kills of {of} conversions")


def convert_in_pairs(
    runners: tuple[faults.Runner, faults.Runner],
    whole: Recorded,
    folder: Path,
    count: int,
    rng: random.Random,
) -> int:
    """Two processes convert in one folder, the second up to a third later; how many of the second were refused."""
    refused = 0
    with ThreadPoolExecutor(2) as pool:
        for number in range(count):
            place(whole.before, folder)
            words = {"folder": str(folder), "words": whole.command.words}
            one = pool.submit(runners[0].ask, **words)
            time.sleep(rng.random() * whole.cpu_s / 3)
            answers = [pool.submit(runners[1].ask, **words).result(), one.result()]
            where = (number, answers)
            done = [answer for answer in answers if answer["code"] == 0]
            for answer in answers:
                if answer["code"] != 0:
                    errors = [line for line in answer["lines"] if line.startswith("error: ")]
                    assert answer["code"] == 2 and len(errors) == 1 and errors == answer["lines"][-1:], where
                    assert f"{folder}/work is in use by another conversion" in errors[0], where
                    refused += 1
            assert done, where
            check_done(done[0], folder, whole, where)
    return refused


@pytest.mark.fuzz
def test_of_20_pairs_of_conversions_with_one_output_one_works_and_the_other_names_the_lock(
    runner: faults.Runner, recorded: Record, memory_root: Path, in_memory: Path
) -> None:
    """NSTF_FUZZ_SEED: other moments."""
    whole = recorded("whole")
    with faults.runner(memory_root / "fault_io.so") as second:
        warm = in_memory / "warm"
        place(whole.before, warm)
        assert second.ask(folder=str(warm), words=whole.command.words, warm=True)["code"] == 0
        rng = random.Random(int(os.environ.get("NSTF_FUZZ_SEED", "3")))
        refused = convert_in_pairs((runner, second), whole, in_memory / "run", 20, rng)
    print(f"20 pairs, {refused} refused")
    assert refused >= 10


def test_damage_to_what_is_kept_beside_the_results_is_found(
    runner: faults.Runner, recorded: Record, in_memory: Path
) -> None:
    """A bit of an array of healing once went into the file unseen; another result in the calibration's place, a KeyError."""
    whole, folder = recorded("whole"), in_memory / "run"
    healing = next(name for name in whole.after if name.startswith("work/heal-"))
    state = dict(whole.after)
    state[healing] = state[healing][:-1] + bytes([state[healing][-1] ^ 64])
    state["work/calibration.safetensors"] = next(c for n, c in state.items() if n.startswith("work/store/"))
    place(state, folder)
    answer = resume(runner, folder, whole, "damaged")
    said = "\n".join(answer["lines"])
    assert healing in said and "work/calibration.safetensors" in said, said


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
    codes, more = dict[int, int](), seconds_left()
    for _ in range(count):
        if not more():
            break
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
    runner: faults.Runner, recorded: Record, in_memory: Path
) -> None:
    """NSTF_FUZZ_DAMAGES: how often instead of 300 times; NSTF_FUZZ_SEED: other damage."""
    count, seed = int(os.environ.get("NSTF_FUZZ_DAMAGES", "300")), int(os.environ.get("NSTF_FUZZ_SEED", "4"))
    codes = resume_damaged(runner, recorded("whole"), in_memory / "run", count, random.Random(seed))
    print(f"{sum(codes.values())} damaged work directories, exit codes {codes}")
