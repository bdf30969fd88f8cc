"""Machine files: what is read is what is written, and every mistake is one line that names its place."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from nstf.errors import UsageError
from nstf_convert.place.machine import EXAMPLES, examples, from_json, read_machine

GOOD: dict[str, Any] = {
    "nstf_machine": 1,
    "name": "pair",
    "devices": [
        {"name": "gpu", "count": 2, "kind": "sm_90", "memory_bytes": 1e9, "bandwidth": 1e12, "rates": {"int8": 1e14}}
    ],
    "links": [{"mesh": "gpu*", "bandwidth": 1e10, "latency_s": 1e-6}],
    "collectives": {"measured": {"2": [[1024, 1e-5], [4096, 2e-5]]}},
}  # fmt: skip


@pytest.mark.parametrize("name", examples())
def test_examples_are_read_and_every_figure_has_a_source(name: str) -> None:
    machine = read_machine(name)
    assert from_json(machine.to_json()) == machine
    assert from_json(json.loads(json.dumps(machine.to_json()))) == machine
    for one in (*machine.devices, *machine.links):
        assert len(one.source) > 5, one


def test_the_examples_that_the_documentation_names_are_there() -> None:
    wanted = {"h200x1", "h200x2", "h100x8", "mi300x8", "h100x16", "rtx4090x4", "cpu-2-cores"}
    assert wanted == set(examples()) == {p.stem for p in EXAMPLES.iterdir()}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nstf_machine",), 2, 'must be an object with "nstf_machine": 1'),
        (("device",), [], "unknown key 'device'; did you mean 'devices'?"),
        (("devices",), {}, "'devices' must be a list"),
        (("devices",), [], "0 devices: give 1 to 4096"),
        (("devices", 0, "memory_bytes"), -1, r"devices\[0\]: 'memory_bytes' is -1: it must be above 0"),
        (("devices", 0, "memory_bytes"), True, "'memory_bytes' must be a number"),
        (
            ("devices", 0, "bandwidth"),
            float("nan"),
            "'bandwidth' must be a number, 0 or from 1e-30 to 1e.30, not 'nan'",
        ),
        (("devices", 0, "bandwidth"), 5e-324, "'bandwidth' must be a number, 0 or from 1e-30"),
        (("devices", 0, "bandwidth_share"), 1.5, "'bandwidth_share' is 1.5: it must be above 0, at most 1"),
        (("devices", 0, "count"), 1.5, "'count' is 1.5: it must be whole"),
        (("devices", 0, "rates"), {}, '"rates" must be operations per second by dtype'),
        (
            ("devices", 0, "rates"),
            {str(i): 1 for i in range(65)},
            '"rates" may have 64 dtypes, and names of 1024',
        ),
        (("devices", 0, "rates"), {"x" * 1025: 1}, '"rates" may have 64 dtypes, and names of 1024 letters'),
        (("devices", 0, "kind"), 3, "'kind' must be a text"),
        (("devices", 0, "bandwith"), 1e12, "unknown key 'bandwith'; did you mean 'bandwidth'?"),
        (("devices", 0, "name"), "", "the name is empty"),
        (("devices", 0, "name"), "x" * 1025, "'name' has 1025 letters, more than 1024"),
        (("x" * 1_000_000,), 1, "unknown key 'x{40}'; known are"),
        (("links",), [], "no links lead from 'gpu0' to 'gpu1'"),
        (("links", 0, "mesh"), "tpu*", r"links\[0\]: no device is called 'tpu\*'"),
        (("links", 0, "from"), "gpu0", 'give either "mesh", or "from" and "to"'),
        (("links", 0, "duplex"), "both", "duplex 'both': write full or half"),
        (("collectives", "algorithms"), ["star"], "algorithms: a list of some of ring"),
        (("collectives", "measured"), {"2": [[1, 1]]}, r"measured\['2'\]: two or more"),
        (("collectives", "measured"), {"²": [[1, 1], [2, 2]]}, "two or more"),
        (("collectives", "measured"), {"٢": [[1, 1], [2, 2]]}, "two or more"),
        (("collectives", "measured"), {"9" * 5000: [[1, 1], [2, 2]]}, r"measured\['9{20}'\]: two or more"),
        (
            ("collectives", "measured"),
            {"2": [[1024, 1e-5], [4096, 1e-5], [1024, 2e-5]]},
            r"measured\['2'\]: 1024 bytes are there twice: keep one of the two",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = copy.deepcopy(GOOD)
    at: Any = data
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(UsageError, match=message) as error:
        from_json(data, "m.json")
    assert str(error.value).startswith("m.json") and "\n" not in str(error.value)


def test_what_is_missing_is_named() -> None:
    data = copy.deepcopy(GOOD)
    del data["devices"][0]["bandwidth"]
    with pytest.raises(UsageError, match=r"devices\[0\]: 'bandwidth' is missing"):
        from_json(data)


def test_devices_of_one_name_are_refused() -> None:
    data = copy.deepcopy(GOOD)
    data["devices"].append(data["devices"][0] | {"name": "gpu1"})
    del data["devices"][1]["count"]
    with pytest.raises(UsageError, match="two devices are called 'gpu1'"):
        from_json(data)


def test_a_file_that_is_not_there_names_the_examples(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file, and no example; there are cpu-2-cores"):
        read_machine(str(tmp_path / "no.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        read_machine(str(tmp_path / "bad.json"))


def test_links_by_patterns_are_not_too_many_for_the_names() -> None:
    """Each is held against every name: 91 KB of them, which made no link, took 95 s."""
    data = copy.deepcopy(GOOD)
    data["devices"] = [{**data["devices"][0], "name": "a" * 1000, "count": 2000}]
    link = {**data["links"][0], "mesh": "a*"}
    data["links"] = [link, *({**link, "mesh": "*a1"} for _ in range(300))]
    with pytest.raises(UsageError, match="301 links by patterns are too many for names of this length"):
        from_json(data, "m.json")
    # A hundred hosts, each a mesh of its own.
    data["devices"] = [{**data["devices"][0], "name": f"h{host}.", "count": 8} for host in range(100)]
    data["links"] = [{**link, "mesh": f"h{host}.*"} for host in range(100)] + [{**link, "mesh": "h*.0"}]
    assert len(from_json(data, "m.json").links) == 100 * 28 + 100 * 99 // 2
