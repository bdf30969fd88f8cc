"""Speed of the CPU engine on an artifact: what `nstf bench` prints."""

import math
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nstf.errors import UsageError
from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import compile_matrix
from nstf.runtime.artifact import Artifact
from nstf.runtime.engine import Engine, greedy, may_repack
from nstf.runtime.engine_attention import int8_bytes
from nstf.runtime.kv_formats import cache_bytes, dense_group_bytes

# More than a second-level cache and less than a small machine's memory.
PROBE_BYTES = 256 << 20


@dataclass(frozen=True)
class Speed:
    """Medians over the repetitions. Rates in tokens per second, bandwidth in bytes per second.

    bytes_per_token: matrices, norms, and the keys and values in the middle of the decoded tokens. compute_seconds: what the
    products of one token take where nothing waits for memory (see `compute_seconds`).
    """

    threads: int
    isa: str  # the instruction set kernels were chosen for
    prompt_tokens: int
    new_tokens: int
    load_seconds: float
    prefill_rate: float
    decode_rate: float
    bytes_per_token: int
    bandwidth: float
    compute_seconds: float
    kernels: dict[str, int]

    @property
    def share_of_bandwidth(self) -> float:
        """The part of the measured read bandwidth that decoding reached."""
        return self.bytes_per_token * self.decode_rate / self.bandwidth

    @property
    def share_of_compute(self) -> float:
        """The part of the kernels' own speed that decoding reached: the limit of a model that the caches hold."""
        return self.compute_seconds * self.decode_rate

    def to_json(self) -> dict[str, Any]:
        shares = {"share_of_bandwidth": self.share_of_bandwidth, "share_of_compute": self.share_of_compute}
        return {**asdict(self), **shares}


# Tokens of a prompt, where none are asked for.
PROMPT = 512


def fitting_prompt(prompt: int | None, new: int, context: int) -> int:
    """The tokens of a prompt before `new` ones; None: PROMPT, or as many as the context leaves. Raises UsageError."""
    chosen = max(1, min(PROMPT, context - new)) if prompt is None else prompt
    if chosen + new > context:
        raise UsageError(f"{chosen} + {new} tokens do not fit the model's context of {context}")
    return chosen


def measure(
    artifact: Artifact,
    prompt: int | None,
    new: int,
    repetitions: int = 3,
    exact: bool = False,
    threads: int | None = None,
    kv_cache: str = "float16",
    attention: str = "full",
) -> Speed:
    """Runs a prompt of `prompt` tokens (None: `fitting_prompt`) and decodes `new` more, some times.

    Raises UnsupportedError for a model the engine does not run, UsageError for more tokens than its context holds.
    """
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        start = time.perf_counter()
        engine = Engine(artifact, exact, kv_cache=kv_cache, attention=attention)
        loaded = time.perf_counter() - start
        prompt = fitting_prompt(prompt, new, engine.context)
        generator = torch.Generator("cpu").manual_seed(0)
        ids = torch.randint(0, engine.vocab, (prompt,), generator=generator, dtype=torch.int64, device="cpu")
        engine.forward(ids[:1])
        prefill, decode = [], []
        for _ in range(repetitions):
            engine.reset()
            start = time.perf_counter()
            logits = engine.forward(ids)
            middle = time.perf_counter()
            engine.go_on(greedy(logits), new)
            prefill.append(prompt / (middle - start))
            decode.append(new / (time.perf_counter() - middle))
        active = torch.get_num_threads()
        bandwidth = ext.read_bandwidth(PROBE_BYTES, active)
        compute = compute_seconds(artifact, engine, active)
    finally:
        torch.set_num_threads(before)
    return Speed(
        active, ext.isa(), prompt, new, loaded, statistics.median(prefill), statistics.median(decode),
        bytes_per_token(artifact, engine, prompt + new // 2), bandwidth, compute,
        dict(Counter(engine.kernels.values())),
    )  # fmt: skip


def compute_seconds(artifact: Artifact, engine: Engine, threads: int) -> float:
    """Seconds that the matrix products of one token would take at the speed each kernel has on its smallest matrix of the
    model, multiplied again and again so that the caches hold it."""
    products = {name: math.prod(artifact.record(name).shape) for name in engine.kernels}
    if any(name.endswith("lm_head.weight") for name in products):
        products = {name: n for name, n in products.items() if not name.endswith("embed_tokens.weight")}
    smallest: dict[str, str] = {}
    for name in sorted(products, key=lambda name: products[name]):
        smallest.setdefault(engine.kernels[name], name)
    per_product = {
        kernel: _seconds(artifact, name, kernel, engine.exact, threads) / products[name]
        for kernel, name in smallest.items()
    }
    return sum(per_product[engine.kernels[name]] * n for name, n in products.items())


def _seconds(artifact: Artifact, name: str, kernel: str, exact: bool, threads: int) -> float:
    """The fastest product of a matrix and one row of activations by the engine's kernel for it."""
    # As the engine has it: repacked, or copied into large pages, or as it is stored.
    copied = "panels int8" in kernel or may_repack(artifact, exact)
    matrix = compile_matrix(artifact.views(name), exact, panels=int(copied))
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, matrix.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    y, best = torch.empty(1, matrix.shape[0], dtype=torch.float32, device="cpu"), math.inf
    end = time.perf_counter() + 0.05
    while best == math.inf or time.perf_counter() < end:
        start = time.perf_counter()
        matrix.multiply_at(x.data_ptr(), 1, y.data_ptr(), threads)
        best = min(best, time.perf_counter() - start)
    return best


def bytes_per_token(artifact: Artifact, engine: Engine, position: int) -> int:
    """Bytes that decoding one token reads: every tensor but a table that is not the head, and the cache up to `position`,
    of a plan all that it holds."""
    shape = engine.config.shape
    stored = {artifact.stored_name(name) for name in artifact.names()}
    tables = {artifact.stored_name(n) for n in artifact.names() if n.endswith("embed_tokens.weight")}
    heads = {artifact.stored_name(n) for n in artifact.names() if n.endswith("lm_head.weight")} or tables
    weights = sum(artifact.encoded(name).size_bytes for name in stored - (tables - heads))
    if engine.plan is not None:
        return int(weights + cache_bytes(engine.plan, position))
    each = int8_bytes if engine.kv_cache == "int8" else dense_group_bytes
    seen = [min(position, w) if w else position for w in engine.config.windows]
    return int(weights + shape["kv_heads"] * sum(each(shape["head_size"], n) for n in seen))
