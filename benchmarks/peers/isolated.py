"""Peers that are Python packages: each runs in a virtual environment of its own, on a copy of the model in bfloat16.

A peer's module is also the program that runs there: `python PEER.py SOURCE OUT KIND CALIBRATION WINDOWS` reads a Hugging
Face folder and writes OUT/packed, the files its user would keep (they are what is counted), and OUT/float32, the same
weights expanded. The environment sees the packages of this one, so that torch is not installed twice.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import torch

from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.pipeline.calibrate.statistics import fit_batches
from nstf_convert.pipeline.store.tensorfile import TensorFile
from peers import Made, Unavailable, Work


def make(module_file: str, kind: str, work: Work, packages: Sequence[str]) -> Made:
    """Runs the peer of `module_file` for `kind`, once; its files stay in the cache."""
    name = Path(module_file).stem
    out = work.cache / name / kind
    if not (out / "done").exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        python = environment(work, name, packages)
        source, ids = reference_folder(work), calibration_ids(work)
        arguments = [str(python), module_file, str(source), str(out), kind, str(ids), str(work.threads)]
        run(arguments, out / "log")
        (out / "done").touch()
    size = sum(f.stat().st_size for f in (out / "packed").rglob("*") if f.is_file())
    return Made(kind, size, lambda folder: out / "float32")


def environment(work: Work, name: str, packages: Sequence[str]) -> Path:
    """The interpreter of a virtual environment with `packages`, made when it is missing. Raises Unavailable."""
    root = work.cache.parent / "venvs" / name
    python = root / "bin" / "python"
    if (root / "installed").exists():
        return python
    venv.create(root, with_pip=True, clear=True)
    paths = sysconfig.get_paths(vars={"base": str(root), "platbase": str(root)})
    Path(paths["purelib"], "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    # The same torch, or none: another one is a download of gigabytes.
    version = f"torch=={torch.__version__.split('+')[0]}"
    run([str(python), "-m", "pip", "install", "-q", version, *packages], root / "install.log")
    (root / "installed").touch()
    return python


def reference_folder(work: Work) -> Path:
    """The original as a Hugging Face folder in bfloat16."""
    from safetensors.torch import save_file

    folder = work.cache / "reference-bf16"
    if not (folder / "model.safetensors").exists():
        folder.mkdir(exist_ok=True)
        with open_checkpoint(str(work.model)) as checkpoint:
            for name, content in checkpoint.files().items():
                (folder / name).write_bytes(content)
            weights = {n: checkpoint.get(n).to(torch.bfloat16) for n in checkpoint.names()}
            save_file(weights, folder / "part", metadata={"format": "pt"})
        (folder / "part").replace(folder / "model.safetensors")
    return folder


def calibration_ids(work: Work) -> Path:
    """The windows that nstf itself was calibrated on, [windows, tokens] int64, as a safetensors file."""
    from safetensors.torch import save_file

    path = work.cache / "calibration-ids.safetensors"
    if not path.exists():
        batches = fit_batches(TensorFile(work.calibration))
        save_file({"input_ids": torch.cat([b["input_ids"] for b in batches]).clone()}, path)
    return path


def run(command: list[str], log: Path) -> None:
    """Runs a program with its output in `log`. Raises Unavailable with the last line when it fails."""
    with log.open("w") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
        except OSError as error:
            raise Unavailable(f"{command[0]} cannot be run ({error})") from error
    if code:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise Unavailable(f"{Path(command[0]).name} failed: {lines[-1][:200]} (log: {log})")


if __name__ == "__main__":
    sys.exit("this file is a part of benchmarks/quality.py")
