"""Coverage-guided fuzzing of the C++ engine, by libFuzzer: trees over arrays, caches and attention, with clang's sanitizers.

clang compiles the portable kernels; those with vectors of their own (gcc) run over generated trees under `make sanitize`.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CPU = HERE.parents[1] / "kernels" / "cpu"
PYTHON = ("bind", "bind_attention", "bind_grouped", "bandwidth", "sampler")  # what only Python calls
FLAGS = "-std=c++17 -O1 -g1 -fopenmp-simd -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined".split()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("clang++")
    if compiler is None:
        pytest.skip("no clang++")
    folder = tmp_path_factory.mktemp("guided")
    sources = [
        HERE / "guided_engine.cpp",
        CPU / "isa.cpp",
        CPU / "parallel.cpp",
        *(p for p in sorted((CPU / "engine").glob("*.cpp")) if p.stem not in PYTHON),
    ]
    for source in sources:
        made = subprocess.run(
            [compiler, *FLAGS, f"-I{CPU}", "-c", source, "-o", folder / f"{source.stem}.o"],
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr[-3000:]
    objects = [folder / f"{source.stem}.o" for source in sources]
    linked = subprocess.run(
        [compiler, *FLAGS, *objects, "-pthread", "-o", folder / "guided"], capture_output=True, text=True
    )
    if "libclang_rt.fuzzer" in linked.stderr:
        pytest.skip("this clang has no libFuzzer")
    assert linked.returncode == 0, linked.stderr[-3000:]
    return folder / "guided"


@pytest.mark.fuzz
def test_what_coverage_leads_to_is_refused_or_agrees(program: Path, tmp_path: Path) -> None:
    """NSTF_GUIDED_SECONDS: for how long (3,600)."""
    seconds = int(os.environ.get("NSTF_GUIDED_SECONDS", "3600"))
    (tmp_path / "corpus").mkdir()
    run = subprocess.run(
        [
            program,
            f"-max_total_time={seconds}",
            "-max_len=400",
            "-timeout=60",
            "-print_final_stats=1",
            "corpus",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    covered = [int(found) for found in re.findall(r"cov: (\d+)", run.stderr)]
    executed = re.findall(r"number_of_executed_units: (\d+)", run.stderr)
    print(f"{executed[-1]} runs, {covered[0]} edges at first, {covered[-1]} at the end")
    assert covered[-1] > covered[0]
