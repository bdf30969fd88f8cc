"""Tiles measured on a card for an artifact's matrices: a file beside it, written on request, read when it is there.

    model.nstf -> model.sm_90.tiles.json
    ~/.cache/nstf/tiles-0123456789ab.json    of a card and a version of Triton: what was measured for any artifact

Nothing is measured unless it is asked for (`nstf bench --tune`): the first choice (tuner.py) runs at once.
It holds numbers and nothing that runs; a file that is damaged or of another card is left alone with a warning.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nstf.errors import NstfError, UnsupportedError
from nstf.kernels.formats import EncodedTensor
from nstf.kernels.formats.tree import array_specs
from nstf.kernels.triton import launch_errors
from nstf.runtime.artifact import Artifact
from nstf.runtime.artifact.atomic_file import replacing
from nstf.runtime.compiled import matrices

if TYPE_CHECKING:
    from nstf.kernels.triton.tuner import TuningCache

SUFFIX = ".tiles.json"
# Of a file that is worth reading; an entry takes some 100.
MOST_BYTES = 1 << 24
# Rows of activations that the packed GEMM is measured for: prompts of up to so many tokens, and batches.
ROWS = (16, 32, 64, 128, 256)

_log = logging.getLogger("nstf")


def tiles_path(artifact: str | os.PathLike[str], target: str) -> Path:
    """`model.sm_90.tiles.json` beside `model.nstf`."""
    path = Path(artifact)
    return path.with_name(f"{path.stem}.{target}{SUFFIX}")


def device_path() -> Path | None:
    """Where this user's measurements on the card here are kept; None without a card or a home."""
    if not torch.cuda.is_available():
        return None
    import triton

    facts = f"{torch.cuda.get_device_name()} {triton.__version__}"
    stated = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(stated) if stated and Path(stated).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return home / "nstf" / f"tiles-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"


def use_tiles(artifact: str | os.PathLike[str], target: str | None) -> int:
    """Products on `target` run with measured tiles from now on: those beside an artifact, or this card's own where there are
    none; how many there are."""
    if target is None:
        return 0
    from nstf.kernels.triton.aot import target_here
    from nstf.kernels.triton.tuner import use_measured

    path = tiles_path(artifact, target)
    kept = device_path() if target == target_here() else None
    for place in (path, kept):
        if place is None or not place.exists():
            continue
        if cache := _read(place):
            found = use_measured(cache, target)
            if not found:
                _log.warning("%s: its tiles are not used: none is for %s", place, target)
            return found
    return 0


def _read(path: Path) -> "TuningCache | None":
    """The measurements of a file; None, and one line, where it is damaged."""
    from nstf.kernels.triton.tuner import TuningCache

    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise ValueError("not a regular file")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        return TuningCache.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s: its tiles are not used: %s", path, " ".join(str(error).split())[:200])
        return None


def tune(artifact: Artifact, dtype: torch.dtype, say: Callable[[str], None] = lambda line: None) -> Path:
    """Measures tiles for every matrix of an artifact on the GPU here, and writes them beside it.

    What was measured on this card for another artifact is taken from the user's cache folder. dtype: of activations. say:
    is told of each matrix. Raises NstfError without a GPU, UnsupportedError where no matrix runs on the packed kernels.
    """
    from nstf.kernels.triton.aot import target_here
    from nstf.kernels.triton.linear import specs, unsuitable
    from nstf.kernels.triton.packed import layout_of
    from nstf.kernels.triton.tuner import TuningCache, key, tune_gemm, use_measured

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
    kept = device_path()
    known = (_read(kept) if kept is not None and kept.exists() else None) or TuningCache()
    cache = TuningCache()
    for layout, matrix in layouts.items():
        assert layout is not None
        say(f"{layout.rows} x {layout.cols}, {layout.bits} bits")
        for rows in ROWS:
            if all(spec.kind not in ("gemm", "wgmma") for spec in specs(matrix, rows, dtype, target)):
                continue  # another kernel does so few rows
            try:
                tune_gemm(layout, rows, dtype, target, known, _timer(matrix, rows, dtype))
            except launch_errors(ValueError) as error:
                _log.debug("%d x %d, %d rows: %s", layout.rows, layout.cols, rows, error)
                continue
            at = key(layout, rows, target)
            cache.entries[at] = known.entries[at]
    path = tiles_path(artifact.path, target)
    _write(cache, path)
    if kept is not None:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            _write(known, kept)
        except (OSError, NstfError) as error:
            _log.debug("%s: measured tiles are not kept: %s", kept, error)
    use_measured(cache, target)
    return path


def _write(cache: "TuningCache", path: Path) -> None:
    text = cache.to_json().encode()
    with replacing(path, len(text)) as output:
        output.put(0, memoryview(text))


def _timer(matrix: EncodedTensor, rows: int, dtype: torch.dtype) -> Callable[..., float]:
    """Seconds of launches for a matrix of this kind, from random codes, with the second-level cache flushed."""
    from triton.testing import do_bench

    from nstf.kernels.triton.gemm import gemm
    from nstf.kernels.triton.hopper import wgmma
    from nstf.kernels.triton.packed import pack_leaf
    from nstf.kernels.triton.tuner import kernel_of

    arrays = {
        name: torch.randint(0, 256, spec.shape, dtype=torch.uint8, device="cuda")
        if spec.dtype == torch.uint8
        else torch.rand(spec.shape, device="cuda").to(spec.dtype)
        for name, spec in array_specs(matrix.tree, matrix.shape).items()
    }
    if matrix.tree.kind == "fp8":
        arrays["codes"] &= 0x77  # none that means NaN
    packed = pack_leaf(EncodedTensor(matrix.tree, matrix.shape, arrays))
    assert packed is not None
    x = torch.randn(rows, matrix.shape[1], device="cuda").to(dtype)

    def seconds(name: str, specs: list[Any]) -> float:
        product = wgmma if kernel_of(name) == "wgmma" else gemm
        time_ms: float = do_bench(lambda: product(x, packed, specs), warmup=5, rep=20, return_mode="median")
        return time_ms / 1e3

    return seconds
