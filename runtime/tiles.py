"""Tiles measured on a card for an artifact's matrices: a file beside it, written on request, read when it is there.

    model.nstf -> model.sm_90.tiles.json

It holds numbers and nothing that runs; a file that is damaged or of another card is left alone with a warning.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from nstf.errors import NstfError, UnsupportedError
from nstf.kernels.formats import EncodedTensor
from nstf.kernels.formats.tree import array_specs
from nstf.kernels.triton import launch_errors
from nstf.runtime.artifact import Artifact
from nstf.runtime.artifact.atomic_file import replacing
from nstf.runtime.compiled import matrices

SUFFIX = ".tiles.json"
# Rows of activations that the packed GEMM is measured for: prompts of up to so many tokens, and batches.
ROWS = (16, 32, 64, 128, 256)
# Of the planner's list, each a kernel to compile.
PROPOSALS = 3

_log = logging.getLogger("nstf")


def tiles_path(artifact: str | os.PathLike[str], target: str) -> Path:
    """`model.sm_90.tiles.json` beside `model.nstf`."""
    path = Path(artifact)
    return path.with_name(f"{path.stem}.{target}{SUFFIX}")


def use_tiles(artifact: str | os.PathLike[str], target: str | None) -> int:
    """Products on `target` run with the measured tiles beside an artifact from now on; how many there are."""
    path = tiles_path(artifact, target) if target else None
    if target is None or path is None or not path.exists():
        return 0
    from nstf.kernels.triton.planner import TuningCache
    from nstf.kernels.triton.tuner import use_measured

    try:
        found = use_measured(TuningCache.from_json(path.read_text(encoding="utf-8")), target)
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s: its tiles are not used: %s", path, " ".join(str(error).split())[:200])
        return 0
    if not found:
        _log.warning("%s: its tiles are not used: none is for %s", path, target)
    return found


def tune(artifact: Artifact, dtype: torch.dtype, say: Callable[[str], None] = lambda line: None) -> Path:
    """Measures tiles for every matrix of an artifact on the GPU here, and writes them beside it.

    dtype: of activations. say: is told of each matrix. Raises NstfError without a GPU, UnsupportedError where no matrix
    runs on the packed GEMM.
    """
    from nstf.kernels.triton.aot import target_here
    from nstf.kernels.triton.linear import specs, unsuitable
    from nstf.kernels.triton.packed import layout_of
    from nstf.kernels.triton.planner import TuningCache
    from nstf.kernels.triton.tuner import tune_gemm, use_measured

    target = target_here()
    if (reason := unsuitable()) or target is None:
        raise NstfError(
            f"measuring tiles needs a GPU that the kernels run on: {reason or 'it has no table here'}"
        )
    layouts = {layout_of(m): m for m in matrices(artifact)}
    layouts.pop(None, None)
    if not layouts:
        raise UnsupportedError(
            f"{artifact.path}: no matrix of it runs on the packed GEMM: there is nothing to measure"
        )
    cache = TuningCache()
    for layout, matrix in layouts.items():
        assert layout is not None
        say(f"{layout.rows} x {layout.cols}, {layout.bits} bits")
        for rows in ROWS:
            if all(spec.kind != "gemm" for spec in specs(matrix, rows, dtype, target)):
                continue  # another kernel does so few rows
            try:
                tune_gemm(layout, rows, dtype, target, cache, _timer(matrix, rows, dtype), PROPOSALS)
            except launch_errors(ValueError) as error:
                _log.debug("%d x %d, %d rows: %s", layout.rows, layout.cols, rows, error)
    path = tiles_path(artifact.path, target)
    text = cache.to_json().encode()
    with replacing(path, len(text)) as output:
        output.put(0, memoryview(text))
    use_measured(cache, target)
    return path


def _timer(matrix: EncodedTensor, rows: int, dtype: torch.dtype) -> Callable[..., float]:
    """Seconds of launches for a matrix of this kind, from random codes, with the second-level cache flushed."""
    from triton.testing import do_bench

    from nstf.kernels.triton.gemm import gemm
    from nstf.kernels.triton.packed import pack_leaf

    arrays = {
        name: torch.randint(0, 256, spec.shape, dtype=torch.uint8, device="cuda")
        if spec.dtype == torch.uint8
        else torch.rand(spec.shape, device="cuda").to(spec.dtype)
        for name, spec in array_specs(matrix.tree, matrix.shape).items()
    }
    if matrix.tree.kind == "fp8":
        arrays["codes"] &= 0x77  # none that means NaN
    packed = pack_leaf(EncodedTensor(matrix.tree, matrix.shape, arrays))
    x = torch.randn(rows, matrix.shape[1], device="cuda").to(dtype)

    def seconds(specs: list[object]) -> float:
        time_ms: float = do_bench(lambda: gemm(x, packed, specs), warmup=5, rep=20, return_mode="median")  # type: ignore[arg-type]
        return time_ms / 1e3

    return seconds
