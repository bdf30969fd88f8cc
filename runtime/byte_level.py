"""Byte-level BPE (Radford et al. 2019) for short ASCII prompts in Python, beside the `tokenizers` library.

The library takes 50 ms to read a vocabulary of 49,000 words, which is a third of the time to the first token of a model of
135 M parameters; Python's JSON reader and two dictionaries take 25. What is not certain to give the library's tokens is
left to it: other kinds of tokenizers, texts beyond ASCII, long ones, and such with special tokens inside.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise

from nstf.runtime.artifact.config import MAX_BYTES
from nstf.runtime.imports import uncollected
from nstf.runtime.tokenizer_growth import MOST, longest_token
from nstf.runtime.tokenizer_words import holds_too_many_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

# The library merges a long text several times faster, which makes up for reading the vocabulary; a long word here takes
# time by the square of its length.
MOST_CHARACTERS, MOST_IN_WORD = 4096, 128
# Tokens that a template puts around a text.
_MOST_AROUND = 1024

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The expressions by which texts are split into words, as tokenizer.json spells them.
_KNOWN = (_GPT2, _LLAMA3, _LLAMA3.replace("{1,3}", ""))
_WORD_MODEL = {"dropout": (None,), "continuing_subword_prefix": (None, ""), "end_of_word_suffix": (None, "")}


class ByteLevel:
    """A tokenizer that encodes some texts and decodes all tokens. special: the contents of its special tokens; added: id ->
    (content, whether it is special) of tokens beside the vocabulary's words or among them."""

    def __init__(self, stated: Mapping[str, Any]) -> None:
        """stated: the object of a tokenizer.json. Raises _Other for one that is left to the library."""
        model = stated["model"]
        if model["type"] != "BPE" or any(model.get(k) not in good for k, good in _WORD_MODEL.items()):
            raise _Other
        self._digits, self._words = _splits(stated["pre_tokenizer"])
        if stated["decoder"]["type"] != "ByteLevel":
            raise _Other
        self._normalizes = stated["normalizer"] is not None
        if self._normalizes and stated["normalizer"] != {"type": "NFC"}:  # ASCII stays as it is
            raise _Other
        self._before, self._after = _template(stated["post_processor"])
        self._vocab: dict[str, int] = model["vocab"]
        if not isinstance(self._vocab, dict) or not isinstance(model["merges"], list):
            raise _Other
        self._ignores_merges = bool(model.get("ignore_merges"))
        merges = model["merges"]
        self._in_pairs = bool(merges) and not isinstance(merges[0], str)
        keys = map(tuple, merges) if self._in_pairs else merges
        self._ranks: dict[Any, int] = dict(zip(keys, range(len(merges)), strict=True))
        self.added = _added(stated["added_tokens"], self._vocab, self._normalizes)
        self.special = frozenset(content for content, special in self.added.values() if special)
        self._names = list(self._vocab)
        self._inverse: dict[int, str] | None = None
        if longest_token(stated) > MOST // 2:
            raise _Other

    def encode(self, text: str) -> list[int] | None:
        """The tokens of a text, or None where the library has to look at it."""
        if not suits(text) or any(content in text for content, _ in self.added.values()):
            return None
        characters = _characters()
        ids = list(self._before)
        for part in self._digits.split(text) if self._digits else (text,):
            for word in self._words.findall(part):
                found = self._word([characters[ord(c)] for c in word]) if len(word) <= MOST_IN_WORD else None
                if found is None:
                    return None
                ids += found
        return [*ids, *self._after]

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        names = (self._name(token) for token in tokens)
        kept = (n for n in names if n is not None and not (skip_special_tokens and n in self.special))
        return b"".join(map(_bytes, kept)).decode("utf-8", "replace")

    def _word(self, parts: list[str]) -> list[int] | None:
        """A word's tokens: of neighbours, those with the first of all merges become one, again and again."""
        vocab, ranks = self._vocab, self._ranks
        whole = "".join(parts)
        if self._ignores_merges and whole in vocab:
            parts = [whole]
        never = len(ranks)
        while len(parts) > 1:
            pairs = pairwise(parts)
            found = [ranks.get(p if self._in_pairs else f"{p[0]} {p[1]}", never) for p in pairs]
            first = min(found)
            if first == never:
                break
            at = found.index(first)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids = [vocab.get(part) for part in parts]
        # Bytes and merged words that the vocabulary lacks: the library knows what becomes of them.
        return ids if all(map(_is_number, ids)) else None  # type: ignore[return-value]

    def _name(self, token: int) -> str | None:
        if token in self.added:
            return self.added[token][0]
        # Files list words in the order of their numbers.
        if 0 <= token < len(self._names) and self._vocab[self._names[token]] == token:
            return self._names[token]
        if self._inverse is None:
            self._inverse = {number: name for name, number in self._vocab.items()}
        return self._inverse.get(token)


