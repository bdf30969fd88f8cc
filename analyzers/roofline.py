"""Where the time of a model goes and why: FLOPs, bytes, arithmetic intensity, and time per operator.

The roofline model (Williams, Waterman, Patterson 2009): an operator that does F floating-point operations on
B bytes cannot finish before max(F / peak_flops, B / peak_bandwidth); it is compute bound when its intensity
F / B is above the device's ridge peak_flops / peak_bandwidth, and memory bound below. MFU (model FLOPs
utilisation) is the FLOPs of the model over what the device could have done in the measured time.

FLOPs count a multiply-add as two. Bytes are the least traffic possible: weights, inputs and outputs once.
Works on any `nn.Module`: linear and convolution layers (also transformers' Conv1D, and the runtime's encoded
layers), embeddings, stacks of experts, and the two matrix products of attention, taken from the calls of
`scaled_dot_product_attention` that are really made.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

MEMORY_BOUND = "memory"
COMPUTE_BOUND = "compute"
# A pass that takes so many seconds is run once more with a clock and once with hooks: what disturbs it is small beside it,
# and a million sequences would take hours.
SLOW_S = 10.0


@dataclass(frozen=True)
class Device:
    """Peaks of a device. flops: per second; bandwidth: bytes per second; source: "measured" or "given"."""

    name: str
    flops: float
    bandwidth: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which an operator is compute bound."""
        return self.flops / self.bandwidth


