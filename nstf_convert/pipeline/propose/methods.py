"""The methods of a conversion: the modules of `quantizers/` and `decomposers/`, found by looking into the folders.

    python -m nstf_convert.pipeline.propose.methods

prints them as a table; docs/structure.md shows it.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from nstf import decomposers, quantizers
from nstf.proposals import Recipe, Room, Signature, Target, Tools
from nstf_convert.export import engines


def module_of(name: str) -> ModuleType:
    """The module of a method. Raises ValueError for a name that is none."""
    return quantizers.method(name) if name in quantizers.METHODS else decomposers.method(name)


def name_of(method: str) -> str:
    """What users call a method."""
    return method if method == "dense" else str(getattr(module_of(method), "NAME", method))


def kind_of(method: str) -> str:
    """The kind of the node that a decomposition makes."""
    return str(decomposers.method(method).KIND)


def known() -> list[str]:
    """All methods of conversions, sorted; `dense` is no module."""
    return sorted({*quantizers.METHODS, *decomposers.METHODS, "dense"})


def method_families(formats: Sequence[str] | None, timed: bool = False) -> set[str]:
    """The methods that a list of formats allows. None: all, those that are tried on request alone only where the plan is
    `timed`. Raises ValueError for an unknown name."""
    if formats is None:
        return {m for m in known() if timed or not on_request(m)}
    if len(formats) == 1 and formats[0].startswith(engines.MARK):
        return engines.methods(formats[0].removeprefix(engines.MARK))
    by_name = {m: m for m in known()} | {name_of(m): m for m in known()}
    unknown = [f for f in formats if f not in by_name]
    if unknown:
        shown = sorted(name_of(m) for m in known())
        raise ValueError(f"unknown format {unknown[0]!r}; known are {', '.join(shown)}")
    return {by_name[f] for f in formats} | {"dense"}


def on_request(method: str) -> bool:
    """Whether a method is tried only where it is named or the plan counts time."""
    return method != "dense" and bool(getattr(module_of(method), "ON_REQUEST", False))


def is_slow(recipe: Recipe) -> bool:
    """Whether encoding takes minutes on a large model."""
    slow = recipe.method in quantizers.METHODS and getattr(module_of(recipe.method), "SLOW", False)
    return bool(slow) or any(is_slow(p) for p in recipe.parts.values())


def reach(methods: Iterable[str], cols: int) -> int:
    """Bits a weight up to which one of the methods loses less than all other plain formats, for rows of `cols` columns."""
    found = [module_of(m) for m in methods if m in quantizers.METHODS]
    return max((m.REACH for m in found if hasattr(m, "REACH") and m.fits(cols)), default=0)


def plain(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """What the quantisers propose for a tensor; `room.looks` has a reason for each that proposes nothing."""
    return _proposed(quantizers.METHODS, signature, target, room)


def structured(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """What the decompositions propose for a tensor; `room.looks` has a reason for each that proposes nothing."""
    return _proposed(decomposers.METHODS, signature, target, room)


def _proposed(among: Iterable[str], signature: Signature, target: Target, room: Room) -> list[Recipe]:
    out: list[Recipe] = []
    for method in (m for m in among if m in room.methods):
        found = module_of(method).proposals(signature, target, room)
        # Asked once more, a method may have nothing to add to what it proposed.
        unsaid = room.planned is None and not any(look.method == method for look in room.looks)
        if not found and unsaid:
            room.skip(method, f"proposes nothing for a tensor of this role and shape ({signature.role})")
        out += found
    return out


def losses(
    signature: Signature, wanted: Sequence[Recipe], tools: Tools, made: Callable[[Recipe], float]
) -> list[tuple[Recipe, float]]:
    """What recipes of decompositions lose: as their method expects it where it says so (and then of those alone that may
    win), else as they are `made`."""
    out: list[tuple[Recipe, float]] = []
    for method in dict.fromkeys(r.method for r in wanted):
        own = [r for r in wanted if r.method == method]
        expected = getattr(module_of(method), "losses", None)
        out += expected(signature, own, tools) if expected else [(r, made(r)) for r in own]
    return out


def faster(recipe: Recipe, signature: Signature) -> Recipe | None:
    """A decomposition in codes of as many bits whose products take less time, where its method knows one."""
    known_to = getattr(module_of(recipe.method), "faster", None)
    return None if known_to is None else known_to(recipe, signature)  # type: ignore[no-any-return]


@cache
def _source(name: str) -> str:
    own = Path(str(module_of(name).__file__))
    return hashlib.sha256(own.read_bytes() + _helpers(own.parent)).hexdigest()


@cache
def _helpers(folder: Path) -> bytes:
    others = sorted(f for f in folder.glob("*.py") if f.stem not in known())
    return b"".join(hashlib.sha256(f.read_bytes()).digest() for f in others)


def versions(methods: Iterable[str]) -> dict[str, str]:
    """A digest of each method's file, and of the files of its folder that are no methods: what another version of them
    proposed is not found again."""
    return {m: _source(m) for m in sorted(methods) if m in quantizers.METHODS or m in decomposers.METHODS}


def table() -> str:
    """The methods as a table in Markdown."""
    rows = ["| `--formats` | file | what it is |", "|---|---|---|"]
    for method in (m for m in known() if m != "dense"):
        folder = "quantizers" if method in quantizers.METHODS else "decomposers"
        first = str(module_of(method).__doc__).strip().splitlines()[0]
        rows.append(f"| `{name_of(method)}` | `{folder}/{method}.py` | {first} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
