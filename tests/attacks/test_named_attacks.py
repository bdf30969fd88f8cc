"""One case per way to attack a reader of weight files, each refused with its exact message."""

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nstf.errors import CorruptError, NstfError, UnsupportedError
from nstf.runtime.artifact import open_artifact, verify

HINT = "; the file is damaged or incomplete, fetch or convert it again"
OTHER_FILE = "; a model's own file becomes one by nstf convert"


def prefix(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little")


def entry(good: Any, name: str = "int:codes") -> Any:
    return good.header[name]


def header_text(change: Callable[[bytes], bytes]) -> Callable[[Any], bytes]:
    """An attack on the text of the header."""

    def attack(good: Any) -> bytes:
        text = change(good.text())
        return prefix(text) + text + good.data

    return attack


def changed(change: Callable[[Any], Any]) -> Callable[[Any], bytes]:
    """An attack on the parsed header or manifest; the header's own digest is made right again."""

    def attack(good: Any) -> bytes:
        change(good)
        return bytes(good.raw())

    return attack


def put(target: Any, key: Any, value: Any) -> None:
    target[key] = value


def tree(good: Any, name: str = "int") -> Any:
    return good.manifest["tensors"][name]["tree"]


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda text: text.replace(old, new, 1)


ARRAY = "array 'int:codes'"
FORMATS = (
    "this version reads add, cp, dense, fp8, grid, int, low_rank, mxfp4, permute, rotated, shuffle, tensor_train, "
    "trellis, tucker"
)

HEADER_ATTACKS: dict[str, tuple[Callable[[Any], bytes], str]] = {
    "empty file": (lambda g: b"", "0 bytes are too few for a header"),
    "seven bytes": (lambda g: b"1234567", "7 bytes are too few for a header"),
    "49 bytes of nothing": (lambda g: bytes(49), "the header does not begin with '{'"),
    "length of 2**64 - 1": (
        lambda g: b"\xff" * 8 + g.text(),
        "the header's length 18446744073709551615 is above 100000000 bytes",
    ),
    "length beyond the file": (
        lambda g: b"\xe8\x03" + bytes(6) + b"{}",
        "the header's length 1000 is beyond the file's 10 bytes",
    ),
    "leading blank": (header_text(lambda t: b" " + t), "the header does not begin with '{'"),
    "byte order mark": (header_text(lambda t: b"\xef\xbb\xbf" + t), "the header does not begin with '{'"),
    "an array for a header": (header_text(lambda t: b"[]"), "the header does not begin with '{'"),
    "not UTF-8": (header_text(lambda t: b'{"\xff":1}'), "the header is not UTF-8 (byte 2)"),
    "raw control character": (
        header_text(lambda t: b'{"a\0":1}'),
        "the header is not JSON (Invalid control character at at character 3)",
    ),
    "cut in a text": (
        header_text(lambda t: b'{"a'),
        "the header has unbalanced brackets or is nested deeper than 64 levels",
    ),
    "trailing garbage": (
        header_text(lambda t: t.rstrip() + b"x"),
        "the header is not JSON (Extra data at character {end})",
    ),
    "100,000 open brackets": (
        header_text(lambda t: b'{"a":' + b"[" * 100_000),
        "the header has unbalanced brackets or is nested deeper than 64 levels",
    ),
    "100,000 levels": (
        header_text(lambda t: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "the header has unbalanced brackets or is nested deeper than 64 levels",
    ),
    "1,000,000 quotes": (
        header_text(lambda t: b"{" + b'\\"' * 1_000_000),
        "the header has unbalanced brackets or is nested deeper than 64 levels",
    ),
    "integer of 5,000 digits": (
        header_text(replaced(b'"shape":[', b'"shape":[' + b"9" * 5000 + b",")),
        "the header holds an integer of too many digits",
    ),
    "NaN": (
        header_text(replaced(b'"shape":[', b'"shape":[NaN,')),
        "the header holds NaN, which is not a JSON number",
    ),
    "1e999": (
        header_text(replaced(b'"shape":[', b'"shape":[1e999,')),
        "the header holds a number out of range (1e999)",
    ),
    "array named twice": (
        header_text(replaced(b'"add:x.codes":', b'"int:codes":1,"int:codes":2,"add:x.codes":')),
        "the header has the key 'int:codes' twice",
    ),
    "metadata named twice": (
        header_text(replaced(b'{"__metadata__":', b'{"__metadata__":{},"__metadata__":')),
        "the header has the key '__metadata__' twice",
    ),
    "metadata key twice": (
        header_text(replaced(b'{"nstf":', b'{"nstf":"","nstf":')),
        "the header has the key 'nstf' twice",
    ),
    "dtype twice": (
        header_text(replaced(b'"dtype":', b'"dtype":"U8","dtype":')),
        "the header has the key 'dtype' twice",
    ),
    "metadata that is a list": (
        header_text(lambda t: b'{"__metadata__":[]}'),
        "the header's metadata is not an object of strings",
    ),
    "metadata value that is a number": (
        header_text(lambda t: b'{"__metadata__":{"nstf":1}}'),
        "the header's metadata is not an object of strings",
    ),
    "no metadata": (
        lambda g: prefix(b"{}") + b"{}",
        "not an .nstf artifact: its metadata has not exactly the key 'nstf'",
    ),
    "second metadata key": (
        header_text(replaced(b'{"nstf":', b'{"a":"","nstf":')),
        "not an .nstf artifact: its metadata has not exactly the key 'nstf'",
    ),
    "NUL in a name": (
        changed(lambda g: put(g.header, "a\0", g.header.pop("int:codes"))),
        "array 'a\\x00': the name is empty, too long or has control characters",
    ),
    "empty name": (
        changed(lambda g: put(g.header, "", g.header.pop("int:codes"))),
        "array '': the name is empty, too long or has control characters",
    ),
    "lone surrogate in a name": (
        changed(lambda g: put(g.header, "\ud800", g.header.pop("int:codes"))),
        "array '\\ud800': the name is empty, too long or has control characters",
    ),
    "name of 2,000 characters": (
        changed(lambda g: put(g.header, "a" * 2000, g.header.pop("int:codes"))),
        "array '" + "a" * 76 + "...: the name is empty, too long or has control characters",
    ),
    "entry that is a list": (
        changed(lambda g: put(g.header, "int:codes", [])),
        f"{ARRAY}: expected exactly the keys dtype, shape and data_offsets",
    ),
    "unknown field": (
        changed(lambda g: put(entry(g), "extra", 1)),
        f"{ARRAY}: expected exactly the keys dtype, shape and data_offsets",
    ),
    "no dtype": (
        changed(lambda g: entry(g).pop("dtype")),
        f"{ARRAY}: expected exactly the keys dtype, shape and data_offsets",
    ),
    "unknown dtype": (changed(lambda g: put(entry(g), "dtype", "F128")), f"{ARRAY}: unknown dtype 'F128'"),
    "dtype that is a list": (
        changed(lambda g: put(entry(g), "dtype", ["U8"])),
        f"{ARRAY}: unknown dtype ['U8']",
    ),
    "shape that is a text": (
        changed(lambda g: put(entry(g), "shape", "4")),
        f"{ARRAY}: the shape is not a list of at most 64 integers",
    ),
    "1,000 dimensions": (
        changed(lambda g: put(entry(g), "shape", [1] * 1000)),
        f"{ARRAY}: the shape is not a list of at most 64 integers",
    ),
    "negative dimensions": (
        changed(lambda g: put(entry(g), "shape", [-4, -8])),
        f"{ARRAY}: the shape has the dimension -4, expected integers >= 1",
    ),
    "dimension of 0": (
        changed(lambda g: put(entry(g), "shape", [0])),
        f"{ARRAY}: the shape has the dimension 0, expected integers >= 1",
    ),
    "dimension that is true": (
        changed(lambda g: put(entry(g), "shape", [True, 32])),
        f"{ARRAY}: the shape has the dimension True, expected integers >= 1",
    ),
    "dimension that is a fraction": (
        changed(lambda g: put(entry(g), "shape", [4.0, 8])),
        f"{ARRAY}: the shape has the dimension 4.0, expected integers >= 1",
    ),
    "shape that overflows 64 bits": (
        changed(lambda g: put(entry(g), "shape", [2**32, 2**32, 1])),
        f"{ARRAY}: the shape has more than 2**63 elements",
    ),
    "shape larger than its data": (
        changed(lambda g: put(entry(g), "shape", [5, 8])),
        f"{ARRAY}: 32 bytes of data do not fit U8 [5, 8]",
    ),
    "offsets that are a triple": (
        changed(lambda g: entry(g)["data_offsets"].append(1)),
        f"{ARRAY}: data_offsets is not a pair of integers",
    ),
    "offsets that are texts": (
        changed(lambda g: put(entry(g), "data_offsets", ["0", "32"])),
        f"{ARRAY}: data_offsets is not a pair of integers",
    ),
    "offsets reversed": (
        changed(lambda g: put(entry(g), "data_offsets", [64, 32])),
        f"{ARRAY}: data_offsets [64, 32] are out of order",
    ),
    "negative offset": (
        changed(lambda g: put(entry(g), "data_offsets", [-32, 0])),
        f"{ARRAY}: data_offsets [-32, 0] are out of order",
    ),
    "offsets of 2**64": (
        changed(lambda g: put(entry(g), "data_offsets", [2**64, 2**64 + 32])),
        f"{ARRAY}: data_offsets [18446744073709551616, 18446744073709551648] are out of order",
    ),
    "byte behind the last array": (
        lambda g: g.raw() + b"x",
        "the arrays end at byte {size}, the file at byte {size+1}",
    ),
    "last byte gone": (lambda g: g.raw()[:-1], "the arrays end at byte {size}, the file at byte {size-1}"),
}


def shift(good: Any, by: int) -> None:
    good.header["int:codes"]["data_offsets"] = [v + by for v in good.header["int:codes"]["data_offsets"]]


def recut(good: Any, content: bytes, size: int) -> None:
    """Makes `config.json`, the file inside, the last array with this stored content and stated size."""
    place = good.header["nstf.file/config.json"]["data_offsets"]
    length, delta = place[1] - place[0], len(content) - (place[1] - place[0])
    good.data = good.data[: place[0]] + content + good.data[place[1] :]
    for value in good.header.values():
        if value["data_offsets"][0] >= place[1]:
            value["data_offsets"] = [v + delta for v in value["data_offsets"]]
    place[1] = place[0] + len(content)
    good.header["nstf.file/config.json"]["shape"] = [len(content)]
    good.manifest["files"]["config.json"]["size"] = size
    assert length > 0


MANIFEST_ATTACKS: dict[str, tuple[Callable[[Any], bytes], str]] = {
    "not JSON": (
        lambda g: prefix(t := json.dumps({"__metadata__": {"nstf": "hello"}}).encode()) + t,
        "the manifest is not JSON (Expecting value at character 0)",
    ),
    "a list": (
        lambda g: prefix(t := json.dumps({"__metadata__": {"nstf": "[]"}}).encode()) + t,
        "the manifest is not an object",
    ),
    "lone surrogate": (
        lambda g: prefix(t := b'{"__metadata__":{"nstf":"\\ud800"}}') + t,
        "the manifest is not UTF-8",
    ),
    "nested too deep": (
        lambda g: prefix(t := json.dumps({"__metadata__": {"nstf": "[" * 9999 + "]" * 9999}}).encode()) + t,
        "the manifest has unbalanced brackets or is nested deeper than 64 levels",
    ),
    "version missing": (
        changed(lambda g: g.manifest.pop("version")),
        "the manifest's version is None, expected a positive integer",
    ),
    "version of text": (
        changed(lambda g: put(g.manifest, "version", "1")),
        "the manifest's version is '1', expected a positive integer",
    ),
    "version true": (
        changed(lambda g: put(g.manifest, "version", True)),
        "the manifest's version is True, expected a positive integer",
    ),
    "unknown key": (changed(lambda g: put(g.manifest, "code", "x")), "the manifest: unknown key 'code'"),
    "key missing": (changed(lambda g: g.manifest.pop("files")), "the manifest: key 'files' is missing"),
    "tensors a list": (
        changed(lambda g: put(g.manifest, "tensors", [])),
        "the manifest's 'tensors' is not an object",
    ),
    "report a text": (
        changed(lambda g: put(g.manifest, "report", "")),
        "the manifest's 'report' is not an object",
    ),
    "digests in hexadecimal": (
        changed(lambda g: put(g.manifest, "sha256", ["0" * 64] * len(g.header))),
        "the manifest's 'sha256' is not base64 of SHA-256 digests",
    ),
    "digest cut": (
        changed(lambda g: put(g.manifest, "sha256", base64.b64encode(bytes(31)).decode())),
        "the manifest's 'sha256' is not base64 of SHA-256 digests",
    ),
    "digests with a line end": (
        changed(lambda g: put(g.manifest, "sha256", g.manifest["sha256"] + "\n")),
        "the manifest's 'sha256' is not base64 of SHA-256 digests",
    ),
    "digests with loose bits": (
        changed(lambda g: put(g.manifest, "sha256", "A" * 42 + "B=")),
        "the manifest's 'sha256' is not base64 of SHA-256 digests",
    ),
    "digest missing": (
        changed(lambda g: put(g.manifest, "sha256", base64.b64encode(bytes(32)).decode())),
        "1 SHA-256 digests for {arrays} arrays",
    ),
    "other blanks": (
        header_text(replaced(b'{\\"attention\\":', b'{\\"attention\\": ')),
        "the manifest is not canonical JSON",
    ),
    "key twice": (
        header_text(replaced(b'{\\"attention\\":', b'{\\"attention\\":1,\\"attention\\":')),
        "the manifest has the key 'attention' twice",
    ),
    "surrogate in the report": (
        changed(lambda g: put(g.manifest["report"], "a", "\udc00")),
        "the manifest holds a text that is not Unicode",
    ),
    "header changed, digest not": (
        header_text(replaced(b'\\"kld\\":0.125', b'\\"kld\\":0.025')),
        "the header's SHA-256 differs from the one it states",
    ),
    "padding changed, digest not": (
        header_text(lambda t: t + b" "),
        "the header's SHA-256 differs from the one it states",
    ),
    "array missing": (
        changed(lambda g: put(g.manifest["tensors"], "new", g.manifest["tensors"]["dense"])),
        "array 'new:values' is missing (1 missing in all)",
    ),
    "array left over": (
        changed(lambda g: g.manifest["tensors"].pop("mxfp4")),
        "array 'mxfp4:codes' is left over (2 left over in all)",
    ),
    "array of another dtype": (
        changed(lambda g: put(g.header["dense:values"], "dtype", "F16")),
        "array 'dense:values' is F16 [3], expected BF16 [3]",
    ),
    "array of another shape": (
        changed(lambda g: put(g.header["int:codes"], "shape", [8, 4])),
        "array 'int:codes' is U8 [8, 4], expected U8 [4, 8]",
    ),
    "absurd shape": (
        changed(lambda g: put(g.manifest["tensors"]["int"], "shape", [2**30, 2**30])),
        "tensor 'int': shape [1073741824, 1073741824] has more than 2**40 elements",
    ),
    "shape of 0": (
        changed(lambda g: put(g.manifest["tensors"]["int"], "shape", [0, 4])),
        "tensor 'int': shape [0, 4] has a dimension that is not a positive integer",
    ),
    "shape of text": (
        changed(lambda g: put(g.manifest["tensors"]["int"], "shape", "44")),
        "tensor 'int': the shape is not a list",
    ),
    "shape of 9 dimensions": (
        changed(lambda g: put(g.manifest["tensors"]["int"], "shape", [1] * 9)),
        "tensor 'int': shape [1, 1, 1, 1, 1, 1, 1, 1, 1] has more than 8 dimensions",
    ),
    "unknown source dtype": (
        changed(lambda g: put(g.manifest["tensors"]["int"], "dtype", "__class__")),
        "tensor 'int': unknown dtype '__class__'",
    ),
    "tensor with an unknown key": (
        changed(lambda g: put(g.manifest["tensors"]["int"], "code", 1)),
        "tensor 'int': expected the keys shape, dtype and tree, or 'shared' alone",
    ),
    "tree that is a text": (
        changed(lambda g: put(g.manifest["tensors"]["int"], "tree", "int")),
        "tensor 'int': a tree node must be an object, not str",
    ),
    "bits of 9": (
        changed(lambda g: put(tree(g), "bits", 9)),
        "tensor 'int': int: bits must be 2 to 8, not 9",
    ),
    "bits of text": (
        changed(lambda g: put(tree(g), "bits", "4")),
        "tensor 'int': int.bits must be int, not str",
    ),
    "bits true": (
        changed(lambda g: put(tree(g), "bits", True)),
        "tensor 'int': int.bits must be int, not bool",
    ),
    "unknown parameter": (
        changed(lambda g: put(tree(g), "module", "os")),
        "tensor 'int': int: unknown key 'module'; known are bits, group, symmetric, scale_bits, lead",
    ),
    "child missing": (
        changed(lambda g: tree(g, "low")["children"].pop("a")),
        "tensor 'low': low_rank at root: children ['b'], expected ['a', 'b']",
    ),
    "child too many": (
        changed(lambda g: put(tree(g), "children", {"x": {"kind": "dense", "dtype": "int8"}})),
        "tensor 'int': int at root: children ['x'], expected []",
    ),
    "child with a path for a name": (
        changed(lambda g: put(tree(g, "low")["children"], "../a", {"kind": "mxfp4"})),
        "tensor 'low': low_rank: '../a' is not a child's name",
    ),
    "tree of 100 levels": (
        changed(lambda g: put(g.manifest["tensors"]["int"], "tree", deep(30))),
        "tensor 'int': a tree deeper than 8 levels",
    ),
    "shares itself": (
        changed(lambda g: put(g.manifest["tensors"], "tied", {"shared": "tied"})),
        "tensor 'tied' shares 'tied', which is itself shared",
    ),
    "shares nothing": (
        changed(lambda g: put(g.manifest["tensors"], "tied", {"shared": "none"})),
        "tensor 'tied' shares 'none', which does not exist",
    ),
    "cycle of shares": (
        changed(lambda g: g.manifest["tensors"].update(tied={"shared": "tied2"}, tied2={"shared": "tied"})),
        "tensor 'tied' shares 'tied2', which is itself shared",
    ),
    "shares a number": (
        changed(lambda g: put(g.manifest["tensors"], "tied", {"shared": 1})),
        "tensor 'tied': expected the keys shape, dtype and tree, or 'shared' alone",
    ),
    **{
        f"tensor named {name!r}": (
            changed(lambda g, name=name: put(g.manifest["tensors"], name, {"shared": "int"})),
            f"tensor name {name!a} {why}",
        )
        for name, why in [
            ("../../etc/passwd", "is a path"),
            ("/etc/passwd", "is a path"),
            ("a/../b", "is a path"),
            ("a//b", "is a path"),
            ("..", "is a path"),
            ("a\\b", "is a path"),
            ("a\nb", "has control characters"),
            ("C:evil", "has ':' or '%' that is not percent-encoded"),
            ("a%2fb", "has ':' or '%' that is not percent-encoded"),
            ("", "is empty or longer than 512 characters"),
        ]
    },
    **{
        f"file named {name!r}": (
            changed(lambda g, name=name: put(g.manifest["files"], name, {"size": 1, "encoding": "raw"})),
            f"file name {name!a} is not a bare file name",
        )
        for name in ("../config.json", "/etc/passwd", "a/b", "a\\b", ".bashrc", "", "con:fig", "a\0")
    },
    "file larger than the limit": (
        changed(lambda g: put(g.manifest["files"]["config.json"], "size", 2**40)),
        "file 'config.json': size 1099511627776 is not between 0 and 268435456 bytes",
    ),
    "file of negative size": (
        changed(lambda g: put(g.manifest["files"]["config.json"], "size", -1)),
        "file 'config.json': size -1 is not between 0 and 268435456 bytes",
    ),
    "file with an unknown encoding": (
        changed(lambda g: put(g.manifest["files"]["config.json"], "encoding", "pickle")),
        "file 'config.json': unknown encoding 'pickle'",
    ),
    "encoding that is a list": (
        changed(lambda g: put(g.manifest["files"]["config.json"], "encoding", [])),
        "file 'config.json': unknown encoding []",
    ),
    "file with an unknown key": (
        changed(lambda g: put(g.manifest["files"]["config.json"], "mode", 0o777)),
        "file 'config.json': expected the keys size and encoding",
    ),
    "raw file of another size": (
        changed(lambda g: put(g.manifest["files"]["tokenizer.model"], "size", 41)),
        "file 'tokenizer.model' has 40 bytes, the manifest says 41",
    ),
    "file not in the manifest": (
        changed(lambda g: g.manifest["files"].pop("config.json")),
        "array 'nstf.file/config.json' is left over (1 left over in all)",
    ),
    "file not in the data": (
        changed(lambda g: put(g.manifest["files"], "new.json", {"size": 9, "encoding": "zlib"})),
        "array 'nstf.file/new.json' is missing (1 missing in all)",
    ),
    "hole in the data": (
        changed(lambda g: shift(g, 1)),
        "array 'int:codes' leaves a hole in the data: it starts at {at+1}, not {at}",
    ),
    "overlap in the data": (
        changed(lambda g: shift(g, -1)),
        "array 'int:codes' leaves an overlap in the data: it starts at {at-1}, not {at}",
    ),
}

FILE_ATTACKS: dict[str, tuple[Callable[[Any], bytes], str]] = {
    "decompression bomb": (
        changed(lambda g: recut(g, zlib.compress(bytes(10_000_000), 9), 1000)),
        "file 'config.json' does not unpack to the 1000 bytes stated",
    ),
    "file shorter than stated": (
        changed(lambda g: recut(g, zlib.compress(b"x" * 10), 1000)),
        "file 'config.json' does not unpack to the 1000 bytes stated",
    ),
    "garbage behind the compressed file": (
        changed(lambda g: recut(g, zlib.compress(b"x" * 10) + b"garbage", 10)),
        "file 'config.json' does not unpack to the 10 bytes stated",
    ),
    "not zlib": (
        changed(lambda g: recut(g, b"hello", 10)),
        "file 'config.json' cannot be unpacked (Error -3 while decompressing data: incorrect header check)",
    ),
}


def deep(levels: int) -> dict[str, Any]:
    node: dict[str, Any] = {"kind": "dense", "dtype": "int8"}
    for _ in range(levels):
        node = {"kind": "permute", "dims": [0, 1], "children": {"x": node}}
    return node


def expected(message: str, good: Any, size: int) -> str:
    """The message with the sizes of this file filled in."""
    at = 8 + len(good.text()) + json.loads(good.text())["int:codes"]["data_offsets"][0]
    for word, value in {
        "{size}": size, "{size+1}": size + 1, "{size-1}": size - 1, "{arrays}": len(good.header),
        "{end}": len(good.text().rstrip()),
        "{at}": at, "{at+1}": at + 1, "{at-1}": at - 1,
    }.items():  # fmt: skip
        message = message.replace(word, str(value))
    return message


@pytest.mark.parametrize("name", [*HEADER_ATTACKS, *MANIFEST_ATTACKS])
def test_attack_is_refused_at_open_with_its_message(
    name: str, good: Any, good_file: bytes, put: Callable[[bytes], Path]
) -> None:
    attack, message = {**HEADER_ATTACKS, **MANIFEST_ATTACKS}[name]
    wanted = expected(message, good, len(good_file))
    path = put(attack(good))
    with pytest.raises(CorruptError) as caught:
        open_artifact(path)
    hint = OTHER_FILE if wanted.startswith("not an .nstf artifact") else HINT
    assert str(caught.value) == f"{path}: {wanted}{hint}"
    with pytest.raises(CorruptError):
        verify(path)


@pytest.mark.parametrize("name", FILE_ATTACKS)
def test_attack_by_a_file_inside_is_refused_when_it_is_read(
    name: str, good: Any, put: Callable[[bytes], Path]
) -> None:
    attack, message = FILE_ATTACKS[name]
    path = put(attack(good))
    with open_artifact(path) as artifact, pytest.raises(CorruptError) as caught:
        artifact.file("config.json")
    assert str(caught.value) == f"{path}: {message}{HINT}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda g: g.manifest.update(version=2, new_section={}),
            "format version 2; this nstf reads version 1, update nstf",
        ),
        (
            lambda g: g.manifest.update(version=10**400),
            "format version an integer of 1329 bits; this nstf reads version 1, update nstf",
        ),
        (
            lambda g: put(tree(g), "kind", "lattice"),
            f"tensor 'int': unknown encoding 'lattice'; {FORMATS}; update nstf",
        ),
        (
            lambda g: put(tree(g), "kind", "os.system"),
            f"tensor 'int': unknown encoding 'os.system'; {FORMATS}; update nstf",
        ),
        (
            lambda g: put(tree(g), "kind", None),
            f"tensor 'int': unknown encoding 'None'; {FORMATS}; update nstf",
        ),
    ],
)
def test_what_a_newer_version_wrote_is_unsupported_and_named(
    change: Callable[[Any], None], message: str, good: Any, put: Callable[[bytes], Path]
) -> None:
    change(good)
    path = put(good.raw())
    with pytest.raises(UnsupportedError) as caught:
        open_artifact(path)
    assert str(caught.value) == f"{path}: {message}"


def test_the_good_file_itself_opens_forged_or_not(
    good: Any, good_file: bytes, put: Callable[[bytes], Path]
) -> None:
    assert good.raw() == good_file
    verify(put(good_file))


def test_message_of_an_attack_is_one_line(good: Any, put: Callable[[bytes], Path]) -> None:
    put_in = {"a\nb\x1b[31m": good.header.pop("int:codes")}
    good.header |= put_in
    with pytest.raises(NstfError) as caught:
        open_artifact(put(good.raw()))
    assert str(caught.value).isprintable()
