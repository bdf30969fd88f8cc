"""Gates as JUnit XML, the form every CI system shows: one test case a gate, a failure with the figures."""

import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nstf.runtime.artifact.atomic_file import write_whole
from nstf_convert.gates.evaluate import Check


def junit_xml(
    suite: str,
    checks: Sequence[Check],
    measured: Mapping[str, Any],
    seconds: float,
    told: Callable[[str], str] = str,
) -> str:
    """The document. measured: figures by name, kept as properties; without gates there is one case. told: what
    a gate's message becomes, in the words of who reads it."""
    failures = sum(not c.passed for c in checks)
    counts = {"tests": str(max(1, len(checks))), "failures": str(failures), "errors": "0", "skipped": "0"}
    root = ET.Element("testsuites", counts | {"name": "nstf eval", "time": f"{seconds:.3f}"})
    node = ET.SubElement(root, "testsuite", counts | {"name": _legal(suite), "time": f"{seconds:.3f}"})
    properties = ET.SubElement(node, "properties")
    for name, value in measured.items():
        ET.SubElement(properties, "property", {"name": _legal(name), "value": _legal(value)})
    for entry in checks:
        case = ET.SubElement(
            node, "testcase", {"classname": "nstf.gates", "name": entry.gate.replace("_", "-"), "time": "0"}
        )
        if not entry.passed:
            failure = ET.SubElement(
                case, "failure", {"type": "GateFailed", "message": _legal(told(entry.message()))}
            )
            failure.text = _legal(f"value {entry.value!r}\nbound {entry.bound!r}")
        else:
            ET.SubElement(case, "system-out").text = _legal(told(entry.message()))
    if not checks:
        ET.SubElement(node, "testcase", {"classname": "nstf.gates", "name": "measured", "time": "0"})
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def write_junit(path: Path, document: str) -> None:
    """Writes the document; a reader never sees half of it."""
    write_whole(path, document.encode())


def _legal(value: object) -> str:
    """`value` as text, without the characters XML 1.0 cannot hold (a file's name may have them)."""
    return "".join(c if c in "\t\n" or c.isprintable() else "\ufffd" for c in str(value))
