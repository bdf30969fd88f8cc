"""Several sequences through the captured decoder: on a CPU with the step in the graph's place, on a GPU with graphs."""

import random
import sys
from ctypes import c_float
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nstf.runtime
from nstf.errors import UsageError
from nstf.runtime import graph_batch, graph_decoder
from nstf.runtime.engine_batch import Part
from nstf.runtime.graph_batch import GraphBatch, captured_sizes
from nstf.runtime.graph_decoder import Decoder

sys.path.insert(0, str(Path(__file__).parent))
from test_engine import MODELS, build


def loaded(tiny: ModuleType, folder: Path, name: str = "llama", device: str = "cpu", **options: Any) -> Any:
    return nstf.runtime.load(tiny.write(folder, build(name)), device, engine="off", **options)


def logits_at(address: int, vocab: int) -> torch.Tensor:
    return torch.tensor((c_float * vocab).from_address(address))


def sequences(count: int, longest: int = 60) -> list[list[int]]:
    drawn = random.Random(0)
    return [[drawn.randrange(3, 100) for _ in range(drawn.randrange(2, longest))] for _ in range(count)]


def check(model: Any, batch: GraphBatch, texts: list[list[int]], atol: float) -> None:
    """Feeds the texts as a server would, joining and leaving at random; every step's logits are those of the modules."""
    drawn = random.Random(1)
    waiting, running = list(texts), dict[int, tuple[list[int], int]]()
    with torch.no_grad():
        expected = {
            tuple(t): model(torch.tensor([t], device=model.device)).logits[0].float().cpu() for t in texts
        }
    sizes = set()
    while waiting or running:
        for slot in range(batch.sequences):
            if slot not in running and waiting and drawn.random() < 0.5:
                running[slot] = (waiting.pop(), 0)
        if not running:
            continue
        parts = []
        for slot, (text, first) in running.items():
            piece = drawn.choice((2, 5, 9)) if first < len(text) // 2 else 1
            parts.append(Part(slot, first, text[first : first + piece], wanted=drawn.random() < 0.8))
        sizes.add(sum(len(p.ids) == 1 for p in parts))
        addresses = iter(batch.step(parts))
        for part in parts:
            text, first = running[part.sequence]
            end = first + len(part.ids)
            if part.wanted:
                found = logits_at(next(addresses), batch.vocab)
                torch.testing.assert_close(found, expected[tuple(text)][end - 1], atol=atol, rtol=1e-3)
            running[part.sequence] = (text, end)
            if end == len(text):
                del running[part.sequence]
    assert len(sizes) > 2


# A window, norms of q and k and scaled embeddings, and neither; the others are slow.
USUAL = ("gemma 3", "llama", "mistral, sliding")
EACH = [pytest.param(n, marks=() if n in USUAL else (pytest.mark.slow,)) for n in sorted(MODELS)]


@pytest.mark.parametrize("name", EACH)
def test_sequences_that_join_and_leave_get_the_logits_of_the_modules(
    name: str, tiny: ModuleType, tmp_path: Path
) -> None:
    model = loaded(tiny, tmp_path, name)
    check(model, GraphBatch(Decoder(model), 3), sequences(5, 40), 1e-4)


def test_the_cache_grows_with_the_longest_sequence(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (graph_decoder, graph_batch):
        monkeypatch.setattr(module, "SMALLEST_CAPACITY", 32)
    model = loaded(tiny, tmp_path)
    captured = []

    def capture(step: Any) -> Any:
        step()  # as the run before a capture
        captured.append(step)
        return step

    batch = GraphBatch(Decoder(model, capture), 4)
    assert batch.capacity == 32 and len(captured) == len(captured_sizes(4)) == 3
    before = batch.cache_bytes
    check(model, batch, sequences(5), 1e-4)
    assert batch.capacity == 64 and 2 * before == batch.cache_bytes and 3 < len(captured) <= 6


def test_a_copied_beginning_goes_on_as_its_own(tiny: ModuleType, tmp_path: Path) -> None:
    model = loaded(tiny, tmp_path)
    batch = GraphBatch(Decoder(model), 3)
    text = sequences(1, 40)[0] + [5, 6, 7]
    batch.step([Part(0, 0, text, prompt=True, wanted=False)])
    batch.copy(0, 2, len(text) - 2)
    batch.step([Part(0, 0, [9] * len(text), prompt=True, wanted=False)])  # its first owner goes another way
    (one,) = batch.step([Part(2, len(text) - 2, [8, 4], prompt=True)])
    with torch.no_grad():
        expected = model(torch.tensor([[*text[:-2], 8, 4]])).logits[0, -1]
    torch.testing.assert_close(logits_at(one, batch.vocab), expected, atol=1e-4, rtol=1e-4)


def test_wrong_parts_are_refused(tiny: ModuleType, tmp_path: Path) -> None:
    batch = GraphBatch(Decoder(loaded(tiny, tmp_path)), 2)
    for parts, message in (
        ([], "another sequence"),
        ([Part(0, 0, [5]), Part(0, 1, [5])], "another sequence"),
        ([Part(2, 0, [5])], "no sequence 2"),
        ([Part(0, batch.context, [5])], "context"),
        ([Part(0, 0, [])], "context"),
        ([Part(0, 0, [batch.vocab])], "vocabulary"),
    ):
        with pytest.raises(UsageError, match=message):
            batch.step(parts)
    with pytest.raises(UsageError, match="1 to 16"):
        GraphBatch(batch.decoder, 17)


def test_without_memory_nothing_changes(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (graph_decoder, graph_batch):
        monkeypatch.setattr(module, "SMALLEST_CAPACITY", 32)
    batch = GraphBatch(Decoder(loaded(tiny, tmp_path)), 2)

    def refuse(*size: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    text = sequences(1, 30)[0]
    (address,) = batch.step([Part(0, 0, text)])
    before = logits_at(address, batch.vocab)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(MemoryError, match="2 sequences of 64 tokens"):
            batch.reserve(0, 33)
    assert batch.capacity == 32
    (address,) = batch.step([Part(0, len(text) - 1, text[-1:])])
    torch.testing.assert_close(logits_at(address, batch.vocab), before, atol=1e-4, rtol=1e-4)


def test_sizes_are_powers_of_two_and_all() -> None:
    assert [captured_sizes(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_steps_on_a_gpu(name: str, dtype: torch.dtype, tiny: ModuleType, tmp_path: Path) -> None:
    model = loaded(tiny, tmp_path, name, "cuda", dtype=dtype)
    largest = 1e-3 if dtype == torch.float32 else 0.1
    check(model, GraphBatch(Decoder(model), 8), sequences(24), largest)
