"""`trellis`: tiles of 16 x 16 weights, each a tail-biting path through a bitshift trellis with a computed codebook.

Tseng et al., QTIP, 2024 (bitshift trellis, computed codes). A tile is a circular stream of 64 q bits, q = `quarter_bits`
being four times the bits per weight, least significant bit first. Position t = 16 row + column ends at bit
e_t = floor((t + 1) q / 4) of the stream; its state is the 16 bits before e_t, and its value is codebook[state]. Steps of
unequal length make the fractional rates: at q = 10 two and three bits in turn. Every weight can be decoded on its own.

Rows differ in how much their errors matter, by orders of magnitude in an embedding table. So a matrix may have several
sections of rows, each with its own rate; the section of every row is stored, and a section's rows keep their order.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Mapping
from functools import cache

from nstf.kernels.cpu import ext
from nstf.kernels.formats import bitpack
from nstf.kernels.formats.pieces import joined
from nstf.kernels.formats.scales import check_lead, check_scale_bits, matrix_shape, narrow, scaled
from nstf.kernels.formats.shards import MatrixCut, Span, column_grain, row_grain
from nstf.kernels.formats.tree import ArraySpec, FormatError, Shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import changed, frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "trellis"

SIDE = 16  # rows and columns of a tile
TILE = SIDE * SIDE
STATE_BITS = 16
MAX_SECTIONS = 16
MOST_SUMMED = 12  # quarter bits up to which values are sums of bytes

# Odd multipliers that did best among 140 random ones on N(0, 1) (benchmarks/trellis.py).
_SUM_MULTIPLIER = 0xA7491E23
_QUANTILE_MULTIPLIER = 25115
_QUANTILE_BITS = 12
_TILES_AT_ONCE = 1 << 14


@frozen
class Params:
    """`quarter_bits`: 4..24 per section, four times the bits per weight; `rows`: rows of each section, () for a single one
    with all rows; `scale_bits` 16 or 8 per row; `lead` axes make the rows. A section's rows, and the columns, are padded
    to multiples of 16.
    """

    quarter_bits: tuple[int, ...] = (12,)
    rows: tuple[int, ...] = ()
    scale_bits: int = 8
    lead: int = 1

    def __post_init__(self) -> None:
        if not 1 <= len(self.quarter_bits) <= MAX_SECTIONS:
            raise ValueError(f"there must be 1 to {MAX_SECTIONS} sections, not {len(self.quarter_bits)}")
        if any(type(q) is not int or not 4 <= q <= 24 for q in self.quarter_bits):
            raise ValueError(f"quarter_bits must be 4 to 24, not {list(self.quarter_bits)}")
        if len(self.rows) != (len(self.quarter_bits) if len(self.quarter_bits) > 1 else 0):
            raise ValueError("rows must name the size of every section, or none for a single section")
        if any(type(n) is not int or n < 1 for n in self.rows):
            raise ValueError("every section must have a positive number of rows")
        check_scale_bits(self.scale_bits, (8, 16))
        check_lead(self.lead)


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    """`codes` u8 [bytes]: section by section [row tiles, column tiles, 8 q]; `scale_codes` u8 [rows] or `scale` f16 [rows],
    both under `scale_super` f32 [1]; with several sections `section`: bit-packed numbers u8 [ceil(rows b / 8)]."""
    rows, cols = matrix_shape(shape, params.lead)
    sizes = section_rows(params, rows)
    size = sum(tiles(n) * tiles(cols) * 8 * q for n, q in zip(sizes, params.quarter_bits, strict=True))
    specs = {"codes": ArraySpec("uint8", (size,)), "scale_super": ArraySpec("float32", (1,))}
    if params.scale_bits == 8:
        specs["scale_codes"] = ArraySpec("uint8", (rows,))
    else:
        specs["scale"] = ArraySpec("float16", (rows,))
    if params.rows:
        specs["section"] = ArraySpec("uint8", (bitpack.packed_bytes(rows, section_bits(params)),))
    return specs


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    return {}


def code_bits(params: Params, shape: Shape) -> int:
    return arrays(params, shape)["codes"].shape[0] * 8


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """row scale * codebook[state], float32 of `shape`."""
    rows, cols = matrix_shape(shape, params.lead)
    values = unit_values(params, arrays, rows, cols)
    values *= read_scales(params, arrays)[:, None]
    return values.reshape(shape)


def decode_rows(params: Params, shape: Shape, arrays: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Rows (of the first axis, lead 1) without the others, up to their tiles: int64 [n] -> float32 [n, cols]."""
    total, cols = matrix_shape(shape, params.lead)
    out = torch.empty(len(rows), cols, dtype=torch.float32, device=rows.device)
    for codes, q, members in sections(params, arrays, total, cols):
        place = torch.full((total,), -1, dtype=torch.int64, device=rows.device)
        place[members] = torch.arange(len(members), device=rows.device)
        here = place[rows]
        picked = torch.nonzero(here >= 0).squeeze(1)
        if len(picked):
            wanted, where = torch.unique(here[picked] // SIDE, return_inverse=True)
            values = section_values(codes[wanted], q, len(wanted) * SIDE, cols)
            out[picked] = values[where * SIDE + here[picked] % SIDE]
    return (out * read_scales(params, arrays)[rows][:, None]).reshape(len(rows), *shape[1:])


def section_rows(params: Params, rows: int) -> tuple[int, ...]:
    """Rows of each section. Raises ValueError when they do not add up to the matrix's."""
    if params.rows and sum(params.rows) != rows:
        raise ValueError(f"sections of {list(params.rows)} rows do not make {rows}")
    return params.rows or (rows,)


def sections(
    params: Params, arrays: dict[str, Tensor], rows: int, cols: int
) -> Iterator[tuple[Tensor, int, Tensor]]:
    """(codes [row tiles, column tiles, 8 q], q, the section's rows int64 [n] ascending) of every section.

    Raises FormatError when the stored numbers do not give the sections their rows.
    """
    sizes, codes, at = section_rows(params, rows), arrays["codes"], 0
    number = None
    if params.rows:
        number = _section_numbers(params, arrays, rows)
    for i, (n, q) in enumerate(zip(sizes, params.quarter_bits, strict=True)):
        shape = (tiles(n), tiles(cols), 8 * q)
        size = math.prod(shape)
        members = (
            torch.arange(rows, device=codes.device)
            if number is None
            else torch.nonzero(number == i).squeeze(1)
        )
        yield codes[at : at + size].view(shape), q, members
        at += size


def _section_numbers(params: Params, arrays: Mapping[str, Tensor], rows: int) -> Tensor:
    """The section of every row, int64 [rows]. Raises FormatError when the sections do not get their rows."""
    number = bitpack.unpack(arrays["section"][None], section_bits(params), rows)[0].to(torch.int64)
    counts = torch.bincount(number, minlength=len(params.rows)).tolist()
    if counts != list(params.rows):
        raise FormatError(f"trellis: sections have {counts[:9]} rows, the tree says {list(params.rows)[:9]}")
    return number


def check_values(params: Params, shape: Shape, arrays: Mapping[str, Tensor]) -> None:
    """Raises FormatError when the stored numbers do not give the sections their rows."""
    if params.rows:
        _section_numbers(params, arrays, matrix_shape(shape, params.lead)[0])


def tiles(size: int) -> int:
    """Tiles along an axis."""
    return -(-size // SIDE)


def unit_values(params: Params, arrays: dict[str, Tensor], rows: int, cols: int) -> Tensor:
    """The values at scale 1, float32 [rows, cols]."""
    out = None
    for codes, q, members in sections(params, arrays, rows, cols):
        values = section_values(codes, q, len(members), cols)
        if not params.rows:
            return values
        out = torch.empty(rows, cols, dtype=torch.float32, device=values.device) if out is None else out
        out[members] = values
    if out is None:
        raise FormatError("trellis: no sections")
    return out


def section_values(codes: Tensor, quarter_bits: int, rows: int, cols: int) -> Tensor:
    """The values of one section at scale 1: u8 [row tiles, column tiles, 8 q] -> float32 [rows, cols]."""
    down, across, _ = codes.shape
    values = tile_values(codes.reshape(down * across, -1), quarter_bits)
    grid = values.view(down, across, SIDE, SIDE).transpose(1, 2).reshape(down * SIDE, across * SIDE)
    return grid[:rows, :cols].contiguous()


def tile_values(codes: Tensor, quarter_bits: int) -> Tensor:
    """The values of tiles at scale 1: u8 [tiles, 8 q] -> float32 [tiles, 256]."""
    table = codebook(quarter_bits, codes.device)
    if codes.device.type == "cpu" and hasattr(ext, "trellis_decode"):
        out = torch.empty(len(codes), TILE, dtype=torch.float32, device="cpu")
        ext.trellis_decode(codes.contiguous(), quarter_bits, table, out, torch.get_num_threads())
        return out
    return torch.cat([table[_states(part, quarter_bits)] for part in torch.split(codes, _TILES_AT_ONCE)])


def read_scales(params: Params, arrays: dict[str, Tensor]) -> Tensor:
    """Row scales, float32 [rows]. 8-bit codes are squared: the steps are finer where scales are small."""
    if params.scale_bits == 16:
        return arrays["scale"].float() * arrays["scale_super"]
    return (arrays["scale_codes"].float() / 255).square() * arrays["scale_super"]


def store_scales(params: Params, scales: Tensor) -> dict[str, Tensor]:
    """The arrays nearest to row scales [rows] >= 0: the inverse of `read_scales`, rounded; only zeros become zero."""
    top = scales.max().clamp_min(1e-30).float().reshape(1)
    if params.scale_bits == 16:
        return {"scale": (scales / top).half(), "scale_super": top}
    codes = ((scales / top).sqrt() * 255).round().clamp(1, 255) * (scales > 0)
    return {"scale_codes": codes.to(torch.uint8), "scale_super": top}


def codebook(quarter_bits: int, device: torch.device | str = "cpu") -> Tensor:
    """The value of every state, float32 [65536], of unit variance; kept on each device.

    Up to 3 bits the four bytes of a product are added up: three integer instructions, and as good as any. Above, where
    its steps and its range are too coarse, quantiles of a Gaussian at a multiple of the state.
    """
    return _codebook(quarter_bits <= MOST_SUMMED, torch.device(device))


@cache
def _codebook(summed: bool, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return (_sums() if summed else _quantiles()).to(device)


@cache
def _sums() -> Tensor:
    product = (torch.arange(1 << STATE_BITS, dtype=torch.int64, device="cpu") * _SUM_MULTIPLIER) & 0xFFFFFFFF
    total = torch.stack([(product >> (8 * i)) & 0xFF for i in range(4)]).sum(0)
    return (total - 510).to(torch.float32) / 148


@cache
def _quantiles() -> Tensor:
    # A multiple of the state modulo 2^16 spreads the successors of every state evenly over the quantiles.
    state = torch.arange(1 << STATE_BITS, dtype=torch.int64, device="cpu")
    return torch.tensor(quantiles(), dtype=torch.float32, device="cpu")[
        ((state * _QUANTILE_MULTIPLIER) & 0xFFFF) >> (STATE_BITS - _QUANTILE_BITS)
    ]


@cache
def quantiles() -> array[float]:
    """The 4096 quantiles of the standard normal distribution that are values above 3 bits, rounded to float16."""
    from statistics import NormalDist  # here: files without such rates do without its import

    levels, normal = 1 << _QUANTILE_BITS, NormalDist()
    # Symmetric, and half of it computed: the inverse of the distribution costs a microsecond.
    upper = [normal.inv_cdf((i + 0.5) / levels) for i in range(levels // 2, levels)]
    halves = struct.unpack(f"{levels // 2}e", struct.pack(f"{levels // 2}e", *upper))
    return array("f", [-v for v in reversed(halves)] + list(halves))


def section_bits(params: Params) -> int:
    """Bits of a stored section's number."""
    return max(1, (len(params.rows) - 1).bit_length())


def _states(codes: Tensor, quarter_bits: int) -> Tensor:
    """The states along each path: uint8 [tiles, 8 q] -> int64 [tiles, 256]."""
    ring, size = codes.to(torch.int64), 8 * quarter_bits
    start = (torch.arange(1, TILE + 1, device=codes.device) * quarter_bits // 4 - STATE_BITS) % (8 * size)
    word = torch.zeros(len(codes), TILE, dtype=torch.int64, device=codes.device)
    for i in range(3):
        word |= ring[:, (start // 8 + i) % size] << (8 * i)
    return (word >> (start % 8)) & ((1 << STATE_BITS) - 1)


def fixed(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tuning leaves alone: the values at scale 1, to 11 bits."""
    rows, cols = matrix_shape(shape, params.lead)
    return {"units": narrow(unit_values(params, arrays, rows, cols))}


def tunable(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The row scales [rows]."""
    return {"scale": read_scales(params, arrays)}


def retuned(
    params: Params, shape: Shape, arrays: dict[str, Tensor], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The arrays with other row scales, rounded to what they are stored as."""
    return {**arrays, **store_scales(params, values["scale"])}


def decode_tuned(
    params: Params,
    shape: Shape,
    fixed: dict[str, Tensor],
    values: dict[str, Tensor],
    children: dict[str, Tensor],
) -> Tensor:
    """`decode` with the row scales of `values`, differentiable in them."""
    return scaled(values["scale"][:, None], fixed["units"], 0).reshape(shape)


def grain(params: Params, shape: Shape, axis: int) -> int | None:
    """Tiles of 16. Of several sections every cut must leave whole tiles in each, which `cut` checks."""
    if axis < params.lead:
        # The rows of a section are any: cuts that fit them may be anywhere.
        return 1 if params.rows else row_grain(shape, params.lead, axis, SIDE)
    return column_grain(shape, params.lead, axis, SIDE)


def cut(
    params: Params, shape: Shape, arrays: dict[str, Tensor], span: Span
) -> tuple[Params, dict[str, Tensor]]:
    """The tiles of the part. Raises FormatError where a section's tiles would be divided."""
    rows, cols = matrix_shape(shape, params.lead)
    part = MatrixCut(shape, params.lead, span)
    if part.by_rows:
        return _cut_rows(params, arrays, rows, cols, part)
    first, last = part.columns
    parts = [c[:, first // SIDE : tiles(last)] for c, _, _ in sections(params, arrays, rows, cols)]
    return params, {**arrays, "codes": joined(parts)}


def _cut_rows(
    params: Params, arrays: dict[str, Tensor], rows: int, cols: int, part: MatrixCut
) -> tuple[Params, dict[str, Tensor]]:
    scales = "scale_codes" if params.scale_bits == 8 else "scale"
    taken = part.rows(torch.arange(rows, device=arrays["codes"].device))
    first, count = int(taken[0]), len(taken)
    together = not params.rows and int(taken[-1]) == first + count - 1
    if together and first % SIDE == 0 and (count % SIDE == 0 or first + count == rows):
        # The usual case, whole tiles of the only section: a view, in a hundredth of the time.
        ((tiled, _, _),) = sections(params, arrays, rows, cols)
        codes = tiled[first // SIDE : first // SIDE + tiles(count)]
        return params, {**arrays, "codes": joined([codes]), scales: part.rows(arrays[scales])}
    wanted = torch.zeros(rows, dtype=torch.bool, device=taken.device)
    wanted[taken] = True
    found: list[Tensor] = []
    rates: list[int] = []
    sizes: list[int] = []
    number = torch.empty_like(taken)
    for tiled, q, members in sections(params, arrays, rows, cols):
        mine = wanted[members]
        if bool(mine.any()):
            number[torch.searchsorted(taken, members[mine])] = len(rates)
            found.append(_taken(tiled, _whole_tiles(mine)))
            rates.append(q)
            sizes.append(int(mine.sum()))
    fresh = changed(params, quarter_bits=tuple(rates), rows=tuple(sizes) if len(sizes) > 1 else ())
    out = {
        "codes": joined(found),
        "scale_super": arrays["scale_super"],
        scales: part.rows(arrays[scales]),
    }
    if fresh.rows:
        out["section"] = bitpack.pack(number.to(torch.uint8)[None], section_bits(fresh))[0]
    return fresh, out


def _taken(tiled: Tensor, taken: Tensor) -> Tensor:
    """Tiles of rows [n, ...] of a section: a view where they follow each other."""
    places = taken.nonzero().squeeze(1)
    first, count = int(places[0]), len(places)
    return tiled[first : first + count] if int(places[-1]) == first + count - 1 else tiled[places]


def _whole_tiles(mine: Tensor) -> Tensor:
    """Which tiles of a section hold the rows that are taken: bool [rows of the section] -> bool [tiles].

    Raises FormatError where a tile holds others, too, or one before the last is not full.
    """
    filled = torch.nn.functional.pad(mine, (0, -len(mine) % SIDE), value=False).view(-1, SIDE).sum(1)
    taken = filled > 0
    last = int(taken.nonzero()[-1])
    if bool((filled[:last][taken[:last]] < SIDE).any()) or int(filled[last]) < min(
        SIDE, len(mine) - last * SIDE
    ):
        raise FormatError(f"trellis: a cut of its rows there divides tiles of {SIDE} rows of a section")
    return taken
