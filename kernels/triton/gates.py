"""What each kind of kernel promises of its code object: checked for every kernel and target, with no card."""

from nstf.kernels.triton.architecture import Architecture
from nstf.kernels.triton.code_object import CodeReport, Expected, misses
from nstf.kernels.triton.spec import KernelSpec

# Vector instructions for each weight of the 4-bit GEMV, products included. Unpacking alone took 4.6 to 5.2 of them
# in a plain kernel (codes of a byte, converted one by one), on every target.
MOST_VECTOR = 3.0

READ_WEIGHTS = (
    "decode",
    "embed",
    "gemv",
    "gemm",
    "int_groups",
    "low_rank",
    "skinny",
    "trellis_gemm",
    "trellis_gemv",
    "trellis_decode",
    "trellis_embed",
    "wgmma",
)


def expected(spec: KernelSpec, row: Architecture, report: CodeReport | None = None) -> Expected:
    """The promises of a kernel. Small helpers (sums of split products) promise nothing but no spills.

    report: lets the weights of an iteration be told when the compiler put several iterations into one. Raises KeyError
    for a GEMV or GEMM whose constants are not those this was written for: a gate must not be lost in silence.
    """
    c = spec.constants
    if spec.kind == "corrected_gemv":
        # The loop that is read, which loads the most, is the one over B; that of the base is the GEMV's, and checked there.
        return Expected(wide_loads=True)
    # Beside matrix instructions in the loop of the base, a correction's loops are not the one that is read.
    kind = spec.kind.removeprefix("corrected_")
    if kind == "gemv":
        # A lane takes four words of each of its rows in an iteration.
        bits = int(c["BITS"])
        weights = int(c["ROWS"]) * int(c["QUADS"]) * 128 / bits
        if report is not None and report.loop.is_loop:
            loads = int(c["ROWS"]) * int(c["QUADS"]) / (row.wave * spec.num_warps)
            weights *= max(1, round(report.loop.loads.get(16, 0) / loads))
        limit = MOST_VECTOR if bits == 4 and c["MODE"] == 0 else None
        return Expected(weights=weights, weight_bytes=weights * bits / 8, vector_per_weight=limit)
    if kind == "skinny":
        # Each of S warps takes CHUNKS chunks of sixteen rows in an iteration.
        planes = tuple(int(plane) for plane in c["PLANES"])
        weights = int(c["S"]) * int(c["CHUNKS"]) * 16 * 32 * (16 // planes[-1])
        limit = MOST_VECTOR if int(c["BITS"]) == 4 and c["MODE"] == 0 else None
        each = weights * sum(planes) / 8
        return Expected(matrix=True, weights=weights, weight_bytes=each, vector_per_weight=limit)
    if kind == "int_groups":
        # Two blocks of sixteen rows, whose chunks are 64 bytes of a row each.
        runs = 16 // int(c["BITS"])
        weights = 2 * int(c["S"]) * int(c["CHUNKS"]) * 16 * 32 * runs
        each = weights / (32 * runs) * 64
        return Expected(matrix=True, weights=weights, weight_bytes=each, vector_per_weight=MOST_VECTOR)
    if kind == "wgmma":
        # An iteration is a chunk of the narrowest plane, or two (wgmma.runs_of).
        planes = tuple(int(plane) for plane in c["PLANES"])
        runs = 16 // planes[-1]
        runs *= 1 + runs * 32 // int(c["BK"]) % 2
        weights = int(c["BN"]) * 32 * runs
        return Expected(matrix=True, weights=weights, weight_bytes=weights * sum(planes) / 8)
    if kind == "gemm":
        planes = tuple(int(plane) for plane in c["PLANES"])
        weights = int(c["BN"]) * 2 * int(c["LANES"]) * 16 // planes[-1]
        return Expected(matrix=True, weights=weights, weight_bytes=weights * sum(planes) / 8)
    if kind == "shuffle_gemm":
        # S warps with W words of eight columns in each of four lanes, down ROWS rows of eight groups.
        weights = int(c["S"]) * int(c["ROWS"]) * 8 * 32 * int(c["W"])
        limit = MOST_VECTOR if c["BYTES"] else None
        # Four lanes take the 32 neighbouring bytes of a step between them.
        return Expected(matrix=True, wide_loads=False, weights=weights, vector_per_weight=limit)
    if kind == "shuffle_gemv":
        # 32 columns a lane down 32 rows. Activations in two digits take products of their own.
        one = c["B"] == 1 and c["DIGITS"] == 1
        weights = int(c["LANES"]) * 32 * 32
        return Expected(weights=weights, vector_per_weight=MOST_VECTOR if one else None)
    if kind == "attend":
        # Not every target has matrix instructions for float32.
        return Expected(matrix=spec.signature["keys"] != "*fp32")
    if kind.startswith("attention_"):
        # Over pages; those that move them have no product. Codes are read wide, but the loop that is read may be another.
        return Expected(matrix=kind[10:] in ("decode", "prefill", "sums"), wide_loads=False)
    # Kernels that read codes (or factors) read them wide; those that read activations or sums take what there is.
    return Expected(matrix=kind.endswith("gemm"), wide_loads=kind in READ_WEIGHTS)


def check(spec: KernelSpec, report: CodeReport, row: Architecture) -> list[str]:
    """The promises that a compiled kernel breaks, one line each."""
    return misses(report, expected(spec, row, report))
