"""How long a conversion will take and what memory it will use, before it starts.

The work of each stage follows from the model's shapes and the options, in four units: multiply-adds of float32 products,
of float64 factorisations, trellis codes searched, and small operations that only cost their launch. What a unit takes is
measured on this machine for a second or two.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nstf.kernels.formats import trellis as form
from nstf.kernels.trellis_encode import encode_tiles
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.machine import BASE_BYTES, Machine
from nstf_convert.pipeline.propose.units import Unit

# Quarter bits at which the search is timed; other rates take 0.8 to 1.5 times as long.
RATE = 12
# Sizes of the trial products and of the trial factorisation, tiles of the trial search.
SIZE = {"cpu": 1024, "cuda": 4096}
FACTOR_SIZE = {"cpu": 512, "cuda": 2048}
TILES = {"cpu": 16, "cuda": 2048}
# Windows that choose and that report.
MEASURED_WINDOWS = 16
# Operations on activations beside the products, as a factor on the products' time.
BESIDE = 1.35
# Encoding front to back: the mix, and the best single format.
PASSES = 2
# What rounding a weight to a grid with feedback costs, in multiply-adds of a product.
SWEEP = 12000
# Launches that a matrix costs in the proposals, and each block of 16 columns in the encoding (1 B parameters on an H200).
LAUNCHES = {"propose": 20000, "block": 600}


@dataclass(frozen=True)
class Rates:
    """Seconds of a multiply-add in a float32 product, of one in a float64 factorisation, of searching one weight's code,
    and of launching an operation."""

    product: float
    factor: float
    search: float
    launch: float


@dataclass(frozen=True)
class Text:
    """windows of so many tokens to calibrate on; done: the calibration is there already."""

    windows: int
    tokens: int
    done: bool = False


@dataclass(frozen=True)
class Prediction:
    """seconds: by stage; host_bytes, gpu_bytes: peaks."""

    seconds: Mapping[str, float]
    host_bytes: int
    gpu_bytes: int

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class _Work:
    """What follows from the shapes. linear, head: weights; squares: sum of in^2 over the inputs that have a Hessian, cubes
    of in^3; solved: sum of out in^2; blocks: of 16 columns, over all matrices."""

    linear: int
    head: int
    squares: int
    cubes: int
    solved: int
    blocks: int
    matrices: int
    largest: int
    widest: int


def predict(
    units: Sequence[Unit],
    options: ConvertOptions,
    machine: Machine,
    tensor_bytes: int,
    text: Text,
    drops_hessians: bool = False,
) -> Prediction:
    """The prediction for a language model with these tensors. tensor_bytes: of the checkpoint; drops_hessians: they are
    used as they come and not kept."""
    rates = measured_rates(machine)
    work = _work(units)
    tokens = text.windows * text.tokens
    scored = MEASURED_WINDOWS * options.seq_len
    product, factor = rates.product * BESIDE, rates.factor
    forward = work.linear * product
    calibration = tokens * (3 * forward + 2 * work.head * product)  # forward twice and backward
    calibration += tokens * (forward + work.squares * product) + scored * (forward + work.head * product)
    candidates = work.cubes * factor * 2 + work.matrices * LAUNCHES["propose"] * rates.launch
    searched = _searched(options, sum(u.elements for u in units), tensor_bytes)
    encode = work.linear * (searched * rates.search + SWEEP * rates.product)
    encode += work.blocks * LAUNCHES["block"] * rates.launch
    encode += work.cubes * factor * 2
    if options.front_to_back:
        encode += tokens * (2 * forward + 3 * work.squares * product) + work.solved * factor
    measure = PASSES * scored * (forward + 2 * work.head * product)
    name = "encode front to back" if options.front_to_back else "encode"
    seconds = {
        "calibration": calibration,
        "candidates": candidates,
        name: PASSES * encode,
        "measure": measure / 2,
        "report": measure / 2,
    }
    return Prediction(seconds, *_memory(work, machine, tokens, tensor_bytes))


def _searched(options: ConvertOptions, parameters: int, tensor_bytes: int) -> float:
    """The share of the weights that will be trellis codes: all up to 5.5 bits a weight, few above 6.25."""
    size = options.budget.size_bytes(tensor_bytes, parameters)
    bits = 4.0 if size is None else 8 * size / max(1, parameters)
    return min(1.0, max(0.05, (6.25 - bits) / 0.75))


def _memory(work: _Work, machine: Machine, tokens: int, tensor_bytes: int) -> tuple[int, int]:
    """(host, GPU) bytes at the peak."""
    activations = min(machine.activation_bytes, 6 * 4 * tokens * work.widest)
    hessians = 8 * 4 * work.widest**2
    matrix = 6 * 4 * work.largest
    device = activations + hessians + matrix
    if machine.on_gpu:
        resident = min(machine.resident_bytes, tensor_bytes)
        return 3 * BASE_BYTES + 3 * 2 * work.largest, min(machine.gpu_bytes, device + 2 * resident)
    return min(machine.host_bytes, BASE_BYTES + device + min(tensor_bytes // 4, 1 << 30)), 0


def _work(units: Sequence[Unit]) -> _Work:
    linear = [u for u in units if u.kept is None and not {"embedding", "head"} & set(u.uses)]
    heads = [u for u in units if {"embedding", "head"} & set(u.uses)]
    shapes = [(u.elements // _cols(u), _cols(u), u.role) for u in linear]
    own = [
        c for _, c, role in shapes if role not in ("k", "v", "up")
    ]  # q, k and v share an input, gate and up too
    widest = max((c for _, c, _ in shapes), default=1)
    return _Work(
        linear=sum(r * c for r, c, _ in shapes),
        head=max((u.elements for u in heads), default=0),
        squares=sum(c * c for c in own),
        cubes=sum(c**3 for c in own),
        solved=sum(r * c * c for r, c, _ in shapes),
        blocks=sum(-(-c // 16) for c in own),
        matrices=len(shapes),
        largest=max((u.elements for u in units), default=1),
        widest=widest,
    )


def _cols(unit: Unit) -> int:
    rows = 1
    for size in unit.inner_shape[: unit.lead]:
        rows *= size
    return unit.elements // rows


def measured_rates(machine: Machine) -> Rates:
    """Times the four units on the machine's first device."""
    device = machine.device
    size, square = SIZE[device.type], FACTOR_SIZE[device.type]
    a = torch.ones(size, size, device=device)
    spd = torch.eye(square, dtype=torch.float64, device=device)
    tiles = TILES[device.type] * (machine.threads if device.type == "cpu" else 1)
    targets = torch.linspace(-2, 2, tiles * form.TILE, device=device).view(tiles, form.TILE)
    book = form.codebook(RATE).to(device)
    small = torch.ones(1, device=device)

    def launches() -> None:
        for _ in range(200):
            small.add_(1)

    return Rates(
        product=_seconds(lambda: a @ a, device) / size**3,
        factor=_seconds(lambda: torch.linalg.cholesky(spd), device) / (square**3 / 3),
        search=_seconds(lambda: encode_tiles(targets, RATE, book), device, rounds=2) / targets.numel(),
        launch=_seconds(launches, device) / 200 if machine.on_gpu else 8e-6,
    )


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
