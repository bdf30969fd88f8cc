"""Modules whose weight stays encoded: linear, embedding, convolution, stacks of experts.

A module of the skeleton keeps its instance, its hooks and its other attributes; its class becomes one
derived from its own, in which the weight is not a parameter but a property that gives a `LazyWeight`. What
a subclass does in its forward (Gemma's scaled embedding, a router's own product) therefore goes on
working, through whatever operation it applies to `self.weight`.
"""

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nstf.errors import UnsupportedError
from nstf.kernels.convolution import Geometry, convolve
from nstf.kernels.formats import EncodedTensor
from nstf.kernels.memo import per_encoded
from nstf.runtime import operators
from nstf.runtime.experts import EncodedExperts
from nstf.runtime.gradient import linear
from nstf.runtime.parameter import READ_ONLY, EncodedParameter, LazyWeight, embedding

SUFFIX = "_encoded"

# Routers, class tokens, positional tables: below this many elements such a parameter becomes dense.
SMALL_NUMEL = 1 << 20


class EncodedLinear(nn.Linear):
    """y = x W^T + b by the registry's kernel for W. x: [..., in] -> [..., out]."""

    def forward(self, input: Tensor) -> Tensor:
        stored: Any = self.weight_encoded
        if torch.compiler.is_compiling():
            return operators.linear(input, stored, self.bias)
        return linear(input, stored.encoded, self.bias)


class EncodedEmbedding(nn.Embedding):
    """Rows of W. Only the rows asked for are decoded when the format is row-wise."""

    def forward(self, input: Tensor) -> Tensor:
        stored: Any = self.weight_encoded
        if torch.compiler.is_compiling():
            return operators.embedding(input, stored)
        return embedding(input, stored.encoded, stored.dtype)


