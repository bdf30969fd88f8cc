"""Ahead-of-time compilation: the JIT finds what was compiled, side files are checked, code objects are read."""

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nstf.errors import CorruptError, NstfError, UnsupportedError

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
aot = pytest.importorskip("nstf.kernels.triton.aot")

from nstf.kernels.triton import architecture as arch  # noqa: E402
from nstf.kernels.triton import side_file  # noqa: E402
from nstf.kernels.triton.spec import KernelSpec  # noqa: E402

TARGETS = tuple(arch.ARCHITECTURES)


@triton.jit
def scale_rows(x, y, factor, rows, cols, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * cols + at, mask=at < cols, other=0.0).to(tl.float32) * factor
        if TWICE:
            value += value
        tl.store(y + row * cols + at, value.to(tl.float16), mask=at < cols)


@triton.jit
def product(x, w, y, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        a = tl.load(x + m[:, None] * k + (start + d)[None, :])
        b = tl.load(w + n[None, :] * k + (start + d)[:, None])
        total = tl.dot(a, b, total)
    tl.store(y + m[:, None] * N + n[None, :], total)


def rows_spec(**changes: Any) -> KernelSpec:
    return dataclasses.replace(
        KernelSpec(
            name="scale_rows",
            fn=scale_rows,
            signature={"x": "*fp16", "y": "*fp16", "factor": "fp32", "rows": "i32", "cols": "i32"},
            constants={"BLOCK": 1024, "TWICE": True},
            divisible=("x", "y", "cols"),
            num_warps=2,
            num_stages=1,
        ),
        **changes,
    )


def product_spec(
    kind: str = "*fp16", size: tuple[int, int, int] = (32, 64, 64), **changes: Any
) -> KernelSpec:
    return dataclasses.replace(
        KernelSpec(
            name="product",
            fn=product,
            signature={"x": kind, "w": kind, "y": "*fp32", "k": "i32"},
            constants=dict(zip("MNK", size, strict=True)),
            divisible=("x", "w", "y", "k"),
            kind="gemm",
        ),
        **changes,
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


class Driver:
    """A driver of a card that is not here: the JIT compiles for it and 'launches'."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.launches: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
            load_binary=lambda name, kernel, shared, device: (name, name, 0, 0, 1024),
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launches.append(metadata.name)


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """jit(target, functions): from now on Triton sees that card; gives (driver, list of 'was it in the cache')."""
    from triton.runtime.driver import driver

    before, hits = driver._active, []

    def listen(**event: Any) -> None:
        hits.append(event["cache_hit"])

    def start(target: str, *functions: Any) -> tuple[Driver, list[bool]]:
        fake = Driver(aot.gpu_target(arch.architecture(target)))
        driver.set_active(fake)
        for function in functions:
            function.device_caches.clear()
        hits.clear()
        monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
        return fake, hits

    yield start
    driver._active = before
    for function in (scale_rows, product):
        function.device_caches.clear()


def made_side_file(specs: list[KernelSpec], target: str) -> side_file.SideFile:
    row = arch.architecture(target)
    compiled = [aot.compile_spec(spec, row) for spec in specs]
    return side_file.parse(side_file.pack(compiled, row, [1], "float16"), "test")


@pytest.mark.parametrize("target", ["gfx942", "gfx1201", "sm_90"])
def test_a_launch_finds_the_installed_kernel_and_does_not_compile(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jit: Any
) -> None:
    spec, row = rows_spec(), arch.architecture(target)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "build"))
    side = made_side_file([spec], target)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "server"))
    assert side_file.install(side, lambda *_: {aot.key(spec, row): spec}, target) == side_file.Installed(1, 0)

    driver, hits = jit(target, scale_rows)
    x = torch.zeros(3, 2048, dtype=torch.float16)
    scale_rows[(3,)](x, x.clone(), 0.5, 3, 2048, BLOCK=1024, TWICE=True, num_warps=2, num_stages=1)
    assert hits == [True] and driver.launches == ["scale_rows"]
    # Anything else of the launch and the JIT compiles.
    scale_rows[(3,)](x, x.clone(), 0.5, 3, 2047, BLOCK=1024, TWICE=True, num_warps=2, num_stages=1)
    assert hits == [True, False]


def test_a_served_matrix_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jit: Any, samples: Any
) -> None:
    from nstf.kernels.triton import linear

    target, shape = "gfx942", (64, 512)
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=128), shape)
    row, matrices = arch.architecture(target), [(encoded, shape)]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "build"))
    specs = aot.specs_of(matrices, [1, 16], torch.float16, row)
    compiled = [aot.compile_spec(spec, row) for spec in specs.values()]
    side = side_file.parse(side_file.pack(compiled, row, [1, 16], "float16"), "test")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "server"))
    assert side_file.install(
        side, lambda *needs: aot.specs_of(matrices, *needs), target
    ) == side_file.Installed(len(specs), 0)
    driver, hits = jit(target, *(spec.fn for spec in specs.values()))
    for batch in (1, 16):
        linear._matmul(torch.zeros(batch, 512, dtype=torch.float16), encoded, target)
    for spec in specs.values():
        spec.fn.device_caches.clear()
    assert len(driver.launches) >= len(specs) >= 2 and len(hits) == len(specs) and all(hits)


def test_installed_metadata_is_that_of_a_compiled_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, row = product_spec(options={"matrix_instr_nonkdim": 16, "kpack": 2}), arch.architecture("gfx942")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "build"))
    made = aot.compile_spec(spec, row)
    side = side_file.parse(side_file.pack([made], row, [1], "float16"), "test")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "server"))
    needed = {made.key: spec}
    side_file.install(side, lambda *_: needed, "gfx942")
    stored = list((tmp_path / "server").rglob("product.*"))
    assert sorted(p.suffix for p in stored) == [".hsaco", ".json"]
    again = aot.compile_spec(spec, row)
    assert again.binary == made.binary and set(again.stages) == {"hsaco"}
    assert dict(again.metadata) == dict(made.metadata)
    # A second time finds its work done, and touches nothing.
    times = [p.stat().st_mtime_ns for p in stored]
    assert side_file.install(side, lambda *_: needed, "gfx942").found == 1
    assert [p.stat().st_mtime_ns for p in stored] == times


def test_a_side_file_of_another_target_or_triton_is_left_alone(cache: Path) -> None:
    side = made_side_file([rows_spec()], "gfx1100")
    other = side_file.install(side, lambda *_: {}, "gfx942")
    assert (other.found, other.missing) == (0, 0) and "the GPU here is gfx942" in other.reason
    assert "of no known target" in side_file.install(side, lambda *_: {}, None).reason
    old = dataclasses.replace(side, triton="3.0.0")
    assert "compiled by Triton 3.0.0" in side_file.install(old, lambda *_: {}, "gfx1100").reason


def test_a_kernel_that_the_file_lacks_is_counted_as_missing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, other = arch.architecture("gfx1100"), rows_spec(constants={"BLOCK": 512, "TWICE": False})
    side = made_side_file([rows_spec()], "gfx1100")
    wanted = {aot.key(spec, row): spec for spec in (rows_spec(), other)}
    assert side_file.install(side, lambda *_: wanted, "gfx1100") == side_file.Installed(1, 1)


def test_the_key_follows_everything_that_changes_the_code() -> None:
    row = arch.architecture("gfx942")
    specs = [
        rows_spec(),
        rows_spec(constants={"BLOCK": 512, "TWICE": True}),
        rows_spec(divisible=("x", "y")),
        rows_spec(num_warps=4),
        rows_spec(options={"waves_per_eu": 2}),
        rows_spec(signature={"x": "*bf16", "y": "*fp16", "factor": "fp32", "rows": "i32", "cols": "i32"}),
        product_spec(),
    ]
    keys = {aot.key(spec, row) for spec in specs}
    assert len(keys) == len(specs) and aot.key(rows_spec(name="other"), row) in keys
    assert aot.key(rows_spec(), arch.architecture("gfx950")) not in keys


def test_the_same_kernels_give_the_same_bytes_and_nothing_of_this_machine(cache: Path) -> None:
    row = arch.architecture("gfx1201")
    made = [aot.compile_spec(spec, row) for spec in (rows_spec(), rows_spec(num_warps=1))]
    data = side_file.pack(made, row, [16, 1], "float16")
    assert data == side_file.pack(made[::-1], row, [1, 16], "float16")
    (size,) = struct.unpack("<Q", data[:8])
    assert b"/" not in data[8 : 8 + size].replace(b"amd/", b"")
    side = side_file.parse(data, "test")
    assert side.batches == (1, 16) and side.triton == triton.__version__ and len(side.kernels) == 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bytes]:
    """A side file of one kernel."""
    row = arch.architecture("gfx1100")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield side_file.pack([aot.compile_spec(rows_spec(), row)], row, [1], "float16")


def damaged(data: bytes, change: Any) -> bytes:
    (size,) = struct.unpack("<Q", data[:8])
    outer = json.loads(data[8 : 8 + size])
    header = json.loads(outer["__metadata__"]["nstf_kernels"])
    change(header, next(iter(header["kernels"].values())))
    outer["__metadata__"]["nstf_kernels"] = json.dumps(header)
    text = json.dumps(outer).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda h, k: h.update(version=2), UnsupportedError, "version 2; this nstf reads 1"),
        (lambda h, k: h["kernels"].clear(), CorruptError, "kernels and its code objects differ"),
        (lambda h, k: k.update(sha256="0" * 64), CorruptError, "differs from its SHA-256"),
        (lambda h, k: k["metadata"].update(name="../x"), CorruptError, "no symbol"),
        (lambda h, k: k["metadata"].update(shared=-1), CorruptError, "no symbol or no local memory"),
        (lambda h, k: k["metadata"].update(shared=10**30), CorruptError, "no symbol or no local memory"),
        (lambda h, k: k["metadata"].update(num_warps="4"), CorruptError, "no number of warps"),
        (lambda h, k: k.update(name=5), CorruptError, "no symbol"),
        (lambda h, k: k.update(metadata=[]), CorruptError, "has no metadata"),
        (lambda h, k: h.update(dtype="int3"), CorruptError, "nothing of Triton, target, dtype"),
        (lambda h, k: h.update(batches=[0]), CorruptError, "nothing of Triton, target, dtype or batches"),
        (lambda h, k: h.update(batches=[1] * 65), CorruptError, "or batches"),
        (lambda h, k: h.pop("target"), CorruptError, "nothing of Triton, target"),
    ],
)
def test_a_damaged_side_file_is_refused(whole: bytes, change: Any, error: type, message: str) -> None:
    side_file.parse(damaged(whole, lambda h, k: None), "file")
    with pytest.raises(error, match=message):
        side_file.parse(damaged(whole, change), "file")


def test_a_side_file_of_too_many_arrays_is_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A million empty ones, 56 MB, took 1.4 GB."""
    arrays = {
        str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        for i in range(side_file.MAX_KERNELS + 2)
    }
    text = json.dumps({"__metadata__": {side_file._KEY: "{}"}, **arrays}).encode()
    monkeypatch.setattr("safetensors.torch.load", lambda data: pytest.fail("was loaded"))
    with pytest.raises(CorruptError, match="not a file of compiled kernels") as caught:
        side_file.parse(struct.pack("<Q", len(text)) + text, "file")
    assert "arrays" in str(caught.value.__cause__)


def test_a_side_file_of_too_many_values_is_refused_before_they_are_made(whole: bytes) -> None:
    with pytest.raises(CorruptError, match="not a file of compiled kernels") as caught:
        side_file.parse(damaged(whole, lambda h, k: h.update(more=[[]] * 700_000)), "file")
    assert "too many values" in str(caught.value.__cause__)


# No bytes of a shape that has more elements than torch counts.
_WIDE = json.dumps({"k": {"dtype": "U8", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", len(_WIDE)) + _WIDE,
    ],
)
def test_something_else_is_no_side_file(data: bytes) -> None:
    with pytest.raises(CorruptError, match="not a file of compiled kernels"):
        side_file.parse(data, "file")


def test_a_side_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NstfError, match="cannot be read") as caught:
        side_file.read(tmp_path / "none.nstfk")
    assert caught.value.exit_code == 2


def test_a_kernel_that_does_not_compile_is_one_line_with_the_reason(cache: Path) -> None:
    with pytest.raises(NstfError, match=r"product does not compile for gfx942 .*; the reference path") as e:
        aot.compile_spec(product_spec(size=(24, 64, 64)), arch.architecture("gfx942"))
    assert "power of 2" in str(e.value) and "\n" not in str(e.value)


def test_an_argument_without_a_type_is_named() -> None:
    with pytest.raises(ValueError, match="no type and no value for cols"):
        aot.source(
            rows_spec(signature={"x": "*fp16", "y": "*fp16", "factor": "fp32", "rows": "i32"}),
            arch.architecture("gfx942"),
        )


def test_without_triton_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "find_spec", lambda name: None)
    with pytest.raises(NstfError, match=r"pip install triton") as caught:
        aot.require_triton()
    assert caught.value.exit_code == 1
