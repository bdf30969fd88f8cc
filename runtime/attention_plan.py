"""The attention plan as stored in an artifact: frozen dataclasses and a strict parser with limits.

The plan is the only thing that the analysis and the runtime share. It is data of unknown origin (it arrives
in a file), so the parser names every refusal: unknown versions, unknown or missing keys, wrong types,
numbers that are out of range or not finite, shapes that disagree with each other. `ValueError` is all it
raises; the artifact reader turns it into `CorruptError`.

    {"version": 2, "context": 8192, "kv_budget": 0.4, "head_dim": 64,
     "kld": {"allowed": 0.005, "choose": 0.0041, "report": 0.0043},
     "layers": [{"heads": [{"pattern": "streaming", "params": {"sink": 16, "window": 256},
                            "min_length": 272, "error": 0.03, "mass": 0.97}, ...],
                 "groups": [{"sink": 16, "recent": 256, "min_length": 272,
                             "keys": {"bits": 4, "by": "channel", "rotate": false},
                             "values": {"bits": 4, "by": "token", "rotate": false}}, ...]}],
     "lengths": [{"length": 8192, "kld": 0.0043, "passkey": [20, 20, 20], "needles": [18, 18, 20]}]}

`min_length` L means: the query at position i (counted from 0, padding not counted) uses the pattern when
i + 1 >= L and attends densely otherwise. It is a rule per query, not per call, so that one-shot prefill,
chunked prefill and decoding give the same result.

Patterns of query heads:
- `streaming`: query i sees the keys j < sink and j > i - window.
- `block_sparse`: whole aligned blocks of 128 queries read the key blocks that a prediction says hold
  `threshold` of the attention mass (nstf.runtime.kv_formats has the prediction); partial blocks and decoding
  are dense.

A KV group keeps `sink` first and `recent` last positions, or all when `recent` is 0, in the formats of
nstf.runtime.kv_formats. `lengths` (optional) is what was measured: KLD and, as [dense, planned, asked], how many
passkeys and needles were retrieved.

Version 1 (`evict` instead of formats; patterns that were never run sparsely) is read and turned into version 2.
"""

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass

from nstf.runtime.artifact.header import check_values
from nstf.runtime.kv_formats import BITS, BY, PLAIN, KVFormat

VERSION = 2
MAX_TEXT_BYTES = 64 * 2**20
MAX_LAYERS = 2048
MAX_HEADS = 1024
MAX_LENGTH = 2**26
MAX_PROFILES = 64
STRIDES = (8, 16)

PATTERNS = ("full", "streaming", "block_sparse")
# Patterns of version 1 that no runtime ever ran sparsely: they become full attention.
DROPPED = ("vertical_slash", "block_topk")
FIELDS_1 = (
    "version", "profile_lengths", "queries", "error_bound", "kld_budget", "kld_measured", "kld_covers", "head_dim",
    "layers",
)  # fmt: skip


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

    @property
    def block_sparse(self) -> tuple[float, int, int] | None:
        """(threshold, stride, min_length) when prefill predicts which blocks it reads, else None."""
        if self.pattern != "block_sparse":
            return None
        return float(self.params["threshold"]), int(self.params["stride"]), self.min_length


@dataclass(frozen=True)
class GroupPlan:
    """What is kept of one KV head from `min_length` tokens on, and how it is stored."""

    sink: int
    recent: int
    min_length: int
    keys: KVFormat
    values: KVFormat

    @property
    def evict(self) -> bool:
        """Whether positions are forgotten."""
        return self.recent > 0


@dataclass(frozen=True)
class LayerPlan:
    heads: tuple[HeadPlan, ...]
    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True)
class PlanKLD:
    """Nats per token against dense attention in 16 bits: what was allowed and what was measured, on the
    windows that chose and on windows that chose nothing. None: not measured.
    """

    allowed: float | None
    choose: float | None
    report: float | None


@dataclass(frozen=True)
class LengthResult:
    """What was measured at one context length; passkey and needles are (dense, planned, asked)."""

    length: int
    kld: float | None
    passkey: tuple[int, int, int] | None
    needles: tuple[int, int, int] | None


