"""Encoded matrices for the C++ engine (kernels/cpu/engine): trees of its own kinds over the file's arrays, nothing repacked.

Kinds the engine has no kernel for (CP, Tucker, tensor train, permutations, unusual groups) are decoded once and held as
float32.
"""

from typing import Any

import torch
from torch import Tensor

from nstf.kernels.cpu import ext
from nstf.kernels.cpu.packed_linear import packed
from nstf.kernels.formats import rotated, trellis
from nstf.kernels.formats.tree import EncodedTensor, child_encoded, decode

_PACKED = ("fp8", "grid", "int", "mxfp4")
_DENSE = ("float32", "float16", "bfloat16")


def available() -> bool:
    """Whether the extension holds the engine."""
    return hasattr(ext, "Engine")


def compile_matrix(encoded: EncodedTensor, exact: bool = False) -> Any:
    """A matrix [rows, cols] as the engine's `EngineMatrix`, which keeps the arrays alive.

    exact: float32 activations throughout; otherwise int8 where the processor has fast instructions for them.
    Raises ValueError for a tensor that is no matrix.
    """
    if len(encoded.shape) != 2:
        raise ValueError(f"a tensor of shape {list(encoded.shape)} is no matrix")
    kind, params, arrays = encoded.tree.kind, encoded.tree.params, encoded.arrays
    rows, cols = encoded.shape
    if getattr(params, "lead", 1) == 1:
        if kind in _PACKED and _has_whole_blocks(params, cols):
            leaf = packed(encoded)
            if leaf is not None:
                return ext.engine_packed(leaf, exact)
        if kind == "trellis":
            return _trellis(encoded, exact)
        if kind == "rotated":
            return _rotated(encoded, exact)
        if kind == "low_rank":
            return ext.engine_low_rank(
                *(compile_matrix(child_encoded(encoded, n), exact) for n in ("a", "b"))
            )
    if kind == "add":
        return ext.engine_sum(*(compile_matrix(child_encoded(encoded, n), exact) for n in ("x", "y")))
    if kind == "dense" and params.dtype in _DENSE:
        values = arrays["values"].contiguous()
        narrow = values.view(torch.int16) if params.dtype != "float32" else values
        return ext.engine_dense(rows, cols, narrow, params.dtype)
    return ext.engine_dense(rows, cols, decode(encoded).to(torch.float32).contiguous(), "float32")


def _has_whole_blocks(params: Any, cols: int) -> bool:
    group = getattr(params, "group", 32)
    return group % 32 == 0 or group >= cols


def _trellis(encoded: EncodedTensor, exact: bool) -> Any:
    params, arrays = encoded.tree.params, dict(encoded.arrays)
    rows, cols = encoded.shape
    sections = [
        (codes.reshape(-1), q, trellis.codebook(q), members.to(torch.int32))
        for codes, q, members in trellis.sections(params, arrays, rows, cols)
    ]
    return ext.engine_trellis(rows, cols, sections, trellis.read_scales(params, arrays).contiguous(), exact)


def _rotated(encoded: EncodedTensor, exact: bool) -> Any:
    params = encoded.tree.params
    rows, cols = encoded.shape
    made = compile_matrix(child_encoded(encoded, "x"), exact)
    if params.block_in:
        # Matrices with the same blocks and signs share the rotation of their activations.
        number = params.seed << 8 | params.block_in
        made = ext.engine_rotated(made, _signs(cols, params.seed, 0), params.block_in, number)
    if params.block_out:
        made = ext.engine_rotated_rows(made, _signs(rows, params.seed, 1), params.block_out)
    return made


def _signs(size: int, seed: int, side: int) -> Tensor:
    return rotated.signs(size, seed, side).contiguous()


def matmul(x: Tensor, matrix: Any, threads: int | None = None) -> Tensor:
    """x @ W.T for tests and reports: float32 [batch, cols] -> [batch, rows]."""
    x = x.to(torch.float32).contiguous()
    y = torch.empty(len(x), matrix.shape[0])
    matrix.multiply_at(x.data_ptr(), len(x), y.data_ptr(), threads or torch.get_num_threads())
    return y


def decode_row(matrix: Any, row: int) -> Tensor:
    """One row, float32 [cols]. Raises ValueError for a row that is not there."""
    out = torch.empty(matrix.shape[1])
    matrix.decode_at(row, out.data_ptr())
    return out
