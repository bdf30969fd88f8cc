"""Launches of Triton kernels caught on a CPU before anything is compiled, and what would be compiled ahead for them.

Triton is told of a card that is not here. A hook sees each launch's source, types, constants, attributes and options, and
stops it.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from nstf.kernels.triton import aot
from nstf.kernels.triton.architecture import Architecture
from nstf.kernels.triton.spec import KernelSpec


@contextmanager
def catching() -> Iterator[list[dict[str, Any]]]:
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
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


def compiled_facts(spec: KernelSpec, row: Architecture) -> dict[str, Any]:
    """The same of a kernel as it is compiled ahead."""
    backend = triton.compiler.compiler.make_backend(aot.gpu_target(row))
    source, options = aot.source(spec, row)
    return facts(source, backend.parse_options(options).__dict__)


def differing(launch: dict[str, Any], compiled: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs, as (at the launch, compiled ahead)."""
    both = {key: (launch.get(key), compiled.get(key)) for key in (*launch, *compiled)}
    return {key: pair for key, pair in both.items() if pair[0] != pair[1]}


def pretend(row: Architecture, specs: Iterable[KernelSpec]) -> None:
    """From now on Triton launches on a card of this kind; the kernels of `specs` know of no earlier launch."""
    from triton.runtime.driver import driver

    card = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: aot.gpu_target(row),
    )
    driver.set_active(card)
    forget(specs)


def forget(specs: Iterable[KernelSpec]) -> None:
    for function in {spec.fn for spec in specs}:
        function.device_caches.clear()
