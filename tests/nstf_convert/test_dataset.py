"""Text for calibration: documents, token windows, and a held-out part that is really held out."""

import errno
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nstf.errors import NstfError, UsageError
from nstf_convert import windows as token_windows
from nstf_convert.dataset import fingerprint, load_text
from nstf_convert.windows import first_documents, tokenise_windows


class Letters:
    """A tokenizer of one token per character, with what it puts around a text."""

    def __init__(self, prefix: tuple[int, ...] = (), suffix: tuple[int, ...] = ()) -> None:
        self.prefix, self.suffix = list(prefix), list(suffix)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(c) for c in text]
        return {"input_ids": [*self.prefix, *ids, *self.suffix] if add_special_tokens else ids}


def words(count: int, start: int = 0) -> str:
    return "".join(f"w{i:06d}\n" for i in range(start, start + count))


def text_of(windows: torch.Tensor) -> set[str]:
    """The whole words in windows of Letters tokens."""
    found = set()
    for row in windows.tolist():
        found |= set("".join(map(chr, row)).split("\n")[1:-1])
    return {word for word in found if len(word) == 7}


def test_text_and_markdown_files_are_one_document(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_text("one\n\ntwo é")
        assert list(load_text(tmp_path / name)) == ["one\n\ntwo é"]


def test_jsonl_takes_text_content_or_messages(tmp_path: Path) -> None:
    records: list[Any] = [
        {"text": "a", "id": 1},
        {"content": "b"},
        {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
        {"prompt": "e"},
        "f",
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in records) + "\n\n")
    assert list(load_text(path)) == ["a", "b", "c\n\nd", "e", "f"]


SPARSE = [
    {"text": "a"},
    {"text": None},
    {"messages": []},
    {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "b"},
        ]
    },
    {
        "messages": [
            {"role": "assistant"},
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "image"}]},
        ]
    },
    {"text": None, "prompt": "d"},
    {"text": "", "content": "e"},
    {"text": "", "messages": []},
]


def test_records_without_a_text_are_passed_over(tmp_path: Path) -> None:
    """One null, or a call of a tool in a chat, refused a whole dataset."""
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, SPARSE)))
    assert list(load_text(path)) == ["a", "", "", "b", "c", "d", "e", ""]
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chats: list[Any] = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], [], None]
    parquet.write_table(pyarrow.table({"messages": chats}), tmp_path / "x.parquet")
    assert list(load_text(tmp_path / "x.parquet")) == ["a", ""]


def test_a_row_of_parquet_without_a_text_has_it_in_another_column(tmp_path: Path) -> None:
    """As a line of JSON: a first column of nulls hid the text of the second."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "chat"}]
    rows: list[dict[str, Any]] = [{"text": f"{i}" if i % 300 else None} for i in range(1, 1000)]
    rows += [{"content": "c"}, {}, {"text": "a", "content": "not this"}, {"messages": []}]
    rows += [{"messages": [], "prompt": "p"}, {"messages": chat, "prompt": "not this"}] + [
        {"prompt": "end"}
    ] * 600
    columns = {name: [row.get(name) for row in rows] for name in ("text", "content", "messages", "prompt")}
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet", row_group_size=700)
    expected = [row["text"] for row in rows[:999] if row["text"]]
    expected += ["c", "a", "", "p", "chat"] + ["end"] * 600
    assert list(load_text(tmp_path / "x.parquet")) == expected
    assert list(load_text(tmp_path / "x.parquet", "content")) == ["c", "not this"]
    # What holds no texts is not looked at: pictures under one of the names.
    columns = {"text": ["a", None, ""], "content": [b"\xff"] * 3, "prompt": [None, "b", "c"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "y.parquet")
    assert list(load_text(tmp_path / "y.parquet")) == ["a", "b", "c"]


@pytest.mark.parametrize("name, content", [("x.jsonl", '{"text": "a"}\n'), ("x.txt", "a")])
def test_the_mark_of_an_encoding_is_no_text(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert list(load_text(tmp_path / name)) == ["a"]


def test_a_line_of_more_values_than_text_is_refused(tmp_path: Path) -> None:
    """30 MiB of empty objects took 1,001."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": "hello", "x": [' + "{}," * 400_000 + "{}]}")
    with pytest.raises(
        UsageError, match=r"x\.jsonl, line 2: holds more than \d+ values, too many for its length"
    ):
        list(load_text(path))


def test_a_line_of_text_may_look_like_values(tmp_path: Path) -> None:
    texts = [',[{"\\\\' * 300_000, "1,2," * 300_000]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": [{"content": text} for text in texts]}))
    assert list(load_text(path)) == ["\n\n".join(texts)]


def test_jsonl_takes_the_named_field(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "a", "body": "b"}))
    assert list(load_text(path, field="body")) == ["b"]
    with pytest.raises(UsageError, match="line 1: no text under missing; write it under"):
        list(load_text(path, field="missing"))


