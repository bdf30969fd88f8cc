"""Attacks on the header of an artifact, each with the message that it is refused with."""

from forge import Attack, changed, entry, header_text, prefix, put, replaced

ARRAY = "array 'int:codes'"

HEADER_ATTACKS: dict[str, tuple[Attack, str]] = {
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
