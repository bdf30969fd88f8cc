# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
"""Records on their way into shared memory and from there into registers, for attention_bytes.py.

A program is one warp with SLOTS places for a record; keys and values have a barrier each. Bulk copies (sm_90 and later)
fill them: a lane asks for 4.5 KB with one instruction, and no register waits for the bytes. The shared memory is declared in
the instruction that makes it ready, beside Triton's own. Addresses in it are [32], the same in all lanes.

With HARDWARE 0, in the interpreter, lanes load from the record itself.
"""

import triton
import triton.language as tl

from nstf.kernels.triton.operands import columns_of

# Barriers stand before the slots.
_FIRST = tl.constexpr(128)


@triton.constexpr_function
def _room_text(slots: int, record: int) -> str:
    barriers = " ".join(f"@p mbarrier.init.shared::cta.b64 [$0+{8 * n}], 1;" for n in range(2 * slots))
    return (
        f"{{ .reg .pred p; .shared .align 128 .b8 slots[{128 + slots * record}]; mov.u32 $0, slots; "
        f"setp.eq.u32 p, $1, 0; {barriers} fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; "
        "bar.warp.sync 0xffffffff; }"
    )


@triton.constexpr_function
def _ask_text(size: int) -> str:
    return (
        "{ .reg .pred p; .reg .b64 h; bar.warp.sync 0xffffffff; setp.ne.u32 p, $4, 0; "
        "createpolicy.fractional.L2::evict_first.b64 h, 1.0; "
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {size}; "
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[$2], [$3], {size}, [$1], h; mov.u32 $0, 0; }}"
    )


@triton.jit
def room(SLOTS: tl.constexpr, RECORD: tl.constexpr):
    """Shared memory for SLOTS records and their barriers: its address, barriers ready."""
    return tl.inline_asm_elementwise(
        _room_text(SLOTS, RECORD), "=&r,r", [tl.arange(0, 32)], tl.uint32, False, 1
    )


@triton.jit
def slot_at(begin, slot, RECORD: tl.constexpr):
    """Where a slot's record stands. slot: [32]."""
    return begin + (slot * RECORD + _FIRST).to(tl.uint32)


@triton.jit
def ask(begin, slot, source, wants, PART: tl.constexpr, RECORD: tl.constexpr, SKIP: tl.constexpr):
    """The lane that `wants` it copies keys (PART 0) or values of the record at its `source` into a slot that all have read.

    Each byte is read once: nothing of it is kept in the second-level cache.
    """
    SIZE: tl.constexpr = SKIP if PART == 0 else RECORD - SKIP
    tl.inline_asm_elementwise(
        _ask_text(SIZE),
        "=r,r,r,l,r",
        [
            begin + (slot * 16 + PART * 8).to(tl.uint32),
            slot_at(begin, slot, RECORD) + PART * SKIP,
            source + PART * SKIP,
            wants.to(tl.uint32),
        ],
        tl.uint32,
        False,
        1,
    )


@triton.jit
def arrived(begin, slot, turn, PART: tl.constexpr):
    """Waits for the slot's last copy. turn: the number of copies into it before, modulo 2."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra again; "
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0; }",
        "=r,r,r",
        [begin + (slot * 16 + PART * 8).to(tl.uint32), turn],
        tl.uint32,
        False,
        1,
    )


@triton.jit
def _four_landed(base, at):
    """Four neighbouring words of each lane."""
    return tl.inline_asm_elementwise(
        "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [base + (at * 4).to(tl.uint32)],
        (tl.uint32, tl.uint32, tl.uint32, tl.uint32), False, 1,
    )  # fmt: skip


@triton.jit
def load_four(words, at, HARDWARE: tl.constexpr):
    """Four neighbouring words of each lane."""
    if HARDWARE == 1:
        # As tensors of two dimensions they take the compiler a quarter of a minute.
        return tl.inline_asm_elementwise(
            "ld.global.L1::no_allocate.L2::128B.v4.u32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l", [(words + at).to(tl.int64)], (tl.uint32, tl.uint32, tl.uint32, tl.uint32), False, 1,
        )  # fmt: skip
    else:
        some = tl.load(words + at[:, None] + tl.arange(0, 4)[None, :])
        return columns_of(some.to(tl.uint32, bitcast=True), 4)


@triton.jit
def _stored(base, at, HARDWARE: tl.constexpr):
    """Four neighbouring words of each lane of what begins at `base`."""
    if HARDWARE == 1:
        return _four_landed(base, at)
    else:
        return load_four(base, at, HARDWARE)


@triton.jit
def load_key_codes(base, HARDWARE: tl.constexpr):
    """For each row of sums (i, h) four words."""
    i = tl.arange(0, 32)
    g = i // 4
    found = ()
    for r in tl.static_range(8):
        row = 32 * (r % 2) + 8 * (g // 2) + 2 * (r // 2) + g % 2
        found = found + _stored(base, row * 16 + i % 4 * 4, HARDWARE)
    return found


@triton.jit
def load_key_scales(base, HARDWARE: tl.constexpr):
    """Of each of four fields four words: scales, then minimums."""
    found = ()
    for s in tl.static_range(2):
        for j in tl.static_range(4):
            at = 1024 + 64 * (1 - s) + 16 * j
            found = found + _stored(base, at + tl.arange(0, 32) % 4 * 4, HARDWARE)
    return found


@triton.jit
def load_value_codes(base, HARDWARE: tl.constexpr):
    """Of rows g, g + 8, .. g + 24, of both halves h of the positions, four words."""
    i = tl.arange(0, 32)
    found = ()
    for b in tl.static_range(4):
        for h in tl.static_range(2):
            found = found + _stored(base, (i // 4 + 8 * b) * 32 + h * 16 + i % 4 * 4, HARDWARE)
    return found


@triton.jit
def load_value_scales(base, HARDWARE: tl.constexpr):
    """Of both groups of channels, of both halves h, four words: scales, then minimums."""
    found = ()
    for s in tl.static_range(2):
        for c in tl.static_range(2):
            for h in tl.static_range(2):
                at = 1024 + 64 * (1 - s) + 32 * c + 16 * h
                found = found + _stored(base, at + tl.arange(0, 32) // 8 * 4, HARDWARE)
    return found
