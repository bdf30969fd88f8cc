"""Time, memory and quality of whole conversions: one model, several budgets on one work directory.

    python benchmarks/convert.py MODEL --budgets 0.5 0.338 --dataset calibration.txt --eval eval.txt

Every conversion is a process of its own; peak memory is its largest resident set, mapped files included. Quality is
`nstf eval` on the --eval text (16 windows of 512 tokens, the last 255 scored). The second budget shares the first
one's work directory; the ratio of the two times is printed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def run(arguments: list[str]) -> tuple[dict[str, Any], float, float]:
    """(JSON printed, seconds, peak resident GiB) of an `nstf` command."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([sys.executable, "-m", "nstf_convert", *arguments, "--json"], stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if os.waitstatus_to_exitcode(status) != 0:
            raise SystemExit(f"nstf {' '.join(arguments)} failed")
        out.seek(0)
        return json.load(out), seconds, _gib(usage)


def _gib(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.3])
    parser.add_argument("--dataset", action="append", default=[])
    parser.add_argument("--eval")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--keep", type=Path, help="keep the artifacts in this folder")
    parser.add_argument("--json", type=Path)
    args, extra = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        datasets = [part for path in args.dataset for part in ("--dataset", path)]
        for budget in args.budgets:
            output = folder / f"{Path(args.model).stem}-{budget}.nstf"
            command = ["convert", args.model, "--budget", str(budget), "-o", str(output), "--force",
                       "--work-dir", str(Path(scratch) / "work"), *datasets, *extra]  # fmt: skip
            done, seconds, memory = run(command)
            row = {"budget": budget, "size_bytes": done["size_bytes"], "budget_bytes": done["budget_bytes"],
                   "seconds": seconds, "peak_memory_gib": memory, "internal": done["report"]["accuracy"],
                   "stages": done["report"]["stages"]}  # fmt: skip
            if args.eval:
                checked, _, _ = run(["eval", str(output), "--reference", args.model, "--dataset", args.eval,
                                     "--windows", str(args.windows)])  # fmt: skip
                row["eval"] = checked
            rows.append(row)
            print(summary(row), flush=True)
        if len(rows) > 1:
            print(f"second budget: {rows[0]['seconds'] / rows[1]['seconds']:.1f} times faster than the first")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def summary(row: dict[str, Any]) -> str:
    """One line a budget."""
    line = (
        f"budget {row['budget']}: {row['size_bytes']} of {row['budget_bytes']} bytes, {row['seconds']:.0f} s, "
        f"peak {row['peak_memory_gib']:.2f} GiB"
    )
    uniform = row["internal"].get("uniform")
    measured = (row.get("eval") or {}).get("measured") or row["internal"]["final"]
    if measured and "mean_kl" in measured:
        line += f", mean KLD {measured['mean_kl']:.5f}, top-1 {measured['top1']:.4f}, ppl ratio {measured['ppl_ratio']:.4f}"
    if uniform and "mean_kl" in uniform["accuracy"]:
        kl = row["internal"]["final"]["mean_kl"]
        line += (
            f" (held-out calibration text: mix {kl:.5f}, best uniform {uniform['accuracy']['mean_kl']:.5f})"
        )
    return line


if __name__ == "__main__":
    main()
