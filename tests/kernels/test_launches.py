"""What is compiled ahead is what runs: every launch of the Triton kernels, caught on a CPU before it is compiled.

Triton is told of a card that is not here. A hook sees each launch's source, types, constants, attributes and options,
and stops it. They must be those of `specs_for`, or a server would compile again what it was given.
"""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
aot = pytest.importorskip("nstf.kernels.triton.aot")

from nstf.kernels.triton import linear  # noqa: E402
from nstf.kernels.triton.architecture import ARCHITECTURES, Architecture  # noqa: E402
from nstf.kernels.triton.spec import specs_for  # noqa: E402

SHAPES = ((384, 512), (1000, 384))
BATCHES = (1, 3, 8, 16, 100, 600)


def trees(samples: Any, rows: int) -> dict[str, Any]:
    leaf, node = samples.leaf, samples.node
    trellis = leaf("trellis", quarter_bits=(10,))
    factors = {"a": leaf("dense", dtype="float16"), "b": leaf("dense", dtype="float16")}
    low_rank = node("low_rank", factors, rank=32)
    packed = {"a": leaf("int", bits=8, group=32), "b": leaf("int", bits=8, group=64)}
    view = (8, rows // 8, 16, 24 if rows == 1000 else 32)
    cores = {f"core{i}": leaf("dense", dtype="float32") for i in range(4)}
    tucker = {name: leaf("int", bits=8, group=0) for name in ("core", "factor1", "factor2")}
    return {
        "low rank": low_rank,
        "int8 and packed low rank": node(
            "add", {"x": leaf("int", bits=8, group=64), "y": node("low_rank", packed, rank=32)}
        ),
        "grid and low rank": node("add", {"x": leaf("grid", group=64), "y": low_rank}),
        "low rank tensor train": node("tensor_train", cores, ranks=(8, 48, 16), view=view),
        "low rank tucker": node("tucker", tucker, ranks=(8, 5, 2, view[3]), view=view),
        "int4 and low rank": node("add", {"x": leaf("int", bits=4, group=128), "y": low_rank}),
        "int4": leaf("int", bits=4, group=128),
        "int4 with zeros": leaf("int", bits=4, group=64, symmetric=False),
        "int3": leaf("int", bits=3, group=32),
        "int8 in steps": leaf("int", bits=8, group=64, scale_bits=8),
        "fp8": leaf("fp8"),
        "mxfp4": leaf("mxfp4"),
        "trellis": trellis,
        "rotated int4": node("rotated", {"x": leaf("int", bits=4, group=128)}, block_in=128, seed=3),
        "rotated trellis": node(
            "rotated", {"x": trellis}, block_in=128, block_out=0 if rows % 128 else 128, seed=3
        ),
    }


NAMES = (
    "int4",
    "int4 with zeros",
    "int3",
    "int8 in steps",
    "fp8",
    "mxfp4",
    "trellis",
    "rotated int4",
    "rotated trellis",
    "low rank",
    "int4 and low rank",
    "int8 and packed low rank",
    "grid and low rank",
    "low rank tensor train",
    "low rank tucker",
)


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The facts of each launch from now on; nothing is compiled, nothing runs."""
    from triton.runtime.driver import driver

    found: list[dict[str, Any]] = []
    before = driver._active

    def hook(**event: Any) -> bool:
        made = event["compile"]
        function = event["fn"].jit_function
        source = triton.compiler.ASTSource(function, made["signature"], made["constants"], made["configs"][0])
        found.append(facts(source, json.loads(made["specialization_data"])["options"]))
        return True

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    yield found
    driver._active = before


def facts(source: Any, options: dict[str, Any]) -> dict[str, Any]:
    """All that Triton's key of a kernel is made of, by the names of the arguments."""
    names = source.fn.arg_names
    return {
        "kernel": source.name,
        **{f"type of {name}": kind for name, kind in source.signature.items()},
        **{f"value of {names[at]}": str(value) for (at,), value in source.constants.items()},
        **{f"attributes of {names[at]}": value for (at,), value in source.attrs.items()},
        **json.loads(json.dumps(options, default=str)),
        "hash": source.hash(),
    }


def differing(launch: dict[str, Any], compiled: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs, as (at the launch, compiled ahead)."""
    both = {key: (launch.get(key), compiled.get(key)) for key in (*launch, *compiled)}
    return {key: pair for key, pair in both.items() if pair[0] != pair[1]}


def pretend(row: Architecture, functions: set[Any]) -> None:
    from triton.runtime.driver import driver

    card = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: aot.gpu_target(row),
    )
    driver.set_active(card)
    for function in functions:
        function.device_caches.clear()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", ARCHITECTURES)
@pytest.mark.parametrize("name", NAMES)
def test_every_launch_is_one_that_was_compiled_ahead(
    name: str,
    target: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    samples: Any,
    caught: list[dict[str, Any]],
) -> None:
    row = ARCHITECTURES[target]
    encoded = samples.random_encoded(trees(samples, shape[0])[name], shape)
    for batch in BATCHES:
        ahead = specs_for(encoded, shape, batch, dtype, target)
        if "low rank" in name and batch > 8:
            continue  # the library's products
        assert ahead, "no kernel"
        functions = {spec.fn for spec in ahead}
        pretend(row, functions)
        caught.clear()
        x = torch.randn(batch, shape[1]).to(dtype)
        linear._matmul(x, encoded, target)
        backend = triton.compiler.compiler.make_backend(aot.gpu_target(row))
        expected = []
        for spec in ahead:
            source, options = aot.source(spec, row)
            expected.append(facts(source, backend.parse_options(options).__dict__))
        for function in functions:
            function.device_caches.clear()
        assert [launch["kernel"] for launch in caught] == [launch["kernel"] for launch in expected]
        for launch, compiled in zip(caught, expected, strict=True):
            assert differing(launch, compiled) == {}, f"batch {batch}"
