"""`nstf compile`: side files for cards that are not here, the report, and one line for every mistake."""

import builtins
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_90")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of two equal matrices of 4 bits, a table of embeddings and a vector."""
    from nstf.kernels.formats import EncodedTensor, Node, dense
    from nstf.quantizers import int_grid
    from nstf.runtime.artifact import write_artifact

    torch.manual_seed(0)
    tensors = {
        name: int_grid.encode(torch.randn(256, 512), int_grid.Params(bits=4, group=128))
        for name in ("a", "b")
    }
    tensors["embed"] = int_grid.encode(torch.randn(128, 256), int_grid.Params(bits=4, group=128))
    tensors["norm"] = EncodedTensor(Node("dense", dense.Params("float32")), (4,), {"values": torch.ones(4)})
    config = {"tie_word_embeddings": False, "dtype": "bfloat16"}
    path = tmp_path_factory.mktemp("model") / "model.nstf"
    write_artifact(
        path,
        tensors,
        {"config.json": json.dumps(config).encode()},
        {"plan": {"roles": {"embed": "embedding"}}},
    )
    return path


@pytest.fixture(autouse=True, scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def test_the_side_file_holds_each_kernel_once(nstf, model: Path, tmp_path: Path) -> None:
    from nstf.kernels.triton.side_file import read

    place = tmp_path / "x.nstfk"
    result = nstf(
        "compile", model, "--target", "gfx942", "--batches", "1,1", "-o", place, "--report", "--json"
    )
    assert result.code == 0, result.err
    (found,) = result.json["targets"]
    # Two equal matrices are one kernel; the embeddings are only looked up; bfloat16 as the config says.
    assert len(found["kernels"]) == 1 and found["dtype"] == "bfloat16" and found["batches"] == [1]
    (kernel,) = found["kernels"]
    assert kernel["kind"] == "gemv" and kernel["spills"] == 0 and kernel["loads_16_bytes"] > 0
    assert kernel["vector_registers"] > 0 and 0 < kernel["waves_per_simd"] <= 8
    side = read(place)
    assert (side.target, side.batches, side.dtype, len(side.kernels)) == ("gfx942", (1,), "bfloat16", 1)
    assert place.stat().st_size == found["size_bytes"]
    assert stat.S_IMODE(place.stat().st_mode) & 0o111 == 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.nstfk"]


def test_the_report_is_a_table_and_says_that_nothing_ran(nstf, model: Path) -> None:
    result = nstf("compile", model, "--target", "gfx942", "--batches", "1", "--no-store", "--report")
    assert result.code == 0, result.err
    assert result.out.split()[:4] == ["kernel", "regs", "spills", "LDS"]
    assert "gemv_int4" in result.out and "not written" in result.out
    assert "gfx942 (MI300X), compiled and inspected, not run" in result.out
    assert not list(model.parent.glob("*.nstfk"))


def test_the_default_name_tells_model_and_target_and_is_not_overwritten(nstf, model: Path) -> None:
    words = ("compile", model, "--target", "gfx942", "--batches", "1")
    place = model.with_name("model.gfx942.nstfk")
    try:
        assert nstf(*words).code == 0 and place.exists()
        before = place.read_bytes()
        again = nstf(*words)
        assert again.code == 2 and "exists: give another name, or --force" in again.err
        assert nstf(*words, "--force").code == 0 and place.read_bytes() == before
    finally:
        place.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--target", "gfx9999"), 2, "unknown target 'gfx9999': nstf compiles for gfx90a, gfx942, gfx950"),
        ((), 2, "no --target given"),
        (("--target", "gfx942", "--batches", "0"), 2, "each must be from 1 to"),
        (("--target", "gfx942", "--batches", "one"), 2, "give 1 to 64 numbers"),
        (("--target", "gfx942", "--dtype", "int4"), 2, "choose one of float16, bfloat16"),
        (("--target", "gfx942", "-o", "x.nstf"), 2, "end it with .nstfk"),
        (("--target", "gfx942", "--target", "sm_90", "-o", "x.nstfk"), 2, "-o names one file"),
        (("--target", "gfx942", "-o", "no/such/x.nstfk"), 2, "does not exist"),
    ],
)
def test_a_mistake_is_one_line(nstf, model: Path, words: tuple[str, ...], code: int, message: str) -> None:
    result = nstf("compile", model, *words)
    assert result.code == code and message in result.err, result.err
    assert result.err.count("\n") == 1 and "Traceback" not in result.err
    assert not list(model.parent.glob("*.nstfk"))


