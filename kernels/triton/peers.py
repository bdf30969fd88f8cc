# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# Triton adds tuples; it does not unpack them into one.
# ruff: noqa: RUF005
"""All-reduce over the GPUs of one host by writing into each other's memory.

Each value travels as one 64-bit word together with the number of the call, and the receiver polls that word. So no barrier
and no flag has to cross the link after the data (the idea of NCCL's LL protocol). Every program exchanges 256 values and
depends on no other program, so the last launch of a product can do it too (sums.py).

A buffer has two halves, which calls use in turn. A rank that writes call n + 2 has read all of call n + 1, and the others
wrote that after they had read call n. So nothing is overwritten before it is read.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.launching import hardware_of, launch, multiples, overlap_options, overlaps
from nstf.kernels.triton.spec import KernelSpec, pointer_type

# Values of a program, one for each thread. With two, Triton made the exchange in two layouts, and a thread polled its words
# one after the other.
BLOCK = 256
WARPS = BLOCK // 32
# The largest sum.
MOST_VALUES = 1 << 17
# Polls a word until its upper half is the call's number; gives the lower half. After 1.1e12 cycles, about ten minutes (NCCL
# waits as long), it traps: the next call that waits for the GPU raises an error.
_POLL: tl.constexpr = tl.constexpr(
    """{
        .reg .pred there, late;
        .reg .b64 word, since, now;
        .reg .b32 call, value;
        mov.u64 since, %clock64;
    POLL:
        ld.volatile.global.b64 word, [$1];
        mov.b64 {value, call}, word;
        setp.eq.b32 there, call, $2;
        @there bra DONE;
        mov.u64 now, %clock64;
        sub.u64 now, now, since;
        setp.gt.u64 late, now, 1100000000000;
        @late trap;
        bra POLL;
    DONE:
        mov.b32 $0, value;
    }"""
)
_PUSH: tl.constexpr = tl.constexpr("st.volatile.global.b64 [$1], $2; mov.b32 $0, 0;")


@dataclass(frozen=True)
class Peers:
    """What a sum works on. rooms: int64 [ranks], addresses of the ranks' buffers, each int64 [2, ranks, MOST_VALUES] (half,
    sender, value) and zero before the first sum. calls: int32 [MOST_VALUES / BLOCK], how many sums each program has made."""

    rooms: Tensor
    calls: Tensor
    rank: int
    ranks: int


@triton.jit
def rooms_of(rooms, RANKS: tl.constexpr):
    """The addresses of all ranks' buffers, which no launch changes."""
    found = ()
    for rank in tl.static_range(RANKS):
        found = found + (tl.load(rooms + rank),)
    return found


@triton.jit
def call_of(calls, block):
    """The number of the sum that a program is about to make: known once the launch in front has ended."""
    return tl.load(calls + block, volatile=True) + 1


@triton.jit
def exchanged(
    own, block, rooms, call, calls, RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of own, f32 [BLOCK], added in the order of ranks: the same bits everywhere. block: the number of
    this program in its launch; rooms, call: what `rooms_of` and `call_of` gave, asked for early: each is a way to memory.
    All launches that share a buffer must have programs of BLOCK values."""
    half = (call & 1) * RANKS
    at = block * BLOCK + tl.arange(0, BLOCK)
    bits = own.to(tl.uint32, bitcast=True).to(tl.int64)
    word = (call.to(tl.int64) << 32) | bits
    for step in tl.static_range(1, RANKS):
        room = rooms[(RANK + step) % RANKS].to(tl.pointer_type(tl.int64))
        into = room + (half + RANK) * MOST + at
        if NVIDIA:
            tl.inline_asm_elementwise(_PUSH, "=r,l,l", [into, word], dtype=tl.int32, is_pure=False, pack=1)
        else:
            tl.store(into, word)
    total = tl.zeros([BLOCK], tl.float32)
    room = rooms[RANK].to(tl.pointer_type(tl.int64))
    for sender in tl.static_range(RANKS):
        if sender == RANK:
            total += own
        else:
            there = room + (half + sender) * MOST + at
            if NVIDIA:
                wanted = tl.zeros([BLOCK], tl.int32) + call
                value = tl.inline_asm_elementwise(
                    _POLL, "=r,l,r", [there, wanted], dtype=tl.int32, is_pure=False, pack=1
                )
            else:
                word = tl.load(there, volatile=True)
                while tl.max(((word >> 32) != call).to(tl.int32)) > 0:
                    word = tl.load(there, volatile=True)
                value = word.to(tl.int32)
            total += value.to(tl.float32, bitcast=True)
    tl.debug_barrier()  # every warp has read the number of the call
    tl.store(calls + block, call)
    return total


@triton.jit
def peer_sum_kernel(
    values, rooms, calls, size, RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
    NVIDIA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """values [size] = their sum over ranks."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    addresses = rooms_of(rooms, RANKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    call = call_of(calls, block)
    at = block * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32)
    total = exchanged(own, block, addresses, call, calls, RANK, RANKS, MOST, BLOCK, NVIDIA)
    tl.store(values + at, total.to(values.dtype.element_ty), mask=at < size)


@lru_cache(maxsize=1024)
def peer_sum_spec(size: int, dtype: torch.dtype, rank: int, ranks: int, arch: str) -> KernelSpec:
    """The launch that sums `size` values over the ranks."""
    return KernelSpec(
        name=f"peers_{rank}_{ranks}_{pointer_type(dtype)[1:]}",
        fn=peer_sum_kernel,
        signature={"values": pointer_type(dtype), "rooms": "*i64", "calls": "*i32", "size": "i32"},
        constants={**constants(rank, ranks, arch), "BLOCK": BLOCK, "PDL": overlaps(arch)},
        divisible=("values", "rooms", "calls", *multiples({"size": size})),
        num_warps=WARPS,
        num_stages=1,
        options=overlap_options(arch),
        kind="peers",
        grid=(triton.cdiv(size, BLOCK), 1, 1),
    )


def constants(rank: int, ranks: int, arch: str) -> dict[str, int | bool]:
    """The constants of `exchanged`."""
    return {"RANK": rank, "RANKS": ranks, "MOST": MOST_VALUES, "NVIDIA": hardware_of(arch) == 1}


def peer_sum(values: Tensor, peers: Peers, arch: str) -> None:
    """Replaces contiguous `values`, at most MOST_VALUES in float32 or 16 bits, by their sum over all ranks. All ranks must
    make the same calls in the same order."""
    spec = peer_sum_spec(values.numel(), values.dtype, peers.rank, peers.ranks, arch)
    launch(spec, values, peers.rooms, peers.calls, values.numel())
