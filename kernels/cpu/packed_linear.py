"""The compiled CPU kernel for packed leaves: int (2 to 8 bits), grid, fp8 and mxfp4.

Small batches multiply straight from the codes. Large ones (a prompt) decode a block of rows at a time and leave the
product to torch: above `FUSED_BATCH` its blocked GEMM is faster than unpacking the codes once per four tokens.
"""

from __future__ import annotations

from nstf.kernels.cpu import ext
from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.lazy import torch
from nstf.kernels.memo import per_encoded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

NAME = "cpu.packed_linear"
FORMATS = ("fp8", "grid", "int", "mxfp4")

# Measured crossover on one core of a Sapphire Rapids: 24 to 32, for 576 x 1536 and 2048 x 2048 alike.
FUSED_BATCH = 24
# 4 MiB in float32: a decoded block stays in the second-level cache until it is multiplied.
BLOCK_NUMEL = 1 << 20


def available() -> bool:
    return ext is not None


def supports(encoded: EncodedTensor, device: torch.device, batch: int) -> bool:
    """Matrices on CPU whose groups are whole rows or multiples of 32 columns."""
    params = encoded.tree.params
    if device.type != "cpu" or len(encoded.shape) != 2 or params.lead != 1:
        return False
    group = getattr(params, "group", 32)
    return (group % 32 == 0 or group >= encoded.shape[1]) and packed(encoded) is not None


def matmul(x: Tensor, encoded: EncodedTensor) -> Tensor:
    """x: [batch, in] -> [batch, out], in float32 inside and x's dtype outside."""
    matrix = packed(encoded)
    out, width = encoded.shape
    if matrix is None or x.dim() != 2 or x.shape[1] != width or x.device.type != "cpu":
        raise ValueError(f"{encoded.tree.kind} {list(encoded.shape)} times {list(x.shape)} on {x.device}")
    x32 = x.to(torch.float32).contiguous()
    batch, threads = x.shape[0], torch.get_num_threads()
    y = torch.empty(batch, out, dtype=torch.float32, device="cpu")
    if batch <= FUSED_BATCH:
        matrix.matmul_at(x32.data_ptr(), batch, y.data_ptr(), threads)
        return y.to(x.dtype)
    rows = max(1, BLOCK_NUMEL // width)
    block = torch.empty(min(rows, out), width, dtype=torch.float32, device="cpu")
    for start in range(0, out, rows):
        part = block[: min(rows, out - start)]
        matrix.decode(start, part, threads)
        torch.mm(x32, part.T, out=y[:, start : start + len(part)])
    return y.to(x.dtype)


@per_encoded
def packed(encoded: EncodedTensor) -> Any:
    """The compiled view of a leaf, or None for one it would not decode exactly (FP8 codes that mean NaN)."""
    matrix = compile_leaf(encoded)
    return None if encoded.tree.kind == "fp8" and matrix.has_nan() else matrix


def compile_leaf(encoded: EncodedTensor, isa: str = "") -> Any:
    """A leaf's arrays bound to the row kernels of `isa` (avx512, avx2, portable; the fastest when empty).

    Raises ValueError for groups, widths or array sizes the row kernels cannot read.
    """
    kind, params, arrays = encoded.tree.kind, encoded.tree.params, encoded.arrays
    bits = {"fp8": 8, "grid": 4, "mxfp4": 4}.get(kind) or params.bits
    group = 32 if kind == "mxfp4" else params.group
    scale = arrays["scale_codes"] if "scale_codes" in arrays else arrays["scale"]
    return ext.PackedLinear(
        params.variant if kind == "fp8" else kind,
        encoded.shape[1],
        min(group, encoded.shape[1]),
        bits,
        stored_bits(arrays["codes"]),
        stored_bits(scale),
        super_scale=stored_bits(arrays.get("scale_super")),
        zeros=stored_bits(arrays.get("zeros")),
        table=stored_bits(arrays.get("table")),
        isa=isa,
    )


def stored_bits(array: Any) -> Any:
    """A stored array for the extension: float16 and bfloat16 as their bits, since libraries differ in how they name them.

    A memoryview of a file has them so already.
    """
    if array is None or isinstance(array, memoryview):
        return array
    array = array.contiguous()
    return array.view(torch.uint16) if array.dtype in (torch.float16, torch.bfloat16) else array
