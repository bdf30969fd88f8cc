"""The machine as a graph: devices with memory, bandwidth and arithmetic, and the links between them.

A machine file is JSON:

    {"nstf_machine": 1, "name": "2 x H200",
     "devices": [{"name": "gpu", "count": 2, "kind": "sm_90", "memory_bytes": 141e9, "bandwidth": 4.8e12,
                  "bandwidth_share": 0.85, "rates": {"bfloat16": 989e12}, "rate_share": 0.76, "source": "..."}],
     "links": [{"from": "gpu*", "to": "nvswitch", "bandwidth": 450e9, "share": 0.8, "latency_s": 1e-6, "source": "..."}],
     "collectives": {"start_s": 5e-6, "algorithms": ["ring", "tree", "direct"]}}

`count` numbers the devices: gpu0, gpu1. A link joins devices or switches; a switch is any name that is no device. "from"
may be a pattern, "mesh" joins all pairs of its devices. Bandwidths are bytes a second in one direction, both directions at a
time unless "duplex" is "half". Shares are what programs reach of a data sheet's figure; measured figures have a share of 1.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from nstf.errors import UsageError
from nstf.runtime.artifact.header import check_values
from nstf_convert.checkpoint.paths import exists, read_given

VERSION = 1
MOST_DEVICES = 4096
# A mesh of 512 devices has half as many.
MOST_LINKS = 1 << 18
# Letters of all names, a short one for 32, times links by patterns, each of which is held against every name.
MOST_MATCHED = 1 << 29
MOST_BYTES = 1 << 24
# Of a name or a note, of which every device and link has its own.
MOST_LETTERS = 1024
# Of the dtypes that a device has a rate for, which each of its kind has.
MOST_RATES = 64
# Of a number, whatever it counts: no machine has a bandwidth of 1e-30 or 1e30.
LEAST, MOST = 1e-30, 1e30
EXAMPLES = Path(__file__).parent / "machines"
ALGORITHMS = ("ring", "tree", "direct", "hierarchical")


@dataclass(frozen=True)
class Device:
    """One device. kind: a target of `nstf compile`, `cpu`, `avx2`, `avx512`, `neon`, or any word for another.

    bandwidth: bytes per second of its memory; rates: operations per second by dtype (a multiply-add is two); vector_rate:
    lane instructions per second, which decode weights; launch_s: what starting a kernel takes; together: the share of its
    bandwidth that is left while all devices of its host work; cost_per_hour: in any unit.
    """

    name: str
    kind: str
    memory_bytes: float
    bandwidth: float
    rates: Mapping[str, float]
    bandwidth_share: float = 1.0
    rate_share: float = 1.0
    vector_rate: float = 0.0
    launch_s: float = 3e-6
    reserved_bytes: float = 0.0
    together: float = 1.0
    cost_per_hour: float = 1.0
    host: int = 0
    numa: int = 0
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.kind in ("cpu", "avx2", "avx512", "neon")

    @property
    def read_rate(self) -> float:
        """Bytes a second that a kernel reads."""
        return self.bandwidth * self.bandwidth_share

    def matrix_rate(self, dtype: str = "bfloat16") -> float:
        """Operations a second that a kernel reaches on operands of a dtype; the slowest stated one where it is not."""
        stated = self.rates.get(dtype) or self.rates.get("float16") or min(self.rates.values())
        return stated * self.rate_share

    @cached_property
    def like(self) -> tuple[Any, ...]:
        """What makes two devices the same, place apart."""
        plain = asdict(self)
        return tuple(
            tuple(sorted(v.items())) if isinstance(v, Mapping) else v
            for k, v in plain.items()
            if k not in ("name", "host", "numa", "source")
        )


@dataclass(frozen=True)
class Link:
    """An edge: `a` and `b` name devices or switches. bandwidth: bytes per second in a direction."""

    a: str
    b: str
    bandwidth: float
    latency_s: float
    share: float = 1.0
    duplex: str = "full"
    kind: str = ""
    source: str = ""

    @property
    def rate(self) -> float:
        """Bytes a second that transfers reach."""
        return self.bandwidth * self.share


@dataclass(frozen=True)
class Collectives:
    """start_s: what any collective call takes beside its transfers. algorithms: those that the library has.

    measured: by number of ranks, (bytes, seconds) of an all-reduce on this machine, sizes ascending.
    """

    start_s: float = 0.0
    algorithms: tuple[str, ...] = ALGORITHMS
    measured: Mapping[int, tuple[tuple[float, float], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """name, devices in the order of their numbers, links, collectives. note: how sure its figures are, in words."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    collectives: Collectives = Collectives()
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        found = asdict(self.collectives)
        found["algorithms"] = list(self.collectives.algorithms)
        found["measured"] = {str(n): [list(p) for p in c] for n, c in self.collectives.measured.items()}
        links = [asdict(link) for link in self.links]
        for link in links:
            link["from"], link["to"] = link.pop("a"), link.pop("b")
        return {
            "nstf_machine": VERSION,
            "name": self.name,
            "note": self.note,
            "devices": [asdict(d) | {"rates": dict(d.rates)} for d in self.devices],
            "links": links,
            "collectives": found,
        }


