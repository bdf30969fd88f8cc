"""Text up to a stop string, however it is cut into pieces."""

from collections.abc import Iterator

import pytest

from nstf.runtime.stops import StopText, until_stop


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stops", "expected"),
    [((), "abababc, end"), (("abc",), "abab"), (("c,", "b, "), "ababab"), (("nd", "end"), "abababc, "),
     (("zz",), "abababc, end")],
)  # fmt: skip
def test_the_text_ends_before_the_first_stop(size: int, stops: tuple[str, ...], expected: str) -> None:
    text = "abababc, end"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert "".join(until_stop(pieces, stops)) == expected


def test_what_may_begin_a_stop_is_held_back() -> None:
    cut = StopText(("###",))
    assert [cut.feed(p) for p in ("a#", "#", "b##")] == ["a", "", "##b"]
    assert (cut.rest(), cut.ended) == ("##", False)


def test_the_source_is_closed_at_a_stop() -> None:
    closed = []

    def source() -> Iterator[str]:
        try:
            yield from ("one ", "two ", "three")
        finally:
            closed.append(True)

    pieces = source()
    assert "".join(until_stop(pieces, ("tw",))) == "one "
    assert closed == [True]


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopText(("",))
