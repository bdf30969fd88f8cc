"""How long a conversion will take and what memory it will use, before it starts.

The work of each stage follows from the model's shapes and the options, in a few units: multiply-adds of float32 products,
elements of the operations beside them (activations, softmax: what small models spend most on), multiply-adds of float64
factorisations, trellis codes searched, weights rounded with feedback, proposals of a matrix, and operations that only cost
their launch. What a unit takes is measured on this machine for a second or two (`rates.py`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nstf.kernels.formats import shuffle
from nstf.kernels.formats import trellis as form
from nstf.kernels.torch.viterbi import MAX_QUARTER_BITS, MIN_QUARTER_BITS
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.calibrate.one_input import OneInput
from nstf_convert.pipeline.heal import sizes as healing
from nstf_convert.pipeline.improve import together
from nstf_convert.pipeline.machine import BASE_BYTES, GPU_BASE_BYTES, Machine
from nstf_convert.pipeline.products import EXACT_BITS
from nstf_convert.pipeline.propose.methods import method_families
from nstf_convert.pipeline.propose.units import Unit, working_bytes
from nstf_convert.pipeline.rates import Rates, measured_rates
from nstf_convert.report.build import layer_of

log = logging.getLogger("nstf")

# Quarter bits at which the search is timed where no size is asked for.
RATE = 12
# Windows that choose, and as many that report.
MEASURED_WINDOWS = 8
# Elements that operations beside the products go over, for each layer and token: per width of the stream, of the
# feed-forward part, and per entry of the attention matrix; per logit that is compared; per input whose moments are taken.
BESIDE = {"stream": 24, "ffn": 8, "attention": 4, "logit": 8, "moments": 8}
# A head's width where only the shapes are known.
HEAD_DIM = 64
# Files that take all last steps where every family is asked for: the mix, and the best single format of so many families.
FAMILIES = 4
# Elsewhere the single format is mostly given up before its pass or after its first part (improve/rival.py), where some
# layers are measured on half of the windows.
FIRST_PART = 1 / 6
# The backward pass, with the forward pass before it and the layers that are computed again, in forward passes.
BACKWARD = 4
# Single formats that are compared, and the mix, on this share of the layers, three at most, and on half of the windows.
COMPARED, COMPARED_SHARE = 4, 0.25
# Factorisations of every input's Hessian that the proposals take, in Cholesky decompositions: for the bounds of
# decompositions spectra are worked out as well (135 M parameters, two cores: 52 s).
SPECTRA = 12
# A move of the search encodes this share of the weights anew; a size tried for a bound on the divergence this one.
MOVE_SHARE, SIZE_SHARE = 0.15, 0.5
# Sizes that are tried for a bound on the divergence, beside the first.
SIZES_TRIED = 5
# A step of healing: forward, backward, the original's forward and what goes beside them, in forwards of a window.
HEAL_STEP = 5
# Launches that a block of 16 columns costs in the encoding on a CPU.
LAUNCHES = 250
# On a GPU each block of 16 columns of the matrices that read one input waits for the one before: the search of a few tiles,
# so many times, with what goes beside it (135 M to 8 B parameters on an H200).
WAITS = 3
# Roles whose input another one reads first: q, k and v share it, gate and up too.
BESIDE_ANOTHER = ("k", "v", "up")
# Where a plan counts time it mostly takes integers. On a GPU these cost products of so many times out x in^2: errors fed to
# later columns in three sweeps, half a matrix each, scales refitted twice with one and a half; and so many launches for
# every 128 columns of a matrix, and for a matrix (135 M and 8 B on an H200).
ROUNDED, ROUNDED_COLUMNS, ROUNDED_LAUNCHES, MATRIX_LAUNCHES = 4.5, 128, 60, 2000
# How much faster layers are on a GPU whose products may round (8 B on an H200).
GPU_ROUNDS = 2.0
# On a GPU, of an H200 with 16 cores: seconds of a weight that is read, decoded and copied for a measurement; of a byte of
# the file; of a byte of weights that a pass fetches from the host; of a matrix in the plans that bound time.
DECODED, WRITTEN, FETCHED, PLANNED = 0.7e-9, 1.8e-9, 0.4e-9, 0.02
# What a helper on the same GPU adds to the speed of the candidates: with three they took 10.2 s in place of 14.3.
BESIDE_SPEED = 0.15
# What a conversion leaves on the heap between its stages.
SLACK_BYTES = 128 << 20


@dataclass(frozen=True)
class Text:
    """windows of so many tokens to calibrate on; done: the calibration is there already; gradients: windows that the
    backward pass reads (None: all); reports: whether there are windows that report beside those that choose; measured:
    windows that choose, and as many that report; one: what an input costs where the model is scored by its outputs for
    given inputs, and not as a language model: then windows are inputs and tokens 1."""

    windows: int
    tokens: int
    done: bool = False
    gradients: int | None = None
    reports: bool = True
    measured: int = MEASURED_WINDOWS
    one: OneInput | None = None


@dataclass(frozen=True)
class Prediction:
    """seconds: by stage; host_bytes, gpu_bytes: peaks. begun: seconds that had passed when there was one."""

    seconds: Mapping[str, float]
    host_bytes: int
    gpu_bytes: int
    begun: float = 0.0

    @property
    def total_seconds(self) -> float:
        return self.begun + sum(self.seconds.values())


@dataclass(frozen=True)
class _Work:
    """What follows from the shapes. groups: (inputs, weights) of what reads one input, in order; segments: of 256 rows and
    16 columns; linear, head, tables: weights, of the largest table and of all; inputs, squares, cubes: sums of in, in^2 and
    in^3 over the inputs that have a Hessian; solved: sum of out in^2; blocks: of 16 columns, over all matrices; working:
    what encoding the largest takes in memory."""

    layers: int
    groups: tuple[tuple[int, int], ...]
    segments: int
    linear: int
    head: int
    tables: int
    vocabulary: int
    hidden: int
    ffn: int
    inputs: int
    squares: int
    cubes: int
    solved: int
    blocks: int
    matrices: int
    working: int
    widest: int


def predict(
    units: Sequence[Unit],
    options: ConvertOptions,
    machine: Machine,
    tensor_bytes: int,
    text: Text,
    drops_hessians: bool = False,
    beside: int = 0,
) -> Prediction:
    """The prediction for a model with these tensors. tensor_bytes: of the checkpoint; drops_hessians: they are
    used as they come and not kept. beside: helpers on the first GPU."""
    size = options.budget.size_bytes(tensor_bytes, sum(u.elements for u in units))
    work = _work(units)
    # Only where groups do not wait for each other is the search of shuffle codes counted for itself.
    side_by_side = drops_hessians and not options.front_to_back
    shuffles = side_by_side and "shuffle" in method_families(options.formats, options.bounds_time)
    rates = measured_rates(
        machine, _quarter_bits(size, units), work.cubes // max(1, work.squares), not options.level.thorough,
        shuffles,
    )  # fmt: skip
    cores = 1 if machine.on_gpu else machine.workers(work.working)
    tokens, scored = text.windows * text.tokens, text.measured * text.tokens
    one = text.one
    forward = rounded = one.seconds if one is not None else _forward(work, rates.product, rates, text.tokens)
    if one is None:
        alone = rates.product / (GPU_ROUNDS if machine.on_gpu else 1.0)
        rounded = _forward(work, rates.layer or alone, rates, text.tokens)
    # What may round, as in the encoding of few bits (improve.front_to_back).
    passing = rounded if _bits(size, units) < EXACT_BITS else forward
    logits = (work.head * rates.product) + BESIDE["logit"] * work.vocabulary * rates.element
    logits = logits if one is None else 0.0  # outputs are compared, which are few
    hessians = (work.squares if one is None else one.squares) * (rates.moment or rates.product)
    columns = work.inputs if one is None else one.columns
    moments = 3 * hessians + BESIDE["moments"] * columns * rates.element
    places = 1 if one is None else one.places

    stacks = any(u.role == "expert_stack" for u in units)
    if machine.on_gpu and options.bounds_time and options.level.thorough and not stacks:
        encode = _encode_integers(work, rates)
    else:
        encode = _encode(work, rates, _searched(size, units), cores, machine)
    in_pass = options.front_to_back or drops_hessians
    models = 2 if options.front_to_back else 1
    waiting = _tokens_in_pass(work, machine, tokens * places, models)
    room, last = 0, encode
    if options.front_to_back:
        last = encode + waiting / places * (2 * passing + moments) + work.solved * rates.factor
    elif drops_hessians:
        # Groups wait for each other only where the codes gain from it.
        room = together.room_bytes(machine, 8 * waiting * work.widest) if rates.few_segments else 0
        last = _encode_together(work, rates, encode, room) + waiting / places * (passing + moments / 3)
    measured, fetched, written = scored * (forward + 2 * logits), 0.0, 0.0
    if machine.on_gpu:
        weights = work.linear + work.tables
        measured += weights * DECODED
        written = WRITTEN * _bits(size, units) / 8 * weights
        fetched = FETCHED * max(0, tensor_bytes - machine.resident_bytes)
    compared = min(1.0, max(COMPARED_SHARE, 1 / max(1, work.layers)), 3 / max(1, work.layers))

    # Further GPUs take batches of the backward pass, Hessians that are not kept, proposals, and the single format.
    devices = len(machine.devices)
    shared = devices if drops_hessians else 1
    gives_up = in_pass and options.search_limits is None and not options.level.every_family
    rivals = FIRST_PART if gives_up else FAMILIES if options.level.every_family else 1
    passes = 1 + max(0, rivals - (devices - 1))
    read = text.windows if text.gradients is None else text.gradients
    backward = read * text.tokens * (BACKWARD * rounded + 2 * logits) / devices
    compares = options.level.thorough and not drops_hessians
    splits = 2 if text.reports else 1
    spectra = SPECTRA if options.level.thorough and not machine.on_gpu else 2
    # A pass waits for weights that come more slowly than they are worked with: the backward one fetches them twice.
    calibration = backward + tokens * (rounded + hessians / shared) + splits * scored * forward
    calibration = max(calibration, 3 * fetched)
    candidates = (work.matrices * rates.propose + spectra * work.cubes * rates.factor) / cores / devices
    planned = (
        work.matrices * PLANNED if machine.on_gpu and options.level.thorough and options.bounds_time else 0.0
    )

    log.debug("%s, %s", rates, work)
    name = "encode front to back" if options.front_to_back else "encode"
    seconds = {
        "calibration": calibration,
        "candidates": candidates / (1 + BESIDE_SPEED * beside),
        "plan": planned,
        "compare formats": COMPARED * (compared * encode + measured / 2) if compares else 0.0,
        name: passes * last,
        # A final mix that was encoded in a pass is measured on both sets of windows at once.
        "measure": measured * (splits + 1 if gives_up else passes * (splits if in_pass else 1)),
        "report": 0.0 if in_pass or splits == 1 else passes * measured,
        "write": written,
    }
    if text.done:
        seconds["calibration"] = 0.0
    if options.budget.kind == "max_kl":
        tried = encode + measured + SIZES_TRIED * (SIZE_SHARE * encode + measured)
        seconds["encode"] = seconds.get("encode", 0.0) + tried
    if options.search_limits is not None:
        minutes, steps = options.search_limits
        start = encode + measured
        moves = (steps or 0) * (MOVE_SHARE * encode + measured) if minutes is None else 60 * minutes
        seconds["encode"] = seconds.get("encode", 0.0) + start
        seconds["search"] = moves
    if options.heals:
        step = HEAL_STEP * _healed_tokens(machine, text) * (forward + logits)
        looks = healing.EVALUATIONS[machine.device.type] * scored * (forward + 2 * logits)
        seconds["heal"] = (
            options.heal_steps * step + looks if options.heal_steps else 60 * options.heal_minutes
        )
    log.debug("predicted seconds: %s", {n: round(s, 1) for n, s in seconds.items()})
    host, gpu = _memory(work, machine, 8 * models * waiting * work.widest, tensor_bytes, room, beside)
    healed = _healing_memory(work, machine, text) if options.heals else 0
    if machine.on_gpu:
        return Prediction(seconds, host, max(gpu, healed))
    return Prediction(seconds, max(host, BASE_BYTES + SLACK_BYTES + healed), gpu)


def _healed_tokens(machine: Machine, text: Text) -> int:
    """Of a step of healing: inputs, where the model is no language model."""
    return text.tokens * healing.WINDOWS[machine.device.type] if text.one is None else healing.INPUTS


def _healing_memory(work: _Work, machine: Machine, text: Text) -> int:
    """Bytes of a step of healing: codes in two bytes each, a layer's weights, activations, and logits or tuned codes."""
    weights, size = work.linear + work.head, 2 if machine.on_gpu else 4
    fixed = 2 * weights + 2 * size * max(work.head, work.hidden * work.ffn)
    if text.one is not None:
        # A step is taken in parts whose activations fit, of one input at least.
        room = min(healing.ACTIVATION_BYTES, machine.activation_bytes)
        activations = min(_healed_tokens(machine, text) * text.one.kept_bytes, max(room, text.one.kept_bytes))
        return fixed + activations + (healing.CODE_BYTES * weights if weights <= healing.LARGEST_CODES else 0)
    layer = healing.layer_bytes(_healed_tokens(machine, text), work.hidden, work.ffn, size)
    # Above the bound layers are recomputed, one at a time.
    activations = min(work.layers * layer, max(healing.ACTIVATION_BYTES, layer))
    return fixed + activations + 4 * healing.ALIVE_LOGITS * healing.LOGIT_ELEMENTS[machine.device.type]


