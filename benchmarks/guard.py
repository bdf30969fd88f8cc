"""Figures that must not get worse, in minutes: KLD, conversion time and memory, decode and prefill speed, test time.

    python benchmarks/guard.py            # compares with benchmarks/guard.json; exit code 1 when one is worse
    python benchmarks/guard.py --update   # keeps what is measured now, for this instruction set
    python benchmarks/guard.py --tests    # also runs and times the tests

Quality and conversion: the sample LLaMA at 0.5 and 0.3 of its bytes, each from nothing. Speed: a Llama of 36 M random
weights, whose products in float32 by torch are the reference of the same run, turn by turn. Times are kept as ratios to
such a reference, so that a slower machine changes them little, and are processor time, so that a busy neighbour changes
them little. Smaller is better for every figure.
"""

import argparse
import json
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

# How much worse a figure may be before it counts: what runs of one commit differ by, and some more.
TOLERANCE = {"KLD": 1.05, "time": 1.3, "memory": 1.1, "decode": 1.1, "prefill": 1.1, "tests": 1.3}


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


def speeds(folder: Path) -> dict[str, float]:
    """Seconds of decoding and of reading a prompt with the CPU engine over those of the same products in float32."""
    model = folder / "speed"
    model.mkdir()
    random_models.write_tokenizer(model, TEXT.read_text(encoding="utf-8")[:50_000], 1024)
    random_models.write_weights(SPEED_MODEL, model)
    (model / "config.json").write_text(json.dumps(SPEED_MODEL))
    write(str(model), FORMATS["int4_g32"], folder / "int4.nstf", None)
    matrices = [torch.randn(s) for name, s in random_models.tensors(SPEED_MODEL) if len(s) == 2]
    ids = torch.randint(0, 1024, (PROMPT,)).tolist()
    taken: dict[str, list[float]] = {"prefill": [], "decode": [], "rows": [], "row": []}
    with one_thread(), open_artifact(folder / "int4.nstf") as artifact:
        engine = Engine(artifact)
        for _ in range(ROUNDS):
            engine.reset()
            taken["prefill"].append(seconds(lambda: engine.forward(ids)))
            taken["rows"].append(seconds(lambda: multiply(matrices, PROMPT)))
            for _ in range(NEW):
                taken["decode"].append(seconds(lambda: engine.forward([1])))
            taken["row"].append(seconds(lambda: multiply(matrices, 1)))
    # The fastest of each: what a busy neighbour adds is in the others.
    best = {name: min(times) for name, times in taken.items()}
    return {"int4 prefill": best["prefill"] / best["rows"], "int4 decode": best["decode"] / best["row"]}


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
    parser.add_argument("--update", action="store_true", help="keep what is measured")
    parser.add_argument("--tests", action="store_true", help="also run and time the tests")
    parser.add_argument("--kept", type=Path, default=KEPT)
    args = parser.parse_args()
    everything = json.loads(args.kept.read_text()) if args.kept.exists() else {}
    kept = everything.get(ext.isa(), {})
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        found = {**speeds(Path(scratch)), **conversions(Path(scratch)), **(tests() if args.tests else {})}
    rows = compare(kept, found)
    for name, value, before, worse in rows:
        beside = "not kept" if before is None else f"kept {before:.5g}, x {value / before:.3f}"
        print(f"{name:<16} {value:<12.5g} {beside}{', WORSE' if worse else ''}")
    if args.update:
        everything[ext.isa()] = kept | found
        args.kept.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    elif any(worse for *_, worse in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
