"""The steps of a module's plan (`fused.py`): convolutions with what follows them, and operations as its code has them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from nstf.kernels.convolution import convolve
from nstf.kernels.cpu.convolution import After
from nstf.runtime.modules import geometry_of


@dataclass
class ConvolutionStep:
    """One kernel: a convolution, and a normalisation, a sum and a bound if they follow. out, x, added: names of values."""

    out: str
    x: str
    convolution: Any
    normalisation: nn.BatchNorm2d | None = None
    added: str | None = None
    bounds: tuple[float, float] = (-math.inf, math.inf)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset((self.x,) if self.added is None else (self.x, self.added))

    def run(self, values: dict[str, Any]) -> Tensor:
        gain, bias = self._scaled()
        added: Any = None if self.added is None else values[self.added]
        image = added if isinstance(added, Tensor) else None
        simple = added is None or image is not None
        y = convolve(
            values[self.x],
            self.convolution.weight_encoded.encoded,
            bias,
            geometry_of(self.convolution),
            after=After(gain, image, *self.bounds) if simple else After(gain),
        )
        return y if simple else (y + added).clamp(*self.bounds)  # a number, such as a side of the image

    def _scaled(self) -> tuple[Tensor | None, Tensor | None]:
        """Gain and bias of the products: a few numbers for each output, so made at every call."""
        norm, own = self.normalisation, held_by(self.convolution, "bias")
        if norm is None:
            return None, own
        mean, variance = numbers(norm, "running_mean"), numbers(norm, "running_var")
        assert mean is not None and variance is not None, "a normalisation without statistics is not fused"
        weight, beta, before = numbers(norm, "weight"), numbers(norm, "bias"), as_float(own)
        gain = torch.rsqrt(variance + norm.eps)
        gain = gain if weight is None else gain * weight
        mean = mean if before is None else mean - before
        return gain, -mean * gain if beta is None else torch.addcmul(beta, mean, gain, value=-1)


def numbers(module: nn.Module, name: str) -> Tensor | None:
    """A module's buffer or parameter, or None."""
    return as_float(held_by(module, name))


def held_by(module: nn.Module, name: str) -> Any:
    """`getattr`, past the module's own, which takes longer than the sums of a normalisation."""
    found = module._buffers.get(name)
    found = module._parameters.get(name) if found is None else found
    return getattr(module, name) if found is None else found


def as_float(stored: Tensor | None) -> Tensor | None:
    return stored if stored is None or stored.dtype == torch.float32 else stored.float()


class Value(NamedTuple):
    """A value by its name, in the place of an argument."""

    name: str


@dataclass
class OtherStep:
    """An operation as the module's code has it. target: a module, a function or a method's name."""

    out: str
    target: Any
    args: Any
    kwargs: Any
    reads: frozenset[str]

    def run(self, values: dict[str, Any]) -> Any:
        args, kwargs = filled(self.args, values), filled(self.kwargs, values)
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)


# What leaves an image's windows one number each: their largest, or the mean.
POOLINGS: tuple[Any, ...] = (nn.MaxPool2d, nn.AdaptiveAvgPool2d)


class PoolingStep(OtherStep):
    """A pooling whose own plan this is: its class's code is run, since calling the module would come back here."""

    def run(self, values: dict[str, Any]) -> Any:
        own = next(kind for kind in POOLINGS if isinstance(self.target, kind))
        return own.forward(self.target, values[self.args[0].name])


def filled(argument: Any, values: dict[str, Any]) -> Any:
    """An argument with the values that it names."""
    if isinstance(argument, Value):
        return values[argument.name]
    if isinstance(argument, tuple | list):
        return type(argument)(filled(a, values) for a in argument)
    if isinstance(argument, dict):
        return {k: filled(a, values) for k, a in argument.items()}
    if isinstance(argument, slice):
        return slice(*(filled(a, values) for a in (argument.start, argument.stop, argument.step)))
    return argument


def plain(argument: Any) -> Any:
    """An argument of a trace with names in the place of its nodes."""
    if isinstance(argument, fx.Node):
        return Value(argument.name)
    if isinstance(argument, tuple | list):
        return (tuple if isinstance(argument, tuple) else list)(plain(a) for a in argument)
    if isinstance(argument, Mapping):
        return {k: plain(a) for k, a in argument.items()}
    if isinstance(argument, slice):
        return slice(*(plain(a) for a in (argument.start, argument.stop, argument.step)))
    return argument
