"""Products with encoded weights as torch operators, which torch.compile and torch.export take whole.

An operator takes tensors and numbers only. A weight is named by a number that stands for its `EncodedParameter` in this
process; the operator finds the arrays there. They are constants: no operation writes to them.
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_weights: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count(1)


def number_of(parameter: Any) -> int:
    """A new number for an EncodedParameter, for as long as it lives."""
    number = next(_numbers)
    _weights[number] = parameter
    return number


def weight_of(number: int) -> Any:
    """The EncodedParameter that a number stands for."""
    return _weights[number]


def linear(x: Tensor, parameter: Any, bias: Tensor | None, turned: bool = False) -> Tensor:
    """x @ W.T + bias for the weight of an EncodedParameter [out, in], or x @ W if `turned`."""
    out, width = parameter.shape[::-1] if turned else parameter.shape
    y: Tensor = torch.ops.nstf.linear(x, parameter.number, out, width, turned)
    return y if bias is None else y + bias


def embedding(ids: Tensor, parameter: Any) -> Tensor:
    """W[ids] for the weight of an EncodedParameter [rows, width]."""
    found: Tensor = torch.ops.nstf.embedding(ids, parameter.number, parameter.shape[1], parameter.dtype)
    return found


@torch.library.custom_op("nstf::linear", mutates_args=())
def _linear(x: Tensor, number: int, out: int, width: int, turned: bool) -> Tensor:
    from nstf.kernels.linear import linear as product

    return product(x, _weights[number].matrix(turned))


@torch.library.custom_op("nstf::input_gradient", mutates_args=())
def _input_gradient(grad: Tensor, number: int, out: int, width: int, turned: bool) -> Tensor:
    from nstf.runtime.gradient import input_gradient

    return input_gradient(grad, _weights[number].matrix(turned))


@torch.library.custom_op("nstf::embedding", mutates_args=())
def _embedding(ids: Tensor, number: int, width: int, dtype: torch.dtype) -> Tensor:
    from nstf.runtime.parameter import embedding as rows

    return rows(ids, _weights[number].encoded, dtype)


@_linear.register_fake
def _(x: Tensor, number: int, out: int, width: int, turned: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], out)


@_input_gradient.register_fake
def _(grad: Tensor, number: int, out: int, width: int, turned: bool) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], width)


@_embedding.register_fake
def _(ids: Tensor, number: int, width: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty(*ids.shape, width, dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.weight = inputs[1:]


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.nstf.input_gradient(grad, *ctx.weight), None, None, None, None


_linear.register_autograd(_back, setup_context=_remember)