@dataclass(frozen=True)
class AttentionPlan:
    """The whole plan. context: tokens that it was made for; kv_budget: share of the dense 16-bit cache at
    that length that was asked for, None when no budget was given.
    """

    version: int
    context: int
    kv_budget: float | None
    head_dim: int
    kld: PlanKLD
    layers: tuple[LayerPlan, ...]
    lengths: tuple[LengthResult, ...] = ()

    def to_json(self) -> str:
        """The plan as canonical JSON (sorted keys, no spaces); `parse_plan` gives it back unchanged."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def patterns(self) -> dict[str, int]:
        """How many query heads have each pattern."""
        return dict(Counter(head.pattern for layer in self.layers for head in layer.heads))


def parse_plan(source: str | bytes | dict[str, object]) -> AttentionPlan:
    """A checked plan from JSON text or the decoded dictionary; raises ValueError that names the place."""
    if isinstance(source, str | bytes):
        if len(source) > MAX_TEXT_BYTES:
            raise ValueError(
                f"attention plan: {len(source)} bytes of JSON, at most {MAX_TEXT_BYTES} are read"
            )
        try:
            check_values(source, "its text")
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"attention plan: not valid JSON ({error})") from error
    if not isinstance(source, dict):
        raise ValueError(f"attention plan: {type(source).__name__} instead of an object")
    version = source.get("version")
    if isinstance(version, bool) or version not in (1, VERSION):
        raise ValueError(
            f"attention plan: version {version!r} is not known; this release reads versions 1 and {VERSION}"
        )
    if version == 1:
        source = _from_version_1(source)
    fields = _fields(source, AttentionPlan, "attention plan", optional={"lengths"})
    budget = fields["kv_budget"]
    layers = tuple(
        _layer(layer, f"attention plan: layers[{i}]")
        for i, layer in enumerate(_list(fields["layers"], "layers", 1, MAX_LAYERS))
    )
    return AttentionPlan(
        version=VERSION,
        context=_integer(fields["context"], "attention plan: context", 1, MAX_LENGTH),
        kv_budget=None if budget is None else _number(budget, "attention plan: kv_budget", 0, 1),
        head_dim=_integer(fields["head_dim"], "attention plan: head_dim", 1, 65536),
        kld=_kld(fields["kld"]),
        layers=layers,
        lengths=tuple(
            _length(value, f"attention plan: lengths[{i}]")
            for i, value in enumerate(_list(fields.get("lengths", ()), "lengths", 0, MAX_PROFILES))
        ),
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
    params = fields["params"]
    names = {"streaming": {"sink", "window"}, "block_sparse": {"threshold", "stride"}}.get(pattern, set())
    if not isinstance(params, dict) or set(params) != names:
        raise ValueError(f"{where}: params of {pattern} must be exactly {sorted(names)}")
    checked: dict[str, float] = {}
    if pattern == "streaming":
        checked["sink"] = _integer(params["sink"], f"{where}.params.sink", 0, MAX_LENGTH)
        checked["window"] = _integer(params["window"], f"{where}.params.window", 1, MAX_LENGTH)
    elif pattern == "block_sparse":
        checked["threshold"] = _number(params["threshold"], f"{where}.params.threshold", 1e-6, 1)
        checked["stride"] = _one_of(params["stride"], f"{where}.params.stride", STRIDES)
    return HeadPlan(
        pattern=pattern,
        params=checked,
        min_length=_integer(fields["min_length"], f"{where}.min_length", 0, MAX_LENGTH),
        error=_number(fields["error"], f"{where}.error", 0, 1e6),
        mass=_number(fields["mass"], f"{where}.mass", 0, 1.001),
    )


def _group(value: object, where: str) -> GroupPlan:
    fields = _fields(value, GroupPlan, where)
    return GroupPlan(
        sink=_integer(fields["sink"], f"{where}.sink", 0, MAX_LENGTH),
        recent=_integer(fields["recent"], f"{where}.recent", 0, MAX_LENGTH),
        min_length=_integer(fields["min_length"], f"{where}.min_length", 0, MAX_LENGTH),
        keys=_format(fields["keys"], f"{where}.keys"),
        values=_format(fields["values"], f"{where}.values"),
    )


def _format(value: object, where: str) -> KVFormat:
    fields = _fields(value, KVFormat, where)
    by, rotate = fields["by"], fields["rotate"]
    if not isinstance(by, str) or by not in BY:
        raise ValueError(f"{where}.by: {str(by)[:40]!r} is not one of {', '.join(BY)}")
    if not isinstance(rotate, bool):
        raise ValueError(f"{where}.rotate: {str(rotate)[:40]!r} is not true or false")
    found = KVFormat(_one_of(fields["bits"], f"{where}.bits", BITS), by, rotate)
    if found.bits == 16 and found != PLAIN:
        raise ValueError(f'{where}: 16 bits are stored as they are: by must be "token", rotate false')
    return found


def _kld(value: object) -> PlanKLD:
    fields = _fields(value, PlanKLD, "attention plan: kld")
    return PlanKLD(
        **{
            # Measured KLD of next to nothing may come out below zero by rounding.
            name: None if found is None else _number(found, f"attention plan: kld.{name}", -1, 1e6)
            for name, found in fields.items()
        }
    )


def _length(value: object, where: str) -> LengthResult:
    fields = _fields(value, LengthResult, where)
    counts: dict[str, tuple[int, int, int] | None] = {}
    for name in ("passkey", "needles"):
        found = fields[name]
        if found is None:
            counts[name] = None
            continue
        dense, planned, asked = (
            _integer(n, f"{where}.{name}[{i}]", 0, MAX_LENGTH)
            for i, n in enumerate(_list(found, f"{where}.{name}", 3, 3))
        )
        if max(dense, planned) > asked:
            raise ValueError(f"{where}.{name}: {max(dense, planned)} found of {asked} asked")
        counts[name] = dense, planned, asked
    kld = fields["kld"]
    return LengthResult(
        length=_integer(fields["length"], f"{where}.length", 1, MAX_LENGTH),
        kld=None if kld is None else _number(kld, f"{where}.kld", -1, 1e6),
        passkey=counts["passkey"],
        needles=counts["needles"],
    )


def _from_version_1(source: dict[str, object]) -> dict[str, object]:
    """The same plan in version 2's words; what is left to check is checked there."""
    _exact_keys(source, set(FIELDS_1), "attention plan")
    lengths = [
        _integer(length, f"attention plan: profile_lengths[{i}]", 1, MAX_LENGTH)
        for i, length in enumerate(_list(source["profile_lengths"], "profile_lengths", 1, MAX_PROFILES))
    ]
    layers = []
    for i, layer in enumerate(_list(source["layers"], "layers", 1, MAX_LAYERS)):
        where = f"attention plan: layers[{i}]"
        fields = _fields(layer, LayerPlan, where)
        heads = _list(fields["heads"], f"{where}.heads", 1, MAX_HEADS)
        groups = _list(fields["groups"], f"{where}.groups", 1, MAX_HEADS)
        layers.append(
            {
                "heads": [_head_1(head) for head in heads],
                "groups": [_group_1(g, f"{where}.groups[{n}]") for n, g in enumerate(groups)],
            }
        )
    return {
        "version": VERSION,
        "context": max(lengths),
        "kv_budget": None,
        "head_dim": source["head_dim"],
        "kld": {"allowed": source["kld_budget"], "choose": source["kld_measured"], "report": None},
        "layers": layers,
    }