def _forward(work: _Work, product: float, rates: Rates, window: int) -> float:
    """Seconds of one token in a forward pass, without the head. product: of a multiply-add."""
    heads = max(1, work.hidden // HEAD_DIM)
    products = work.linear + work.layers * 2 * window * work.hidden
    beside = BESIDE["stream"] * work.hidden + BESIDE["ffn"] * work.ffn + BESIDE["attention"] * heads * window
    return products * product + work.layers * beside * rates.element


def _encode(work: _Work, rates: Rates, searched: float, cores: int, machine: Machine) -> float:
    """Encoding all weights once, given their Hessians: a share of them is searched, the others are rounded."""
    codes = work.linear + work.head
    each = searched * rates.search + (1 - searched) * rates.round
    if machine.on_gpu:
        launches = WAITS * work.inputs / form.SIDE * rates.few_tiles
    else:
        launches = work.blocks * LAUNCHES * rates.launch
    factors = 2 * work.cubes * rates.factor
    # The search spreads over the cores by itself, and its rate is that of all of them.
    return codes * each + (launches + factors) / cores


def _encode_integers(work: _Work, rates: Rates) -> float:
    """The same on a GPU where matrices are mostly integers and tables are searched."""
    launches = ROUNDED_LAUNCHES * work.blocks * 16 / ROUNDED_COLUMNS + MATRIX_LAUNCHES * work.matrices
    products = ROUNDED * work.solved * rates.product
    return products + launches * rates.launch + 2 * work.cubes * rates.factor + work.tables * rates.search


def _encode_together(work: _Work, rates: Rates, encode: float, room: int) -> float:
    """`_encode` where no group waits for another: a GPU walks the columns of several side by side, if the codes are such.
    Tables are searched apart. What the longest walks of all turns take and what all segments take is added up: the last
    columns of a turn keep few multiprocessors, and other codes are searched in between (8 B on an H200: 70 s a pass)."""
    if not rates.few_segments:
        return encode
    columns = sum(max(inputs for inputs, _ in turn) for turn in together.turns(work.groups, room))
    walked = columns / form.SIDE * rates.few_segments + work.segments * rates.segment
    return walked + 2 * work.cubes * rates.factor + work.tables * rates.search


def _tokens_in_pass(work: _Work, machine: Machine, tokens: int, models: int) -> int:
    """Of the tokens of all windows those that may wait before the widest input, in so many models."""
    return min(tokens, machine.activation_bytes // (8 * models * work.widest))


def _searched(size: int | None, units: Sequence[Unit]) -> float:
    """The share of the weights that will be trellis codes: all up to 5.5 bits a weight, few above 6.25."""
    return min(1.0, max(0.05, (6.25 - _bits(size, units)) / 0.75))


def _bits(size: int | None, units: Sequence[Unit]) -> float:
    """A weight of a file of that size."""
    return 4.0 if size is None else 8 * size / max(1, sum(u.elements for u in units))


def _quarter_bits(size: int | None, units: Sequence[Unit]) -> int:
    """Of most codes in a file of that size."""
    if size is None:
        return RATE
    found = round(4 * 8 * size / max(1, sum(u.elements for u in units)))
    return min(max(found, MIN_QUARTER_BITS), MAX_QUARTER_BITS)


def _memory(
    work: _Work, machine: Machine, activations: int, tensor_bytes: int, room: int, beside: int
) -> tuple[int, int]:
    """(host, GPU) bytes at the peak. activations: before the widest input; room: for groups that are encoded together;
    beside: helpers on the first GPU."""
    if machine.on_gpu:
        resident = min(machine.resident_bytes, tensor_bytes)
        host = GPU_BASE_BYTES + 3 * 2 * max(work.head, work.hidden * work.ffn)
        encoded = max(work.working, min(room, together.taken_bytes(work.groups)))
        processes = len(machine.devices) + beside
        return processes * host, activations + encoded + beside * work.working + 2 * resident
    workers = machine.workers(work.working)
    return BASE_BYTES + SLACK_BYTES + activations + workers * work.working, 0


def _work(units: Sequence[Unit]) -> _Work:
    linear = [u for u in units if u.kept is None and not {"embedding", "head"} & set(u.uses)]
    heads = [u for u in units if {"embedding", "head"} & set(u.uses)]
    shapes = [(u.elements // _cols(u), _cols(u), u.role) for u in linear]
    own = [c for _, c, role in shapes if role not in BESIDE_ANOTHER]
    # What reads the input of the matrix before it goes with that.
    groups: list[tuple[int, int]] = []
    for rows, cols, role in shapes:
        if role in BESIDE_ANOTHER and groups and groups[-1][0] == cols:
            groups[-1] = cols, groups[-1][1] + rows * cols
        else:
            groups.append((cols, rows * cols))
    table = max(heads, key=lambda u: u.elements, default=None)
    return _Work(
        layers=len({layer_of(u.name) for u in linear} - {None}),
        groups=tuple(groups),
        segments=sum(-(-r // shuffle.SEGMENT) * -(-c // form.SIDE) for r, c, _ in shapes),
        linear=sum(r * c for r, c, _ in shapes),
        head=0 if table is None else table.elements,
        tables=sum(u.elements for u in heads),
        vocabulary=0 if table is None else table.elements // _cols(table),
        hidden=min((c for _, c, _ in shapes), default=1),
        ffn=max((c for _, c, _ in shapes), default=1),
        inputs=sum(own),
        squares=sum(c * c for c in own),
        cubes=sum(c**3 for c in own),
        solved=sum(r * c * c for r, c, _ in shapes),
        blocks=sum(-(-c // 16) for _, c, _ in shapes),
        matrices=len(shapes) + len(heads),
        working=max((working_bytes(u) for u in [*linear, *heads]), default=1),
        widest=max((c for _, c, _ in shapes), default=1),
    )


def _cols(unit: Unit) -> int:
    rows = 1
    for size in unit.inner_shape[: unit.lead]:
        rows *= size
    return unit.elements // rows
