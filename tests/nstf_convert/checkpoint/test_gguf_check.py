"""Malformed GGUF files: one clear error each, at once, with nothing handed to another library."""

import os
import resource
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from nstf.errors import CorruptError, NstfError, UnsupportedError
from nstf_convert.checkpoint import gguf_check, open_checkpoint
from nstf_convert.checkpoint.gguf_check import read_header

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def tensor(
    name: str = "a.weight", dims: tuple[int, ...] = (32,), ggml_type: int = 0, offset: int = 0
) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, ggml_type, offset)


def build(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (tensor(),),
    data: int = 128,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; every field can be set wrongly.

    Without arguments it is a good one with one float32 vector.
    """
    keys = (key("general.architecture", STRING, text("novel")), *keys)
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + b"\0" * data


HUGE = (1 << 64) - 1
MALFORMED: dict[str, tuple[bytes, str]] = {
    # The 49-byte class on which gguf 0.19 hangs (llama.cpp#27188): an array that claims 2**64 - 1 strings.
    "49 bytes": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", ARRAY, STRING, HUGE),
        "claims 18446744073709551615 elements",
    ),
    "array of arrays": (
        build((key("a", ARRAY, struct.pack("<IQ", ARRAY, 1 << 40)),)),
        "array of the unknown type 9",
    ),
    "array of numbers": (
        build((key("a", ARRAY, struct.pack("<IQ", U64, 1 << 61)),)),
        "claims 2305843009213693952 elements",
    ),
    "array that wraps": (
        build((key("a", ARRAY, struct.pack("<IQ", U64, (1 << 61) + 1)),)),
        "claims .* elements",
    ),
    "array of an unknown type": (
        build((key("a", ARRAY, struct.pack("<IQ", 77, 1)),)),
        "array of the unknown type 77",
    ),
    "tensor count": (build(tensor_count=HUGE), "claims 18446744073709551615 tensors"),
    "tensor count a bit too large": (build(tensor_count=4), "needs|not a name|claims|dimensions"),
    "key count": (build(key_count=HUGE), "claims 18446744073709551615 metadata keys"),
    "key count a bit too large": (build(key_count=2), "unknown type|not a name|needs|claims"),
    "key length": (build((text("abc", HUGE),)), "claims a length of"),
    "string length": (build((key("a", STRING, text("abc", 1 << 50)),)), "claims a length of|needs"),
    "string length at the end": (build((key("a", STRING, text("abc", 100_000)),)), "needs 100000 bytes"),
    "key twice": (build((key("a", U32, b"\0" * 4),) * 2), "'a' is there twice"),
    "empty key": (build((key("", U32, b"\0" * 4),)), "not a name"),
    "key with a control character": (build((key("a\x00b", U32, b"\0" * 4),)), "not a name"),
    "key that is not UTF-8": (build((text(b"\xff\xfe") + struct.pack("<II", U32, 0),)), "not UTF-8"),
    "string that is not UTF-8": (build((key("a", STRING, text(b"\xff")),)), "not UTF-8"),
    "value type": (build((key("a", 13, b"\0" * 8),)), "unknown type 13"),
    "boolean": (build((key("a", BOOL, b"\2"),)), "boolean of value 2"),
    "alignment type": (
        build((key("general.alignment", F32, struct.pack("<f", 32.0)),)),
        "general.alignment' has type 6",
    ),
    "alignment text": (
        build((key("general.alignment", STRING, text("32")),)),
        "general.alignment' has type 8",
    ),
    "alignment zero": (
        build((key("general.alignment", U32, struct.pack("<I", 0)),)),
        "general.alignment is 0",
    ),
    "alignment odd": (
        build((key("general.alignment", U32, struct.pack("<I", 33)),)),
        "general.alignment is 33",
    ),
    "alignment huge": (
        build((key("general.alignment", U32, struct.pack("<I", 1 << 31)),)),
        "general.alignment is",
    ),
    "no dimensions": (build(tensors=(tensor(dims=()),)), "has 0 dimensions"),
    "five dimensions": (build(tensors=(tensor(dims=(1,) * 5),)), "has 5 dimensions"),
    "dimension count": (
        build(tensors=(text("a") + struct.pack("<I", 0xFFFFFFFF),)),
        "has 4294967295 dimensions",
    ),
    "dimension zero": (build(tensors=(tensor(dims=(32, 0)),)), r"has the shape \[32, 0\]"),
    "dimensions that wrap": (build(tensors=(tensor(dims=(1 << 32, 1 << 32)),)), "truncated"),
    "dimensions that wrap to few": (build(tensors=(tensor(dims=(1 << 63, 2, 16)),)), "truncated"),
    "shape larger than the data": (build(tensors=(tensor(dims=(33,)),)), "ends at byte .* truncated"),
    "type that is unknown": (build(tensors=(tensor(ggml_type=9999),)), "ggml type 9999"),
    "type that was removed": (build(tensors=(tensor(ggml_type=4),)), "ggml type 4"),
    "row that is no multiple of the block": (
        build(tensors=(tensor(dims=(33,), ggml_type=8),)),
        "multiple of its block of 32",
    ),
    "offset beyond the file": (build(tensors=(tensor(offset=1 << 40),)), "truncated"),
    "offset that wraps": (build(tensors=(tensor(offset=HUGE - 31),)), "truncated"),
    "offset that is not aligned": (build(tensors=(tensor(offset=4, dims=(16,)),)), "not a multiple of 32"),
    "tensors that overlap": (
        build(tensors=(tensor("a"), tensor("b", offset=64)), data=256),
        "'a' and 'b' overlap",
    ),
    "tensor twice": (
        build(tensors=(tensor("a"), tensor("a", offset=128)), data=256),
        "tensor 'a' is there twice",
    ),
    "tensor name empty": (build(tensors=(tensor(""),)), "not a name"),
    "tensor name long": (build(tensors=(tensor("x" * 257),)), "claims a length of 257"),
    "tensor name length": (build(tensors=(text("a", HUGE),)), "claims a length of"),
    "magic": (build(magic=b"GGML"), "does not begin with the GGUF magic"),
    "version 1": (build(version=1), "version 1 GGUF"),
    "version 4": (build(version=4), "version 4 GGUF"),
    "big endian": (build(version=3 << 24), "big-endian GGUF"),
    "header only": (b"GGUF" + struct.pack("<IQQ", 3, 1, 0), "claims 1 tensors"),
    "magic only": (b"GGUF", "too short"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_at_once(tmp_path: Path, case: str) -> None:
    raw, message = MALFORMED[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    start = time.monotonic()
    with pytest.raises((CorruptError, UnsupportedError), match=message) as caught:
        open_checkpoint(path)
    assert time.monotonic() - start < 5
    assert "m.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_good_file_is_good(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(build())
    header = read_header(tmp_path / "m.gguf")
    assert header.metadata == {"general.architecture": "novel"}
    assert header.tensors["a.weight"].shape == (32,)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    keys = (
        key("general.alignment", U32, struct.pack("<I", 32)),
        key("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yz")),
        key("b", BOOL, b"\1"),
    )
    raw = build(keys, (tensor("a"), tensor("b", offset=128)), data=256)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    read_header(path)
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(CorruptError):
            read_header(path)


def mutations(raw: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Copies of a file with 1 to 4 bytes of its header changed, half of them to extreme values."""
    import random

    generator = random.Random(seed)
    for _ in range(count):
        changed = bytearray(raw)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(raw) - 256)
            changed[at] = generator.choice((0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)))
        yield bytes(changed)


