"""What every kernel's launch needs: the arguments of a packed matrix, cards by their architecture, options, the call."""

from typing import Any

import torch
import triton
from torch import Tensor

from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.packed import Layout, Packed
from nstf.kernels.triton.spec import KernelSpec

_HANDED_ON: dict[tuple[torch.device, int, int, torch.dtype, str], Tensor] = {}


def lanes_of(arch: str) -> int:
    """Threads of a warp: 64 on CDNA (gfx9), 32 elsewhere."""
    return 64 if arch.startswith("gfx9") else 32


def processors_of(arch: str) -> int:
    """Multiprocessors (compute units) of the usual card of an architecture: how many programs to start, no more."""
    return {"sm_80": 108, "sm_90": 132, "gfx90a": 110, "gfx942": 304, "gfx950": 256, "gfx1100": 96}.get(
        arch, 64
    )


def dies_of(arch: str) -> int:
    """Dies of that card that programs are dealt to in turn, each with a second-level cache of its own."""
    return ARCHITECTURES[arch].xcds if arch in ARCHITECTURES else 1


def overlaps(arch: str) -> bool:
    """Whether a kernel may start before the one in front of it has ended (programmatic dependent launch, from sm_90 on).

    A kernel started so must wait (`gdc_wait`) before it reads what a kernel may have written, and before it writes.
    Weights are not written by kernels, and may be read before.
    """
    return arch.startswith("sm_") and int(arch[3:]) >= 90 and not triton.knobs.runtime.interpret


def overlap_options(arch: str) -> dict[str, bool]:
    """The launch option for that."""
    return {"launch_pdl": True} if overlaps(arch) else {}


def hardware_of(arch: str) -> int:
    """Whose instructions for a sum of bytes and a logarithm: 1 NVIDIA's, 2 AMD's, 0 plain arithmetic (the interpreter)."""
    if triton.knobs.runtime.interpret:
        return 0
    return 1 if arch.startswith("sm_") else 2


def leaf_arguments(packed: Packed) -> tuple[Tensor, ...]:
    """words, scale, zeros, row_scale, table: for what a matrix lacks stand its words, of the type stated and never read."""
    words = packed.words

    def present(array: Tensor | None, dtype: torch.dtype) -> Tensor:
        return words.view(dtype) if array is None else array

    return (
        words,
        packed.scale,
        present(packed.zeros, torch.uint8),
        present(packed.row_scale, torch.float32),
        present(packed.table, torch.float16),
    )


def launch(spec: KernelSpec, *arguments: object) -> None:
    """Runs the kernel of a spec on the current device.

    Triton looks at all constants again at every launch, which takes the host longer than the launch itself; so the compiled
    kernel is kept, for arguments that Triton would compile alike.
    """
    key = tuple([_compiled_for(a) for a in arguments])
    kept = spec.kept.get(key)
    if kept is not None:
        run, constants = kept
        run(*arguments, *constants)
        return
    compiled = spec.fn[spec.grid](
        *arguments, **spec.constants, num_warps=spec.num_warps, num_stages=spec.num_stages, **spec.options
    )
    if isinstance(compiled, triton.compiler.CompiledKernel):
        rest = spec.fn.arg_names[len(arguments) :]
        spec.kept[key] = compiled[spec.grid], [spec.constants[name] for name in rest]


def _compiled_for(argument: Any) -> object:
    """What Triton compiles a kernel anew for: device and type, whether an address or a number is a multiple of 16, whether
    it is 1."""
    if isinstance(argument, Tensor):
        return argument.get_device(), argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument % 16 == 0, argument == 1, -(1 << 31) <= argument < 1 << 31
    return type(argument)


def handed_on(device: torch.device, count: int, dtype: torch.dtype, kernel: str) -> Tensor:
    """[count] zeros that the launches of a kernel on a stream hand on to each other: counters of programs that meet.

    In the capture of a graph on a stream that has none yet, new ones: what a graph allocates is zero from its first replay
    on only, and may not be handed to launches outside of it.
    """
    stream = 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    key = (device, stream, count, dtype, kernel)
    if key in _HANDED_ON:
        return _HANDED_ON[key]
    made = torch.zeros(count, dtype=dtype, device=device)
    # Counters are read before the launch in front has ended: it must not be the one that writes the zeros.
    if device.type != "cuda":
        _HANDED_ON[key] = made
    elif torch.cuda.is_current_stream_capturing():
        torch.zeros(1, device=device)
    else:
        torch.cuda.current_stream(device).synchronize()
        _HANDED_ON[key] = made
    return made


def scale_type(layout: Layout) -> str:
    """The pointer type of the stored scales."""
    return "*u8" if layout.scales != 0 else "*fp32" if layout.wide_scales else "*fp16"


def layout_constants(layout: Layout) -> dict[str, Any]:
    """What every kernel that reads all planes of a layout knows of it at compile time."""
    return {
        "PLANES": tuple(bits for bits, _ in layout.planes),
        "SHIFTS": tuple(shift for _, shift in layout.planes),
        "BITS": layout.bits,
        "ZERO": layout.zero,
        "GROUP": layout.group,
        "GROUPS": layout.groups,
        "SCALES": layout.scales,
        "MODE": layout.mode,
        "EXPONENT": layout.exponent,
        "BIAS": layout.bias,
    }


def layout_name(layout: Layout) -> str:
    """`int4`, `fp8`, `fp4`, `grid4`, with what else the code depends on."""
    mode = ("int", "fp", "grid")[layout.mode]
    wide = "w" if layout.wide_scales else ""
    return f"{mode}{layout.bits}{'' if layout.symmetric else 'z'}s{layout.scales}{wide}b{layout.bias}"


def even_sizes(layout: Layout) -> tuple[str, ...]:
    """The sizes among the run-time arguments that are multiples of 16."""
    return multiples({"rows": layout.rows, "cols": layout.cols, "padded": layout.padded})


def multiples(sizes: dict[str, int]) -> tuple[str, ...]:
    """The names of those that are multiples of 16, as Triton wants to know."""
    return tuple(name for name, size in sizes.items() if size % 16 == 0)