def examples() -> list[str]:
    """The names of the machines that come with the package."""
    return sorted(p.stem for p in EXAMPLES.glob("*.json"))


def read_machine(name: str) -> Machine:
    """The machine of a file, or an example by its name. Raises UsageError that says what is wrong and where."""
    path = Path(name)
    if not exists(path):
        if name not in examples():
            raise UsageError(
                f"the machine {name[:80]!r}: no such file, and no example; there are {', '.join(examples())}"
            )
        path = EXAMPLES / f"{name}.json"
    raw = read_given(path, MOST_BYTES, "the machine file")
    try:
        check_values(raw, "it")
        found = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON that can be read ({str(error)[:80]})") from error
    return from_json(found, str(path))


def is_machine(path: Path) -> bool:
    """Whether a file is a machine's, of this version or another, or empty. Raises UsageError where it cannot be read."""
    raw = read_given(path, MOST_BYTES, "the machine file")
    try:
        check_values(raw, "it")
        found = json.loads(raw.decode("utf-8-sig")) if raw else {"nstf_machine": VERSION}
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "nstf_machine" in found


def from_json(data: Any, where: str = "machine") -> Machine:
    """The machine that parsed JSON describes. Raises UsageError that names the entry."""
    if not isinstance(data, Mapping) or data.get("nstf_machine") != VERSION:
        raise UsageError(f'{where}: no machine file: it must be an object with "nstf_machine": {VERSION}')
    _known(data, ("nstf_machine", "name", "note", "devices", "links", "collectives"), where)
    devices: list[Device] = []
    for i, entry in enumerate(_list(data, "devices", where)):
        devices += _devices(entry, f"{where}: devices[{i}]", MOST_DEVICES - len(devices))
    names = [d.name for d in devices]
    if not devices:
        raise UsageError(f"{where}: 0 devices: give 1 to {MOST_DEVICES}")
    twice = next((n for n in names if names.count(n) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise UsageError(f"{where}: two devices are called {twice!r}")
    links: list[Link] = []
    stated = _list(data, "links", where, optional=True)
    patterns = sum(map(_is_pattern, stated))
    if patterns * sum(max(32, len(name)) for name in names) > MOST_MATCHED:
        raise UsageError(
            f"{where}: {patterns} links by patterns are too many for names of this length: join more devices by each, or "
            "give them shorter names"
        )
    for i, entry in enumerate(stated):
        links += _links(entry, names, f"{where}: links[{i}]", MOST_LINKS - len(links))
    machine = Machine(
        _text(data, "name", where) or where, tuple(devices), tuple(links),
        _collectives(data.get("collectives", {}), f"{where}: collectives"), _text(data, "note", where),
    )  # fmt: skip
    _check_joined(machine, where)
    return machine


def _devices(entry: Any, where: str, room: int) -> list[Device]:
    """room: how many more there may be."""
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where}: not an object")
    _known(entry, [f.name for f in fields(Device)] + ["count"], where)
    values: dict[str, Any] = {}
    for one in fields(Device):
        if one.name not in entry:
            if one.default is MISSING:
                raise UsageError(f"{where}: {one.name!r} is missing")
        elif one.name in ("name", "kind", "source"):
            values[one.name] = _text(entry, one.name, where)
        elif one.name == "rates":
            values["rates"] = _rates(entry["rates"], where)
        elif one.name in ("host", "numa"):
            values[one.name] = int(_number(entry, one.name, where, least=0.0, whole=True))
        elif one.name.endswith("share") or one.name == "together":
            values[one.name] = _number(entry, one.name, where, most=1.0)
        else:
            zero = one.name in ("vector_rate", "reserved_bytes", "launch_s", "cost_per_hour")
            values[one.name] = _number(entry, one.name, where, least=0.0 if zero else None)
    if not values["name"]:
        raise UsageError(f"{where}: the name is empty")
    count = 1
    if "count" in entry:
        count = int(_number(entry, "count", where, least=1.0, most=MOST_DEVICES, whole=True))
    if count > room:
        raise UsageError(f"{where}: more than {MOST_DEVICES} devices in all")
    if "count" not in entry:
        return [Device(**values)]
    return [Device(**values | {"name": f"{values['name']}{i}"}) for i in range(count)]


def _is_pattern(entry: Any) -> bool:
    """Whether an entry of links is held against all names."""
    return isinstance(entry, Mapping) and (
        "mesh" in entry or "*" in str(entry.get("from", ""))[:MOST_LETTERS]
    )


def _links(entry: Any, names: list[str], where: str, room: int) -> list[Link]:
    """room: how many more there may be."""
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where}: not an object")
    _known(
        entry, ("from", "to", "mesh", "bandwidth", "latency_s", "share", "duplex", "kind", "source"), where
    )
    duplex = _text(entry, "duplex", where) or "full"
    if duplex not in ("full", "half"):
        raise UsageError(f"{where}: duplex {duplex[:20]!r}: write full or half")
    rest = (
        _number(entry, "bandwidth", where), _number(entry, "latency_s", where, least=0.0),
        _number(entry, "share", where, most=1.0) if "share" in entry else 1.0, duplex, _text(entry, "kind", where),
        _text(entry, "source", where),
    )  # fmt: skip
    if ("mesh" in entry) == ("from" in entry or "to" in entry):
        raise UsageError(f'{where}: give either "mesh", or "from" and "to"')
    if "mesh" in entry:
        joined = _matching(_text(entry, "mesh", where), names, where)
        _check_room(len(joined) * (len(joined) - 1) // 2, room, where)
        return [Link(a, b, *rest) for i, a in enumerate(joined) for b in joined[i + 1 :]]
    source, target = _text(entry, "from", where), _text(entry, "to", where)
    if not source or not target:
        raise UsageError(f'{where}: "from" and "to" must both be names')
    ends = _matching(source, names, where) if "*" in source else [source]
    _check_room(len(ends), room, where)
    if "*" in target:
        raise UsageError(f'{where}: only "from" and "mesh" take patterns')
    return [Link(a, target, *rest) for a in ends if a != target]


def _check_room(count: int, room: int, where: str) -> None:
    if count > room:
        raise UsageError(f"{where}: more than {MOST_LINKS} links in all; join the devices through a switch")


def _matching(pattern: str, names: list[str], where: str) -> list[str]:
    found = [n for n in names if fnmatch.fnmatchcase(n, pattern)]
    if not found:
        raise UsageError(f"{where}: no device is called {pattern[:40]!r}")
    return found


def _collectives(entry: Any, where: str) -> Collectives:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where}: not an object")
    _known(entry, ("start_s", "algorithms", "measured"), where)
    named = entry.get("algorithms", list(ALGORITHMS))
    if not isinstance(named, list) or not named or any(a not in ALGORITHMS for a in named):
        raise UsageError(f"{where}: algorithms: a list of some of {', '.join(ALGORITHMS)}")
    curves: dict[int, tuple[tuple[float, float], ...]] = {}
    stated = entry.get("measured", {})
    if not isinstance(stated, Mapping):
        raise UsageError(f"{where}: measured: an object, lists of [bytes, seconds] by number of ranks")
    for ranks, points in stated.items():
        # isdigit is also true of ², and Python makes no number of thousands of digits.
        text = str(ranks)
        number = text.isascii() and text.isdigit() and len(text) <= len(str(MOST_DEVICES))
        good = number and isinstance(points, list) and len(points) > 1
        if not good or not all(
            isinstance(p, list) and len(p) == 2 and all(map(_positive, p)) for p in points
        ):
            raise UsageError(f"{where}: measured[{text[:20]!r}]: two or more [bytes, seconds]")
        curve = tuple(sorted((float(b), float(s)) for b, s in points))
        twice = next((b for (b, _), (after, _) in pairwise(curve) if b == after), None)
        if twice is not None:
            raise UsageError(
                f"{where}: measured[{text[:20]!r}]: {twice:g} bytes are there twice: keep one of the two"
            )
        curves[int(ranks)] = curve
    start = _number(entry, "start_s", where, least=0.0) if "start_s" in entry else 0.0
    return Collectives(start, tuple(named), curves)


