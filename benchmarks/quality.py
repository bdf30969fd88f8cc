"""KLD against file bytes: nstf at every size, and other tools' files of the same model on the same text.

    python benchmarks/quality.py MODEL --sizes Q4_K_M IQ4_XS 0.25 0.1875 --dataset calibration.txt \\
        --eval docs=eval.txt:123652- --eval drama=eval.txt:0-20700 --cache CACHE --svg docs/quality.svg --table table.md

A size is a share of the model's bytes (0.25; a quantised GGUF counts as bfloat16), a number of bytes, or a peer's
type: that peer's file bytes. --eval NAME=PATH[:FROM-TO] names a domain: a text file, or characters FROM to TO of it.
Everything, peers included, is calibrated on the same windows of --dataset and measured in float32: weights expanded,
windows of 512 tokens, the last 255 scored. Bytes are whole files. Each point is kept in CACHE and measured once; what
is there is drawn, so that a run can be stopped, and peers and sizes added later. A peer that does not install is
named with its reason. Options it does not know go to `nstf convert`.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
from peers import Unavailable, Work
from quality_plot import plot, table
from torch import Tensor

from nstf.runtime.artifact import open_artifact
from nstf_convert.checkpoint import Checkpoint, open_checkpoint
from nstf_convert.gates.evaluate import evaluate_language_model, text_windows
from nstf_convert.streamed import StreamedModel

OURS = "nstf"


@dataclass(frozen=True)
class Domain:
    """A held-out text: its name and its windows [count, seq_len]."""

    name: str
    windows: Tensor


class Kept:
    """A model whose hidden states are computed once per set of windows and kept in a file."""

    def __init__(self, model: StreamedModel, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._states: dict[bytes, Tensor] = {}

    def hidden(self, ids: Tensor) -> Tensor:
        """[b, t] -> [b, t, hidden], from the file when it is there."""
        rows = []
        for row in ids:
            key = hashlib.sha256(row.numpy().tobytes()).digest()
            path = self._folder / f"{key.hex()[:24]}.pt"
            if key not in self._states:
                if not path.exists():
                    torch.save(self._model.hidden(row[None])[0].clone(), path)
                self._states[key] = torch.load(path)
            rows.append(self._states[key])
        return torch.stack(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        return self._model.logits(hidden)


def measure(reference: Kept, model: StreamedModel, domains: list[Domain]) -> dict[str, Any]:
    """Accuracy per domain."""
    # The head is called for every block of rows; fetched anew each time it would cost more than its product.
    with model.holding(model.head):
        return {d.name: evaluate_language_model(reference, model, d.windows).to_json() for d in domains}


def read_domain(text: str, tokenizer: Any, count: int) -> Domain:
    """`NAME=PATH[:FROM-TO]` as windows of 512 tokens. Exits with a message when it is malformed."""
    name, _, rest = text.partition("=")
    path, _, span = rest.rpartition(":") if ":" in rest and not Path(rest).exists() else (rest, "", "")
    if not name or not Path(path).is_file():
        raise SystemExit(f"--eval {text}: give NAME=PATH or NAME=PATH:FROM-TO")
    start, _, end = span.partition("-")
    content = Path(path).read_text(encoding="utf-8")
    return Domain(
        name, text_windows(tokenizer, content[int(start or 0) : int(end or len(content))], 512, count)
    )


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The model's own tokenizer."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, content in checkpoint.files().items():
            (Path(folder) / name).write_bytes(content)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def nstf(arguments: list[str]) -> None:
    """Runs an `nstf` command; its progress goes to stderr. Exits when it fails."""
    code = subprocess.run([sys.executable, "-m", "nstf_convert", *arguments], stdout=sys.stderr).returncode
    if code:
        raise SystemExit(f"nstf {' '.join(arguments)} failed ({code})")


class Points:
    """The measured points, one JSON file each: family, name, bytes, accuracy per domain."""

    def __init__(self, folder: Path, domains: list[Domain]) -> None:
        digest = hashlib.sha256()
        for domain in domains:
            digest.update(domain.name.encode() + domain.windows.numpy().tobytes())
        self._folder = folder / f"points-{digest.hexdigest()[:12]}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, family: str, name: str) -> dict[str, Any] | None:
        path = self._path(family, name)
        return json.loads(path.read_text()) if path.exists() else None

    def add(self, family: str, name: str, size_bytes: int, accuracy: Mapping[str, Any], **extra: Any) -> None:
        point = {"family": family, "name": name, "size_bytes": size_bytes, "accuracy": accuracy, **extra}
        path = self._path(family, name)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(point, indent=1) + "\n")
        part.replace(path)
        figures = (
            f"{d} KLD {a['mean_kl']:.5f} top-1 {a['top1']:.4f} ppl x{a['ppl_ratio']:.4f}"
            for d, a in accuracy.items()
        )
        print(f"{family} {name}: {size_bytes} bytes; {'; '.join(figures)}", flush=True)

    def all(self) -> list[dict[str, Any]]:
        found = [json.loads(p.read_text()) for p in sorted(self._folder.glob("*.json"))]
        return sorted(found, key=lambda p: (p["family"] != OURS, p["family"], -p["size_bytes"]))

    def _path(self, family: str, name: str) -> Path:
        safe = "".join(c if c.isalnum() or c in ".-" else "_" for c in f"{family}-{name}")
        return self._folder / f"{safe}.json"


def run_peers(
    args: argparse.Namespace, work: Work, reference: Kept, domains: list[Domain], points: Points
) -> None:
    """Makes and measures every file of the peers asked for; says which cannot be had."""
    for name in args.peers:
        try:
            module = peers.peer(name)
        except (Unavailable, ImportError) as error:
            print(f"skipped {name}: {error}", flush=True)
            continue
        for kind in args.types or module.TYPES:
            if kind not in module.TYPES or points.get(module.FAMILY, kind):
                continue
            try:
                made = module.make(kind, work)
                with tempfile.TemporaryDirectory(dir=work.cache) as folder:
                    with open_checkpoint(str(made.expand(Path(folder)))) as checkpoint:
                        accuracy = measure(reference, StreamedModel.from_checkpoint(checkpoint), domains)
            except Unavailable as error:
                print(f"skipped {module.FAMILY} {kind}: {error}", flush=True)
                continue
            points.add(module.FAMILY, kind, made.size_bytes, accuracy)


def size_in_bytes(text: str, whole: int, points: Points) -> int:
    """Bytes of a share, of a number, or of a peer's file. Exits when that file was not made."""
    by_name = {p["name"]: p["size_bytes"] for p in points.all() if p["family"] != OURS}
    if text in by_name:
        return int(by_name[text])
    try:
        value = float(text)
    except ValueError:
        raise SystemExit(f"--sizes {text}: no number, and no peer's file of that type was made") from None
    return int(value * whole) if value <= 1 else int(value)


