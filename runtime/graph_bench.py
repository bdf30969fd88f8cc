"""Speed of captured decoding on a GPU: what `nstf bench --device cuda` prints."""

import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError, UsageError
from nstf.runtime.engine_bench import fitting_prompt
from nstf.runtime.graph_decoder import LARGEST_BATCH, Decoder
from nstf.runtime.graph_generate import decoder_of
from nstf.runtime.loading import load

# Far more than a second-level cache.
PROBE_BYTES = 2 << 30
PROBES = 10


@dataclass(frozen=True)
class GpuSpeed:
    """Medians over the repetitions. Rates in tokens per second of all sequences together, bandwidth in bytes per second.

    bytes_per_token: matrices, and the keys and values in the middle of the decoded tokens, for a step of all sequences.
    peak_bytes: of torch's allocator, model and cache included.
    """

    device: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    load_seconds: float
    prefill_rate: float
    decode_rate: float
    bytes_per_token: int
    bandwidth: float
    peak_bytes: int

    @property
    def share_of_bandwidth(self) -> float:
        """The part of the measured read bandwidth that decoding reached."""
        return self.bytes_per_token * self.decode_rate / self.batch / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share_of_bandwidth": self.share_of_bandwidth}


def measure(
    path: str | os.PathLike[str],
    device: str,
    prompt: int | None,
    new: int,
    repetitions: int = 3,
    batch: int = 1,
    kernels: str | os.PathLike[str] | None = None,
    attention: str = "full",
) -> GpuSpeed:
    """Runs prompts of `prompt` tokens and decodes `new` more, some times.

    attention: as for `load`. Raises UnsupportedError for a model or GPU that captured decoding does not run, UsageError for
    more tokens than the model's context or more sequences than it takes.
    """
    if not 1 <= batch <= LARGEST_BATCH:
        raise UsageError(f"{batch} sequences: captured decoding takes 1 to {LARGEST_BATCH}")
    start = time.perf_counter()
    model: Any = load(path, device, kernels=kernels, attention=attention)
    if not hasattr(model, "generate"):
        raise UnsupportedError(f"{type(model).__name__} does not generate text")
    with torch.no_grad():
        decoder = decoder_of(model)
        prompt = fitting_prompt(prompt, new, decoder.context)
        loaded = time.perf_counter() - start
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, int(decoder.config.shape["vocab"]), (batch, prompt), generator=generator)
        ids = ids.to(model.device)
        list(decoder.generate(ids, new))  # compiles, captures and grows
        prefill, decode = zip(*(_rates(decoder, ids, new) for _ in range(repetitions)), strict=True)
    on_gpu = model.device.type == "cuda"
    peak = int(torch.cuda.max_memory_allocated(model.device)) if on_gpu else 0
    return GpuSpeed(
        torch.cuda.get_device_name(model.device) if on_gpu else str(model.device),
        batch,
        prompt,
        new,
        loaded,
        statistics.median(prefill),
        statistics.median(decode),
        decoder.matrix_bytes + batch * decoder.cache_bytes(prompt + new // 2),
        read_bandwidth(model.device),
        peak,
    )


def _rates(decoder: Decoder, ids: Tensor, new: int) -> tuple[float, float]:
    """(prompt tokens, new tokens) a second. The first new token belongs to the prompt."""
    batch, prompt = ids.shape
    start = middle = time.perf_counter()
    for i, _ in enumerate(decoder.generate(ids, new)):
        middle = time.perf_counter() if i == 0 else middle
    return batch * prompt / (middle - start), batch * (new - 1) / (time.perf_counter() - middle)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that a sum over a large array reads."""
    size = PROBE_BYTES if device.type == "cuda" else PROBE_BYTES >> 6
    array = torch.ones(size // 4, dtype=torch.int32, device=device)
    times = []
    for _ in range(PROBES):
        _wait(device)
        start = time.perf_counter()
        torch.sum(array, dtype=torch.int32)
        _wait(device)
        times.append(time.perf_counter() - start)
    return size / statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
