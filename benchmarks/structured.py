"""Which encodings were tried on the sample convolutional and mixture-of-experts models, and which won at equal bytes.

    python benchmarks/structured.py [--budget 0.5 --budget 0.25] [--model conv] [--json out.json]

Both models are in examples/ and were trained for the purpose. Each is converted by the `nstf` command at every budget;
everything here is read from the conversion's report: for every tensor the encoding that was chosen, and the
alternatives that were priced. A method's loss at equal bytes is the least expected loss among its candidates that take no
more bytes than the chosen encoding (one per cent is allowed for, since ranks come in steps); «ratio» is that loss over
the chosen one's, as the geometric mean over tensors. What the conversion costs in the end is measured on the loaded
artifact: right answers on held-out pictures, KL divergence and perplexity on held-out text.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
MODELS = {"conv": EXAMPLES / "tiny_conv" / "model", "moe": EXAMPLES / "tiny_moe" / "model"}
BUDGETS = (0.5, 0.3, 0.2)
SLACK = 1.01
CALIBRATION_PICTURES, CALIBRATION_SEED = 128, 5 * 10**8
TESTED_PICTURES = 2048
DTYPES = ("float64", "float32", "float16", "bfloat16")

sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "tiny_conv")]


def method_of(encoding: str) -> str:
    """The method behind the report's name of an encoding: `int`, `cp`, `add`, ..."""
    if " + " in encoding:
        return "add"
    word = re.match(r"[a-z_]+", encoding.split()[0])
    name = word.group(0) if word else encoding
    if encoding.split()[0] in DTYPES:
        return "dense"
    return {"low_rank": "svd", "fp": "fp8", "mxfp": "mxfp4"}.get(name, name)


def inputs_for(name: str, folder: Path) -> list[Path]:
    """Calibration data: pictures as a file of model inputs, or text."""
    if name == "moe":
        return [EXAMPLES / "data" / "prose.txt", EXAMPLES / "data" / "speeches.txt"]
    from safetensors.torch import save_file
    from shapes import pictures

    path = folder / "pictures.safetensors"
    save_file({"pixel_values": pictures(CALIBRATION_PICTURES, CALIBRATION_SEED)[0]}, str(path))
    return [path]


def convert(
    name: str, budget: float, folder: Path, datasets: list[Path]
) -> tuple[Path, dict[str, Any], float] | None:
    """(artifact, report, seconds), or None for a budget below the smallest file that can be written."""
    out, report = folder / f"{name}-{budget}.nstf", folder / f"{name}-{budget}.json"
    command = [
        *(sys.executable, "-m", "nstf_convert", "convert", str(MODELS[name]), "--budget", str(budget)),
        *("-o", str(out), "--report", str(report), "--work-dir", str(folder / f"{name}.work"), "--force"),
        *(word for path in datasets for word in ("--dataset", str(path))),
    ]
    start = time.monotonic()
    code = subprocess.run(command, stdout=sys.stderr).returncode
    if code == 3:
        return None
    if code != 0:
        raise SystemExit(f"error: {name} at budget {budget} could not be converted")
    return out, json.loads(report.read_text("utf-8")), time.monotonic() - start


