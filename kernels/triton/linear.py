"""Activations times an encoded matrix on an NVIDIA or AMD GPU, by the Triton kernel for its format and batch.

    one or two rows          int_groups.py on NVIDIA: integers of up to 4 bits, a column of the matrix cores for each group
    up to 16 rows            skinny.py on NVIDIA, codes straight to operands of matrix instructions
    one row                  gemv.py, straight from the codes
    17 rows and more         wgmma.py on Hopper, for large matrices (hopper.py says which)
    up to GEMM_BATCH rows    gemm.py, on matrix cores
    more                     decode.py a block of rows at a time, and the library's dense product
    trellis                  NVIDIA: trellis_bytes.py to 4 rows, trellis_gemm.py to 32; trellis.py to 8; decoded blocks above
    shuffle                  NVIDIA: shuffle_mma.py to 64 rows; shuffle.py to 2 rows, twice to 4; decoded blocks above
    rotated                  rotate.py before (and after) the product of what is stored
    low_rank                 low_rank.py up to eight rows, the library's two products above
    cp, tensor_train, tucker their two sides (factors.py) likewise; W itself where that is smaller
    add                      corrected.py up to eight rows, in one launch; else the one, then the low rank onto its result
    dense                    the library's product

Where there is no suitable GPU, `available` and `supports` say no and the torch kernels run; `unsuitable` says why.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nstf.kernels.formats.dense import torch_dtype
from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.memo import per_encoded
from nstf.kernels.torch.rows import children_of
from nstf.kernels.triton import AVAILABLE, factors
from nstf.kernels.triton.blocks import block, blocks, product32
from nstf.kernels.triton.packed import FORMATS as PACKED
from nstf.kernels.triton.packed import TABLE, compact, layout_of, pack_leaf
from nstf.kernels.triton.spec import KernelSpec

if TYPE_CHECKING:
    from nstf.kernels.triton.packed import Packed

NAME = "triton.linear"
# Leaves that kernels of their own read.
CODES = ("shuffle", "trellis")
FORMATS = (*PACKED, *factors.KINDS, "add", "dense", "rotated", *CODES)

# Above, a dense product of decoded blocks is faster than unpacking the codes for every tile of the batch.
GEMM_BATCH = 256
TRELLIS_BATCH = 8
# More rows of sums of 32 rows of weights do not fit the registers.
SHUFFLE_BATCH = 2
# Numbers of rows for which a matrix's kernel is remembered.
KEPT_CHOICES = 32


def available() -> bool:
    return AVAILABLE and torch.cuda.is_available()


def usable(device: torch.device) -> bool:
    """Whether Triton compiles for a GPU; says why not once."""
    return available() and not _warned(device.index or 0)


def supports(encoded: EncodedTensor, device: torch.device, batch: int) -> bool:
    """Matrices in the formats above on a GPU that Triton compiles for."""
    if device.type != "cuda" or len(encoded.shape) != 2 or _warned(device.index or 0):
        return False
    return is_known(encoded, batch) and _readable(encoded)


def matmul(x: Tensor, encoded: EncodedTensor) -> Tensor:
    """x: [batch, in] -> [batch, out] in x's dtype; sums in float32."""
    with torch.cuda.device(x.device):
        return _matmul(x, encoded, arch_of(x.device))


def matmul_twice(x: Tensor, encoded: EncodedTensor, twin: Tensor) -> Tensor:
    """As `matmul`, and the product is written to `twin` [batch, out] as well, which may be in another GPU's memory: while it
    is multiplied where the kernel can."""
    with torch.cuda.device(x.device):
        leaf, arch = encoded, arch_of(x.device)
        turned = encoded.tree.kind == "rotated" and not encoded.tree.params.block_out
        if turned:
            leaf = children_of(encoded)["x"]
        if layout_of(leaf) is not None:
            kernel, made = _choice(leaf, len(x), x.dtype, x.dtype, x.dtype, arch)
            if kernel == "wgmma":
                from nstf.kernels.triton.hopper import wgmma
                from nstf.kernels.triton.rotate import rotate

                inside = rotate(x, encoded.tree.params, 0, x.dtype, arch) if turned else x
                return wgmma(inside, packed_of(leaf), made, x.dtype, twin)
        y = _matmul(x, encoded, arch)
        twin.copy_(y)
        return y


