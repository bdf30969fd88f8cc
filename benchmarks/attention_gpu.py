"""Planned attention on a GPU against torch's: prefill over bands and predicted blocks, decoding over quantised pages.

    python benchmarks/attention_gpu.py [--quick] [--only dense,bands,blocks,decode,tune] [--sequences 1 4] [--json FILE]

Heads of an 8B model: 32 query and 8 KV heads of 128, causal, bfloat16, one sequence (decoding: --sequences). All figures
come from one run, so that they share clock and temperature. A time is the median of single launches between events
(prefill), or of replays of a graph of several steps over caches that together exceed the second-level cache (decode).
torch's side is the fastest of the SDPA backends that run (cuDNN, flash, memory-efficient). `--tune` tries a short list of
tiles, warps and stages first, and uses the best of each kernel.

Random queries attend to random keys alike, so that a prediction would find nothing to leave out: keys are drawn in
clusters, and each query block looks for a few of them. The threshold is then set so that the blocks computed are the asked
density.
"""

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attention_gpu_decode import (
    FORMATS,
    HEADS,
    KV_HEADS,
    SCALE,
    SIZE,
    caches,
    decode_row,
    graph_seconds,
    sdpa_decode,
    seconds,
)
from torch import Tensor

from nstf.kernels.triton import attention_predict
from nstf.kernels.triton.attention_prefill import NARROW, prefill, shares
from nstf.kernels.triton.linear import arch_of
from nstf.runtime.graph_bench import read_bandwidth

STRIDE = 16
PARTS = ("dense", "bands", "blocks", "decode")
TILES: dict[str, tuple[dict[str, int], ...]] = {
    "prefill": (
        {"TILE": 128, "WARPS": 8, "STAGES": 2},
        {"TILE": 64, "WARPS": 8, "STAGES": 3},
        {"TILE": 64, "WARPS": 8, "STAGES": 3, "EDGE": 32},
        {"TILE": 64, "WARPS": 4, "STAGES": 2, "EDGE": 32},
    ),
    "sums": (
        {"M": 128, "N": 128, "WARPS": 8, "STAGES": 3},
        {"M": 128, "N": 128, "WARPS": 4, "STAGES": 3},
        {"M": 128, "N": 256, "WARPS": 8, "STAGES": 2},
        {"M": 64, "N": 128, "WARPS": 4, "STAGES": 3},
    ),
    "decode": tuple(
        {"WARPS": warps, "STAGES": stages, "RESIDENT": resident, "REGS": registers, "STEP": step}
        for warps, stages, resident, registers, step in (
            (1, 2, 12, 168, 64), (1, 2, 8, 0, 64), (1, 3, 8, 0, 64), (1, 2, 12, 168, 32), (1, 2, 16, 128, 64),
            (2, 2, 10, 96, 64), (4, 2, 3, 0, 64), (4, 2, 6, 0, 64), (4, 2, 5, 0, 32),
        )
    ),
}  # fmt: skip


