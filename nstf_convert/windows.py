"""Windows of tokens from documents: those to fit on, and others that are held out."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UsageError
from nstf.runtime import tokenizing

POOL_CHARS = 64 << 20
# What a document costs beside its characters, a blank one too: about what it takes in memory, and a little time. All may
# cost so many times the characters that are wanted: short lines then still make them.
DOCUMENT_CHARS = 100
SHORT = 4
# About two windows of English: small enough that a few windows come from many places of a long text.
PIECE_CHARS_PER_TOKEN = 8
# Places of one long text that are held out: enough that several kinds of text are among them.
HELD_OUT_STRETCHES = 16


@dataclass(frozen=True)
class Windows:
    """fit: [n_fit, seq_len], held_out: [n_held_out, seq_len], int64.

    split: "documents" when the two parts share no document, "regions" when they are disjoint stretches of
    one text.
    """

    fit: Tensor
    held_out: Tensor
    split: str


def tokenise_windows(
    tokenizer: Any,
    documents: Iterable[str],
    seq_len: int,
    n_fit: int,
    n_held_out: int = 0,
    seed: int = 0,
    name: str = "the text",
) -> Windows:
    """Windows of `seq_len` tokens, in an order fixed by `seed`; no token is in two windows.

    What the tokenizer puts around every text ([CLS] and [SEP], or a first BOS) is put around every window,
    because a model that
    was trained with it needs it. Raises UsageError with the numbers of tokens found and needed.
    """
    if seq_len < 2 or n_fit < 0 or n_held_out < 0 or n_fit + n_held_out < 1:
        raise UsageError(f"{n_fit} + {n_held_out} windows of {seq_len} tokens cannot be made; ask for more")
    prefix, suffix = _surroundings(tokenizer)
    width = seq_len - len(prefix) - len(suffix)
    if width < 1:
        raise UsageError(f"windows of {seq_len} tokens leave no room for text; make them longer")
    texts = _pool(documents, 64 * (n_fit + n_held_out) * width)
    pieces = [tuple(_pieces(text, max(512, PIECE_CHARS_PER_TOKEN * width))) for text in texts]
    encode = _encoder(tokenizer)
    needed_fit, needed_held = n_fit * width, n_held_out * width
    parts = _by_documents(pieces, encode, needed_fit, needed_held, seed)
    split = "regions" if parts is None else "documents"
    found = _by_regions(pieces, encode, needed_fit, needed_held, width, seed) if parts is None else parts
    if isinstance(found, int):
        raise UsageError(
            f"{name} has {found} tokens, but {n_fit} + {n_held_out} windows of {seq_len} need "
            f"{needed_fit + needed_held}; "
            f"give more text, or ask for fewer or shorter samples"
        )
    fit, held = (
        _windows(tokens, n, width, prefix, suffix)
        for tokens, n in zip(found, (n_fit, n_held_out), strict=True)
    )
    return Windows(fit, held, split)


def first_documents(documents: Iterable[str], most_chars: int) -> Iterator[str]:
    """Documents with text in them, until those make `most_chars`: a huge dataset is not read to its end, and one of very
    short or blank documents no further than what it costs to hold them."""
    size = cost = 0
    for text in documents:
        cost += len(text) + DOCUMENT_CHARS
        if text and not text.isspace():
            yield text
            size += len(text)
        if size >= most_chars or cost >= SHORT * most_chars:
            return


def _pool(documents: Iterable[str], wanted_chars: int) -> list[str]:
    """Documents until there is far more text than needed."""
    return list(first_documents(documents, max(POOL_CHARS, wanted_chars)))


def _pieces(text: str, size: int) -> Iterator[str]:
    """`text` cut into stretches of about `size` characters, after a line or a word where there is one
    nearby.
    """
    start = 0
    while start < len(text):
        end = min(start + size, len(text))
        if end < len(text):
            cut = max(text.rfind("\n", start + size // 2, end), text.rfind(" ", end - size // 8, end))
            end = cut + 1 if cut > start else end
        yield text[start:end]
        start = end


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizing.encode(tokenizer, text, add_special_tokens=False)["input_ids"])


def _surroundings(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text; a lone end token (T5's) is left out."""
    core = list(tokenizing.encode(tokenizer, "a", add_special_tokens=False)["input_ids"])
    full = list(tokenizing.encode(tokenizer, "a")["input_ids"])
    for at in range(len(full) - len(core) + 1):
        if full[at : at + len(core)] == core:
            prefix, suffix = full[:at], full[at + len(core) :]
            return (prefix, suffix) if prefix else ([], [])
    return [], []


