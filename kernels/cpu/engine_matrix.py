"""Encoded matrices for the C++ engine (kernels/cpu/engine): trees of its own kinds over the file's arrays.

What the engine cannot read as it is stored is decoded once and held as float32: decompositions whose axes mix rows and
columns, groups that do not divide a row, FP8 with codes that mean NaN, and inside a decomposition whatever is no plain leaf.
So is what would take far longer row by row: each row of a product needs all rows of its second factor, so that products of
products would take powers of that.
"""

from __future__ import annotations

import math
from array import array

from nstf.kernels.cpu import ext
from nstf.kernels.cpu.packed_linear import packed, stored_bits
from nstf.kernels.formats import bitpack, dense, shuffle, trellis
from nstf.kernels.formats.scales import read_scales
from nstf.kernels.formats.tree import (
    EncodedTensor,
    Node,
    Shape,
    array_specs,
    child_encoded,
    decode,
    format_of,
)
from nstf.kernels.lazy import torch
from nstf.kernels.records import changed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

_PACKED = ("fp8", "grid", "int", "mxfp4")
_DENSE = ("float32", "float16", "bfloat16")
_CHAINS = ("cp", "tensor_train", "tucker")
# Files up to this size have their integers and grids repacked into panels (kernels/cpu/engine/panel_int8.h) and their path
# and shuffle codes copied, all into large pages (large_pages.h): copies in memory of the process, where pages of a mapped
# file are shared between processes and given back when memory is short.
PANEL_BYTES = 512 << 20
# Threads that repack: memory is as fast with these.
PANEL_THREADS = 8
# Numbers a row may take to decode, for each of the matrix, and in any case. Trees of the converter take about one for each.
_ROW_WORK, _LITTLE_WORK = 16, 1 << 20


def available() -> bool:
    """Whether the extension holds the engine."""
    return hasattr(ext, "Engine")


def panel_threads(size_bytes: int, threads: int) -> int:
    """What `compile_matrix` takes as `panels` for a file of so many bytes that `threads` threads run; 0 for a large one."""
    return min(threads, PANEL_THREADS) if size_bytes <= PANEL_BYTES else 0


def compile_matrix(
    encoded: EncodedTensor,
    exact: bool = False,
    way: str = "",
    panels: int = 0,
    panel_source: EncodedTensor | None = None,
    copies: Any = None,
) -> Any:
    """A matrix [rows, cols] as the engine's `EngineMatrix`, which keeps the arrays (tensors or memoryviews) alive.

    exact: float32 activations throughout; otherwise int8 where the processor has fast instructions for them. way: how a
    CP, Tucker or tensor train is multiplied: `steps` (through its factors) or `decoded` (once, now); by the counted work
    when empty. panels: threads that repack integers and grids into panels, where the instruction set has some, and copy path
    codes and shuffle codes as they are: copies of the same size in large pages, of which panels are multiplied about twice
    as fast from the caches; 0: all is read as it is stored. panel_source: the same tensor in other arrays, which what is
    copied is read from and which are not kept. copies: an `ext.EngineCopies` that what is copied is left to: the matrix may
    be used once its `run(threads)` has returned, and `panels` counts for nothing then.
    Raises ValueError for a tensor that is no matrix.
    """
    if copies is not None or not panels:
        return _compiled(encoded, exact, way, panel_source, copies)
    copies = ext.EngineCopies()
    made = _compiled(encoded, exact, way, panel_source, copies)
    copies.run(panels)
    return made


