"""The values of one column of a parquet file, a few at a time: a file of 700 bytes can hold 2 GB of text.

A dictionary keeps once what every row repeats, and compression keeps its letters once. So values stay in the dictionary
until they are asked for, and what unpacks to far more than it takes is refused. pyarrow itself unpacks one page (2 GiB at
most) before anything can be asked of it, if the sizes that the file states are not true, and of a row that
is a list all entries, of which no size tells.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from nstf.errors import UsageError

ROWS = 256
# Of a group of rows, by the bytes of the file: text that is packed well takes a tenth.
MOST_TIMES, ALWAYS_BYTES = 256, 64 << 20
# Text of rows that are made at a time, and of a single one.
BATCH_BYTES, ROW_BYTES = 64 << 20, 256 << 20
# What an entry of a list takes beside its text, a null too; a struct, a dict of Python, and each of its fields beside its
# name, which pyarrow 15 makes anew for every entry; an entry of a map, a tuple and two values.
ENTRY_BYTES, STRUCT_BYTES, FIELD_BYTES, PAIR_BYTES = 64, 192, 128, 192
# What pyarrow calls the kinds of lists; the last two came with 16.
LISTS = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
# Rows that are read of a file of fewer bytes: 2,600 bytes can hold 2^30 nulls.
ALWAYS_ROWS = 1 << 22


def column_values(table: Any, column: str, where: str) -> Iterator[Any]:
    """The values of a column of a ParquetFile, None for nulls. Raises UsageError for what takes too much memory."""
    from pyarrow import parquet

    whole = table.metadata
    schema = table.schema
    order = {name: i for i, name in enumerate(table.schema_arrow.names)}
    leaves = [i for i in range(whole.num_columns) if _root(schema.column(i).path, order) == column]
    size_bytes = Path(where).stat().st_size
    most, rows_left = max(ALWAYS_BYTES, MOST_TIMES * size_bytes), max(ALWAYS_ROWS, size_bytes)
    for number in range(whole.num_row_groups):
        # Of all columns together: asked about one of them, pyarrow ends the process where its statistics are damaged.
        if whole.row_group(number).total_byte_size > most:
            raise UsageError(
                f"the dataset {where}: {whole.row_group(number).num_rows} rows unpack to more than {MOST_TIMES} times the "
                "file's bytes; write it again without what is repeated"
            )
    texts = [schema.column(i).path for i in leaves if schema.column(i).physical_type == "BYTE_ARRAY"]
    # Opening reads all of the footer, which has an entry for each group.
    with ExitStack() as files:
        opened = files.enter_context(parquet.ParquetFile(where, read_dictionary=texts))
        plain = cache(lambda: files.enter_context(parquet.ParquetFile(where)))
        # Of one group at a time: each has a dictionary of its own, and lists of texts of two are not read.
        for number in range(whole.num_row_groups):
            for batch in _batches(opened, plain, number, column):
                rows_left -= len(batch)
                if rows_left < 0:
                    raise UsageError(
                        f"the dataset {where}: it has more rows than bytes; write it again without what is repeated"
                    )
                yield from _values(batch.column(0), where)


def may_hold_text(kind: Any) -> bool:
    """Whether values of a type of pyarrow may be texts or chats."""
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        return may_hold_text(kind.value_type)
    names = ("string", "large_string", "string_view", *LISTS)
    return any(getattr(types, f"is_{name}", lambda _: False)(kind) for name in names)


def _batches(opened: Any, plain: Callable[[], Any], group: int, column: str) -> Iterator[Any]:
    """The rows of a group, a few at a time; one by one, of what `plain` opens, where their encoding is one that pyarrow
    keeps in no dictionary (DELTA_BYTE_ARRAY, which may say of a text that it begins as the last one, and its kin)."""
    done, asked = 0, {"row_groups": [group], "columns": [column]}
    try:
        for batch in opened.iter_batches(batch_size=ROWS, **asked):
            done += len(batch)
            yield batch
        return
    except (
        OSError
    ) as error:  # at the first page of that encoding, which may follow others; pyarrow has no class for it
        if "Not yet implemented" not in str(error):
            raise
    for number, batch in enumerate(plain().iter_batches(batch_size=1, **asked)):
        if number >= done:
            yield batch


def _root(path: str, order: Mapping[str, int]) -> str:
    """The column that a leaf of the schema belongs to, the first of those possible: a name may have dots in it. order: the
    columns' places by name."""
    ends = [i for i, letter in enumerate(path) if letter == "."] + [len(path)]
    return min((path[:end] for end in ends if path[:end] in order), key=order.__getitem__, default=path)


def _values(rows: Any, where: str) -> Iterator[Any]:
    if _unpacked(rows) <= BATCH_BYTES:
        yield from rows.to_pylist()
        return
    for number in range(len(rows)):
        row = rows.slice(number, 1)
        if (size := _unpacked(row)) > ROW_BYTES:
            raise UsageError(
                f"the dataset {where}: one row may unpack to {size} bytes; divide it into several"
            )
        yield row[0].as_py()


def _unpacked(rows: Any) -> int:
    """Bytes that rows take as values of Python, at most."""
    import pyarrow
    from pyarrow import compute

    kind, types = rows.type, pyarrow.types
    if types.is_dictionary(kind):
        # Of what these rows use alone: looking at all of a large dictionary for each of its rows took minutes.
        used = rows.dictionary.take(compute.unique(rows.indices.drop_null()))
        return len(rows) * int(compute.max(compute.binary_length(used)).as_py() or 0)
    if types.is_struct(kind):
        each = STRUCT_BYTES + sum(FIELD_BYTES + len(field.name) for field in kind)
        return len(rows) * each + sum(_unpacked(part) for part in rows.flatten())
    if types.is_map(kind):
        first = rows.offsets[0].as_py()
        count = int(rows.offsets[-1].as_py() - first)
        entries = (part.slice(first, count) for part in (rows.keys, rows.items))
        return PAIR_BYTES * count + sum(map(_unpacked, entries))
    if any(getattr(types, f"is_{name}", lambda _: False)(kind) for name in LISTS):
        entries = rows.flatten()
        return ENTRY_BYTES * len(entries) + _unpacked(entries)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _unpacked(rows.storage)
    if types.is_nested(kind) or types.is_run_end_encoded(kind):
        raise ValueError(f"it has values of the type {kind}, which is not supported")
    return int(rows.nbytes)
