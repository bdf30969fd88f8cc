"""Tokens a second: what a token takes beside its products with matrices, found by running the model's shape.

The C++ engine is built from random 4-bit matrices of the model's shapes and decodes a few tokens. What it takes beyond
the prices of these matrices is attention, norms and the start of every product. The planner takes that as the same for all
formats. Of a plan that is made, the engine runs the very formats: a sum of products that were each timed alone, and at its
best, is too low where a product takes microseconds, its threads meet other programs, and kernels alternate.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nstf.errors import NstfError
from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import available, compile_matrix, panel_threads
from nstf.kernels.formats import Node, integer
from nstf.kernels.formats.tree import Shape
from nstf_convert.speed.cache import digest
from nstf_convert.speed.measure import Pool, clock_for, pool_bytes, typical, using
from nstf_convert.speed.prices import Prices
from nstf_convert.speed.targets import Target

log = logging.getLogger("nstf")

# Tokens that are in the cache when decoding is timed, and how many are decoded.
PROMPT, DECODED = 64, 16
TOGETHER = 4  # of them in one call, as `Engine.generate` does
ROUNDS = 3
# A model whose products take longer than this has nothing else worth timing.
SLOW_SECONDS = 0.25
# What attention, norms and launches add to the products where nothing was run [a].
OTHER_SHARE = 0.08
# The same on GPUs, from five formats on an H200 (docs/gpu_speed.md, 8B shape, stacks priced as one matrix) [h].
GPU_SHARE = 0.1
_FOUR_BITS = Node("int", integer.Params(bits=4, group=32, symmetric=True, scale_bits=8))


# A matrix of the model as the engine knows it, (layer, "q") and so on or (0, "head"), and how it is stored.
Stored = Mapping[tuple[int, str], tuple[Node, Shape]]


class Token:
    """What one token takes on each target. config: the model's, None when there is none."""

    def __init__(self, config: Mapping[str, Any] | None, threads: int, prices: Prices) -> None:
        self._config, self._threads, self._prices = config, threads, prices
        self._other: dict[str, float | None] = {}

    def rate(self, target: Target, products_seconds: float) -> float | None:
        """Tokens a second with products of so many seconds; None for a model that only transformers runs, whose own work
        is not known, and for one without products."""
        if not products_seconds or self._config is None:
            return None
        if not (target.is_cpu and target.here):
            return 1.0 / (products_seconds * (1 + _share(target)))
        other = self._beside(target)
        return None if other is None else 1.0 / max(products_seconds + other, 0.5 * products_seconds)

    def run(self, target: Target, products_seconds: float, stored: Stored) -> float | None:
        """`rate`, by running random matrices of these formats where the target is here and the engine runs the model."""
        if (
            not (target.is_cpu and target.here)
            or not self._config
            or not 0 < products_seconds <= SLOW_SECONDS
        ):
            return self.rate(target, products_seconds)
        try:
            return 1.0 / self._seconds(target, stored)
        except (NstfError, KeyError, ValueError, RuntimeError, MemoryError) as error:
            log.debug("the engine does not run this plan, whose products are added up: %s", error)
            return self.rate(target, products_seconds)

    def products(self, target: Target, rate: float) -> float:
        """The seconds that products may take at a rate of tokens a second; the inverse of `rate`."""
        if not (target.is_cpu and target.here):
            return 1.0 / rate / (1 + _share(target))
        return 1.0 / rate - (self._beside(target) or 0.0)

    def _beside(self, target: Target) -> float | None:
        """Seconds beside the products; may be negative, since products of one input start together in the engine."""
        if target.isa not in self._other:
            try:
                self._other[target.isa] = self._measured(target)
            except (NstfError, ValueError, RuntimeError, MemoryError) as error:
                log.debug("the engine does not run this model: %s", error)
                self._other[target.isa] = None
        return self._other[target.isa]

    def _measured(self, target: Target) -> float | None:
        from nstf.runtime.engine_config import completed, read_config

        if not available():
            return None
        config = read_config(completed(dict(self._config or {})))
        shape = config.shape
        wanted = _shapes(shape)
        priced = sum(
            self._at(target, s) * n
            for s, n in [*((s, shape["layers"]) for s in wanted.values()), (_head(shape), 1)]
        )
        if priced > SLOW_SECONDS:
            return OTHER_SHARE * float(priced)
        plain = {(i, name): (_FOUR_BITS, of) for i in range(shape["layers"]) for name, of in wanted.items()}
        plain[0, "head"] = (_FOUR_BITS, _head(shape))
        # Kept, since plans for a number of tokens a second go by it.
        of = {"shape": shape, "windows": config.windows, "family": repr(config.family)}
        of |= {"biases": config.biases, "rotations": config.rotation_of}
        key = f"{pool_bytes(self._prices.size_bytes)} token {digest(of)[:16]}"
        return self._prices.whole(target, key, lambda: self._seconds(target, plain)) - float(priced)

    def _seconds(self, target: Target, stored: Stored) -> float:
        """What the engine takes for a token with these matrices."""
        from nstf.runtime.engine_config import completed, read_config

        config = read_config(completed(dict(self._config or {})))
        with using(target.isa):
            size = self._prices.size_bytes
            engine = _engine(config, Pool(size), stored, panel_threads(size, self._threads))
        return seconds_of_token(engine, config.shape, self._threads)

    def _at(self, target: Target, shape: tuple[int, int]) -> float:
        at = self._prices.targets.index(target)
        return self._prices.seconds((_FOUR_BITS, shape, 1))[at]


