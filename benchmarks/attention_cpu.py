"""Prefill and decode of the CPU engine by context length: dense float16, the int8 cache, 4-bit pages and attention plans.

    python benchmarks/attention_cpu.py model.nstf [--contexts 1024 8192] [--rounds 3] [--threads 2] [--new 32]
        [--plans attention.json ...] [--kld TEXT] [--cpu-time] [--json out.json]

Every round runs all of them in turn in one process; medians, and ratios to dense attention of the same rounds. The plan is
the file's own where it has one, else a synthetic one, which says nothing of quality: half of the KV groups keep 64 first
and 1024 last positions, heads of the others compute the blocks that hold 0.9 of the predicted mass, keys in 4 bits by
channel, values in 4 by token. --plans: plans that benchmarks/attention.py wrote, beside it. The text is random tokens of the
vocabulary unless --text names a file; block-sparse heads of it say little then.
--kld: what the engine itself loses by each of them, nats per token over the second half of the longest context of this text,
with float32 activations on both sides.
--cpu-time: processor seconds instead of the clock's, for a busy machine; take it with --threads 1.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nstf.kernels.cpu import ext
from nstf.runtime.artifact import open_artifact
from nstf.runtime.attention_plan import AttentionPlan, GroupPlan, HeadPlan, LayerPlan, PlanKLD, parse_plan
from nstf.runtime.engine import Engine
from nstf.runtime.kv_formats import KVFormat

# Tokens of which all logits exist at a time.
STEP = 128
KEYS, VALUES = KVFormat(4, "channel", False), KVFormat(4, "token", False)


def plan_of(shape: dict[str, Any], kind: str) -> AttentionPlan:
    """A plan for a model of this shape. kind: "4 bit", "rings", "blocks" or both, "mixed"."""
    per_group = shape["heads"] // shape["kv_heads"]
    ring = (64, 1024, 1088)
    layers = []
    for i in range(shape["layers"]):
        heads: list[HeadPlan] = []
        groups = []
        for g in range(shape["kv_heads"]):
            kept = kind == "rings" or (kind == "mixed" and (i + g) % 2 == 0)
            groups.append(GroupPlan(*(ring if kept else (0, 0, 0)), KEYS, VALUES))
            if kept:
                head = HeadPlan("streaming", {"sink": ring[0], "window": ring[1]}, ring[2], 0.0, 1.0)
            elif kind in ("blocks", "mixed"):
                head = HeadPlan("block_sparse", {"threshold": 0.9, "stride": 16}, 1024, 0.0, 1.0)
            else:
                head = HeadPlan("full", {}, 0, 0.0, 1.0)
            heads += [head] * per_group
        layers.append(LayerPlan(tuple(heads), tuple(groups)))
    return AttentionPlan(
        2, shape["context"], None, shape["head_size"], PlanKLD(None, None, None), tuple(layers)
    )


def measure(
    engine: Engine, ids: list[int], new: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float, int]:
    """Seconds of the prompt, seconds per decoded token, and bytes of the cache after them."""
    engine.reset()
    start = clock()
    engine.forward(ids)
    middle = clock()
    for i in range(new):
        engine.forward([ids[i]])
    return middle - start, (clock() - middle) / new, engine.cache_bytes


def arithmetic(shape: dict[str, Any], context: int) -> dict[str, float]:
    """What dense attention reads and computes: bytes per decoded token, FLOPs per decoded token and of the prompt."""
    wide = shape["layers"] * shape["heads"] * shape["head_size"]
    return {
        "decode_bytes": 4.0 * shape["layers"] * shape["kv_heads"] * shape["head_size"] * context,
        "decode_flop": 4.0 * wide * context,
        "prefill_flop": 2.0 * wide * context * context,
    }


def written(paths: list[Path]) -> dict[str, AttentionPlan]:
    """The plans of the files of benchmarks/attention.py, by budget and allowance."""
    found = {}
    for path in paths:
        for entry in json.loads(path.read_text())["plans"]:
            plan = parse_plan(entry["plan"])
            found[f"{path.stem}: {plan.kv_budget or 1:g}, KLD {plan.kld.allowed or plan.kld.choose:.2g}"] = (
                plan
            )
    return found


def tokens(artifact: Path, text: Path) -> list[int]:
    from nstf.runtime import load_tokenizer

    ids: list[int] = load_tokenizer(artifact)(text.read_text())["input_ids"]
    return ids


def divergence(base: Engine, other: Engine, ids: list[int]) -> float:
    """Mean KL(base || other) over the second half of the text, which is read in whole blocks of 128 queries."""
    total = 0.0
    for engine in (base, other):
        engine.reset()
        engine.forward(ids[: len(ids) // 2])
    for start in range(len(ids) // 2, len(ids), STEP):
        step = ids[start : start + STEP]
        expected, found = (
            engine.forward(step, all_logits=True).log_softmax(-1, dtype=torch.float64)
            for engine in (base, other)
        )
        total += float((expected.exp() * (expected - found)).sum())
    return total / (len(ids) - len(ids) // 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", default=["dense", "int8", "4 bit", "rings", "blocks", "mixed"])
    parser.add_argument("--plans", type=Path, nargs="+", default=[])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--kld", type=Path)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    results = []
    with open_artifact(arguments.artifact) as artifact:
        engines: dict[str, Engine] = {}
        for kind in arguments.kinds:
            if kind in ("dense", "int8"):
                engines[kind] = Engine(artifact, kv_cache="int8" if kind == "int8" else "float16")
            else:
                shape = next(iter(engines.values())).config.shape
                engines[kind] = Engine(artifact, attention=plan_of(shape, kind))
            engines[kind].threads = arguments.threads
        if artifact.manifest.attention:
            engines["planned"] = Engine(artifact, threads=arguments.threads, attention="planned")
        for name, plan in written(arguments.plans).items():
            engines[name] = Engine(artifact, threads=arguments.threads, attention=plan)
        first = next(iter(engines.values()))
        longest = max(arguments.contexts)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, first.vocab, (longest,), generator=generator).tolist()
        if arguments.text is not None:
            ids = tokens(arguments.artifact, arguments.text)[:longest]
        for context in arguments.contexts:
            prompt = ids[: context - arguments.new]
            found: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in engines}
            for _ in range(arguments.rounds):
                for kind, engine in engines.items():
                    found[kind].append(measure(engine, prompt, arguments.new, clock))
            base = next(iter(found.values()))
            work = arithmetic(first.config.shape, context)
            print(
                f"context {context}, {arguments.threads} threads, {ext.isa()}; dense attention: "
                f"{work['decode_bytes'] / 1e6:.0f} MB and {work['decode_flop'] / 1e9:.2f} GFLOP a token, "
                f"{work['prefill_flop'] / 1e12:.2f} TFLOP the prompt"
            )
            print(
                "| cache | prefill tok/s | x dense | decode tok/s | x dense | MB |\n|---|---|---|---|---|---|"
            )
            for kind, rounds in found.items():
                prefill, decode = (statistics.median(r[i] for r in rounds) for i in (0, 1))
                ratios = [
                    statistics.median(b[i] / r[i] for b, r in zip(base, rounds, strict=True)) for i in (0, 1)
                ]
                print(
                    f"| {kind} | {len(prompt) / prefill:.1f} | {ratios[0]:.2f} | {1 / decode:.1f} | "
                    f"{ratios[1]:.2f} | {rounds[-1][2] / 1e6:.1f} |",
                    flush=True,
                )
                results.append(
                    {"context": context, "kind": kind, "prefill_s": prefill, "decode_s": decode,
                     "bytes": rounds[-1][2], "threads": arguments.threads, "isa": ext.isa()}
                )  # fmt: skip
        if arguments.kld is not None:
            text = tokens(arguments.artifact, arguments.kld)[:longest]
            del engines
            base_engine = Engine(artifact, exact=True, threads=arguments.threads)
            for name, plan in written(arguments.plans).items():
                loss = divergence(
                    base_engine, Engine(artifact, True, arguments.threads, attention=plan), text
                )
                print(f"{name}: KLD {loss:.5f} of the engine's own, {len(text)} tokens", flush=True)
                results.append({"context": len(text), "kind": name, "kld": loss, "isa": ext.isa()})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
