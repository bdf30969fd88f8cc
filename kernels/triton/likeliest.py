# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The end of a step of greedy decoding in one launch: the likeliest token of each sequence, and the position after it.

Torch's operators took eight launches of it, 22 us on an H200: more than one hundredth of a token of 8B.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.arrival import arrive, generation
from nstf.kernels.triton.launching import launch, multiples, overlap_options, overlaps
from nstf.kernels.triton.spec import KernelSpec, pointer_type, remembered

# Logits of a program.
BLOCK = 2048


@triton.jit
def likeliest_kernel(
    logits,  # [batch, vocab]
    best,  # f32 [batch, programs]
    places,  # i32 [batch, programs]
    counters,  # i32 [batch]: zero between launches
    tokens,  # i64 [batch]
    position,  # i64 [1]
    vocab,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of a sequence
    SPAN: tl.constexpr,  # a power of two of them
    GENERATION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    line = tl.program_id(0)
    part = tl.program_id(1)
    k = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + line.to(tl.int64) * vocab + k, mask=k < vocab, other=float("-inf")).to(tl.float32)
    # As torch's argmax has it: what is no number is the largest. Of equals the first.
    x = tl.where(x != x, float("inf"), x)
    largest = tl.max(x)
    first = tl.min(tl.where(x == largest, k, vocab - 1))
    mine = line * PROGRAMS + part
    tl.store(best + mine, largest)
    tl.store(places + mine, first)
    if arrive(counters + line, GENERATION, "acq_rel") == PROGRAMS - 1:
        tl.debug_barrier()
        i = tl.arange(0, SPAN)
        there = i < PROGRAMS
        theirs = tl.load(best + line * PROGRAMS + i, mask=there, other=float("-inf"), cache_modifier=".cg")
        place = tl.load(places + line * PROGRAMS + i, mask=there, other=0, cache_modifier=".cg")
        chosen = tl.min(tl.where(there & (theirs == tl.max(theirs)), place, vocab - 1))
        tl.store(tokens + line, chosen.to(tl.int64))
        tl.store(counters + line, 0)
        if line == 0:
            tl.store(position, tl.load(position) + 1)


@remembered
def likeliest_spec(batch: int, vocab: int, dtype: torch.dtype, arch: str) -> KernelSpec:
    programs = triton.cdiv(vocab, BLOCK)
    return KernelSpec(
        name=f"likeliest_{pointer_type(dtype)[1:]}_{programs}",
        fn=likeliest_kernel,
        signature={
            "logits": pointer_type(dtype),
            "best": "*fp32",
            "places": "*i32",
            "counters": "*i32",
            "tokens": "*i64",
            "position": "*i64",
            "vocab": "i32",
        },
        constants={
            "BLOCK": BLOCK,
            "PROGRAMS": programs,
            "SPAN": triton.next_power_of_2(programs),
            "GENERATION": generation(arch),
            "PDL": overlaps(arch),
        },
        divisible=(
            "logits",
            "best",
            "places",
            "counters",
            "tokens",
            "position",
            *multiples({"vocab": vocab}),
        ),
        num_warps=4,
        num_stages=1,
        options=overlap_options(arch),
        batch=batch,
        kind="likeliest",
        grid=(batch, programs, 1),
    )


@dataclass(frozen=True)
class Scratch:
    """Where the programs of `advance` meet: for launches that follow one another. fits: (batch, vocab)."""

    fits: tuple[int, int]
    best: Tensor
    places: Tensor
    counters: Tensor


def scratch(batch: int, vocab: int, device: torch.device) -> Scratch:
    programs = triton.cdiv(vocab, BLOCK)
    return Scratch(
        (batch, vocab),
        torch.empty(batch * programs, device=device),
        torch.empty(batch * programs, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
    )


def advance(logits: Tensor, tokens: Tensor, position: Tensor, room: Scratch, arch: str) -> None:
    """Puts the likeliest of logits [batch, vocab] into tokens, int64 [batch], and adds one to position, int64 [1].

    room: of `scratch`, for this batch and vocabulary.
    """
    batch, vocab = logits.shape
    launch(
        likeliest_spec(batch, vocab, logits.dtype, arch), logits, room.best, room.places, room.counters, tokens, position,
        vocab,
    )  # fmt: skip
