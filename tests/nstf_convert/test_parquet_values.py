"""Parquet files that hold far more text than they have bytes: a few values at a time, or a refusal."""

import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nstf.errors import UsageError
from nstf_convert import parquet_values
from nstf_convert.dataset import load_text

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

MIB = 1 << 20


def written(path: Path, column: str, values: list[Any], **settings: Any) -> Path:
    parquet.write_table(pyarrow.table({column: pyarrow.array(values)}), path, **settings)
    return path


def letters(documents: Iterator[str]) -> int:
    return sum(map(len, documents))


READS = """
import resource, sys
from nstf_convert.dataset import load_text
list(load_text(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(sum(map(len, load_text(sys.argv[2]))), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_text_that_every_row_repeats_is_in_memory_a_few_times(tmp_path: Path) -> None:
    """A batch of rows was made at once: 2 MiB for each row."""
    small = written(tmp_path / "small.parquet", "text", ["a"])
    bomb = written(tmp_path / "bomb.parquet", "text", ["x" * (2 * MIB)] * 48, compression="zstd")
    assert bomb.stat().st_size < 4096
    command = [sys.executable, "-c", READS, str(small), str(bomb)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(found[0]) == 96 * MIB
    assert int(found[1]) * resource.getpagesize() // 4096 < 64 * 1024  # KiB


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_texts_of_newer_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    """As Spark and DuckDB write them for version 2: pyarrow keeps them in no dictionary."""
    settings = {"use_dictionary": False, "column_encoding": {"text": encoding}, "row_group_size": 300}
    texts = [f"text {i // 2}" for i in range(1000)]
    assert list(load_text(written(tmp_path / "x.parquet", "text", texts, **settings))) == texts
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    settings["column_encoding"] = {"messages.list.element.content": encoding}
    path = written(tmp_path / "y.parquet", "messages", [chat] * 1000, **settings)
    assert list(load_text(path)) == ["a\n\nb"] * 1000


def test_a_file_of_many_columns_and_groups_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of all columns were made anew for each, and the footer was read for each group of a newer encoding: minutes
    for 3 MB."""
    settings = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "row_group_size": 1}
    columns = {f"c{i}": pyarrow.array([i] * 40, pyarrow.int8()) for i in range(100)}
    parquet.write_table(
        pyarrow.table({**columns, "text": [f"text {i}" for i in range(40)]}),
        tmp_path / "x.parquet",
        **settings,
    )
    asked: list[str] = []

    class Counted(parquet.ParquetFile):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            asked.append("opened")
            super().__init__(*arguments, **options)

        @property
        def schema_arrow(self) -> Any:
            asked.append("names")
            return super().schema_arrow

    monkeypatch.setattr(parquet, "ParquetFile", Counted)
    assert list(load_text(tmp_path / "x.parquet")) == [f"text {i}" for i in range(40)]
    assert asked.count("opened") <= 4 and asked.count("names") <= 4


@pytest.mark.parametrize(
    ("path", "names", "root"),
    [
        ("a.b.c", ["a.b", "a"], "a.b"),
        ("a.b.c", ["x", "a", "a.b"], "a"),
        ("a.b", ["a.b"], "a.b"),
        ("ab.c", ["a", "ab"], "ab"),
        ("x", ["a"], "x"),
    ],
)
def test_a_leaf_belongs_to_the_first_column_that_it_may(path: str, names: list[str], root: str) -> None:
    assert parquet_values._root(path, {name: i for i, name in enumerate(names)}) == root


