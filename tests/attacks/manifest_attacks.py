"""Attacks on the manifest of an artifact and on the files inside, each with the message that it is refused with."""

import base64
import json
import zlib

from forge import Attack, changed, deep, header_text, prefix, put, recut, replaced, shift, tree

MANIFEST_ATTACKS: dict[str, tuple[Attack, str]] = {
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

FILE_ATTACKS: dict[str, tuple[Attack, str]] = {
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