def _compiled(
    encoded: EncodedTensor, exact: bool, way: str, panel_source: EncodedTensor | None, copies: Any
) -> Any:
    """`compile_matrix` with what is copied left to `copies`; nothing is where that is None."""
    if len(encoded.shape) != 2:
        raise ValueError(f"a tensor of shape {list(encoded.shape)} is no matrix")
    kind, params, arrays = encoded.tree.kind, encoded.tree.params, encoded.arrays
    rows, cols = encoded.shape
    if _row_work(encoded.tree, encoded.shape) > max(_ROW_WORK * rows * cols, _LITTLE_WORK):
        return ext.engine_dense(rows, cols, _decoded(encoded), "float32")

    def child(name: str) -> Any:
        source = None if panel_source is None else child_encoded(panel_source, name)
        return _compiled(child_encoded(encoded, name), exact, way, source, copies)

    if getattr(params, "lead", 1) == 1:
        if kind in _PACKED and _has_whole_blocks(params, cols):
            if copies is not None and not exact and kind in ("int", "grid"):
                made = ext.engine_packed(packed(panel_source or encoded), False, copies)
                if panel_source is None or made.kernel.startswith("panels"):
                    return made
            leaf = packed(encoded)
            if leaf is not None:
                return ext.engine_packed(leaf, exact)
        if kind in ("int", "grid"):
            short = _short_rows(encoded)
            if short is not None:
                return ext.engine_reshaped(short, rows, cols)
        if kind == "trellis":
            return _trellis(panel_source or encoded, exact, copies)
        if kind == "shuffle":
            return _shuffle(panel_source or encoded, exact, copies)
        if kind == "rotated":
            return _rotated(child("x"), params)
        if kind == "low_rank":
            return ext.engine_low_rank(child("a"), child("b"))
    if kind == "add":
        return ext.engine_sum(child("x"), child("y"))
    if kind in _CHAINS:
        made = _chain(encoded, exact, way)
        if made is not None:
            return made
    if kind == "permute":
        if params.dims == (0, 1):
            return child("x")
        # Its rows are decoded and added up, which no int8 kernel does.
        return ext.engine_transposed(compile_matrix(child_encoded(encoded, "x"), True, way))
    if kind == "dense" and params.dtype in _DENSE:
        return ext.engine_dense(rows, cols, stored_bits(arrays["values"]), params.dtype)
    return ext.engine_dense(rows, cols, _decoded(encoded), "float32")


def reads_codes(encoded: EncodedTensor) -> bool:
    """Whether `compile_matrix` makes a matrix that is read as it is stored: nothing of it is decoded and held."""
    kind, params = encoded.tree.kind, encoded.tree.params
    if len(encoded.shape) != 2 or getattr(params, "lead", 1) != 1:
        return False
    if _row_work(encoded.tree, encoded.shape) > max(_ROW_WORK * math.prod(encoded.shape), _LITTLE_WORK):
        return False
    if kind in _PACKED:
        return _has_whole_blocks(params, encoded.shape[1]) and packed(encoded) is not None
    if kind == "dense":
        return params.dtype in _DENSE
    if kind in ("rotated", "low_rank", "add"):
        return all(reads_codes(child_encoded(encoded, name)) for name in encoded.tree.children)
    return kind in ("trellis", "shuffle")


def _row_work(tree: Node, shape: Shape) -> int:
    """At most so many numbers the engine computes to decode one row of a tree by its children's rows."""
    if not tree.children:
        return shape[-1]
    shapes = format_of(tree.kind).children(tree.params, shape)
    row = {name: _row_work(child, shapes[name]) for name, child in tree.children.items()}
    if tree.kind == "add":
        return row["x"] + row["y"]
    if tree.kind == "low_rank":
        rank: int = tree.params.rank
        return row["a"] + rank * row["b"]
    if tree.kind == "rotated":
        block: int = tree.params.block_out
        return max(1, block) * row["x"]
    if tree.kind == "permute" and tree.params.dims == (0, 1):
        return row["x"]
    return sum(math.prod(shapes[name][:-1]) * row[name] for name in row)


def _has_whole_blocks(params: Any, cols: int) -> bool:
    group = getattr(params, "group", 32)
    return group % 32 == 0 or group >= cols


def _chain(encoded: EncodedTensor, exact: bool, way: str) -> Any:
    """A decomposition by its factors, or None when no prefix of its view's axes makes the rows."""
    kind, params = encoded.tree.kind, encoded.tree.params
    axes = range(len(params.view))
    names = {
        "cp": [f"factor{i}" for i in axes],
        "tucker": ["core", *(f"factor{i}" for i in axes)],
        "tensor_train": [f"core{i}" for i in axes],
    }[kind]
    parts = [
        compile_matrix(_as_matrix(child_encoded(encoded, n)), exact, way)
        if n in encoded.tree.children
        else None
        for n in names
    ]
    ranks = [params.rank] if kind == "cp" else list(params.ranks)
    return ext.engine_chain(kind, encoded.shape[0], encoded.shape[1], list(params.view), ranks, parts, way)


