"""The engine as a whole under ThreadSanitizer (make sanitize): engines, batches and the server in several threads.

    python tests/runtime/engine_races.py make FOLDER         artifacts, with any build
    python tests/runtime/engine_races.py run FOLDER SECONDS  with a build that ThreadSanitizer watches; prints what was done

Two programs, since the second does without torch: its threads and those of OpenMP synchronise by ways that
ThreadSanitizer does not see.
"""

import itertools
import random
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "attacks"))

from nstf.kernels.cpu import engine_matrix, ext
from nstf.runtime.artifact.reader import open_artifact
from nstf.runtime.engine import Engine
from nstf.runtime.engine_batch import Batch, Part

NEW, THREADS = 6, 3
PROMPTS = [[3 + (7 * i + j) % 60 for j in range(n)] for i, n in enumerate((1, 5, 33, 70, 90))]


def make(folder: Path) -> None:
    """A small model with every kind of tree in FOLDER."""
    from deep_cases import make_model

    make_model(folder)


def tokens(engine: Engine, prompt: list[int]) -> list[int]:
    return list(engine.generate(prompt, NEW))


def engines_apart(path: Path, kv_cache: str) -> None:
    """Each thread opens the file and writes what one alone writes; the pool serves one at a time, the others do without."""
    wanted = tokens(Engine.open(path, kv_cache=kv_cache), PROMPTS[3])

    def one() -> None:
        engine = Engine.open(path, kv_cache=kv_cache)
        engine.threads = THREADS
        assert tokens(engine, PROMPTS[3]) == wanted

    together(one, one, one)


def one_engine(path: Path) -> None:
    """Several callers of one engine, each with a sequence of its own, and one that only asks how large its caches are."""
    engine = Engine.open(path)
    engine.threads = THREADS
    own = [Batch(engine, 3) for _ in range(3)]  # each has room of its own for logits

    def caller(number: int) -> Callable[[], None]:
        def run() -> None:
            for prompt in PROMPTS:
                own[number].step([Part(number, 0, prompt, prompt=True)])
                for i in range(NEW):
                    own[number].step([Part(number, len(prompt) + i, [5 + i])])
                assert own[number].resumable(number, len(prompt)) == len(prompt)
            own[number].release(number)

        return run

    together(*(caller(i) for i in range(3)), lambda: measure(engine))


def measure(engine: Engine) -> None:
    for _ in range(200):
        assert 0 <= engine.cache_bytes
        assert 0 <= engine.held_bytes
        time.sleep(0.001)


def one_matrix(path: Path) -> None:
    """Every matrix of the file multiplied, and its rows decoded, by several threads."""
    with open_artifact(path) as artifact:
        for name in artifact.names():
            if len(artifact.record(name).shape) != 2 or "v_proj" in name:  # FP8 may need torch
                continue
            matrix = engine_matrix.compile_matrix(artifact.views(name))
            rows, cols = matrix.shape

            def run(matrix: Any = matrix, rows: int = rows, cols: int = cols) -> None:
                for count in (1, 3, 17):
                    x = array("f", [(i % 13 - 6) / 7 for i in range(count * cols)])
                    y = array("f", bytes(4 * count * rows))
                    matrix.multiply_at(x.buffer_info()[0], count, y.buffer_info()[0], THREADS)
                engine_matrix.decode_row(matrix, rows - 1)

            together(run, run)


def server(path: Path, drawn: random.Random) -> None:
    """Clients that ask, leave and ask for measurements at once."""
    from nstf.integrations.serve.errors import ApiError
    from nstf.integrations.serve.metrics import Metrics
    from nstf.integrations.serve.output import Answer, Piece
    from nstf.integrations.serve.scheduler import Scheduler
    from nstf.runtime.token_sampler import Settings

    engine = Engine.open(path)
    engine.threads = THREADS
    metrics = Metrics()
    scheduler = Scheduler("engine", Batch(engine, 3), 3, 4, metrics)
    seeds = [drawn.random() for _ in range(4)]

    def client(seed: float) -> Callable[[], None]:
        def run() -> None:
            own = random.Random(seed)
            for _ in range(4):
                ended = threading.Event()

                def emit(piece: Piece, ended: threading.Event = ended) -> None:
                    if piece.reason is not None:
                        ended.set()

                prompt = own.choice(PROMPTS)
                settings = Settings(temperature=own.choice((0.0, 1.0)), seed=1)
                answer = Answer(prompt, NEW, settings, frozenset({0}), (), None, emit)
                try:
                    scheduler.submit(answer)
                except ApiError:  # busy
                    time.sleep(0.01)
                    continue
                if own.random() < 0.3:
                    scheduler.cancel(answer)
                else:
                    assert ended.wait(120)

        return run

    def watch() -> None:
        for _ in range(50):
            metrics.text()
            time.sleep(0.005)

    together(*map(client, seeds), watch)
    scheduler.close(60)


def together(*runs: Callable[[], None]) -> None:
    """All at once; the first error of any."""
    failed: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def run(path: Path, seconds: float) -> Counter[str]:
    """Each of the above at least once with every instruction set, and again until the time is over."""
    done: Counter[str] = Counter()
    drawn, end = random.Random(0), time.monotonic() + seconds
    for isa in itertools.cycle(ext.isas()):
        if done[isa] and time.monotonic() > end:
            return done
        ext.use_isa(isa)
        steps = {
            "engines apart": lambda: engines_apart(path, "float16"),
            "engines apart, int8 cache": lambda: engines_apart(path, "int8"),
            "callers of one engine": lambda: one_engine(path),
            "users of one matrix": lambda: one_matrix(path),
            "clients of a server": lambda: server(path, drawn),
        }
        for name, step in steps.items():
            step()
            done[name] += 1
        done[isa] += 1
    return done


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    if sys.argv[1] == "make":
        folder.mkdir(parents=True, exist_ok=True)
        make(folder)
    else:
        print(dict(run(folder / "whole.nstf", float(sys.argv[3]))))
        assert "torch" not in sys.modules
