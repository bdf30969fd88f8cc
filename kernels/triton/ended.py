"""Products that end in the launch that adds up their parts (sums.py): of integers, tables, trellises and shuffle codes.

Activations of a rotated matrix are turned first, by a launch of their own: in the launch that makes them it took longer
(docs/gpu_speed.md).
"""

import torch
from torch import Tensor

from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.memo import per_encoded
from nstf.kernels.torch.rows import children_of
from nstf.kernels.triton.ending import Ending, Meeting
from nstf.kernels.triton.linear import KEPT_CHOICES, inside_of, is_known, kernel_of, leaf_specs, packed_of
from nstf.kernels.triton.packed import layout_of
from nstf.kernels.triton.skinny import possible
from nstf.kernels.triton.spec import KernelSpec

# Kernels that leave sums in parts, if they are asked to.
_KERNELS = ("int_groups", "skinny", "shuffle_mma", "trellis_gemm")


def ended_specs(
    encoded: EncodedTensor, batch: int, dtype: torch.dtype, ending: Ending, arch: str
) -> list[KernelSpec]:
    """The launches of `ended`: what turns the activations, the product, and what ends it. [] where there are none such.
    dtype: of the activations. Remembered: the host asks for them before each launch."""
    from nstf.kernels.triton.tuner import measured_version

    known, key = _known(encoded), (batch, dtype, ending, arch, measured_version())
    if key not in known:
        if len(known) >= KEPT_CHOICES:
            known.clear()
        known[key] = _specs(encoded, batch, dtype, ending, arch)
    return known[key]


@per_encoded
def _known(encoded: EncodedTensor) -> dict[tuple[object, ...], list[KernelSpec]]:
    """What `ended_specs` found for a matrix."""
    return {}


def _specs(
    encoded: EncodedTensor, batch: int, dtype: torch.dtype, ending: Ending, arch: str
) -> list[KernelSpec]:
    from nstf.kernels.triton.rotate import rotate_spec
    from nstf.kernels.triton.sums import ending_spec

    if len(encoded.shape) != 2 or not is_known(encoded, batch) or encoded.tree.kind in ("add", "dense"):
        return []
    leaf, inside, before = _leaf_of(encoded), dtype, []
    rows, cols = encoded.shape
    kernel = "" if leaf.tree.children else _kernel_of(leaf, batch, dtype, arch)
    if kernel not in _KERNELS:
        return []
    if ending.ranks > 1 and not _exchanges(batch, rows, ending.ranks):
        return []
    # Before it is divided by its root mean square a float16 might overflow.
    if (ending.adds or ending.normed) and dtype != torch.bfloat16:
        return []
    if encoded.tree.kind == "rotated":
        params = encoded.tree.params
        if params.block_out:
            return []
        if params.block_in:
            inside, _ = inside_of(leaf, batch, dtype, arch)
            before = [rotate_spec(batch, cols, params.block_in, 0, dtype, inside, False, arch)]
    made = leaf_specs(leaf, batch, inside, torch.float32, dtype, arch, kernel)
    products = [spec for spec in made if spec.kind != "sum"]
    last = ending_spec(batch, rows, cols, products[0].grid[1], dtype, ending, arch)
    return [*before, *products, last]


def ended(
    x: Tensor, encoded: EncodedTensor, ending: Ending, meeting: Meeting, arch: str
) -> tuple[Tensor, Tensor | None]:
    """The product of x [batch, in] with an ending that `ended_specs` has launches for: (Y, the sums of squares where it
    adds)."""
    from nstf.kernels.triton import sums
    from nstf.kernels.triton.rotate import rotate

    dtype, leaf = x.dtype, _leaf_of(encoded)
    *products, last = ended_specs(encoded, len(x), dtype, ending, arch)
    if products[0].kind == "rotate":
        inside, _ = inside_of(leaf, len(x), dtype, arch)
        x, products = rotate(x, encoded.tree.params, 0, inside, arch), products[1:]
    parts = torch.empty(products[0].grid[1], len(x), encoded.shape[0], dtype=torch.float32, device=x.device)
    into(parts, x, leaf, products)
    return sums.ended(parts, x.shape[1], dtype, last, meeting)


def into(parts: Tensor, x: Tensor, leaf: EncodedTensor, products: list[KernelSpec]) -> None:
    """The product of a leaf alone, as the specs were made for, into parts, f32 [programs along the columns, batch, out]."""
    kind = products[0].kind
    if kind == "trellis_gemm":
        from nstf.kernels.triton.trellis import prepare
        from nstf.kernels.triton.trellis_gemm import trellis_gemm_into

        trellis_gemm_into(parts, x, prepare(leaf), products)
    elif kind == "shuffle_gemm":
        from nstf.kernels.triton import shuffle
        from nstf.kernels.triton.shuffle_mma import shuffle_mma_into

        shuffle_mma_into(parts, x, shuffle.prepare(leaf), products[0])
    else:
        from nstf.kernels.triton.int_groups import int_groups_into
        from nstf.kernels.triton.skinny import skinny_into

        run = int_groups_into if kind == "int_groups" else skinny_into
        run(parts, x, packed_of(leaf), products[0])


def _kernel_of(leaf: EncodedTensor, batch: int, dtype: torch.dtype, arch: str) -> str:
    """The kernel of a product that ends so. One row of 8-bit integers, which gemv.py multiplies where it is alone, ends with
    the sums of skinny.py: what that costs is less than two launches more, for the sum and the norm."""
    kernel = kernel_of(leaf, batch, dtype, arch)
    layout = layout_of(leaf) if kernel == "gemv" else None
    return "skinny" if layout is not None and possible(layout, batch, dtype, arch) else kernel


def _exchanges(batch: int, rows: int, ranks: int) -> bool:
    """Whether the launch that ends a product [batch, rows] may sum it over ranks.

    A rank whose part has no ending sums the same values by `peer_sum`. So the limit is the same (`PeerSums.takes`), and each
    value must lie in the same place, which it does where programs do not end within a row of values.
    """
    from nstf.kernels.triton.peers import BLOCK, MOST_VALUES

    return batch * rows * (ranks - 1) <= MOST_VALUES and (batch == 1 or rows % BLOCK == 0)


def _leaf_of(encoded: EncodedTensor) -> EncodedTensor:
    """What is stored, in whichever basis."""
    return children_of(encoded)["x"] if encoded.tree.kind == "rotated" else encoded
