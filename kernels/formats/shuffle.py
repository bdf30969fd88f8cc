"""`shuffle`: columns of 4-bit symbols; a weight is the sum of two entries of small tables, as a byte shuffle reads them.

A path of symbols runs down every column: 2 q symbols for 32 rows, q = `quarter_bits` being four times the bits per
weight. Row r of 32 ends at symbol s_r = ceil((r + 1) q / 16) - 1;
with a = n[s_r], b = n[s_r - 1] and c = n[s_r - 2] its level is

    A_p[a ^ c] + B_p[b]         for the first row that ends at a symbol,
    A_p[a ^ b] + B_p[a ^ c]     for the second one,

p = r mod P, P = 16 / gcd(q, 16). The symbols before the first row of every 256 are 0. So each value depends on 12 bits,
shared with the rows before: a trellis code (Marcellin and Fischer, 1990) of 256 states, whose tables are fitted to N(0, 1).

The bytes are laid out for vectors: groups of 32 rows, in them chunks of 64 columns, in them 2 q times 32 bytes, each 32 the
symbols of one step of the paths, low half first.
"""

from __future__ import annotations

from functools import cache

from nstf.kernels.formats import trellis
from nstf.kernels.formats.pieces import own
from nstf.kernels.formats.scales import check_lead, check_scale_bits, matrix_shape, narrow, scaled
from nstf.kernels.formats.shards import MatrixCut, Span, column_grain, row_grain
from nstf.kernels.formats.shuffle_tables import STEPS as STEPS
from nstf.kernels.formats.shuffle_tables import TABLES as TABLES
from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "shuffle"

GROUP = 32  # rows whose symbols lie together
SEGMENT = 256  # rows after which a path starts anew
CHUNK = 64  # columns that lie side by side
RATES = tuple(sorted(STEPS))
# Entries are bytes whose sums are at most 63; this stands for zero.
CENTRE = 31.5
_VALUES_AT_ONCE = 1 << 22


