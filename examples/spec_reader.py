"""A reader of .nstf files written from docs/format.md alone, in plain Python and numpy: no torch, no nstf.

`python examples/spec_reader.py FILE [NAME]` lists or decodes. Left out: shuffle, fp8, mxfp4, cp, tucker, tensor_train.
"""

import base64
import hashlib
import json
import math
import sys
import zlib
from statistics import NormalDist

import numpy as np

PAIRS = "F64:f8 F32:f4 F16:f2 BF16:u2 I64:i8 I32:i4 I16:i2 I8:i1 U8:u1 BOOL:?"
DTYPES = dict(pair.split(":") for pair in PAIRS.split())
F32 = np.float32


class Reader:
    """An open file; `tensors` and `files` are the manifest's."""

    def __init__(self, path):
        self.data = np.memmap(path, np.uint8, "r")
        self.start = 8 + int.from_bytes(self.data[:8].tobytes(), "little")
        raw = self.data[: self.start].tobytes()
        self.arrays = json.loads(raw[8:])
        manifest = json.loads(self.arrays.pop("__metadata__")["nstf"])
        zeroed = raw.replace(manifest["header_sha256"].encode(), b"0" * 64)
        if manifest["version"] != 1 or hashlib.sha256(zeroed).hexdigest() != manifest["header_sha256"]:
            raise ValueError("another version of the format, or a damaged header")
        self.tensors, self.files = manifest["tensors"], manifest["files"]
        sums = base64.b64decode(manifest["sha256"])
        self.sha256 = {name: sums[32 * i : 32 * i + 32] for i, name in enumerate(sorted(self.arrays))}

    def array(self, name):
        """A stored array, checked against its digest; 16-bit floats as float32."""
        first, last = self.arrays[name]["data_offsets"]
        raw, dtype = self.data[self.start + first : self.start + last].tobytes(), self.arrays[name]["dtype"]
        if hashlib.sha256(raw).digest() != self.sha256[name]:
            raise ValueError(f"{name} differs from its SHA-256")
        values = np.frombuffer(raw, "<" + DTYPES[dtype])
        if dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(F32)
        return (values.astype(F32) if dtype == "F16" else values).reshape(self.arrays[name]["shape"])

    def file(self, name):
        raw = self.array(f"nstf.file/{name}").tobytes()
        return zlib.decompress(raw) if self.files[name]["encoding"] == "zlib" else raw

    def decode(self, name):
        """A dense tensor, float32 (integers as they are)."""
        name = self.tensors[name].get("shared", name)
        return self.node(self.tensors[name]["tree"], f"{name}:", tuple(self.tensors[name]["shape"]))

    def node(self, tree, path, shape):
        """The dense tensor of a node whose arrays' names begin with `path`."""
        lead = tree.get("lead", 1)
        rows, cols = math.prod(shape[:lead]), math.prod(shape[lead:])
        get = lambda name: self.array(path + name)  # noqa: E731
        child = lambda name, size: self.node(tree["children"][name], f"{path}{name}.", size)  # noqa: E731
        match tree["kind"]:
            case "dense":
                return get("values")
            case "int":
                units = unpack(get("codes"), tree["bits"], cols).astype(F32)
                zeros = F32(1 << (tree["bits"] - 1))
                if not tree["symmetric"]:
                    zeros = unpack(get("zeros"), tree["bits"], -(-cols // (tree["group"] or cols)))
                    zeros = spread(zeros.astype(F32), tree, cols)
                return ((units - zeros) * spread(scales(tree, get), tree, cols)).reshape(shape)
            case "grid":
                values = get("table")[unpack(get("codes"), 4, cols)]
                return (values * spread(scales(tree, get), tree, cols)).reshape(shape)
            case "trellis":
                unit = get("scale") if tree["scale_bits"] == 16 else np.square(get("scale_codes") / F32(255))
                return (trellis(tree, get, rows, cols) * (get("scale_super") * unit)[:, None]).reshape(shape)
            case "rotated":
                x = hadamard(child("x", shape).reshape(rows, cols), tree["block_in"], tree["seed"], 0)
                return hadamard(x.T, tree["block_out"], tree["seed"], 1).T.reshape(shape)
            case "permute":
                dims = tree["dims"]
                return child("x", tuple(shape[dims.index(i)] for i in range(len(dims)))).transpose(dims)
            case "low_rank":
                return (child("a", (rows, tree["rank"])) @ child("b", (tree["rank"], cols))).reshape(shape)
            case "add":
                return child("x", shape) + child("y", shape)
        raise ValueError(f"the encoding {tree['kind']!r} is not in this reader")


def unpack(packed, bits, count):
    """The codes in rows of a little-endian bit stream: uint8 [rows, bytes] -> int [rows, count]."""
    stream = np.unpackbits(packed, axis=1, bitorder="little")[:, : bits * count]
    return stream.reshape(len(packed), count, bits) @ (1 << np.arange(bits))


def scales(tree, get):
    """The stored scales, float32 [rows, groups]."""
    coded = tree["scale_bits"] == 8
    return get("scale_super")[:, None] * ((get("scale_codes") + F32(1)) / F32(256)) if coded else get("scale")


def spread(values, tree, cols):
    """One value a group -> one a column."""
    return np.repeat(values, tree["group"] or cols, axis=1)[:, :cols]


def trellis(tree, get, rows, cols):
    """The values at scale 1, float32 [rows, cols]."""
    sizes, codes, at = tree["rows"] or [rows], get("codes"), 0
    more = len(sizes) - 1
    part = unpack(get("section")[None], more.bit_length(), rows)[0] if more else np.zeros(rows)
    out, down, across = np.empty((rows, cols), F32), [-(-size // 16) for size in sizes], -(-cols // 16)
    for i, q in enumerate(tree["quarter_bits"]):
        tiles = codes[at : at + down[i] * across * 8 * q].reshape(-1, 8 * q).astype(int)
        at += tiles.size
        first = (np.arange(1, 257) * q // 4 - 16) % (64 * q)  # the bit where each state begins
        word = sum(tiles[:, (first // 8 + k) % (8 * q)] << (8 * k) for k in range(3))
        values = codebook(q)[(word >> (first % 8)) & 0xFFFF].reshape(down[i], across, 16, 16)
        out[part == i] = values.transpose(0, 2, 1, 3).reshape(16 * down[i], -1)[: sizes[i], :cols]
    return out


def codebook(q):
    """The value of each of the 65536 states, float32."""
    state = np.arange(1 << 16)
    if q <= 12:
        return (sum((state * 0xA7491E23 >> 8 * i) & 255 for i in range(4)) - 510).astype(F32) / F32(148)
    upper = np.float16([NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(2048, 4096)])
    return np.concatenate([-upper[::-1], upper]).astype(F32)[(state * 25115 & 0xFFFF) >> 4]


def hadamard(x, block, seed, side):
    """x [n, m] times Sylvester's Hadamard matrix in orthonormal blocks, times a sign for each column."""
    if not block:
        return x
    h, a = np.ones((1, 1)), np.arange(x.shape[1]) * 0x9E3779B1 + (2 * seed + side + 1) * 0x632BE5AB
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    for multiplier in (0x21F0AAAD, 0x735A2D97):
        a = ((a & 0xFFFFFFFF) ^ ((a & 0xFFFFFFFF) >> 16)) * multiplier & 0xFFFFFFFF
        a ^= a >> 15
    rotated = x.reshape(-1, block) @ (h / math.sqrt(block)).astype(F32)
    return rotated.reshape(x.shape) * (1 - 2 * (a >> 16 & 1)).astype(F32)


if __name__ == "__main__":
    reader = Reader(sys.argv[1])
    print(reader.decode(sys.argv[2]) if sys.argv[2:] else json.dumps(reader.tensors))
