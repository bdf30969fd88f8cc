"""Encoded matrices times activations on a GPU, against torch's own products: one run prints the tables.

    python benchmarks/gpu_kernels.py [--quick] [--json FILE]

A time is the median over replays of a captured graph that goes through enough copies of the matrix to exceed the
second-level cache several times, divided by their number: weights always come from device memory, activations do not, as in
a decoder, and the gaps between launches count. Compared are F.linear in bfloat16 on dense copies and
`torch.ops.aten._weight_int4pack_mm` (where the device has it), in the same process. The share of bandwidth is that of a sum
over a large array, measured first.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nstf.kernels.formats.tree import EncodedTensor, Node, array_specs, format_of
from nstf.kernels.linear import linear
from nstf.kernels.registry import describe

# The matrices [out, in] of Llama-3 8B and 70B.
LLAMA = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate/up": (14336, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B o": (8192, 8192),
    "70B gate/up": (28672, 8192),
    "70B down": (8192, 28672),
}
LARGE = (28672, 8192)
CACHE_BYTES = 1 << 28
REPLAYS = 15


def leaf(kind: str, **params: Any) -> Node:
    return Node(kind, format_of(kind).Params(**params))


INT4 = leaf("int", bits=4, group=128)
FORMATS = {
    **{f"int{bits} g128": leaf("int", bits=bits, group=128) for bits in range(2, 9)},
    "int4 g32": leaf("int", bits=4, group=32),
    # As conversions write them: scales of 8 bits.
    **{f"int{bits} g64 steps": leaf("int", bits=bits, group=64, scale_bits=8) for bits in (2, 3, 4)},
    "int4 g32 steps": leaf("int", bits=4, group=32, scale_bits=8),
    "int4 g64 asymmetric": leaf("int", bits=4, group=64, symmetric=False),
    "int8 row": leaf("int", bits=8, group=0),
    "fp8 row": leaf("fp8"),
    "mxfp4": leaf("mxfp4"),
    "grid g64": leaf("grid", group=64),
    **{f"shuffle {q / 4:g} bits": leaf("shuffle", quarter_bits=q) for q in (8, 12, 14, 16, 18)},
    **{f"trellis {q / 4:g} bits": leaf("trellis", quarter_bits=(q,)) for q in (4, 8, 10, 12, 16)},
    # As conversions write them.
    **{
        f"rotated {name}": Node("rotated", format_of("rotated").Params(block_in=128), {"x": tree})
        for name, tree in {
            "trellis 2 bits": leaf("trellis", quarter_bits=(8,)),
            "trellis 3 bits": leaf("trellis", quarter_bits=(12,)),
            "shuffle 3 bits": leaf("shuffle", quarter_bits=12),
            "shuffle 4 bits": leaf("shuffle", quarter_bits=16),
        }.items()
    },
}


def random_encoded(tree: Node, shape: tuple[int, ...], seed: int) -> EncodedTensor:
    """Random codes and scales on the GPU, without the codes of FP8 that mean NaN."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    arrays = {}
    for path, spec in array_specs(tree, shape).items():
        if spec.dtype == torch.uint8:
            low, high = (120, 131) if tree.kind == "mxfp4" and path == "scale" else (0, 256)
            array = torch.randint(
                low, high, spec.shape, dtype=torch.uint8, device="cuda", generator=generator
            )
            if tree.kind == "fp8":
                array[(array & 0x7F) == 0x7F] = 3
        else:
            array = (torch.randn(spec.shape, device="cuda", generator=generator) * 0.02).to(spec.dtype)
        arrays[path] = array
    return EncodedTensor(tree, shape, arrays)


def seconds(calls: list[Callable[[], object]]) -> float:
    """Median time of one call of a graph of them; each is the same work on other weights."""
    # The matrices were made on another stream: before they are there, codes may look like NaN and go to the reference.
    torch.cuda.synchronize()
    # One stream for both: what a stream's launches hand on to each other is made by the first of them, outside of the graph.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times) / len(calls)


