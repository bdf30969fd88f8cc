"""Cases for the parser of artifacts, thousands a second: small headers, cut as text, with the right digest of themselves.

Nothing here needs torch or a disk: a case is the header's text and the size that its file would have.
"""

import base64
import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from json_spans import Spans, spans
from test_fuzz import NASTY, NASTY_TEXT
from test_trees import SHAPES, random_tree

from nstf.errors import CorruptError, UnsupportedError
from nstf.kernels.formats import FormatError, array_specs, kinds, node_from_json
from nstf.runtime.artifact.header import DTYPE_BITS, SAFETENSORS_NAMES, canonical_json, parse_header_bytes
from nstf.runtime.artifact.reader import parse_structure

GOLDEN = Path(__file__).parents[1] / "golden"
ZEROS = b"0" * 64


def _texts(values: list[Any]) -> list[bytes]:
    found = []
    for value in values:
        try:
            found.append(canonical_json(value).encode())
        except ValueError:
            found.append(b"1e999")
    return found


VALUES = _texts([v for v in NASTY if v != 10**400])
WRAPS = [
    (b'{"children":{"x":', b'},"dims":[1,0],"kind":"permute"}'),
    (b'{"children":{"x":', b'},"dims":[0,1],"kind":"permute"}'),
    (b'{"children":{"x":', b'},"block_in":32,"kind":"rotated","seed":1}'),
    (b'{"children":{"x":{"dtype":"float16","kind":"dense"},"y":', b'},"kind":"add"}'),
    (b'{"children":{"a":{"dtype":"float16","kind":"dense"},"b":', b'},"kind":"low_rank","rank":2}'),
    (b"[", b"]"), (b'{"a":', b"}"), (b"[" * 70, b"]" * 70), (b'"', b'"'), (b"-", b""), (b"", b".0"), (b"1", b""),
]  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A good small artifact: texts of its manifest (digest of the header zeroed) and of its arrays, and the data's size."""

    manifest: bytes
    arrays: bytes
    size: int
    manifest_spans: Spans
    # Those inside the manifest's tensors alone, where most of the parser is.
    tensor_spans: Spans
    array_spans: Spans


def base(manifest: dict[str, Any], arrays: dict[str, tuple[str, list[int]]]) -> Base:
    """arrays: name -> (safetensors dtype, shape)."""
    at, entries = 0, {}
    for name, (dtype, shape) in sorted(arrays.items()):
        size = DTYPE_BITS[dtype] // 8
        for dimension in shape:
            size *= dimension
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    sealed = {
        **{key: {} for key in ("attention", "plan", "provenance", "report")}, "version": 1, "files": {},
        **manifest, "sha256": base64.b64encode(bytes(32 * len(arrays))).decode(), "header_sha256": ZEROS.decode(),
    }  # fmt: skip
    text, array_text = canonical_json(sealed).encode(), canonical_json(entries).encode()
    found, begin = spans(text), text.index(b'"tensors":') + 10
    inside = Spans(*([place for place in places if place[0] >= begin] for places in vars(found).values()))
    return Base(text, array_text, at, found, inside, spans(array_text))


def of_tree(tree: dict[str, Any], shape: tuple[int, ...]) -> Base:
    """An artifact of one tensor. Raises FormatError for a tree that does not fit."""
    specs = array_specs(node_from_json(tree), shape)
    record = {"shape": list(shape), "dtype": "float32", "tree": tree}
    arrays = {f"t:{path}": (SAFETENSORS_NAMES[s.dtype_name], list(s.shape)) for path, s in specs.items()}
    return base({"tensors": {"t": record}}, arrays)


def golden_bases() -> list[Base]:
    """One small artifact for every tensor of the golden files, one with a shared name, one with files."""
    found = []
    for path in sorted(GOLDEN.glob("*.nstf")):
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        manifest = json.loads(header.pop("__metadata__")["nstf"])
        for name, record in manifest["tensors"].items():
            if "tree" in record:
                mine = {
                    a: (e["dtype"], e["shape"]) for a, e in header.items() if a.rpartition(":")[0] == name
                }
                found.append(base({"tensors": {name: record}}, mine))
        files = {n: (e["dtype"], e["shape"]) for n, e in header.items() if n.startswith("nstf.file/")}
        if files:
            found.append(base({"tensors": {}, "files": manifest["files"], "report": {"a": [1, 0.5]}}, files))
    dense = {"shape": [3], "dtype": "float32", "tree": {"kind": "dense", "dtype": "float32"}}
    found.append(base({"tensors": {"a": dense, "b": {"shared": "a"}}}, {"a:values": ("F32", [3])}))
    return found


def random_base(rng: random.Random) -> Base:
    """An artifact of one tensor of a random tree."""
    while True:
        tree = random_tree(rng, 2)
        try:
            made = of_tree(tree, tuple(tree["view"]) if "view" in tree else rng.choice(SHAPES))
        except FormatError:
            continue
        if made.size < 1 << 40:
            return made