def change_at_random(path: Path, count: int, seed: int) -> int:
    """Reads a file with `count` random changes of its header; how many were refused."""
    keys = (
        key("general.alignment", U32, struct.pack("<I", 32)),
        key("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yz")),
        key("n", ARRAY, struct.pack("<IQ3I", U32, 3, 1, 2, 3)),
    )
    raw = build(keys, (tensor("a"), tensor("b", dims=(32, 1), offset=128)), data=256)
    refused = 0
    for changed in mutations(raw, count, seed):
        path.write_bytes(changed)
        start = time.process_time()
        try:
            header = read_header(path)
        except NstfError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            assert all(t.start + t.size_bytes <= len(raw) for t in header.tensors.values())
        assert time.process_time() - start < 2, changed
    return refused


def test_random_changes_of_the_header_give_an_error_or_a_readable_header(tmp_path: Path) -> None:
    tracemalloc.start()
    refused = change_at_random(tmp_path / "m.gguf", 2000, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > 1000
    assert peak < 64 << 20


def test_arrays_of_numbers_take_what_they_do_in_the_file(tmp_path: Path) -> None:
    """Each number was an object: 64 MiB took 2,778."""
    count = 1 << 20
    kinds: dict[int, str] = {
        BOOL: "?",
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        10: "Q",
        11: "q",
        12: "d",
    }
    keys = [
        key(code.replace("?", "flags"), ARRAY, struct.pack(f"<IQ{count}{code}", n, count, *[100] * count))
        for n, code in kinds.items()
    ]
    path = tmp_path / "m.gguf"
    path.write_bytes(build((*keys, key("yes", ARRAY, struct.pack("<IQ3B", BOOL, 3, 0, 1, 2)))))
    del keys
    tracemalloc.start()
    metadata = read_header(path).metadata
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * path.stat().st_size
    assert len(metadata["flags"]) == count  # a list of true and false took 82 times the file
    for code in set(kinds.values()) - {"?"}:
        assert len(metadata[code]) == count and metadata[code][-1] == 100
    assert metadata["yes"] == [False, True, True]


@pytest.mark.fuzz
def test_1000000_random_changes_of_the_header_give_an_error_or_a_readable_header(tmp_path: Path) -> None:
    """NSTF_FUZZ_CASES: how many instead; NSTF_FUZZ_SEED: other ones."""
    count, seed = (
        int(os.environ.get("NSTF_FUZZ_CASES", "1000000")),
        int(os.environ.get("NSTF_FUZZ_SEED", "1")),
    )
    refused = change_at_random(tmp_path / "m.gguf", count, seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{count} changes, {refused} refused, at most {peak} MiB of the whole process")
    assert refused > count / 2
    assert peak < 1024


def test_a_block_count_larger_than_any_model_is_refused(tmp_path: Path) -> None:
    keys = (
        key("novel.block_count", U32, struct.pack("<I", 0xFFFFFFFF)),
        key("novel.attention.head_count", U32, struct.pack("<I", 1)),
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(build(keys).replace(b"novel", b"llama"))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config is None


def test_texts_of_all_arrays_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """114 MiB of texts of two letters took 833 MiB."""
    monkeypatch.setattr(gguf_check, "MAX_TEXTS", 100)
    some = struct.pack("<IQ", STRING, 50) + text("ab") * 50
    path = tmp_path / "m.gguf"
    path.write_bytes(build((key("a", ARRAY, some), key("b", ARRAY, some))))
    assert read_header(path).metadata["b"] == ["ab"] * 50
    path.write_bytes(build((key("a", ARRAY, some), key("b", ARRAY, some), key("c", ARRAY, some))))
    with pytest.raises(CorruptError, match="its arrays hold more than 100 texts"):
        read_header(path)