def best_sdpa(q: Tensor, k: Tensor, v: Tensor) -> tuple[float, str]:
    """(seconds, name) of torch's fastest backend, causal. q: [1, heads, n, size], k, v: [1, KV heads, n, size]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found: dict[str, float] = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for grouped in (True, False):
            keys, values = (
                (k, v) if grouped else (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
            )

            def call(
                keys: Tensor = keys, values: Tensor = values, backend: Any = backend, grouped: bool = grouped
            ) -> object:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(
                        q, keys, values, is_causal=True, scale=SCALE, enable_gqa=grouped
                    )

            try:
                found[f"{backend.name} {'grouped' if grouped else 'repeated'}"] = seconds(call)
            except RuntimeError:
                continue  # this backend does not take these heads
    name = min(found, key=lambda n: found[n])
    return found[name], name


def clustered(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [32, count, 128], k, v [8, count, 128], bfloat16: keys of a block lie together, queries look for some blocks."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    k, v, q = normal(KV_HEADS, count, SIZE), normal(KV_HEADS, count, SIZE), normal(HEADS, count, SIZE)
    blocks = count // 128
    centres = normal(KV_HEADS, blocks, SIZE)
    k += centres.repeat_interleave(128, dim=1)
    for _ in range(3):
        wanted = (
            torch.rand(blocks, generator=generator, device="cuda") * torch.arange(blocks, device="cuda")
        ).long()
        aim = centres[:, wanted].repeat_interleave(HEADS // KV_HEADS, dim=0)
        q += (0.7 * aim).repeat_interleave(128, dim=1)
    return q, k, v


def pairs() -> Tensor:
    per = HEADS // KV_HEADS
    return torch.tensor([(h, h // per) for h in range(HEADS)], dtype=torch.int32, device="cuda")


def causal_flops(count: int) -> float:
    """Of the pairs of queries and keys that are seen, products of both matrices."""
    return 4.0 * HEADS * SIZE * (count * (count + 1) / 2)


def band_flops(count: int, sink: int, window: int) -> float:
    at = torch.arange(count, dtype=torch.float64)
    seen = torch.minimum(at + 1, torch.full_like(at, window))
    seen += (at + 1 - seen).clamp(max=sink)
    return 4.0 * HEADS * SIZE * float(seen.sum())


def run_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: tuple[int, int, int] | None,
    lists: Any,
    tile: dict[str, int] | None,
) -> Callable[[], Tensor]:
    out = torch.empty(1, q.shape[1], HEADS, SIZE, device="cuda", dtype=q.dtype)
    members = pairs()
    rules = torch.tensor([rule or (0, 1 << 30, 0)] * HEADS, dtype=torch.int32, device="cuda")
    kv = (k[None], v[None])
    arch = arch_of(q.device)
    narrow = rule is not None and rule[0] + rule[1] <= NARROW
    together = HEADS // KV_HEADS if lists is None and shares(SIZE, arch) else 1

    def call() -> Tensor:
        prefill(
            q[None], kv, kv, out, members, rules, 0, 0, SCALE, arch, rule is not None, lists, tile, narrow, together
        )  # fmt: skip
        return out

    return call


def dense_row(count: int, tile: dict[str, int] | None) -> dict[str, Any]:
    q, k, v = clustered(count)
    call = run_prefill(q, k, v, None, None, tile)
    time_s, (sdpa_s, name) = seconds(call), best_sdpa(q[None], k[None], v[None])
    flops = causal_flops(count)
    print(
        f"dense {count}: {time_s * 1e3:.2f} ms, {flops / time_s / 1e12:.0f} TFLOP/s; {name} {sdpa_s * 1e3:.2f} ms, "
        f"{flops / sdpa_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    return {"tokens": count, "time_s": time_s, "sdpa_s": sdpa_s, "sdpa": name, "flops": flops}


def band_row(count: int, sink: int, window: int, dense: dict[str, Any], tile: Any) -> dict[str, Any]:
    q, k, v = clustered(count)
    time_s, flops = (
        seconds(run_prefill(q, k, v, (sink, window, 0), None, tile)),
        band_flops(count, sink, window),
    )
    ideal_s = flops / (dense["flops"] / dense["time_s"])
    print(
        f"sink {sink} + window {window}, {count}: {time_s * 1e3:.2f} ms, {time_s / ideal_s:.2f} times its arithmetic at "
        f"the dense kernel's rate, {dense['sdpa_s'] / time_s:.1f} times SDPA",
        flush=True,
    )
    return {"tokens": count, "sink": sink, "window": window, "time_s": time_s, "of_ideal": time_s / ideal_s,
            "over_sdpa": dense["sdpa_s"] / time_s}  # fmt: skip


def block_row(count: int, density: float, dense: dict[str, Any], tiles: dict[str, Any]) -> dict[str, Any]:
    q, k, v = clustered(count)
    arch, members = arch_of(q.device), pairs()
    lengths = torch.zeros(HEADS, dtype=torch.int64, device="cuda")
    total = HEADS * (count // 128) * (count // 128 + 1) / 2

    def lists(threshold: float) -> tuple[Tensor, Tensor]:
        thresholds = torch.full((HEADS,), threshold, device="cuda")
        return attention_predict.predict(
            q, k, k, members, thresholds, lengths, STRIDE, 0, 0, SCALE, arch, tiles.get("sums")
        )

    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        share = float(lists(middle)[1].sum()) / total
        low, high = (middle, high) if share < density else (low, middle)
    found = lists(high)
    share = float(found[1].sum()) / total
    predict_s = seconds(lambda: lists(high))
    attend_s = seconds(run_prefill(q, k, v, None, found, tiles.get("prefill")))
    # Of whole blocks; of those of the diagonal half is masked, as in the dense kernel's count.
    blocks = float(found[1].sum()) - HEADS * (count // 128) / 2
    rate = 4.0 * SIZE * 128 * 128 * blocks / attend_s
    dense_rate = dense["flops"] / dense["time_s"]
    both = predict_s + attend_s
    print(
        f"blocks {count}, density {share:.3f}: attention {attend_s * 1e3:.2f} ms ({rate / dense_rate:.2f} of the dense "
        f"rate), prediction {predict_s * 1e3:.2f} ms, together {dense['sdpa_s'] / both:.2f} times SDPA",
        flush=True,
    )
    return {"tokens": count, "density": share, "threshold": high, "attend_s": attend_s, "predict_s": predict_s,
            "of_dense_rate": rate / dense_rate, "over_sdpa": dense["sdpa_s"] / both}  # fmt: skip


def tuned(count: int) -> dict[str, Any]:
    """The fastest tile of each kernel at `count` tokens; those that do not compile or fit are left out."""
    q, k, v = clustered(count)
    arch, members = arch_of(q.device), pairs()
    zeros = torch.zeros(HEADS, dtype=torch.int64, device="cuda")
    thresholds = torch.full((HEADS,), 0.9, device="cuda")

    def time_of(kernel: str, tile: dict[str, int]) -> float:
        if kernel == "prefill":
            return seconds(run_prefill(q, k, v, None, None, tile), 0.3)
        if kernel == "sums":
            return seconds(
                lambda: attention_predict.predict(
                    q, k, k, members, thresholds, zeros, STRIDE, 0, 0, SCALE, arch, tile
                ),
                0.3,
            )
        return graph_seconds(caches(count, *FORMATS[kernel.removeprefix("decode, ")], tile)[0])

    best: dict[str, Any] = {}
    names = {"prefill": "prefill", "sums": "sums"} | {f"decode, {name}": "decode" for name in FORMATS}
    for kernel, family in names.items():
        for tile in TILES[family]:
            try:
                found = time_of(kernel, tile)
            except Exception as error:  # a tile that does not fit is a finding, not an end
                print(f"tune {kernel} {tile}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            print(f"tune {kernel} {tile}: {found * 1e6:.1f} us", flush=True)
            if kernel not in best or found < best[kernel][0]:
                best[kernel] = (found, tile)
    return {kernel: tile for kernel, (_, tile) in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the shorter contexts only")
    parser.add_argument("--tune", action="store_true", help="try a short list of tiles first")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4], help="that decode together")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "attention_gpu.py: torch sees no GPU; nothing was measured\n")
    parts = set(options.only.split(","))
    if parts - set(PARTS):
        parser.error(f"--only takes {','.join(PARTS)}")
    read = read_bandwidth(torch.device("cuda"))
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{device}; reads {read / 1e12:.2f} TB/s")
    tiles = tuned(16384) if options.tune else {}
    found: dict[str, Any] = {"device": device, "read_bytes_per_s": read, "tiles": tiles}
    lengths = (32768,) if options.quick else (32768, 65536, 131072)
    dense = {}
    if parts & {"dense", "bands", "blocks"}:
        dense = {count: dense_row(count, tiles.get("prefill")) for count in lengths}
        found["dense"] = list(dense.values())
    if "bands" in parts:
        found["bands"] = [
            band_row(count, 128, window, dense[count], tiles.get("prefill"))
            for count in lengths
            if count != 65536
            for window in (1024, 4096)
        ]
    if "blocks" in parts:
        found["blocks"] = [
            block_row(count, 0.1, dense[count], tiles) for count in lengths if options.quick or count > 32768
        ]
    if "decode" in parts:
        found["decode"] = []
        for count, sequences in product(
            (16384,) if options.quick else (16384, 65536, 131072), options.sequences
        ):
            sdpa_s = sdpa_decode(count, sequences)
            found["decode"] += [
                decode_row(count, name, *forms, sdpa_s, read, tiles.get(f"decode, {name}"), sequences)
                for name, forms in FORMATS.items()
            ]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