def compare_methods(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Per method: tensors it was tried on, tensors it won, bytes it stores, and its loss ratio at equal bytes."""
    tried: dict[str, int] = defaultdict(int)
    won: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    ratios: dict[str, list[float]] = defaultdict(list)
    for tensor in report["tensors"]:
        if not tensor["rejected"]:
            continue  # copied: nothing was weighed
        chosen = method_of(tensor["encoding"])
        won[chosen] += 1
        size[chosen] += tensor["size_bytes"]
        losses: dict[str, list[float]] = defaultdict(list)
        for other in tensor["rejected"]:
            kind = method_of(other["encoding"])
            found = losses[kind]
            if other["size_bytes"] <= tensor["size_bytes"] * SLACK and other["expected_loss"] is not None:
                found.append(other["expected_loss"])
        losses[chosen].append(tensor["expected_loss"])
        for kind, values in losses.items():
            tried[kind] += 1
            if values and min(values) > 0 and tensor["expected_loss"]:
                ratios[kind].append(min(values) / tensor["expected_loss"])
    return {
        kind: {
            "tensors_tried": tried[kind],
            "tensors_won": won[kind],
            "bytes_won": size[kind],
            "loss_ratio_at_equal_bytes": _geometric_mean(ratios[kind]),
            "compared_on": len(ratios[kind]),
        }
        for kind in sorted(tried, key=lambda k: (-won[k], k))
    }


def _geometric_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


@torch.inference_mode()
def quality(name: str, artifact: Path | None) -> dict[str, float]:
    """What the model, or with an artifact what the file, does on held-out data."""
    import nstf.runtime

    if name == "conv":
        from shapes import pictures
        from transformers import AutoModelForImageClassification as Auto

        model: Any = (
            nstf.runtime.load(artifact)
            if artifact
            else Auto.from_pretrained(MODELS[name], dtype=torch.float32)
        )
        model.eval()
        right = 0
        for start in range(0, TESTED_PICTURES, 256):
            x, y = pictures(256, 10**9 + start)
            right += int((model(pixel_values=x).logits.argmax(-1) == y).sum())
        return {"accuracy": right / TESTED_PICTURES}
    from language_model import documents, encode_documents, mean_loss
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model = (
        nstf.runtime.load(artifact)
        if artifact
        else AutoModelForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32)
    )
    ids = encode_documents(
        Tokenizer.from_file(str(MODELS[name] / "tokenizer.json")), documents("heldout.txt")
    )
    return {"perplexity": math.exp(mean_loss(model, ids, 512, "cpu"))}


def run(name: str, budgets: list[float], folder: Path) -> list[dict[str, Any]]:
    """One row per budget."""
    datasets = inputs_for(name, folder)
    original = quality(name, None)
    rows = []
    for budget in budgets:
        done = convert(name, budget, folder, datasets)
        if done is None:
            print(f"\n{name} at budget {budget}: cannot be met")
            continue
        artifact, report, seconds = done
        rows.append(
            {
                "model": name,
                "budget": budget,
                "size_bytes": artifact.stat().st_size,
                "bits_per_weight": report["file"]["bits_per_weight"],
                "chosen": report["accuracy"]["chosen"],
                "held_out": report["accuracy"]["final"],
                "best_uniform": report["accuracy"]["uniform"],
                "original": original,
                "artifact": quality(name, artifact),
                "methods": compare_methods(report),
                "convert_seconds": seconds,
            }
        )
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """One conversion as text."""
    (what,) = row["original"]
    print(f"\n{row['model']} at budget {row['budget']}: {row['size_bytes']} bytes, {row['bits_per_weight']:.3f} bits per "
          f"weight, {what} {row['artifact'][what]:.4f} (original {row['original'][what]:.4f}), written: {row['chosen']}, "
          f"{row['convert_seconds']:.0f} s")  # fmt: skip
    final = row["held_out"] or {}
    for key in ("mean_kl", "mean_cosine", "relative_l2"):
        if final.get(key) is not None:
            print(f"  {key} on held-out data: {final[key]:.6g}")
    print(f"  {'method':<13} {'tried on':>8} {'won':>5} {'bytes':>9} {'ratio at equal bytes':>21}")
    for kind, m in row["methods"].items():
        ratio = m["loss_ratio_at_equal_bytes"]
        text = "never that small" if ratio is None else f"{ratio:.2f} (on {m['compared_on']})"
        print(f"  {kind:<13} {m['tensors_tried']:>8} {m['tensors_won']:>5} {m['bytes_won']:>9} {text:>21}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Structured candidates on the sample conv and MoE models.")
    parser.add_argument("--budget", type=float, action="append", help="share of the bytes; may be repeated")
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="both by default")
    parser.add_argument("--folder", type=Path, help="keeps artifacts and intermediate results here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.model or sorted(MODELS):
            rows += run(name, args.budget or list(BUDGETS), folder)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
