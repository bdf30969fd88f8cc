"""Several sequences in one pass: each has the numbers it has alone."""

from ctypes import string_at
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.errors import UsageError
from nstf.kernels.cpu.engine_matrix import available
from nstf.runtime.engine import Engine
from nstf.runtime.engine_batch import TOGETHER, Batch, Part

pytestmark = pytest.mark.skipif(not available(), reason="the extension was not built")

LENGTHS = (40, 9, 1, 23)
NEW = 6


@pytest.fixture(params=["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM"])
def path(request: pytest.FixtureRequest, tiny: ModuleType, tmp_path: Path) -> Path:
    found: Path = tiny.write(tmp_path, tiny.new_model(request.param))
    return found


def logits(batch: Batch, address: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(string_at(address, 4 * batch.engine.vocab)), dtype=torch.float32)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 100, (n,), generator=generator).tolist() for n in LENGTHS]


def alone(batch: Batch, prompt: list[int]) -> list[torch.Tensor]:
    found = [logits(batch, batch.step([Part(0, 0, prompt, prompt=True)])[0])]
    for i in range(NEW):
        part = Part(0, len(prompt) + i, [int(found[-1].argmax())])
        found.append(logits(batch, batch.step([part])[0]))
    return found


def together(batch: Batch, piece: int) -> list[list[torch.Tensor]]:
    """All prompts, each joining two steps after the one before, in pieces; they leave when they are done."""
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    done = [0] * len(LENGTHS)
    step = 0
    while any(len(f) <= NEW for f in found):
        parts = []
        for i, prompt in enumerate(prompts()):
            if step < 2 * i or len(found[i]) > NEW:
                continue
            if done[i] < len(prompt):
                ids = prompt[done[i] : done[i] + piece]
                parts.append(Part(i, done[i], ids, prompt=True, wanted=done[i] + len(ids) == len(prompt)))
            else:
                parts.append(Part(i, done[i], [int(found[i][-1].argmax())]))
            done[i] += len(parts[-1].ids)
        addresses = batch.step(parts) if parts else []
        for part, address in zip([p for p in parts if p.wanted], addresses, strict=True):
            found[part.sequence].append(logits(batch, address))
        step += 1
    return found


@pytest.mark.parametrize("kv_cache", ["float16", "int8"])
def test_a_reproducible_batch_has_the_same_bits_as_sequences_alone(path: Path, kv_cache: str) -> None:
    engine = Engine.open(path, kv_cache=kv_cache)
    expected = [alone(Batch(engine, 1, reproducible=True), p) for p in prompts()]
    for piece in (5, 32):
        found = together(Batch(engine, len(LENGTHS), reproducible=True), piece)
        for own, one in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own, one, strict=True))


def test_the_usual_batch_differs_by_rounding_only(path: Path) -> None:
    engine = Engine.open(path, exact=True)
    expected = [alone(Batch(engine, 1), p) for p in prompts()]
    for own, one in zip(together(Batch(engine, len(LENGTHS)), 7), expected, strict=True):
        for a, b in zip(own, one, strict=True):
            torch.testing.assert_close(a, b, atol=2e-4 * float(b.abs().max()), rtol=0)


@pytest.mark.parametrize("kv_cache", ["float16", "int8"])
def test_a_copied_beginning_gives_the_same_logits(path: Path, kv_cache: str) -> None:
    batch = Batch(Engine.open(path, kv_cache=kv_cache), 3, reproducible=True)
    prompt = prompts()[0]
    expected = logits(batch, batch.step([Part(0, 0, prompt, prompt=True)])[0])
    batch.copy(0, 2, 21)
    found = logits(batch, batch.step([Part(2, 21, prompt[21:], prompt=True)])[0])
    assert torch.equal(found, expected)
    batch.release(0)
    with pytest.raises(ValueError, match="fewer positions"):
        batch.copy(0, 1, 10)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "0 tokens"),
        ([Part(0, 0, [3] * (TOGETHER + 1))], f"{TOGETHER + 1} tokens"),
        ([Part(0, 0, [100])], "vocabulary"),
        ([Part(0, -1, [3])], "context"),
        ([Part(0, 10**9, [3])], "context"),
        ([Part(0, 0, [])], "context"),
        ([Part(2, 0, [3])], "no sequence 2"),
        ([Part(-1, 0, [3])], "no sequence -1"),
    ],
)
def test_wrong_parts_are_refused(tiny: ModuleType, tmp_path: Path, parts: Any, message: str) -> None:
    batch = Batch(Engine.open(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))), 2)
    with pytest.raises(UsageError, match=message):
        batch.step(parts)
    with pytest.raises(ValueError, match="sequence"):
        batch.step([Part(1, 0, [3]), Part(1, 1, [3])])