@dataclass(frozen=True)
class Operator:
    """One operator in one phase, summed over its calls. time_s: measured; limit_s: the roofline's."""

    name: str
    kind: str
    calls: int
    parameters: int
    flops: float
    bytes: float
    time_s: float
    bound: str
    limit_s: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Phase:
    """A forward pass of `tokens` new tokens for each of `batch` sequences; time_s: of the whole pass."""

    name: str
    tokens: int
    batch: int
    time_s: float
    flops: float
    bytes: float
    mfu: float
    bandwidth_used: float
    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class Profile:
    """parameters: elements, each shared one once; weight_bytes: as they are in memory."""

    device: Device
    parameters: int
    weight_bytes: int
    phases: tuple[Phase, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the intensity of every operator."""
        data = asdict(self)
        data["device"]["ridge"] = self.device.ridge
        for phase, plain in zip(self.phases, data["phases"], strict=True):
            plain["operators"] = [asdict(o) | {"intensity": o.intensity} for o in phase.operators]
        return data


def measure_device(
    device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, seconds: float = 0.3
) -> Device:
    """The peaks of a device, measured: a matrix product and a copy, each repeated for about `seconds`."""
    place = torch.device(device)
    size = 4096 if place.type == "cuda" else 768
    a = torch.randn(size, size, device=place).to(dtype)
    out = torch.empty_like(a)
    flops = 2.0 * size**3 / _best_time(lambda: torch.mm(a, a, out=out), place, seconds)
    # Larger than any cache of a CPU and than the L2 of a GPU, so that memory is what is measured.
    source = torch.empty((1 << 30 if place.type == "cuda" else 1 << 27) // 4, device=place).zero_()
    target = torch.zeros_like(source)
    moved = 2.0 * source.numel() * source.element_size()
    bandwidth = moved / _best_time(lambda: target.copy_(source), place, seconds)
    name = (
        torch.cuda.get_device_name(place)
        if place.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return Device(name, flops, bandwidth, "measured")


def profile(
    model: nn.Module,
    prefill: Callable[[], Any],
    decode: Callable[[], Any] | None,
    device: Device,
    *,
    tokens: int,
    batch: int,
    repeats: int = 3,
) -> Profile:
    """Profiles a model. prefill, decode: closures that run one forward pass; the fastest of `repeats` counts; slow ones
    are timed twice and watched once.

    decode: a pass of one new token per sequence, or None for models that do not generate.
    """
    phases = [_phase("prefill", model, prefill, device, tokens, batch, repeats)]
    if decode is not None:
        phases.append(_phase("decode", model, decode, device, 1, batch, repeats))
    return Profile(device, _parameters(model), weight_bytes(model), tuple(phases))


def operator_cost(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> tuple[str, float, float] | None:
    """(kind, FLOPs, bytes) of one call of a module, or None for a module that is not an operator of its own.

    inputs: positional arguments of the call; output: what it returned.
    """
    x = next((i for i in inputs if isinstance(i, Tensor)), None)
    if x is None or not isinstance(output, Tensor):
        return None
    traffic, weights = float(_size(x) + _size(output)), weight_bytes(module)
    if isinstance(module, nn.Embedding):
        # Only the rows that are looked up are read; no arithmetic.
        return "embedding", 0.0, traffic + weights * x.numel() / module.num_embeddings
    shape = weight_shape(module)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and shape:
        return "conv", 2.0 * output.numel() * math.prod(shape[1:]), traffic + weights
    stacks = _stacks(module)
    if stacks:
        routes = next((i.numel() for i in inputs if isinstance(i, Tensor) and not i.is_floating_point()), 0)
        share = min(1.0, routes / stacks[0][0])
        return "experts", 2.0 * routes * sum(math.prod(s[1:]) for s in stacks), traffic + share * weights
    if shape is not None and len(shape) == 2:
        return "linear", 2.0 * x.numel() / x.shape[-1] * math.prod(shape), traffic + weights
    return None


def least_seconds(model: nn.Module, device: Device, tokens: int) -> float:
    """What a pass of so many tokens takes at least: two FLOPs for a weight and token."""
    return 2.0 * _parameters(model) * tokens / device.flops


def weight_shape(module: nn.Module) -> tuple[int, ...] | None:
    """The shape of a module's weight, dense or encoded; nothing is decoded for it."""
    stored = module._modules.get("weight_encoded") or module._parameters.get("weight")
    return None if stored is None else tuple(stored.shape)  # type: ignore[arg-type]


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the arrays a module holds: for an encoded layer, those of its codes and scales."""
    own = {id(t): t for t in [*module.parameters(), *module.buffers()]}
    return sum(_size(t) for t in own.values())


def attention_cost(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[float, float]:
    """(FLOPs, bytes) of softmax(q k^T) v: query [..., H, t, d], key and value [..., Hkv, s, d].

    A causal mask over t = s halves the products.
    """
    t, s = query.shape[-2], key.shape[-2]
    pairs = t * (s - t) + t * (t + 1) / 2 if causal and s >= t else t * s
    rows = query.numel() / (t * query.shape[-1])
    flops = 2.0 * rows * pairs * (query.shape[-1] + value.shape[-1])
    out_bytes = rows * t * value.shape[-1] * query.element_size()
    return flops, float(_size(query) + _size(key) + _size(value) + out_bytes)


class _Record:
    """Sums over the calls of one operator."""

    def __init__(self, kind: str, parameters: int) -> None:
        self.kind, self.parameters = kind, parameters
        self.calls, self.flops, self.bytes, self.time_s = 0, 0.0, 0.0, 0.0

    def add(self, flops: float, bytes_: float, time_s: float) -> None:
        self.calls += 1
        self.flops += flops
        self.bytes += bytes_
        self.time_s += time_s


def _phase(
    name: str, model: nn.Module, run: Callable[[], Any], device: Device, tokens: int, batch: int, repeats: int
) -> Phase:
    place = next((p.device for p in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    with torch.inference_mode():
        turns = range(1 if _time(run, place) > SLOW_S else max(1, repeats))
        # The whole pass is timed without hooks, the operators in a pass of their own.
        times = [_time(run, place) for _ in turns]
        best: dict[str, _Record] = {}
        for _ in turns:
            with _recording(model, place) as records:
                run()
            for key, record in records.items():
                if key not in best or record.time_s < best[key].time_s:
                    best[key] = record
    operators = tuple(_operator(key, record, device) for key, record in best.items())
    time_s = min(times)
    flops, bytes_ = sum(o.flops for o in operators), sum(o.bytes for o in operators)
    return Phase(
        name, tokens, batch, time_s, flops, bytes_, flops / time_s / device.flops,
        bytes_ / time_s / device.bandwidth, operators,
    )  # fmt: skip


def _operator(name: str, record: _Record, device: Device) -> Operator:
    compute, memory = record.flops / device.flops, record.bytes / device.bandwidth
    bound = COMPUTE_BOUND if compute > memory else MEMORY_BOUND
    return Operator(
        name, record.kind, record.calls, record.parameters, record.flops, record.bytes, record.time_s, bound,
        max(compute, memory),
    )  # fmt: skip


@contextmanager
def _recording(model: nn.Module, place: torch.device) -> Iterator[dict[str, _Record]]:
    """Times every operator of a pass with hooks, and attention by wrapping torch's function."""
    records: dict[str, _Record] = {}
    started: dict[int, float] = {}
    current: list[str] = []
    handles = []
    functional: Any = torch.nn.functional
    plain_attention = functional.scaled_dot_product_attention

    def watch(name: str, module: nn.Module) -> None:
        def before(_: nn.Module, __: Any) -> None:
            started[id(module)] = _clock(place)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            elapsed = _clock(place) - started.pop(id(module))
            cost = operator_cost(module, args, output)
            if cost is not None:
                record = records.setdefault(name, _Record(cost[0], _parameters(module)))
                record.add(cost[1], cost[2], elapsed)

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: current.append(name)

    def leave(*_: Any) -> None:
        current.pop()

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        start = _clock(place)
        output: Tensor = plain_attention(query, key, value, *args, **options)
        elapsed = _clock(place) - start
        mask = args[0] if args else options.get("attn_mask")
        causal = bool(options.get("is_causal")) or (mask is not None and query.shape[-2] > 1)
        flops, bytes_ = attention_cost(query, key, value, causal)
        name = f"{current[-1] if current else 'model'}: attention products"
        records.setdefault(name, _Record("attention", 0)).add(flops, bytes_, elapsed)
        return output

    try:
        for name, module in model.named_modules():
            if _is_operator(module):
                watch(name, module)
            elif "attention" in type(module).__name__.lower() or name.endswith(("attn", "attention")):
                handles.append(module.register_forward_pre_hook(enter(name)))
                handles.append(module.register_forward_hook(leave, always_call=True))
        functional.scaled_dot_product_attention = attention
        yield records
    finally:
        functional.scaled_dot_product_attention = plain_attention
        for handle in handles:
            handle.remove()


def _is_operator(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding | nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return True
    return type(module).__name__.endswith("Conv1D") or bool(_stacks(module))


def _stacks(module: nn.Module) -> list[tuple[int, ...]]:
    """The shapes [experts, out, in] of the weight stacks a module holds itself."""
    held: dict[str, Any] = {**module._parameters, **module._modules}
    shapes = [
        tuple(v.shape)
        for n, v in held.items()
        if "proj" in n and isinstance(getattr(v, "shape", None), tuple)
    ]
    return [s for s in shapes if len(s) == 3]


def _parameters(module: nn.Module) -> int:
    """Elements of all weights, each shared one once; an encoded weight counts by its dense shape."""
    dense = sum(p.numel() for p in module.parameters())
    return dense + sum(math.prod(m.shape) for m in module.modules() if _is_encoded(m))  # type: ignore[arg-type, misc]


def _is_encoded(module: nn.Module) -> bool:
    """True for the holder of an encoded tensor's arrays in the runtime's modules."""
    return hasattr(module, "tree") and isinstance(getattr(module, "shape", None), tuple)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _clock(place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter()


def _time(run: Callable[[], Any], place: torch.device) -> float:
    start = _clock(place)
    run()
    return _clock(place) - start


def _best_time(run: Callable[[], Any], place: torch.device, seconds: float) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, _time(run, place))
    return max(best, 1e-9)
