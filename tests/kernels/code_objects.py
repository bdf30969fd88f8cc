"""The table of code objects in docs/gpu.md, made anew: `python tests/kernels/code_objects.py docs/gpu.md`."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))
import conftest
from test_gates import CASES, shape_of, tree

from nstf.kernels.triton import aot, gates
from nstf.kernels.triton.architecture import ARCHITECTURES, Architecture
from nstf.kernels.triton.code_object import CodeReport
from nstf.kernels.triton.spec import KernelSpec, specs_for

Report = Callable[[KernelSpec, Architecture], CodeReport]
_ROW = re.compile(r"^\| (?P<name>[\w ]+) \|(?P<cells>.*)\|$", re.MULTILINE)


def cell(name: str, row: Architecture, report: Report) -> str:
    """registers / spills / local memory in KiB / waves on a SIMD (/ matrix instructions) (/ vector work a weight) (*)."""
    kind, batch = CASES[name]
    specs = specs_for(tree(kind, conftest), shape_of(name), batch, torch.float16, row.target)
    # Beside it are sums of parts, and activations turned or sliced.
    (spec,) = (s for s in specs if s.kind.removeprefix("corrected_") in gates.READ_WEIGHTS)
    found = report(spec, row)
    expected = gates.expected(spec, row, found)
    spills = found.vector_spills + found.scalar_spills
    parts = [
        str(found.vector_registers),
        str(spills),
        str(found.lds_bytes >> 10),
        f"{found.occupancy.waves_per_simd:.0f}",
    ]
    if found.loop.matrix:
        parts.append(str(found.loop.matrix))
    if expected.weights:
        parts.append(f"{found.vector_per_weight(expected.weights):.1f}")
    return " / ".join(parts) + (" *" if gates.check(spec, found, row) else "")


def table(report: Report) -> dict[str, list[str]]:
    """The cells of each kernel, a target each."""
    return {name: [cell(name, row, report) for row in ARCHITECTURES.values()] for name in CASES}


def written(text: str) -> dict[str, list[str]]:
    """The same as it stands in a page; {} where it was made with another Triton."""
    part = text[text.index("<!-- code objects -->") : text.index("<!-- end -->")]
    if f"Triton {triton.__version__} " not in part:
        return {}
    rows = {found["name"]: found["cells"].split("|") for found in _ROW.finditer(part)}
    return {name: [one.strip() for one in cells] for name, cells in rows.items() if name in CASES}


def main(page: Path) -> None:
    """Writes the rows of the table anew, and the version of Triton."""
    made = table(lambda spec, row: aot.compile_spec(spec, row).report(row.target))
    text = page.read_text(encoding="utf-8")

    def line(found: re.Match[str]) -> str:
        name = found["name"]
        return f"| {name} | {' | '.join(made[name])} |" if name in made else found[0]

    before, rest = text.split("<!-- code objects -->")
    part, after = rest.split("<!-- end -->")
    part = re.sub(r"compiled with Triton \S+ for", f"compiled with Triton {triton.__version__} for", part)
    text = f"{before}<!-- code objects -->{_ROW.sub(line, part)}<!-- end -->{after}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
