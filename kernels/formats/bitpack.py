"""Codes of 1 to 8 bits in rows of bytes.

Each row is packed on its own as a little-endian bit stream: value i occupies bits [i*b, (i+1)*b) of the
row, least significant bit first, so 4-bit codes sit low nibble first. The unused bits of a row's last byte
are zero. Eight codes of b bits fill exactly b bytes, which is the unit both directions work in (one int64
word per unit).
"""

from __future__ import annotations

from nstf.kernels.lazy import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor


_CHUNK = 1 << 22  # codes per step: bounds the int64 words to 4 MiB however large the tensor is


def packed_bytes(cols: int, bits: int) -> int:
    """Bytes of one packed row: ceil(cols * bits / 8)."""
    return (cols * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packed rows. `codes`: uint8 [rows, cols], each below 2**bits -> uint8 [rows, ceil(cols*bits/8)].

    Raises ValueError on another dtype or rank, on bits outside 1..8 and on a code that needs more than
    `bits` bits.
    """
    _check(codes, bits)
    rows, cols = codes.shape
    if bits < 8 and codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"code {int(codes.max())} does not fit {bits} bits")
    if bits == 8:
        return codes.clone()
    out = torch.empty(rows, packed_bytes(cols, bits), dtype=torch.uint8, device=codes.device)
    units = (cols + 7) // 8
    for start, end in _row_chunks(rows, cols):
        part = torch.nn.functional.pad(codes[start:end], (0, units * 8 - cols)).view(end - start, units, 8)
        word = torch.zeros(part.shape[:2], dtype=torch.int64, device=codes.device)
        for i in range(8):
            word |= part[..., i].to(torch.int64) << (i * bits)
        data = torch.stack([((word >> (8 * k)) & 255).to(torch.uint8) for k in range(bits)], dim=-1)
        out[start:end] = data.flatten(1)[:, : out.shape[1]]
    return out


def unpack(packed: Tensor, bits: int, cols: int) -> Tensor:
    """The codes of packed rows. `packed`: uint8 [rows, ceil(cols*bits/8)] -> uint8 [rows, cols].

    Row-local: `unpack(packed[some_rows], ...)` gives those rows and costs only those rows.
    Raises ValueError when the width of `packed` does not follow from `cols` and `bits`.
    """
    _check(packed, bits)
    rows, width = packed.shape
    if width != packed_bytes(cols, bits):
        raise ValueError(
            f"{cols} codes of {bits} bits take {packed_bytes(cols, bits)} bytes a row, not {width}"
        )
    if bits == 8:
        return packed
    if bits in (1, 2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return codes.flatten(1)[:, :cols].contiguous()
    out = torch.empty(rows, cols, dtype=torch.uint8, device=packed.device)
    units = (cols + 7) // 8
    for start, end in _row_chunks(rows, cols):
        data = torch.nn.functional.pad(packed[start:end], (0, units * bits - width)).view(
            end - start, units, bits
        )
        word = torch.zeros(data.shape[:2], dtype=torch.int64, device=packed.device)
        for k in range(bits):
            word |= data[..., k].to(torch.int64) << (8 * k)
        mask = (1 << bits) - 1
        codes = torch.stack([((word >> (i * bits)) & mask).to(torch.uint8) for i in range(8)], dim=-1)
        out[start:end] = codes.flatten(1)[:, :cols]
    return out


def _check(data: Tensor, bits: int) -> None:
    if type(bits) is not int or not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 to 8, not {bits!r}")
    if data.dtype != torch.uint8 or data.dim() != 2:
        raise ValueError(f"expected uint8 [rows, n], not {data.dtype} {list(data.shape)}")


def _row_chunks(rows: int, cols: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK // max(1, cols))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