def test_parquet_takes_its_text_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["a", None, "b"]}), tmp_path / "x.parquet")
    assert list(load_text(tmp_path / "x.parquet")) == ["a", "b"]
    messages = [[{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]]
    parquet.write_table(pyarrow.table({"messages": messages}), tmp_path / "y.parquet")
    assert list(load_text(tmp_path / "y.parquet")) == ["c\n\nd"]
    with pytest.raises(UsageError, match="has no column body, but id, text"):
        list(load_text(tmp_path / "x.parquet", field="body"))
    (tmp_path / "z.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(UsageError, match="cannot be read as parquet"):
        list(load_text(tmp_path / "z.parquet"))


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "c"}')
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "image.png").write_bytes(b"\xff")
    assert list(load_text(tmp_path)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "no such dataset"),
        ("x.csv", b"a,b", "unknown kind"),
        ("x.txt", b"ok \xff\xfe", "not UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n{broken', r"line 2: not JSON"),
        ("x.jsonl", b'{"text": 3}', "line 1: no text under text, content, messages, prompt"),
        ("x.jsonl", b"[1]", "line 1: no text under"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        list(load_text(tmp_path / name))


def test_a_folder_without_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no \.txt, \.md, \.jsonl, \.parquet file"):
        list(load_text(tmp_path))


def test_a_hub_name_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("from the hub")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / "data"))
    assert list(load_text("org/corpus")) == ["from the hub"]


def test_windows_have_the_asked_shape_and_order_is_fixed_by_the_seed() -> None:
    documents = [words(200, 1000 * i) for i in range(10)]
    a = tokenise_windows(Letters(), documents, 64, 12, 4, seed=1)
    b = tokenise_windows(Letters(), iter(documents), 64, 12, 4, seed=1)
    c = tokenise_windows(Letters(), documents, 64, 12, 4, seed=2)
    assert a.fit.shape == (12, 64)
    assert a.held_out.shape == (4, 64)
    assert a.fit.dtype == torch.int64
    assert torch.equal(a.fit, b.fit)
    assert torch.equal(a.held_out, b.held_out)
    assert not torch.equal(a.fit, c.fit)


@pytest.mark.parametrize("seed", range(10))
def test_fit_and_held_out_share_no_document(seed: int) -> None:
    documents = [words(100, 1000 * i) for i in range(20)]
    windows = tokenise_windows(Letters(), documents, 64, 20, 10, seed=seed)
    assert windows.split == "documents"
    fit, held = ({word[:4] for word in text_of(part)} for part in (windows.fit, windows.held_out))
    assert fit
    assert held
    assert not fit & held


@pytest.mark.parametrize("seed", range(5))
def test_one_long_text_is_split_into_disjoint_regions(seed: int) -> None:
    windows = tokenise_windows(Letters(), [words(5000)], 64, 20, 10, seed=seed)
    assert windows.split == "regions"
    fit, held = text_of(windows.fit), text_of(windows.held_out)
    assert not set(fit) & set(held)