def test_a_text_that_repeats_the_start_of_the_last_one_is_in_memory_once(tmp_path: Path) -> None:
    settings = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    small = written(tmp_path / "small.parquet", "text", ["a"], **settings)
    bomb = written(tmp_path / "bomb.parquet", "text", ["x" * (2 * MIB)] * 48, compression="zstd", **settings)
    assert bomb.stat().st_size < 4096
    command = [sys.executable, "-c", READS, str(small), str(bomb)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(found[0]) == 96 * MIB
    assert int(found[1]) * resource.getpagesize() // 4096 < 64 * 1024  # KiB


def test_a_column_that_unpacks_to_far_more_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x.parquet", "text", ["x" * (70 * MIB)], compression="zstd")
    with pytest.raises(UsageError, match="rows unpack to more than 256 times the file's bytes"):
        list(load_text(path))


def test_a_row_that_repeats_a_text_is_refused(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x" * (8 * MIB)}] * 40
    path = written(tmp_path / "x.parquet", "messages", [chat], compression="none")
    with pytest.raises(UsageError, match=r"one row may unpack to \d+ bytes; divide it"):
        list(load_text(path))


TURNS = pyarrow.StructArray.from_arrays([pyarrow.array(["x" * MIB] * 100)], ["content"])
NESTED = {
    "fixed": pyarrow.FixedSizeListArray.from_arrays(TURNS, 100),
    "large": pyarrow.LargeListArray.from_arrays([0, 100], TURNS),
    "views": pyarrow.ListViewArray.from_arrays([0], [100], TURNS),
    "large views": pyarrow.LargeListViewArray.from_arrays([0], [100], TURNS),
    "map": pyarrow.MapArray.from_arrays(
        [0, 100], pyarrow.array([str(i) for i in range(100)]), TURNS.field(0)
    ),
    "list of maps": pyarrow.array(
        [[{"content": "", "more": [("a", "x" * MIB)] * 100}]],
        pyarrow.list_(
            pyarrow.struct(
                [("content", pyarrow.string()), ("more", pyarrow.map_(pyarrow.string(), pyarrow.string()))]
            )
        ),
    ),
}


@pytest.mark.parametrize("kind", NESTED)
def test_lists_of_every_kind_count_the_texts_that_they_repeat(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all but plain lists a text that was repeated counted once: 725 bytes took 12 GiB."""
    rows = pyarrow.chunked_array([NESTED[kind]] * 3)
    path = tmp_path / "x.parquet"
    settings = {"compression": "zstd", "row_group_size": 3, "dictionary_pagesize_limit": 64 * MIB}
    parquet.write_table(pyarrow.table({"messages": rows}), path, **settings)
    assert path.stat().st_size < 16384
    monkeypatch.setattr(parquet_values, "ROW_BYTES", 99 * MIB)
    with pytest.raises(UsageError, match=r"one row may unpack to 10\d{7} bytes; divide it"):
        list(load_text(path))


def test_nested_values_of_an_unknown_kind_are_refused() -> None:
    runs = pyarrow.RunEndEncodedArray.from_arrays([1 << 20], ["x"])
    with pytest.raises(ValueError, match="values of the type run_end_encoded"):
        parquet_values._unpacked(runs)


def test_only_the_words_that_rows_use_are_looked_at() -> None:
    """All of a dictionary of a million words, for each row of four million, took 13 minutes."""
    words = pyarrow.array(["", "short", "L" * 100_000])
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, None, 1, 2]), words)
    assert parquet_values._unpacked(rows.slice(0, 4)) == 4 * 5
    assert parquet_values._unpacked(rows) == 5 * 100_000
    assert parquet_values._unpacked(rows.slice(2, 1)) == 0


@pytest.mark.parametrize("row_bytes", [1, parquet_values.BATCH_BYTES])
@pytest.mark.parametrize("settings", [{}, {"use_dictionary": False}, {"row_group_size": 7}])
def test_values_are_the_same_at_once_and_one_by_one(
    tmp_path: Path, settings: dict[str, Any], row_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_values, "BATCH_BYTES", row_bytes)
    texts = [None if i % 11 == 0 else f"text {i % 50}" for i in range(1000)]
    path = written(tmp_path / "x.parquet", "text", texts, **settings)
    assert list(load_text(path)) == [t for t in texts if t is not None]
    chats = [[{"role": "user", "content": t or ""}] * (1 + i % 3) for i, t in enumerate(texts)]
    path = written(tmp_path / "y.parquet", "messages", chats, **settings)
    joined = ["\n\n".join(turn["content"] for turn in chat) for chat in chats]
    assert list(load_text(path)) == joined
    turns = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    for kind in (pyarrow.large_list(turns), pyarrow.list_view(turns)):
        parquet.write_table(pyarrow.table({"messages": pyarrow.array(chats, kind)}), path, **settings)
        assert list(load_text(path)) == joined


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_texts_of_every_type_are_read(tmp_path: Path, kind: str) -> None:
    texts = pyarrow.array(["a", "b"] * 100)
    made = texts.dictionary_encode() if kind == "dictionary" else texts.cast(getattr(pyarrow, kind)())
    parquet.write_table(pyarrow.table({"a.text": texts, "text": made}), tmp_path / "x.parquet")
    assert letters(load_text(tmp_path / "x.parquet")) == 200
    assert letters(load_text(tmp_path / "x.parquet", field="a.text")) == 200


DATES = {
    "dates": pyarrow.array([2**30], pyarrow.date32()),
    "times": pyarrow.array([1], pyarrow.time64("ns")),
    "moments": pyarrow.array([2**62], pyarrow.timestamp("us")),
    "spans": pyarrow.array([2**62], pyarrow.duration("s")),
}


@pytest.mark.parametrize("kind", DATES)
def test_dates_that_python_has_none_for_are_one_line(tmp_path: Path, kind: str) -> None:
    parquet.write_table(pyarrow.table({"text": DATES[kind]}), tmp_path / "x.parquet")
    with pytest.raises(UsageError, match="cannot be read as parquet"):
        list(load_text(tmp_path / "x.parquet"))


DAMAGED = """
import random, sys
from pathlib import Path
from nstf.errors import NstfError
from nstf_convert.dataset import load_text
path, choice = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
good = path.read_bytes()
footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
for _ in range(int(sys.argv[3])):
    bad = bytearray(good)
    for _ in range(choice.choice((1, 1, 2))):
        bad[choice.randrange(footer, len(bad))] = choice.choice((choice.randrange(256), 0, 255))
    path.write_bytes(bad)
    try:
        list(load_text(path))
    except NstfError:
        pass
"""


def _survives(path: Path, seed: int, count: int) -> None:
    command = [sys.executable, "-c", DAMAGED, str(path), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])


@pytest.mark.parametrize("column", ["text", "messages"])
def test_damaged_footers_are_errors_and_end_no_process(tmp_path: Path, column: str) -> None:
    """pyarrow 25 ends the process (SIGABRT) where it is asked for a column whose statistics are of another size."""
    chat = [{"role": "user", "content": "hello " * 9}]
    values = ["hello world"] * 300 if column == "text" else [chat] * 300
    _survives(written(tmp_path / "x.parquet", column, values), 3, 60)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(8))
def test_many_damaged_footers_are_errors_and_end_no_process(tmp_path: Path, seed: int) -> None:
    chat = [{"role": "user", "content": "hello " * 9}]
    _survives(written(tmp_path / "x.parquet", "messages", [chat] * 300), seed, 5000)


def test_rows_of_nothing_are_not_read_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,600 bytes held 2^30 nulls, which were passed over one by one."""
    monkeypatch.setattr(parquet_values, "ALWAYS_ROWS", 1 << 14)
    few = written(
        tmp_path / "few.parquet", "text", pyarrow.nulls(1 << 14, pyarrow.string()), compression="zstd"
    )
    assert list(load_text(few)) == []
    many = written(
        tmp_path / "many.parquet", "text", pyarrow.nulls(1 << 15, pyarrow.string()), compression="zstd"
    )
    with pytest.raises(UsageError, match="it has more rows than bytes"):
        list(load_text(many))


def test_a_row_of_many_empty_turns_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_values, "ROW_BYTES", 1 << 20)
    monkeypatch.setattr(parquet_values, "BATCH_BYTES", 1 << 18)
    path = written(tmp_path / "x.parquet", "messages", [[{"role": "", "content": ""}] * 20_000])
    with pytest.raises(UsageError, match=r"one row may unpack to \d+ bytes; divide it"):
        list(load_text(path))


TEXTS = pyarrow.array([f"ab{i}" for i in range(500)])
ENTRIES = {
    **{f"{n} fields": pyarrow.StructArray.from_arrays([TEXTS] * n, [f"k{i}" for i in range(n)])
       for n in (1, 2, 6, 11, 22, 43, 86, 171)},
    "nulls": pyarrow.StructArray.from_arrays(
        [pyarrow.nulls(500, pyarrow.string())] * 90, [f"k{i}" for i in range(90)]
    ),
    "no fields": pyarrow.array([{}] * 500, pyarrow.struct([])),
    "pairs": pyarrow.MapArray.from_arrays(range(501), TEXTS, TEXTS),
    "one map": pyarrow.MapArray.from_arrays([0] * 500 + [500], TEXTS, TEXTS),
    "texts": TEXTS,
    "lists": pyarrow.ListArray.from_arrays([0] * 501, TEXTS),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENTRIES)
def test_no_row_takes_more_memory_than_it_is_said_to(kind: str) -> None:
    """A struct and its fields counted nothing: 35 KB of 150 fields took 2.2 GB."""
    row = pyarrow.ListArray.from_arrays([0, len(ENTRIES[kind])], ENTRIES[kind])
    row.to_pylist()
    tracemalloc.start()
    values = row.to_pylist()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(values[0]) == 500
    assert taken <= parquet_values._unpacked(row) <= 4 * taken + 65536


def test_lists_are_read_by_a_pyarrow_without_list_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They came with pyarrow 16; 15 is allowed."""
    monkeypatch.delattr(pyarrow.types, "is_list_view")
    monkeypatch.delattr(pyarrow.types, "is_large_list_view")
    path = written(tmp_path / "x.parquet", "messages", [[{"role": "user", "content": "hello"}]] * 5)
    assert list(load_text(path)) == ["hello"] * 5


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary(4)])
def test_a_column_of_bytes_is_said_to_be_one(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "bytes.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.array([b"some", b"text"], kind)}), path)
    with pytest.raises(UsageError, match=r"text holds bytes.*; write it as a column of strings"):
        list(load_text(path))
