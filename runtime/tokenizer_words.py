"""Words and numbers in a tokenizer's files whose cost is out of proportion: a few kilobytes, packed, that take gigabytes."""

from __future__ import annotations

import math
import re

from nstf.errors import UnsupportedError
from nstf.runtime.artifact.header import HeaderError, check_values, corrupt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ADDED = "added_tokens.json"
# Values of a JSON file of words and merges, whatever its length: the largest known (514,000 merges of three marks, 256,000
# words) has two millions. Each may take a hundred bytes of memory.
MOST_VALUES = 1 << 22
# Bytes of a word in files from which transformers works merges out, by the square of them.
MOST_WORD = 4096
# Lines of a list of words or merges: the longest known has half as many.
MOST_LINES = 1 << 20
# Letters of all tokens together that settings add: each takes 232 bytes in tokenizers of Python.
MOST_LETTERS_ADDED = 1 << 20
# The highest number of such a token, below which some tokenizers fill every place; and tokens that are made for a number (of
# T5, ByT5 and Pegasus).
MOST_NUMBER = 1 << 19
MOST_MADE = 1 << 14
_MADE = ("extra_ids", "offset")
# Elements of a table that makes a spectrum of sound: bands by frequencies. Known ones have 65,000.
MOST_TABLE = 1 << 22
_OF_TABLE = (
    "feature_size",
    "fft_length",
    "fft_window_size",
    "n_fft",
    "num_mel_bins",
    "num_mel_filters",
    "win_length",
)
_TEXT = bytes(range(32, 127)) + b"\t\n\r"  # what lists of words in base64 are made of
_SPECIAL = ("additional_special_tokens", "extra_special_tokens")


def check_vocabulary_values(content: bytes, name: str, where: object) -> None:
    """Raises CorruptError for a tokenizer's JSON file of so many values that they take far more memory than it does."""
    try:
        check_values(content, "the text", MOST_VALUES)
    except HeaderError as error:
        raise corrupt(where, f"its {name}: {error}") from error


def check_words(name: str, content: bytes, where: object) -> None:
    """Raises UnsupportedError for a word of more than MOST_WORD bytes in a file of words, JSON or sentencepiece's, or for a
    list of more than MOST_LINES."""
    if not name.endswith((".json", ".model")):
        _refuse_above(MOST_LINES, content.count(b"\n"), f"lines in its {name}", where)
    if name.endswith(".json"):
        found = re.findall(rb'"([^"]{%d,})"' % MOST_WORD, content)
    else:
        # A long piece of sentencepiece's has a length above 127, which is no text.
        binary = name.endswith(".model") and bool(content.translate(None, _TEXT))
        found = _pieces(content) if binary else content.splitlines()
    _refuse_above(MOST_WORD, max(map(len, found), default=0), f"bytes of a word in its {name}", where)


def check_added(stated: Any, name: str, where: object) -> None:
    """Raises UnsupportedError for settings that add tokens of more letters, or of higher numbers, than a tokenizer bears."""
    if not isinstance(stated, dict):
        return
    words: list[Any] = []
    numbers: list[Any] = []
    if name == ADDED:
        words, numbers = list(stated), list(stated.values())
    else:
        decoder = stated.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            words = list(decoder.values())
            numbers = [int(key) for key in decoder if key.isdecimal() and len(key) < 20]
        for more in map(stated.get, _SPECIAL):
            words += list(more.values()) if isinstance(more, dict) else more if isinstance(more, list) else []
        made = [stated[key] for key in _MADE if type(stated.get(key)) is int]
        _refuse_above(MOST_MADE, max(made, default=0), f"tokens made for a number in its {name}", where)
        sides = sorted((stated[key] for key in _OF_TABLE if type(stated.get(key)) is int), reverse=True)
        _refuse_above(MOST_TABLE, math.prod(sides[:2]), f"elements of a table of sound by its {name}", where)
    texts = [word.get("content") if isinstance(word, dict) else word for word in words]
    letters = sum(len(text) for text in texts if isinstance(text, str))
    _refuse_above(MOST_LETTERS_ADDED, letters, f"letters of tokens that its {name} adds", where)
    highest = max((number for number in numbers if type(number) is int), default=0)
    _refuse_above(MOST_NUMBER, highest, f"as the number of a token that its {name} adds", where)


def _refuse_above(most: int, found: int, what: str, where: object) -> None:
    if found > most:
        raise UnsupportedError(
            f"{where}: {found} {what}, more than {most}; use the original model's tokenizer"
        )


def _pieces(content: bytes) -> list[bytes]:
    """Of a model of sentencepiece, whose first field is a piece that begins with its text."""
    at, found = 0, []
    try:
        while at < len(content):
            key, at = _varint(content, at)
            if key & 7 == 2:
                size, at = _varint(content, at)
                if key >> 3 == 1:
                    found.append(content[at : at + size])
                at += size
            else:
                at = at + {1: 8, 5: 4}[key & 7] if key & 7 else _varint(content, at)[1]
    except (IndexError, KeyError):  # no protobuf: the library says so
        pass
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(a number of protobuf, the place behind it)."""
    value = shift = 0
    while True:
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise KeyError("no number of protobuf")