def _head_1(head: object) -> object:
    if isinstance(head, dict) and head.get("pattern") in DROPPED:
        return {"pattern": "full", "params": {}, "min_length": 0, "error": 0.0, "mass": 1.0}
    return head


def _group_1(group: object, where: str) -> dict[str, object]:
    if not isinstance(group, dict):
        raise ValueError(f"{where}: {type(group).__name__} instead of an object")
    _exact_keys(group, {"evict", "sink", "recent", "min_length"}, where)
    evict = group["evict"]
    if not isinstance(evict, bool):
        raise ValueError(f"{where}.evict: {str(evict)[:40]!r} is not true or false")
    kept = dict.fromkeys(("sink", "recent", "min_length"), 0)
    if evict:
        kept = {
            name: _integer(group[name], f"{where}.{name}", 1 if name == "recent" else 0, MAX_LENGTH)
            for name in kept
        }
    plain = dataclasses.asdict(PLAIN)
    return {**kept, "keys": plain, "values": plain}


def _fields(
    value: object, kind: type, where: str, optional: set[str] | frozenset[str] = frozenset()
) -> dict[str, object]:
    """The dictionary itself when its keys are exactly the dataclass's fields (`optional` ones may be missing)."""
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {type(value).__name__} instead of an object")
    _exact_keys(value, names, where, optional)
    return value


def _exact_keys(
    value: dict[str, object], names: set[str], where: str, optional: set[str] | frozenset[str] = frozenset()
) -> None:
    for problem, keys in (("unknown", set(value) - names), ("missing", names - optional - set(value))):
        if keys:
            raise ValueError(
                f"{where}: {problem} key {str(min(keys, key=str))[:40]!r}; known: {', '.join(sorted(names))}"
            )


def _list(value: object, where: str, low: int, high: int) -> list[object]:
    # Tuples are what `dataclasses.asdict` gives: a plan that never was text is read too.
    if not isinstance(value, list | tuple) or not low <= len(value) <= high:
        what = f"{len(value)} entries" if isinstance(value, list | tuple) else type(value).__name__
        raise ValueError(f"attention plan: {where}: {what} instead of a list of {low} to {high}")
    return list(value)


def _one_of(value: object, where: str, known: tuple[int, ...]) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in known:
        raise ValueError(f"{where}: {str(value)[:40]!r} is not one of {', '.join(map(str, known))}")
    return value


def _integer(value: object, where: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{where}: {str(value)[:40]!r} is not an integer from {low} to {high}")
    return value


def _number(value: object, where: str, low: float, high: float) -> float:
    # The comparison also refuses NaN and infinities, which Python's JSON reader lets through.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{where}: {str(value)[:40]!r} is not a number from {low} to {high}")
    return float(value)
