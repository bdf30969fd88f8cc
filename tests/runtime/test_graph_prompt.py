"""Prompts of a captured decoder: filled up, and captured when their length comes again."""

import gc
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.runtime import graph_decoder, graph_prompt
from nstf.runtime.graph_decoder import Decoder
from nstf.runtime.graph_prompt import MOST_ROWS, STEP
from nstf.runtime.stacking import matrix_of

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


def test_a_decoder_goes_with_its_last_name(tiny: ModuleType, tmp_path: Path) -> None:
    # A GPU's caches and graphs would stay until the collector came, and NCCL waits for graphs that hold its sums.
    def run_once(step: Callable[[], None]) -> Callable[[], None]:
        step()
        return lambda: None  # a graph does not hold what it was captured of

    model = loaded(tiny, tmp_path)
    decoder = Decoder(model, run_once)
    with torch.no_grad():
        for _ in range(3):
            list(decoder.generate(ids_of(30), 5))
    kept = weakref.ref(decoder)
    collected = gc.isenabled()
    gc.disable()
    try:
        del decoder
        assert kept() is None
    finally:
        if collected:
            gc.enable()


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


def test_the_longest_prompts_of_ranks_go_through_modules(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_prompt, "MOST_ROWS", STEP)
    monkeypatch.setattr(graph_prompt, "LONG_ROWS", 100)
    model, seen = loaded(tiny, tmp_path), []
    alone = Decoder(model, Capture())
    model.nstf_ranks = TwoRanks()
    decoder = Decoder(model, Capture())
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    with torch.no_grad():
        for ids in (ids_of(99), ids_of(100), ids_of(50, 2)):
            expected = model(input_ids=ids).logits[:, -1]
            for way in (alone, decoder):
                torch.testing.assert_close(way.prompt(ids), expected, atol=1e-4, rtol=1e-4)
    assert seen == [(1, 99), *2 * [(1, 100)], *2 * [(2, 50)]]


