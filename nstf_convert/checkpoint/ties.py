"""Tied weights: parameters that are one stored tensor under several names are stored once."""

import math
from collections.abc import Mapping
from typing import TypeVar

from nstf_convert.checkpoint.naming import Plan
from nstf_convert.checkpoint.source import Source, full_digest, sample_digest

MIN_NUMEL = 1024
T = TypeVar("T")


def find_ties(plan: Plan, source: Source) -> dict[str, str]:
    """alias -> stored name: what the class declares, what the file says, and matrices of equal content.

    Only tensors of two or more dimensions are compared: norms of fresh models are all ones, and tying them
    saves nothing.
    """
    ties = dict(plan.tied)
    declared = {*plan.declared, *plan.declared.values()}
    single = {
        name: recipe.sources[0]
        for name, recipe in plan.recipes.items()
        if recipe.as_stored and (name in declared or _comparable(recipe.info.shape))
    }
    by_storage: dict[str, list[str]] = {}
    for name, stored in single.items():
        by_storage.setdefault(source.aliases.get(stored, stored), []).append(name)
    for names in by_storage.values():
        ties |= _tie(names)
    remaining = [names[0] for names in by_storage.values()]
    for names in _same(
        remaining, {n: (plan.recipes[n].info.shape, plan.recipes[n].info.dtype) for n in remaining}
    ):
        for close in _same(names, {n: sample_digest(source, single[n]) for n in names}):
            for equal in _same(close, {n: full_digest(source, single[n]) for n in close}):
                ties |= _tie(equal)
    return _resolved(ties)


def _comparable(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and math.prod(shape) >= MIN_NUMEL


def _same(names: list[str], keys: Mapping[str, T]) -> list[list[str]]:
    """The groups of two or more names with equal key."""
    groups: dict[T, list[str]] = {}
    for name in names:
        groups.setdefault(keys[name], []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _tie(names: list[str]) -> dict[str, str]:
    """An embedding is kept under its own name; otherwise the first name in order is."""
    ordered = sorted(names, key=lambda name: ("embed" not in name, name))
    return dict.fromkeys(ordered[1:], ordered[0])


def _resolved(ties: Mapping[str, str]) -> dict[str, str]:
    """Ties with chains followed to the end, sorted by alias."""
    result = {}
    for alias in sorted(ties):
        name, steps = ties[alias], 0
        while name in ties and steps <= len(ties):
            name, steps = ties[name], steps + 1
        result[alias] = name
    return result
