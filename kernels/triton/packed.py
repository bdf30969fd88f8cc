"""Packed leaves (int, grid, fp8, mxfp4) in the order the Triton kernels read them.

Codes of 5 to 7 bits are split into planes of 4, 2 and 1 bits, low bits first; others are one plane. In a plane of b bits,
chunk c of a row is 16 words of 2 J codes, J = floor(16 / b), so ten codes of 3 bits a word. Word i holds the columns

    k = c 32 J + j 32 + 2 i + h      at bit 16 h + j b      for j in 0..J-1, h in 0..1

so that a thread's load of four words (16 bytes) meets eight neighbouring activations for each j, and the two halves of a
word are neighbours, which is the pair a matrix core takes. Columns are padded to whole chunks of the narrowest plane (512
columns for 1 bit, 256 for 2, 160 for 3, 128 for 4, 64 for 8) with zero codes, which meet activations read as zero.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nstf.kernels.formats import bitpack
from nstf.kernels.formats.scales import group_count, group_size
from nstf.kernels.formats.tree import EncodedTensor, child_encoded
from nstf.kernels.memo import per_encoded

FORMATS = ("fp8", "grid", "int", "mxfp4")

LANES = 16  # words of a chunk
RUN = 2 * LANES  # neighbouring columns of a chunk that differ in nothing but word and half

# How codes become numbers, and scales.
INTEGER, FLOAT, TABLE = 0, 1, 2
STORED, STEPS, EXPONENT = 0, 1, 2

_CODES_AT_ONCE = 1 << 24
_ALL = slice(0, None)
# Nodes whose children are multiplied by as matrices of their own.
_HOLDERS = ("add", "low_rank", "rotated")


@dataclass(frozen=True)
class Layout:
    """What the kernels must know at compile time.

    bits: of a code. group: columns with one scale, a multiple of 8; `whole`: one group a row. mode: INTEGER, FLOAT (sign,
    `exponent` bits, the rest mantissa, of bias `bias`) or TABLE. scales: STORED as numbers, STEPS (8-bit, under one number
    a row) or EXPONENT (a power of two). symmetric: the zero is 2**(bits-1).
    """

    rows: int
    cols: int
    bits: int
    group: int
    mode: int
    scales: int
    symmetric: bool = True
    exponent: int = 0
    bias: int = 0
    wide_scales: bool = False  # float32, not float16

    @property
    def whole(self) -> bool:
        return self.group >= self.cols

    @property
    def groups(self) -> int:
        return group_count(self.cols, self.group)

    @property
    def zero(self) -> int:
        """What to subtract from a code; -1: a number per group is stored."""
        if self.mode != INTEGER:
            return 0
        return 1 << (self.bits - 1) if self.symmetric else -1

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        return planes_of(self.bits)

    @property
    def padded(self) -> int:
        """Columns with padding."""
        unit = RUN * (16 // min(b for b, _ in self.planes))
        return -(-self.cols // unit) * unit

    def width(self, bits: int) -> int:
        """32-bit words of a row of a plane."""
        return self.padded // (RUN * (16 // bits)) * LANES

    def start(self, shift: int) -> int:
        """Where the plane that holds the bits from `shift` on begins, in words."""
        return self.rows * sum(self.width(b) for b, s in self.planes if s < shift)

    @property
    def words(self) -> int:
        """32-bit words of all planes."""
        return self.rows * sum(self.width(b) for b, _ in self.planes)


@dataclass(frozen=True)
class Packed:
    """A leaf on its device. words: i32, planes of rows; scale: [rows, groups]; zeros: u8 [rows, groups] or None;
    row_scale: f32 [rows] or None; table: f16 [16] or None."""

    layout: Layout
    words: Tensor
    scale: Tensor
    zeros: Tensor | None
    row_scale: Tensor | None
    table: Tensor | None

    @property
    def size_bytes(self) -> int:
        parts = (self.words, self.scale, self.zeros, self.row_scale, self.table)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


def planes_of(bits: int) -> tuple[tuple[int, int], ...]:
    """(bits, shift) of each plane, low bits first and widest first: 7 -> ((4, 0), (2, 4), (1, 6))."""
    if bits not in (5, 6, 7):
        return ((bits, 0),)
    found, shift = [], 0
    for size in (4, 2, 1):
        if bits & size:
            found.append((size, shift))
            shift += size
    return tuple(found)


def layout_of(encoded: EncodedTensor) -> Layout | None:
    """The layout of a packed leaf [out, in]; None for another kind or rank."""
    kind, params, shape = encoded.tree.kind, encoded.tree.params, encoded.shape
    if kind not in FORMATS or len(shape) != 2 or params.lead != 1:
        return None
    rows, cols = shape
    if kind == "mxfp4":
        return Layout(rows, cols, 4, 32, FLOAT, EXPONENT, exponent=2, bias=1)
    group = group_size(cols, params.group)
    scales = STEPS if params.scale_bits == 8 else STORED
    if kind == "int":
        return Layout(rows, cols, params.bits, group, INTEGER, scales, params.symmetric)
    if kind == "grid":
        return Layout(rows, cols, 4, group, TABLE, scales)
    bias = 8 if params.variant == "e4m3fnuz" else 7
    return Layout(
        rows, cols, 8, group, FLOAT, scales, exponent=4, bias=bias, wide_scales=params.scale_bits == 32
    )


def as_matrix(encoded: EncodedTensor) -> EncodedTensor:
    """A tensor with the arrays of another, whose axes behind the first make the columns."""
    rows, *rest = encoded.shape
    return EncodedTensor(encoded.tree, (rows, math.prod(rest)), encoded.arrays)


class PackedCodes(Tensor):
    """Stored codes u8 [rows, bytes] of which only the kernels' words exist; any operation on them restores the bytes.

    On a GPU the words take the place of the stored bytes, so that a matrix is not held twice; `decode`, `state_dict` and
    moving to another device see what was stored.
    """

    words: Tensor
    order: Layout

    @staticmethod
    def __new__(cls, words: Tensor, layout: Layout) -> "PackedCodes":
        shape = (layout.rows, bitpack.packed_bytes(layout.cols, layout.bits))
        codes: PackedCodes = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=torch.uint8, device=words.device, requires_grad=False
        )
        codes.words, codes.order = words, layout
        return codes

    def restored(self, rows: slice | Tensor = _ALL) -> Tensor:
        """The stored bytes, of some rows or of all."""
        return unpack_words(self.words, self.order, rows)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.slice.Tensor and len(args) == 4 and args[1] == 0:
            return args[0].restored(slice(args[2], args[3]))
        if func is torch.ops.aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.int64:
            return args[0].restored(args[1][0])

        if func._schema.is_mutable:
            raise RuntimeError(
                f"{func}: codes that are kept as words cannot be written to; load the tensor anew"
            )

        def plain(value: Any) -> Any:
            return value.restored() if isinstance(value, PackedCodes) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedCodes({list(self.shape)}, {self.order.bits} bits, {self.device})"


def compact(encoded: EncodedTensor) -> EncodedTensor:
    """The same tensor with the codes of its packed matrices as `PackedCodes`, wherever in the tree they are."""
    arrays = dict(encoded.arrays)
    for name in encoded.tree.children if encoded.tree.kind in _HOLDERS else ():
        child = compact(child_encoded(encoded, name))
        arrays |= {f"{name}.{path}": array for path, array in child.arrays.items()}
    # A convolution's kernel reads its weight as a matrix, and none that is depthwise.
    convolution = len(encoded.shape) in (3, 4)
    if convolution and encoded.shape[1] == 1:
        return EncodedTensor(encoded.tree, encoded.shape, arrays)
    layout = layout_of(as_matrix(encoded) if convolution else encoded)
    codes = arrays.get("codes")
    if layout is None or codes is None or isinstance(codes, PackedCodes) or _nan_codes(encoded):
        return EncodedTensor(encoded.tree, encoded.shape, arrays)
    arrays["codes"] = PackedCodes(pack_words(codes, layout), layout)
    return EncodedTensor(encoded.tree, encoded.shape, arrays)


@per_encoded
def pack_leaf(encoded: EncodedTensor) -> Packed | None:
    """The leaf in the kernels' order, on its device; None for one they would not decode exactly (FP8 codes that are NaN)."""
    layout = layout_of(encoded)
    if layout is None or _nan_codes(encoded):
        return None
    arrays, codes = encoded.arrays, encoded.arrays["codes"]
    packed = Packed(
        layout,
        codes.words if isinstance(codes, PackedCodes) else pack_words(codes, layout),
        arrays["scale_codes" if layout.scales == STEPS else "scale"].contiguous(),
        None if layout.symmetric else bitpack.unpack(arrays["zeros"], layout.bits, layout.groups),
        arrays["scale_super"].float() / 256 if layout.scales == STEPS else None,
        arrays.get("table"),
    )
    _written(packed.scale)
    return packed


