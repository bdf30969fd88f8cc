"""From an attention profile to an attention plan: the cheapest patterns that stay within the bounds.

1. For every KV group the cheapest streaming pattern whose *joint* output error stays within `error_bound`
at the
   longest profiled length, and from how short a length on it does (`min_length`): a candidate for eviction.
   For every query head likewise on its own.
2. These are ordered by saved cost / added error, and the longest prefix whose *measured* KLD stays within the
   budget is accepted (bisection on its length; `measure` runs the model under the joint plan).
3. Heads left over get the cheapest vertical_slash or block_topk pattern within the bound. The runtime runs
these
   densely today, so they cost no KLD; the plan's `kld_covers` says what the measured KLD includes.

The plan is a plain dictionary that nstf.runtime.attention_plan.parse_plan accepts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nstf.analyzers.attention import AttentionProfile
from nstf.analyzers.attention_patterns import Pattern

# An evicted group saves its heads' key reads and its memory; both count alike.
EVICTION_GAIN = 2.0
# A group's joint error is ruled by its heads with the largest outputs. A quiet head may be worse than the bound
# by this factor, no more: one that averages the whole context would otherwise vanish behind loud local ones.
QUIET_HEAD_SLACK = 2.0
# A pattern that still reads this share of the keys is not worth a sparse kernel.
WORTHWHILE_SHARE = 0.5


@dataclass(frozen=True)
class Item:
    """One step of the greedy order: `heads` of `layer` become streaming, and their KV group is evicted
    or not.
    """

    layer: int
    heads: tuple[int, ...]
    group: int | None
    pattern: int
    min_length: int
    saved: float
    added: float


def select_plan(
    profile: AttentionProfile,
    *,
    kld_budget: float,
    measure: Callable[[dict[str, Any]], float] | None = None,
    error_bound: float = 0.2,
) -> dict[str, Any]:
    """The plan as a dictionary.

    kld_budget: nats per token that the joint plan may cost, as `measure(plan) -> kld` reports it on
    held-out text. Without `measure`, everything within `error_bound` (relative L2 of a head's output) is
    accepted, unverified.
    """
    if kld_budget < 0 or error_bound < 0:
        raise ValueError(f"kld_budget {kld_budget} and error_bound {error_bound} must not be negative")
    items = order(profile, error_bound)
    if measure is None:
        return _plan(profile, items, error_bound, kld_budget, None)
    if not items:
        return _plan(profile, [], error_bound, kld_budget, 0.0)
    accepted, refused, klds = 0, len(items) + 1, {0: 0.0}
    trial = len(items)
    while refused - accepted > 1:
        klds[trial] = measure(_plan(profile, items[:trial], error_bound, kld_budget, None))
        # Written so that a KLD of NaN is refused.
        if klds[trial] <= kld_budget:
            accepted = trial
        else:
            refused = trial
        trial = (accepted + refused) // 2
    return _plan(profile, items[:accepted], error_bound, kld_budget, klds[accepted])


def order(profile: AttentionProfile, error_bound: float) -> list[Item]:
    """All steps within the error bound, the best saving per added error first."""
    longest = max(profile.lengths)
    last = profile.lengths[longest]
    layers, heads, _ = last.error.shape
    groups = last.group_error.shape[1]
    per_group = heads // groups
    items = []
    for layer in range(layers):
        for group in range(groups):
            members = tuple(range(group * per_group, (group + 1) * per_group))
            errors = {
                length: scores.group_error[layer, group].maximum(
                    scores.error[layer, members[0] : members[-1] + 1].amax(0) / QUIET_HEAD_SLACK
                )
                for length, scores in profile.lengths.items()
            }
            found = cheapest(profile.patterns, errors, ("streaming",), error_bound, None)
            if found is not None:
                items.append(_item(profile, layer, members, group, *found))
            for head in members:
                errors = {n: scores.error[layer, head] for n, scores in profile.lengths.items()}
                found = cheapest(profile.patterns, errors, ("streaming",), error_bound, None)
                if found is not None:
                    items.append(_item(profile, layer, (head,), None, *found))
    return sorted(items, key=lambda item: (-item.saved / max(item.added, 1e-9), item.layer, item.heads))


def cheapest(
    patterns: tuple[Pattern, ...],
    errors: dict[int, Tensor],
    names: tuple[str, ...],
    bound: float,
    share: Tensor | None,
) -> tuple[int, int] | None:
    """(pattern, min_length) of the cheapest pattern that holds at the longest length, or None.

    errors: by length, [C]. min_length is the shortest profiled length from which on the error stays within
    the bound at every profiled length, and at least what the pattern itself reads. Cost: `share` [C] of the
    keys read when given, else sink + window.
    """
    best: tuple[float, float, int, int] | None = None
    for index, pattern in enumerate(patterns):
        if pattern.name not in names:
            continue
        holds = None
        for length in sorted(errors, reverse=True):
            if not float(errors[length][index]) <= bound:
                break
            holds = length
        if holds is None:
            continue
        reads = sum(value for name, value in pattern.params if name in ("sink", "window"))
        cost = reads if share is None else float(share[index])
        key = (cost, float(errors[max(errors)][index]), index, max(holds, int(reads)))
        best = key if best is None or key < best else best
    return None if best is None else (best[2], best[3])


def _item(
    profile: AttentionProfile,
    layer: int,
    heads: tuple[int, ...],
    group: int | None,
    pattern: int,
    min_length: int,
) -> Item:
    last = profile.lengths[max(profile.lengths)]
    error, weight = last.error[layer, :, pattern], last.weight[layer]
    saved = sum(1 - float(last.share[layer, head, pattern]) for head in heads)
    added = sum(float(error[head]) ** 2 * float(weight[head]) for head in heads)
    gain = 1.0 if group is None else EVICTION_GAIN
    return Item(layer, heads, group, pattern, min_length, saved * gain, added)


def _plan(
    profile: AttentionProfile, items: list[Item], bound: float, budget: float, measured: float | None
) -> dict[str, Any]:
    last = profile.lengths[max(profile.lengths)]
    layers, heads, _ = last.error.shape
    groups = last.group_error.shape[1]
    chosen: dict[tuple[int, int], tuple[int, int]] = {}
    evicted: dict[tuple[int, int], tuple[int, int]] = {}
    for item in items:
        if item.group is not None:
            evicted[item.layer, item.group] = (item.pattern, item.min_length)
    for item in items:
        for head in item.heads:
            group = head // (heads // groups)
            # A group's pattern holds for all its heads, whatever they could do alone.
            chosen[item.layer, head] = evicted.get((item.layer, group), (item.pattern, item.min_length))
    return {
        "version": 1,
        "profile_lengths": sorted(profile.lengths),
        "queries": profile.queries,
        "error_bound": bound,
        "kld_budget": budget,
        "kld_measured": measured,
        "kld_covers": ["full", "streaming"],
        "head_dim": profile.head_dim,
        "layers": [
            {
                "heads": [
                    _head(profile, layer, head, chosen.get((layer, head)), bound) for head in range(heads)
                ],
                "groups": [_group(profile, evicted.get((layer, group))) for group in range(groups)],
            }
            for layer in range(layers)
        ],
    }


def _head(
    profile: AttentionProfile, layer: int, head: int, found: tuple[int, int] | None, bound: float
) -> dict[str, Any]:
    last = profile.lengths[max(profile.lengths)]
    if found is None:
        errors = {n: scores.error[layer, head] for n, scores in profile.lengths.items()}
        share = last.share[layer, head]
        found = cheapest(profile.patterns, errors, ("vertical_slash", "block_topk"), bound, share)
        if found is None or float(share[found[0]]) > WORTHWHILE_SHARE:
            return {"pattern": "full", "params": {}, "min_length": 0, "error": 0.0, "mass": 1.0}
    index, min_length = found
    return {
        "pattern": profile.patterns[index].name,
        "params": dict(profile.patterns[index].params),
        "min_length": min_length,
        "error": _rounded(last.error[layer, head, index]),
        "mass": _rounded(last.mass[layer, head, index]),
    }


def _group(profile: AttentionProfile, found: tuple[int, int] | None) -> dict[str, Any]:
    if found is None:
        return {"evict": False, "sink": 0, "recent": 0, "min_length": 0}
    pattern = profile.patterns[found[0]]
    return {"evict": True, "sink": pattern["sink"], "recent": pattern["window"], "min_length": found[1]}


def _rounded(value: Tensor) -> float:
    """Four significant digits: the plan travels in every artifact."""
    return float(f"{float(value):.4g}")
