"""Output that follows a JSON schema, by llguidance: before each token the ones that can go on."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from threading import Lock
from typing import Any

from nstf.errors import NstfError
from nstf.integrations.serve.errors import ApiError, wrong
from nstf.integrations.serve.finite import (
    can_end,
    choices_of,
    common_multiple,
    parts_of,
    patterns_of,
    stray_reference,
    text_bytes,
)
from nstf.runtime.memory_limit import has_room
from nstf.runtime.tokenizing import foreign_errors

Make = Callable[[], "Grammar"]

# Names and entries of a schema, plain values of `enum` apart. llguidance's time to read one grows with their square.
MOST_NAMES = 4096
# Plain values of all `enum` together: 16,000 took up to 20 MiB and 0.2 s to read, 1.9 million 1 GiB and 4 s.
MOST_CHOICES = 1 << 14
# Bytes of names, texts and numbers, those of `enum` too: each takes 400 bytes of memory.
MOST_TEXT = 1 << 16
# What llguidance may spend on the parts of a pattern (a million by itself): those that are repeated a million times took
# 250 MiB an answer. 300 properties, 350 texts of stated formats or 5,000 of an `enum` need less than this.
PATTERN_FUEL = 200_000
# States of a lexer, at 1 to 2 KB each; a quarter of a million by itself.
MOST_STATES = 30_000
# `multipleOf` takes 400 bytes for each number below it before any of these limits counts: 999,983 took 12 s and 370 MiB.
# Where parts are joined it is their common multiple.
MOST_MULTIPLE = 25_000
# Regular expressions that one text may have to follow together: llguidance takes 1.5 KB for each set of them, 6 MiB for
# twelve, 103 for sixteen, 6 GiB for thirty.
MOST_JOINED = 12
# Those by which properties are named: each two are looked at together, and 676 were not in two minutes.
MOST_NAMED = 64
# Address space that must be free: llguidance, in Rust, ends the process where it finds none. To read a schema took up to
# 60 MiB, a token of an answer up to 2.
READ_BYTES = 128 << 20
TOKEN_BYTES = 64 << 20
# What is made of a tokenizer took 28 times the bytes of its JSON (128,000 tokens), 15 MiB of one with 1,000 tokens, and 115
# times the bytes of 60,000 long tokens that begin unlike each other.
TOKENIZER_TIMES, WORD_TIMES, TOKENIZER_BYTES = 30, 128, 32 << 20


class TooComplex(NstfError):
    """A schema went beyond what the library follows in the middle of an answer: the request's fault, not the server's."""


class Grammar:
    """The state of one answer. allowed: the address of a bit for each token. take: moves on. done: nothing may follow.

    allowed raises MemoryError where there is little memory left, take TooComplex.
    """

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._bits = array("I", bytes(4 * ((vocab + 31) // 32)))

    @property
    def done(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allowed(self) -> int:
        _need(TOKEN_BYTES)
        self._matcher.unsafe_compute_mask_ptr(self._bits.buffer_info()[0], 4 * len(self._bits))
        return self._bits.buffer_info()[0]

    @property
    def satisfiable(self) -> bool:
        """Whether a first token is found. That {"$ref": "#"} has no text shows here, not when the schema is read."""
        self.allowed()
        return not self._matcher.is_error()

    def check_next(self) -> None:
        """Raises TooComplex where not even what follows a first token is found: a thousand names are as many choices."""
        self.allowed()
        first = next((32 * i + (w & -w).bit_length() - 1 for i, w in enumerate(self._bits) if w), None)
        if first is not None:
            ahead = Grammar(self._matcher.deep_copy(), 32 * len(self._bits))
            ahead.take(first)
            if not ahead.done:
                ahead.allowed()
                ahead._check()

    def take(self, token: int) -> None:
        self._check(self._matcher.consume_token(token))

    def _check(self, good: bool = True) -> None:
        if not good or self._matcher.is_error():
            reason = " ".join(str(self._matcher.get_error()).partition("<state>")[0].split())[:200]
            raise TooComplex(f"the JSON schema is too complex for an answer to follow it ({reason})")


class Grammars:
    """Makes grammars for one tokenizer. Raises ApiError where the library is missing or a schema is not understood,
    MemoryError where there is too little memory to read one."""

    def __init__(self, tokenizer_json: str, vocab: int, ends: list[int], word_bytes: int = 0) -> None:
        """word_bytes: of all tokens together."""
        self._stated = (tokenizer_json, vocab, ends)
        self._word_bytes = word_bytes
        self._tokenizer: Any = None
        self._lock = Lock()

    def _ready(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            _need(READ_BYTES)  # a library that does not fit into memory is no missing one
            raise ApiError(
                501,
                "this server has no llguidance, which response_format needs; install nstf's extra `serve`",
                "response_format",
            ) from error
        if self._tokenizer is None:
            text, vocab, ends = self._stated
            if not ends:
                raise wrong(
                    "response_format", "this model has no token that ends a text, which response_format needs"
                )
            own = TOKENIZER_TIMES * len(text.encode()) + WORD_TIMES * self._word_bytes
            _need(READ_BYTES + TOKENIZER_BYTES + own)
            try:
                with foreign_errors("response_format cannot be had with this model's tokenizer"):
                    self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab, eos_token=ends)
            except NstfError as error:
                raise wrong("response_format", str(error)) from error
        return llguidance

    def of(self, schema: Any) -> Grammar:
        """Of a JSON schema as parsed JSON; True for any object. One is read at a time: what each takes is free before."""
        with self._lock:
            _need(READ_BYTES)
            return self._read(schema)

    def _read(self, schema: Any) -> Grammar:
        library = self._ready()
        stated = {"type": "object"} if schema is True else schema
        if (parts := parts_of(stated)) > MOST_NAMES:
            raise wrong(
                "response_format",
                f"the JSON schema has {parts} names and entries; at most {MOST_NAMES} are accepted",
            )
        if (choices := choices_of(stated)) > MOST_CHOICES:
            raise wrong(
                "response_format",
                f"the JSON schema has {choices} values in `enum`; at most {MOST_CHOICES} are accepted",
            )
        if (size := text_bytes(stated)) > MOST_TEXT:
            raise wrong(
                "response_format",
                f"the JSON schema has {size} bytes of names, texts and numbers; at most {MOST_TEXT} are accepted",
            )
        if (reference := stray_reference(stated)) is not None:
            raise wrong(
                "response_format",
                f"the JSON schema's $ref {reference[:80]!r} leads to no rule of this schema; write '#/$defs/NAME'",
            )
        named, joined = patterns_of(stated)
        if named > MOST_NAMED:
            raise wrong(
                "response_format",
                f"the JSON schema has {named} names in patternProperties; at most {MOST_NAMED} are accepted",
            )
        if joined > MOST_JOINED:
            raise wrong(
                "response_format",
                f"the JSON schema has {joined} patterns in parts that are joined (allOf; $ref, anyOf, oneOf beside others); "
                f"at most {MOST_JOINED} are accepted",
            )
        if common_multiple(stated, MOST_MULTIPLE) > MOST_MULTIPLE:
            raise wrong(
                "response_format",
                f"the JSON schema's multipleOf have a common multiple above {MOST_MULTIPLE}, which takes too much memory",
            )
        if not can_end(stated):
            raise wrong(
                "response_format",
                "no text fits the JSON schema: what it requires requires itself, without end; make a part of that optional",
            )
        try:
            # Whitespace without end is what a small model likes best inside JSON.
            grammar = library.LLMatcher.grammar_from_json_schema(
                json.dumps(stated), overrides={"whitespace_flexible": False}
            )
            limits = library.LLParserLimits(initial_lexer_fuel=PATTERN_FUEL, max_lexer_states=MOST_STATES)
            reason = library.LLMatcher.validate_grammar(grammar, self._tokenizer, limits=limits)
        except ValueError as error:
            reason = str(error)
        if reason:
            raise wrong(
                "response_format", f"the JSON schema is not supported: {' '.join(reason.split())[:300]}"
            )
        made = Grammar(
            library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits), self._stated[1]
        )
        if not made.satisfiable:
            raise wrong("response_format", "no text fits the JSON schema: does it refer to itself alone?")
        try:
            made.check_next()
        except TooComplex as error:
            raise wrong("response_format", str(error)) from error
        return made


def _need(size: int) -> None:
    """Raises MemoryError where so many bytes of address space cannot be had."""
    if not has_room(size):
        raise MemoryError(f"less than {size >> 20} MiB of memory are left, which a JSON schema needs")