def pack_words(codes: Tensor, layout: Layout) -> Tensor:
    """Stored codes u8 [rows, bytes] -> i32 [words], plane after plane, row after row."""
    rows, cols = layout.rows, layout.cols
    out = torch.empty(layout.words, dtype=torch.int32, device=codes.device)
    # On a GPU starting the launches takes longer than their work: fewer of them.
    step = max(1, _CODES_AT_ONCE * (4 if codes.is_cuda else 1) // layout.padded)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        if layout.bits == 4:
            out[start * layout.width(4) : stop * layout.width(4)] = _nibble_words(codes[start:stop], layout)
            continue
        part = bitpack.unpack(codes[start:stop], layout.bits, cols)
        part = torch.nn.functional.pad(part, (0, layout.padded - cols))
        at = 0
        for bits, shift in layout.planes:
            width = layout.width(bits)
            plane = _plane_words((part >> shift) & ((1 << bits) - 1), bits)
            out[at + start * width : at + stop * width] = plane.view(-1)
            at += rows * width
    _written(out)
    return out


def _nibble_words(codes: Tensor, layout: Layout) -> Tensor:
    """`pack_words` of 4-bit codes, u8 [rows, bytes] -> i32 [words]: the bytes as words, whose nibbles change places."""
    part = torch.nn.functional.pad(codes, (0, layout.padded // 2 - codes.shape[1]))
    # Of word i of a chunk four bytes, LANES apart: low nibbles first, then high ones.
    word = part.view(len(part), -1, 4, LANES).transpose(2, 3).contiguous().view(torch.int32).view(-1)
    for mask, shift in ((0x00F000F0, 4), (0x0000FF00, 8)):
        moved = ((word >> shift) ^ word) & mask  # swaps the bits under the mask with those `shift` above
        word ^= moved | (moved << shift)
    return word


def _written(array: Tensor) -> None:
    """Waits until what was made for the kernels is there: they read what belongs to a matrix before the launch in front of
    them has ended, which must not be the one that writes it."""
    if array.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(array.device).synchronize()


def _plane_words(codes: Tensor, bits: int) -> Tensor:
    """Codes below 2**bits, u8 [rows, padded] -> i32 [rows, words]."""
    per_half = 16 // bits
    field = codes.view(len(codes), -1, per_half, LANES, 2)
    word = torch.zeros(len(codes), field.shape[1], LANES, dtype=torch.int32, device=codes.device)
    for j in range(per_half):
        for half in range(2):
            word |= field[:, :, j, :, half].to(torch.int32) << (16 * half + j * bits)
    return word.view(len(codes), -1)


def unpack_words(words: Tensor, layout: Layout, rows: slice | Tensor = _ALL) -> Tensor:
    """The inverse of `pack_words`, for some rows (a slice of step 1, or int64 indices) or for all: u8 [n, bytes]."""
    planes = []
    for bits, shift in layout.planes:
        width, first = layout.width(bits), layout.start(shift)
        planes.append(words[first : first + layout.rows * width].view(layout.rows, width)[rows])
    count = len(planes[0])
    out = torch.empty(
        count, bitpack.packed_bytes(layout.cols, layout.bits), dtype=torch.uint8, device=words.device
    )
    step = max(1, _CODES_AT_ONCE // layout.padded)
    for start in range(0, count, step):
        stop = min(count, start + step)
        codes = torch.zeros(stop - start, layout.padded, dtype=torch.uint8, device=words.device)
        for (bits, shift), plane in zip(layout.planes, planes, strict=True):
            codes |= _plane_codes(plane[start:stop], bits) << shift
        out[start:stop] = bitpack.pack(codes[:, : layout.cols].contiguous(), layout.bits)
    return out


def _plane_codes(words: Tensor, bits: int) -> Tensor:
    """i32 [rows, words] -> codes below 2**bits, u8 [rows, padded]."""
    per_half = 16 // bits
    word = words.reshape(len(words), -1, LANES)
    fields = [
        [(word >> (16 * half + j * bits)) & ((1 << bits) - 1) for half in range(2)] for j in range(per_half)
    ]
    each = torch.stack([torch.stack(halves, dim=-1) for halves in fields], dim=2)
    return each.to(torch.uint8).view(len(words), -1)


def _nan_codes(encoded: EncodedTensor) -> bool:
    """FP8 codes that mean NaN, which the kernels would read as numbers."""
    codes = encoded.arrays["codes"] if encoded.tree.kind == "fp8" else None
    if codes is None or isinstance(codes, PackedCodes) or codes.is_meta:
        return False
    if encoded.tree.params.variant == "e4m3fnuz":
        return bool((codes == 0x80).any())
    return bool(((codes & 0x7F) == 0x7F).any())
