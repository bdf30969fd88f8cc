"""One engine and several threads: what may be asked meanwhile, and what a fork in the middle of a call leaves."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from nstf.errors import NstfError, UsageError
from nstf.kernels.cpu.engine_matrix import available
from nstf.runtime.engine import Engine
from nstf.runtime.engine_batch import Batch, Part

pytestmark = pytest.mark.skipif(not available(), reason="the extension was not built")
HELD_S = 60  # a child that waits so long waits for ever
DONE, REFUSED, WRONG = 0, 3, 4
Use = Callable[[Engine], list[int]]


def opened(tiny: ModuleType, folder: Path) -> Engine:
    engine = Engine.open(tiny.write(folder, tiny.new_model("LlamaForCausalLM")))
    engine.threads = 2
    return engine


class Working:
    """A thread that runs long prompts through an engine all the time."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.ended = engine, threading.Event()
        self.prompt = [3 + i % 90 for i in range(min(engine.context - 8, 500))]
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.ended.is_set():
            self.engine.reset()
            self.engine._run(self.prompt)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def generated(engine: Engine) -> list[int]:
    return list(engine.generate([3, 4, 5], 4))


def of_a_batch(engine: Engine) -> list[int]:
    """The likeliest tokens of a batch of one sequence."""
    batch = Batch(engine, 1)
    batch.release(0)
    (address,) = batch.step([Part(0, 0, [3, 4, 5])])
    logits = (ctypes.c_float * engine.vocab).from_address(address)
    return sorted(range(engine.vocab), key=logits.__getitem__)[-4:]


def tokens_of_a_child(engine: Engine, wanted: list[int], use: Use = generated) -> int:
    """How a forked child's use of the engine ended: the same tokens, one clear error, or something else."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HELD_S)
        try:
            found = DONE if use(engine) == wanted else WRONG
        except NstfError as error:
            found = REFUSED if "forked" in str(error) else WRONG
        finally:
            os._exit(found)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Held:
    """An engine's calls that stop in their middle, with its lock, as long as somebody holds them.

    It is divided into one part: the sums over the parts, which are Python's, are where a call waits."""

    def __init__(self, engine: Engine) -> None:
        self.go, self.inside, vocab = threading.Event(), threading.Event(), engine.vocab
        self.go.set()

        def join(part: int, count: int, logits: int) -> None:
            ctypes.memmove(logits, part, 4 * count * vocab)

        engine._engine.divide(self.sum, join)

    def sum(self, address: int, count: int) -> None:
        self.inside.set()
        assert self.go.wait(HELD_S)


@pytest.mark.parametrize("use", [generated, of_a_batch])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_was_forked_in_the_middle_of_a_call_is_told_and_does_not_wait(
    tiny: ModuleType, tmp_path: Path, use: Use
) -> None:
    engine = opened(tiny, tmp_path)
    held = Held(engine)
    wanted = use(engine)
    assert tokens_of_a_child(engine, wanted, use) == DONE
    held.inside.clear()
    held.go.clear()
    thread = threading.Thread(target=use, args=(engine,))
    thread.start()
    try:
        assert held.inside.wait(HELD_S)
        assert tokens_of_a_child(engine, wanted, use) == REFUSED
    finally:
        held.go.set()
        thread.join()
    assert use(engine) == wanted


def test_the_cache_is_measured_while_another_thread_runs(tiny: ModuleType, tmp_path: Path) -> None:
    engine = opened(tiny, tmp_path)
    list(engine.generate([3, 4, 5], 4))
    few = engine.cache_bytes
    assert 0 < few <= engine.held_bytes
    with Working(engine):
        until = time.monotonic() + 60
        while engine.cache_bytes <= few and time.monotonic() < until:
            time.sleep(0.001)
        many = engine.cache_bytes
    assert few < many <= engine.held_bytes


def test_sequences_of_another_batch_of_the_engine_are_refused(tiny: ModuleType, tmp_path: Path) -> None:
    """They would have logits that the smaller batch has no room for."""
    engine = opened(tiny, tmp_path)
    few, many = Batch(engine, 1), Batch(engine, 4)
    parts = [Part(i, 0, [3, 4]) for i in range(4)]
    assert len(many.step(parts)) == 4
    with pytest.raises(UsageError, match="no sequence 1"):
        few.step(parts)


@pytest.mark.parametrize(
    ("stated", "expected"), [("3", 3), ("9" * 20, None), ("9" * 5000, None), ("no", None)]
)
def test_threads_of_the_environment_that_are_no_number_of_threads_are_left_out(
    stated: str, expected: int | None
) -> None:
    """Without torch the engine reads the variable itself, and a number beyond 32 bits was an error of its binding's."""
    code = "import sys; from nstf.runtime.engine import usual_threads; print(usual_threads(), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": stated},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(expected or len(os.sched_getaffinity(0))), "False"]
