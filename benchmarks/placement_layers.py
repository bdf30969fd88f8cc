"""The layers whose products benchmarks/placement.py times, on one process or divided, and how a call is timed."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nstf.kernels.formats import EncodedTensor
from nstf.kernels.formats.shards import Span, shard
from nstf.kernels.linear import linear
from nstf.runtime.messages import mailbox
from nstf.runtime.ranks import Ranks
from nstf_convert.place.costs import Matrix, tree_of
from nstf_convert.place.worker import captured as captured_calls
from nstf_convert.speed.measure import Pool

AXES = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}
GROUPS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
# Seconds of this process in all-reduces since the last call began, on a CPU.
SUMMING = [0.0]


def shapes_of(hidden: int, wide: int) -> dict[str, tuple[int, int]]:
    """[out, in] of a layer's matrices; keys and values have a quarter of the heads."""
    return {
        "q_proj": (hidden, hidden), "k_proj": (hidden // 4, hidden), "v_proj": (hidden // 4, hidden),
        "o_proj": (hidden, hidden), "gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide),
    }  # fmt: skip


def matrices(hidden: int, wide: int, encoding: str) -> list[Matrix]:
    return [
        Matrix(
            f"layers.0.{n}.weight",
            tree_of(encoding, f"{n}.weight", s),
            s,
            "product",
            AXES[n],
            GROUPS.get(n, ""),
        )
        for n, s in shapes_of(hidden, wide).items()
    ]


def timed_sum(ranks: Ranks) -> Callable[[Tensor], Tensor]:
    """The sum over ranks, its time added to SUMMING: that of the link and that of waiting for the others."""

    def call(y: Tensor) -> Tensor:
        start = time.perf_counter()
        y = ranks.sum(y)
        SUMMING[0] += time.perf_counter() - start
        return y

    return call


class Layer:
    """A layer's products: on one process, or the part of a rank."""

    def __init__(
        self, found: list[Matrix], pool: Pool, rank: int, ranks: int, place: torch.device, summed: Ranks
    ) -> None:
        self.parts: dict[str, EncodedTensor] = {}
        for matrix in found:
            whole = pool.filled(matrix.tree, matrix.shape)
            # Small weights, so that activations stay finite through the layers.
            for name in ("scale_super", "scale"):
                if name in whole.arrays:
                    whole.arrays[name].mul_(1e-4)
                    break
            size = matrix.shape[matrix.axis or 0] // ranks
            part = (
                shard(whole, Span(matrix.axis or 0, rank * size, (rank + 1) * size)) if ranks > 1 else whole
            )
            # Bytes of its own: a pool is smaller than a large model, and what two matrices share is read once.
            arrays = {k: a.to(place, copy=True) for k, a in part.arrays.items()}
            self.parts[matrix.name.split(".")[2]] = EncodedTensor(part.tree, part.shape, arrays)
        whole = summed.sum if place.type == "cuda" else timed_sum(summed)
        self.sum: Callable[[Tensor], Tensor] = whole if ranks > 1 else lambda y: y

    def __call__(self, x: Tensor) -> Tensor:
        p = self.parts
        q, _, _ = (linear(x, p[n], None) for n in ("q_proj", "k_proj", "v_proj"))
        y = self.sum(linear(q, p["o_proj"], None))
        h = F.silu(linear(y, p["gate_proj"], None)) * linear(y, p["up_proj"], None)
        return self.sum(linear(h, p["down_proj"], None))


class Engine:
    """The same on a CPU through compiled matrices, as the C++ engine runs them: no dispatch by type and device, and all
    addresses known, so that Python takes little between products. panels: threads that repack them, as when a file is
    opened; 0: as they are stored, which ranks read."""

    def __init__(self, layer: Layer, rows: int, panels: int) -> None:
        from nstf.kernels.cpu.engine_matrix import compile_matrix

        self.made = {n: compile_matrix(e, panels=panels) for n, e in layer.parts.items()}
        self.outs = {n: torch.zeros(rows, e.shape[0]) for n, e in layer.parts.items()}
        self.sum, self.rows = layer.sum, rows
        self._read: Tensor | None = None  # what the products below read
        self._products: list[list[Callable[[], None]]] = []
        self._sums: tuple[Tensor, ...] = ()

    def _times(self, name: str, x: Tensor) -> Callable[[], None]:
        return partial(self.made[name].multiply_at, x.data_ptr(), self.rows, self.outs[name].data_ptr(), 1)

    def __call__(self, x: Tensor) -> Tensor:
        if x is not self._read:
            o, down = self.outs["o_proj"], self.outs["down_proj"]
            attention = [self._times(n, x) for n in ("q_proj", "k_proj", "v_proj")]
            attention.append(self._times("o_proj", self.outs["q_proj"]))
            forward = [self._times(n, o) for n in ("gate_proj", "up_proj")]
            forward.append(self._times("down_proj", self.outs["gate_proj"]))
            self._read, self._products, self._sums = x, [attention, forward], (o, down)
        for products, result in zip(self._products, self._sums, strict=True):
            for product in products:
                product()
            self.sum(result)
        return result


def captured(call: Callable[[], object], place: torch.device) -> Callable[[], object]:
    """On a GPU the call as a graph with its collectives inside; on a CPU as it is."""
    if place.type != "cuda":
        return call
    return captured_calls(call, 1)


def timed(call: Callable[[], object], place: torch.device, begins: bool, ranks: Ranks) -> float:
    """Seconds from the start to the last process's end, by the clock that all on a host share. All begin at once.

    begins: whether this process has work at once; the last of those that have starts the clock, since processes leave a
    barrier up to 60 us apart. Of each process's own seconds the longest would leave out what others did before it began: of
    a pipeline, half.
    """
    if place.type == "cuda":
        dist.barrier()
        torch.cuda.synchronize()
    else:
        # Not by gloo's barrier: it puts processes to sleep, and a small model is slower just after.
        ranks.sum(torch.zeros(1))
    start = time.perf_counter()
    call()
    if place.type == "cuda":
        torch.cuda.synchronize()
    held = torch.tensor([time.perf_counter(), start if begins else 0.0], dtype=torch.float64, device=place)
    if place.type == "cuda":
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
    else:
        held = mailbox(ranks, 0).exchange(held).amax(0)
    end, began = held.tolist()
    return float(end - began)


def own_seconds(call: Callable[[], object]) -> float:
    """Seconds of a call of this process, on a GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def alone_seconds(
    matrix: Matrix, ranks: int, rows: int, place: torch.device, dtype: torch.dtype, model_bytes: int
) -> dict[int, float]:
    """On a GPU: a product of the whole matrix and of a part, in a captured graph through copies as large as the model
    together, or larger than any cache."""
    found = {}
    pool = Pool(matrix.size_bytes)
    for parts in sorted({1, ranks}):
        size = matrix.shape[matrix.axis or 0] // parts
        whole = pool.filled(matrix.tree, matrix.shape)
        part = shard(whole, Span(matrix.axis or 0, 0, size)) if parts > 1 else whole
        copies = [
            EncodedTensor(part.tree, part.shape, {k: a.to(place, copy=True) for k, a in part.arrays.items()})
            for _ in range(max(2, min(model_bytes // parts, 200 << 20) // max(1, part.size_bytes) + 1))
        ]
        x = torch.randn(rows, part.shape[1], device=place).to(dtype)
        replay = captured(lambda x=x, copies=copies: [linear(x, c, None) for c in copies], place)
        found[parts] = min(own_seconds(replay) for _ in range(5)) / len(copies)
    return found