def _by_documents(
    pieces: Sequence[Sequence[str]],
    encode: Callable[[str], list[int]],
    needed_fit: int,
    needed_held: int,
    seed: int,
) -> tuple[list[int], list[int]] | None:
    """Tokens for both parts with no document in both; None when the documents are too few or too short."""
    if len(pieces) < 2:
        return None
    order = list(range(len(pieces)))
    generator = random.Random(seed)
    generator.shuffle(order)
    held: list[int] = []
    used = 0
    while len(held) < needed_held and used < len(order):
        held += _gather(pieces[order[used]], encode, needed_held - len(held))
        used += 1
    rest = [piece for index in order[used:] for piece in pieces[index]]
    if len(held) < needed_held:
        return None
    generator.shuffle(rest)
    fit = _gather(rest, encode, needed_fit)
    return (fit, held) if len(fit) >= needed_fit else None


def _by_regions(
    pieces: Sequence[Sequence[str]],
    encode: Callable[[str], list[int]],
    needed_fit: int,
    needed_held: int,
    width: int,
    seed: int,
) -> tuple[list[int], list[int]] | int:
    """Tokens for both parts from disjoint stretches; those held out lie all over the text.

    Every held-out window comes from a place of its own while there is text enough, and any number of first windows
    is spread over the whole text. The number of tokens when too few.
    """
    flat = list(itertools.chain.from_iterable(pieces))
    share = needed_held / (needed_fit + needed_held)
    stretches = _stretches(len(flat), round(len(flat) * share), seed)
    taken = set(itertools.chain.from_iterable(stretches))
    first = [piece for number, piece in enumerate(flat) if number not in taken]
    random.Random(seed).shuffle(first)
    # From the middle of each stretch outwards: neighbours of text that is fitted on come last.
    columns = itertools.zip_longest(*(sorted(s, key=lambda i: abs(2 * i - s[0] - s[-1])) for s in stretches))
    last = [flat[i] for i in itertools.chain.from_iterable(columns) if i is not None]
    fit = _gather(first, encode, needed_fit)
    held = _gather(last, lambda piece: encode(piece)[:width], needed_held)
    if len(held) < needed_held:
        held = _gather(last, encode, needed_held)
    if len(fit) >= needed_fit and len(held) >= needed_held:
        return fit, held
    # Barely enough text: every token counts, so the border is set by tokens and not by pieces.
    tokens = list(itertools.chain.from_iterable(encode(piece) for piece in flat))
    if len(tokens) < needed_fit + needed_held:
        return len(tokens)
    return tokens[:needed_fit], tokens[needed_fit : needed_fit + needed_held]


def _stretches(pieces: int, held: int, seed: int) -> list[range]:
    """`held` of `pieces` numbers as up to HELD_OUT_STRETCHES ranges, spread evenly and in bit-reversed order.

    Any first few ranges of that order (van der Corput's) are spread evenly too.
    """
    count = min(HELD_OUT_STRETCHES, held)
    if count == 0:
        return []
    bits = (count - 1).bit_length()
    order = sorted(range(count), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2) if bits else 0)
    phase = random.Random(seed).random()
    out = []
    for number in order:
        low, high = pieces * number // count, pieces * (number + 1) // count
        length = min(held * (number + 1) // count - held * number // count, high - low)
        start = low + int(phase * (high - low - length + 1))
        out.append(range(start, start + length))
    return out


def _gather(pieces: Iterable[str], encode: Callable[[str], list[int]], count: int) -> list[int]:
    """The tokens of the pieces in order, until there are `count` or more."""
    tokens: list[int] = []
    for piece in pieces:
        if len(tokens) >= count:
            break
        tokens += encode(piece)
    return tokens


def _windows(tokens: list[int], count: int, width: int, prefix: list[int], suffix: list[int]) -> Tensor:
    rows = [prefix + tokens[i * width : (i + 1) * width] + suffix for i in range(count)]
    return torch.tensor(rows, dtype=torch.int64).reshape(count, width + len(prefix) + len(suffix))
