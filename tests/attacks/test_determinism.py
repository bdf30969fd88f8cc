"""One conversion in many surroundings gives one file. SECURITY.md says what may differ.

Threads, hash seed, folder and time zone are in tests/nstf_convert/pipeline/test_resume.py too, for `make test`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from recorded import make_inputs

pytestmark = pytest.mark.fuzz
PROGRAM = """
import sys
isa, *words = sys.argv[1:]
if isa:
    from nstf.kernels.cpu import ext
    ext.use_isa(isa)
from nstf_convert.cli import run
sys.exit(run(words))
"""


def convert(inputs: Path, folder: Path, isa: str = "", threads: int = 1, **environment: str) -> str:
    """The SHA-256 of a default conversion that a process of its own made in a folder of its own."""
    shutil.copytree(inputs, folder)
    words = [
        "convert", "model", "--dataset", "text.txt", "--budget", "0.4", "-o", "out.nstf", "--samples", "2",
        "--seq-len", "16", "--threads", str(threads), "--prefer", "size", "--quiet",
    ]  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, isa, *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return hashlib.sha256((folder / "out.nstf").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def test_same_bytes_with_any_threads_hash_seed_folder_and_time_zone(inputs: Path, tmp_path: Path) -> None:
    found = {}
    for threads in (1, 2, 3):
        for seed, zone in (("0", "UTC"), ("1", "Asia/Tokyo"), ("random", "America/St_Johns")):
            name = f"{threads} {seed}"
            found[name] = convert(inputs, tmp_path / name, threads=threads, PYTHONHASHSEED=seed, TZ=zone)
    print(f"{len(found)} runs, {len(set(found.values()))} files")
    assert len(set(found.values())) == 1, found


def test_same_bytes_with_every_instruction_set_of_our_kernels(inputs: Path, tmp_path: Path) -> None:
    ext = pytest.importorskip("nstf.kernels.cpu._ext")
    found = {isa: convert(inputs, tmp_path / isa, isa) for isa in ext.isas()}
    print(f"{len(found)} instruction sets, {len(set(found.values()))} files")
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_what_torch_computes_otherwise_is_the_same_from_run_to_run(
    inputs: Path, tmp_path: Path, capability: str
) -> None:
    """torch adds in another order for another instruction set: that file may be another one, but always the same."""
    usual = convert(inputs, tmp_path / "usual")
    first, second = (convert(inputs, tmp_path / f"run {i}", ATEN_CPU_CAPABILITY=capability) for i in range(2))
    print(f"torch for {capability}: {'the same file' if first == usual else 'another file'}")
    assert first == second
