"""Random damage: an artifact loads or is refused with one of our errors, and never takes long."""

import copy
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf.kernels.formats import decode, kinds
from nstf.runtime.artifact import open_artifact, verify
from nstf.runtime.artifact.reader import parse_structure

MUTATIONS = 2_000
SLOWEST_S = 1.0  # of this process's own time: a busy machine is no hang

NASTY: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 8, 9, 255, 256, 2**20, 2**31, 2**40, 2**63, 2**64, 10**400, 0.0, -0.0,
    0.5, 1.0, 1e300, "", "0", "1", "int", "dense", "raw", "zlib", "float32", "F16", "x" * 2000, "../../etc",
    "/", "\\", "a\0b", "\ud800", "%", ":", "__class__", "__init__", "é", [], {}, [[]], [0], [1], [-1],
    [2**62, 2**62], [1] * 9, [1] * 100, [1.5], ["1"], [True], [None], {"kind": "dense"}, {"kind": "add"},
    {"a": {}}, {"shared": "int"},
]  # fmt: skip
NASTY_TEXT = [
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\0", b"\xff", b"\\ud800", b"\\u0000", b"NaN",
    b"-Infinity", b"1e999", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b" " * 1000, b"\xef\xbb\xbf", b"-",
    b"0", b"1", b'"a":1,', b"null",
]  # fmt: skip


