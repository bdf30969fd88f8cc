"""What a type checker tells a user of the package."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from nstf_convert.keywords import ConvertKeywords
from nstf_convert.options import ConvertOptions

ROOT = Path(__file__).parent.parent

RIGHT = """
import nstf
from nstf.errors import BudgetError

try:
    result = nstf.convert("./model", budget=0.5, dataset=["a.txt"], effort="fast", output="m.nstf")
except BudgetError as error:
    reveal_type(error.smallest_bytes)
reveal_type(result)
reveal_type(result.size_bytes)
with nstf.open("m.nstf", verify=True) as file:
    reveal_type(file)
    reveal_type(file.tensors["a"].bits_per_weight)
    reveal_type(file.tensors["a"].shape)
    reveal_type(file.decode("a"))
model = nstf.runtime.load("m.nstf", device="cuda")
reveal_type(model)
model.generate()
"""
REVEALED = ["int", "ConvertResult", "int", "File", "float", "tuple[int, ...]", "Tensor", "PreTrainedModel"]
WRONG = """
import nstf

nstf.convert("./model", budgit=0.5)
nstf.convert("./model", budget="half")
nstf.open(3)
nstf.open("m.nstf").weights
nstf.runtime.load("m.nstf").generated
nstf.lood("m.nstf")
"""
# As much of both as the snippets see. torch's own annotations take half a minute to read.
STUBS = {
    "transformers": "class PreTrainedModel:\n    def generate(self, *a: object, **k: object) -> object: ...\n",
    "torch": "class Tensor: ...\nclass dtype: ...\nclass device: ...\n",
}


def check(folder: Path, files: dict[str, str], path: list[Path], *flags: str) -> str:
    """What mypy says about a user's files, with `path` before what is installed."""
    for name, code in files.items():
        (folder / name).write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--namespace-packages",
               "--explicit-package-bases", "--cache-dir", str(folder / "cache"), *flags, *files]  # fmt: skip
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says about both snippets, with the stubs."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    folder = tmp_path_factory.mktemp("user")
    for name, text in STUBS.items():
        (folder / "stubs" / name).mkdir(parents=True)
        (folder / "stubs" / name / "__init__.pyi").write_text(text)
    paths = [folder / "stubs", ROOT / "typings", ROOT]
    # The stubs alone: mypy would look for their submodules in the installed packages, and read thousands of files.
    return check(folder, {"right.py": RIGHT, "wrong.py": WRONG}, paths, "--no-site-packages")


def revealed(said: str) -> list[str]:
    """The revealed types without their modules."""
    found = re.findall(r'Revealed type is "(.*)"', said)
    return [re.sub(r"[\w.]+\.(\w+)", r"\1", text).replace("builtins.", "") for text in found]


def test_a_users_snippet_has_the_types_that_the_documentation_says(said: str) -> None:
    assert "right.py" in said and not re.search(r"right\.py:\d+: error", said), said
    assert revealed(said) == REVEALED


def test_a_users_mistakes_are_found_before_anything_runs(said: str) -> None:
    lines = {int(number) for number in re.findall(r"wrong\.py:(\d+): error", said)}
    assert lines == {4, 5, 6, 7, 8, 9}, said


@pytest.mark.slow
def test_the_same_with_the_annotations_of_torch_and_transformers(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    code = RIGHT.replace("model.generate()\n", "")
    said = check(tmp_path, {"right.py": code}, [ROOT / "typings", ROOT])
    assert "error" not in said, said
    assert revealed(said) == REVEALED


def test_the_keywords_of_convert_are_the_fields_of_its_options() -> None:
    positional = {"model", "output", "budget", "datasets"}
    assert set(ConvertKeywords.__annotations__) == {f.name for f in fields(ConvertOptions)} - positional
