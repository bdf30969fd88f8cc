"""Address-space limits, many loads and unloads, threads and forks: one clear line, no growth, the same tokens."""

import gc
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from small_llama import LLAMA

from nstf.errors import CorruptError, NstfError
from nstf.kernels.formats import EncodedTensor, Node, dense
from nstf.runtime import load
from nstf.runtime.artifact import digests, write_artifact
from nstf.runtime.engine import Engine

IDS = torch.tensor([[1, 2, 3]])
MIB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about 60 MiB, so that limits of some MiB matter."""
    from nstf.runtime.skeleton import build_skeleton, parameter_names

    config = {**LLAMA, "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
              "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    model = build_skeleton(config)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    tree = Node("dense", dense.Params("float16"))
    stored = {
        n: EncodedTensor(tree, shapes[n], {"values": torch.zeros(shapes[n]).half()})
        for n in parameter_names(model)
    }
    path = tmp_path_factory.mktemp("large") / "m.nstf"
    write_artifact(
        path, stored, {"config.json": json.dumps(config).encode(), "generation_config.json": b"{}"}
    )
    return path


def with_engine(path: Path) -> None:
    list(Engine.open(path).generate([1, 2, 3], 4))


def with_modules(path: Path) -> None:
    load(path, engine="off")


def in_memory(path: Path) -> None:
    load(path, engine="off", mapped=False, verify=False)


def outcome(step: Callable[[Path], None], path: Path, room: int) -> str:
    """What comes of a step in a child that may allocate `room` bytes more: done, our error's name, or what else."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        found = "nothing"
        try:
            torch.set_num_threads(1)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + room
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            try:
                step(path)
                found = "done"
            except NstfError as error:
                found = f"NstfError: {error}"
            except BaseException as error:
                found = f"foreign {type(error).__name__}: {error}"
            os.write(into, found.encode()[:1000])
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as answers:
        text = answers.read().decode()
    status = os.waitpid(child, 0)[1]
    return text if status == 0 else f"signal {os.WTERMSIG(status)}"


STEPS = {"engine": with_engine, "modules": with_modules, "memory": in_memory}


def outcomes(step: Callable[[Path], None], path: Path, count: int) -> list[str]:
    """From less than what is in use (nothing can be mapped, whatever is freed) to what is surely enough."""
    step(path)  # imports
    gc.collect()
    size = path.stat().st_size
    return [
        outcome(step, path, room)
        for room in [-10 * size, *(6 * size * i // count for i in range(1, count + 1))]
    ]


@pytest.mark.parametrize("count", [2, pytest.param(19, marks=pytest.mark.fuzz)])
def test_a_limit_on_memory_ends_in_one_line(large: Path, count: int) -> None:
    # In a process of its own: what earlier tests have left free would count as room.
    run = subprocess.run([sys.executable, __file__, str(large), str(count)],
                         capture_output=True, text=True, check=True)  # fmt: skip
    for step, found in json.loads(run.stdout.splitlines()[-1]).items():
        assert found[-1] == "done", step
        assert [f for f in found if f != "done" and not f.startswith("NstfError: ")] == [], step
        assert found[0].startswith("NstfError: ") and found[0].isprintable(), step


def test_a_thread_that_never_begins_is_not_waited_for(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is with one that finds no memory: `threading.Thread.start` waits for it for ever."""
    monkeypatch.setattr(digests._thread, "start_new_thread", lambda *_: 0)
    assert Engine.open(large).vocab == 8192
    raw, path = bytearray(large.read_bytes()), tmp_path / "damaged.nstf"
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptError, match="differs from its SHA-256"):
        Engine.open(path)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def load_and_run(path: Path) -> list[int]:
    model: Any = load(path)
    found: list[int] = model.generate(IDS, max_new_tokens=4, do_sample=False)[0].tolist()
    return found


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.fuzz)])
def test_many_loads_grow_nothing(made: Callable[..., Path], count: int) -> None:
    path = made(LLAMA, generation_config=b"{}")
    for _ in range(20):
        wanted = load_and_run(path)
    gc.collect()
    memory, files, threads = resident(), descriptors(), threading.active_count()
    for _ in range(count):
        assert load_and_run(path) == wanted
    gc.collect()
    assert descriptors() == files and threading.active_count() == threads
    grown = resident() - memory
    print(f"{count} loads: {grown / MIB:.1f} MiB more of {memory / MIB:.0f}")
    assert grown < max(memory // 100, 4 * MIB)


@pytest.mark.parametrize("count", [200, pytest.param(100_000, marks=pytest.mark.fuzz)])
def test_many_tokens_grow_nothing(made: Callable[..., Path], count: int) -> None:
    engine = Engine.open(made(LLAMA, generation_config=b"{}"))
    wanted = list(engine.generate([1, 2, 3], 100))
    memory = resident()
    for _ in range(-(-count // 100)):
        assert list(engine.generate([1, 2, 3], 100)) == wanted
    assert resident() - memory < max(memory // 100, 4 * MIB)


@pytest.mark.parametrize("rounds", [1, pytest.param(100, marks=pytest.mark.fuzz)])
def test_threads_and_forks_give_the_same_tokens(made: Callable[..., Path], rounds: int) -> None:
    path = made(LLAMA, generation_config=b"{}")
    shared: Any = load(path)
    wanted = shared.generate(IDS, max_new_tokens=8, do_sample=False)[0].tolist()
    for _ in range(rounds):
        found: list[list[int]] = []

        def own() -> None:
            engine = Engine.open(path)
            found.append([*IDS[0].tolist(), *engine.generate(IDS[0].tolist(), 8)])  # noqa: B023

        def together() -> None:
            found.append(shared.generate(IDS, max_new_tokens=8, do_sample=False)[0].tolist())  # noqa: B023

        threads = [threading.Thread(target=own if i % 2 else together) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [wanted] * 24
        child = os.fork()
        if child == 0:
            same = shared.generate(IDS, max_new_tokens=8, do_sample=False)[0].tolist() == wanted
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_the_same_tokens_with_any_number_of_threads(made: Callable[..., Path]) -> None:
    path = made(LLAMA, generation_config=b"{}")
    logits = []
    for threads in (1, 2, 3, 7):
        engine = Engine.open(path)
        engine.threads = threads
        logits.append(engine.forward([1, 2, 3, 4, 5], all_logits=True))
    assert all(torch.equal(logits[0], other) for other in logits)


if __name__ == "__main__":
    print(
        json.dumps(
            {name: outcomes(step, Path(sys.argv[1]), int(sys.argv[2])) for name, step in STEPS.items()}
        )
    )
