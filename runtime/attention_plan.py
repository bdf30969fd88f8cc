"""The attention plan as stored in an artifact: frozen dataclasses and a strict parser with limits.

The plan is the only thing that the analysis and the runtime share. It is data of unknown origin (it arrives
in a file), so the parser names every refusal: unknown versions, unknown or missing keys, wrong types,
numbers that are out of range or not finite, shapes that disagree with each other. `ValueError` is all it
raises; the artifact reader turns it into `CorruptError`.

    {"version": 1, "profile_lengths": [1024, 2048], "queries": 128, "error_bound": 0.1,
     "kld_budget": 0.002, "kld_measured": 0.0011, "kld_covers": ["streaming"], "head_dim": 64,
     "layers": [{"heads": [{"pattern": "streaming", "params": {"sink": 16, "window": 256},
                            "min_length": 1024, "error": 0.03, "mass": 0.97}, ...],
                 "groups": [{"evict": true, "sink": 16, "recent": 256, "min_length": 1024}, ...]}]}

`min_length` L means: the query at position i (counted from 0, padding not counted) uses the pattern when
i + 1 >= L and attends densely otherwise. It is a rule per query, not per call, so that one-shot prefill,
chunked prefill and decoding give the same result.
"""

import dataclasses
import json
from dataclasses import dataclass

VERSION = 1
MAX_TEXT_BYTES = 64 * 2**20
MAX_LAYERS = 2048
MAX_HEADS = 1024
MAX_LENGTH = 2**26
MAX_PROFILES = 64

# Pattern name -> its integer parameters (smallest, largest) and its fraction parameters (in (0, 1]).
PATTERNS: dict[str, tuple[dict[str, tuple[int, int]], tuple[str, ...]]] = {
    "full": ({}, ()),
    "streaming": ({"sink": (0, MAX_LENGTH), "window": (1, MAX_LENGTH)}, ()),
    "vertical_slash": ({"vertical": (0, MAX_LENGTH), "slash": (1, MAX_LENGTH)}, ()),
    "block_topk": ({"block": (1, 65536)}, ("threshold",)),
}
# What the runtime really runs sparsely today; the other patterns are stored and run densely.
EXECUTED = ("full", "streaming")


@dataclass(frozen=True)
class HeadPlan:
    """Pattern of one query head; `error` is the relative L2 error of its output, `mass` the attention
    mass kept.
    """

    pattern: str
    params: dict[str, float]
    min_length: int
    error: float
    mass: float

    @property
    def streaming(self) -> tuple[int, int, int] | None:
        """(sink, window, min_length) when the head is executed as a band, else None."""
        if self.pattern != "streaming":
            return None
        return int(self.params["sink"]), int(self.params["window"]), self.min_length


@dataclass(frozen=True)
class GroupPlan:
    """Eviction of one KV head: keep `sink` first and `recent` last keys once the context has
    `min_length` tokens.
    """

    evict: bool
    sink: int
    recent: int
    min_length: int