class EncodedConv:
    """A convolution over one or two axes by `nstf.kernels.convolution`; others (transposed, over three axes) decode W for
    the time of the call, and so do gradients and torch.compile.

    exact_products: no int8 activations; `nstf.runtime.load` turns them on where it was not asked for exact products.
    """

    exact_products = True

    def _conv_forward(self, input: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        y = self._from_codes(input, bias)
        if y is None:
            y = super()._conv_forward(input, weight, bias)  # type: ignore[misc]
        return y

    def _from_codes(self, input: Tensor, bias: Tensor | None) -> Tensor | None:
        """The result, or None where the weight is decoded."""
        module: Any = self
        sides = len(module.kernel_size)
        differentiated = torch.is_grad_enabled() and (
            input.requires_grad or (bias is not None and bias.requires_grad)
        )
        if sides > 2 or input.dim() != sides + 2 or differentiated or torch.compiler.is_compiling():
            return None
        around = module._reversed_padding_repeated_twice  # last axis first, before and after
        if module.padding_mode != "zeros":
            input, around = functional.pad(input, around, mode=module.padding_mode), [0] * (2 * sides)
        geometry, images = geometry_of(module, around), input if sides == 2 else input[:, :, None]
        y = convolve(images, _two_sided(module.weight_encoded.encoded), bias, geometry, self.exact_products)
        return y if sides == 2 else y[:, :, 0]


class PlainConv(EncodedConv):
    """The same of a class with torch's own forward, which reads `weight`: that makes a tensor for nothing at each call."""

    def forward(self, input: Tensor) -> Tensor:
        module: Any = self
        y = self._from_codes(input, module.bias)
        if y is None:
            y = super().forward(input)  # type: ignore[misc]
        return y


def geometry_of(module: Any, around: list[int] | None = None) -> Geometry:
    """A module's geometry over two axes; one axis is that of the columns. around: what is left to pad, its own if None."""
    around = module._reversed_padding_repeated_twice if around is None else around
    return _geometry(tuple(module.stride), tuple(around), tuple(module.dilation), module.groups)


@lru_cache(1024)
def _geometry(
    stride: tuple[int, ...], around: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> Geometry:
    if len(stride) == 2:
        padding = (around[2], around[3], around[0], around[1])
        return Geometry(stride, padding, dilation, groups)  # type: ignore[arg-type]
    return Geometry((1, *stride), (0, 0, around[0], around[1]), (1, *dilation), groups)  # type: ignore[arg-type]


@per_encoded
def _flat(encoded: EncodedTensor) -> EncodedTensor:
    """A kernel over one axis as one over two."""
    return EncodedTensor(encoded.tree, (*encoded.shape[:2], 1, encoded.shape[2]), encoded.arrays)


def _two_sided(encoded: EncodedTensor) -> EncodedTensor:
    return encoded if len(encoded.shape) == 4 else _flat(encoded)


class EncodedConv1D:
    """transformers' Conv1D, a linear layer with W stored as [in, out]: y = x W + b."""

    nf: int
    bias: Tensor
    weight_encoded: EncodedParameter

    def forward(self, x: Tensor) -> Tensor:
        stored = self.weight_encoded
        if torch.compiler.is_compiling():
            return operators.linear(x, stored, self.bias, turned=True)
        return linear(x, stored.matrix(turned=True), self.bias)


class EncodedWeights:
    """Any other module: the weight decodes for each operation it takes part in."""


def attach(module: nn.Module, name: str, parameter: EncodedParameter) -> None:
    """Puts an encoded parameter in the place of `module`'s parameter `name`.

    Raises ValueError when the module has no such parameter or its shape is another.
    """
    old = module._parameters.get(name)
    if old is None or tuple(old.shape) != tuple(parameter.shape):
        found = "no such parameter" if old is None else f"shape {list(old.shape)}"
        raise ValueError(
            f"{type(module).__name__}.{name}: {found}, the stored tensor is {list(parameter.shape)}"
        )
    hold(module, name, parameter)
    module.add_module(name + SUFFIX, parameter)


def hold(module: nn.Module, name: str, parameter: EncodedParameter) -> None:
    """The first half of `attach`: the class alone. The encoded parameter is added later, before the module is used."""
    if tuple(module._parameters[name].shape) != tuple(parameter.shape):  # type: ignore[union-attr]
        raise ValueError(f"{type(module).__name__}.{name} does not have the shape {list(parameter.shape)}")
    del module._parameters[name]
    names = frozenset(n for n in (*_encoded_names(module), name))
    base: Any = getattr(type(module), "encoded_base", type(module))
    module.__class__ = _encoded_class(base, names)


def stays_encoded(module: nn.Module, name: str, numel: int) -> bool:
    """Whether a matrix of this module stays encoded: all but small ones of modules of an unknown kind."""
    base = getattr(type(module), "encoded_base", type(module))
    return numel > SMALL_NUMEL or _kind(base, frozenset({name}))[0] is not EncodedWeights


def _encoded_names(module: nn.Module) -> Iterable[str]:
    return getattr(type(module), "encoded_names", frozenset())


@cache
def _encoded_class(base: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    """The class of a module of class `base` whose parameters `names` are encoded."""
    members: dict[str, Any] = {name: _lazy_property(name) for name in names}
    members |= {"encoded_base": base, "encoded_names": names}
    kind, first = _kind(base, names)
    bases: tuple[type, ...] = (kind, base) if first else (base, kind)
    if kind in (EncodedLinear, EncodedEmbedding) and base in (nn.Linear, nn.Embedding):
        bases = (kind,)
    return type(kind.__name__ if len(bases) == 1 else f"Encoded{base.__name__}", bases, members)


def _kind(base: type[nn.Module], names: frozenset[str]) -> tuple[type, bool]:
    """The encoded class for a module class, and whether its forward goes before the module's own."""
    from transformers.pytorch_utils import Conv1D

    if names == {"weight"}:
        if issubclass(base, nn.Linear):
            return EncodedLinear, False
        if issubclass(base, nn.Embedding):
            return EncodedEmbedding, False
        if base is Conv1D:
            return EncodedConv1D, True
        if issubclass(base, nn.modules.conv._ConvNd):
            plain = base.forward in (nn.Conv1d.forward, nn.Conv2d.forward)
            return PlainConv if plain else EncodedConv, True
    if "expert" in base.__name__.lower():
        return EncodedExperts, True
    return EncodedWeights, False


def _lazy_property(name: str) -> property:
    def get(self: nn.Module) -> LazyWeight:
        stored: Any = getattr(self, name + SUFFIX)
        lazy: LazyWeight = stored.lazy()
        return lazy

    def put(
        self: nn.Module, value: object
    ) -> None:  # PEFT puts a module's own weight into it where it takes an adapter off
        stored: Any = self._modules[name + SUFFIX]
        if not isinstance(value, LazyWeight) or value.source is not stored.encoded:
            raise UnsupportedError(READ_ONLY)

    return property(get, put, doc=f"`{name}`, decoded by the operations it takes part in.")


def dense_parameter(values: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """A parameter with the values in `dtype` (integers keep theirs)."""
    return nn.Parameter(values.to(dtype) if values.is_floating_point() else values, requires_grad=False)
