"""Text to calibrate and measure on: documents from files. Windows of tokens are made of them in nstf_convert.windows."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nstf.errors import NstfError, UsageError, out_of_memory
from nstf.runtime.artifact.header import HeaderError, check_values
from nstf_convert.checkpoint.paths import check_name, exists, expanded
from nstf_convert.parquet_values import column_values, may_hold_text

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
FIELDS = ("text", "content", "messages", "prompt")
# What says nothing: the text may be in another field.
EMPTY: tuple[object, ...] = (None, "", [])
# Windows' tools begin a text with a mark of its encoding.
ENCODING = "utf-8-sig"
BLOCK_CHARS = 16 << 20
FINGERPRINT_SAMPLE = 64 << 20


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
    """The files of texts in a folder and in its folders, hidden ones apart. Raises UsageError for what else would be passed
    over."""
    for at, folders, names in os.walk(root, onerror=_raise):
        # Hidden ones hold no texts of the user, but copies: a notebook's checkpoints would be measured on and fitted on.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(at) / name for name in folders):
            if path.is_symlink():
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
    """The text of one record: a string, or the first known field that holds some text or a chat; "" where all are empty or
    null."""
    if isinstance(record, str) and field is None:
        return _unicode(record, where)
    fields = record if isinstance(record, dict) else {}
    names = [name for name in ((field,) if field else FIELDS) if name in fields]
    for name in names:
        value = fields[name]
        if isinstance(value, str) and value:
            return _unicode(value, where)
        if isinstance(value, bytes):  # a column of parquet that is not marked as UTF-8
            raise UsageError(
                f"the dataset {where}: {name} holds bytes, of which no encoding is known; write it as a column of strings"
            )
        turns = [_turn(t) for t in value] if isinstance(value, list) else []
        if turns and None not in turns:
            return _unicode("\n\n".join(text for texts in turns for text in texts or []), where)
    if any(fields[name] in EMPTY for name in names):
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
    check_name(file)
    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        columns = [name for name in ((field,) if field else FIELDS) if name in names]
        if not columns:
            raise UsageError(
                f"the dataset {file} has no column {field or ', '.join(FIELDS)}, but {', '.join(names[:8]) or 'none'}; "
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
            if next(reversed(record.values())) not in EMPTY:
                break
            values = rows.setdefault(name, enumerate(column_values(table, name, where)))
            record[name] = next(found for at, found in values if at == number)
        if any(found is not None for found in record.values()):
            yield record
