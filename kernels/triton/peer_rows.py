# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Rows of a prompt added over the two GPUs of a host, onto the residual stream, and normed: one launch after a product.

The product writes its rows here and into the other GPU's memory (wgmma.py), where most of them arrive while it runs. A
program has a row: it says that the rows of its rank have arrived, waits for the other's word, and adds. Nothing but that
word crosses the link here. For more ranks NCCL sends less.

There are two places for rows, which the sums of a layer use in turn. A rank writes to one again once it has made the sum in
between, here or by NCCL, which waited for the other, and the other came to it after it had read the first: nothing is
overwritten before it is read.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.decode_step import added
from nstf.kernels.triton.launching import hardware_of, launch, multiples, overlap_options, overlaps
from nstf.kernels.triton.spec import KernelSpec, pointer_type

# Rows of a prompt, and 16-bit numbers of all of them.
MOST_ROWS = 1024
MOST_VALUES = 1 << 23
# Says that all this rank wrote before has arrived, also what earlier launches wrote.
_SAY: tl.constexpr = tl.constexpr("st.release.sys.global.u32 [$1], $2; mov.b32 $0, 0;")
# Waits for a word; gives up as peers.py does.
_HEAR: tl.constexpr = tl.constexpr(
    """{
        .reg .pred there, late;
        .reg .b64 since, now;
        .reg .b32 word;
        mov.u64 since, %clock64;
    HEAR:
        ld.acquire.sys.global.u32 word, [$1];
        setp.eq.u32 there, word, $2;
        @there bra HEARD;
        mov.u64 now, %clock64;
        sub.u64 now, now, since;
        setp.gt.u64 late, now, 1100000000000;
        @late trap;
        bra HEAR;
    HEARD:
        mov.b32 $0, word;
    }"""
)


@dataclass(frozen=True)
class Twins:
    """What two ranks add rows by. own: the two places here, flat 16-bit numbers [MOST_VALUES]; theirs: those of the other
    rank. words: int32 [2, MOST_ROWS], what the other said of each place; their_words: where this rank says it. calls: int32
    [MOST_ROWS], how many sums each program has made. All zero before the first."""

    own: tuple[Tensor, Tensor]
    theirs: tuple[Tensor, Tensor]
    words: Tensor
    their_words: Tensor
    calls: Tensor

    def takes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether there is room for so many rows."""
        return rows <= MOST_ROWS and rows * width <= MOST_VALUES and dtype.itemsize == 2 and width % 8 == 0

    def place(self, turn: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Where the product of this rank goes, [rows, width] in the other's memory. turn: 0 or 1."""
        return self.theirs[turn][: rows * width].view(dtype).view(rows, width)


@triton.jit
def met_norm_kernel(
    h,  # f32 [rows, size]
    y,  # [rows, size]
    theirs,  # [rows, size]
    gain,  # f32 [size]
    out_gain,  # f32 [size]
    x,  # [rows, size]
    words,  # i32 [rows]
    their_words,  # i32 [rows], in the other's memory
    calls,  # i32 [rows]
    size,
    epsilon,
    OUT_GAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    """As norm_kernel of decode_step.py, with y + theirs, rounded once, in the place of y."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, BLOCK)
    ok = k < size
    row = tl.program_id(0)
    at = row * size + k
    strength = tl.load(gain + k, mask=ok, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    call = tl.load(calls + row, volatile=True) + 1
    if NVIDIA:
        tl.inline_asm_elementwise(
            _SAY, "=r,l,r", [(their_words + row).to(tl.int64), call], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(their_words + row, call)
    value = tl.load(h + at, mask=ok, other=0.0)
    mine = tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
    if NVIDIA:
        tl.inline_asm_elementwise(
            _HEAR, "=r,l,r", [(words + row).to(tl.int64), call], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
    # Past the first-level cache, which knows nothing of other GPUs. Of two the order makes no difference.
    other = tl.load(theirs + at, mask=ok, other=0.0, cache_modifier=".cg").to(tl.float32)
    more = (mine + other).to(y.dtype.element_ty).to(tl.float32)
    value = added(value, more, h, out_gain, at, k, ok, size, epsilon, OUT_GAIN)
    value *= tl.rsqrt(tl.sum(value * value) / size + epsilon)
    value *= strength
    tl.store(x + at, value.to(x.dtype.element_ty), mask=ok)
    tl.debug_barrier()  # every warp has read the number of the call
    tl.store(calls + row, call)


@lru_cache(maxsize=256)
def met_norm_spec(rows: int, size: int, dtype: torch.dtype, out_gain: bool, arch: str) -> KernelSpec:
    """The launch for `rows` rows of a product that has ended."""
    same = ("y", "theirs", "x")
    floats, counts = ("h", "gain", "out_gain"), ("words", "their_words", "calls")
    sizes = {"size": size}
    return KernelSpec(
        name=f"met_norm_{size}_{pointer_type(dtype)[1:]}" + ("g" if out_gain else ""),
        fn=met_norm_kernel,
        signature={
            "h": "*fp32",
            "y": pointer_type(dtype),
            "theirs": pointer_type(dtype),
            "gain": "*fp32",
            "out_gain": "*fp32",
            "x": pointer_type(dtype),
            **dict.fromkeys(counts, "*i32"),
            "size": "i32",
            "epsilon": "fp32",
        },
        constants={
            "OUT_GAIN": out_gain,
            "BLOCK": triton.next_power_of_2(size),
            "PDL": overlaps(arch),
            "NVIDIA": hardware_of(arch) == 1,
        },
        divisible=(*same, *floats, *counts, *multiples(sizes)),
        num_warps=8 if size > 1024 else 4,
        num_stages=1,
        options=overlap_options(arch),
        batch=rows,
        kind="met_norm",
        grid=(rows, 1, 1),
    )


def met_norm(
    h: Tensor,
    y: Tensor,
    gain: Tensor,
    epsilon: float,
    twins: Twins,
    turn: int,
    arch: str,
    out_gain: Tensor | None = None,
) -> Tensor:
    """h += y of both ranks, then the norm of h times `gain`, in y's dtype: `add_norm` of kernels/torch/decode_step.py.

    h: f32 [rows, size]. y: [rows, size], this rank's part in 16 bits, which it has also written to `twins.place(turn, ...)`.
    """
    rows, size = y.shape
    x = torch.empty_like(y)
    theirs = twins.own[turn][: rows * size].view(y.dtype)
    spec = met_norm_spec(rows, size, y.dtype, out_gain is not None, arch)
    launch(
        spec, h, y, theirs, gain, gain if out_gain is None else out_gain, x,
        twins.words[turn], twins.their_words[turn], twins.calls, size, epsilon,
    )  # fmt: skip
    return x