def _check_joined(machine: Machine, where: str) -> None:
    """Raises UsageError where a device reaches no other: a missing link would look like a slow plan."""
    near: dict[str, set[str]] = {d.name: set() for d in machine.devices}
    for link in machine.links:
        near.setdefault(link.a, set()).add(link.b)
        near.setdefault(link.b, set()).add(link.a)
    seen, todo = set(), [machine.devices[0].name]
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            todo += near[at]
    apart = next((d.name for d in machine.devices if d.name not in seen), None)
    if apart is not None:
        raise UsageError(f"{where}: no links lead from {machine.devices[0].name!r} to {apart!r}")


def _known(entry: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    known = list(names)
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key)[:40], known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise UsageError(f"{where}: unknown key {str(key)[:40]!r}; {hint}")


def _list(data: Mapping[str, Any], key: str, where: str, optional: bool = False) -> list[Any]:
    found = data.get(key, [] if optional else None)
    if not isinstance(found, list):
        raise UsageError(f"{where}: {key!r} must be a list")
    return found


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    found = entry.get(key, "")
    if not isinstance(found, str):
        raise UsageError(f"{where}: {key!r} must be a text")
    if len(found) > MOST_LETTERS:
        raise UsageError(f"{where}: {key!r} has {len(found)} letters, more than {MOST_LETTERS}")
    return found