def matmul32(x: Tensor, encoded: EncodedTensor) -> Tensor:
    """As `matmul`, in float32: not rounded to x's dtype, except what goes through factors."""
    with torch.cuda.device(x.device):
        arch = arch_of(x.device)
        if encoded.tree.kind == "rotated":
            return _rotated(x, encoded, arch, torch.float32)
        if encoded.tree.kind == "dense":
            return product32(x, encoded.arrays["values"].to(x.dtype))
        if encoded.tree.kind in ("add", *factors.KINDS):
            return _matmul(x, encoded, arch).float()
        return _leaf(x, encoded, arch, torch.float32, x.dtype)


def rows(encoded: EncodedTensor, ids: Tensor, dtype: torch.dtype) -> Tensor | None:
    """decode(encoded)[ids] as `dtype`, [n, in], for ids int64 [n] on the GPU; None when no kernel does it.

    No round trip to the host, so it can be part of a captured graph: an id out of range gives a row of NaN.
    """
    leaf = _stored_rows(encoded)
    if leaf.tree.kind not in (*PACKED, *CODES) or not supports(leaf, ids.device, len(ids)):
        return None
    with torch.cuda.device(ids.device):
        return read_rows(encoded, ids, dtype, arch_of(ids.device))


def read_rows(encoded: EncodedTensor, ids: Tensor, dtype: torch.dtype, arch: str) -> Tensor:
    """`rows` for a matrix and ids that a kernel supports."""
    leaf = _stored_rows(encoded)
    if leaf is encoded:
        return decoder(leaf, arch)(ids, dtype)
    from nstf.kernels.triton.rotate import rotate

    return rotate(decoder(leaf, arch)(ids, torch.float32), encoded.tree.params, 2, dtype, arch)


def row_specs(encoded: EncodedTensor, count: int, dtype: torch.dtype, arch: str) -> list[KernelSpec]:
    """The launches `rows` makes for `count` ids; [] when no kernel does it."""
    from nstf.kernels.triton.decode import decode_spec
    from nstf.kernels.triton.rotate import rotate_spec
    from nstf.kernels.triton.shuffle_decode import shuffle_decode_spec
    from nstf.kernels.triton.trellis import trellis_decode_specs

    leaf = _stored_rows(encoded)
    if len(encoded.shape) != 2 or leaf.tree.kind not in (*PACKED, *CODES) or not is_known(leaf, count):
        return []
    (out, width), params, stored = leaf.shape, leaf.tree.params, dtype if leaf is encoded else torch.float32
    if leaf.tree.kind == "trellis":
        made = trellis_decode_specs(params, out, width, count, stored, True, arch)
    elif leaf.tree.kind == "shuffle":
        made = [shuffle_decode_spec(params, out, width, count, stored, True)]
    else:
        layout = layout_of(leaf)
        if layout is None:
            return []
        made = [decode_spec(layout, count, stored, True)]
    if leaf is encoded:
        return made
    return [*made, rotate_spec(count, width, encoded.tree.params.block_in, 2, stored, dtype, False, arch)]


def _stored_rows(encoded: EncodedTensor) -> EncodedTensor:
    """The matrix whose rows are stored: x of a `rotated` matrix whose columns alone are rotated, else the matrix itself."""
    turned = encoded.tree.kind == "rotated" and not encoded.tree.params.block_out
    return children_of(encoded)["x"] if turned else encoded


def whole(encoded: EncodedTensor, batch: int, dtype: torch.dtype) -> Tensor | None:
    """decode(encoded) where the product with `batch` rows of activations would decode it; None where it reads the codes."""
    arch = arch_of(next(iter(encoded.arrays.values())).device)
    if encoded.tree.kind not in (*PACKED, *CODES) or kernel_of(encoded, batch, dtype, arch) != "blocks":
        return None
    with torch.cuda.device(next(iter(encoded.arrays.values())).device):
        return decoder(encoded, arch)(slice(0, encoded.shape[0]), dtype)