def _share(target: Target) -> float:
    return OTHER_SHARE if target.is_cpu else GPU_SHARE


def _head(shape: Mapping[str, Any]) -> tuple[int, int]:
    return shape["vocab"], shape["hidden"]


def _shapes(shape: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """[rows, cols] of a layer's matrices."""
    hidden, ffn = shape["hidden"], shape["ffn"]
    queries, keys = shape["heads"] * shape["head_size"], shape["kv_heads"] * shape["head_size"]
    return {
        "q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries),
        "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn),
    }  # fmt: skip


def _engine(config: Any, pool: Pool, stored: Stored, panels: int) -> Any:
    """The engine with random weights, of the shapes that the config states. panels: as `compile_matrix` takes it. Raises
    KeyError for a matrix that is missing."""
    shape = config.shape

    def matrix(layer: int, name: str) -> Any:
        return compile_matrix(pool.filled(*stored[layer, name]), panels=panels)

    def ones(count: int) -> array[float]:
        return array("f", [1.0]) * count

    head = matrix(0, "head")
    engine = ext.Engine(shape, head, head, ones(shape["hidden"]))
    for frequencies in config.rotations:
        engine.add_rotation(frequencies)
    norms = {"attention_norm": shape["hidden"], "ffn_norm": shape["hidden"]}
    if config.family.out_norms:
        norms |= {"attention_out_norm": shape["hidden"], "ffn_out_norm": shape["hidden"]}
    if config.family.qk_norm:
        norms |= {"q_norm": shape["head_size"], "k_norm": shape["head_size"]}
    sizes = _shapes(shape)
    for i in range(shape["layers"]):
        layer = {name: matrix(i, name) for name in sizes}
        layer |= {name: ones(count) for name, count in norms.items()}
        layer |= {f"{key}_bias": ones(sizes[key][0]) for key in config.biases}
        engine.add_layer(layer | {"window": config.windows[i], "rotation": config.rotation_of[i]})
    return engine


def measured_rate(path: Path, target: Target, threads: int) -> float | None:
    """Tokens a second that a written file decodes at on a target that is here; None for a model the engine does not run."""
    from nstf.runtime.artifact import open_artifact
    from nstf.runtime.engine import Engine, greedy

    try:
        with open_artifact(path) as artifact, using(target.isa):
            engine = Engine(artifact, threads=threads)
            times, clock = [], clock_for(threads)
            prompt = min(PROMPT, engine.context // 2)
            decoded = min(DECODED, engine.context - prompt)
            for _ in range(ROUNDS):
                engine.reset()
                logits = engine.forward([0] * prompt)
                token = greedy(logits)
                for i in range(0, decoded, TOGETHER):
                    start = clock()
                    found = engine.go_on(token, min(TOGETHER, decoded - i))
                    times.append((clock() - start) / len(found))
                    token = found[-1]
            return 1.0 / typical(times)
    except (NstfError, OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        log.debug("%s: its speed was not measured: %s", path, error)
        return None


def seconds_of_token(engine: Any, shape: Mapping[str, Any], threads: int) -> float:
    """What the C++ engine takes to decode a token."""
    prompt = min(PROMPT, shape["context"] // 2)
    decoded = min(DECODED, shape["context"] - prompt)
    ids = torch.zeros(prompt, dtype=torch.int64)
    logits = torch.empty(shape["vocab"])
    times, clock = [], clock_for(threads)
    for _ in range(ROUNDS):
        engine.run(ids.data_ptr(), prompt, 0, logits.data_ptr(), False, threads)
        for i in range(decoded):
            start = clock()
            engine.run(ids.data_ptr(), 1, prompt + i, logits.data_ptr(), False, threads)
            times.append(clock() - start)
    return typical(times)
