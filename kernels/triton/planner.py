"""Proposes tiles for activations [m, k] times an encoded matrix [n, k] on a GPU that need not be here.

A roofline model (Williams, Waterman, Patterson 2009) with five times for each tiling: memory, matrix cores, vector ALU
(decoding the weights costs instructions; with no matrix cores the products do too), local (operands on their way from
cache and local memory: small tiles read each number more often) and latency (too few bytes in flight cannot fill the
memory's bandwidth: Little's law). It orders candidates; it does not promise a time. The tuner measures the short list
alone, and remembers the best by (architecture, shape, format).

Two dataflows, both of gemm.py. Output-stationary: a workgroup keeps a tile of the output in registers and walks over k;
every weight is decoded once for each tile of rows. Weight-stationary: what it decodes stays in registers while all rows
pass, a tile at a time: every weight is decoded once, and the sums of all tiles are in registers, which limits the rows to
MOST_WALKED. With more, decoding to memory once and a dense product (linear.py) write less than sums that leave the
registers would.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from itertools import product
from typing import Any, Literal

from nstf.kernels.triton import launch_errors
from nstf.kernels.triton.architecture import Architecture, occupancy

Dataflow = Literal["output", "weight"]
CACHE_VERSION = 1
# Rows up to which products on the vector ALU are considered, and from which matrix cores are.
VECTOR_ROWS, MATRIX_ROWS = 8, 2
# Registers of a lane that addresses, masks and loop counters take beside tiles: of the kernels compiled here.
BASE_REGISTERS = 40
# Above this share of the registers that a wave can address, or of 256, compiled tilings began to spill.
REGISTER_SHARE = 0.81
# Depth of the pieces in which decoded weights change threads.
RUN_DEPTH = 32
# Rows whose sums a weight-stationary workgroup holds, and tiles of them; more tiles or deeper iterations spilled.
MOST_WALKED, MOST_TILES, MOST_DEPTH = 256, 4, 256
# Clocks that an iteration of a matrix loop loses at its barriers and waits when no other workgroup fills them. Assumed.
ITERATION_CLOCKS = 200
# The share of the lesser times that the greatest does not hide. Assumed; it decides between equals.
UNHIDDEN = 0.05
# Matrix cores and vector ALU overlap only when another wave of the SIMD has work.
OVERLAP_WAVES = 2.0


@dataclass(frozen=True)
class Problem:
    """activations [m, k] @ weights [n, k].T.

    bits: stored for each weight, scales counted. decode: vector instructions to make a number of a stored weight
    (`nstf compile --report` counts them). format: the encoding's name, a key of the cache. activation_bits: 16 or 8.
    depth: columns of an iteration where the encoding leaves no choice; 0: any.
    """

    m: int
    n: int
    k: int
    bits: float
    decode: float
    format: str
    activation_bits: int = 16
    depth: int = 0

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 1 or self.bits <= 0 or self.decode < 0:
            raise ValueError(f"no such product: {self}")

    @property
    def weight_bytes(self) -> float:
        return self.n * self.k * self.bits / 8

    @property
    def rows(self) -> int:
        """The next power of two: a tiling serves a range of batches."""
        return 1 << (self.m - 1).bit_length()

    def key(self, target: str) -> str:
        """The cache's key."""
        return f"{target}/{self.rows}x{self.n}x{self.k}/{self.format}"


