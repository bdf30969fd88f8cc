"""Products of one matrix on a CPU, against reading its bytes: every format and instruction set, in turn.

    python benchmarks/cpu_kernels.py [--isas avx2] [--threads 1,2] [--rows 1,128] [--baseline OTHER/_ext.so]

`memory`: as many copies as fill --memory MB, one after the other, as a model's matrices are read; `caches`: one matrix
again and again. One row of activations: the share of the bandwidth at which the same threads of the same process add up the
same bytes (for `caches`, of memory's). More rows: 10^9 products of a weight and an activation a second. Every round runs all
formats once; the least time of all rounds counts, of the processor's with one thread and of the clock with several.
--baseline: another build of the extension (nanobind's NB_DOMAIN must differ), measured in the same rounds; the ratio is its
time over this one's.
"""

import argparse
import importlib.util
import math
import time
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nstf.kernels.cpu import engine_matrix, ext, packed_linear
from nstf.kernels.formats import EncodedTensor, Node, array_specs, stored_bytes
from nstf.kernels.formats.tree import format_of

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 g32": ("int", {"bits": 4, "group": 32, "scale_bits": 8}),
    "int4 g64": ("int", {"bits": 4, "group": 64, "scale_bits": 8}),
    "int4 g64 a": ("int", {"bits": 4, "group": 64, "scale_bits": 8, "symmetric": False}),
    "int3 g32": ("int", {"bits": 3, "group": 32, "scale_bits": 8}),
    "int5 g32": ("int", {"bits": 5, "group": 32, "scale_bits": 8}),
    "int6 g64": ("int", {"bits": 6, "group": 64, "scale_bits": 8}),
    "int8 g64": ("int", {"bits": 8, "group": 64, "scale_bits": 8}),
    "grid g32": ("grid", {"group": 32, "scale_bits": 8}),
    "shuffle 3": ("shuffle", {"quarter_bits": 12}),
    "shuffle 4": ("shuffle", {"quarter_bits": 16}),
    "trellis 3": ("trellis", {"quarter_bits": (12,)}),
    "trellis 4": ("trellis", {"quarter_bits": (16,)}),
    "trellis 5": ("trellis", {"quarter_bits": (20,)}),
    "trellis 6": ("trellis", {"quarter_bits": (24,)}),
}


def random_arrays(tree: Node, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for path, spec in array_specs(tree, shape).items():
        if spec.dtype == torch.uint8:
            arrays[path] = torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=generator)
        else:
            arrays[path] = torch.rand(spec.shape, generator=generator).to(spec.dtype)
    return arrays


