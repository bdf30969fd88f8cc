"""Text to calibrate and measure on: documents from files, and token windows in fit and held-out parts."""

import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nstf.errors import NstfError, UsageError, out_of_memory
from nstf.runtime import tokenizing
from nstf.runtime.artifact.header import HeaderError, check_values
from nstf_convert.checkpoint.paths import exists, expanded
from nstf_convert.parquet_values import column_values, may_hold_text

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
FIELDS = ("text", "content", "messages", "prompt")
# Windows' tools begin a text with a mark of its encoding.
ENCODING = "utf-8-sig"
BLOCK_CHARS = 16 << 20
POOL_CHARS = 64 << 20
# What a document costs beside its characters, a blank one too: about what it takes in memory, and a little time. All may
# cost so many times the characters that are wanted: short lines then still make them.
DOCUMENT_CHARS = 100
SHORT = 4
FINGERPRINT_SAMPLE = 64 << 20
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


def load_text(path: str | Path, field: str | None = None) -> Iterator[str]:
    """The documents of a .txt, .md, .jsonl or .parquet file, a folder of them, or a hub dataset (`org/name`).

    field: the key or column with the text; None tries text, content, messages (chat) and prompt. A text file
    is one document
    (above 16 Mi characters several). Raises UsageError: no such file, unknown kind, not UTF-8, no text; NstfError: the disk.
    """
    root = _located(path)
    files = _files(root)
    for file in files:
        yield from _documents(file, field)


def fingerprint(path: str | Path) -> str:
    """SHA-256 of a dataset's content, texts or a .safetensors file of model inputs; the same in any folder.

    Of files above 128 MiB the size and the first and last 64 MiB are hashed; see `times`.
    """
    root = _located(path)
    digest = hashlib.sha256()
    for file in _read_files(root):
        name = "" if file == root else file.relative_to(root).as_posix()
        with _read_errors(file), file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            # A name need not be text.
            digest.update(f"{len(name)}:{name}:{size}:".encode("utf-8", "surrogateescape"))
            if size > 2 * FINGERPRINT_SAMPLE:
                digest.update(stream.read(FINGERPRINT_SAMPLE))
                stream.seek(size - FINGERPRINT_SAMPLE)
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


def places(path: str | Path) -> set[Path]:
    """Where the files of a dataset lie."""
    return {file.resolve() for file in _read_files(_located(path))}


def times(path: str | Path) -> list[int]:
    """When the files of a dataset that are hashed in part were last changed, in nanoseconds."""
    found = []
    for file in _read_files(_located(path)):
        with _read_errors(file):
            at = file.stat()
        if at.st_size > 2 * FINGERPRINT_SAMPLE:
            found.append(at.st_mtime_ns)
    return found


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


def _located(path: str | Path) -> Path:
    """The local path of a dataset; a hub name is downloaded. Raises UsageError."""
    local = expanded(path)
    if exists(local):
        return local
    from nstf_convert.checkpoint.hub import download_dataset, is_hub_name

    if is_hub_name(str(path)):
        return download_dataset(str(path))
    kinds = ", ".join(SUFFIXES)
    raise UsageError(f"no such dataset: {path}; give a {kinds} file, a folder of them or a hub name")


def _read_files(root: Path) -> list[Path]:
    """The files of a dataset, of texts or of model inputs."""
    is_arrays = root.is_file() and root.suffix.lower() == ".safetensors"
    return [root] if is_arrays else _files(root)


def _files(root: Path) -> list[Path]:
    if root.is_dir():
        with _read_errors(root):
            files = sorted(_texts_inside(root))
        if not files:
            raise UsageError(f"the dataset folder {root} has no {', '.join(SUFFIXES)} file")
        return files
    if not root.is_file():
        raise UsageError(f"the dataset {root} is not a regular file")
    if root.suffix.lower() not in SUFFIXES:
        raise UsageError(f"the dataset {root} is of an unknown kind; give a {', '.join(SUFFIXES)} file")
    return [root]


def _texts_inside(root: Path) -> Iterator[Path]:
    """The files of texts in a folder and in its folders. Raises UsageError for what would be passed over."""
    for at, folders, names in os.walk(root, onerror=_raise):
        for path in (Path(at) / name for name in folders):
            if path.is_symlink() and not path.name.startswith("."):
                raise UsageError(
                    f"the dataset {root}: {path} is a link to a folder: take it out, and give that folder, too"
                )
        for path in (Path(at) / name for name in names):
            if path.suffix.lower() in SUFFIXES and not path.name.startswith("."):
                if not path.is_file():
                    raise UsageError(f"the dataset {root}: {path} is no regular file: take it out")
                yield path