def byte_damage(rng: random.Random, raw: bytes, end: int) -> bytes:
    """Some bytes of the first `end` flipped, overwritten, inserted, removed or doubled."""
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(end)
        kind = rng.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = rng.randrange(256)
        elif kind == 2:
            del changed[at : at + rng.choice((1, 2, 8, 100))]
        elif kind == 3:
            changed[at:at] = rng.choice(NASTY_TEXT)
        elif kind == 4:
            changed[at:at] = changed[at : at + rng.choice((1, 10, 100))]
        else:
            word = rng.choice(NASTY_TEXT)
            changed[at : at + len(word)] = word
        end = min(end, len(changed))
        if not end:
            break
    if len(changed) >= 8 and rng.random() < 0.5:  # half with a length that fits again
        changed[:8] = max(0, int.from_bytes(raw[:8], "little") + len(changed) - len(raw)).to_bytes(
            8, "little"
        )
    return bytes(changed)


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) below `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.append((value, key))
        places(item, found)
    return found


def drawn(rng: random.Random) -> Any:
    """A copy of a value of the list: a later mutation goes into what an earlier one put in, and must not change the list."""
    return copy.deepcopy(rng.choice(NASTY))


def nasty(rng: random.Random, old: Any) -> Any:
    """Another value: near the old one, or from the list."""
    if type(old) is int and rng.random() < 0.5:
        return old + rng.choice((-1, 1, 8, -8, old, 2**32))
    if isinstance(old, str) and rng.random() < 0.3:
        return rng.choice(kinds())
    if isinstance(old, list) and rng.random() < 0.5:
        return rng.choice((old[::-1], old + old, old[1:], [old], [*old, 1], [1, *old]))
    return drawn(rng)


def field_damage(rng: random.Random, good: Any) -> bytes:
    """One to three fields of the header or the manifest changed, removed, added, renamed or exchanged."""
    forged = good.copy()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = places(forged.header if rng.random() < 0.35 else forged.manifest, [])
        container, key = rng.choice(found)
        if (isinstance(container, list) and key >= len(container)) or (
            isinstance(container, dict) and key not in container
        ):
            continue
        kind = rng.randrange(10)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[str(drawn(rng))] = container.pop(key)
        elif kind == 2 and isinstance(container, dict):
            container[str(drawn(rng))] = drawn(rng)
        elif kind == 3:
            other, other_key = rng.choice(found)
            try:
                container[key], other[other_key] = other[other_key], container[key]
                json.dumps(forged.header), json.dumps(forged.manifest)
            except (LookupError, ValueError, RecursionError):  # gone by now, or put into itself
                return bytes(good.copy().raw())
        elif kind == 4 and isinstance(container, list):
            container.insert(key, drawn(rng))
        else:
            container[key] = nasty(rng, container[key])
    try:
        return bytes(forged.raw(seal=rng.random() < 0.7))
    except (TypeError, ValueError):  # the manifest is no longer an object of plain values
        return bytes(good.copy().raw())


def outcome(raw: bytes) -> str:
    """`loads` or the class of our error; anything else passes through and fails the test."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > len(raw) - 8:
        return "CorruptError"  # what `read_header` checks; the attacks go through it on disk
    try:
        parse_structure(raw[8 : 8 + length], len(raw), "fuzz")
    except (CorruptError, UnsupportedError) as error:
        assert str(error).startswith("fuzz: ") and str(error).isprintable() and len(str(error)) < 1000, str(
            error
        )
        return type(error).__name__
    return "loads"


def run(seed: int, count: int, good: Any, good_file: bytes, path: Path) -> dict[str, int]:
    rng = random.Random(seed)
    seen: dict[str, int] = {}
    end = 8 + int.from_bytes(good_file[:8], "little")
    for number in range(count):
        raw = byte_damage(rng, good_file, end) if number % 2 else field_damage(rng, good)
        start = time.process_time()
        try:
            result = outcome(raw)
        except Exception as error:
            error.add_note(f"mutation {number} of seed {seed}")
            raise
        assert time.process_time() - start < SLOWEST_S, f"mutation {number} of seed {seed} is slow"
        seen[result] = seen.get(result, 0) + 1
        if result == "loads" and seen[result] % 4 == 0:  # decoding costs fifty times the rest
            path.write_bytes(raw)
            use(path)
    return seen


def use(path: Path) -> None:
    """What passes at open must be usable: every tensor decodes, every file unpacks or is refused."""
    with open_artifact(path) as artifact:
        for name in artifact.names():
            decode(artifact.encoded(name))
        for name in artifact.file_names():
            try:
                artifact.file(name)
            except CorruptError:
                pass


def test_2000_mutations_load_or_are_refused(good: Any, good_file: bytes, tmp_path: Path) -> None:
    seen = run(1, MUTATIONS, good, good_file, tmp_path / "m.nstf")
    assert sum(seen.values()) == MUTATIONS
    assert set(seen) == {"loads", "CorruptError", "UnsupportedError"}
    assert seen["CorruptError"] > 0.9 * MUTATIONS


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(2, 12))
def test_1000000_mutations_load_or_are_refused(
    seed: int, good: Any, good_file: bytes, tmp_path: Path
) -> None:
    run(seed, 100_000, good, good_file, tmp_path / "m.nstf")


def test_every_truncation_is_refused(good_file: bytes, put: Callable[[bytes], Path]) -> None:
    path = put(good_file)
    verify(path)
    for size in range(len(good_file) - 1, -1, -1):
        with path.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(CorruptError):
            open_artifact(path)


def test_flipped_bit_anywhere_is_found_by_verify(good_file: bytes, put: Callable[[bytes], Path]) -> None:
    """Every third byte, with a bit chosen at random: the header's digest covers what the arrays' do not.

    Every bit of every byte: test_deep_fuzz.py.
    """
    rng = random.Random(0)
    path = put(good_file)
    for at, byte in list(enumerate(good_file))[::3]:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
        with pytest.raises((CorruptError, UnsupportedError)):
            verify(path)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
    verify(path)


def test_ordinary_checkpoints_are_parsed_by_the_same_code(tmp_path: Path) -> None:
    """Dimensions of 0 and any metadata are right there, damage is not."""
    import torch
    from safetensors.torch import save_file

    from nstf.runtime.artifact import parse_header

    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.zeros(0, 3),
        "b/c:0": torch.ones(2, dtype=torch.float8_e4m3fn),
        "é": torch.tensor(1.0),
    }
    save_file(tensors, path, metadata={"format": "pt", "note": "two\nlines"})
    entries, metadata = parse_header(path)
    assert metadata == {"format": "pt", "note": "two\nlines"}
    assert {name: (e.dtype, e.shape) for name, e in entries.items()} == {
        "a": ("F32", (0, 3)),
        "b/c:0": ("F8_E4M3", (2,)),
        "é": ("F32", ()),
    }
    with path.open("rb") as file:
        file.seek(entries["é"].start)
        assert file.read(entries["é"].end - entries["é"].start) == b"\0\0\x80\x3f"
    with pytest.raises(CorruptError, match="has the dimension 0, expected integers >= 1"):
        parse_header(path, artifact=True)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(CorruptError, match="the arrays end at byte"):
        parse_header(path)
    with pytest.raises(UsageError, match="no such file"):
        parse_header(tmp_path / "none")