@dataclass(frozen=True)
class LayerPlan:
    heads: tuple[HeadPlan, ...]
    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """The whole plan; KLD in nats per token (None: not measured), lengths in tokens."""

    version: int
    profile_lengths: tuple[int, ...]
    queries: int
    error_bound: float
    kld_budget: float
    kld_measured: float | None
    kld_covers: tuple[str, ...]
    head_dim: int
    layers: tuple[LayerPlan, ...]

    def to_json(self) -> str:
        """The plan as canonical JSON (sorted keys, no spaces); `parse_plan` gives it back unchanged."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_plan(source: str | bytes | dict[str, object]) -> AttentionPlan:
    """A checked plan from JSON text or from the decoded dictionary; raises ValueError that names the
    place.
    """
    if isinstance(source, str | bytes):
        if len(source) > MAX_TEXT_BYTES:
            raise ValueError(
                f"attention plan: {len(source)} bytes of JSON, at most {MAX_TEXT_BYTES} are read"
            )
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"attention plan: not valid JSON ({error})") from error
    if isinstance(source, dict) and source.get("version") != VERSION:
        raise ValueError(
            f"attention plan: version {source.get('version')!r} is not known; "
            f"this release reads version {VERSION}"
        )
    fields = _fields(source, AttentionPlan, "attention plan")
    lengths = tuple(
        _integer(length, f"attention plan: profile_lengths[{i}]", 1, MAX_LENGTH)
        for i, length in enumerate(_list(fields["profile_lengths"], "profile_lengths", 1, MAX_PROFILES))
    )
    covers = _list(fields["kld_covers"], "kld_covers", 0, len(PATTERNS))
    unknown = [name for name in covers if not isinstance(name, str) or name not in PATTERNS]
    if unknown:
        raise ValueError(
            f"attention plan: kld_covers names {unknown[0]!r}; known patterns: {', '.join(PATTERNS)}"
        )
    measured = fields["kld_measured"]
    layers = tuple(
        _layer(layer, f"attention plan: layers[{i}]")
        for i, layer in enumerate(_list(fields["layers"], "layers", 1, MAX_LAYERS))
    )
    return AttentionPlan(
        version=VERSION,
        profile_lengths=lengths,
        queries=_integer(fields["queries"], "attention plan: queries", 1, MAX_LENGTH),
        error_bound=_number(fields["error_bound"], "attention plan: error_bound", 0, 1e6),
        kld_budget=_number(fields["kld_budget"], "attention plan: kld_budget", 0, 1e6),
        kld_measured=None if measured is None else _number(measured, "attention plan: kld_measured", -1, 1e6),
        kld_covers=tuple(str(name) for name in covers),
        head_dim=_integer(fields["head_dim"], "attention plan: head_dim", 1, 65536),
        layers=layers,
    )


def _layer(value: object, where: str) -> LayerPlan:
    fields = _fields(value, LayerPlan, where)
    heads = tuple(
        _head(head, f"{where}.heads[{i}]")
        for i, head in enumerate(_list(fields["heads"], f"{where}.heads", 1, MAX_HEADS))
    )
    groups = tuple(
        _group(group, f"{where}.groups[{i}]")
        for i, group in enumerate(_list(fields["groups"], f"{where}.groups", 1, len(heads)))
    )
    if len(heads) % len(groups):
        raise ValueError(f"{where}: {len(heads)} heads do not divide into {len(groups)} groups")
    per_group = len(heads) // len(groups)
    for index, group in enumerate(groups):
        if not group.evict:
            continue
        wanted = (group.sink, group.recent, group.min_length)
        for head in range(index * per_group, (index + 1) * per_group):
            # Evicted keys cannot be read by any head of the group: all must have exactly the group's pattern.
            if heads[head].streaming != wanted:
                raise ValueError(
                    f"{where}.groups[{index}]: evicts with (sink, recent, min_length) {wanted}, "
                    f"but heads[{head}] is {heads[head].pattern} {heads[head].params} "
                    f"from {heads[head].min_length} tokens on"
                )
    return LayerPlan(heads, groups)


def _head(value: object, where: str) -> HeadPlan:
    fields = _fields(value, HeadPlan, where)
    pattern = fields["pattern"]
    if not isinstance(pattern, str) or pattern not in PATTERNS:
        raise ValueError(f"{where}: pattern {str(pattern)[:40]!r} is not known; known: {', '.join(PATTERNS)}")
    integers, fractions = PATTERNS[pattern]
    params = fields["params"]
    if not isinstance(params, dict) or set(params) != {*integers, *fractions}:
        raise ValueError(f"{where}: params of {pattern} must be exactly {sorted({*integers, *fractions})}")
    checked: dict[str, float] = {
        name: _integer(params[name], f"{where}.params.{name}", low, high)
        for name, (low, high) in integers.items()
    }
    for name in fractions:
        checked[name] = _number(params[name], f"{where}.params.{name}", 0, 1)
    return HeadPlan(
        pattern=pattern,
        params=checked,
        min_length=_integer(fields["min_length"], f"{where}.min_length", 0, MAX_LENGTH),
        error=_number(fields["error"], f"{where}.error", 0, 1e6),
        mass=_number(fields["mass"], f"{where}.mass", 0, 1.001),
    )


def _group(value: object, where: str) -> GroupPlan:
    fields = _fields(value, GroupPlan, where)
    evict = fields["evict"]
    if not isinstance(evict, bool):
        raise ValueError(f"{where}.evict: {str(evict)[:40]!r} is not true or false")
    return GroupPlan(
        evict=evict,
        sink=_integer(fields["sink"], f"{where}.sink", 0, MAX_LENGTH),
        recent=_integer(fields["recent"], f"{where}.recent", 1 if evict else 0, MAX_LENGTH),
        min_length=_integer(fields["min_length"], f"{where}.min_length", 0, MAX_LENGTH),
    )


def _fields(value: object, kind: type, where: str) -> dict[str, object]:
    """The dictionary itself when its keys are exactly the dataclass's fields."""
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {type(value).__name__} instead of an object")
    for problem, keys in (("unknown", set(value) - names), ("missing", names - set(value))):
        if keys:
            raise ValueError(
                f"{where}: {problem} key {str(min(keys, key=str))[:40]!r}; known: {', '.join(sorted(names))}"
            )
    return value


def _list(value: object, where: str, low: int, high: int) -> list[object]:
    # Tuples are what `dataclasses.asdict` gives: a plan that never was text is read too.
    if not isinstance(value, list | tuple) or not low <= len(value) <= high:
        what = f"{len(value)} entries" if isinstance(value, list | tuple) else type(value).__name__
        raise ValueError(f"attention plan: {where}: {what} instead of a list of {low} to {high}")
    return list(value)


def _integer(value: object, where: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{where}: {str(value)[:40]!r} is not an integer from {low} to {high}")
    return value


def _number(value: object, where: str, low: float, high: float) -> float:
    # The comparison also refuses NaN and infinities, which Python's JSON reader lets through.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{where}: {str(value)[:40]!r} is not a number from {low} to {high}")
    return float(value)
