"""Prompts of a captured decoder: filled up, captured when their length comes again, the same numbers either way."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.runtime import graph_decoder, graph_prompt
from nstf.runtime.graph_decoder import Decoder
from nstf.runtime.graph_prompt import MOST_ROWS, STEP

sys.path.insert(0, str(Path(__file__).parent))
from test_engine import MODELS
from test_graph_decoder import GREEDY, by_transformers, ids_of, loaded


class Capture:
    """In the place of graphs: steps that were captured, each run once, as before a capture."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        self.count += 1
        return step


@pytest.mark.parametrize("name", sorted(MODELS))
def test_captured_prompts_give_the_logits_of_the_modules(
    name: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_prompt, "STEP", 16)
    model, capture = loaded(tiny, tmp_path, name), Capture()
    decoder = Decoder(model, capture)
    with torch.no_grad():
        for batch, count in ((1, 9), (2, 40)):
            texts = [ids_of(count, batch), ids_of(count, batch).flip(0, 1), ids_of(count - 3, batch)]
            found = [decoder.prompt(ids).clone() for ids in texts]
            for ids, logits in zip(texts, found, strict=True):
                torch.testing.assert_close(logits, model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)
            # The next time a text comes, its numbers are the same, bit for bit.
            assert torch.equal(decoder.prompt(texts[0]), found[0])
    assert capture.count == 2


def test_text_goes_on_from_a_captured_prompt(tiny: ModuleType, tmp_path: Path) -> None:
    model, capture = loaded(tiny, tmp_path), Capture()
    decoder = Decoder(model, capture)
    with torch.no_grad():
        for count in (30, 20, 25):
            ids = ids_of(count)
            found = [token for (token,) in decoder.generate(ids, 20)]
            assert found == by_transformers(model, ids, **GREEDY)[0, count:].tolist()
    assert capture.count == 2, "the step, and one prompt for three lengths"


def test_another_cache_means_other_graphs(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_decoder, "SMALLEST_CAPACITY", 32)
    monkeypatch.setattr(graph_prompt, "STEP", 8)
    model, capture = loaded(tiny, tmp_path), Capture()
    decoder = Decoder(model, capture)
    with torch.no_grad():
        short, long = ids_of(8), ids_of(50)
        for _ in range(2):
            decoder.prompt(short)
        assert capture.count == 1
        decoder.prompt(long)
        torch.testing.assert_close(decoder.prompt(short), model(short).logits[:, -1], atol=1e-4, rtol=1e-4)
        assert capture.count == 2, "the old graph writes into the old cache"
        decoder.drop()
        decoder.prompt(short)
        assert capture.count == 3


def test_long_prompts_are_neither_filled_up_nor_captured(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_prompt, "MOST_ROWS", 2 * STEP)
    model, capture = loaded(tiny, tmp_path), Capture()
    decoder, seen = Decoder(model, capture), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    with torch.no_grad():
        for ids in (ids_of(30), ids_of(30, 3), ids_of(30, 3)):
            decoder.prompt(ids)
    assert seen == [(1, STEP), (3, 30), (3, 30)] and not capture.count
    assert MOST_ROWS % STEP == 0
    assert graph_prompt.KEPT_GRAPHS * STEP >= MOST_ROWS, (
        "lengths of one sequence that take turns are all kept"
    )


def test_few_graphs_are_kept(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_prompt, "KEPT_GRAPHS", 2)
    model, capture = loaded(tiny, tmp_path), Capture()
    decoder: Any = Decoder(model, capture)
    with torch.no_grad():
        for count in (10, 70, 130):
            for _ in range(2):
                decoder.prompt(ids_of(count))
        assert [length for _, length in decoder._prompts._graphs] == [128, 192]
        # One whose graph was dropped comes twice again before it is captured.
        before = capture.count
        decoder.prompt(ids_of(10))
        assert capture.count == before
        decoder.prompt(ids_of(10))
        assert capture.count == before + 1


@pytest.mark.parametrize("warmed", [False, True])
def test_a_prompt_that_cannot_be_captured_runs_as_it_is(
    warmed: bool, tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tried = loaded(tiny, tmp_path), []

    def refuse(step: Callable[[], None]) -> Callable[[], None]:
        if warmed:
            step()
        tried.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    decoder: Any = Decoder(model, refuse)
    ids = ids_of(30)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "nstf"):
        expected = model(ids).logits[:, -1]
        for _ in range(4):
            torch.testing.assert_close(decoder.prompt(ids), expected, atol=1e-4, rtol=1e-4)
    assert len(tried) == 1 and "not permitted" in caplog.text


def test_a_rank_that_cannot_capture_a_prompt_stops(tiny: ModuleType, tmp_path: Path) -> None:
    """Its sums so far have met those of the others: run again, the prompt would add to other ones."""
    model = loaded(tiny, tmp_path)
    model.nstf_ranks = object()

    def refuse(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("out of memory in the middle")

    decoder, ids = Decoder(model, refuse), ids_of(30)
    with torch.no_grad():
        decoder.prompt(ids)
        with pytest.raises(RuntimeError, match="in the middle"):
            decoder.prompt(ids)


def test_prompts_run_as_they_are_where_nothing_is_captured(tiny: ModuleType, tmp_path: Path) -> None:
    model, seen = loaded(tiny, tmp_path), []
    decoder: Any = Decoder(model, Capture())
    decoder._prompts._capture = None  # as with trellis codes
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    with torch.no_grad():
        for _ in range(3):
            decoder.prompt(ids_of(30))
    assert seen == [(1, 30)] * 3