def resident(encoded: EncodedTensor) -> EncodedTensor:
    """The same tensor as it should be kept on its device: packed codes in the kernels' order, instead of the stored one."""
    device = next(iter(encoded.arrays.values())).device
    if device.type != "cuda" or not available() or _warned(device.index or 0):
        return encoded
    return compact(encoded)


def specs(encoded: EncodedTensor, batch: int, dtype: torch.dtype, arch: str) -> list[KernelSpec]:
    """The launches `matmul` makes, in order, without those of torch's own libraries; [] when there are none."""
    from nstf.kernels.triton.low_rank import low_rank_specs
    from nstf.kernels.triton.rotate import rotate_spec

    if len(encoded.shape) != 2 or not is_known(encoded, batch):
        return []
    out, width = encoded.shape
    kind = encoded.tree.kind
    if kind == "dense":
        return []
    together = _corrected_specs(encoded, batch, dtype, arch)
    if together:
        return together
    if kind in ("add", *factors.KINDS):
        chain = children_of(encoded)["y"] if kind == "add" else encoded
        first = specs(children_of(encoded)["x"], batch, dtype, arch) if kind == "add" else []
        if not factors.in_one_launch(chain, batch):
            return first
        bond, sides = factors.bond_of(chain) or 0, factors.sides_dtype(chain, dtype)
        return first + low_rank_specs(out, width, bond, batch, dtype, sides, kind == "add", arch)
    leaf, before, after = encoded, [], []
    inside = outside = dtype
    if encoded.tree.kind == "rotated":
        params, leaf = encoded.tree.params, children_of(encoded)["x"]
        inside, tiled = inside_of(leaf, batch, dtype, arch)
        outside = torch.float32 if params.block_out else dtype
        before = [rotate_spec(batch, width, params.block_in, 0, dtype, inside, tiled, arch)]
        if params.block_out:
            after = [rotate_spec(batch, out, params.block_out, 1, outside, dtype, False, arch)]
    elif kernel_of(leaf, batch, dtype, arch) == "trellis_gemv":
        before = [rotate_spec(batch, width, 0, 0, dtype, torch.float32, True, arch)]
    made = leaf_specs(leaf, batch, inside, outside, dtype, arch)
    return [*before, *made, *after] if made else []


def leaf_specs(
    leaf: EncodedTensor,
    batch: int,
    inside: torch.dtype,
    outside: torch.dtype,
    dtype: torch.dtype,
    arch: str,
    kernel: str = "",
) -> list[KernelSpec]:
    """The launches of `_leaf` for activations of `inside` that were `dtype` before they were turned. kernel: in the place of
    what `kernel_of` says."""
    from nstf.kernels.triton.decode import decode_spec
    from nstf.kernels.triton.trellis import trellis_decode_specs, trellis_specs
    from nstf.kernels.triton.trellis_gemm import trellis_gemm_specs
    from nstf.kernels.triton.tuner import chosen, packed_specs

    out, width = leaf.shape
    kernel = kernel or kernel_of(leaf, batch, dtype, arch)
    if kernel == "halves":
        some = (leaf_specs(leaf, rows, inside, outside, dtype, arch) for rows in _halves(batch))
        return [spec for specs in some for spec in specs]
    if leaf.tree.kind == "trellis":
        params = leaf.tree.params
        if kernel == "trellis_gemm":
            return trellis_gemm_specs(params, out, width, batch, inside, outside, arch)
        if kernel == "trellis_gemv":
            return trellis_specs(params, out, width, batch, outside, arch)
        return trellis_decode_specs(params, out, width, min(out, block(width)), inside, False, arch)
    if leaf.tree.kind == "shuffle":
        from nstf.kernels.triton.shuffle import shuffle_specs
        from nstf.kernels.triton.shuffle_decode import shuffle_decode_spec
        from nstf.kernels.triton.shuffle_mma import shuffle_mma_specs

        if kernel == "shuffle_mma":
            return shuffle_mma_specs(leaf.tree.params, out, width, batch, inside, outside, arch)
        if kernel == "shuffle_gemv":
            return shuffle_specs(leaf.tree.params, out, width, batch, inside, outside, dtype, arch)
        return [shuffle_decode_spec(leaf.tree.params, out, width, min(out, block(width)), inside, False)]
    layout = layout_of(leaf)
    if layout is None:
        return []
    if kernel in ("int_groups", "skinny", "gemv", "gemm", "wgmma"):
        tile = chosen(layout, batch, inside, arch) if kernel in ("gemm", "wgmma") else kernel
        return list(packed_specs(layout, batch, inside, arch, tile, outside))
    return [decode_spec(layout, min(out, block(width)), inside, False)]


