"""llama.cpp's types with an importance matrix, quantised by its own `llama-quantize`.

The source comes with the sdist of llama-cpp-python on the package index; only that tool is built. Rows that are not
multiples of 256 make llama-quantize fall back to wider types: the file's bytes count, whatever its name says.
"""

import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

from peers import Made, Unavailable, Work
from peers.gguf_files import expand, export, write_importance

FAMILY = "llama.cpp, importance matrix"
TYPES = ("Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_XS", "Q3_K_M", "IQ3_XXS", "Q2_K", "IQ2_M", "IQ2_XXS")
PACKAGE = "llama-cpp-python==0.3.36"


def make(kind: str, work: Work) -> Made:
    """Quantises the model to `kind` (once; the file stays in the cache)."""
    tool = build_quantizer(work)
    folder = work.cache / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    source, importance = folder / "bf16.gguf", folder / "importance.gguf"
    if not source.exists():
        _atomically(source, partial(export, work.model))
    if not importance.exists():
        _atomically(importance, partial(write_importance, work.calibration, work.model))
    out = folder / f"{kind}.gguf"
    if not out.exists():
        part = folder / f"{kind}.part.gguf"
        command = [str(tool), "--imatrix", str(importance), str(source), str(part), kind, str(work.threads)]
        _run(command, folder / f"{kind}.log")
        part.replace(out)
    return Made(kind, out.stat().st_size, partial(_expand, out))


def build_quantizer(work: Work) -> Path:
    """The path of llama-quantize: the one given, else built in the cache. Raises Unavailable."""
    if given := work.options.get("llama_quantize"):
        return Path(given)
    return build(work.cache.parent / "llama.cpp", ("llama-quantize",), work.threads)[0]


def build(root: Path, targets: tuple[str, ...], threads: int, flags: tuple[str, ...] = ()) -> list[Path]:
    """The paths of llama.cpp's tools, built once below `root` from the sdist. Raises Unavailable."""
    folder = root / ("build" + "".join(flags).replace("-D", "-").replace("=", ""))[:80]
    tools = [folder / "bin" / name for name in targets]
    if all(tool.exists() for tool in tools):
        return tools
    root.mkdir(parents=True, exist_ok=True)
    if not list(root.glob("*/vendor/llama.cpp")):
        _run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:",
              "-d", str(root), PACKAGE], root / "download.log")  # fmt: skip
        with tarfile.open(next(root.glob("*.tar.gz"))) as archive:
            archive.extractall(root, filter="data")
    source = next(root.glob("*/vendor/llama.cpp"))
    off = ("LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER", "BUILD_SHARED_LIBS")
    on = ("LLAMA_BUILD_TOOLS", "LLAMA_BUILD_EXAMPLES")
    _run(["cmake", "-S", str(source), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release",
          *(f"-D{name}=OFF" for name in off), *(f"-D{name}=ON" for name in on), *flags], root / "configure.log")  # fmt: skip
    _run(["cmake", "--build", str(folder), "--target", *targets, "-j", str(threads)], root / "build.log")
    return tools


def _expand(quantised: Path, folder: Path) -> Path:
    out = folder / "float32.gguf"
    expand(quantised, out)
    return out


def _atomically(path: Path, write: partial[None]) -> None:
    part = path.with_suffix(".part")
    write(part)
    part.replace(path)


def _run(command: list[str], log: Path) -> None:
    """Runs a program with its output in `log`. Raises Unavailable with the last line when it fails."""
    with log.open("w") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
        except OSError as error:
            raise Unavailable(f"{command[0]} cannot be run ({error})") from error
    if code:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise Unavailable(f"{Path(command[0]).name} failed: {lines[-1][:200]} (log: {log})")
