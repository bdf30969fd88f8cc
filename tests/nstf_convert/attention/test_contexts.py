"""Windows that choose and report: contiguous, within one document, and disjoint."""

from types import SimpleNamespace

import pytest
import torch

from nstf.errors import UsageError
from nstf_convert.pipeline.attention.contexts import contexts
from nstf_convert.pipeline.attention.retrieval import NAMES, haystack


class Words:
    """A tokenizer of numbers: each word is its own id."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[int(w) if w.isdigit() else 10**6 for w in text.split()])


def document(start: int, count: int) -> str:
    return " ".join(map(str, range(start, start + count)))


def is_run(ids: torch.Tensor) -> bool:
    return bool((ids.diff() == 1).all())


def test_windows_lie_within_documents_and_splits_share_no_token() -> None:
    first = "\n\n\n".join([document(0, 700), document(10_000, 900), document(20_000, 100)])
    found = contexts(Words(), {"a/one.txt": [first], "two": [document(50_000, 1500)]}, 512, 4096)
    assert found.length == 512 and found.note is None
    assert found.domains == {"choose": ("one.txt", "two"), "report": ("one.txt", "two")}
    windows = [*found.choose, *found.report]
    assert all(len(ids) == 512 and is_run(ids) for ids in windows)
    assert len(torch.cat(windows).unique()) == 4 * 512
    # Documents differ where a dataset has two; else stretches of its only one.
    assert {int(found.choose[0][0]), int(found.report[0][0])} == {0, 10_000}
    assert sorted((int(found.choose[1][0]), int(found.report[1][0]))) == [50_000, 50_512]


def test_the_longest_there_is_is_used_and_said(caplog: pytest.LogCaptureFixture) -> None:
    found = contexts(Words(), {"one": [document(0, 1400)]}, 1024, 4096)
    assert (found.length, found.wanted) == (640, 1024)
    assert (
        found.note == "no text has documents of 1024 tokens for both splits: contexts of 640 tokens are used"
    )
    assert found.note in caplog.text


def test_texts_of_their_own_report() -> None:
    found = contexts(
        Words(), {"one": [document(0, 600)]}, 512, 4096, report_sources={"other": [document(9000, 600)]}
    )
    assert int(found.choose[0][0]) == 0 and int(found.report[0][0]) == 9000
    assert found.domains == {"choose": ("one",), "report": ("other",)}


@pytest.mark.parametrize(
    ("words", "wanted", "limit", "message"),
    [
        (5000, 4096, 2048, "a context of 4096 tokens: the model has positions for 2048"),
        (5000, 128, 2048, "too short for a cache plan: ask for at least 256"),
        (300, 512, 2048, "one: its longest document has 300 tokens, too few"),
    ],
)
def test_what_cannot_be_is_refused(words: int, wanted: int, limit: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        contexts(Words(), {"one": [document(0, words)]}, wanted, limit)


def test_a_haystack_has_the_length_and_asks_for_each_needle() -> None:
    class Marked(Words):
        def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
            # Digits become one token each, words one token.
            ids = [
                int(c) if c.isdigit() else 500
                for w in text.split()
                for c in (w.strip(".?") if w[0].isdigit() else "x")
            ]
            return SimpleNamespace(input_ids=ids)

    filler = torch.full((2000,), 99)
    stack = haystack(Marked(), filler, 512, 3, seed=1)
    assert len(stack.ids) == 512 and len(stack.answers) == 3
    digits = [tuple(stack.ids[a:b].tolist()) for a, b in stack.answers]
    assert all(len(d) == 5 and max(d) < 10 for d in digits)
    text = stack.ids.tolist()
    for key in digits:
        places = [i for i in range(len(text)) if tuple(text[i : i + 5]) == key]
        assert len(places) == 2 and places[0] < stack.answers[0][0]
    assert torch.equal(haystack(Marked(), filler, 512, 3, seed=1).ids, stack.ids)
    with pytest.raises(ValueError, match=f"1 to {len(NAMES)} can be hidden"):
        haystack(Marked(), filler, 512, 11, seed=1)
    with pytest.raises(ValueError, match="do not make 5000 tokens"):
        haystack(Marked(), filler, 5000, 1, seed=1)
