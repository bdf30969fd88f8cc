"""The choice of the next token on the CPU, without torch: what transformers' logits processors do, in their order.

Repetition penalty, temperature, top-k, top-p, min-p; then a draw by the sampler's own generator, or the likeliest token.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence

from nstf.errors import UsageError
from nstf.kernels.cpu import AVAILABLE, ext
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def available() -> bool:
    """Whether tokens can be chosen here: the compiled extension was built."""
    return AVAILABLE


@frozen
class Settings:
    """temperature: 0 takes the likeliest token. top_k: 0 for all. top_p: the likeliest tokens that have this share together.
    min_p: tokens with at least this share of the likeliest one's. repetition_penalty: logits of tokens that occurred in
    prompt or text are divided by it where positive, multiplied where negative. seed: None for another one each time.

    Raises UsageError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        # Penalties beyond would make infinities of scores in float32; files state others (artifact/generation.py).
        limits = {
            "temperature": (self.temperature, 0 <= self.temperature <= 100, "0 to 100"),
            "top_k": (self.top_k, 0 <= self.top_k < 1 << 31, "0 (all tokens) to 2147483647"),
            "top_p": (self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            "repetition_penalty": (self.repetition_penalty, 1e-6 <= self.repetition_penalty <= 1e6, "0.000001 to 1000000"),
        }  # fmt: skip
        for name, (value, good, range_) in limits.items():
            if not (good and math.isfinite(value)):
                raise UsageError(f"{name} is {value}; it must be {range_}")
        # A temperature near 0 would make infinities of logits in float32.
        if 0 < self.temperature < 1e-4:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def plain(self) -> bool:
        """Whether it is the likeliest token of the logits as they are."""
        return self.temperature == 0 and self.repetition_penalty == 1


class TokenSampler:
    """Chooses the tokens of one sequence, one after the other."""

    def __init__(self, settings: Settings, prompt: Sequence[int] = ()) -> None:
        """prompt: tokens before the text, which the repetition penalty counts."""
        import random

        self.settings = settings
        self._random = random.Random(settings.seed)
        self._known = set(prompt) if settings.repetition_penalty != 1 else set()
        self._seen = array("q", sorted(self._known))

    def scores(self, address: int, vocab: int, allowed: int = 0) -> None:
        """Logits, float32 [vocab] at an address, become scores in place: minus infinity for what is not to be drawn.

        allowed: the address of a bit for each token, 0 for all.
        """
        s = self.settings
        seen = self._seen
        greedy = s.temperature == 0
        ext.filter_scores(
            address,
            vocab,
            1.0 if greedy else s.temperature,
            0 if greedy else s.top_k,
            1.0 if greedy else s.top_p,
            0.0 if greedy else s.min_p,
            s.repetition_penalty,
            seen.buffer_info()[0] if seen else 0,
            len(seen),
            allowed,
        )

    def choose(self, address: int, vocab: int, allowed: int = 0) -> int:
        """The next token from logits, float32 [vocab] at an address, which it changes."""
        if not self.settings.plain or allowed:
            self.scores(address, vocab, allowed)
        if self.settings.temperature == 0:
            token = ext.best_token(address, vocab)
        else:
            token = ext.draw_token(address, vocab, self._random.random())
            if token < 0:  # nothing but infinities and NaN
                token = ext.best_token(address, vocab)
        if self.settings.repetition_penalty != 1 and token not in self._known:
            self._known.add(token)
            self._seen.append(token)
        return token


# The settings of a generation_config.json that say what a text must not contain, or seldom.
WORDING = (
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "no_repeat_ngram_size",
)


@frozen
class Wording:
    """What a file lets no text contain, as transformers' processors of WORDING have it.

    never: tokens; not_first: tokens that no answer begins with; biases: (tokens, what is added to the score of the last one
    where a text ends with the others); banned: such tokens that never follow; ngram: so many tokens occur once, 0 for off.
    """

    never: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    biases: tuple[tuple[tuple[int, ...], float], ...] = ()
    ngram: int = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any], vocab: int) -> Wording:
        """settings: as `check_generation` gives them. What lies beyond the vocabulary says nothing."""

        def known(tokens: Sequence[int]) -> bool:
            return all(0 <= t < vocab for t in tokens)

        never, first = (tuple(t for t in settings.get(key, ()) if known([t])) for key in WORDING[:2])
        return cls(
            never, first,
            tuple(tuple(word) for word in settings.get("bad_words_ids", ()) if known(word)),
            tuple({tuple(word): bias for word, bias in settings.get("sequence_bias", ()) if known(word)}.items()),
            settings.get("no_repeat_ngram_size", 0),
        )  # fmt: skip

    def change(self, address: int, prompt: Sequence[int], text: Sequence[int], ends: Collection[int]) -> None:
        """Logits, float32 at an address, in place, for what comes after prompt and text. ends: tokens that
        are no bad words."""
        from ctypes import c_float  # here: a greedy text needs none of it, and the import takes a millisecond

        score = c_float.from_address
        longest = max(map(len, (*self.banned, *(word for word, _ in self.biases))), default=0)
        tail = (*prompt[-longest:], *text[-longest:]) if longest else ()

        def follows(word: tuple[int, ...]) -> bool:
            before = word[:-1]
            return len(before) < len(tail) and tail[len(tail) - len(before) :] == before

        for word, bias in self.biases:
            if follows(word):
                score(address + 4 * word[-1]).value += bias
        out = {*self.never, *(() if text else self.not_first)}
        out.update(w[-1] for w in self.banned if follows(w) and not (len(w) == 1 and w[0] in ends))
        if self.ngram:
            known, n = [*prompt, *text], self.ngram
            last = known[max(0, len(known) - n + 1) :]
            out.update(known[i + n - 1] for i in range(len(known) - n + 1) if known[i : i + n - 1] == last)
        for token in out:
            score(address + 4 * token).value = -math.inf

    def __bool__(self) -> bool:
        return any((self.never, self.not_first, self.banned, self.biases, self.ngram))


def log_shares(address: int, vocab: int, count: int, token: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens and then `token`, each with the logarithm of its probability by logits at an address."""
    return ext.likeliest_tokens(address, vocab, count, token)
