"""Shuffle codes: the gap to the rate-distortion bound, and the time of a product over that of a grid of the same bytes.

    python benchmarks/shuffle.py [--rows 8192 --cols 4096] [--threads 1] [--rounds 25]

Gaps are of the quantiser itself on N(0, 1), scales of 8 bits a row included in the file but not in the rate. Times
are the least of rounds in which all formats take turns; a "grid of the same bytes" is one with 16 levels and groups
of 32 columns with as many bytes, which for other rates than 4 bits has fewer or more rows: times are per byte of
codes and scales. `cached`: a matrix that the second cache holds.
"""

import argparse
import math
import time
from typing import Any

import torch

from nstf.kernels.cpu import engine_matrix, ext
from nstf.kernels.formats import EncodedTensor, Node, array_specs, decode, stored_bytes
from nstf.kernels.formats.tree import format_of
from nstf.quantizers import shuffle


def gap(quarter_bits: int, rows: int = 1024, cols: int = 1024) -> float:
    """Bits above the bound."""
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))
    error = float((decode(shuffle.encode(weight, shuffle.Params(quarter_bits))) - weight).square().mean())
    return 0.5 * math.log2(error) + quarter_bits / 4


def random_matrix(tree: Node, shape: tuple[int, int]) -> EncodedTensor:
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for path, spec in array_specs(tree, shape).items():
        if spec.dtype == torch.uint8:
            arrays[path] = torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=generator)
        else:
            arrays[path] = torch.rand(spec.shape, generator=generator).to(spec.dtype)
    return EncodedTensor(tree, shape, arrays)


def times(matrices: list[Any], batch: int, threads: int, rounds: int) -> list[float]:
    """Least seconds of a product of each over rounds in turn: of a processor's time with one thread, which other work
    on the machine disturbs less."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    inputs = [torch.randn(batch, m.shape[1]) for m in matrices]
    outputs = [torch.empty(batch, m.shape[0]) for m in matrices]
    found: list[list[float]] = [[] for _ in matrices]
    for i in range(rounds + 1):
        for m, x, y, own in zip(matrices, inputs, outputs, found, strict=True):
            repeat = max(1, int(1.6e7 / (m.shape[0] * m.shape[1] * batch)))
            start = clock()
            for _ in range(repeat):
                m.multiply_at(x.data_ptr(), batch, y.data_ptr(), threads)
            if i:
                own.append((clock() - start) / repeat)
    return [min(own) for own in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rates", default="8,10,12,14,16,18")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--isas", default=",".join(ext.isas()[:-1]))
    parser.add_argument("--no-gap", action="store_true")
    given = parser.parse_args()
    rates = [int(q) for q in given.rates.split(",")]
    if not given.no_gap:
        print("| bits | gap to the bound, bits |\n|---|---|")
        for q in rates:
            print(f"| {q / 4:g} | {gap(q):.3f} |", flush=True)

    def leaf(kind: str, **params: Any) -> Node:
        return Node(kind, format_of(kind).Params(**params))

    trees = {
        "grid": leaf("grid", group=32, scale_bits=8),
        "int 4": leaf("int", bits=4, group=32, scale_bits=8),
    }
    trees |= {f"shuffle {q / 4:g}": leaf("shuffle", quarter_bits=q) for q in rates}
    for name, (rows, cols) in {"memory": (given.rows, given.cols), "cached": (512, 1024)}.items():
        for isa in given.isas.split(","):
            ext.use_isa(isa)
            matrices = [engine_matrix.compile_matrix(random_matrix(t, (rows, cols))) for t in trees.values()]
            sizes = [stored_bytes(t, (rows, cols)) for t in trees.values()]
            for batch in map(int, given.batches.split(",")):
                took = times(matrices, batch, given.threads, given.rounds)
                parts = [
                    f"{form}: {t / took[0]:.2f} a weight, {t / size / (took[0] / sizes[0]):.2f} a byte"
                    for form, t, size in zip(trees, took, sizes, strict=True)
                ]
                speed = sizes[0] / took[0] / 1e9
                print(f"{name} {isa} batch {batch} (grid {speed:.2f} GB/s): " + "; ".join(parts), flush=True)
    ext.use_isa("")


if __name__ == "__main__":
    main()
