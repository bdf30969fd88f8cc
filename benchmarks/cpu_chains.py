"""Time of CP, Tucker and tensor-train matrices in the CPU engine, by each way to a product, as ratios to the decoded matrix.

    python benchmarks/cpu_chains.py [--copies 24] [--threads 2]

For every matrix and number of rows of activations: factor by factor, decoded once (float32), and what the engine chooses by
its count of the work for one row. Factors are random, of the sizes that fit the stated bits per weight; several
copies of a matrix take turns, as the layers of a model do, so that weights do not stay in the first caches. "loses" is how
much slower the chosen way is than the fastest.
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch

from nstf import decomposers
from nstf.decomposers.views import views
from nstf.kernels.cpu.engine_matrix import compile_matrix
from nstf.kernels.formats import EncodedTensor, Node, array_specs
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.recipe import Recipe

SHAPES = (("up", (1536, 576)), ("down", (576, 1536)), ("q", (2048, 2048)))
FACTOR = Recipe("int_grid", {"bits": 8, "group": 0, "symmetric": True})
BITS = (2.0, 4.0)
WAYS = ("steps", "decoded", "")


def matrices(role: str, shape: tuple[int, int]) -> list[tuple[str, Node]]:
    """(name, tree) of every decomposition and view that the converter would try, at BITS."""
    found = []
    for view in views(role, shape, {"num_attention_heads": shape[0] // 64}):
        for name in (m for m in view.methods if m != "svd"):
            module = decomposers.method(name)
            for bits in BITS:
                size = int(shape[0] * shape[1] * bits / 8)
                ranks = module.rank_for_bytes(view.dims, size, recipes.bytes_of(FACTOR))
                if ranks is None:
                    continue
                params = {"rank": ranks} if name == "cp" else {"ranks": list(ranks)}
                recipe = Recipe(name, {**params, "view": list(view.dims)}, {"factor": FACTOR})
                found.append((f"{name} {view.name} {bits:g} bits", recipes.tree_of(recipe, shape, 1)))
    return found


def random_encoded(tree: Node, shape: tuple[int, int], seed: int) -> EncodedTensor:
    generator = torch.Generator().manual_seed(seed)
    arrays = {
        path: torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=generator)
        if spec.dtype == torch.uint8
        else torch.rand(spec.shape, generator=generator).mul(0.01).to(spec.dtype)
        for path, spec in array_specs(tree, shape).items()
    }
    return EncodedTensor(tree, shape, arrays)


def seconds(copies: list[Any], rows: int, threads: int, times: int) -> float:
    """Of one product, the median over rounds through the copies."""
    x, y = torch.randn(rows, copies[0].shape[1]), torch.empty(rows, copies[0].shape[0])
    found = []
    for _ in range(times):
        start = time.perf_counter()
        for matrix in copies:
            matrix.multiply_at(x.data_ptr(), rows, y.data_ptr(), threads)
        found.append((time.perf_counter() - start) / len(copies))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--copies", type=int, default=24)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 128])
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    print("| matrix | rows | decoded, us | steps / decoded | chosen / decoded | loses |")
    print("|---|---|---|---|---|---|")
    for role, shape in SHAPES:
        for name, tree in matrices(role, shape):
            stored = [random_encoded(tree, shape, i) for i in range(arguments.copies)]
            made = {way: [compile_matrix(e, way=way) for e in stored] for way in WAYS}
            for rows in arguments.rows:
                took = {w: seconds(made[w], rows, arguments.threads, arguments.times) for w in WAYS}
                base = took["decoded"]
                ratios = " | ".join(f"{took[w] / base:.2f}" for w in ("steps", ""))
                best = min(took[w] for w in WAYS[:2])
                print(
                    f"| {role} {shape[0]} x {shape[1]}, {name} | {rows} | {base * 1e6:.0f} | {ratios} | "
                    f"{took[''] / best:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
