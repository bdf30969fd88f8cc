"""Continuous batching: an answer is the one it would be alone, whoever joins and leaves."""

import random
import threading
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nstf.integrations.serve.errors import ApiError
from nstf.integrations.serve.metrics import Metrics
from nstf.integrations.serve.output import Answer, Piece
from nstf.integrations.serve.scheduler import Scheduler
from nstf.runtime.engine import Engine
from nstf.runtime.engine_batch import Batch, Part
from nstf.runtime.token_sampler import Settings
from tests.integrations.serve.conftest import until


@pytest.fixture(scope="module")
def tokenizer(artifact: Path) -> Any:
    from tokenizers import Tokenizer

    from nstf.runtime.artifact import open_artifact

    with open_artifact(artifact) as opened:
        return Tokenizer.from_buffer(opened.file("tokenizer.json"))


@pytest.fixture
def schedulers(artifact: Path) -> Iterator[Any]:
    made = []

    def make(parallel: int = 4, queue: int = 100, **options: Any) -> Scheduler:
        batch = Batch(Engine.open(artifact), parallel, options.get("reproducible", False))
        made.append(Scheduler("engine", batch, parallel, queue, Metrics(), **options))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


class Reader:
    """An answer and what came of it."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: list[int],
        most: int,
        settings: Settings | None = None,
        stops: tuple[str, ...] = (),
    ) -> None:
        self.pieces: list[Piece] = []
        self.ended = threading.Event()
        self.answer = Answer(
            prompt, most, settings or Settings(), frozenset({0}), stops, tokenizer, self.emit
        )

    def emit(self, piece: Piece) -> None:
        self.pieces.append(piece)
        if piece.reason is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        assert self.ended.wait(60)
        return self.answer.tokens


def prompts(count: int) -> list[list[int]]:
    drawn = random.Random(0)
    return [[drawn.randrange(1, 1000) for _ in range(drawn.choice((1, 5, 40, 150)))] for _ in range(count)]


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_an_answer_is_the_same_alone_and_among_others(
    schedulers: Any, tokenizer: Any, prefix_reuse: bool
) -> None:
    settings = [Settings(), Settings(repetition_penalty=1.2), Settings(1.0, 50, 0.9, seed=5)]
    alone = schedulers(1, reproducible=True, prefix_reuse=False)
    expected = []
    for i, prompt in enumerate(prompts(12)):
        reader = Reader(tokenizer, prompt, 5 + 7 * (i % 4), settings[i % 3])
        alone.submit(reader.answer)
        expected.append(reader.tokens)
    together = schedulers(4, reproducible=True, prefix_reuse=prefix_reuse)
    for _ in range(2):  # the second time with caches of the first
        readers = [Reader(tokenizer, p, 5 + 7 * (i % 4), settings[i % 3]) for i, p in enumerate(prompts(12))]
        leaving = [Reader(tokenizer, p, 200) for p in prompts(3)]
        for i, reader in enumerate(readers):
            together.submit(reader.answer)
            if i % 4 == 0:
                together.submit(leaving[i // 4].answer)
        for reader in leaving:
            until(lambda r=reader: len(r.answer.tokens) > 2 or r.answer.finished)  # type: ignore[misc]
            together.cancel(reader.answer)
        assert [r.tokens for r in readers] == expected
        for reader in readers:
            text = "".join(p.text for p in reader.pieces)
            ended = reader.tokens[:-1] if reader.tokens[-1] == 0 else reader.tokens
            joined = tokenizer.decode([*reader.answer.prompt[-8:], *ended])
            assert joined.endswith(text)
    until(lambda: together._metrics.gauges["running"]() == 0)


def test_greedy_answers_among_others_are_those_of_the_engine(
    schedulers: Any, tokenizer: Any, artifact: Path
) -> None:
    # The usual way: kernels for one and for several rows round differently, and these answers are not near ties.
    engine = Engine.open(artifact)
    texts = ["The king", "My lord, I have", "Enter two", "What say you to"]
    ids = [tokenizer.encode(t).ids for t in texts]
    expected = [list(engine.generate(i, 12, frozenset({0}))) for i in ids]
    scheduler = schedulers(4)
    readers = [Reader(tokenizer, i, 12) for i in ids]
    for reader in readers:
        scheduler.submit(reader.answer)
    same = [r.tokens == e for r, e in zip(readers, expected, strict=True)]
    assert sum(same) >= 3


def test_a_common_beginning_is_computed_once(schedulers: Any, tokenizer: Any) -> None:
    scheduler = schedulers(2)
    start = prompts(20)[3] * 3
    start = (start * 100)[:100]
    first = Reader(tokenizer, [*start, 5, 6], 4)
    scheduler.submit(first.answer)
    assert first.tokens and first.answer.cached == 0
    again = Reader(tokenizer, [*start, 5, 6], 4)
    scheduler.submit(again.answer)
    assert again.tokens == first.tokens and again.answer.cached == 101
    # A conversation that goes on: the answer's own tokens are there too.
    longer = Reader(tokenizer, [*start, 5, 6, *first.tokens, 7], 4)
    scheduler.submit(longer.answer)
    assert longer.tokens and longer.answer.cached == 102 + len(first.tokens) - 1
    # While that slot is busy another one takes a copy.
    busy = Reader(tokenizer, [*start, 9], 100)
    scheduler.submit(busy.answer)
    until(lambda: len(busy.answer.tokens) > 1 or busy.answer.finished)
    copied = Reader(tokenizer, [*start, 8], 4)
    scheduler.submit(copied.answer)
    assert copied.tokens and copied.answer.cached == 100


def test_stop_strings_end_an_answer_and_free_its_slot(schedulers: Any, tokenizer: Any) -> None:
    scheduler = schedulers(1)
    plain = Reader(tokenizer, tokenizer.encode("The king").ids, 30)
    scheduler.submit(plain.answer)
    assert plain.tokens
    text = "".join(p.text for p in plain.pieces)
    middle = text[4:7]
    cut = Reader(tokenizer, tokenizer.encode("The king").ids, 30, stops=(middle,))
    scheduler.submit(cut.answer)
    assert len(cut.tokens) < 30
    assert "".join(p.text for p in cut.pieces) == text[: text.index(middle)]
    assert cut.pieces[-1].reason == "stop"


def test_no_more_than_the_queue_takes_is_accepted(schedulers: Any, tokenizer: Any) -> None:
    scheduler = schedulers(1, queue=1)
    before = scheduler._batch.step
    gate = threading.Event()

    def step(parts: Any) -> list[int]:
        gate.wait(60)
        found: list[int] = before(parts)
        return found

    scheduler._batch.step = step
    readers = [Reader(tokenizer, [5], 2) for _ in range(3)]
    scheduler.submit(readers[0].answer)
    until(lambda: scheduler._metrics.gauges["running"]() == 1)
    scheduler.submit(readers[1].answer)
    with pytest.raises(ApiError, match="busy") as caught:
        scheduler.submit(readers[2].answer)
    assert caught.value.status == 429
    gate.set()
    assert readers[0].tokens and readers[1].tokens


def test_two_conversations_with_the_same_beginning_keep_their_own_places(
    schedulers: Any, tokenizer: Any
) -> None:
    scheduler = schedulers(4)
    system = (prompts(20)[3] * 100)[:30]
    one, other = [*system, *range(1, 101)], [*system, *range(200, 300)]
    for prompt, cached in ((one, 0), (other, 30), ([*one, 7], 130), ([*other, 7], 130)):
        reader = Reader(tokenizer, prompt, 2)
        scheduler.submit(reader.answer)
        assert reader.tokens and reader.answer.cached >= cached
        until(lambda: all(s.answer is None for s in scheduler._slots))


def test_without_memory_for_it_one_answer_ends_and_the_others_go_on(schedulers: Any, tokenizer: Any) -> None:
    scheduler = schedulers(2)

    def reserve(sequence: int, positions: int) -> None:
        if positions > 40:
            raise MemoryError("no memory for keys and values")

    scheduler._batch.reserve = reserve
    small, long, grows = (
        Reader(tokenizer, [5] * 8, 20),
        Reader(tokenizer, [6] * 60, 2),
        Reader(tokenizer, [7] * 30, 60),
    )
    for reader in (small, grows, long):
        scheduler.submit(reader.answer)
    assert len(small.tokens) == 20 and small.pieces[-1].reason == "length"
    assert not long.tokens and "no memory" in long.pieces[-1].text and long.pieces[-1].reason == "error"
    assert len(grows.tokens) == 11 and grows.pieces[-1].reason == "error"
    again = Reader(tokenizer, [5] * 8, 3)
    scheduler.submit(again.answer)
    assert again.tokens == small.tokens[:3]


class Recorded:
    """Steps of no model: the parts of each, and logits whose likeliest token is 1."""

    context, vocab, together, beside, cache_bytes = 4096, 8, 128, 32, 0

    def __init__(self, sparse_from: int | None) -> None:
        self.sparse_from = sparse_from
        self.steps: list[list[Part]] = []
        self.held = threading.Event()
        self._logits = array("f", [0, 1, *[0] * 6])

    def reserve(self, sequence: int, positions: int) -> None: ...
    def release(self, sequence: int) -> None: ...
    def copy(self, source: int, target: int, positions: int) -> None: ...
    def resumable(self, sequence: int, positions: int) -> int:
        return 0

    def step(self, parts: Sequence[Part]) -> list[int]:
        self.held.wait(0 if len(self.steps) else 10)
        self.steps.append(list(parts))
        return [self._logits.buffer_info()[0]] * sum(p.wanted for p in parts)


def test_a_whole_block_of_a_prompt_takes_a_step_of_its_own_beside_answers(tokenizer: Any) -> None:
    batch = Recorded(sparse_from=128)
    scheduler = Scheduler("none", batch, 2, 10, Metrics())
    try:
        first, second = Reader(tokenizer, [3], 60), Reader(tokenizer, [3] * 300, 2)
        scheduler.submit(first.answer)
        scheduler.submit(second.answer)
        batch.held.set()
        assert first.ended.wait(20) and second.ended.wait(20)
    finally:
        scheduler.close()
    assert all(sum(len(p.ids) for p in parts) <= 128 for parts in batch.steps)
    pieces = [(n, p) for n, parts in enumerate(batch.steps) for p in parts if p.prompt and p.sequence == 1]
    assert [p.first for _, p in pieces if len(p.ids) == 128] == [128]
    assert sum(len(p.ids) for _, p in pieces) == 300
    assert all(len(p.ids) <= 32 or p.first == 128 for _, p in pieces if p.first)
    number = next(n for n, p in pieces if p.first == 128)
    assert len(batch.steps[number]) == 1
    # The other answer goes on: as many steps as pieces of 32 would have taken, and one more.
    assert [len(parts) for parts in batch.steps[number - 3 : number]] == [1, 1, 1]
    assert all(parts[0].sequence == 0 for n, parts in enumerate(batch.steps) if n != number and n < 20)


def test_infinities_among_the_logits_are_no_logprobs() -> None:
    """JSON holds neither NaN nor infinities: one ended an answer with a 500, or stood in its stream."""
    from array import array

    from nstf.errors import NstfError
    from nstf.integrations.serve.scheduler import _score

    never = _score(array("f", [1.0, float("-inf"), 0.0]), 0, 3)
    assert [token for token, _ in never.top] == [0, 2, 1] and never.top[2][1] == -9999.0
    assert _score(array("f", [1.0, float("-inf")]), 1, 0).logprob == -9999.0
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(NstfError, match="no numbers"):
            _score(array("f", [1.0, wrong, 0.0]), 0, 2)