def test_a_damaged_artifact_is_corrupt(nstf, model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "bad.nstf"
    damaged.write_bytes(model.read_bytes()[:100])
    assert nstf("compile", damaged, "--target", "gfx942").code == 5


def test_without_triton_one_line_says_how_to_get_it(
    nstf, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "triton" else real(name, *a)
    )
    result = nstf("compile", model, "--target", "gfx942")
    assert result.code == 1 and "needs Triton; run `pip install triton`" in result.err
    assert result.err.count("\n") == 1


def test_an_artifact_without_kernels_is_unsupported(nstf, tmp_path: Path) -> None:
    from nstf.kernels.formats import EncodedTensor, Node, dense
    from nstf.runtime.artifact import write_artifact

    plain = EncodedTensor(Node("dense", dense.Params("float32")), (4, 8), {"values": torch.ones(4, 8)})
    write_artifact(tmp_path / "m.nstf", {"w": plain}, {}, {})
    result = nstf("compile", tmp_path / "m.nstf", "--target", "gfx942")
    assert result.code == 6 and "nothing to compile" in result.err
    assert [p.name for p in tmp_path.iterdir()] == ["m.nstf"]


def test_a_kernel_that_fails_costs_that_kernel_alone(
    nstf, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf.errors import NstfError
    from nstf.kernels.triton import aot, side_file

    real = aot.compile_spec

    def some(spec: Any, row: Any) -> Any:
        if spec.kind == "gemm":
            raise NstfError("kernel x does not compile for gfx942: no")
        return real(spec, row)

    monkeypatch.setattr(aot, "compile_spec", some)
    place = tmp_path / "x.nstfk"
    result = nstf("compile", model, "--target", "gfx942", "--batches", "1,16", "-o", place)
    assert result.code == 1 and "kernels did not compile; the first: kernel x does not" in result.err
    assert len(side_file.read(place).kernels) >= 1


def test_a_side_file_that_appears_meanwhile_stays(
    nstf, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf.kernels.triton import aot

    real, place = aot.compile_spec, tmp_path / "x.nstfk"

    def late(spec: Any, row: Any) -> Any:
        place.write_bytes(b"another's")
        return real(spec, row)

    monkeypatch.setattr(aot, "compile_spec", late)
    words = ("compile", model, "--target", "gfx942", "--batches", "1", "-o", place)
    result = nstf(*words)
    assert result.code == 1 and "x.nstfk was written by something else meanwhile, and stays" in result.err
    assert place.read_bytes() == b"another's"
    assert nstf(*words, "--force").code == 0 and place.read_bytes() != b"another's"


def test_a_broken_promise_fails_the_gate(nstf, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf.kernels.triton import gates

    words = ("compile", model, "--target", "gfx942", "--batches", "1", "--no-store", "--gate")
    monkeypatch.setattr(gates, "check", lambda *_: [])
    assert nstf(*words).code == 0
    monkeypatch.setattr(gates, "check", lambda *_: ["spills 3 registers"])
    result = nstf(*words, "--report")
    assert result.code == 4 and "spills 3 registers" in result.out and "1 promises" in result.err


def test_no_half_file_is_left_when_the_disk_is_full(
    nstf, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf.runtime.artifact import atomic_file

    def full(self: Any, at: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_file.Output, "write", full)
    result = nstf("compile", model, "--target", "gfx942", "--batches", "1", "-o", tmp_path / "x.nstfk")
    assert result.code == 1 and "no space left" in result.err and not list(tmp_path.iterdir())


def test_the_architectures_need_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "triton" or name.startswith("triton."):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    from nstf.kernels.triton.architecture import ARCHITECTURES

    assert tuple(ARCHITECTURES) == TARGETS
