"""What a unit of a conversion's work takes on this machine, timed for a second or two (nstf_convert.pipeline.prediction)."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.analyzers.signatures import Signature
from nstf.kernels.formats import shuffle
from nstf.kernels.formats import trellis as form
from nstf.kernels.shuffle_encode import BLOCK, round_columns
from nstf.kernels.trellis_encode import encode_tiles, search_threads
from nstf.quantizers.stats import Stats
from nstf_convert.pipeline.machine import Machine
from nstf_convert.pipeline.products import fast_products, layers_may_round
from nstf_convert.pipeline.propose import candidates as cand
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.methods import method_families
from nstf_convert.pipeline.propose.recipe import Recipe

# Sizes of the trial products and of the trial factorisation, tiles of the trial search, the matrix of the trial proposals.
SIZE = {"cpu": 1024, "cuda": 4096}
# The trial factorisation has the width of most of the model's, within these: a GPU is twenty times as fast on wide ones.
FACTOR_SIZES = {"cpu": (512, 512), "cuda": (512, 8192)}
TILES = {"cpu": 16, "cuda": 2048}
TRIAL = (128, 256)
# A search on a GPU that is too short to fill it.
FEW_TILES = 36
# Segments of 256 rows of the trial search of shuffle codes: too few to fill a GPU, and enough.
FEW_SEGMENTS, MANY_SEGMENTS = 4, 256
# Launches that the proposals for a matrix cost on a GPU, all of them and those that may win; on a CPU these are timed.
PROPOSE_LAUNCHES, FEW_LAUNCHES = 10000, 4000


@dataclass(frozen=True)
class Rates:
    """Seconds of a multiply-add in a float32 product (layer: in layers that round, moment: in second moments, 0 where it is
    the same), of an element in an operation beside, of a multiply-add in a float64 factorisation, of searching one weight's
    code, of rounding one with feedback, of the proposals for a matrix, of launching an operation, of a search of a few
    tiles on a GPU, and of 16 columns of few segments, and of one of many, in the search of shuffle codes there. The
    proposals and launches are of one core where several work on a matrix each."""

    product: float
    element: float
    factor: float
    search: float
    round: float
    propose: float
    launch: float
    few_tiles: float = 0.0
    layer: float = 0.0
    moment: float = 0.0
    few_segments: float = 0.0
    segment: float = 0.0


def measured_rates(
    machine: Machine, quarter_bits: int, width: int, few_forms: bool, shuffles: bool = False
) -> Rates:
    """Times the units on the machine's first device; quarter_bits: of the search, width: of most factorisations;
    few_forms: only forms that may win are proposed; shuffles: there may be shuffle codes."""
    device = machine.device
    size, (least, most) = SIZE[device.type], FACTOR_SIZES[device.type]
    square = min(max(width, least), most)
    a = torch.ones(size, size, device=device)
    spd = torch.eye(square, dtype=torch.float64, device=device)
    tiles = TILES[device.type]
    targets = torch.linspace(-2, 2, tiles * form.TILE, device=device).view(tiles, form.TILE)
    book = form.codebook(quarter_bits).to(device)
    small = torch.ones(1, device=device)

    def launches() -> None:
        for _ in range(200):
            small.add_(1)

    # On one core of a CPU: on all of them every operation would wait for whatever else is running on one.
    cores, out = (1 if machine.on_gpu else machine.threads), torch.empty_like(a)
    torch_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(torch_threads if machine.on_gpu else 1)
        launch = _seconds(launches, device) / 200
        product = _seconds(lambda: torch.mm(a, a, out=out), device) / size**3 / cores
        element = _seconds(lambda: torch.softmax(a, 1, out=out), device) / size**2 / cores
        factor = _seconds(lambda: torch.linalg.cholesky(spd), device) / (square**3 / 3) / cores
        with fast_products():
            moment = _seconds(lambda: torch.mm(a, a, out=out), device) / size**3 / cores
        layer = _layer_rate(a, device) / size**3 / cores
        with search_threads(1):
            search = _seconds(lambda: encode_tiles(targets, quarter_bits, book), device, rounds=2)
    finally:
        torch.set_num_threads(torch_threads)
    few = 0.0
    if machine.on_gpu:
        few = _seconds(lambda: encode_tiles(targets[:FEW_TILES], quarter_bits, book), device)
    few_segments = many_segments = 0.0
    if machine.on_gpu and shuffles:
        few_segments, many_segments = (
            _walked(n, quarter_bits, device) for n in (FEW_SEGMENTS, MANY_SEGMENTS)
        )
    round_, propose = _trial(machine, few_forms)
    return Rates(
        product=product,
        element=element,
        factor=factor,
        search=search / targets.numel() / cores,
        round=round_,
        propose=(FEW_LAUNCHES if few_forms else PROPOSE_LAUNCHES) * launch if machine.on_gpu else propose,
        launch=launch,
        few_tiles=few,
        layer=layer,
        moment=0.0 if machine.on_gpu else moment,
        few_segments=few_segments,
        segment=many_segments / MANY_SEGMENTS,
    )


def _walked(segments: int, quarter_bits: int, device: torch.device) -> float:
    """Seconds of walking 16 columns of so many segments of rows in the search of shuffle codes."""
    q = min(max(quarter_bits, shuffle.RATES[0]), shuffle.RATES[-1])
    rows = torch.linspace(-2, 2, segments * shuffle.SEGMENT * BLOCK, device=device).view(-1, BLOCK)
    ones = torch.ones(len(rows), device=device)
    return _seconds(
        lambda: round_columns(rows, rows, ones * shuffle.STEPS[q], ones, None, q), device, rounds=2
    )


def _layer_rate(a: Tensor, device: torch.device) -> float:
    """Seconds of a product of two matrices like this one in layers that round; 0 where they do not."""
    if device.type != "cpu" or not layers_may_round():
        return 0.0
    half = a.bfloat16()
    out = torch.empty_like(half)
    return _seconds(lambda: torch.mm(half, half, out=out), device)


def _trial(machine: Machine, few_forms: bool) -> tuple[float, float]:
    """(seconds of rounding a weight to a grid with feedback on all cores, seconds of the proposals for a matrix on one)."""
    rows, cols = TRIAL
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(TRIAL, generator=generator).to(machine.device)
    inputs = torch.randn(2 * cols, cols, generator=generator).to(machine.device)
    known = Stats(inputs.T @ inputs / len(inputs), torch.ones(rows, device=machine.device))
    grid = Recipe("int_grid", {"bits": 8, "group": 64, "symmetric": True, "scale_bits": 8})
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads if machine.on_gpu else 1)
        rounding = _seconds(lambda: recipes.encode(grid, weight, known, 1), machine.device, rounds=1)
        if machine.on_gpu:
            return rounding / weight.numel(), 0.0
        start = time.perf_counter()
        trial = Signature(weight, known, dtype="bfloat16")
        cand.estimates(trial, cand.plain_recipes(trial, method_families(None), few_forms))
        return rounding / weight.numel() / machine.threads, time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)


def _seconds(work: Callable[[], object], device: torch.device, rounds: int = 4) -> float:
    """The least of a few runs after one that warms up."""
    best = float("inf")
    for i in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i > 0:
            best = min(best, time.perf_counter() - start)
    return best