def kernel_of(leaf: EncodedTensor, batch: int, dtype: torch.dtype, arch: str) -> str:
    """Which kernel multiplies a leaf by `batch` rows of activations that are (or were, before they were turned) `dtype`:
    a file's name; "halves": two products of half the rows, for paths and tables, which are faster than one that
    decodes otherwise; "blocks": the library's product by decoded rows.
    """
    from nstf.kernels.triton import int_groups, shuffle_mma, skinny, trellis_gemm, tuner

    half = -(-batch // 2)
    if leaf.tree.kind == "trellis":
        if trellis_gemm.suits(batch, dtype, arch):
            return "trellis_gemm"
        if batch > trellis_gemm.LARGEST_BATCH and trellis_gemm.suits(half, dtype, arch):
            return "halves"
        return "trellis_gemv" if batch <= TRELLIS_BATCH else "blocks"
    if leaf.tree.kind == "shuffle":
        if shuffle_mma.suits(batch, dtype, arch):
            return "shuffle_mma"
        if shuffle_mma.suits(half, dtype, arch):
            return "halves"
        return "shuffle_gemv" if batch <= SHUFFLE_BATCH else "halves" if half <= SHUFFLE_BATCH else "blocks"
    layout = layout_of(leaf)
    if layout is not None:
        if int_groups.suits(layout, batch, dtype, arch):
            return "int_groups"
        if skinny.suits(layout, batch, dtype, arch):
            return "skinny"
        if tuner.kernel_of(tuner.chosen(layout, batch, dtype, arch)) == "wgmma":
            return "wgmma"
        table = layout.mode == TABLE and batch > skinny.LARGEST_BATCH
        if table and skinny.suits(layout, half, dtype, arch):
            return "halves"
    if batch == 1:
        return "gemv"
    return "gemm" if batch <= GEMM_BATCH else "blocks"


def _halves(batch: int) -> tuple[int, int]:
    """Rows of the two products in the place of one."""
    return -(-batch // 2), batch // 2


def arch_of(device: torch.device) -> str:
    """`gfx942`, `sm_90`; what the interpreter pretends to be on a CPU."""
    return "sm_90" if device.type != "cuda" else _arch(device.index or 0)


def unsuitable(index: int = 0) -> str:
    """Why the kernels cannot run on a device; empty when they can."""
    if not AVAILABLE:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    arch = _arch(index)
    if torch.version.hip is None and int(arch.removeprefix("sm_")) < 75:
        return f"{torch.cuda.get_device_name(index)} is {arch}; Triton compiles for sm_75 and later"
    return ""


def decoder(encoded: EncodedTensor, arch: str) -> Callable[[slice | Tensor, torch.dtype], Tensor]:
    """Rows of a leaf by a slice or by int64 ids."""
    from nstf.kernels.triton.decode import decode_rows
    from nstf.kernels.triton.trellis import prepare, trellis_rows

    if encoded.tree.kind == "trellis":
        prepared = prepare(encoded)
        return lambda rows, dtype: trellis_rows(prepared, rows, dtype, arch)
    if encoded.tree.kind == "shuffle":
        from nstf.kernels.triton import shuffle, shuffle_decode

        codes = shuffle.prepare(encoded)
        return lambda rows, dtype: shuffle_decode.shuffle_rows(codes, rows, dtype)
    packed = packed_of(encoded)
    return lambda rows, dtype: decode_rows(packed, rows, dtype)


def _matmul(x: Tensor, encoded: EncodedTensor, arch: str) -> Tensor:
    kind = encoded.tree.kind
    if kind == "rotated":
        return _rotated(x, encoded, arch)
    if kind == "add":
        from nstf.kernels.triton.corrected import corrected

        children = children_of(encoded)
        together = _corrected_specs(encoded, len(x), x.dtype, arch)
        if together:
            return corrected(x, packed_of(children["x"]), *factors.sides(children["y"], x.dtype), together)
        return _low_rank(x, children["y"], arch, _matmul(x, children["x"], arch))
    if kind in factors.KINDS:
        return _low_rank(x, encoded, arch)
    if kind == "dense":
        return F.linear(x, encoded.arrays["values"].to(x.dtype))
    return _leaf(x, encoded, arch, x.dtype, x.dtype)


def _corrected_specs(encoded: EncodedTensor, batch: int, dtype: torch.dtype, arch: str) -> list[KernelSpec]:
    """The one launch of a packed base with a low-rank correction; [] for another tree, or where it takes several."""
    from nstf.kernels.triton.corrected import corrected_specs, suits

    if encoded.tree.kind != "add":
        return []
    base, chain = children_of(encoded)["x"], children_of(encoded)["y"]
    layout, rank = layout_of(base), factors.bond_of(chain) or 0
    if layout is None or not suits(layout, rank, batch, arch):
        return []
    return corrected_specs(layout, rank, batch, dtype, factors.sides_dtype(chain, dtype), arch)


def _low_rank(x: Tensor, encoded: EncodedTensor, arch: str, into: Tensor | None = None) -> Tensor:
    from nstf.kernels.triton.low_rank import low_rank

    if not factors.is_pair(encoded):
        return F.linear(x, factors.whole(encoded, x.dtype))
    a, b = factors.sides(encoded, x.dtype)
    if not factors.in_one_launch(encoded, len(x)):
        t = F.linear(x, b.to(x.dtype))
        return F.linear(t, a.to(x.dtype)) if into is None else torch.addmm(into, t, a.to(x.dtype).T)
    return low_rank(x, a, b, arch, into)


def _rotated(x: Tensor, encoded: EncodedTensor, arch: str, dtype: torch.dtype | None = None) -> Tensor:
    """S_o H_o (X (H_i S_i x)) as `dtype`, by default x's: the transforms in float32."""
    dtype = dtype or x.dtype
    from nstf.kernels.triton.rotate import rotate

    params, leaf = encoded.tree.params, children_of(encoded)["x"]
    inside, tiled = inside_of(leaf, len(x), x.dtype, arch)
    outside = torch.float32 if params.block_out else dtype
    y = _leaf(rotate(x, params, 0, inside, arch, tiled), leaf, arch, outside, x.dtype, tiled)
    return rotate(y, params, 1, dtype, arch) if params.block_out else y


def inside_of(leaf: EncodedTensor, batch: int, dtype: torch.dtype, arch: str) -> tuple[torch.dtype, bool]:
    """What turned activations are kept as: float32 where no matrix core needs 16 bits, and in tiles for trellis.py."""
    from nstf.kernels.triton import shuffle_mma

    kernel = kernel_of(leaf, batch, dtype, arch)
    if kernel == "halves":
        return inside_of(leaf, _halves(batch)[0], dtype, arch)
    wide = kernel in ("gemv", "shuffle_gemv", "trellis_gemv", "trellis_gemm")
    wide |= kernel == "shuffle_mma" and batch <= shuffle_mma.LARGEST_BYTES
    return torch.float32 if wide else dtype, kernel == "trellis_gemv"


def _leaf(
    x: Tensor, encoded: EncodedTensor, arch: str, out: torch.dtype, dtype: torch.dtype, tiled: bool = False
) -> Tensor:
    """dtype: of the activations before they were turned into another basis."""
    batch = len(x)
    kernel, made = _choice(encoded, batch, x.dtype, out, dtype, arch)
    product = _products().get(kernel)
    if product is not None:
        return product(x, packed_of(encoded), made, out)
    if kernel == "halves":
        first = _halves(batch)[0]
        return torch.cat([_leaf(part, encoded, arch, out, dtype, tiled) for part in (x[:first], x[first:])])
    if kernel == "blocks":
        return blocks(x, decoder(encoded, arch), encoded.shape[0], out)
    if kernel.startswith("shuffle"):
        from nstf.kernels.triton import shuffle, shuffle_mma

        run = shuffle_mma.shuffle_mma if kernel == "shuffle_mma" else shuffle.shuffle_gemv
        return run(x, shuffle.prepare(encoded), made, out)
    from nstf.kernels.triton.rotate import rotate
    from nstf.kernels.triton.trellis import prepare, trellis_gemv
    from nstf.kernels.triton.trellis_gemm import trellis_gemm

    if kernel == "trellis_gemm":
        return trellis_gemm(x, prepare(encoded), out, arch)
    turned = x if tiled else rotate(x, None, 0, torch.float32, arch, tiled=True)
    return trellis_gemv(turned, prepare(encoded), out, arch)


@cache
def _products() -> dict[str, Callable[..., Tensor]]:
    """The products of packed matrices by the name of their kernel. Looked up once: imports for each product take the host
    a tenth of its launch."""
    from nstf.kernels.triton.gemm import gemm
    from nstf.kernels.triton.gemv import gemv
    from nstf.kernels.triton.hopper import wgmma
    from nstf.kernels.triton.int_groups import int_groups
    from nstf.kernels.triton.skinny import skinny

    return {"int_groups": int_groups, "skinny": skinny, "gemv": gemv, "wgmma": wgmma, "gemm": gemm}


def _choice(
    leaf: EncodedTensor, batch: int, inside: torch.dtype, out: torch.dtype, dtype: torch.dtype, arch: str
) -> tuple[str, list[KernelSpec]]:
    """`kernel_of` and the launches where the kernel takes them, remembered: working them out takes the host longer than a
    launch."""
    from nstf.kernels.triton.tuner import measured_version

    known, key = _choices(leaf), (batch, inside, out, dtype, arch, measured_version())
    if key not in known:
        if len(known) >= KEPT_CHOICES:
            known.clear()
        kernel = kernel_of(leaf, batch, dtype, arch)
        own = kernel == "blocks" or kernel == "halves" or kernel.startswith("trellis")
        known[key] = kernel, [] if own else leaf_specs(leaf, batch, inside, out, dtype, arch)
    return known[key]


@per_encoded
def _choices(leaf: EncodedTensor) -> dict[tuple[object, ...], tuple[str, list[KernelSpec]]]:
    """What `_choice` found for a leaf."""
    return {}


def packed_of(encoded: EncodedTensor) -> "Packed":
    packed = pack_leaf(encoded)
    if packed is None:
        raise ValueError(f"{encoded.tree.kind} {list(encoded.shape)} is not a matrix these kernels read")
    return packed


def is_known(encoded: EncodedTensor, batch: int) -> bool:
    """Whether the tree is one of those above; the arrays are not looked at."""
    kind, params = encoded.tree.kind, encoded.tree.params
    if kind == "dense":
        return torch_dtype(params.dtype).is_floating_point
    if kind == "rotated":
        leaf = children_of(encoded)["x"]
        return bool(params.lead == 1) and leaf.tree.kind in (*PACKED, *CODES) and is_known(leaf, batch)
    if kind in factors.KINDS:
        return factors.known(encoded)
    if kind == "add":
        children = children_of(encoded)
        second = children["y"]
        return second.tree.kind == "low_rank" and is_known(second, batch) and is_known(children["x"], batch)
    return kind in (*PACKED, *CODES) and params.lead == 1


def _readable(encoded: EncodedTensor) -> bool:
    """False for a tree with a packed leaf that the kernels would not decode exactly."""
    if encoded.tree.kind in factors.KINDS:
        return True  # their parts are decoded by the reference
    if encoded.tree.children:
        return all(_readable(child) for child in children_of(encoded).values())
    return encoded.tree.kind not in PACKED or pack_leaf(encoded) is not None


@cache
def _arch(index: int) -> str:
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@cache
def _warned(index: int) -> bool:
    """True when the kernels cannot run on a device; says so once."""
    reason = unsuitable(index)
    if reason:
        warnings.warn(f"encoded layers run on the slower torch path: {reason}", stacklevel=2)
    return bool(reason)