def copies(size_bytes: int) -> int:
    return max(2, min(32, -(-CACHE_BYTES // size_bytes)))


def bandwidth() -> float:
    """Bytes a second that a sum over 2 GiB reads."""
    array = torch.ones(1 << 29, dtype=torch.int32, device="cuda")
    return array.numel() * 4 / seconds([lambda: torch.sum(array, dtype=torch.int32)])


class Baselines:
    """F.linear and tinygemm by shape and batch, each measured once."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, tuple[int, int], int], float | None] = {}

    def dense(self, shape: tuple[int, int], batch: int) -> float:
        found = self._of("dense", shape, batch)
        assert found is not None
        return found

    def tinygemm(self, shape: tuple[int, int], batch: int) -> float | None:
        return self._of("tinygemm", shape, batch)

    def _of(self, what: str, shape: tuple[int, int], batch: int) -> float | None:
        key = (what, shape, batch)
        if key not in self.known:
            x = torch.randn(batch, shape[1], device="cuda", dtype=torch.bfloat16)
            self.known[key] = _dense(x, shape) if what == "dense" else _tinygemm(x, shape)
            torch.cuda.empty_cache()
        return self.known[key]


def _dense(x: Tensor, shape: tuple[int, int]) -> float:
    count = copies(2 * shape[0] * shape[1])
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
    return seconds([lambda w=w: F.linear(x, w) for w in weights])  # type: ignore[misc]


def _tinygemm(x: Tensor, shape: tuple[int, int], group: int = 128) -> float | None:
    """None where this build or device of torch lacks it."""
    rows, cols = shape
    try:
        codes = torch.randint(0, 255, (rows, cols // 2), dtype=torch.uint8, device="cuda")
        packed = [
            torch.ops.aten._convert_weight_to_int4pack(codes, 8).clone()
            for _ in range(copies(rows * cols // 2))
        ]
        scales = torch.randn(cols // group, rows, 2, device="cuda", dtype=torch.bfloat16)
        return seconds([lambda p=p: torch.ops.aten._weight_int4pack_mm(x, p, group, scales) for p in packed])  # type: ignore[misc]
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def encoded_seconds(tree: Node, shape: tuple[int, int], batch: int) -> tuple[float, int]:
    """(time of one product, stored bytes of the matrix)."""
    x = torch.randn(batch, shape[1], device="cuda", dtype=torch.bfloat16)
    first = random_encoded(tree, shape, 0)
    matrices = [first] + [random_encoded(tree, shape, i) for i in range(1, copies(first.size_bytes))]
    time_s = seconds([lambda m=m: linear(x, m) for m in matrices])  # type: ignore[misc]
    return time_s, first.size_bytes


def row(
    label: str, tree: Node, shape: tuple[int, int], batch: int, base: Baselines, read: float
) -> dict[str, Any]:
    time_s, size = encoded_seconds(tree, shape, batch)
    dense_s, tiny_s = base.dense(shape, batch), None
    if tree is INT4 and batch in (1, 16, 64):
        tiny_s = base.tinygemm(shape, batch)
    torch.cuda.empty_cache()
    found = {
        "matrix": label,
        "shape": shape,
        "batch": batch,
        "kernel": describe(random_encoded(tree, (128, 1024), 0), "cuda", batch),
        "time_us": time_s * 1e6,
        "bf16_us": dense_s * 1e6,
        "times_bf16": dense_s / time_s,
        "times_tinygemm": tiny_s / time_s if tiny_s else None,
        "bandwidth_share": size / time_s / read,
    }
    against = f"{found['times_tinygemm']:5.2f}x" if tiny_s else "     -"
    size_text = f"{shape[0]}x{shape[1]}"
    print(
        f"{label:24}{size_text:>12}{batch:6}{found['time_us']:10.1f}{found['bf16_us']:10.1f}"
        f"{found['times_bf16']:9.2f}x   {against}{100 * found['bandwidth_share']:9.0f} %",
        flush=True,
    )
    return found


def low_rank_row(rank: int, batch: int, size: int = 4096) -> dict[str, Any]:
    """A (B x) in one launch against two F.linear on the same factors."""
    dense = leaf("dense", dtype="bfloat16")
    tree = Node("low_rank", format_of("low_rank").Params(rank=rank), {"a": dense, "b": dense})
    x = torch.randn(batch, size, device="cuda", dtype=torch.bfloat16)
    matrices = [random_encoded(tree, (size, size), i) for i in range(128)]
    time_s = seconds([lambda m=m: linear(x, m) for m in matrices])  # type: ignore[misc]
    factors = [(m.arrays["b.values"], m.arrays["a.values"]) for m in matrices]
    two_s = seconds([lambda b=b, a=a: F.linear(F.linear(x, b), a) for b, a in factors])  # type: ignore[misc]
    print(
        f"low rank {rank}, {size}x{size}, batch {batch}: {time_s * 1e6:.1f} us, "
        f"two F.linear {two_s * 1e6:.1f} us, {two_s / time_s:.2f}x",
        flush=True,
    )
    return {"rank": rank, "batch": batch, "time_us": time_s * 1e6, "two_linears_us": two_s * 1e6}


def corrected_row(rank: int, batch: int, shape: tuple[int, int], name: str = "int4 g128") -> dict[str, Any]:
    """A format with a low-rank correction as `linear` does it (one launch where that is faster), against the base alone and
    against the base and then the correction.

    Those are the better of low_rank.py adding to the base's result, and the library's two products.
    """
    from nstf.kernels.torch.rows import children_of
    from nstf.kernels.triton.linear import arch_of
    from nstf.kernels.triton.low_rank import low_rank

    dense = leaf("dense", dtype="bfloat16")
    chain = Node("low_rank", format_of("low_rank").Params(rank=rank), {"a": dense, "b": dense})
    tree = Node("add", format_of("add").Params(), {"x": FORMATS[name], "y": chain})
    x = torch.randn(batch, shape[1], device="cuda", dtype=torch.bfloat16)
    matrices = [random_encoded(tree, shape, i) for i in range(copies(shape[0] * shape[1] // 2))]
    parts = [(children_of(m)["x"], m.arrays["y.a.values"], m.arrays["y.b.values"]) for m in matrices]
    arch = arch_of(x.device)
    base_s = seconds([lambda p=p: linear(x, p) for p, _, _ in parts])  # type: ignore[misc]
    time_s = seconds([lambda m=m: linear(x, m) for m in matrices])  # type: ignore[misc]
    apart_s = min(
        seconds([lambda p=p, a=a, b=b: low_rank(x, a, b, arch, linear(x, p)) for p, a, b in parts]),  # type: ignore[misc]
        seconds([lambda p=p, a=a, b=b: torch.addmm(linear(x, p), F.linear(x, b), a.T) for p, a, b in parts]),  # type: ignore[misc]
    )
    print(
        f"{name} and rank {rank}, {shape[0]}x{shape[1]}, batch {batch}: {time_s * 1e6:.1f} us, base alone "
        f"{base_s * 1e6:.1f} ({time_s / base_s:.2f}x), in launches of their own {apart_s * 1e6:.1f} "
        f"({apart_s / time_s:.2f}x)",
        flush=True,
    )
    times = {"time_us": time_s * 1e6, "base_us": base_s * 1e6, "apart_us": apart_s * 1e6}
    return {"format": name, "shape": shape, "rank": rank, "batch": batch, **times}


def chain_row(kind: str, bond: int, batch: int, base: Baselines) -> dict[str, Any]:
    """A 4096 x 4096 matrix that is stored decomposed, multiplied by as its two contracted sides, against F.linear."""
    view, shape = (64, 64, 64, 64), (4096, 4096)
    dense = leaf("dense", dtype="bfloat16")
    params, parts = {
        "cp": ({"rank": bond}, [f"factor{i}" for i in range(4)]),
        "tucker": ({"ranks": (16, bond // 16, bond // 16, 16)}, ["core", *(f"factor{i}" for i in range(4))]),
        "tensor_train": ({"ranks": (64, bond, 64)}, [f"core{i}" for i in range(4)]),
    }[kind]
    tree = Node(kind, format_of(kind).Params(view=view, **params), dict.fromkeys(parts, dense))
    x = torch.randn(batch, shape[1], device="cuda", dtype=torch.bfloat16)
    matrices = [
        random_encoded(tree, shape, i) for i in range(min(128, CACHE_BYTES // (bond * 2 * sum(shape))))
    ]
    time_s = seconds([lambda m=m: linear(x, m) for m in matrices])  # type: ignore[misc]
    dense_s = base.dense(shape, batch)
    print(
        f"{kind} of bond {bond}, {shape[0]}x{shape[1]}, batch {batch}: {time_s * 1e6:.1f} us, "
        f"F.linear {dense_s * 1e6:.1f} us, {dense_s / time_s:.2f}x",
        flush=True,
    )
    return {"kind": kind, "bond": bond, "batch": batch, "time_us": time_s * 1e6, "bf16_us": dense_s * 1e6}


CORRECTED = [
    ((4096, 4096), (32, 64, 128)),
    ((14336, 4096), (32, 64, 128)),
    ((28672, 8192), (32, 64, 128)),
    ((8192, 28672), (64,)),
]
CHAINS = ("cp", "tucker", "tensor_train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the headline figures only")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "gpu_kernels.py: torch sees no GPU; nothing was measured\n")
    read, base = bandwidth(), Baselines()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{device}; reads {read / 1e12:.2f} TB/s")
    print(
        f"{'':24}{'shape':>12}{'batch':>6}{'us':>10}{'bf16 us':>10}{'vs bf16':>10}{'vs tiny':>9}{'of read':>11}"
    )
    shapes = {
        k: v for k, v in LLAMA.items() if not options.quick or k in ("8B o", "8B gate/up", "70B gate/up")
    }
    rows = [
        row(f"int4 g128, {name}", INT4, shape, batch, base, read)
        for name, shape in shapes.items()
        for batch in ((1, 16, 64) if options.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256))
    ]
    for batch in (4096,) if options.quick else (512, 1024, 4096):
        rows.append(row("int4 g128, prefill", INT4, shapes["70B gate/up"], batch, base, read))
    for name, tree in FORMATS.items():
        for batch in (1,) if options.quick else (1, 4, 16, 64, 256):
            rows.append(row(name, tree, LARGE, batch, base, read))
    few = (1,) if options.quick else (1, 4, 8)
    low_ranks = [low_rank_row(rank, batch) for rank in (64, 128) for batch in few]
    corrected = [
        corrected_row(rank, batch, shape) for shape, ranks in CORRECTED for rank in ranks for batch in few
    ]
    corrected += [
        corrected_row(64, 1, LARGE, name) for name in FORMATS if "g128" in name and name != "int4 g128"
    ]
    chains = [
        chain_row(kind, bond, batch, base) for kind in CHAINS for bond in (64, 128) for batch in few[::2]
    ]
    if options.json:
        found = {
            "device": device,
            "read_bytes_per_s": read,
            "rows": rows,
            "low_rank": low_ranks,
            "corrected": corrected,
            "chains": chains,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
