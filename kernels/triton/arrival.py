# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""How programs of one launch hand each other what they stored: a counter is raised, and waited for.

Publication is a store of every thread, a barrier of the program, and one atomic with release semantics by one thread; the
reader's is one atomic with acquire semantics, a barrier, and loads past the first-level cache. CUDA's memory model needs no
more. On AMD the release waits for the stores of the wave that runs it, and the compiler leaves the barrier without a wait
for stores (workgroups whose waves share a first-level cache need none among themselves); so every wave waits for its own
stores first. The release then writes back the second-level cache of its die (`buffer_wbl2 sc1` on gfx942, gfx950), and the
acquire drops what the reader's caches hold; no line of what is handed over was read before it was stored.

A program takes a number when it begins, and waits for programs with lower numbers only. Those began before it, so that no
number of programs can stop each other, resident all at once or not; the interpreter, which runs one after the other, needs
nothing special.
"""

import triton
import triton.language as tl


def generation(arch: str) -> int:
    """What these functions know of a target: 1 NVIDIA, 9 CDNA (gfx9), 11 and 12 RDNA; 0: nothing, for the interpreter."""
    if triton.knobs.runtime.interpret:
        return 0
    if not arch.startswith("gfx"):
        return 1
    return 9 if arch.startswith("gfx9") else int(arch[3:5])


@triton.jit
def arrive(counter, GENERATION: tl.constexpr, SEM: tl.constexpr):
    """Adds one to a counter after all that this program stored. Returns what was there.

    SEM: "release"; "acq_rel" for a program that reads what others stored when it finds itself the last.
    """
    if GENERATION == 9:
        tl.inline_asm_elementwise("s_waitcnt vmcnt(0)\n v_mov_b32 $0, 0", "=v", [], tl.int32, False, 1)
    elif GENERATION == 11:
        tl.inline_asm_elementwise("s_waitcnt_vscnt null, 0\n v_mov_b32 $0, 0", "=v", [], tl.int32, False, 1)
    elif GENERATION == 12:
        tl.inline_asm_elementwise("s_wait_storecnt 0\n v_mov_b32 $0, 0", "=v", [], tl.int32, False, 1)
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem=SEM)


@triton.jit
def wait_for(counter, wanted, GENERATION: tl.constexpr):
    """Returns when a counter has reached `wanted`; what was stored before is then there for loads with `.cg`."""
    if GENERATION == 1:
        # Loads, not atomics: hundreds of those on one address would keep away the ones that raise it.
        while _acquired(counter) < wanted:
            pass
    else:
        # AMD's compiler takes a volatile load of Triton's out of the loop, and makes loads of these.
        while tl.atomic_add(counter, 0, sem="relaxed") < wanted:
            pass
        tl.atomic_add(counter, 0, sem="acquire")
        tl.debug_barrier()


@triton.jit
def _acquired(counter):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [counter.to(tl.int64)], tl.int64, False, 1
    )
