"""Tensor -> fewer bits: one file per method.

A method is a module of this folder with these names; a new file is found and tested without a line elsewhere:

    Params                                  frozen dataclass: defaults, limits
    tree(params) -> Node                    the stored form
    bits(shape, params) -> float            bits per weight on disk
    encode(weight, params, stats) -> EncodedTensor
    decode                                  `nstf.kernels.formats.decode`
    estimate(weight, params, stats) -> float    expected loss, without encoding
    estimate_many(weight, [params, ...], stats) -> list[float]    what recipes have in common is done once
    proposals(signature, target, room) -> recipes    what a conversion tries (nstf.proposals)

and, where they say something,

    encode_many([(weight, params, stats), ...], scratch) -> list[EncodedTensor]    tensors gain from being encoded together
    forms(weight, [params, ...], stats) -> list[Form]    what its estimates round to (rounding/estimate.py): they are then
                  made together with those of other such methods, by `estimate_forms`
    ACROSS        that gain is there for tensors of other Hessians too, which change nothing in it: encode_many takes
                  (items, scratch, room), see below
    BY_ROWS       encode(weight, params, stats, scratch) works on as many rows at a time as fit the scratch
    NAME          what users call it, where that is not the file's name
    ON_REQUEST    tried only where it is named or the plan counts time
    REACH         bits a weight up to which no other plain format loses less at its bytes; fits(cols): for which rows
    EVERY_ROW     estimates want all rows, not a sample
    SLOW          encoding takes minutes on a large model
    basis_block(shape, lead)    the block of the rotation of a tensor whose recipe names none

Work is done on the weight's device; statistics lie there too. Encoded arrays are on the CPU.
"""

import importlib
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from nstf.kernels.formats import EncodedTensor
    from nstf.proposals import Recipe
    from nstf.quantizers.stats import Stats

_NOT_METHODS = ("stats",)
# Factors with few columns are not worth a Hessian's feedback; this is where LDLQ starts.
MIN_LDLQ_COLS = 16


def listed() -> tuple[str, ...]:
    """The methods among the files of the folder."""
    found = (m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg)
    return tuple(sorted(name for name in found if name not in _NOT_METHODS))


METHODS = listed()


def method(name: str) -> ModuleType:
    """The module of a method in `METHODS`. Raises ValueError on any other name."""
    if name not in METHODS:
        raise ValueError(f"unknown quantiser {name[:40]!r}; known are {', '.join(METHODS)}")
    return importlib.import_module(f"nstf.quantizers.{name}")


def filled(recipe: "Recipe", shape: tuple[int, ...], lead: int) -> Any:
    """The `Params` of a quantiser's recipe for a tensor of `shape`, with what follows from the shape filled in."""
    from nstf.kernels.formats import rotated

    cls = method(recipe.method).Params
    known = {f.name for f in fields(cls)}
    given = dict(recipe.params)
    cols = math.prod(shape[lead:])
    if "rounding" in known:
        given.setdefault("rounding", "ldlq" if cols >= MIN_LDLQ_COLS else "nearest")
    if "block" in known:
        own = getattr(method(recipe.method), "basis_block", None)
        given.setdefault("block", own(shape, lead) if own else rotated.block_for(cols))
    if "sections" in given:
        given["sections"] = tuple(tuple(section) for section in given["sections"])
    if "lead" in known:
        given["lead"] = lead
    return cls(**given)


def estimate_forms(
    wanted: "Sequence[tuple[str, Any]]", weight: "Tensor", stats: "Stats | None" = None
) -> list[float]:
    """The expected losses of (method, params), all of methods with `forms` and with the same `lead`: what each method's
    `estimate_many` gives, from one sample and with one product a pass for all of them."""
    from nstf.quantizers.rounding.estimate import expected_losses

    found: dict[int, Any] = {}
    for name in dict.fromkeys(name for name, _ in wanted):
        at = [i for i, (other, _) in enumerate(wanted) if other == name]
        found.update(zip(at, method(name).forms(weight, [wanted[i][1] for i in at], stats), strict=True))
    return expected_losses(weight, wanted[0][1].lead, [found[i] for i in range(len(wanted))], stats)


def encode_many(
    items: "Sequence[tuple[str, Tensor, Any, Stats | None]]", scratch: int = 1 << 28, room: int | None = None
) -> "list[EncodedTensor]":
    """The tensors of (method, weight, params, stats), in order. `scratch`: bytes a method may use to encode side by side
    what shares a Hessian; `room`: what does not, where that is another number."""
    found: dict[int, EncodedTensor] = {}
    for name in dict.fromkeys(item[0] for item in items):
        module = method(name)
        at = [i for i, item in enumerate(items) if item[0] == name]
        own = [items[i][1:] for i in at]
        together = getattr(module, "encode_many", None)
        beside = (room,) if getattr(module, "ACROSS", False) else ()
        alone = (scratch,) if getattr(module, "BY_ROWS", False) else ()
        encoded = together(own, scratch, *beside) if together else [module.encode(*i, *alone) for i in own]
        found.update(zip(at, encoded, strict=True))
    return [found[i] for i in range(len(items))]