@dataclass(frozen=True, order=True)
class Tiling:
    """How a product is cut. Rows (m), columns (n) and depth (k) of a workgroup's tile in numbers.

    waves and stages: Triton's num_warps and num_stages. matrix: on the matrix cores. nonkdim, kpack,
    waves_per_eu: AMD's options of the same names (0 and 1: the compiler's choice). group: tiles of rows that run
    beside each other and so share a tile of weights in the cache. xcds: dies the order of workgroups is dealt to,
    so that each gets neighbouring tiles (1: as launched).
    """

    dataflow: Dataflow
    matrix: bool
    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    waves: int = 4
    stages: int = 2
    nonkdim: int = 0
    kpack: int = 1
    waves_per_eu: int = 0
    group: int = 1
    xcds: int = 1

    def walked(self, problem: Problem) -> int:
        """Tiles of rows that a workgroup multiplies with the same decoded weights."""
        if self.dataflow != "weight":
            return 1
        # A tiling may come from a file, where nothing else bounds it.
        return max(1, min(MOST_TILES, problem.rows // self.block_m))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Prediction:
    """What the model expects of a tiling. Seconds; `bound` names the largest of the five times."""

    tiling: Tiling
    time_s: float
    memory_s: float
    matrix_s: float
    vector_s: float
    local_s: float
    latency_s: float
    bound: str
    groups: int
    waves_per_simd: float
    bytes_moved: float


def lds_bytes(problem: Problem, tiling: Tiling, row: Architecture) -> int:
    """Local memory of a workgroup, as Triton lays out gemm.py (tests compare with what is compiled).

    Activations are staged (AMD keeps one stage in registers); decoded weights stay in registers but for a run that
    changes threads; the sums change threads once, at the end.
    """
    width = problem.activation_bits // 8
    if not tiling.matrix:
        return 4 * tiling.waves * max(tiling.block_m * tiling.block_n, 1)  # the sum over waves
    copies = tiling.stages - 1 if row.backend == "hip" else tiling.stages
    rows = tiling.block_m * tiling.walked(problem)
    staged = rows * tiling.block_k * width * copies + tiling.block_n * RUN_DEPTH * width
    return max(staged if tiling.stages > 1 else 0, tiling.block_m * tiling.block_n * 2)


def registers(problem: Problem, tiling: Tiling, row: Architecture) -> int:
    """Registers of a lane: sums, one iteration's operands, what is in flight, and the rest.

    From compiled tilings of gemm.py: at most a quarter too low, and above the limit for those that spilled.
    """
    lanes = tiling.waves * row.wave
    rows = tiling.block_m * tiling.walked(problem)
    sums = rows * tiling.block_n / lanes
    depth = tiling.block_k
    raw = tiling.block_n * depth * problem.bits / 32 / lanes * max(1, tiling.stages - 1)
    width = problem.activation_bits / 32
    if tiling.matrix:
        # RDNA3 keeps each operand twice, once in either half of the wave.
        copies = 2 if row.target.startswith("gfx11") else 1
        operands = copies * width * depth * (rows + tiling.block_n) / lanes
        if row.backend == "hip" and tiling.stages > 1:
            raw += width * depth * rows / lanes
    else:
        sums = tiling.block_m * max(1.0, tiling.block_n * tiling.block_k / lanes / 8)
        operands = tiling.block_k * (tiling.block_n + tiling.block_m) * width / lanes
    return math.ceil(BASE_REGISTERS + sums + raw + operands)


def predict(problem: Problem, tiling: Tiling, row: Architecture) -> Prediction | None:
    """The five times of a tiling, or None when it does not fit on the target."""
    shared, wanted = lds_bytes(problem, tiling, row), registers(problem, tiling, row)
    if wanted > REGISTER_SHARE * min(row.registers_per_wave, 256 if row.wave == 32 else 512):
        return None
    fits = occupancy(row, wanted, shared, tiling.waves)
    if fits.groups_per_unit < 1 or fits.waves_per_simd < tiling.waves_per_eu:
        return None
    p, t = problem, tiling
    walked, tiles_n, tiles_k = t.walked(p), -(-p.n // t.block_n), t.split_k
    # Workgroups along the rows; each of them decodes all weights.
    along_m = -(-p.m // (t.block_m * walked))
    tiles_m = along_m * walked
    groups = along_m * tiles_n * tiles_k
    # Memory: weights come once for each group of rows that runs beside each other; activations once for each die, of a
    # part of k to those that work on it; sums of parts of k are written as float32 and read again.
    dies = min(row.xcds, tiles_n)
    rereads = -(-along_m // max(1, t.group))
    if row.xcds > 1 and t.xcds == 1:
        rereads = min(along_m, rereads * row.xcds)
    elif row.xcds > 1:
        dies = max(1, dies // tiles_k)
    activations = p.m * p.k * p.activation_bits / 8
    again = 1.0 if activations <= row.cache_bytes else max(1.0, tiles_n / max(1, row.units // row.xcds))
    output = p.m * p.n * (2 if tiles_k == 1 else 2 + 8 * tiles_k)
    moved = p.weight_bytes * rereads + activations * dies * again + output
    # Work is dealt in whole workgroups: the last round may leave units idle.
    share = groups / (-(-groups // row.units) * row.units)
    resident = min(groups, row.units * fits.groups_per_unit)
    in_flight = t.block_n * t.block_k * p.bits / 8 + walked * t.block_m * t.block_k * p.activation_bits / 8
    in_flight *= max(1, t.stages - 1) * resident
    memory_s = moved / row.bandwidth
    latency_s = max(0.0, moved * row.latency_s / in_flight - memory_s)
    decoded = p.n * p.k * p.decode * along_m
    if t.matrix:
        work = 2.0 * tiles_m * t.block_m * tiles_n * t.block_n * p.k
        matrix_s = work / (row.matrix_rate(p.activation_bits) * share)
        vector_s = decoded / (row.vector_rate * share)
        local_s = _operand_s(p, t, row, tiles_m * tiles_n, fits.groups_per_unit) / share
    else:
        # Two float16 products an instruction.
        matrix_s = 0.0
        # Rows of a workgroup share its activations; fewer rows bring them from the cache more often.
        each = t.block_m * p.activation_bits / 8 + t.block_n * p.bits / 8
        local_s = tiles_m * tiles_n * p.k * each / (row.units * row.cache_rate * row.clock_hz * share)
        vector_s = (decoded + p.m * p.n * p.k / 2) / (row.vector_rate * share)
    parts = (matrix_s, vector_s, local_s)
    compute_s = max(parts) if fits.waves_per_simd >= OVERLAP_WAVES else sum(parts)
    second_launch = row.launch_s if tiles_k > 1 else 0.0
    lesser = sum(parts) + memory_s + latency_s - max(memory_s + latency_s, max(parts))
    time_s = max(memory_s + latency_s, compute_s) + UNHIDDEN * lesser + row.launch_s + second_launch
    times = {"memory": memory_s, "latency": latency_s, "matrix": matrix_s}
    times |= {"vector": vector_s, "local": local_s}
    bound = max(times, key=lambda name: times[name])
    if row.launch_s + second_launch > times[bound]:
        bound = "launch"
    return Prediction(
        t, time_s, memory_s, matrix_s, vector_s, local_s, latency_s, bound, groups, fits.waves_per_simd, moved
    )


def _operand_s(p: Problem, t: Tiling, row: Architecture, tiles: int, groups_per_unit: int) -> float:
    """Seconds that all units take to bring the operands of `tiles` tiles over all of k to the matrix cores."""
    width, walked = p.activation_bits / 8, t.walked(p)
    # Weights go from registers to the matrix cores; waves side by side along n read the same rows of activations.
    along_n = max(1, min(t.waves, t.block_n // 16))
    reads = width * t.block_m * along_n
    writes = width * t.block_m
    from_cache = width * t.block_m + t.block_n * p.bits / 8 / walked
    clocks = max((reads + writes) / row.lds_rate, from_cache / row.cache_rate)
    # Workgroups on the same unit hide each other's waits.
    clocks += ITERATION_CLOCKS / t.block_k / groups_per_unit / walked
    return tiles * p.k * clocks / (row.units * row.clock_hz)


def candidates(problem: Problem, row: Architecture) -> Iterator[Tiling]:
    """Every tiling that is worth a prediction: powers of two that do not leave most of a tile empty."""
    p, amd = problem, row.backend == "hip"
    stages = (1, 2) if amd else (2, 3, 4)
    splits = [s for s in (1, 2, 4, 8, 16) if s == 1 or p.k // s >= 512]
    depths = [p.depth] if p.depth else [b for b in (32, 64, 128, 256, 512, 1024) if b <= max(32, p.k)]
    if p.m <= VECTOR_ROWS:
        yield Tiling("output", False, p.m, 1, 256, 1, 1, 1)  # always possible: for matrices of a few numbers
        for block_n, block_k, split, waves, stage in product(
            (1, 2, 4, 8, 16, 32, 64), depths, splits, (1, 2, 4, 8), (1, 2)
        ):
            # A lane loads 16 bytes at least, and what it holds stays in registers.
            loaded = block_n * block_k * p.bits / 8 / (waves * row.wave)
            if 16 <= loaded <= 64 and block_n <= p.n:
                yield Tiling("output", False, p.m, block_n, block_k, split, waves, stage)
    if p.m < MATRIX_ROWS:
        return
    # AMD: more rows are walked over, which took less local memory and fewer registers than one tile of them.
    rows = [b for b in (16, 32, 64, 128, 256)[: 4 if amd else 5] if b < 2 * p.m] or [16]
    columns = [b for b in (16, 32, 64, 128, 256) if b <= max(16, p.n)]
    kpack = 2 if row.target in ("gfx90a", "gfx942") else 1
    for block_m, block_n, block_k, waves, stage in product(rows, columns, depths, (2, 4, 8), stages):
        if (block_k > 256 and not p.depth) or block_m * block_n < 16 * 16 * waves // 2:
            continue
        # Less than 16 bytes of weights a lane would not come in wide loads; narrow matrices have no choice.
        if block_n * block_k * p.bits / 8 < 16 * waves * row.wave and 4 * block_n < p.n:
            continue
        nonkdims = [0]
        if row.wave == 64:
            nonkdims = [16, 32] if min(block_m, block_n) >= 32 else [16]
        tiles_m = -(-p.m // block_m)
        # RDNA's waves have 256 registers, and spilled when they walked.
        walks = tiles_m > 1 and p.rows <= min(MOST_WALKED, MOST_TILES * block_m) and block_k <= MOST_DEPTH
        walks = walks and not (amd and row.wave == 32)
        for nonkdim in nonkdims:
            common = {"waves": waves, "stages": stage, "nonkdim": nonkdim, "kpack": kpack}
            shape = block_m, block_n, block_k
            for split in splits if tiles_m == 1 else [1]:
                # With nothing shared by workgroups their order says nothing.
                dies = row.xcds if tiles_m > 1 or split > 1 else 1
                yield Tiling("output", True, *shape, split, group=min(8, tiles_m), xcds=dies, **common)
            for split in splits if walks else []:
                yield Tiling("weight", True, *shape, split, xcds=row.xcds if split > 1 else 1, **common)


def plan(
    problem: Problem,
    row: Architecture,
    count: int = 8,
    suits: Callable[[Tiling], bool] = lambda tiling: True,
) -> list[Prediction]:
    """The short list: the `count` tilings with the least predicted time, best first; never empty.

    suits: leaves out tilings that the kernel at hand does not do. Raises ValueError when none is left.

    At most two differ in nothing but waves, stages and AMD's options: the model tells tiles apart better than
    those. Where the model is indifferent, larger parts of the machine in use and then smaller tiles come first.
    """
    wanted = filter(suits, candidates(problem, row))
    found = [x for t in wanted if (x := predict(problem, t, row)) is not None]
    if not found:
        raise ValueError(f"no tiling of {problem} fits on {row.target}")
    found.sort(key=lambda x: (x.time_s, -min(x.groups, row.units), -x.waves_per_simd, astuple(x.tiling)))
    chosen: list[Prediction] = []
    alike: dict[tuple[Any, ...], int] = {}
    for x in found:
        t = x.tiling
        shape = (t.dataflow, t.matrix, t.block_m, t.block_n, t.block_k, t.split_k)
        alike[shape] = alike.get(shape, 0) + 1
        if alike[shape] <= 2:
            chosen.append(x)
        if len(chosen) == count:
            break
    return chosen


class TuningCache:
    """The best measured tiling for each (architecture, shape, format): JSON beside an artifact, or in memory."""

    def __init__(self, entries: Mapping[str, tuple[Tiling, float]] | None = None) -> None:
        self.entries: dict[str, tuple[Tiling, float]] = dict(entries or {})

    def get(self, problem: Problem, target: str) -> Tiling | None:
        found = self.entries.get(problem.key(target))
        return found[0] if found else None

    def put(self, problem: Problem, target: str, tiling: Tiling, time_s: float) -> None:
        self.entries[problem.key(target)] = (tiling, time_s)

    def to_json(self) -> str:
        """Canonical JSON: the same entries give the same bytes."""
        rows = {key: {"tiling": t.to_json(), "time_s": s} for key, (t, s) in self.entries.items()}
        return json.dumps({"version": CACHE_VERSION, "entries": rows}, sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TuningCache":
        """The cache of a JSON text. Raises ValueError that says what is wrong with it."""
        data = json.loads(text)
        if not isinstance(data, dict) or set(data) != {"version", "entries"}:
            raise ValueError("not a tuning cache: its keys must be version and entries")
        if data["version"] != CACHE_VERSION:
            raise ValueError(
                f"a tuning cache of version {data['version']!r}; this nstf reads {CACHE_VERSION}"
            )
        if not isinstance(data["entries"], dict):
            raise ValueError("not a tuning cache: its entries must be an object")
        return cls({str(key): _entry(key, value) for key, value in data["entries"].items()})


def _entry(key: str, value: Any) -> tuple[Tiling, float]:
    if not isinstance(value, dict) or set(value) != {"tiling", "time_s"}:
        raise ValueError(f"entry {key[:60]!r}: its keys must be tiling and time_s")
    given, seconds = value["tiling"], value["time_s"]
    known = {f.name: f.type for f in fields(Tiling)}
    if not isinstance(given, dict) or set(given) != set(known):
        raise ValueError(f"entry {key[:60]!r}: a tiling has the keys {', '.join(known)}")
    for name, kind in known.items():
        wanted = kind if kind in (int, bool) else str
        if type(given[name]) is not wanted or (wanted is int and not 0 <= given[name] <= 1 << 16):
            raise ValueError(f"entry {key[:60]!r}: {name} is {given[name]!r}")
    if given["dataflow"] not in ("output", "weight") or type(seconds) is not float or not seconds > 0:
        raise ValueError(f"entry {key[:60]!r}: no such dataflow, or a time that is not positive")
    return Tiling(**given), seconds


def tune(
    problem: Problem,
    row: Architecture,
    measure: Callable[[Tiling], float],
    cache: TuningCache,
    count: int = 8,
    suits: Callable[[Tiling], bool] = lambda tiling: True,
) -> Tiling:
    """The tiling to run: the remembered one, or the best of the short list by `measure` (seconds), remembered.

    A tiling whose measurement fails (out of registers or local memory on this card, or in the compiler) is passed over;
    when all do, RuntimeError is raised from the last error.
    """
    if (known := cache.get(problem, row.target)) is not None:
        return known
    best: tuple[float, Tiling] | None = None
    failed: Exception | None = None
    for prediction in plan(problem, row, count, suits):
        try:
            seconds = measure(prediction.tiling)
        except launch_errors() as error:
            failed = error
            continue
        if best is None or seconds < best[0]:
            best = (seconds, prediction.tiling)
    if best is None:
        raise RuntimeError(f"none of {count} tilings ran") from failed
    cache.put(problem, row.target, best[1], best[0])
    return best[1]
