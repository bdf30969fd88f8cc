"""ggml's block types that hold our leaves: which one, and its bytes.

A block is 32 columns. Q4_0 and Q5_0 store code + 8 and + 16 below one float16, Q8_0 signed bytes, MXFP4 one exponent;
the first half of a block is in the low nibbles, the second in the high ones (ggml-quants.c, 2025). A block of Q6_K is 256
columns: code + 32, a signed byte of scale for every 16, and one float16 d; a value is d * scale * code. Our 8-bit scales are
super * k / 256: with k up to 128 the byte is -k, and d is -super / 256 where that is a float16 (`steps` of int_grid.py).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, bitpack
from nstf.kernels.formats.tree import Shape
from nstf_convert.export import integers
from nstf_convert.export.plan import decoded

BLOCK = 32
# Signed bits -> type. The numbers of a block's bytes: 2 for the scale, 4 for the fifth bits, the codes.
BY_BITS = {4: "Q4_0", 5: "Q5_0", 8: "Q8_0"}
BLOCK_BYTES = {"Q4_0": 18, "Q5_0": 22, "Q8_0": 34, "MXFP4": 17}
SUPER_BLOCK, SUPER_GROUP, SUPER_BYTES = 256, 16, 210  # of Q6_K
PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
PLAIN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def type_of(encoded: EncodedTensor, dtype: str) -> tuple[str, str]:
    """(ggml type, kind of `ExportPlan`) of a tensor. dtype: of what has no exact type; float32 keeps values."""
    tree, shape = encoded.tree, encoded.shape
    if len(shape) < 2:
        # ggml's element-wise operators want float32.
        return "F32", "exact" if _is_dense(tree, "float32") else "widened"
    if tree.kind == "dense":
        name = str(tree.params.dtype)
        return (PLAIN[name], "exact") if name in PLAIN else ("F32", "lossy")
    if tree.kind == "mxfp4" and shape[-1] % BLOCK == 0:
        return "MXFP4", "exact"
    if tree.kind == "int" and _is_q6_k(encoded):
        same = (tree.params.bits, tree.params.group) == (6, SUPER_GROUP)
        return "Q6_K", "exact" if same else "widened"
    if tree.kind == "int" and integers.is_matrix(tree, shape, BLOCK):
        wanted = integers.signed_bits(tree)
        bits = min((b for b in BY_BITS if b >= wanted), default=None)
        if bits is not None:
            fits = integers.scales_fit(encoded, torch.float16)
            if fits or dtype != "float32":
                same = tree.params.symmetric and bits == tree.params.bits
                return BY_BITS[bits], ("exact" if same else "widened") if fits else "lossy"
    return PLAIN[dtype], "widened" if dtype == "float32" else "lossy"


def _is_q6_k(encoded: EncodedTensor) -> bool:
    """Whether Q6_K holds an `int` leaf with 8-bit scales as it is."""
    params = encoded.tree.params
    if len(encoded.shape) < 2 or params.scale_bits != 8 or integers.signed_bits(encoded.tree) > 6:
        return False
    if encoded.shape[-1] % SUPER_BLOCK or params.lead != len(encoded.shape) - 1 or params.group % SUPER_GROUP:
        return False
    part = encoded.arrays["scale_super"].float() / 256
    return not bool((encoded.arrays["scale_codes"] > 127).any()) and torch.equal(part.half().float(), part)


def _is_dense(tree: Node, dtype: str) -> bool:
    return tree.kind == "dense" and str(tree.params.dtype) == dtype


def size_of(kind: str, shape: Shape) -> int:
    """Bytes of a tensor of a ggml type."""
    count = int(np.prod(shape))
    if kind == "Q6_K":
        return count // SUPER_BLOCK * SUPER_BYTES
    return count * PLAIN_BYTES[kind] if kind in PLAIN_BYTES else count // BLOCK * BLOCK_BYTES[kind]


def pack(encoded: EncodedTensor, kind: str, name: str = "") -> np.ndarray[Any, Any]:
    """The rows of a tensor in a ggml type: uint8 [rows, bytes], float arrays for plain types (BF16 as bytes too). name: for
    messages. Raises UnsupportedError for values beyond the type."""
    if kind in DTYPES:
        value = decoded(encoded, DTYPES[kind], name)
        matrix = value.reshape(-1, value.shape[-1]).contiguous()
        return matrix.view(torch.uint8).numpy() if kind == "BF16" else matrix.numpy()
    if kind == "MXFP4":
        cols = encoded.shape[-1]
        codes = bitpack.unpack(encoded.arrays["codes"], 4, cols)
        return _joined(encoded.arrays["scale"].unsqueeze(-1), _nibbles(codes))
    parts = integers.read(encoded)
    if kind == "Q6_K":
        return _q6_k(encoded, parts)
    scale = parts.scales(BLOCK).half().unsqueeze(-1).view(torch.uint8)
    if kind == "Q8_0":
        units = parts.units.to(torch.int8).view(torch.uint8)
        return _joined(scale, units.view(*scale.shape[:2], BLOCK))
    codes = (parts.units + (8 if kind == "Q4_0" else 16)).to(torch.uint8)
    if kind == "Q4_0":
        return _joined(scale, _nibbles(codes))
    high = bitpack.pack((codes >> 4).reshape(-1, BLOCK), 1).view(*scale.shape[:2], 4)
    return _joined(scale, high, _nibbles(codes & 15))


def _q6_k(encoded: EncodedTensor, parts: integers.Integers) -> np.ndarray[Any, Any]:
    """Rows of Q6_K: low nibbles, two high bits each, steps, d. A block is two halves of four quarters of 32 columns."""
    rows = parts.units.shape[0]
    codes = (parts.units + 32).to(torch.uint8).view(rows, -1, 2, 4, 32)
    low = torch.stack([codes[:, :, :, i] & 15 | (codes[:, :, :, i + 2] & 15) << 4 for i in (0, 1)], 3)
    high = sum(((codes[:, :, :, i] >> 4) << 2 * i for i in range(4)), torch.zeros_like(codes[:, :, :, 0]))
    steps = -(encoded.arrays["scale_codes"].to(torch.int16) + 1).repeat_interleave(
        parts.group // SUPER_GROUP, dim=1
    )
    blocks = codes.shape[1]
    steps = steps[:, : SUPER_BLOCK // SUPER_GROUP * blocks].to(torch.int8).view(torch.uint8)
    d = (
        (-encoded.arrays["scale_super"].float() / 256)
        .half()
        .view(-1, 1, 1)
        .expand(-1, blocks, 1)
        .contiguous()
    )
    fields = (low.flatten(2), high.flatten(2), steps.view(rows, blocks, -1), d.view(torch.uint8))
    return _joined(*fields)


def _nibbles(codes: Tensor) -> Tensor:
    """[rows, cols] codes below 16 -> [rows, blocks, 16]: column j of a block low, column j + 16 high."""
    blocks = codes.reshape(codes.shape[0], -1, 2, BLOCK // 2)
    return blocks[:, :, 0] | (blocks[:, :, 1] << 4)


def _joined(*parts: Tensor) -> np.ndarray[Any, Any]:
    whole = torch.cat([p.contiguous() for p in parts], dim=-1)
    return whole.reshape(whole.shape[0], -1).numpy()
