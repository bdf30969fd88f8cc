# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The sum of a product's parts where its columns are split over programs: in a fixed order."""

import torch
import triton
import triton.language as tl

from nstf.kernels.triton.launching import multiples, overlap_options, overlaps
from nstf.kernels.triton.spec import KernelSpec, pointer_type


@triton.jit
def sum_kernel(parts, y, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y [size] = the sum of parts f32 [SPLIT, size]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(SPLIT):
        total += tl.load(parts + i * size + at, mask=at < size, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < size)


def sum_spec(size: int, split: int, dtype: torch.dtype, arch: str) -> KernelSpec:
    """The launch that adds up `split` float32 parts of `size` numbers."""
    return KernelSpec(
        name=f"sum_{split}_{pointer_type(dtype)[1:]}",
        fn=sum_kernel,
        signature={"parts": "*fp32", "y": pointer_type(dtype), "size": "i32"},
        constants={"SPLIT": split, "BLOCK": 256, "PDL": overlaps(arch)},
        divisible=("parts", "y", *multiples({"size": size})),
        num_warps=4,
        num_stages=1,
        options=overlap_options(arch),
        kind="sum",
        grid=(triton.cdiv(size, 256), 1, 1),
    )