def _as_matrix(encoded: EncodedTensor) -> EncodedTensor:
    """The same values in the same order as a matrix: of the rows in which a leaf is stored, decoded for other kinds."""
    tree, shape = encoded.tree, encoded.shape
    if len(shape) == 2 and getattr(tree.params, "lead", 1) == 1:
        return encoded
    if tree.kind in (*_PACKED, "shuffle", "trellis", "low_rank"):
        lead = tree.params.lead
        node = Node(tree.kind, changed(tree.params, lead=1), tree.children)
        return EncodedTensor(node, (math.prod(shape[:lead]), math.prod(shape[lead:])), encoded.arrays)
    matrix = (math.prod(shape[:-1]), shape[-1])
    if tree.kind == "dense":
        return EncodedTensor(tree, matrix, encoded.arrays)
    return EncodedTensor(Node("dense", dense.Params("float32")), matrix, {"values": _decoded(encoded)})


def _short_rows(encoded: EncodedTensor) -> Any:
    """A matrix whose groups the row kernels cannot read, with every group as a row of its own: [rows * groups, group].

    None where groups do not divide a row or do not begin at whole bytes. 8-bit scales become float32, zero points bytes.
    """
    kind, params, arrays = encoded.tree.kind, encoded.tree.params, _tensors(encoded)
    rows, cols = encoded.shape
    group, bits = params.group, params.bits if kind == "int" else 4
    if cols % group or group * bits % 8:
        return None
    scale = arrays["scale"].view(torch.uint16) if params.scale_bits == 16 else read_scales(dict(arrays), 8)
    zeros = bitpack.unpack(arrays["zeros"], bits, cols // group) if "zeros" in arrays else None
    table = arrays["table"].view(torch.uint16) if "table" in arrays else None
    leaf = ext.PackedLinear(
        kind,
        group,
        group,
        bits,
        arrays["codes"].reshape(rows * cols // group, -1),
        scale.reshape(-1, 1).contiguous(),
        zeros=None if zeros is None else zeros.reshape(-1, 1).contiguous(),
        table=table,
    )
    return ext.engine_packed(leaf, True)


def _trellis(encoded: EncodedTensor, exact: bool, copies: Any) -> Any:
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
        copies,
    )


def _shuffle(encoded: EncodedTensor, exact: bool, copies: Any) -> Any:
    params, arrays = encoded.tree.params, encoded.arrays
    rows, cols = encoded.shape
    return ext.engine_shuffle(
        rows,
        cols,
        params.quarter_bits,
        stored_bits(arrays["codes"]),
        bytearray.fromhex(shuffle.TABLES[params.quarter_bits]),
        shuffle.STEPS[params.quarter_bits],
        stored_bits(arrays["scale_codes" if params.scale_bits == 8 else "scale"]),
        stored_bits(arrays["scale_super"]),
        exact,
        copies,
    )


def _rotated(made: Any, params: Any) -> Any:
    if params.block_in:
        made = ext.engine_rotated(made, params.seed, params.block_in)
    if params.block_out:
        made = ext.engine_rotated_rows(made, params.seed, params.block_out)
    return made


def _tensors(encoded: EncodedTensor) -> dict[str, Tensor]:
    """The arrays as tensors, also those that are memoryviews."""
    specs = array_specs(encoded.tree, encoded.shape)
    return {
        name: torch.frombuffer(a, dtype=specs[name].dtype).reshape(specs[name].shape)
        if isinstance(a, memoryview)
        else a
        for name, a in encoded.arrays.items()
    }


def _decoded(encoded: EncodedTensor) -> Tensor:
    """The dense tensor, float32."""
    values = decode(EncodedTensor(encoded.tree, encoded.shape, _tensors(encoded)))
    return values.to(torch.float32).contiguous()


def matmul(x: Tensor, matrix: Any, threads: int | None = None) -> Tensor:
    """x @ W.T for tests and reports: float32 [batch, cols] -> [batch, rows]."""
    x = x.to(torch.float32).contiguous()
    y = torch.empty(len(x), matrix.shape[0], dtype=torch.float32, device="cpu")
    matrix.multiply_at(x.data_ptr(), len(x), y.data_ptr(), threads or torch.get_num_threads())
    return y


def decode_row(matrix: Any, row: int) -> array[float]:
    """One row, float32 [cols]. Raises ValueError for a row that is not there."""
    out = array("f", bytes(4 * matrix.shape[1]))
    matrix.decode_at(row, out.buffer_info()[0])
    return out
