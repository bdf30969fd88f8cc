"""The text of a dataset: .txt and .md as they are, .jsonl and .parquet by their text column, or a folder."""

import json
from collections.abc import Iterator
from pathlib import Path

from nstf.errors import UsageError

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
_FIELDS = ("text", "content", "prompt")


def read_text(path: Path, max_chars: int) -> str:
    """The first `max_chars` characters of a dataset; records and files are joined by a blank line.

    Raises UsageError when the path is missing, of an unknown kind, not UTF-8, or holds no text.
    """
    pieces, length = [], 0
    for piece in _pieces(path):
        pieces.append(piece[: max_chars - length])
        length += len(pieces[-1]) + 2
        if length >= max_chars:
            break
    text = "\n\n".join(pieces)
    if not text.strip():
        raise UsageError(f"the dataset {path} is empty: give a file with text")
    return text


def _pieces(path: Path) -> Iterator[str]:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not files:
            raise UsageError(f"the dataset folder {path} has no {', '.join(SUFFIXES)} file")
        for file in files:
            yield from _pieces(file)
        return
    if not path.is_file():
        raise UsageError(f"no such dataset: {path}")
    suffix = path.suffix.lower()
    try:
        if suffix == ".jsonl":
            yield from _jsonl(path)
        elif suffix == ".parquet":
            yield from _parquet(path)
        else:
            yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the dataset {path} is not UTF-8 text (byte {error.start})") from error


def _jsonl(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UsageError(f"the dataset {path}, line {number}: not JSON ({error})") from error
            yield _field(record, f"{path}, line {number}")


def _field(record: object, where: str) -> str:
    if isinstance(record, str):
        return record
    if isinstance(record, dict):
        for name in _FIELDS:
            if isinstance(record.get(name), str):
                return str(record[name])
    raise UsageError(f"the dataset {where}: no text; expected a string under one of {', '.join(_FIELDS)}")


def _parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UsageError(f"reading {path} needs pyarrow: pip install 'nstf[data]'") from error
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise UsageError(f"the dataset {path} is not a parquet file ({error})") from error
    column = next((name for name in _FIELDS if name in file.schema_arrow.names), None)
    if column is None:
        raise UsageError(f"the dataset {path} has no column {', '.join(_FIELDS)}")
    for batch in file.iter_batches(batch_size=256, columns=[column]):
        for value in batch.column(0).to_pylist():
            if isinstance(value, str):
                yield value
