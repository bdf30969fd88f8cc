"""The list of kernels, fastest first, and the choice among them.

A kernel is a module with these names; a new one needs one line in `_MODULES`:

    NAME: str                                  what `nstf inspect --kernels` prints
    FORMATS: tuple[str, ...]                   kinds of tree root it may handle; empty means any
    available() -> bool                        its compiler, extension or hardware library is there
    supports(encoded, device, batch) -> bool   it handles this matrix [out, in] at this batch, and is worth
    using matmul(x, encoded) -> y                    x: [batch, in] contiguous, y: [batch, out] in x's dtype

The reference is the last entry and handles everything, so a choice always exists.
"""

import importlib
from functools import cache
from types import ModuleType

import torch

from nstf.kernels.formats.tree import EncodedTensor

_MODULES = (
    "nstf.kernels.cpu.packed_linear",
    "nstf.kernels.cpu.shuffle_linear",
    "nstf.kernels.cpu.trellis_linear",
    "nstf.kernels.triton.linear",
    "nstf.kernels.torch.structured",
    "nstf.kernels.torch.reference",
)


@cache
def kernels() -> tuple[ModuleType, ...]:
    """The kernels that can run in this process, in the order they are tried."""
    modules = [importlib.import_module(name) for name in _MODULES]
    return tuple(module for module in modules if module.available())


def choose(encoded: EncodedTensor, device: torch.device, batch: int) -> ModuleType:
    """The first kernel that supports this matrix on this device at this batch (rows of activations)."""
    kind = encoded.tree.kind
    for kernel in kernels():
        if (not kernel.FORMATS or kind in kernel.FORMATS) and kernel.supports(encoded, device, batch):
            return kernel
    raise RuntimeError("no kernel: the reference supports everything and must be in the registry")


def describe(encoded: EncodedTensor, device: torch.device | str = "cpu", batch: int = 1) -> str:
    """The name of the kernel that `linear` would use, for instance `cpu.packed_linear`."""
    return str(choose(encoded, torch.device(device), batch).NAME)
