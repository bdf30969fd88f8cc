"""The int8 kernels for AArch64, compiled by a cross compiler and run in an emulator, on processors that have no AArch64."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = (
    "engine/packed_int8.cpp",
    "engine/packed_int8_neon.cpp",
    "engine/matrix.cpp",
    "parallel.cpp",
    "isa.cpp",
)
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() == "aarch64", reason="test_engine_matrix.py runs them here"),
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
        reason="needs g++-aarch64-linux-gnu and qemu-user",
    ),
]


SHUFFLE_SOURCES = (
    "engine/shuffle.cpp",
    "engine/shuffle_neon.cpp",
    "engine/matrix.cpp",
    "engine/ops.cpp",
    "parallel.cpp",
    "isa.cpp",
)


def compiled(out: Path, main: str, sources: tuple[str, ...]) -> Path:
    folder = ROOT / "kernels" / "cpu"
    subprocess.run(
        [COMPILER, "-std=c++17", "-O2", "-static", "-fopenmp-simd", "-fno-math-errno", "-pthread", f"-I{folder}",
         str(Path(__file__).with_name(main)), *(str(folder / s) for s in sources), "-o", str(out)],
        check=True,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("neon") / "int8_kernels", "int8_kernels.cpp", SOURCES)


@pytest.fixture(scope="module")
def shuffle_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("neon") / "shuffle_kernels"
    return compiled(out, "shuffle_kernels.cpp", SHUFFLE_SOURCES)


def run(program: Path, cpu: str, sets: list[str]) -> None:
    done = subprocess.run([EMULATOR, "-cpu", cpu, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == sets


CPUS = pytest.mark.parametrize(("cpu", "sets"), [("cortex-a53", ["neon"]), ("max", ["neon-dotprod", "neon"])])


@CPUS
def test_products_are_those_of_the_decoded_matrix(program: Path, cpu: str, sets: list[str]) -> None:
    run(program, cpu, sets)


@CPUS
def test_products_of_shuffle_codes_are_those_of_the_decoded_matrix(
    shuffle_program: Path, cpu: str, sets: list[str]
) -> None:
    run(shuffle_program, cpu, sets)