def _is_number(token: Any) -> bool:
    """Of a token, as the library and the engine count them."""
    return type(token) is int and 0 <= token < 1 << 31


class _Other(Exception):
    """A tokenizer that is left to the library."""


def suits(text: str) -> bool:
    """Whether a text may be encoded here, whatever the tokenizer."""
    return text.isascii() and len(text) <= MOST_CHARACTERS


def read(content: bytes) -> ByteLevel | None:
    """The tokenizer of a tokenizer.json, or None where the library has to: it says what is wrong with a broken one."""
    if len(content) > MAX_BYTES or holds_too_many_values(content):
        return None
    try:
        with uncollected():
            return ByteLevel(json.loads(content.decode("utf-8")))
    except (_Other, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None


def _splits(stated: Mapping[str, Any]) -> tuple[re.Pattern[str] | None, re.Pattern[str]]:
    """(what is cut out before, the words of what lies between). Raises _Other."""
    steps = stated["pretokenizers"] if stated["type"] == "Sequence" else [stated]
    last, digits, expression = steps[-1], None, _GPT2
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(steps) > 2:
        raise _Other
    uses = last.get("use_regex", True)
    if len(steps) == 2:
        first = steps[0]
        if first["type"] == "Digits" and uses:
            digits = re.compile("([0-9])" if first["individual_digits"] else "([0-9]+)")
        elif (
            first["type"] == "Split" and not uses and not first["invert"] and first["behavior"] == "Isolated"
        ):
            expression = first["pattern"]["Regex"]
        else:
            raise _Other
    elif not uses:
        raise _Other
    if expression not in _KNOWN:
        raise _Other
    for known, plain in ((r"\s\p{L}\p{N}", r"\sA-Za-z0-9"), (r"\n\p{L}\p{N}", r"\nA-Za-z0-9")):
        expression = expression.replace(known, plain)
    for known, plain in ((r"\p{L}", "[A-Za-z]"), (r"\p{N}", "[0-9]")):
        expression = expression.replace(known, plain)
    return digits, re.compile(expression, re.ASCII)


def _template(stated: Mapping[str, Any] | None) -> tuple[list[int], list[int]]:
    """The tokens before and after those of a text. Raises _Other."""
    if stated is None:
        return [], []
    steps = stated["processors"] if stated["type"] == "Sequence" else [stated]
    before: list[int] = []
    after: list[int] = []
    templates = [step for step in steps if step["type"] != "ByteLevel"]  # that changes offsets alone
    if not templates:
        return before, after
    if len(templates) > 1 or templates[0]["type"] != "TemplateProcessing":
        raise _Other
    seen = 0
    for piece in templates[0]["single"]:
        if "Sequence" in piece:
            seen += 1
            if piece["Sequence"]["id"] != "A":
                raise _Other
        else:
            ids: Sequence[int] = templates[0]["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
            (after if seen else before).extend(ids)
        if len(before) + len(after) > _MOST_AROUND:
            raise _Other
    if seen != 1 or not all(map(_is_number, (*before, *after))):
        raise _Other
    return before, after


def _added(
    stated: Sequence[Mapping[str, Any]], vocab: Mapping[str, int], normalizes: bool
) -> dict[int, tuple[str, bool]]:
    """Id -> (content, whether it is special). Raises _Other where the library would give other ids than the file states."""
    found: dict[int, tuple[str, bool]] = {}
    following = len(vocab)
    for token in stated:
        content, number = token["content"], token["id"]
        if content in vocab:
            expected = vocab[content]
        else:
            expected, following = following, following + 1
        if type(number) is not int or number != expected or number in found or not content:
            raise _Other
        if normalizes and token["normalized"] and not content.isascii():
            raise _Other
        found[number] = content, bool(token["special"])
    return found


def _bytes(name: str) -> bytes:
    """The bytes that a token's characters stand for; those of the text itself where one stands for none."""
    known = _byte_of()
    try:
        return bytes([known[c] for c in name])
    except KeyError:
        return name.encode("utf-8")


_TABLE: list[str] = []
_BYTES: dict[str, int] = {}


def _characters() -> list[str]:
    """The character that stands for each byte: itself where it can be seen in Latin 1, else one from U+0100 on."""
    if not _TABLE:
        seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
        following = iter(range(256, 512))
        _TABLE.extend(chr(b) if b in seen else chr(next(following)) for b in range(256))
    return _TABLE


def _byte_of() -> dict[str, int]:
    if not _BYTES:
        _BYTES.update((c, byte) for byte, c in enumerate(_characters()))
    return _BYTES
