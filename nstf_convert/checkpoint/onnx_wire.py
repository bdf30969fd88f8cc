"""A walker over protobuf's wire format: just enough to find an ONNX file's initialisers without loading them.

The onnx package parses the whole file into memory; here weights stay in the file, and every length is checked
against the message it lies in. Field numbers are those of onnx.proto (onnx 1.19).
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_DIMS = 16
MAX_EXTERNAL_ENTRIES = 16
MAX_TENSORS = 1 << 18
# Of the data of all tensors. Writers store a tensor's values in one; each costs 100 bytes of memory, and 3 of the file.
# Values that are not packed, a field each, are one piece as long as they follow each other.
MAX_PIECES = 1 << 18
# Messages of a whole model that other readers make objects of, and one more for every so many bytes.
MAX_MESSAGES = 1 << 18
BYTES_A_MESSAGE = 32
# The fields of each kind of message that hold messages, and their kinds; lists of texts count as well, since an empty one
# takes two bytes of the file.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "leaf", 14: "leaf", 20: "training", 25: "function", 26: "devices"},
    "training": {1: "graph", 2: "graph", 3: "leaf", 4: "leaf"},
    "function": {4: "leaf", 5: "leaf", 6: "leaf", 7: "node", 9: "leaf", 11: "attribute", 12: "value", 14: "leaf"},
    "graph": {1: "node", 5: "tensor", 11: "value", 12: "value", 13: "value", 14: "annotation", 15: "sparse", 16: "leaf"},
    "annotation": {2: "leaf"},
    "node": {1: "leaf", 2: "leaf", 5: "attribute", 9: "leaf", 10: "placed"},
    "attribute": {
        5: "tensor", 6: "graph", 9: "leaf", 10: "tensor", 11: "graph", 14: "type", 15: "type", 22: "sparse", 23: "sparse",
    },
    "tensor": {6: "leaf", 13: "leaf", 16: "leaf"},
    "sparse": {1: "tensor", 2: "tensor"},
    "value": {2: "type", 4: "leaf"},
    "type": {1: "typed", 4: "typed", 5: "map", 8: "typed", 9: "typed"},
    "typed": {1: "type", 2: "shape"},
    "map": {2: "type"},
    "devices": {3: "leaf"},
    "placed": {2: "sharding"},
    "sharding": {2: "leaf", 3: "leaf", 4: "sharded"},
    "sharded": {2: "leaf"},
    "shape": {1: "leaf"},
    "leaf": {},
}  # fmt: skip
MAX_DEPTH = 64


class WireError(ValueError):
    """The bytes are not a protobuf message of the expected form."""


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of the file."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Run(Span):
    """Fields of one value each that follow each other, their keys between them. Its length is that of the values."""

    value_bytes: int

    def __len__(self) -> int:
        return self.value_bytes


@dataclass(frozen=True)
class Initialiser:
    """One TensorProto: where its values are, not the values.

    data: field number -> spans (4 float, 5 int32, 7 int64, 9 raw, 10 double, 11 uint64); runs where it is not packed.
    """

    name: str
    data_type: int
    dims: tuple[int, ...]
    data: dict[int, list[Span]]
    external: dict[str, str] | None


def varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """An unsigned varint of at most 64 bits, and the position after it."""
    value, shift = 0, 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
        shift += 7
    raise WireError(f"a number at byte {at} does not end")


def fields(data: mmap.mmap, span: Span) -> Iterator[tuple[int, int, int, Span]]:
    """(field number, wire type, value of a varint, span of the payload) of each field of a message."""
    at = span.start
    while at < span.end:
        key, at = varint(data, at, span.end)
        number, kind, value, start = key >> 3, key & 7, 0, at
        if kind == VARINT:
            value, at = varint(data, at, span.end)
        elif kind == BYTES:
            length, start = varint(data, at, span.end)
            at = start + length
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        else:
            raise WireError(f"wire type {kind} at byte {at}")
        if at > span.end or number == 0:
            raise WireError(f"field {number} at byte {start} leaves its message")
        yield number, kind, value, Span(start, at)


def initialisers(data: mmap.mmap) -> Iterator[Initialiser]:
    """The initialisers of the model's main graph. Raises WireError."""
    found_graphs = (
        span for number, kind, _, span in fields(data, Span(0, len(data))) if (number, kind) == (7, BYTES)
    )
    graphs = list(islice(found_graphs, 2))
    if len(graphs) != 1:
        raise WireError(f"{'several graphs' if graphs else 'no graph'}, expected one")
    tensors = pieces = 0
    for number, kind, _, span in fields(data, graphs[0]):
        if (number, kind) == (5, BYTES):
            found = _tensor(data, span, MAX_PIECES - pieces)
            tensors, pieces = tensors + 1, pieces + sum(map(len, found.data.values()))
            if tensors > MAX_TENSORS:
                raise WireError(f"more than {MAX_TENSORS} initialisers")
            yield found
        elif number == 15:
            raise WireError("sparse initialisers, which are not supported")


