"""Several tokens in one call of the engine: the same as one call for each, and what ends it."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.errors import NstfError, UsageError
from nstf.kernels.cpu.engine_matrix import available
from nstf.runtime import engine as engine_module
from nstf.runtime.artifact import write_artifact
from nstf.runtime.engine import Engine, greedy

pytestmark = pytest.mark.skipif(not available(), reason="the extension was not built")
PROMPT = [5, 17, 60, 3]


@pytest.fixture
def engine(tiny: ModuleType, tmp_path: Path) -> Engine:
    return Engine.open(tiny.write(tmp_path, tiny.new_model("Qwen3ForCausalLM")))


def one_by_one(engine: Engine, count: int) -> list[int]:
    engine.reset()
    found, logits = [], engine.forward(PROMPT)
    for _ in range(count):
        found.append(greedy(logits))
        logits = engine.forward(found[-1:])
    return found


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_tokens_of_one_call_are_those_of_a_call_for_each(
    engine: Engine, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_by_one(engine, 90)
    engine.threads = threads
    monkeypatch.setattr(engine_module, "_RUN_S", 10.0)  # as many together as there may be
    assert list(engine.generate(PROMPT, 90)) == expected
    assert engine.position == len(PROMPT) + 89
    engine.reset()
    first = greedy(engine.forward(PROMPT))
    assert [first, *engine.go_on(first, 40)] == expected[:41]
    assert engine.position == len(PROMPT) + 40


def test_it_ends_with_a_stop_token_and_the_sequence_with_what_was_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_by_one(engine, 60)
    monkeypatch.setattr(engine_module, "_RUN_S", 10.0)
    # One that is met in the middle of a call, and only there.
    end = next(i for i in range(6, 60) if expected[i] not in expected[:i]) + 1
    stop = frozenset({expected[end - 1], 2**70, -5})
    assert list(engine.generate(PROMPT, 60, stop)) == expected[:end]
    assert engine.position == len(PROMPT) + end - 1
    engine.reset()
    engine.forward(PROMPT)
    assert list(engine.go_on(expected[0], 59, stop)) == expected[1:end]


def test_a_reader_that_leaves_early_goes_on_from_what_it_was_given(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_by_one(engine, 40)
    monkeypatch.setattr(engine_module, "_RUN_S", 10.0)
    tokens = engine.generate(PROMPT, 60)
    assert [next(tokens) for _ in range(12)] == expected[:12]
    tokens.close()
    assert engine.position == len(PROMPT) + 11
    assert list(engine.go_on(expected[11], 28)) == expected[12:]


def test_with_an_attention_plan_nothing_is_run_that_is_not_asked_for(engine: Engine) -> None:
    called = []

    class Counting:
        def go_on(self, token: int, first: int, count: int, *others: Any) -> tuple[int, bool]:
            called.append(count)
            return run(token, first, count, *others)

    some: Any = object()
    run, engine.plan = engine._engine.go_on, some
    engine.forward(PROMPT)
    engine._engine = Counting()
    assert len(engine.go_on(3, 20)) == 20
    assert called == [1] * 20


def test_what_does_not_fit_is_refused_before_anything_is_run(engine: Engine) -> None:
    engine.forward(PROMPT)
    for token, count, said in (
        (3, 0, "no tokens"),
        (100, 1, "vocabulary of 100"),
        (3, engine.context - 3, f"context of {engine.context}"),
    ):
        with pytest.raises(UsageError, match=said):
            engine.go_on(token, count)
    assert engine.position == len(PROMPT)


def test_logits_that_are_no_numbers_end_it_after_the_tokens_before(tiny: ModuleType, tmp_path: Path) -> None:
    model: Any = tiny.new_model("LlamaForCausalLM", tie_word_embeddings=False)
    tensors, files = tiny.encode_model(model), {"config.json": json.dumps(tiny.config_json(model)).encode()}
    name = "model.embed_tokens.weight"
    rows = model.get_parameter(name).data.clone()
    write_artifact(tmp_path / "sound.nstf", tensors | {name: tiny.dense(rows)}, files, {})
    expected = list(Engine.open(tmp_path / "sound.nstf").generate(PROMPT, 30))
    poison = next(t for t in expected if t not in PROMPT and t != expected[0])
    rows[poison] = torch.nan
    write_artifact(tmp_path / "broken.nstf", tensors | {name: tiny.dense(rows)}, files, {})
    broken, found = Engine.open(tmp_path / "broken.nstf"), []
    with pytest.raises(NstfError, match="NaN"):
        for token in broken.generate(PROMPT, 30):
            found.append(token)
    assert found == expected[: expected.index(poison) + 1]
    broken.reset()
    broken.forward(PROMPT)
    with pytest.raises(NstfError, match="NaN"):
        broken.go_on(expected[0], 29)
