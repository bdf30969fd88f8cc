"""Figures that must not get worse, in minutes: KLD, conversion time and memory, decode and prefill speed, test time.

    python benchmarks/guard.py                    # compares with benchmarks/guard.json; exit code 1 when one is worse
    python benchmarks/guard.py --keep             # keeps what is measured now, for this kind of processor
    python benchmarks/guard.py --parts default    # only this part; `tests` runs and times the tests

Parts: `conversions`, KLD, time and memory of the sample LLaMA at 0.5 and 0.3 of its bytes, each from nothing. `kernels`, the
speed of a Llama of 36 M random weights in int4. `default`, the speed of the sample LLaMA at 0.3 of its bytes as
`nstf convert --target T` writes it without further options, for each instruction set that this machine runs: a change
of formats, prices or kernels that makes the default file slow shows here. The products of the same shapes in float32 by
torch are the reference of the same run, turn by turn. Times are kept as ratios to such a reference, so that a slower
machine changes them little, and are processor time, so that a busy neighbour changes them little. Smaller is better for
every figure.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import random_models
import torch
import watch
from conversion import convert, mean_kl
from engine_error import FORMATS, write

from nstf.kernels.cpu import ext
from nstf.runtime.artifact import open_artifact
from nstf.runtime.engine import Engine
from nstf_convert.speed.measure import using

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_suffix(".json")
MODEL = ROOT / "examples" / "tiny_llama" / "model"
TEXT, HELD_OUT = ROOT / "examples" / "data" / "prose.txt", ROOT / "examples" / "data" / "heldout.txt"
SHARES = (0.5, 0.3)
SPEED_MODEL = random_models.LLAMA | {
    "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3,
    "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
PROMPT, NEW, ROUNDS = 64, 16, 25
CACHED = (256, 256)
PARTS = ("kernels", "default", "conversions", "tests")
# What `--target` calls an instruction set of the engine.
TARGETS = {"avx2": "avx2", "avx512-vnni": "avx512", "avx512-vbmi": "avx512", "neon-dotprod": "neon"}

# How much worse a figure may be before it counts: what runs of one commit differ by, and some more.
TOLERANCE = {
    "KLD": 1.05,
    "time": 1.3,
    "memory": 1.1,
    "decode": 1.1,
    "token": 1.2,
    "prefill": 1.1,
    "tests": 1.3,
}


def tolerance(name: str) -> float:
    """The factor of a figure, by the last word of its name."""
    return TOLERANCE[name.rpartition(" ")[2]]


def conversions(folder: Path) -> dict[str, float]:
    """KLD on held-out text, processor time over the reference product's, and peak memory in bytes, at both sizes."""
    found = {}
    for share in SHARES:
        output = folder / f"{share}.nstf"
        before = product_seconds()
        row = convert(
            MODEL,
            output,
            ["--budget", str(share), "--dataset", str(TEXT), "--device", "cpu", "--prefer", "size"],
        )
        reference = (before + product_seconds()) / 2
        found[f"{share} KLD"] = mean_kl(MODEL, output, HELD_OUT, 16)
        found[f"{share} time"] = row["processor_seconds"] / reference
        found[f"{share} memory"] = float(row["host_own_bytes"])
    return found


def product_seconds() -> float:
    """Seconds of a float32 product of 1024 x 1024 matrices on one thread: a unit for times on this machine."""
    a = torch.randn(1024, 1024)
    with one_thread():
        return min(seconds(lambda: a @ a) for _ in range(25))


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch and for the engine: threads that wait for each other spin, which is processor time too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kernel_speeds(folder: Path) -> dict[str, float]:
    """Seconds of reading a prompt and of decoding with the CPU engine over those of the same products in float32."""
    model = folder / "speed"
    model.mkdir()
    random_models.write_tokenizer(model, TEXT.read_text(encoding="utf-8")[:50_000], 1024)
    random_models.write_weights(SPEED_MODEL, model)
    (model / "config.json").write_text(json.dumps(SPEED_MODEL))
    write(str(model), FORMATS["int4_g32"], folder / "int4.nstf", None)
    shapes = [s for _, s in random_models.tensors(SPEED_MODEL) if len(s) == 2]
    prefill, decode = ratios(folder / "int4.nstf", shapes, ext.isa())
    return {"int4 prefill": prefill, "int4 decode": decode}