def copies(tree: Node, shape: tuple[int, int], count: int) -> tuple[torch.Tensor, list[EncodedTensor]]:
    """`count` copies of a random matrix, side by side in one block of memory: u8 [bytes]."""
    arrays = random_arrays(tree, shape)
    room = {path: (a.numel() * a.element_size() + 63) // 64 * 64 for path, a in arrays.items()}
    block = torch.zeros(count * sum(room.values()) + 64, dtype=torch.uint8)
    block = block[-block.data_ptr() % 64 :]
    made, at = [], 0
    for _ in range(count):
        own = {}
        for path, a in arrays.items():
            place = block[at : at + a.numel() * a.element_size()].view(a.dtype).view(a.shape)
            own[path] = place.copy_(a)
            at += room[path]
        made.append(EncodedTensor(tree, shape, own))
    return block[:at], made


def other_build(path: Path) -> ModuleType:
    """Another build of the extension, beside this one."""
    loader = ExtensionFileLoader("baseline._ext", str(path))
    spec = importlib.util.spec_from_loader("baseline._ext", loader)
    if spec is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def compiled(encoded: EncodedTensor, extension: ModuleType) -> Any:
    """The engine's matrix, made by one of the builds."""
    for module in (engine_matrix, packed_linear):
        module.__dict__["ext"] = extension
    try:
        # What is kept for an encoded tensor belongs to the build it was made by.
        return engine_matrix.compile_matrix(EncodedTensor(encoded.tree, encoded.shape, dict(encoded.arrays)))
    finally:
        for module in (engine_matrix, packed_linear):
            module.__dict__["ext"] = ext


def best_times(runs: dict[str, Any], rounds: int, clock: Any) -> dict[str, float]:
    """Least seconds of each over rounds in turn, the first of which does not count; runs: what comes before, and what is
    timed."""
    best = dict.fromkeys(runs, math.inf)
    for i in range(rounds + 1):
        for name, (before, run) in runs.items():
            before()
            start = clock()
            run()
            if i:
                best[name] = min(best[name], clock() - start)
    return best


def products(matrices: list[Any], rows: int, threads: int, repeat: int) -> Any:
    """A function that multiplies all matrices with `rows` rows of activations."""
    out, cols = matrices[0].shape
    x, y = torch.randn(rows, cols), torch.empty(rows, out)

    def run() -> None:
        from_, to = x.data_ptr(), y.data_ptr()
        for _ in range(repeat):
            for m in matrices:
                m.multiply_at(from_, rows, to, threads)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isas", default=",".join([*ext.isas()[:1], "avx2"]))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--shapes", default="576x1536,2048x8192")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1", help="of activations")
    parser.add_argument("--places", default="caches,memory")
    parser.add_argument("--memory", type=int, default=256, help="MB of copies")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--baseline", type=Path)
    given = parser.parse_args()
    builds = {"": ext} | ({"baseline": other_build(given.baseline)} if given.baseline else {})
    for shape_text in given.shapes.split(","):
        shape = (int(shape_text.split("x")[0]), int(shape_text.split("x")[1]))
        for place in given.places.split(","):
            for rows in map(int, given.rows.split(",")):
                for threads in map(int, given.threads.split(",")):
                    print(f"{shape_text}, {place}, {rows} rows of activations, {threads} threads", flush=True)
                    for name in given.formats.split(","):
                        measure(name, shape, place, rows, threads, given, builds)


def measure(
    name: str, shape: tuple[int, int], place: str, rows: int, threads: int, given: Any, builds: dict[str, Any]
) -> None:
    """Prints a line for a format: every instruction set and build in turn."""
    kind, params = FORMATS[name]
    tree = Node(kind, format_of(kind).Params(**params))
    size = stored_bytes(tree, shape)
    work = shape[0] * shape[1] * rows
    count = max(1, given.memory * 1_000_000 // size) if place == "memory" and rows == 1 else 1
    repeat = 1 if count > 1 else max(1, int(5e6 / work)) if rows == 1 else max(1, int(2e8 / work))
    block, encoded = copies(tree, shape, count)
    runs: dict[str, Any] = {}
    if rows == 1:
        probe = block if count > 1 else torch.ones(given.memory * 1_000_000, dtype=torch.uint8)
        runs["read"] = (lambda: None, lambda: ext.read_bytes(probe, threads))
    for build, extension in builds.items():
        for isa in given.isas.split(","):
            extension.use_isa(isa)
            matrices = [compiled(e, extension) for e in encoded]
            extension.use_isa("")
            run = products(matrices, rows, threads, repeat)
            # What ran before has emptied the caches: one matrix fills them again.
            runs[f"{isa} {build}".strip()] = (run if count == 1 else lambda: None, run)
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = best_times(runs, given.rounds, clock)
    parts = []
    if rows == 1:
        speed = len(probe) / best.pop("read")
        parts.append(f"read {speed / 1e9:.1f} GB/s")
    for run, took in best.items():
        one = took / count / repeat
        if rows == 1:
            text = f"{run} {size / one / 1e9:.1f} GB/s ({size / one / speed:.2f})"
        else:
            text = f"{run} {work / one / 1e9:.0f} G/s"
        before = best.get(f"{run} baseline")
        parts.append(text + (f" {before / took:.2f} x" if before else ""))
    print(f"  {name}: " + "; ".join(parts), flush=True)


if __name__ == "__main__":
    main()
