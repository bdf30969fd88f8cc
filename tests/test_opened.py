"""`nstf.open`: what it says about a file, and what it does not import."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nstf
import nstf.runtime.artifact
from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError

GOLDEN = Path(__file__).parent / "golden"
V1 = GOLDEN / "v1.nstf"


def test_a_tensor_that_no_memory_holds_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 KB may describe 2^40 elements; torch raises a RuntimeError of several lines."""

    def decode(*_: object) -> torch.Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(
        "nstf.runtime.tensors.decode", decode
    )  # first: importing the module takes the other's
    monkeypatch.setattr("nstf.kernels.formats.decode", decode)
    said = "v1.nstf: not enough memory for tensor 'int.4'; free some"
    with nstf.open(V1) as file, pytest.raises(NstfError, match=said):
        file.decode("int.4")
    with pytest.raises(NstfError, match=said):
        nstf.runtime.load_tensors(V1)["int.4"]


def test_tensors_are_described_as_they_are_stored() -> None:
    with nstf.open(V1) as file:
        assert file.path == V1 and file.size_bytes == V1.stat().st_size and file.format_version == 1
        four = file.tensors["int.4"]
        assert four.encoding == "int4 g32" and four.tree["kind"] == "int" and four.tree["bits"] == 4
        assert four.bits_per_weight == 8 * four.size_bytes / four.parameters
        shared = file.tensors["shared"]
        assert shared.shared_with == "int.4" and shared.size_bytes == 0 == shared.bits_per_weight
        assert file.parameters == sum(t.parameters for n, t in file.tensors.items() if n != "shared")
        assert file.bits_per_weight == 8 * file.size_bytes / file.parameters
        assert file.verify().tensors == len(file.tensors) and "22 tensors" in repr(file)


def test_a_tensor_is_decoded_as_loading_decodes_it_and_outlives_the_file() -> None:
    tensors = nstf.runtime.load_tensors(V1)
    with nstf.open(V1) as file:
        found = {name: file.decode(name, tensors[name].dtype) for name in file.tensors}
    assert len(tensors) == 22 and all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(ValueError, match="closed"):
        file.decode("int.4")


def test_what_is_open_is_verified_whatever_has_its_path_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = bytearray(V1.read_bytes())
    damaged[-200] ^= 1
    (tmp_path / "a.nstf").write_bytes(damaged)
    (tmp_path / "b.nstf").write_bytes(V1.read_bytes())
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with nstf.open("a.nstf") as file:
        (tmp_path / "b.nstf").rename("a.nstf")
        with pytest.raises(CorruptError, match="differs from its SHA-256"):
            file.verify()
    with nstf.open("a.nstf") as file:
        monkeypatch.chdir(tmp_path / "other")
        assert file.verify().arrays > 0


def test_files_inside_are_read_and_a_config_that_is_none_is_corrupt() -> None:
    with nstf.open(V1) as file:
        assert file.files == ["config.json", "raw.bin"] and len(file.read("config.json")) == 204
        with pytest.raises(CorruptError, match=r"its config\.json is not JSON"):
            _ = file.config
        with pytest.raises(UsageError, match="no file 'x' inside"):
            file.read("x")
        with pytest.raises(UsageError, match="no tensor 'x'"):
            file.decode("x")


def test_what_cannot_be_opened_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        nstf.open(tmp_path / "missing.nstf")
    (tmp_path / "a.html").write_text("<html><body>moved</body></html>")
    with pytest.raises(UnsupportedError, match="HTML"):
        nstf.open(tmp_path / "a.html")
    damaged = bytearray(V1.read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "d.nstf").write_bytes(damaged)
    nstf.open(tmp_path / "d.nstf").close()
    with pytest.raises(CorruptError, match="SHA-256"):
        nstf.open(tmp_path / "d.nstf", verify=True)


def test_numbers_that_contradict_one_another_are_corrupt(tmp_path: Path) -> None:
    """Rows of a trellis whose sections have other numbers of them than the tree says."""
    damaged, path = bytearray((GOLDEN / "v1_trellis.nstf").read_bytes()), tmp_path / "d.nstf"
    with nstf.runtime.artifact.open_artifact(GOLDEN / "v1_trellis.nstf") as artifact:
        section = artifact.entries["trellis.sections:section"]
    damaged[section.start : section.end] = bytes(section.end - section.start)
    path.write_bytes(damaged)
    with (
        nstf.open(path) as file,
        pytest.raises(CorruptError, match=r"trellis\.sections.*sections have \[30, 0, 0\]"),
    ):
        file.decode("trellis.sections")
    with pytest.raises(CorruptError, match=r"trellis\.sections.*sections have \[30, 0, 0\]"):
        nstf.runtime.load_tensors(path, verify=False)["trellis.sections"]


def test_looking_inside_imports_neither_torch_nor_transformers() -> None:
    code = f"""
import sys, nstf
with nstf.open({str(V1)!r}) as file:
    [t.bits_per_weight for t in file.tensors.values()]; file.read("raw.bin"); file.accuracy; file.verify(); repr(file)
nstf.convert, nstf.errors.UsageError, dir(nstf)
print(sorted(set(sys.modules) & {{"torch", "transformers", "numpy", "safetensors"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_package_names_what_it_has() -> None:
    assert {"convert", "open", "runtime", "errors", "File", "ConvertResult"} <= set(dir(nstf))
    with pytest.raises(AttributeError, match="has no attribute 'opne'"):
        _ = nstf.opne