@frozen
class Params:
    """`quarter_bits`: 8..20, four times the bits per weight; `scale_bits` 16 or 8 per row; `lead` axes make the rows.

    Rows are padded to multiples of 32, columns to multiples of 64.
    """

    quarter_bits: int = 16
    scale_bits: int = 8
    lead: int = 1

    def __post_init__(self) -> None:
        if type(self.quarter_bits) is not int or self.quarter_bits not in STEPS:
            raise ValueError(f"quarter_bits must be {RATES[0]} to {RATES[-1]}, not {self.quarter_bits!r:.40}")
        check_scale_bits(self.scale_bits, (8, 16))
        check_lead(self.lead)


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    """`codes` u8 [groups of rows, chunks of columns, 2 q, 32]; `scale_codes` u8 [rows] or `scale` f16 [rows], both under
    `scale_super` f32 [1]."""
    rows, cols = matrix_shape(shape, params.lead)
    codes = (-(-rows // GROUP), -(-cols // CHUNK), 2 * params.quarter_bits, CHUNK // 2)
    specs = {"codes": ArraySpec("uint8", codes), "scale_super": ArraySpec("float32", (1,))}
    if params.scale_bits == 8:
        return specs | {"scale_codes": ArraySpec("uint8", (rows,))}
    return specs | {"scale": ArraySpec("float16", (rows,))}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    return {}


def code_bits(params: Params, shape: Shape) -> int:
    rows, cols = matrix_shape(shape, params.lead)
    return rows * cols * params.quarter_bits // 4


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """row scale * step * (sum of entries - 31.5), float32 of `shape`."""
    rows, cols = matrix_shape(shape, params.lead)
    units = levels(arrays["codes"], params.quarter_bits)[:rows, :cols].float() - CENTRE
    return (units * unit_scales(params, arrays)[:, None]).reshape(shape)


def decode_rows(params: Params, shape: Shape, arrays: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Rows (of the first axis, lead 1) without the others, up to their groups: int64 [n] -> float32 [n, cols]."""
    codes, q = arrays["codes"], params.quarter_bits
    _, cols = matrix_shape(shape, params.lead)
    groups, where = torch.unique(rows // GROUP, return_inverse=True)
    # The group before has the last symbols that a group's first rows depend on.
    goes_on = (groups % (SEGMENT // GROUP) > 0)[:, None, None, None]
    before = torch.where(goes_on, codes[groups - 1, :, -2:], 0)
    units = _levels(codes[groups], before, q).view(len(groups), GROUP, -1)[where, rows % GROUP, :cols]
    values = (units.float() - CENTRE) * unit_scales(params, arrays)[rows, None]
    return values.reshape(len(rows), *shape[1:])


def levels(codes: Tensor, quarter_bits: int) -> Tensor:
    """The sums of entries: u8 [groups, chunks, 2 q, 32] -> u8 [32 groups, 64 chunks], values 0 to 63."""
    groups, chunks = codes.shape[:2]
    before = torch.zeros(groups, chunks, 2, CHUNK // 2, dtype=torch.uint8, device=codes.device)
    before[1:] = codes[:-1, :, -2:]
    before[:: SEGMENT // GROUP] = 0
    step = max(1, _VALUES_AT_ONCE // (GROUP * CHUNK * chunks))
    parts = zip(torch.split(codes, step), torch.split(before, step), strict=True)
    return torch.cat([_levels(c, b, quarter_bits) for c, b in parts])


def _levels(codes: Tensor, before: Tensor, q: int) -> Tensor:
    """`levels`, given the last symbols of the groups before, u8 [groups, chunks, 2, 32]: zeros where a segment starts."""
    groups, chunks = codes.shape[:2]
    pairs = torch.cat([before, codes], 2).transpose(1, 2)  # [groups, 2 q + 2, chunks, 32]
    symbols = torch.stack([pairs & 15, pairs >> 4], -1).reshape(groups, 2 * q + 2, -1)
    end, second = ends(q)
    at = torch.tensor(end, device=codes.device) + 2
    a, b, c = symbols[:, at], symbols[:, at - 1], symbols[:, at - 2]
    twice = torch.tensor(second, device=codes.device)[:, None]
    first, other = torch.where(twice, a ^ b, a ^ c), torch.where(twice, a ^ c, b)
    both = tables(q, codes.device)  # [phases, 2, 16]
    phase = torch.arange(GROUP, device=codes.device)[:, None] % len(both)
    sums = both[phase, 0, first.int()] + both[phase, 1, other.int()]
    return sums.view(groups * GROUP, chunks * CHUNK)


def ends(quarter_bits: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """For each row of 32 its newest symbol of 2 q, and whether it is the second row that ends there."""
    end = tuple(-(-(r + 1) * quarter_bits // 16) - 1 for r in range(GROUP))
    return end, tuple(r > 0 and end[r] == end[r - 1] for r in range(GROUP))


def tables(quarter_bits: int, device: torch.device | str = "cpu") -> Tensor:
    """A and B of every phase, uint8 [P, 2, 16]; kept on each device."""
    return _tables(quarter_bits, torch.device(device))


@cache
def _tables(quarter_bits: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        entries = list(bytes.fromhex(TABLES[quarter_bits]))
        return torch.tensor(entries, dtype=torch.uint8, device="cpu").view(-1, 2, 16).to(device)


def unit_scales(params: Params, arrays: dict[str, Tensor]) -> Tensor:
    """What a level is worth in each row, float32 [rows]."""
    return read_scales(params, arrays) * STEPS[params.quarter_bits]


def read_scales(params: Params, arrays: dict[str, Tensor]) -> Tensor:
    """Row scales, float32 [rows]: the standard deviations that the tables are fitted to."""
    return trellis.read_scales(trellis.Params(scale_bits=params.scale_bits), arrays)


def store_scales(params: Params, scales: Tensor) -> dict[str, Tensor]:
    """The arrays nearest to row scales [rows] >= 0: the inverse of `read_scales`, rounded; only zeros become zero."""
    return trellis.store_scales(trellis.Params(scale_bits=params.scale_bits), scales)


def fixed(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tuning leaves alone: the values at scale 1, to 11 bits."""
    rows, cols = matrix_shape(shape, params.lead)
    units = levels(arrays["codes"], params.quarter_bits)[:rows, :cols].float() - CENTRE
    return {"units": narrow(2 * units)}


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
    step = STEPS[params.quarter_bits] / 2
    return scaled(values["scale"][:, None] * step, fixed["units"], 0).reshape(shape)


def grain(params: Params, shape: Shape, axis: int) -> int | None:
    """Paths start anew every 256 rows; columns lie in chunks of 64."""
    if axis < params.lead:
        return row_grain(shape, params.lead, axis, SEGMENT)
    return column_grain(shape, params.lead, axis, CHUNK)


def cut(
    params: Params, shape: Shape, arrays: dict[str, Tensor], span: Span
) -> tuple[Params, dict[str, Tensor]]:
    """The groups of rows or the chunks of columns of the part."""
    part = MatrixCut(shape, params.lead, span)
    codes = arrays["codes"]
    if not part.by_rows:
        first, last = part.columns
        return params, {**arrays, "codes": own(codes[:, first // CHUNK : -(-last // CHUNK)])}
    rows, _ = matrix_shape(shape, params.lead)
    taken = part.rows(torch.arange(rows, device=codes.device))[::GROUP] // GROUP
    together = bool((taken == torch.arange(len(taken), device=codes.device) + taken[0]).all())
    scales = "scale_codes" if params.scale_bits == 8 else "scale"
    return params, {
        "codes": codes[int(taken[0]) : int(taken[0]) + len(taken)] if together else codes[taken],
        "scale_super": arrays["scale_super"],
        scales: part.rows(arrays[scales]),
    }