def default_speeds(folder: Path) -> dict[str, float]:
    """The same two ratios of files that default options write, for the instruction sets here that are targets."""
    config = json.loads((MODEL / "config.json").read_text())
    shapes = [s for _, s in random_models.tensors(config) if len(s) == 2]
    found = {}
    for isa in dict.fromkeys(i for i in (ext.isa(), "avx2") if i in ext.isas() and i in TARGETS):
        output = folder / f"{isa}.nstf"
        options = [
            "--budget",
            str(SHARES[-1]),
            "--target",
            TARGETS[isa],
            "--dataset",
            str(TEXT),
            "--device",
            "cpu",
        ]
        convert(MODEL, output, options)
        prefill, token = ratios(output, shapes, isa, in_cache=True)
        found |= {f"default {isa} prefill": prefill, f"default {isa} token": token}
    return found


def ratios(
    artifact_path: Path, shapes: list[tuple[int, ...]], isa: str, in_cache: bool = False
) -> tuple[float, float]:
    """(prefill, decode): seconds of the engine with the kernels of an instruction set over those of float32 products.

    in_cache: a row is multiplied by one small matrix again and again, as many weights in all. A file that fits a
    processor's own cache is as fast in every run, while matrices of 12 MB may stay in the cache that others share, or not:
    their products took 266 to 794 us.
    """
    matrices = [torch.randn(s) for s in shapes]
    rows = (
        [torch.randn(CACHED)] * (sum(m.numel() for m in matrices) // math.prod(CACHED))
        if in_cache
        else matrices
    )
    ids = torch.randint(0, 1000, (PROMPT,)).tolist()
    taken: dict[str, list[float]] = {"prefill": [], "decode": [], "rows": [], "row": []}
    with one_thread(), open_artifact(artifact_path) as artifact, using(isa):
        engine = Engine(artifact, threads=1)
        for _ in range(ROUNDS):
            engine.reset()
            taken["prefill"].append(seconds(lambda: engine.forward(ids)))
            taken["rows"].append(seconds(lambda: multiply(matrices, PROMPT)))
            for _ in range(NEW):
                taken["decode"].append(seconds(lambda: engine.forward([1])))
            taken["row"].append(seconds(lambda: multiply(rows, 1)))
    # The fastest of each: what a busy neighbour adds is in the others.
    best = {name: min(times) for name, times in taken.items()}
    return best["prefill"] / best["rows"], best["decode"] / best["row"]


def multiply(matrices: list[torch.Tensor], rows: int) -> None:
    """`rows` rows of activations times every matrix."""
    for matrix in matrices:
        torch.nn.functional.linear(torch.ones(rows, matrix.shape[1]), matrix)


def seconds(call: Callable[[], object]) -> float:
    """Processor time of a call: a busy neighbour takes turns, not this."""
    start = time.process_time()
    call()
    return time.process_time() - start


def tests() -> dict[str, float]:
    """Processor time of the tests over the reference product's. Exits when one fails."""
    before = product_seconds()
    _, usage = watch.run([sys.executable, "-m", "pytest", "-q", "-x", str(ROOT / "tests")])
    if usage.code:
        raise SystemExit(f"the tests fail ({usage.code})")
    return {"tests": 2 * usage.processor_seconds / (before + product_seconds())}


def kind() -> str:
    """The kind of processor that figures hold for: maker, family, model and instruction set."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    stated = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    named = " ".join(stated.get(key, "") for key in ("vendor_id", "cpu family", "model"))
    return f"{named.strip() or platform.machine()} {ext.isa()}"


def compare(
    kept: Mapping[str, float], found: Mapping[str, float]
) -> list[tuple[str, float, float | None, bool]]:
    """(figure, measured, kept or None, worse) of every figure measured."""
    return [
        (name, value, kept.get(name), name in kept and value > kept[name] * tolerance(name))
        for name, value in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="keep what is measured")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--kept", type=Path, default=KEPT)
    args = parser.parse_args()
    everything = json.loads(args.kept.read_text()) if args.kept.exists() else {}
    # Figures of before processors were told apart are named after the instruction set alone.
    kept = everything.get(kind(), everything.get(ext.isa(), {}))
    torch.manual_seed(0)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        for part, run in zip(PARTS, (kernel_speeds, default_speeds, conversions), strict=False):
            if part in args.parts:
                found |= run(Path(scratch))
        if "tests" in args.parts:
            found |= tests()
    rows = compare(kept, found)
    print(kind())
    for name, value, before, worse in rows:
        beside = "not kept" if before is None else f"kept {before:.5g}, x {value / before:.3f}"
        print(f"{name:<28} {value:<12.5g} {beside}{', WORSE' if worse else ''}")
    if args.keep:
        everything[kind()] = kept | found
        args.kept.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    elif any(worse for *_, worse in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
