"""The tile of a packed product with 17 rows of activations and more: a first choice, and a short list to be timed on a card.

The first choice is a table from sweeps on an H200 (hopper.py, gemm_tile.py) and, for AMD, from code objects (gemm_tile.py):
what runs without a measurement. `tune` times it and a few that differ from it in one thing, and remembers the best by
(architecture, rows up to the next power of two, shape, format). A name stands for each, so that a remembered one is never
a tile that these kernels do not do.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from nstf.kernels.bounded_json import bounded_json
from nstf.kernels.triton import hopper, launch_errors
from nstf.kernels.triton.gemm import gemm_specs
from nstf.kernels.triton.gemm_tile import tile_for
from nstf.kernels.triton.gemv import gemv_specs
from nstf.kernels.triton.int_groups import int_groups_specs
from nstf.kernels.triton.packed import FLOAT, RUN, TABLE, Layout
from nstf.kernels.triton.skinny import skinny_specs
from nstf.kernels.triton.spec import KernelSpec

CACHE_VERSION = 2
# gemm.py with its own tile, and with another number of parts of the columns, narrower tiles and fewer rows of activations
# in them; wgmma.py with its own tile, and with equal shares of all programs where it has whole ones.
OWN, NAMES = "gemm", ("gemm", "more parts", "fewer parts", "narrower", "fewer rows", "wgmma", "equal shares")
_MOST_PARTS = 16


def key(layout: Layout, batch: int, target: str) -> str:
    """What a measurement is kept under."""
    kind = "grid" if layout.mode == TABLE else "fp" if layout.mode == FLOAT else "int"
    name = f"{kind}{layout.bits}{'' if layout.symmetric else 'z'}g{layout.group}"
    return f"{target}/{1 << (batch - 1).bit_length()}x{layout.rows}x{layout.cols}/{name}"


@dataclass
class TuningCache:
    """Measured tiles by `key`: (name, seconds). version: how often tiles were added to those in use."""

    entries: dict[str, tuple[str, float]] = field(default_factory=dict)
    version: int = field(default=0, compare=False)

    def to_json(self) -> str:
        """Canonical JSON: the same entries give the same bytes."""
        rows = {key: {"tile": name, "time_s": s} for key, (name, s) in self.entries.items()}
        return json.dumps({"version": CACHE_VERSION, "entries": rows}, sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TuningCache":
        """The cache of a JSON text. Raises ValueError that says what is wrong with it."""
        data = bounded_json(text)
        if not isinstance(data, dict) or set(data) != {"version", "entries"}:
            raise ValueError("not a tuning cache: its keys must be version and entries")
        if data["version"] != CACHE_VERSION:
            raise ValueError(
                f"a tuning cache of version {data['version']!r:.20}; this nstf reads {CACHE_VERSION}"
            )
        if not isinstance(data["entries"], dict):
            raise ValueError("not a tuning cache: its entries must be an object")
        return cls({str(key): _entry(str(key), value) for key, value in data["entries"].items()})


def _entry(key: str, value: Any) -> tuple[str, float]:
    if not isinstance(value, dict) or set(value) != {"tile", "time_s"}:
        raise ValueError(f"entry {key[:60]!r}: its keys must be tile and time_s")
    name, seconds = value["tile"], value["time_s"]
    if name not in NAMES:
        raise ValueError(f"entry {key[:60]!r} is no tile of these kernels: {name!r:.30}")
    if type(seconds) is not float or not seconds > 0:
        raise ValueError(f"entry {key[:60]!r}: a time that is not positive")
    return name, seconds


# The tiles that were measured on the cards of this process.
_MEASURED = TuningCache()


def use_measured(cache: TuningCache, target: str) -> int:
    """From now on products on `target` run with the tiles of a cache; how many of its entries those are."""
    known = {key: entry for key, entry in cache.entries.items() if key.startswith(f"{target}/")}
    _MEASURED.entries |= known
    _MEASURED.version += 1
    return len(known)


def measured_version() -> int:
    """A number that changes with the measured tiles: what was chosen before may not be chosen now."""
    return _MEASURED.version


def short_list(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> list[str]:
    """Names of the tiles to time for a product, the first choice first; at most seven."""
    first = first_choice(layout, batch, dtype, arch)
    found = [first]
    for name in NAMES:
        if name != first and _makes(name, layout, batch, dtype, arch) is not None:
            found.append(name)
    return found


def first_choice(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> str:
    """What runs where nothing was measured."""
    return "wgmma" if hopper.suits(layout, batch, dtype, arch) else OWN


def chosen(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> str:
    """The name of the tile that a product runs with: the measured one, or the first choice."""
    # Tiles are measured with 16-bit activations; others take another share of local memory.
    if _MEASURED.entries and dtype.itemsize == 2:
        name, _ = _MEASURED.entries.get(key(layout, batch, arch), ("", 0.0))
        if name and _makes(name, layout, batch, dtype, arch) is not None:
            return name
    return first_choice(layout, batch, dtype, arch)


def kernel_of(name: str) -> str:
    """`gemm` or `wgmma`."""
    return "wgmma" if name in ("wgmma", "equal shares") else "gemm"


@lru_cache(maxsize=1024)
def packed_specs(
    layout: Layout, batch: int, dtype: torch.dtype, arch: str, name: str, out: torch.dtype
) -> tuple[KernelSpec, ...]:
    """The launches of a tile, or of the kernel of a name, kept: making them anew for every product takes the host long."""
    if name == "int_groups":
        return tuple(int_groups_specs(layout, batch, dtype, arch, out))
    if name == "skinny":
        return tuple(skinny_specs(layout, batch, dtype, arch, out))
    if name == "gemv":
        return tuple(gemv_specs(layout, dtype, arch, out))
    return tuple(specs_with(layout, batch, dtype, arch, name, out))


def specs_with(
    layout: Layout,
    batch: int,
    dtype: torch.dtype,
    arch: str,
    name: str,
    out: torch.dtype | None = None,
) -> list[KernelSpec]:
    """The launches of a tile. Raises ValueError where the product has none of this name."""
    changes = _makes(name, layout, batch, dtype, arch)
    if changes is None:
        raise ValueError(f"{layout.rows} x {layout.cols} for {batch} rows has no tile {name!r} on {arch}")
    if kernel_of(name) == "wgmma":
        return hopper.wgmma_specs(layout, batch, dtype, arch, out, changes)
    return gemm_specs(layout, batch, dtype, arch, changes, out)


def _makes(name: str, layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> dict[str, int] | None:
    """How a tile differs from its kernel's own, or None where there is no such."""
    if kernel_of(name) == "wgmma":
        if not hopper.possible(layout, batch, dtype, arch):
            return None
        if name == "wgmma":
            return {}
        return {"SPLIT": 0, "LAG_COLUMNS": 0} if hopper.has_whole_shares(layout, batch, arch, dtype) else None
    if name == OWN:
        return {}
    own = tile_for(layout, batch, dtype, arch)
    chunks = layout.padded // (RUN * (16 // min(b for b, _ in layout.planes)))
    parts = min(own["SPLIT"], chunks)
    if name == "more parts":
        return {"SPLIT": 2 * parts} if 2 * parts <= min(_MOST_PARTS, chunks // 2) else None
    if name == "fewer parts":
        return {"SPLIT": parts // 2} if parts > 1 else None
    if name == "narrower":
        return {"BN": own["BN"] // 2} if own["BN"] >= 64 else None
    return {"BM": own["BM"] // 2} if own["BM"] >= 32 and own["WALK"] == 1 else None


def tune_gemm(
    layout: Layout,
    batch: int,
    dtype: torch.dtype,
    target: str,
    cache: TuningCache,
    seconds: Callable[[str, list[KernelSpec]], float],
) -> str:
    """The name of the tile that is remembered, or measures best; then it is remembered in `cache`.

    seconds: runs the launches of a tile (its name goes with them) on the GPU and gives their time; one that fails
    (out of registers or local memory on this card, or in the compiler) is passed over. Raises RuntimeError from the
    last failure when all do.
    """
    at = key(layout, batch, target)
    if at in cache.entries:
        return cache.entries[at][0]
    times: dict[str, float] = {}
    failed: Exception | None = None
    for name in short_list(layout, batch, dtype, target):
        try:
            times[name] = seconds(name, specs_with(layout, batch, dtype, target, name))
        except launch_errors() as error:
            failed = error
    if not times:
        raise RuntimeError(f"no tile for {at} ran") from failed
    best = min(times, key=lambda name: times[name])
    cache.entries[at] = (best, times[best])
    return best