@pytest.mark.parametrize("seed", range(5))
def test_held_out_windows_of_one_text_come_from_all_over_it(seed: int) -> None:
    windows = tokenise_windows(Letters(), [words(20_000)], 64, 100, 16, seed=seed)
    quarters = [
        {int(word[1:]) * 4 // 20_000 for word in text_of(part)}
        for part in (windows.held_out[:8], windows.held_out[8:])
    ]
    assert quarters == [{0, 1, 2, 3}] * 2


def test_windows_of_a_long_text_come_from_all_over_it() -> None:
    windows = tokenise_windows(Letters(), [words(20_000)], 64, 200, 0, seed=0)
    numbers = sorted(int(word[1:]) for word in text_of(windows.fit))
    assert numbers[0] < 10_000
    assert numbers[-1] > 15_000
    assert windows.held_out.shape == (0, 64)


def test_no_token_is_in_two_windows() -> None:
    windows = tokenise_windows(Letters(), [words(1000)], 64, 60, 30, seed=3)
    rows = [word for part in (windows.fit, windows.held_out) for word in text_of(part)]
    assert len(rows) == len(set(rows))


def test_barely_enough_text_is_used_to_the_last_token() -> None:
    windows = tokenise_windows(Letters(), [words(120)], 64, 10, 5, seed=0)
    assert windows.fit.shape == (10, 64)
    together = torch.cat([windows.fit, windows.held_out]).flatten().tolist()
    assert "".join(map(chr, together)) == words(120)


@pytest.mark.parametrize(("documents", "found"), [([], 0), (["   \n"], 0), (["abc"], 3), ([words(100)], 800)])
def test_too_little_text_says_how_many_tokens_there_are(documents: list[str], found: int) -> None:
    with pytest.raises(
        UsageError, match=f"my.txt has {found} tokens, but 12 . 4 windows of 64 need 1024; give more"
    ):
        tokenise_windows(Letters(), documents, 64, 12, 4, name="my.txt")


def test_a_first_bos_is_in_every_window() -> None:
    windows = tokenise_windows(Letters(prefix=(1,)), [words(500)], 64, 8, 4)
    assert windows.fit[:, 0].tolist() == [1] * 8
    assert windows.fit.shape == (8, 64)
    assert (windows.fit[:, 1:] != 1).all()


def test_an_encoders_marks_are_around_every_window() -> None:
    windows = tokenise_windows(Letters(prefix=(1,), suffix=(2,)), [words(500)], 64, 8, 4)
    assert windows.held_out[:, 0].tolist() == [1] * 4
    assert windows.held_out[:, -1].tolist() == [2] * 4


def test_a_lone_end_token_is_left_out() -> None:
    windows = tokenise_windows(Letters(suffix=(2,)), [words(500)], 64, 8, 4)
    assert (windows.fit != 2).all()


@pytest.mark.parametrize(("seq_len", "fit", "held"), [(1, 4, 4), (64, -1, 4), (64, 0, 0), (2, 1, 1)])
def test_windows_that_make_no_sense_are_refused(seq_len: int, fit: int, held: int) -> None:
    with pytest.raises(UsageError, match="windows of"):
        tokenise_windows(Letters(prefix=(1,), suffix=(2,)), [words(500)], seq_len, fit, held)


def test_a_huge_dataset_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_windows, "POOL_CHARS", 1000)
    taken = 0

    def endless() -> Any:
        nonlocal taken
        while True:
            taken += 1
            yield words(100)

    windows = tokenise_windows(Letters(), endless(), 64, 4, 2)
    assert windows.fit.shape == (4, 64)
    assert taken < 100


