"""The search of shuffle codes on a GPU: the time of a step, and weights a second, of one or two forms of the kernel in turn.

    python benchmarks/shuffle_search.py [--rows 4096 28672] [--bits 3 4] [--cols 64] [--warps 4 8] [--other FILE]

FILE: another form of kernels/triton/shuffle_search.py, for instance an older one:
`git show COMMIT:kernels/triton/shuffle_search.py > FILE`. Then the codes of both are compared too. A step is one symbol of a
path in one column; a GPU goes through all steps of 256 rows one after another, so its time says how long a matrix takes:
columns x 8 x 8 bits x the time of a step, as long as the GPU has a multiprocessor for every 256 rows.
"""

import argparse
import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nstf.kernels.formats import shuffle
from nstf.kernels.triton import shuffle_search


def other_form(path: Path) -> ModuleType:
    """A form of the module from a file of its own."""
    spec = importlib.util.spec_from_file_location("other_shuffle_search", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem(rows: int, cols: int, quarter_bits: int) -> tuple[Any, ...]:
    """What `round_columns` is given for each block of columns."""
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = torch.randn(rows, cols, device="cuda", generator=generator)
    level = torch.full((rows,), shuffle.STEPS[quarter_bits], device="cuda")
    feedback = 0.1 * torch.randn(16, 16, device="cuda", generator=generator).triu(1)
    return weight, level, torch.ones(rows, device="cuda"), feedback


def run(module: ModuleType, given: tuple[Any, ...], quarter_bits: int) -> tuple[float, list[torch.Tensor]]:
    """(seconds, codes by block of columns)."""
    weight, level, importance, feedback = given
    torch.cuda.synchronize()
    start = time.perf_counter()
    codes = [
        module.round_columns(part, part, level, importance, feedback, quarter_bits)[1]
        for part in weight.split(16, dim=1)
    ]
    torch.cuda.synchronize()
    return time.perf_counter() - start, codes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 28672])
    parser.add_argument("--bits", type=float, nargs="+", default=[3.0, 4.0])
    parser.add_argument("--cols", type=int, default=64, help="a multiple of 16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8], help="of a program")
    parser.add_argument("--other", type=Path)
    arguments = parser.parse_args()
    # (warps of a program, None: as the form has them; the form)
    forms: dict[str, tuple[int | None, ModuleType]] = {
        f"{n} warps": (n, shuffle_search) for n in arguments.warps
    }
    if arguments.other:
        forms["other"] = None, other_form(arguments.other)
    for bits in arguments.bits:
        q = round(4 * bits)
        for rows in arguments.rows:
            given = problem(rows, arguments.cols, q)
            best: dict[str, float] = {}
            codes: dict[str, list[torch.Tensor]] = {}
            for number in range(arguments.rounds + 1):  # the first one compiles
                for name, (warps, module) in forms.items():
                    if warps is not None:
                        module.WARPS = dict.fromkeys(("alone", "beside"), warps)  # type: ignore[attr-defined]
                    seconds, codes[name] = run(module, given, q)
                    if number:
                        best[name] = min(best.get(name, seconds), seconds)
            for name, seconds in best.items():
                steps = arguments.cols * shuffle.SEGMENT // shuffle.GROUP * 2 * q
                rate = rows * arguments.cols / seconds / 1e6
                print(
                    f"{bits} bits, {rows} rows, {name}: {1e9 * seconds / steps:.0f} ns a step, {rate:.2f} M weights/s"
                )
            first = next(iter(codes))
            for name in list(codes)[1:]:
                pairs = zip(codes[first], codes[name], strict=True)
                same = torch.stack([(a == b).float().mean() for a, b in pairs]).mean()
                print(f"  codes of {name} and {first} alike: {float(same):.4f}")


if __name__ == "__main__":
    main()
