"""What has to be known to compile one Triton kernel for one matrix: the same whether it happens at load time or ahead.

A kernel module has `specs(encoded, batch, dtype, arch)` that gives the launches it would make for a matrix, in order; the
launch itself uses the same objects, so what is compiled ahead is what runs. Nothing here imports triton.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from nstf.kernels.formats.tree import ArraySpec, EncodedTensor, Node, Shape, array_specs

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class KernelSpec:
    """One launch. Arguments that are neither in `signature` nor in `constants` do not exist.

    name: unique for (fn, constants, types, options) within an artifact. fn: the `@triton.jit` function.
    signature: run-time arguments in order, as Triton writes their types (`*fp16`, `*u8`, `i32`).
    constants: the `tl.constexpr` arguments. divisible: pointers aligned to 16 bytes and integers that are multiples of 16.
    options: of one backend (`matrix_instr_nonkdim`, `kpack`, `waves_per_eu`). batch: the largest number of rows of
    activations it is meant for. kind: gemv, gemm, trellis_gemv, ... (for reports). grid: programs along x, y, z.
    kept: what launching.py remembers of earlier launches; a spec made by `dataclasses.replace` begins with nothing.
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    kind: str = "gemv"
    grid: tuple[int, int, int] = (1, 1, 1)
    kept: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)


def remembered(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, which makes specs, with its results for recent arguments: a launch by a spec that is made anew takes the
    host twice as long (`KernelSpec.kept`). A tile to be measured comes as a dictionary, which is no key: such are made anew.
    """
    known: Any = lru_cache(maxsize=1024)(make)

    @wraps(make)
    def found(*arguments: P.args, **named: P.kwargs) -> T:
        if any(type(value) is dict for value in (*arguments, *named.values())):
            return make(*arguments, **named)
        made: T = known(*arguments, **named)
        return made

    return found


def specs_for(
    tree: Node | EncodedTensor,
    shape: Shape,
    batch: int,
    dtype: torch.dtype = torch.float16,
    arch: str = "sm_90",
) -> list[KernelSpec]:
    """Every launch for activations [batch, in] of `dtype` times the matrix [out, in]; [] when only the reference can do it.

    arch: `sm_90`, `gfx942`, ... Needs no array: a tree and a shape say everything.
    """
    encoded = hollow(tree.tree, tree.shape) if isinstance(tree, EncodedTensor) else hollow(tree, shape)
    linear = importlib.import_module("nstf.kernels.triton.linear")
    found: list[KernelSpec] = linear.specs(encoded, batch, dtype, arch)
    return found


def hollow(tree: Node, shape: Shape) -> EncodedTensor:
    """An encoded tensor whose arrays have dtypes and shapes and no bytes (the meta device)."""

    def empty(spec: ArraySpec) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    return EncodedTensor(tree, shape, {path: empty(s) for path, s in array_specs(tree, shape).items()})


def pointer_type(dtype: torch.dtype) -> str:
    """`*fp16` for torch.float16 and so on."""
    return "*" + {
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.float32: "fp32",
        torch.uint8: "u8",
        torch.int32: "i32",
        torch.int64: "i64",
    }[dtype]  # fmt: skip
