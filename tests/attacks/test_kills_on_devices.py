"""Kills at random moments of a conversion that uses several GPUs: it goes on to the same bytes, and no process stays."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from recorded import files_of, make_inputs, seconds_left, temporary

DEVICES = "cuda:0,1"
# Measured search, front to back and healing, with trellis codes among the candidates.
WORDS = [
    "--target-bpw", "4", "--prefer", "size", "--samples", "4", "--seq-len", "64", "--search", "--search-steps", "1",
    "--prefix", "--heal-steps", "1", "--threads", "2", "--no-attention-plan", "--force", "--quiet",
]  # fmt: skip


@dataclass
class Counts:
    """Of all workers."""

    wanted: int
    kills: int = 0
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def more(self) -> bool:
        with self.lock:
            return self.kills < self.wanted


def begun(inputs: Path, folder: Path, device: str) -> "subprocess.Popen[str]":
    """The conversion as a process in a session of its own."""
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable, "-m", "nstf_convert", "convert", str(inputs / "model"), "-o", str(folder / "out.nstf"),
        "--work-dir", str(folder / "work"), "--dataset", str(inputs / "text.txt"), "--device", device, *WORDS,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def whole(inputs: Path, folder: Path, device: str) -> tuple[bytes, float]:
    """(the file of an undisturbed conversion, its seconds)"""
    start = time.monotonic()
    process = begun(inputs, folder, device)
    _, said = process.communicate()
    assert process.returncode == 0, said
    return (folder / "out.nstf").read_bytes(), time.monotonic() - start


def in_session(session: int) -> list[int]:
    """The processes that are left of a session, but for those that have ended and that nobody was told of."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(place.name)) != session:
                continue
            if (place / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(place.name))
        except OSError:
            continue
    return found


def kill_again_and_again(
    inputs: Path, folder: Path, expected: bytes, seconds: float, counts: Counts, rng: random.Random
) -> None:
    """One worker: kills the first process at random moments until a conversion ends, and so on."""
    more = seconds_left()
    number, last = 0, False
    while not last:
        last = not (counts.more() and more())  # what was killed goes on to its end
        own = folder / str(number)
        process = begun(inputs, own, DEVICES)
        try:
            process.wait(None if last else rng.random() ** 1.5 * seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            with counts.lock:
                counts.kills += 1
            until = time.monotonic() + 60
            while in_session(process.pid):
                assert time.monotonic() < until, f"processes stay: {in_session(process.pid)}"
                time.sleep(0.1)
        assert process.stderr is not None
        said = process.stderr.read()
        process.stderr.close()
        out = own / "out.nstf"
        assert not out.exists() or out.read_bytes() == expected, f"{folder.name}/{number}"
        if process.returncode == -signal.SIGKILL:
            continue
        assert process.returncode == 0, said
        assert out.read_bytes() == expected, f"{folder.name}/{number}"
        left = [name for name in files_of(own) if temporary(name)]
        assert left == [], left
        with counts.lock:
            counts.done += 1
        number += 1


@pytest.mark.gpu
@pytest.mark.fuzz
def test_kills_with_two_gpus_end_in_the_same_bytes(tmp_path: Path) -> None:
    """NSTF_FUZZ_KILLS: how many; NSTF_FUZZ_SECONDS: for how long at most; NSTF_FUZZ_SEED; NSTF_FUZZ_WORKERS at a time."""
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are wanted")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    make_inputs(inputs, layers=3)
    expected, _ = whole(inputs, tmp_path / "one", "cuda:0")
    both, seconds = whole(inputs, tmp_path / "two", DEVICES)
    assert both == expected
    counts = Counts(int(os.environ.get("NSTF_FUZZ_KILLS", "200")))
    workers, seed = (int(os.environ.get(f"NSTF_FUZZ_{n}", d)) for n, d in (("WORKERS", "4"), ("SEED", "2")))
    for worker in range(workers):
        (tmp_path / f"w{worker}").mkdir()
    with ThreadPoolExecutor(workers) as pool:
        running = [
            pool.submit(
                kill_again_and_again,
                inputs, tmp_path / f"w{w}", expected, 1.2 * seconds, counts, random.Random(seed + w),
            )
            for w in range(workers)
        ]  # fmt: skip
        for one in running:
            one.result()
    print(f"{counts.kills} kills of {counts.done} conversions, of {seconds:.0f} s each undisturbed")
