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
from nstf.kernels.triton import code_object, side_file  # noqa: E402
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
    monkeypatch.setattr(side_file, "specs_of", lambda *_: {aot.key(spec, row): spec})
    assert side_file.install(side, [], target) == side_file.Installed(1, 0)

    driver, hits = jit(target, scale_rows)
    x = torch.zeros(3, 2048, dtype=torch.float16)
    scale_rows[(3,)](x, x.clone(), 0.5, 3, 2048, BLOCK=1024, TWICE=True, num_warps=2, num_stages=1)
    assert hits == [True] and driver.launches == ["scale_rows"]
    # Anything else of the launch and the JIT compiles.
    scale_rows[(3,)](x, x.clone(), 0.5, 3, 2047, BLOCK=1024, TWICE=True, num_warps=2, num_stages=1)
    assert hits == [True, False]