def test_ranks_that_add_rows_while_they_multiply_run_long_prompts_in_pieces(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_prompt, "MOST_ROWS", STEP)
    monkeypatch.setattr(graph_prompt, "LONG_ROWS", 100)
    model = loaded(tiny, tmp_path)
    model.nstf_ranks = TwoRanks()
    weights = Decoder(model, Capture())._weights_a_layer
    with torch.no_grad():
        expected = model(input_ids=ids_of(120)).logits[:, -1]
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("modules"))
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: calls.append("tokens"))

    def ran(least: int, room: str | None) -> list[str]:
        monkeypatch.setattr(graph_decoder, "PIECES_FROM_ON_RANKS", least)
        monkeypatch.setattr(
            graph_decoder, "matrix_of", lambda m: replace(matrix_of(m), twins=lambda rows, dtype: room)
        )
        calls.clear()
        with torch.no_grad():
            found = Decoder(model, Capture()).prompt(ids_of(120))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        return list(calls)

    assert ran(weights // 2, "room") == ["tokens", "tokens"]
    assert ran(weights // 2 + 1, "room") == ["modules", "tokens"], "a rank has too little of a layer"
    assert ran(weights // 2, None) == ["modules", "tokens"], "sums are steps of their own"
    # One GPU leaves a prompt of half as many rows again whole; ranks have no room to add those.
    sizes: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: sizes.append(args[0].numel())
    )
    ran(weights // 2, "room")
    monkeypatch.setattr(graph_prompt, "LONG_ROWS", 10_000)
    with torch.no_grad():
        Decoder(model, Capture()).prompt(ids_of(STEP + 20))
    hook.remove()
    assert max(sizes) <= STEP


@pytest.mark.parametrize("name", sorted(MODELS))
def test_long_prompts_run_in_pieces(
    name: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_prompt, "MOST_ROWS", 32)
    monkeypatch.setattr(graph_prompt, "STEP", 16)
    monkeypatch.setattr(graph_decoder, "PIECES_FROM", 0)
    model, capture = loaded(tiny, tmp_path, name), Capture()
    decoder: Any = Decoder(model, capture)
    asked = [(1, 9), (3, 9), (4, 9), (1, 70), (2, 70)]
    with torch.no_grad():
        expected = [model(ids_of(count, batch)).logits[:, -1] for batch, count in asked]
        seen: list[tuple[int, ...]] = []
        decoder._embedding.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
        for (batch, count), logits in zip(asked, expected, strict=True):
            torch.testing.assert_close(decoder.prompt(ids_of(count, batch)), logits, atol=1e-4, rtol=1e-4)
        assert not capture.count
        # What follows goes on from keys and values of all pieces.
        ids, rest = ids_of(70, 2), {**GREEDY, "max_new_tokens": 12}
        found = list(decoder.generate(ids, 12))
        assert torch.equal(torch.tensor(found).T, by_transformers(model, ids, **rest)[:, 70:])
    if decoder.longest_prompt >= 80:
        # Half as much again stays whole; else as many sequences as there is room for, and pieces of longer ones.
        assert seen[:4] == [(1, 16), (3, 16), (2, 16), (2, 16)] and seen[4:7] == [(1, 32), (1, 32), (1, 16)]
    assert MOST_ROWS % STEP == 0
    assert graph_prompt.KEPT_GRAPHS * STEP >= MOST_ROWS, (
        "lengths of one sequence that take turns are all kept"
    )


def test_long_prompts_of_small_layers_stay_whole(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would take longer to start the pieces than a GPU to run them."""
    monkeypatch.setattr(graph_prompt, "MOST_ROWS", 64)
    model, seen = loaded(tiny, tmp_path), []
    decoder: Any = Decoder(model, Capture())
    weights = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    stored = sum(math.prod(m.shape) for m in model.model.layers[0].modules() if hasattr(m, "like"))
    assert decoder._weights_a_layer == weights + stored < graph_prompt.PIECES_FROM
    decoder._embedding.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    with torch.no_grad():
        decoder.prompt(ids_of(200))
    assert seen == [(1, 256)]


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
        expected, first = model(ids).logits[:, -1], decoder.prompt(ids).clone()
        torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-4)
        for _ in range(3):
            assert torch.equal(decoder.prompt(ids), first), "the same layers as before"
    assert len(tried) == 1 and "not permitted" in caplog.text


def test_a_prompt_whose_kernels_cannot_run_goes_through_modules(
    tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, asked = loaded(tiny, tmp_path), []
    decoder, ids = Decoder(model, Capture()), ids_of(30)

    def fails(*given: Any) -> torch.Tensor:
        asked.append(given)
        raise RuntimeError("failed to find a C compiler")

    prompts: Any = decoder._prompts
    prompts._own = fails
    with torch.no_grad(), caplog.at_level(logging.WARNING, "nstf"):
        for _ in range(3):
            torch.testing.assert_close(decoder.prompt(ids), model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)
        assert len(asked) == 1 and caplog.text.count("prompts go through transformers' modules") == 1
        prompts._longest, prompts._ranks = 64, TwoRanks()
        with pytest.raises(RuntimeError, match="C compiler"):  # the others wait for this one's sums
            decoder.prompt(ids_of(31, 2))


class TwoRanks:
    """In the place of this process's rank; the other one always can. events: what happened, in order."""

    size = 2

    def __init__(self, other: bool = True) -> None:
        self.other, self.is_alone = other, False
        self.events: list[str] = []

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.is_alone = True
        yield
        self.is_alone = False

    def all_can(self, ready: bool) -> bool:
        self.events.append(f"told {ready}")
        return ready and self.other

    def capture(self, failing: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Captures that are noted. failing: the one that fails."""

        def capture(step: Callable[[], None]) -> Callable[[], None]:
            kind = "alone" if self.is_alone else "together"
            self.events.append(kind)
            step()
            if kind == failing:
                raise RuntimeError(f"no memory {kind}")
            return step

        return capture


@pytest.mark.parametrize(
    ("other", "failing", "events", "warning"),
    [
        (True, "", ["alone", "told True", "together"], ""),
        (False, "", ["alone", "told True"], "another rank cannot"),
        (True, "alone", ["alone", "told False"], "no memory alone"),
    ],
)
def test_ranks_try_a_capture_alone_and_then_all_capture_or_none_does(
    other: bool,
    failing: str,
    events: list[str],
    warning: str,
    tiny: ModuleType,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, ranks = loaded(tiny, tmp_path), TwoRanks(other)
    model.nstf_ranks = ranks
    decoder: Any = Decoder(model, ranks.capture(failing))
    ids = ids_of(30)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "nstf"):
        for _ in range(4):
            torch.testing.assert_close(decoder.prompt(ids), model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)
    assert ranks.events == events
    assert warning in caplog.text and bool(caplog.text) == bool(warning)


def test_a_rank_that_fails_among_the_others_stops(tiny: ModuleType, tmp_path: Path) -> None:
    """Its sums so far have met those of the others: run again, the prompt would add to other ones."""
    model, ranks = loaded(tiny, tmp_path), TwoRanks()
    model.nstf_ranks = ranks
    decoder, ids = Decoder(model, ranks.capture("together")), ids_of(30)
    with torch.no_grad():
        decoder.prompt(ids)
        with pytest.raises(RuntimeError, match="no memory together"):
            decoder.prompt(ids)


def test_deterministic_prompts_run_as_they_are(tiny: ModuleType, tmp_path: Path) -> None:
    """Replayed and not replayed they could round differently."""
    model, capture = loaded(tiny, tmp_path), Capture()
    decoder, seen = Decoder(model, capture), []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            for _ in range(3):
                decoder.prompt(ids_of(30))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [(1, 30)] * 3 and not capture.count
