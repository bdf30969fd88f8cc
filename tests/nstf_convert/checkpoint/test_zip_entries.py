"""Archives that readers of zip take for different ones: what is checked must be what torch reads."""

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nstf.errors import CorruptError, UnsupportedError
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.checkpoint.zip_entries import ZipError, read_entries

# What makes a bytearray of a billion bytes, as `weights_only` allows.
HOSTILE = (
    b"\x80\x02}X\x01\x00\x00\x00acbuiltins\nbytearray\n\x8a\x04" + (10**9).to_bytes(4, "little") + b"\x85Rs."
)


def saved(folder: Path) -> bytes:
    """What torch.save writes of two tensors of one size."""
    torch.save({"a": torch.arange(64.0), "b": torch.ones(64)}, folder / "x.bin")
    return (folder / "x.bin").read_bytes()


def listed(data: bytes) -> dict[str, int]:
    """Where the list of entries has each name."""
    at = int.from_bytes(data[-6:-2], "little")
    found = {}
    while data[at : at + 4] == b"PK\x01\x02":
        lengths = struct.unpack("<3H", data[at + 28 : at + 34])
        found[data[at + 46 : at + 46 + lengths[0]].decode()] = at
        at += 46 + sum(lengths)
    return found


def written(entries: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


def contents(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def other_case(data: bytes) -> bytes:
    """torch's reader finds DATA.PKL under data.pkl; Python's does not."""
    held = contents(data) | {"x/data.pkl": HOSTILE}
    return written([(name.replace("data.pkl", "DATA.PKL"), held[name]) for name in held])


def both_cases(data: bytes) -> bytes:
    held = contents(data)
    return written([("x/DATA.PKL", HOSTILE), *held.items()])


def two_lists(data: bytes) -> bytes:
    """Python takes the list before the end, torch the one at the place that the end states."""
    hostile = written(list((contents(data) | {"x/data.pkl": HOSTILE}).items()))
    second = bytearray(hostile[:-22] + data)
    second[-6:-2] = hostile[-6:-2]
    return bytes(second)


def over_each_other(data: bytes) -> bytes:
    """The second tensor is where the first one is."""
    at, changed = listed(data), bytearray(data)
    first, second = at["x/data/0"], at["x/data/1"]
    changed[second + 42 : second + 46] = changed[first + 42 : first + 46]
    return bytes(changed)


def inside_another(data: bytes) -> bytes:
    """The second tensor's header lies in the first one's content, and so do its values."""
    changed, at = bytearray(data), listed(data)
    start = struct.unpack("<I", data[at["x/data/0"] + 42 : at["x/data/0"] + 46])[0]
    content = data.index(torch.arange(64.0).numpy().tobytes())
    head = b"PK\x03\x04" + bytes(22) + struct.pack("<2H", 8, 0) + b"x/data/1"
    changed[content : content + len(head)] = head
    changed[at["x/data/1"] + 42 : at["x/data/1"] + 46] = struct.pack("<I", content)
    assert start < content
    return bytes(changed)


def compressed(data: bytes) -> bytes:
    """torch maps what is stored, whatever the entry says of it."""
    at, changed = listed(data)["x/data/1"], bytearray(data)
    changed[at + 10 : at + 12] = struct.pack("<H", 8)
    return bytes(changed)


def swapped(data: bytes) -> bytes:
    """Each tensor is where the list says that the other is."""
    at, changed = listed(data), bytearray(data)
    first, second = at["x/data/0"] + 42, at["x/data/1"] + 42
    changed[first : first + 4], changed[second : second + 4] = (
        data[second : second + 4],
        data[first : first + 4],
    )
    return bytes(changed)


def beyond(data: bytes) -> bytes:
    at, changed = listed(data)["x/data/1"], bytearray(data)
    changed[at + 20 : at + 28] = struct.pack("<2I", 1 << 30, 1 << 30)
    return bytes(changed)


def shortened(data: bytes) -> bytes:
    """The first tensor's values lie before those of the second: mapped, it would reach over them."""
    held = contents(data)
    return written([(name, c[:128] if name == "x/data/0" else c) for name, c in held.items()])


def negative(data: bytes) -> bytes:
    """The first tensor's elements are counted from the end of the file, by torch that maps it."""
    held = contents(data)
    name = next(n for n in held if n.endswith("data.pkl"))
    first = held[name].index(b"K@")  # of the first storage's id
    pickled = held[name][:first] + b"J" + (-161).to_bytes(4, "little", signed=True) + held[name][first + 2 :]
    return written([(n, pickled if n == name else c) for n, c in held.items()])


ATTACKS: dict[str, Callable[[bytes], bytes]] = {
    "two lists of entries": two_lists,
    "the pickle's name in two cases": both_cases,
    "entries over each other": over_each_other,
    "an entry inside of another": inside_another,
    "an entry that says it is compressed": compressed,
    "two entries that change places": swapped,
    "an entry beyond the end": beyond,
    "a storage longer than its record": shortened,
    "a storage of fewer elements than none": negative,
    "bytes after the end": lambda data: data + b"\x00",
    "more entries than are there": lambda data: data[:-14] + struct.pack("<2H", 60_000, 60_000) + data[-10:],
    "fewer entries than are there": lambda data: data[:-14] + struct.pack("<2H", 2, 2) + data[-10:],
    "no pickle": lambda data: written([(n, c) for n, c in contents(data).items() if "pkl" not in n]),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_archive_that_readers_differ_about_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "attack.bin"
    path.write_bytes(ATTACKS[name](saved(tmp_path)))
    with pytest.raises(CorruptError, match=r"attack\.bin cannot be read as PyTorch weights"):
        open_checkpoint(path)


def test_a_pickle_is_checked_whatever_the_case_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "attack.bin"
    path.write_bytes(other_case(saved(tmp_path)))
    with pytest.raises(UnsupportedError, match=r"builtins\.bytearray"):
        open_checkpoint(path)


def test_the_lists_of_large_archives_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(tmp_path)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)  # as with 65,536 entries
    large = written(list(contents(data).items()))
    assert b"PK\x06\x06" in large
    (tmp_path / "large.bin").write_bytes(large)
    with open_checkpoint(tmp_path / "large.bin") as checkpoint:
        assert torch.equal(checkpoint.get("a"), torch.arange(64.0))
    at = large.index(b"PK\x06\x06")
    for place, value in ((32, 9999), (40, 1), (48, 1)):
        changed = bytearray(large)
        changed[at + place : at + place + 8] = struct.pack("<Q", value)
        (tmp_path / "large.bin").write_bytes(changed)
        with pytest.raises(ZipError):
            read_entries(tmp_path / "large.bin")


def test_every_byte_of_the_lists_may_be_wrong(tmp_path: Path) -> None:
    """An error of ours, or the tensors that were saved."""
    data, path = saved(tmp_path), tmp_path / "x.bin"
    first = int.from_bytes(data[-6:-2], "little")
    for at in range(first, len(data), 3):
        for value in (0, 0xFF, data[at] ^ 1):
            changed = bytearray(data)
            changed[at] = value
            path.write_bytes(changed)
            try:
                entries = read_entries(path)
            except (ZipError, CorruptError):
                continue
            assert [e.start for e in entries] == sorted(e.start for e in entries)
            assert all(data[e.header + 30 :].startswith(e.name) for e in entries)
