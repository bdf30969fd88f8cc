# mypy: disable-error-code="no-untyped-call"
"""Compiles kernels for a GPU that is not here.

A `KernelSpec` (spec.py) becomes exactly the source, attributes and options that Triton's JIT makes of the launch:
pointers aligned to 16 bytes (`tt.divisibility`), which makes wide loads possible, and below 2 GiB (`tt.pointer_range`),
which makes AMD's buffer instructions possible. Without these attributes both are lost silently.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from nstf.errors import NstfError
from nstf.kernels.formats.tree import EncodedTensor, Node, Shape
from nstf.kernels.triton.architecture import ARCHITECTURES, Architecture
from nstf.kernels.triton.code_object import CodeReport, inspect
from nstf.kernels.triton.spec import KernelSpec, specs_for

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# A tree (or an encoded tensor) and its dense shape.
Matrix = tuple[Node | EncodedTensor, Shape]


def require_triton() -> str:
    """The version of Triton. Raises NstfError when there is none."""
    if find_spec("triton") is None:
        raise NstfError("compiling kernels needs Triton; run `pip install triton` (Linux)")
    import triton

    return str(triton.__version__)


def gpu_target(row: Architecture) -> Any:
    """Triton's name of a target."""
    from triton.backends.compiler import GPUTarget

    if row.backend == "cuda":
        return GPUTarget("cuda", int(row.target.removeprefix("sm_")), row.wave)
    return GPUTarget("hip", row.target, row.wave)


def target_here() -> str | None:
    """The target of the GPU that Triton would launch on, or None without one or without a row for it."""
    try:
        from triton.runtime.driver import driver

        found = driver.active.get_current_target()
    except (ImportError, RuntimeError):
        return None
    name = f"sm_{found.arch}" if found.backend == "cuda" else str(found.arch)
    return name if name in ARCHITECTURES else None


def source(spec: KernelSpec, row: Architecture) -> tuple[Any, dict[str, Any]]:
    """(Triton's source, options as a launch passes them) of a kernel: what the JIT makes of its arguments."""
    from triton.compiler import ASTSource

    fn = spec.fn
    signature: dict[str, str] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    # From 3.7 on the JIT lists the attributes of constants too, of which there are none: part of its cache's key.
    listed = tuple(int(part) for part in require_triton().split(".")[:2]) >= (3, 7)
    missing = [n for n in fn.arg_names if n not in spec.signature and n not in spec.constants]
    if missing:
        raise ValueError(f"kernel {spec.name}: no type and no value for {', '.join(missing)}")
    for i, parameter in enumerate(fn.params):
        name = parameter.name
        if name in spec.constants:
            signature[name] = "constexpr"
            if listed:
                attrs[(i,)] = []
            continue
        kind = signature[name] = spec.signature[name]
        if kind.startswith("tensordesc"):
            continue
        if kind.startswith("*"):
            found = [["tt.divisibility", 16]] if name in spec.divisible else []
            # Encoded arrays and activations are below 2 GiB each: the launch checks it.
            found += [["tt.pointer_range", 32]] if row.backend == "hip" else []
            attrs[(i,)] = found
        elif not parameter.do_not_specialize and not kind.startswith(("fp", "bf", "u1")):
            aligned = name in spec.divisible and not parameter.do_not_specialize_on_alignment
            attrs[(i,)] = [["tt.divisibility", 16]] if aligned else []
    constants = {(fn.arg_names.index(name),): value for name, value in spec.constants.items()}
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    if fn.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(fn, signature, dict(sorted(constants.items())), attrs), options
    return ASTSource(fn, signature, dict(sorted(constants.items())), attrs), options


def key(spec: KernelSpec, row: Architecture) -> str:
    """What a compiled kernel is filed under: SHA-256 of its source, types, constants, attributes and options.

    The same on every machine: Triton's own key also holds paths of its installation.
    """
    made, options = source(spec, row)
    text = f"{row.target} {made.hash()} {sorted(options.items())}"
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel. stages: Triton's texts and binaries by name; metadata: Triton's."""

    key: str
    spec: KernelSpec
    stages: Mapping[str, Any]
    metadata: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def binary(self) -> bytes:
        return bytes(self.stages["cubin" if "cubin" in self.stages else "hsaco"])

    def report(self, target: str) -> CodeReport:
        """What its code object tells. Raises CorruptError."""
        return inspect(self.stages, self.metadata, target)


def compile_spec(spec: KernelSpec, row: Architecture) -> Compiled:
    """Compiles one kernel for a target; Triton's cache keeps it. Raises NstfError with the compiler's reason."""
    require_triton()
    import triton

    made, options = source(spec, row)
    try:
        kernel = triton.compile(made, target=gpu_target(row), options=options)
    except Exception as error:
        cause = _root(error)
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:200]
        raise NstfError(
            f"kernel {spec.name} does not compile for {row.target} with Triton {triton.__version__}: {reason}; "
            "the reference path runs without it"
        ) from error
    return Compiled(key(spec, row), spec, dict(kernel.asm), kernel.metadata._asdict(), options)


def _root(error: BaseException) -> BaseException:
    """What an exception was raised from, at the end of the chain: Triton wraps the reason in the source around it."""
    while (cause := error.__cause__) is not None:
        error = cause
    return error


def specs_of(
    matrices: Iterable[Matrix],
    batches: Iterable[int],
    dtype: torch.dtype,
    row: Architecture,
) -> dict[str, KernelSpec]:
    """Every kernel that these matrices need at these batches (rows of activations), by key: equal ones once."""
    found: dict[str, KernelSpec] = {}
    seen = set()
    batches = tuple(batches)
    for tree, shape in matrices:
        # Models repeat the same few shapes in every layer.
        same = (repr(tree.tree if isinstance(tree, EncodedTensor) else tree), tuple(shape))
        if same in seen:
            continue
        seen.add(same)
        for batch in batches:
            for spec in specs_for(tree, shape, batch, dtype, row.target):
                found.setdefault(key(spec, row), spec)
    return found
