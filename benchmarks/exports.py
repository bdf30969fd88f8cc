"""`nstf convert --for gguf` beside llama.cpp's own mixes at equal bytes of the GGUF file.

    python benchmarks/exports.py MODEL --types Q4_K_M IQ4_XS Q5_K_M --dataset calibration.txt \\
        --eval docs=eval.txt:123652- --eval drama=eval.txt:0-20700 --cache CACHE

llama.cpp quantises through llama-cpp-python, with an importance matrix of the same calibration (the diagonals of its
Hessians, as benchmarks/quality.py gives it). For each of its files ours is converted to the same bytes, exported without
loss, and both GGUF files are expanded to float32 and measured: windows of 512 tokens, the last 255 scored. The budget of a
conversion counts the .nstf file; the tokenizer takes more bytes in a GGUF, which is taken off, and a file that is still too
large is converted once more. Options it does not know go to `nstf convert`.
"""

import argparse
import ctypes
import json
import os
import tempfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers.gguf_files import expand, export, ggml_name
from quality import Kept, load_tokenizer, measure, nstf, read_domain

from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.pipeline.store.tensorfile import TensorFile
from nstf_convert.streamed import StreamedModel

# What an .nstf's header takes, about; the second conversion corrects it.
HEADER_BYTES = 200_000


def importance(calibration: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Mean squares of each matrix's inputs by ggml's name: the diagonals of the calibration's Hessians."""
    file = TensorFile(calibration)
    found = {}
    for key, member in file.metadata["hessians"].items():
        if key != "head":
            diagonal = file.get(f"hessian:{key}").diagonal().to(torch.float32).contiguous()
            found |= {ggml_name(w, config): diagonal for w in member["weights"]}
    return found


def quantise(source: Path, out: Path, kind: str, means: dict[str, torch.Tensor], threads: int) -> None:
    """llama.cpp's mix `kind` of a bfloat16 GGUF. Exits when it fails."""
    import llama_cpp

    entries = (llama_cpp.llama_model_imatrix_data * (len(means) + 1))()
    for entry, (name, values) in zip(entries, means.items(), strict=False):
        entry.name, entry.size = name.encode(), values.numel()
        entry.data = ctypes.cast(values.data_ptr(), ctypes.POINTER(ctypes.c_float))
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not write {kind}")


def ours(args: argparse.Namespace, calibration: Path, size: int, extra: int, folder: Path) -> Path:
    """Our GGUF of at most `size` bytes. extra: what a GGUF takes beside tensors more than an .nstf does."""
    artifact, out = folder / "ours.nstf", folder / "ours.gguf"
    target = size - extra
    for _ in range(2):
        nstf(["convert", str(args.model), "--for", "gguf", "--target-size", str(target), "-o", str(artifact), "--force",
              "--prefer", "size", "--calibration", str(calibration), "--dataset", str(args.dataset), "--work-dir",
              str(folder / "work"), "--threads", str(args.threads), *args.convert])  # fmt: skip
        nstf(["export", str(artifact), "--to", "gguf", "-o", str(out), "--overwrite"])
        over = out.stat().st_size - size
        if over <= 0:
            return out
        target -= over
    raise SystemExit(f"ours is still {over} bytes larger than llama.cpp's")


def expanded(path: Path, folder: Path) -> Path:
    out = folder / "float32.gguf"
    expand(path, out)
    return out


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--types", nargs="+", default=["Q4_K_M"])
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--eval", action="append", required=True, metavar="NAME=PATH[:FROM-TO]")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--cache", type=Path, default=Path("out/exports"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    args, args.convert = parser.parse_known_args()
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    args.cache.mkdir(parents=True, exist_ok=True)
    (args.cache / "reference").mkdir(exist_ok=True)
    calibration, source = args.cache / "calibration.safetensors", args.cache / "bf16.gguf"
    if not calibration.exists():
        nstf(["calibrate", str(args.model), "--dataset", str(args.dataset), "--samples", str(args.samples),
              "--threads", str(args.threads), "-o", str(calibration)])  # fmt: skip
    rows = []
    with open_checkpoint(str(args.model)) as original:
        domains = [read_domain(t, load_tokenizer(original), args.windows) for t in args.eval]
        if not source.exists():
            export(args.model, source)
        packed = sum(len(zlib.compress(content, 9)) for content in original.files().values())
        model = StreamedModel.from_checkpoint(original)
        means = importance(calibration, dict(original.config or {}))
        with model.holding(model.head):
            reference = Kept(model, args.cache / "reference")
            for kind in args.types:
                theirs = args.cache / f"{kind}.gguf"
                if not theirs.exists():
                    quantise(source, theirs, kind, means, args.threads)
                import gguf

                tensors = sum(int(t.n_bytes) for t in gguf.GGUFReader(str(theirs)).tensors)
                size = theirs.stat().st_size
                extra = size - tensors - packed - HEADER_BYTES
                mine = ours(args, calibration, size, max(extra, 0), args.cache)
                row: dict[str, Any] = {"type": kind}
                for who, path in (("llama.cpp", theirs), ("nstf", mine)):
                    with tempfile.TemporaryDirectory(dir=args.cache) as folder:
                        with open_checkpoint(str(expanded(path, Path(folder)))) as checkpoint:
                            found = measure(reference, StreamedModel.from_checkpoint(checkpoint), domains)
                    row[who] = {"size_bytes": path.stat().st_size, "accuracy": found}
                rows.append(row)
                show(row, [d.name for d in domains])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def show(row: dict[str, Any], domains: list[str]) -> None:
    """One line a text: both files' bytes and losses, and their ratio."""
    print(
        f"{row['type']}: llama.cpp {row['llama.cpp']['size_bytes']} bytes, nstf {row['nstf']['size_bytes']}"
    )
    for name in domains:
        kl = partial(lambda n, who: row[who]["accuracy"][n]["mean_kl"], name)
        print(
            f"  {name}: KLD {kl('llama.cpp'):.5f} -> {kl('nstf'):.5f}, {kl('nstf') / kl('llama.cpp'):.2f} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
