"""What a stranger installs: the packages, the command, the pins, and a wheel with and without a compiler."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import nstf

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PARTS = ("analyzers", "decomposers", "integrations", "kernels", "quantizers", "runtime")


def pins() -> dict[str, str]:
    lines = (
        line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    )
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines if line)}


def direct_requirements() -> list[Requirement]:
    project = PROJECT["project"]
    texts = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        texts += extra
    return [r for r in map(Requirement, texts) if r.name != project["name"]]


def test_every_import_name_has_its_folder_and_no_other_is_packaged() -> None:
    packages = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    expected = {"nstf_convert": "nstf_convert", "nstf": "nstf_convert/nstf"}
    assert packages == expected | {f"nstf/{part}": part for part in PARTS}
    for folder in packages.values():
        assert (ROOT / folder).is_dir()


def test_no_folder_of_the_repository_shadows_an_installed_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow Hugging Face's kernels package"
    assert not (ROOT / "nstf").exists(), "it would shadow the installed nstf package"


def test_both_packages_are_marked_as_typed() -> None:
    assert (ROOT / "nstf_convert" / "py.typed").is_file()
    assert (ROOT / "nstf_convert" / "nstf" / "py.typed").is_file()


def test_type_checkers_see_every_part_and_module_of_nstf() -> None:
    seen = {entry.name for entry in (ROOT / "typings" / "nstf").iterdir() if entry.resolve().exists()}
    modules = {file.name for file in (ROOT / "nstf_convert" / "nstf").glob("*.py")}
    assert seen == modules | set(PARTS)


def test_the_nstf_command_is_an_entry_point() -> None:
    found = [e for e in entry_points(group="console_scripts") if e.name == "nstf"]
    assert [e.value for e in found] == ["nstf_convert.cli:main"]
    assert callable(found[0].load())


def test_the_classifiers_name_the_pythons_that_the_project_allows() -> None:
    from packaging.specifiers import SpecifierSet

    allowed = SpecifierSet(PROJECT["project"]["requires-python"])
    named = {c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert named == {f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed} != set()
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    assert set(re.findall(r'"(3\.\d+)"', workflow)) == named
    built = PROJECT["tool"]["cibuildwheel"]["build"]
    assert {f"3.{name[3:5]}" for name in built} == named


def test_the_workflow_that_publishes_names_the_repository_in_the_metadata(tmp_path: Path) -> None:
    copy = tmp_path / "pyproject.toml"
    shutil.copy(ROOT / "pyproject.toml", copy)
    command = [sys.executable, str(ROOT / ".github" / "add_urls.py"), str(copy), "https://host/owner/name/"]
    assert subprocess.run(command).returncode == 0
    changed = tomllib.loads(copy.read_text("utf-8"))
    urls = changed["project"].pop("urls")
    assert changed == PROJECT and urls["Source"] == "https://host/owner/name"
    for name in ("Documentation", "Changelog"):
        assert (ROOT / urls[name].partition("/blob/main/")[2]).is_file()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode != 0 and "already" in again.stderr


def test_what_a_wheel_has_to_do_it_does_here() -> None:
    from nstf.kernels.cpu import AVAILABLE

    if not AVAILABLE:
        pytest.skip("the extension was not built")
    done = subprocess.run(
        [sys.executable, str(ROOT / ".github" / "wheel_test.py")], capture_output=True, text=True
    )
    assert done.returncode == 0 and "works on Python" in done.stdout, done.stderr


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["project"]["version"] == nstf.__version__
    headings = re.findall(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert nstf.__version__ in headings[:2], "the changelog's newest heading is neither it nor [Unreleased]"


def test_every_direct_dependency_is_pinned_to_a_version_the_project_allows() -> None:
    tested = pins()
    for requirement in direct_requirements():
        name = requirement.name.lower()
        assert name in tested, f"{name} has no line in constraints.txt"
        assert requirement.specifier.contains(tested[name]), f"{requirement} excludes {tested[name]}"


def test_the_command_names_its_version_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nstf_convert", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"nstf {nstf.__version__}\n")


def copy_of_sources(target: Path) -> Path:
    left_out = (
        ".*",
        "build",
        "dist",
        "demo",
        "out",
        "examples",
        "tests",
        "benchmarks",
        "__pycache__",
        "*.so",
    )
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
    return target


def build_wheel(tmp_path: Path, **environment: str) -> Path:

    source = copy_of_sources(tmp_path / "source")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path / "wheels"), "."]
    done = subprocess.run(
        command, cwd=source, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = (tmp_path / "wheels").glob("nstf-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A virtual environment with the wheel, dependencies borrowed from this one; returns its bin folder."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    tools = folder / "bin"
    subprocess.run([tools / "python", "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run(
        [tools / "python", "-c", query], check=True, capture_output=True, text=True
    ).stdout.strip()
    # A plain path line: the .pth files of the borrowed folder, an editable nstf among them, are not run.
    (Path(own) / "zz_borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return tools


CHECK = """
import nstf, nstf.kernels.cpu, nstf.runtime, nstf_convert
from nstf import analyzers, decomposers, quantizers
assert "{folder}" in nstf.__file__ and "{folder}" in nstf_convert.__file__, nstf.__file__
assert nstf.kernels.cpu.AVAILABLE is {compiled}, nstf.kernels.cpu.AVAILABLE
assert len(quantizers.METHODS) >= 4 and len(decomposers.METHODS) >= 4
import torch
from nstf.kernels.linear import linear
from nstf.kernels.formats import decode
from nstf.quantizers import int_grid
w, x = torch.randn(64, 64), torch.randn(1, 64)
e = int_grid.encode(w, int_grid.Params(bits=4, group=32))
assert torch.allclose(linear(x, e), x @ decode(e).T, atol=1e-3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["works", "is broken"])
def test_the_wheel_works_from_another_folder_when_the_compiler(compiler: str, tmp_path: Path) -> None:
    compiled = compiler == "works"
    if compiled and shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    wheel = build_wheel(tmp_path, **({} if compiled else {"CC": "/bin/false", "CXX": "/bin/false"}))
    tools = install(wheel, tmp_path / "venv")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = CHECK.format(folder=tmp_path / "venv", compiled=compiled)
    done = subprocess.run([tools / "python", "-c", script], cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = subprocess.run([tools / "nstf", "--version"], cwd=elsewhere, capture_output=True, text=True)
    assert said.stdout == f"nstf {nstf.__version__}\n"


@pytest.mark.slow
def test_the_source_distribution_holds_what_a_build_and_the_tests_need(tmp_path: Path) -> None:

    source = copy_of_sources(tmp_path / "source")
    script = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", script, str(tmp_path)]
    pytest.importorskip("scikit_build_core", reason="builds without isolation")
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (archive,) = tmp_path.glob("nstf-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    for wanted in (
        "pyproject.toml",
        "CMakeLists.txt",
        "LICENSE",
        "kernels/cpu/module.cpp",
        "runtime/__init__.py",
    ):
        assert wanted in names
    assert not any(name.startswith("typings") for name in names)