def check_messages(data: mmap.mmap) -> None:
    """Raises WireError for a file of so many messages, or so deep, that those who read all of it take far more memory than
    it has bytes."""
    left = [MAX_MESSAGES + len(data) // BYTES_A_MESSAGE]

    def walk(kind: str, span: Span, depth: int) -> None:
        inside = _INSIDE[kind]
        for number, wire, _, part in fields(data, span):
            found = inside.get(number) if wire == BYTES else None
            if found is None:
                continue
            left[0] -= 1
            if left[0] < 0 or depth > MAX_DEPTH:
                raise WireError(f"more messages than its {len(data)} bytes account for, or nested too deeply")
            if _INSIDE[found]:
                walk(found, part, depth + 1)

    walk("model", Span(0, len(data)), 0)


def _tensor(data: mmap.mmap, span: Span, most_pieces: int) -> Initialiser:
    name, data_type, external = "", 0, {}
    dims: list[int] = []
    values: dict[int, list[Span]] = {}
    outside, before = False, span.start
    for number, kind, value, part in fields(data, span):
        if number == 1:
            dims += [value] if kind == VARINT else islice(varints(data, part), MAX_DIMS + 1)
        elif (number, kind) == (2, VARINT):
            data_type = value
        elif (number, kind) == (8, BYTES):
            name = text(data, part)
        elif number in (4, 5, 7, 10, 11) or (number, kind) == (9, BYTES):
            if len(part):
                most_pieces -= _add(values.setdefault(number, []), kind, Span(before, part.end), part)
        elif (number, kind) == (13, BYTES):
            key, entry = _entry(data, part)
            external[key] = entry
        elif (number, kind) == (14, VARINT):
            outside = value == 1
        if len(dims) > MAX_DIMS or len(external) > MAX_EXTERNAL_ENTRIES:
            raise WireError(f"tensor {name[:60]!r} has too many dimensions or entries")
        if most_pieces < 0:
            raise WireError(f"data in more than {MAX_PIECES} pieces, up to tensor {name[:60]!r}")
        before = part.end
    return Initialiser(name, data_type, tuple(dims), values, external if outside else None)


def _add(spans: list[Span], kind: int, field: Span, payload: Span) -> int:
    """Adds a field's payload to a tensor's data; returns by how many pieces that is more."""
    if kind == BYTES:
        spans.append(payload)
        return 1
    last = spans[-1] if spans else None
    if isinstance(last, Run) and last.end == field.start:
        spans[-1] = Run(last.start, field.end, last.value_bytes + len(payload))
        return 0
    spans.append(Run(field.start, field.end, len(payload)))
    return 1


def joined(data: mmap.mmap, spans: list[Span]) -> bytes:
    """The bytes of all values."""
    found = bytearray()
    for span in spans:
        parts = (part for _, _, _, part in fields(data, span)) if isinstance(span, Run) else (span,)
        for part in parts:
            found += data[part.start : part.end]
    return bytes(found)


def varints(data: mmap.mmap, span: Span) -> Iterator[int]:
    """The numbers of a packed field, or of a run of fields."""
    if isinstance(span, Run):
        for _, _, _, part in fields(data, span):
            yield from varints(data, part)
        return
    at = span.start
    while at < span.end:
        value, at = varint(data, at, span.end)
        yield value


def text(data: mmap.mmap, span: Span) -> str:
    """A string of at most 4096 bytes."""
    if len(span) > 4096:
        raise WireError(f"a name of {len(span)} bytes at byte {span.start}")
    try:
        return data[span.start : span.end].decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"a name at byte {span.start} is not UTF-8") from error


def _entry(data: mmap.mmap, span: Span) -> tuple[str, str]:
    found = {number: text(data, part) for number, kind, _, part in fields(data, span) if kind == BYTES}
    return found.get(1, ""), found.get(2, "")