def run_ours(
    args: argparse.Namespace, work: Work, whole: int, reference: Kept, domains: list[Domain], points: Points
) -> None:
    """Converts at every size, all on one work directory, and measures the files."""
    for text in args.sizes:
        size = size_in_bytes(text, whole, points)
        name = f"{args.label} {size}".strip()
        if points.get(OURS, name) and not args.again:
            continue
        output = work.cache / f"{args.label or 'nstf'}-{size}.nstf"
        # The statistics are the calibration's; healing reads the whole text.
        nstf(["convert", str(work.model), "--target-size", str(size), "-o", str(output), "--force", "--prefer", "size",
              "--calibration", str(work.calibration), "--dataset", str(work.text),
              "--work-dir", str(work.cache / "work"), "--threads", str(args.threads),
              "--report", str(output.with_suffix(".json")), *args.convert])  # fmt: skip
        with open_artifact(output, verify=True) as artifact:
            accuracy = measure(reference, StreamedModel.from_artifact(artifact), domains)
        points.add(OURS, name, output.stat().st_size, accuracy, target_bytes=size, target=text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--sizes", nargs="*", default=[], help="shares, bytes, or peers' types")
    parser.add_argument("--dataset", type=Path, required=True, help="calibration text")
    parser.add_argument("--eval", action="append", required=True, metavar="NAME=PATH[:FROM-TO]")
    parser.add_argument("--windows", type=int, default=16, help="windows of 512 tokens per domain, at most")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows of 512 tokens")
    parser.add_argument("--peers", nargs="*", default=[], help=f"of {', '.join(peers.NAMES)}")
    parser.add_argument("--types", nargs="*", help="only these of the peers' types")
    parser.add_argument("--calibration", type=Path, help="a file of `nstf calibrate`, instead of making one")
    parser.add_argument("--llama-quantize", type=Path, help="a built llama-quantize, instead of building one")
    parser.add_argument("--cache", type=Path, default=Path("out/quality"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--label", default="", help="tells variants of our own points apart")
    parser.add_argument("--again", action="store_true", help="convert again what was measured")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--json", type=Path)
    args, args.convert = parser.parse_known_args()
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    with open_checkpoint(str(args.model)) as original:
        cache = args.cache / f"{args.model.stem}-{original.fingerprint()[:8]}"
        (cache / "reference").mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(original)
        domains = [read_domain(text, tokenizer, args.windows) for text in args.eval]
        calibration = cache / "calibration.safetensors"
        if args.calibration and not calibration.exists():
            shutil.copyfile(args.calibration, calibration)
        if not calibration.exists():
            nstf(["calibrate", str(args.model), "--dataset", str(args.dataset), "--samples", str(args.samples),
                  "--threads", str(args.threads), "-o", str(calibration)])  # fmt: skip
        options = {"llama_quantize": str(args.llama_quantize)} if args.llama_quantize else {}
        work = Work(args.model, args.dataset, calibration, cache, args.samples, args.threads, options)
        model = StreamedModel.from_checkpoint(original)
        points = Points(cache, domains)
        whole = original.total_bytes
        with model.holding(model.head):
            reference = Kept(model, cache / "reference")
            run_peers(args, work, reference, domains, points)
            run_ours(args, work, whole, reference, domains, points)
    found = points.all()
    text = table(found, [d.name for d in domains], whole)
    print(text)
    if args.table:
        args.table.write_text(text)
    if args.svg:
        args.svg.write_text(plot(found, [d.name for d in domains], args.model.stem), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
