"""From an attention profile to an attention plan: the cheapest patterns that stay within the bounds.

1. For every KV group: the streaming patterns whose *joint* output error stays within `error_bound` at the
longest
   profiled length, and from how short a length on they do (`min_length`): candidates for eviction. For
   every query head likewise on its own.
2. Of the candidates of a group or head those on the hull of (added error, saved cost) are steps from full
attention
   to its cheapest pattern. All steps are ordered by saved cost / added error, and the longest prefix whose
   *measured* KLD stays within the budget is accepted (bisection on its length; `measure` runs the model
   under the joint plan).
3. Heads left over get the cheapest vertical_slash or block_topk pattern within the bound. The runtime runs
these
   densely today, so they cost no KLD; the plan's `kld_covers` says what the measured KLD includes.

The plan is a plain dictionary that nstf.runtime.attention_plan.parse_plan accepts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from nstf.analyzers.attention import AttentionProfile
from nstf.analyzers.attention_patterns import Pattern

# An evicted group saves its heads' key reads and its memory; both count alike.
EVICTION_GAIN = 2.0
# A group's joint error is ruled by its heads with the largest outputs. A quiet head may be worse than the
# bound by this factor, no more: one that averages the whole context would otherwise vanish behind loud
# local ones.
QUIET_HEAD_SLACK = 2.0
# A pattern that still reads this share of the keys is not worth a sparse kernel.
WORTHWHILE_SHARE = 0.5


@dataclass(frozen=True)
class Step:
    """One step of the greedy order: `heads` of `layer` get `pattern`; `group` is set when their KV is
    evicted.

    saved, added: what the step saves and adds beyond the one before it on the same heads.
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
    measured_length: int | None = None,
) -> dict[str, Any]:
    """The plan as a dictionary.

    kld_budget: nats per token that the joint plan may cost, as `measure(plan) -> kld` reports it on
    held-out text. Without `measure`, everything within `error_bound` (relative L2 of a head's output) is
    accepted, unverified.
    measured_length: tokens per window that `measure` runs, the longest profiled length by default. A pattern
    is accepted only when its min_length is at most half of that: the measurement would hardly see it otherwise.
    """
    if kld_budget < 0 or error_bound < 0:
        raise ValueError(f"kld_budget {kld_budget} and error_bound {error_bound} must not be negative")
    if measure is None:
        return _plan(profile, order(profile, error_bound), error_bound, kld_budget, None)
    steps = order(profile, error_bound, (measured_length or max(profile.lengths)) // 2)
    if not steps:
        return _plan(profile, [], error_bound, kld_budget, 0.0)
    accepted, refused, klds = 0, len(steps) + 1, {0: 0.0}
    trial = len(steps)
    # A measurement runs the model: the last per cent of the steps is not worth three more of them.
    while refused - accepted > max(len(steps) // 100, 1):
        klds[trial] = measure(_plan(profile, steps[:trial], error_bound, kld_budget, None))
        # Written so that a KLD of NaN is refused.
        if klds[trial] <= kld_budget:
            accepted = trial
        else:
            refused = trial
        trial = (accepted + refused) // 2
    return _plan(profile, steps[:accepted], error_bound, kld_budget, klds[accepted])


def order(profile: AttentionProfile, error_bound: float, latest: int | None = None) -> list[Step]:
    """All steps within the error bound, the best saving per added error first.

    latest: the largest min_length that is allowed.
    """
    layers, heads, groups = _shape(profile)
    per_group = heads // groups
    steps = []
    for layer in range(layers):
        for group in range(groups):
            members = tuple(range(group * per_group, (group + 1) * per_group))
            errors = {
                length: scores.group_error[layer, group].maximum(
                    scores.error[layer, members[0] : members[-1] + 1].amax(0) / QUIET_HEAD_SLACK
                )
                for length, scores in profile.lengths.items()
            }
            steps += _steps(profile, layer, members, group, errors, error_bound, latest)
            for head in members:
                errors = {length: scores.error[layer, head] for length, scores in profile.lengths.items()}
                steps += _steps(profile, layer, (head,), None, errors, error_bound, latest)
    return sorted(steps, key=lambda step: (-step.saved / step.added, step.layer, step.heads))


def holding(
    patterns: tuple[Pattern, ...], errors: dict[int, Tensor], names: tuple[str, ...], bound: float
) -> dict[int, int]:
    """{pattern: min_length} of the patterns that hold at the longest length; errors: by length, [C].

    min_length is the shortest profiled length from which on the error stays within the bound at every
    profiled length, and at least what the pattern itself reads.
    """
    found = {}
    for index, pattern in enumerate(patterns):
        if pattern.name not in names:
            continue
        for length in sorted(errors, reverse=True):
            if not float(errors[length][index]) <= bound:
                break
            reads = sum(int(value) for name, value in pattern.params if name in ("sink", "window"))
            found[index] = max(length, reads)
    return found


def _steps(
    profile: AttentionProfile,
    layer: int,
    heads: tuple[int, ...],
    group: int | None,
    errors: dict[int, Tensor],
    bound: float,
    latest: int | None,
) -> list[Step]:
    """The steps of one group or head along the upper hull of (added error, saved cost), from (0, 0) on."""
    last = profile.lengths[max(profile.lengths)]
    gain = 1.0 if group is None else EVICTION_GAIN
    points = []
    for index, min_length in holding(profile.patterns, errors, ("streaming",), bound).items():
        if latest is not None and min_length > latest:
            continue
        saved = sum(1 - float(last.share[layer, head, index]) for head in heads) * gain
        # The head's part in the squared output of its layer; never zero, as it divides.
        weights = (
            float(last.error[layer, head, index]) ** 2 * float(last.weight[layer, head]) for head in heads
        )
        points.append((max(sum(weights), 1e-12), saved, index, min_length))
    hull: list[tuple[float, float, int, int]] = [(0.0, 0.0, -1, 0)]
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if point[1] <= hull[-1][1] or point[0] <= hull[-1][0]:
            continue
        while len(hull) > 1 and _slope(hull[-2], point) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return [
        Step(layer, heads, group, new[2], new[3], new[1] - old[1], new[0] - old[0])
        for old, new in pairwise(hull)
    ]


def _slope(low: tuple[float, float, int, int], high: tuple[float, float, int, int]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


def _shape(profile: AttentionProfile) -> tuple[int, int, int]:
    """(layers, heads, KV groups)."""
    last = profile.lengths[max(profile.lengths)]
    return last.error.shape[0], last.error.shape[1], last.group_error.shape[1]


def _plan(
    profile: AttentionProfile, steps: list[Step], bound: float, budget: float, measured: float | None
) -> dict[str, Any]:
    layers, heads, groups = _shape(profile)
    chosen: dict[tuple[int, int], tuple[int, int]] = {}
    evicted: dict[tuple[int, int], tuple[int, int]] = {}
    for step in steps:
        if step.group is not None:
            evicted[step.layer, step.group] = (step.pattern, step.min_length)
    for step in steps:
        for head in step.heads:
            group = head // (heads // groups)
            # A group's pattern holds for all its heads, whatever they could do alone.
            chosen[step.layer, head] = evicted.get((step.layer, group), (step.pattern, step.min_length))
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
        held = holding(profile.patterns, errors, ("vertical_slash", "block_topk"), bound)
        best = min(held, key=lambda index: (float(last.share[layer, head, index]), index), default=None)
        if best is None or float(last.share[layer, head, best]) > WORTHWHILE_SHARE:
            return {"pattern": "full", "params": {}, "min_length": 0, "error": 0.0, "mass": 1.0}
        found = best, held[best]
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
