"""Errors of the library name options by their fields; the command line says them in its own words."""

import ast
import re
from pathlib import Path

import pytest

from nstf_convert.cli.schema import FIELDS, with_flags

LIBRARY = (
    "pipeline",
    "planner",
    "speed",
    "checkpoint",
    "export",
    "options.py",
    "budget.py",
    "dataset.py",
    "streamed.py",
    "gates",
    "../integrations",
    "../runtime",
    "../kernels",
    "../analyzers",
    "../decomposers",
    "../quantizers",
)
ROOT = Path(__file__).parents[3] / "nstf_convert"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def _texts(path: Path) -> set[str]:
    """The strings of a module that name a flag; not docstrings, nor the fields of options, from which flags are made."""
    tree, left_out = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "option"
        if called or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            left_out |= {id(part) for part in ast.walk(node)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out
        if FLAG.search(node.value)
    }


@pytest.mark.parametrize("part", LIBRARY)
def test_the_library_names_no_flags(part: str) -> None:
    folder = ROOT / part
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    found = {f"{f.name}: {text}" for f in files for text in _texts(f)}
    allowed = (
        "Single switches",
        "| `--formats`",
        "llama-gguf-split",
        "`nstf ",  # whole commands
        "`torchrun ",
        "--context ",
        "lossy: rounded",
    )
    assert not {text for text in found if not any(word in text for word in allowed)}


def test_an_error_is_told_with_flags() -> None:
    said = "`kv_budget` and `datasets` need `engine`: leave `attention_plan=False`, `restart` or `other` out"
    told = "--kv-budget and --dataset need --for: leave --no-attention-plan, --restart or `other` out"
    assert with_flags(said) == told
    assert with_flags("run `nstf calibrate m --context 256`") == "run `nstf calibrate m --context 256`"


def test_an_error_of_an_export_is_told_with_flags() -> None:
    said = "`allow_loss` writes them so, `dtype` float32 keeps them; allow `overwrite`, or give `source`"
    told = "--allow-loss writes them so, --dtype float32 keeps them; allow --overwrite, or give --source"
    assert with_flags(said) == told


def test_every_flag_of_a_field_is_one_that_its_command_has() -> None:
    named = {name: with_flags(f"`{name}`") for name in FIELDS}
    assert all(re.fullmatch(r"--[a-z-]+", flag) for flag in named.values())
    assert (named["search_minutes"], named["force"], named["min_speed"]) == (
        "--search-time",
        "--force",
        "--min-speed",
    )