def test_fingerprint_is_of_the_content_and_not_of_the_folder(tmp_path: Path) -> None:
    prints = []
    for name, content in (("a", "text"), ("b", "text"), ("c", "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(content)
        prints.append((fingerprint(tmp_path / name), fingerprint(tmp_path / name / "x.txt")))
    assert prints[0] == prints[1]
    assert prints[0][0] != prints[2][0]
    assert prints[0][1] != prints[2][1]


def test_fingerprint_depends_on_the_names_in_a_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text("text")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_fingerprint_of_a_large_file_samples_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf_convert import dataset

    monkeypatch.setattr(dataset, "FINGERPRINT_SAMPLE", 10)
    path, prints = tmp_path / "x.txt", []
    for text in ("a" * 100, "a" * 99 + "b", "b" + "a" * 99, "a" * 101):
        path.write_text(text)
        prints.append(fingerprint(path))
    assert len(set(prints)) == 4


@pytest.mark.parametrize("name", ["text.txt", "lines.jsonl"])
def test_a_file_that_the_disk_does_not_give_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`error: Input/output error` was all that calibrate said."""
    (tmp_path / name).write_text('{"text": "a"}')

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    for read in (lambda: list(load_text(tmp_path / name)), lambda: fingerprint(tmp_path / name)):
        with pytest.raises(NstfError, match=rf"{name} cannot be read \(Input/output error\)"):
            read()


def test_a_parquet_file_that_the_disk_does_not_give_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setattr(parquet, "ParquetFile", fail)
    with pytest.raises(NstfError, match=r"x.parquet cannot be read \(Input/output error\)") as error:
        list(load_text(tmp_path / "x.parquet"))
    assert error.value.exit_code == 1


@pytest.mark.parametrize("read", [lambda path: list(load_text(path)), fingerprint])
def test_a_folder_that_changes_while_it_is_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    """A file that goes between the list and its turn was a FileNotFoundError of `fingerprint`."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    opened = Path.open

    def remove_and_open(file: Path, *how: Any, **more: Any) -> Any:
        (tmp_path / "b.txt").unlink(missing_ok=True)
        return opened(file, *how, **more)

    monkeypatch.setattr(Path, "open", remove_and_open)
    with pytest.raises(NstfError, match=r"b\.txt cannot be read \(No such file") as error:
        read(tmp_path)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("kind", ["a link to a folder", "a link to nothing", "a pipe"])
def test_what_of_a_folder_would_be_passed_over_is_named(tmp_path: Path, kind: str) -> None:
    """Its text was missing without a word."""
    folder, strange = tmp_path / "texts", tmp_path / "texts" / "b.txt"
    for each in (folder, tmp_path / "more"):
        each.mkdir()
        (each / "a.txt").write_text("text")
    if kind == "a pipe":
        os.mkfifo(strange)
    else:
        strange.symlink_to(tmp_path / ("more" if kind == "a link to a folder" else "nothing"))
    for read in (lambda: list(load_text(folder)), lambda: fingerprint(folder)):
        with pytest.raises(UsageError, match=r"b\.txt is (a link to a folder|no regular file): take it out"):
            read()
    strange.unlink()
    (folder / ".git").symlink_to(tmp_path / "more")
    assert list(load_text(folder)) == ["text"]


def test_hidden_folders_hold_no_texts(tmp_path: Path) -> None:
    """Jupyter keeps a copy of an edited text there, which was fitted on while the other was held out."""
    (tmp_path / "a.txt").write_text("text")
    before = fingerprint(tmp_path)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a-checkpoint.txt").write_text("text")
    assert list(load_text(tmp_path)) == ["text"]
    assert fingerprint(tmp_path) == before


def test_a_folder_below_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text was missing without a word."""
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / name).write_text("text")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if os.fspath(path).endswith("sub"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(NstfError, match=r"sub cannot be read \(Permission denied\)"):
        list(load_text(tmp_path))


@pytest.mark.parametrize(
    "record", ["a \ud800", {"text": "\udc00"}, {"messages": [{"role": "user", "content": "\ud83d"}]}]
)
def test_half_a_character_is_named_with_its_line(tmp_path: Path, record: Any) -> None:
    # The tokenizer was blamed for it, as one that is not supported.
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps("good \U0001f600") + "\n" + json.dumps(record))
    with pytest.raises(UsageError, match=r"x\.jsonl, line 2: the text is not Unicode"):
        list(load_text(path))


@pytest.mark.parametrize("text", ["", "  ", "ab"])
def test_short_and_blank_documents_are_not_gathered_without_end(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_windows, "POOL_CHARS", 1 << 20)

    def endless() -> Iterator[str]:
        yield "some text"
        while True:
            yield text

    assert len(list(first_documents(endless(), 10_000))) == (393 if text == "ab" else 1)
    found = tokenise_windows(Letters(), itertools.chain([words(4000)], endless()), 64, 4)
    assert found.fit.shape == (4, 64)


def test_a_name_that_is_no_text_has_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(words(3))
    other = fingerprint(tmp_path)
    (tmp_path / "a.txt").rename(tmp_path / os.fsdecode(b"\xff.txt"))
    assert fingerprint(tmp_path) != other
