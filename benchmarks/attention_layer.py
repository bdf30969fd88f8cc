"""Decoding and prefill of attention alone in the CPU engine, by format of the cache and instruction set.

    python benchmarks/attention_layer.py [--context 8192] [--layers 8] [--rounds 3] [--isa avx2] [--caches 16/16 8cr/8tr ...]

Processor time of one thread, in microseconds a layer and token: the best of the rounds, all caches in turn in each. Heads of
SmolLM2-135M (9 query and 3 KV heads of 64), random numbers. Several layers, so that their caches together exceed the
processor's; with --layers 1 and a short context they fit. `8cr/4t` is keys in 8 bits by channel, rotated, values in 4 by
token; `/r64,512` keeps the first 64 and the last 512 positions.
"""

import argparse
import time

import torch

from nstf.kernels.cpu import ext
from nstf.runtime.attention_plan import GroupPlan, HeadPlan, LayerPlan
from nstf.runtime.engine_attention import layer_plan
from nstf.runtime.kv_formats import PLAIN, KVFormat

HEADS, KV_HEADS, SIZE = 9, 3, 64
CHUNK = 128


def format_of(text: str) -> KVFormat:
    if text == "16":
        return PLAIN
    return KVFormat(int(text[0]), "channel" if text[1] == "c" else "token", text.endswith("r"))


def plan_of(text: str) -> LayerPlan:
    """The plan of a layer whose groups are all stored as `text` says."""
    keys, values, *ring = text.split("/")
    kept, head = (0, 0, 0), HeadPlan("full", {}, 0, 0.0, 1.0)
    if ring:
        sink, window = (int(number) for number in ring[0][1:].split(","))
        kept = (sink, window, sink + window)
        head = HeadPlan("streaming", {"sink": sink, "window": window}, sink + window, 0.0, 1.0)
    group = GroupPlan(*kept, format_of(keys), format_of(values))
    return LayerPlan((head,) * HEADS, (group,) * KV_HEADS)


def measure(text: str, context: int, layers: int, new: int) -> tuple[float, float]:
    """Processor seconds of the prompt and of a decoded token, each of one layer."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(context, n, SIZE, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
    plan = layer_plan(plan_of(text))
    held = [ext.LayerAttention(HEADS, KV_HEADS, SIZE, 0, SIZE**-0.5, plan) for _ in range(layers)]
    out = torch.empty(CHUNK, HEADS, SIZE)

    def run(layer: ext.LayerAttention, start: int, at: int, count: int, alone: bool) -> None:
        rows = slice(start, start + count)
        layer.run(q[rows].numpy(), k[rows].numpy(), v[rows].numpy(), at, out.data_ptr(), alone, 1)

    begin = time.process_time()
    for layer in held:
        for start in range(0, context, CHUNK):
            run(layer, start, start, CHUNK, False)
    middle = time.process_time()
    for i in range(new):
        for layer in held:
            run(layer, i, context + i, 1, True)
    return (middle - begin) / layers, (time.process_time() - middle) / (new * layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=8192, help=f"a multiple of {CHUNK}")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=20)
    parser.add_argument("--isa", help="of those that the processor has; the best by default")
    parser.add_argument("--caches", nargs="+", default=["16/16", "8cr/8tr", "4cr/4tr", "8tr/8tr/r64,512"])
    arguments = parser.parse_args()
    if arguments.context < CHUNK or arguments.context % CHUNK:
        parser.error(f"--context takes a multiple of {CHUNK}")
    torch.set_num_threads(1)
    if arguments.isa:
        ext.use_isa(arguments.isa)
    found: dict[str, list[tuple[float, float]]] = {text: [] for text in arguments.caches}
    for _ in range(arguments.rounds):
        for text, rounds in found.items():
            rounds.append(measure(text, arguments.context, arguments.layers, arguments.new))
    print(f"{arguments.context} positions, {arguments.layers} layers, {ext.isa()}")
    print("| keys/values | prefill ms | decode us | x first |\n|---|---|---|---|")
    best = {text: (min(p for p, _ in rounds), min(d for _, d in rounds)) for text, rounds in found.items()}
    base = next(iter(best.values()))[1]
    for text, (prefill, decode) in best.items():
        print(f"| {text} | {prefill * 1e3:.0f} | {decode * 1e6:.0f} | {base / decode:.2f} |", flush=True)


if __name__ == "__main__":
    main()
