"""Speed of the CPU engine on an artifact: what `nstf bench` prints."""

import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nstf.errors import UsageError
from nstf.kernels.cpu import ext
from nstf.runtime.artifact import Artifact
from nstf.runtime.engine import Engine, greedy

# More than a second-level cache and less than a small machine's memory.
PROBE_BYTES = 256 << 20


@dataclass(frozen=True)
class Speed:
    """Medians over the repetitions. Rates in tokens per second, bandwidth in bytes per second.

    bytes_per_token: matrices, norms, and the keys and values in the middle of the decoded tokens.
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
    kernels: dict[str, int]

    @property
    def share_of_bandwidth(self) -> float:
        """The part of the measured read bandwidth that decoding reached."""
        return self.bytes_per_token * self.decode_rate / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share_of_bandwidth": self.share_of_bandwidth}


def measure(
    artifact: Artifact,
    prompt: int,
    new: int,
    repetitions: int = 3,
    exact: bool = False,
    threads: int | None = None,
    kv_cache: str = "float16",
) -> Speed:
    """Runs a prompt of `prompt` tokens and decodes `new` more, some times.

    Raises UnsupportedError for a model the engine does not run, UsageError for more tokens than its context holds.
    """
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        start = time.perf_counter()
        engine = Engine(artifact, exact, kv_cache=kv_cache)
        loaded = time.perf_counter() - start
        if prompt + new > engine.context:
            raise UsageError(f"{prompt} + {new} tokens do not fit the model's context of {engine.context}")
        ids = torch.randint(0, engine.vocab, (prompt,), generator=torch.Generator().manual_seed(0))
        engine.forward(ids[:1])
        prefill, decode = [], []
        for _ in range(repetitions):
            engine.reset()
            start = time.perf_counter()
            logits = engine.forward(ids)
            middle = time.perf_counter()
            for _ in range(new):
                logits = engine.forward([greedy(logits)])
            prefill.append(prompt / (middle - start))
            decode.append(new / (time.perf_counter() - middle))
        active = torch.get_num_threads()
        bandwidth = ext.read_bandwidth(PROBE_BYTES, active)
    finally:
        torch.set_num_threads(before)
    return Speed(
        active, ext.isa(), prompt, new, loaded, statistics.median(prefill), statistics.median(decode),
        bytes_per_token(artifact, engine, prompt + new // 2), bandwidth, dict(Counter(engine.kernels.values())),
    )  # fmt: skip


def bytes_per_token(artifact: Artifact, engine: Engine, position: int) -> int:
    """Bytes that decoding one token reads: every tensor but a table that is not the head, and the cache up to `position`."""
    shape = engine.config.shape
    stored = {artifact.stored_name(name) for name in artifact.names()}
    tables = {artifact.stored_name(n) for n in artifact.names() if n.endswith("embed_tokens.weight")}
    heads = {artifact.stored_name(n) for n in artifact.names() if n.endswith("lm_head.weight")} or tables
    weights = sum(artifact.encoded(name).size_bytes for name in stored - (tables - heads))
    seen = sum(min(position, w) if w else position for w in engine.config.windows)
    # A number a byte and a float32 scale, or two bytes a number.
    head = shape["head_size"] + 4 if engine.kv_cache == "int8" else 2 * shape["head_size"]
    return int(weights + seen * 2 * shape["kv_heads"] * head)
