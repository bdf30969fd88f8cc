"""Imports follow the data: a folder may import only the folders named after it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
# nstf.errors may be imported by all, nstf.proposals by what proposes and what it is told; a folder always by itself.
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "runtime": {"kernels"},
    "integrations": {"runtime", "kernels"},
    "quantizers": {"kernels", "proposals"},
    "decomposers": {"kernels", "proposals"},
    "analyzers": {"kernels", "proposals"},
}


def imported(file: Path) -> set[str]:
    """The x of every `nstf.x` a file imports, and `nstf_convert` if it imports that."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {p[1] for p in parts if p[0] == "nstf" and len(p) > 1} | {
        p[0] for p in parts if p[0] == "nstf_convert"
    }


def test_a_folder_imports_only_what_lies_below_it() -> None:
    wrong = []
    for folder, allowed in MAY_IMPORT.items():
        files = sorted((ROOT / folder).rglob("*.py"))
        assert files, folder
        for file in files:
            extra = imported(file) - allowed - {folder, "errors"}
            wrong += [f"{file.relative_to(ROOT)} imports {name}" for name in sorted(extra)]
    assert wrong == []


def test_the_kernels_folder_is_a_namespace() -> None:
    # With an __init__.py it would hide the `kernels` package that transformers imports.
    assert not (ROOT / "kernels" / "__init__.py").exists()
