"""Text in pieces up to the first of some stop strings, whichever tokens they are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class StopText:
    """Holds back what may be the beginning of a stop string; `ended`: one came, which is not given out."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Empty strings are no stops: raises ValueError."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""
        self.ended = False

    def feed(self, text: str) -> str:
        """What is certain now, of this text and of what was held back before."""
        if self.ended:
            return ""
        self._held += text
        at = min((i for i in map(self._held.find, self._stops) if i >= 0), default=-1)
        self.ended = at >= 0
        certain = at if self.ended else len(self._held) - self._doubtful()
        out, self._held = self._held[:certain], "" if self.ended else self._held[certain:]
        return out

    def rest(self) -> str:
        """What is held back, when no more text comes."""
        out, self._held = self._held, ""
        return out

    def _doubtful(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def until_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """The pieces up to the first stop string; what makes them is closed then."""
    cut = StopText(stops)
    for piece in pieces:
        if text := cut.feed(piece):
            yield text
        if cut.ended:
            getattr(pieces, "close", lambda: None)()
            return
    if text := cut.rest():
        yield text
