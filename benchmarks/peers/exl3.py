"""EXL3 by exllamav3's own quantiser: trellis codes after Hadamard rotations (QTIP, Tseng et al. 2024); needs a CUDA GPU.

    python benchmarks/peers/exl3.py SOURCE OUT RATE ROWS

reads a Hugging Face folder and calibration rows [count, tokens] (tensor `input_ids` of a safetensors file), writes
OUT/packed (what exllamav3's user keeps: everything in it is counted), OUT/float32 (the same weights expanded) and
OUT/bytes.json. All settings but the rate and the calibration text are exllamav3's defaults: a whole number of bits
for each matrix, raised for some where RATE has a fraction; 6 bits for the output head, which it stores beside a table
in 16 bits also when the model ties the two.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

FAMILY = "EXL3"
TYPES = ("5bit", "4bit", "3bit", "2.5bit", "2bit")
# The Hadamard blocks of both sides; matrices are padded with zeros to multiples of it.
BLOCK = 128
PARTS = ("trellis", "suh", "svh", "mcg", "mul1")


def main(source: Path, out: Path, kind: str, ids: Path) -> None:
    from safetensors.torch import load_file

    seconds = quantise(source, out, float(kind.removesuffix("bit")), load_file(ids)["input_ids"])
    packed = tensors_of(out / "packed")
    dense = expand(packed, lambda parts: codes_of(parts).cpu())
    save_expanded(source, out / "float32", dense)
    counted = {"seconds": seconds, **count_bytes(out / "packed", packed)}
    (out / "bytes.json").write_text(json.dumps(counted, indent=1) + "\n")


def quantise(source: Path, out: Path, bits: float, rows: Tensor) -> float:
    """Seconds of exllamav3's conversion of `source` to out/packed, calibrated on `rows` [count, tokens]."""
    from exllamav3.conversion import convert_model

    convert_model.get_default_calibration = lambda args, tokenizer: list(rows.split(1))
    arguments = ["-i", str(source), "-o", str(out / "packed"), "-w", str(out / "work"), "-b", str(bits)]
    arguments += ["-cr", str(rows.shape[0]), "-cc", str(rows.shape[1])]
    settings, job, valid, reason = convert_model.prepare(convert_model.parser.parse_args(arguments))
    if not valid:
        raise SystemExit(f"exllamav3: {reason}")
    start = time.monotonic()
    convert_model.main(settings, job)
    seconds = time.monotonic() - start
    shutil.rmtree(out / "work")
    return seconds


def codes_of(parts: Mapping[str, Tensor]) -> Tensor:
    """The rotated weights [in, out] float32 that a trellis stands for, by exllamav3's own kernel.

    parts: `trellis` [in / 16, out / 16, 16 bits] int16, and `mcg` or `mul1` when that codebook is used.
    """
    from exllamav3.ext import exllamav3_ext

    trellis = parts["trellis"].cuda()
    rows, columns, words = trellis.shape
    half = torch.empty((16 * rows, 16 * columns), dtype=torch.half, device="cuda")
    exllamav3_ext.reconstruct(half, trellis, words // 16, "mcg" in parts, "mul1" in parts)
    return half.float()


def expand(packed: Mapping[str, Tensor], codes: "Codes") -> dict[str, Tensor]:
    """Every weight in float32, [out, in] as Hugging Face keeps it, matrices at their padded size.

    weight = (suh * (H codes)) H * svh in blocks of 128, H the orthonormal Hadamard matrix.
    """
    found: dict[str, Tensor] = {}
    for name, value in packed.items():
        key, _, part = name.rpartition(".")
        if part == "trellis":
            parts = {p: packed[f"{key}.{p}"] for p in PARTS if f"{key}.{p}" in packed}
            rotated = rotate(codes(parts).T).T * parts["suh"].float()[:, None]
            found[f"{key}.weight"] = (rotate(rotated) * parts["svh"].float()).T.contiguous()
        elif part not in PARTS:
            found[name] = value.float()
    return found


def rotate(values: Tensor) -> Tensor:
    """values: [n, k BLOCK]; every block of a row times the orthonormal Hadamard matrix (Sylvester's order)."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    blocks = values.reshape(values.shape[0], -1, BLOCK)
    return (blocks @ (matrix / BLOCK**0.5)).reshape(values.shape)


def save_expanded(source: Path, folder: Path, dense: Mapping[str, Tensor]) -> None:
    """Writes the float32 model: the original's shapes, its head untied where EXL3 stores one of its own."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text())
    shapes = {}
    for file in source.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            shapes |= {n: opened.get_slice(n).get_shape() for n in opened.keys()}
    if config.get("tie_word_embeddings") and "lm_head.weight" in dense:
        config["tie_word_embeddings"] = False
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    if missing := shapes.keys() ^ dense.keys():
        raise SystemExit(f"exllamav3 stores other tensors than the model has: {sorted(missing)[:4]}")
    folder.mkdir(parents=True, exist_ok=True)
    cut = {n: value[tuple(slice(s) for s in shapes[n])].contiguous() for n, value in dense.items()}
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.suffix in (".json", ".model", ".txt") and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    from safetensors.torch import load_file

    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def count_bytes(folder: Path, packed: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes of the whole folder, and of its tensors: the layers' matrices, the head, the table, the rest."""
    parts = dict.fromkeys(("layers", "head", "table", "other"), 0)
    for name, value in packed.items():
        if name.startswith("lm_head."):
            kind = "head"
        elif "embed_tokens" in name:
            kind = "table"
        else:
            kind = "layers" if name.rpartition(".")[2] in PARTS else "other"
        parts[kind] += value.nbytes
    total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return {"size_bytes": total, **{f"{kind}_bytes": size for kind, size in parts.items()}}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
else:
    from collections.abc import Callable

    from peers import Made, Unavailable, Work, isolated

    Codes = Callable[[Mapping[str, Tensor]], Tensor]

    def make(kind: str, work: Work) -> Made:
        """Runs exllamav3 of this environment (it is on no index) on the windows that nstf was calibrated on."""
        if not torch.cuda.is_available():
            raise Unavailable("exllamav3's quantiser needs a CUDA GPU")
        if subprocess.run([sys.executable, "-c", "import exllamav3"], capture_output=True).returncode:
            raise Unavailable("exllamav3 is not installed: github.com/turboderp-org/exllamav3")
        out = work.cache / "exl3" / kind
        if not (out / "bytes.json").exists():
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            source, ids = isolated.reference_folder(work), isolated.calibration_ids(work)
            isolated.run([sys.executable, __file__, str(source), str(out), kind, str(ids)], out / "log")
        size = json.loads((out / "bytes.json").read_text())["size_bytes"]
        return Made(kind, size, lambda folder: out / "float32")