def _rates(found: Any, where: str) -> dict[str, float]:
    if not isinstance(found, Mapping) or not found or not all(map(_positive, found.values())):
        raise UsageError(
            f'{where}: "rates" must be operations per second by dtype, such as {{"bfloat16": 989e12}}'
        )
    if len(found) > MOST_RATES or max(map(len, map(str, found))) > MOST_LETTERS:
        raise UsageError(
            f'{where}: "rates" may have {MOST_RATES} dtypes, and names of {MOST_LETTERS} letters, at most'
        )
    return {str(k): float(v) for k, v in found.items()}


def _positive(value: Any) -> bool:
    return _finite(value) and value > 0


def _finite(value: Any) -> bool:
    """Whether it is a number whose products and quotients with other ones a float can hold, in whatever unit."""
    return type(value) in (int, float) and (value == 0 or LEAST <= abs(value) <= MOST)


def _number(
    entry: Mapping[str, Any],
    key: str,
    where: str,
    least: float | None = None,
    most: float = math.inf,
    whole: bool = False,
) -> float:
    """A number of an entry within LEAST and MOST: positive, or at least `least`."""
    found = entry.get(key)
    if not isinstance(found, int | float) or not _finite(found):
        sizes = f", 0 or from {LEAST:g} to {MOST:g}" if type(found) in (int, float) else ""
        raise UsageError(f"{where}: {key!r} must be a number{sizes}, not {str(found)[:40]!r}")
    if (found <= 0 if least is None else found < least) or found > most or (whole and found != int(found)):
        low = "above 0" if least is None else f"at least {least:g}"
        high = "" if most == math.inf else f", at most {most:g}"
        raise UsageError(f"{where}: {key!r} is {found:g}: it must be {'whole, ' if whole else ''}{low}{high}")
    return float(found)