class Cases:
    """Random cases from a seed: what number n is depends on those before it."""

    def __init__(self, seed: int, bases: list[Base]) -> None:
        self.rng = random.Random(seed)
        self._fixed = len(bases)
        self.bases = [*bases, *(random_base(self.rng) for _ in range(24))]
        self._kinds = [json.dumps(kind).encode() for kind in kinds()]

    def next(self) -> tuple[bytes, int]:
        """A header's text, and the size of its file."""
        rng = self.rng
        if rng.random() < 0.05:  # a tree that nobody saw before, undamaged
            fresh = random_base(rng)
            text = whole(fresh.manifest, fresh.arrays)
            return seal(text), 8 + len(text) + fresh.size
        chosen = rng.choice(self.bases)
        manifest, arrays = chosen.manifest, chosen.arrays
        where = rng.random()
        if where < 0.75:
            places = chosen.tensor_spans if rng.random() < 0.7 else chosen.manifest_spans
            manifest = self.mutated(manifest, places)
        if where > 0.65:
            arrays = self.mutated(arrays, chosen.array_spans)
        text = whole(manifest, arrays)
        if rng.random() < 0.06:
            text = noise(rng, text)
        return seal(text, rng.random() < 0.97), 8 + len(text) + chosen.size

    def mutated(self, text: bytes, places: Spans) -> bytes:
        """One cut, rarely followed by noise in what came of it."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.12 and places.trees:
            start, end = rng.choice(places.trees)
            before, behind = rng.choice(WRAPS[:5])
            new = before + text[start:end] + behind
        elif kind < 0.3 and places.trees:
            start, end = rng.choice(places.trees)
            other = rng.choice(self.bases)
            new = other.manifest[
                slice(*rng.choice(other.manifest_spans.trees or other.manifest_spans.values))
            ]
        elif kind < 0.5 and places.integers:
            start, end = rng.choice(places.integers)
            old = int(text[start:end])
            new = b"%d" % rng.choice(
                (old + 1, old - 1, 2 * old, 8 * old, old + 2**32, -old, old // 2, rng.getrandbits(66))
            )
        elif kind < 0.58 and places.members:
            start, end = rng.choice(places.members)
            new = rng.choice((b"", text[start:end] * 2))
        elif kind < 0.66:
            start, end = rng.choice(places.values)
            new = rng.choice(self._kinds)
        elif kind < 0.74:
            start, end = rng.choice(places.values)
            before, behind = rng.choice(WRAPS)
            new = before + text[start:end] + behind
        elif kind < 0.8:
            (start, end), (first, last) = rng.choice(places.values), rng.choice(places.values)
            new = text[first:last]
        else:
            start, end = rng.choice(places.values)
            new = rng.choice(VALUES)
        return text[:start] + new + text[end:]

    def renew(self) -> None:
        """Other random trees in the place of some."""
        for _ in range(4):
            self.bases[self.rng.randrange(self._fixed, len(self.bases))] = random_base(self.rng)


def noise(rng: random.Random, text: bytes) -> bytes:
    """Bytes overwritten, put in, taken out or doubled."""
    at, kind = rng.randrange(len(text)), rng.randrange(4)
    if kind == 0:
        return text[:at] + bytes([text[at] ^ 1 << rng.randrange(8)]) + text[at + 1 :]
    if kind == 1:
        return text[:at] + rng.choice(NASTY_TEXT) + text[at:]
    if kind == 2:
        return text[:at] + text[at + rng.choice((1, 2, 8, 100)) :]
    return text[:at] + text[at : at + rng.choice((1, 10, 100))] + text[at:]


def whole(manifest: bytes, arrays: bytes) -> bytes:
    """The header's text of a manifest and of an object of arrays."""
    quoted = json.dumps(manifest.decode("utf-8", "replace")).encode()
    return b'{"__metadata__":{"nstf":' + quoted + b"}" + (b"," + arrays[1:] if arrays[1:] != b"}" else b"}")


def seal(text: bytes, right: bool = True) -> bytes:
    """The text with the digest that it states for itself made right."""
    if not right:
        return text
    digest = hashlib.sha256(len(text).to_bytes(8, "little") + text).hexdigest()
    return text.replace(ZEROS, digest.encode())


def outcome(text: bytes, size: int) -> str:
    """`loads` or our error's class; anything else passes through."""
    try:
        parse_structure(text, size, "fuzz")
    except (CorruptError, UnsupportedError) as error:
        said = str(error)
        assert said.startswith("fuzz: ") and said.isprintable() and len(said) < 1000, said
        found = type(error).__name__
    else:
        return "loads"
    if len(text) % 16 == 0:  # the same text as a checkpoint's header
        try:
            parse_header_bytes(text, size, "fuzz")
        except CorruptError:
            pass
    return found