def _raise(error: OSError) -> None:
    raise error  # a folder that is passed over is text that is missing


@contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    """Names the file that the machine could not read."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise NstfError(
            f"the dataset {error.filename or file} cannot be read ({reason}); check permissions and disk"
        ) from error


def _documents(file: Path, field: str | None) -> Iterator[str]:
    try:
        if file.suffix.lower() == ".jsonl":
            yield from _jsonl(file, field)
        elif file.suffix.lower() == ".parquet":
            yield from _parquet(file, field)
        else:
            with _read_errors(file), file.open(encoding=ENCODING) as stream:
                yield from iter(lambda: stream.read(BLOCK_CHARS), "")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the dataset {file} is not UTF-8 text (byte {error.start} of a block); convert it"
        ) from error


def _jsonl(file: Path, field: str | None) -> Iterator[str]:
    with _read_errors(file), file.open(encoding=ENCODING) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                check_values(line, f"the dataset {file}, line {number}:")
                record = json.loads(line)
            except HeaderError as error:
                raise UsageError(f"{error}; leave out what is no text") from error
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f"the dataset {file}, line {number}: not JSON ({str(error)[:80]})"
                ) from error
            yield _text_of(record, field, f"{file}, line {number}")


def _text_of(record: object, field: str | None, where: str) -> str:
    """The text of one record: a string, or the first known field that holds a string or a chat; "" where such a field is
    null or an empty chat."""
    if isinstance(record, str) and field is None:
        return _unicode(record, where)
    fields = record if isinstance(record, dict) else {}
    names = [name for name in ((field,) if field else FIELDS) if name in fields]
    for name in names:
        value = fields[name]
        if isinstance(value, str):
            return _unicode(value, where)
        if isinstance(value, bytes):  # a column of parquet that is not marked as UTF-8
            raise UsageError(
                f"the dataset {where}: {name} holds bytes, of which no encoding is known; write it as a column of strings"
            )
        turns = [_turn(t) for t in value] if isinstance(value, list) else []
        if turns and None not in turns:
            return _unicode("\n\n".join(text for texts in turns for text in texts or []), where)
    if any(fields[name] in (None, []) for name in names):
        return ""
    known = field or ", ".join(FIELDS)
    raise UsageError(f"the dataset {where}: no text under {known}; write it under one of these names")


def _turn(turn: object) -> list[str] | None:
    """The texts of a turn of a chat, none where it calls a tool, several where it has parts; None for what is no turn."""
    if not isinstance(turn, dict) or not turn.keys() & {"role", "content"}:
        return None
    content = turn.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return [text for text in parts if isinstance(text, str)]
    return [] if content is None else [content] if isinstance(content, str) else None


def _unicode(text: str, where: str) -> str:
    """The text, refused where it has halves of characters, which JSON can hold and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the dataset {where}: the text is not Unicode (half a character at {error.start}); write it again"
        ) from error
    return text


def _parquet(file: Path, field: str | None) -> Iterator[str]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(f"reading {file} needs pyarrow; run `pip install pyarrow`") from error
    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        columns = [name for name in ((field,) if field else FIELDS) if name in names]
        if not columns:
            raise UsageError(
                f"the dataset {file} has no column {field or ', '.join(FIELDS)}, but {', '.join(names[:8])}; "
                f"name the one with text"
            )
        others = [name for name in columns[1:] if may_hold_text(table.schema_arrow.field(name).type)]
        for record in _records(table, [columns[0], *others], str(file)):
            yield _text_of(record, field, str(file))
    except (NstfError, UnicodeDecodeError):
        raise
    except Exception as error:  # pyarrow's own, and Python's for dates that it cannot represent
        if out_of_memory(error):
            raise NstfError(
                f"not enough memory to read the dataset {file}; free some, or raise its limit"
            ) from error
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # pyarrow has one without for what is damaged
            with _read_errors(file):
                raise
        text = " ".join(str(error).split())[:120]
        raise UsageError(f"the dataset {file} cannot be read as parquet ({text}); write it again") from error


def _records(table: Any, columns: list[str], where: str) -> Iterator[dict[str, Any]]:
    """The values of each row of a ParquetFile, as far as the first that holds something; none of a row of nulls alone.

    A column is read from where a row first asks for it: one that none does costs nothing.
    """
    rows: dict[str, Iterator[tuple[int, Any]]] = {}
    for number, value in enumerate(column_values(table, columns[0], where)):
        record = {columns[0]: value}
        for name in columns[1:]:
            if next(reversed(record.values())) not in (None, []):
                break
            values = rows.setdefault(name, enumerate(column_values(table, name, where)))
            record[name] = next(found for at, found in values if at == number)
        if any(found is not None for found in record.values()):
            yield record


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
