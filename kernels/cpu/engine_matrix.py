"""Encoded matrices for the C++ engine (kernels/cpu/engine): trees of its own kinds over the file's arrays, nothing repacked.

Kinds the engine has no kernel for (CP, Tucker, tensor train, permutations, unusual groups) are decoded once and held as
float32.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from nstf.kernels.cpu import ext
from nstf.kernels.cpu.packed_linear import packed, stored_bits
from nstf.kernels.formats import trellis
from nstf.kernels.formats.tree import EncodedTensor, array_specs, child_encoded, decode
from nstf.kernels.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_PACKED = ("fp8", "grid", "int", "mxfp4")
_DENSE = ("float32", "float16", "bfloat16")


def available() -> bool:
    """Whether the extension holds the engine."""
    return hasattr(ext, "Engine")


def compile_matrix(encoded: EncodedTensor, exact: bool = False) -> Any:
    """A matrix [rows, cols] as the engine's `EngineMatrix`, which keeps the arrays (tensors or memoryviews) alive.

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
        return ext.engine_dense(rows, cols, stored_bits(arrays["values"]), params.dtype)
    return ext.engine_dense(rows, cols, _decoded(encoded), "float32")


def _has_whole_blocks(params: Any, cols: int) -> bool:
    group = getattr(params, "group", 32)
    return group % 32 == 0 or group >= cols


def _trellis(encoded: EncodedTensor, exact: bool) -> Any:
    params, arrays = encoded.tree.params, encoded.arrays
    rows, cols = encoded.shape
    return ext.engine_trellis(
        rows,
        cols,
        list(params.quarter_bits),
        list(params.rows),
        stored_bits(arrays["codes"]),
        stored_bits(arrays.get("section")),
        trellis.section_bits(params),
        stored_bits(arrays["scale_codes" if params.scale_bits == 8 else "scale"]),
        stored_bits(arrays["scale_super"]),
        trellis.quantiles() if max(params.quarter_bits) > trellis.MOST_SUMMED else None,
        exact,
    )


def _rotated(encoded: EncodedTensor, exact: bool) -> Any:
    params = encoded.tree.params
    made = compile_matrix(child_encoded(encoded, "x"), exact)
    if params.block_in:
        made = ext.engine_rotated(made, params.seed, params.block_in)
    if params.block_out:
        made = ext.engine_rotated_rows(made, params.seed, params.block_out)
    return made


def _decoded(encoded: EncodedTensor) -> Tensor:
    """The dense matrix, float32, also of arrays that are memoryviews."""
    specs = array_specs(encoded.tree, encoded.shape)
    arrays = {
        name: torch.frombuffer(a, dtype=specs[name].dtype).reshape(specs[name].shape)
        if isinstance(a, memoryview)
        else a
        for name, a in encoded.arrays.items()
    }
    return decode(EncodedTensor(encoded.tree, encoded.shape, arrays)).to(torch.float32).contiguous()


def matmul(x: Tensor, matrix: Any, threads: int | None = None) -> Tensor:
    """x @ W.T for tests and reports: float32 [batch, cols] -> [batch, rows]."""
    x = x.to(torch.float32).contiguous()
    y = torch.empty(len(x), matrix.shape[0])
    matrix.multiply_at(x.data_ptr(), len(x), y.data_ptr(), threads or torch.get_num_threads())
    return y


def decode_row(matrix: Any, row: int) -> array[float]:
    """One row, float32 [cols]. Raises ValueError for a row that is not there."""
    out = array("f", bytes(4 * matrix.shape[1]))
    matrix.decode_at(row, out.buffer_info()[0])
    return out
