"""Modules of encoded convolutions that tests of `fuse` share."""

import copy
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from nstf.runtime.modules import attach
from nstf.runtime.parameter import EncodedParameter


def encoded(tiny: ModuleType, module: nn.Module) -> Any:
    """The module in plain inference, its convolutions from int8 codes, its normalisations with values as if trained."""
    generator = torch.Generator().manual_seed(0)
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.BatchNorm2d):
            for value, low in ((part.running_mean, -0.5), (part.running_var, 0.5), (part.weight, 0.5)):
                if value is not None:
                    value.data = torch.rand(value.shape, generator=generator) + low
            if part.affine:
                part.bias.data = torch.randn(part.bias.shape, generator=generator)
        if isinstance(part, nn.Conv2d):
            tree = tiny.leaf("int", bits=8, group=0)
            stored = tiny.random_encoded(tree, tuple(part.weight.shape), len(name))
            attach(part, "weight", EncodedParameter(stored, torch.float32))
    module.eval().requires_grad_(False)
    for part in module.modules():
        if hasattr(part, "exact_products"):
            part.exact_products = False
    return module


def both(tiny: ModuleType, module: nn.Module) -> tuple[Any, Any]:
    """(the module by itself, the same that was fused)."""
    plain = encoded(tiny, module)
    return plain, copy.deepcopy(plain)


def near(a: Tensor, b: Tensor) -> bool:
    """The same but for the order of float32 operations, which may move a rounded activation by a step.

    What follows such a step differs by a hundredth at most, and only where the activation is seen.
    """
    off, size = float((a - b).norm()), float(b.norm())
    if off <= 2e-3 * size:
        return True
    elsewhere = float(((a - b).abs() > 1e-5 * b.abs().max()).float().mean())
    return off <= 1e-2 * size and elsewhere <= 0.3


class Block(nn.Module):
    """conv, norm, ReLU, conv, norm, + the input or its projection, ReLU."""

    def __init__(self, channels: int, out: int, stride: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=bias), nn.BatchNorm2d(out), nn.ReLU()
        )
        self.second = nn.Sequential(
            nn.Conv2d(out, out, 3, 1, 2, 2, bias=bias), nn.BatchNorm2d(out), nn.Identity()
        )
        alike = channels == out and stride == 1
        self.shortcut: nn.Module = (
            nn.Identity()
            if alike
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out, affine=False))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        y += self.shortcut(x)
        return y.relu()
