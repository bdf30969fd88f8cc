"""The reshapes a tensor can be decomposed in, from its role and shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nstf.kernels.formats.tree import MAX_DIMS, Shape
from nstf.proposals import Room, Signature


@dataclass(frozen=True)
class View:
    """One way to read a tensor. dims: the reshape. methods: decomposers it makes sense for, best first.

    lead: leading axes of the tensor that make the rows (for svd). whole_input: the last axis, or axis 1 of a
    convolution, is the whole input; otherwise its covariance is used in a separable form (nstf.decomposers.modes).
    """

    name: str
    dims: Shape
    methods: tuple[str, ...]
    lead: int = 1
    whole_input: bool = True


LARGEST = 1 << 24
"""Weights up to which views of three axes and more are looked at."""
ALL = ("tucker", "tensor_train", "cp")
OUT_HEADS = ("q", "k", "v")
TABLES = ("embedding", "head", "position")


def views(role: str, shape: Shape, config: Mapping[str, Any] | None = None) -> list[View]:
    """Every sensible view, the plain matrix first; an empty list for a tensor without two axes of at least 2.

    role: as in nstf.analyzers.roles. shape: [out, in], [experts, out, in], [out, in, kernel...]. config:
    the model's config.json (num_attention_heads, num_key_value_heads, head_dim, or GPT-2's and Whisper's
    names for these).
    """
    if len(shape) < 2 or len(shape) > MAX_DIMS or sum(size > 1 for size in shape) < 2:
        return []
    if role == "conv":
        return _convolution(shape)
    if len(shape) == 3:
        return _stack(shape)
    if len(shape) != 2:
        return [View("matrix", (shape[0], _product(shape[1:])), ("svd",))]
    found = [View("matrix", shape, ("svd",))]
    out, width = shape
    heads = _heads(role, shape, config or {})
    if heads is not None:
        if role == "o":
            found.append(View("heads", (out, heads, width // heads), ALL, whole_input=False))
        else:
            found.append(View("heads", (heads, out // heads, width), ALL))
    if role in TABLES:
        rows = balanced(out, 2)
        if rows is not None:
            found.append(View("vocabulary", (*rows, width), ("tensor_train", "tucker")))
        return found
    rows, columns = balanced(out, 2), balanced(width, 2)
    if rows is not None and (heads is None or rows[0] != heads):
        found.append(View("rows", (*rows, width), ("tensor_train", "tucker")))
    if rows is not None and columns is not None:
        found.append(View("balanced", (*rows, *columns), ("tensor_train", "cp"), whole_input=False))
    return found


def views_for(method: str, signature: Signature, room: Room) -> list[View]:
    """The views of three axes and more that make sense for a method. None of tensors of more than LARGEST weights, but for
    stacks of experts, and none of matrices where little is looked at."""
    if not room.sizes:
        return []
    if signature.role != "expert_stack" and signature.weight.numel() > LARGEST:
        room.skip(method, f"more than {LARGEST} weights: only the matrix is looked at")
        return []
    if room.quick and len(signature.shape) == 2:
        room.skip(method, "the effort looks at no views of matrices")
        return []
    found = [v for v in views(signature.role, signature.shape, signature.config) if method in v.methods]
    if not found:
        room.skip(method, "no view of this shape suits it")
    return found


def balanced(size: int, parts: int) -> Shape | None:
    """`size` as a product of `parts` nearly equal factors of at least 2, ascending; None for a prime.

    balanced(576, 2) = (24, 24), balanced(49152, 3) = (32, 32, 48).
    """
    if parts == 1:
        return (size,) if size >= 2 else None
    best: Shape | None = None
    target = size ** (1.0 / parts)
    first = int(target + 1e-9)
    while first >= 2 and best is None:
        if size % first == 0:
            rest = balanced(size // first, parts - 1)
            best = None if rest is None else tuple(sorted((first, *rest)))
        first -= 1
    return best


def _convolution(shape: Shape) -> list[View]:
    if len(shape) < 3:
        return [View("matrix", shape, ("svd",))]
    found = [View("patches", (shape[0], _product(shape[1:])), ("svd",))]
    if _product(shape[2:]) > 1 and shape[1] > 1:
        found.append(View("kernel", shape, ("tucker", "cp", "tensor_train")))
        if len(shape) > 3:
            found.append(View("taps", (*shape[:2], _product(shape[2:])), ("tucker", "cp")))
    return found


def _stack(shape: Shape) -> list[View]:
    """[experts, out, in]: as one tall matrix (a shared input basis), and with the expert axis of its own."""
    return [View("tall", (shape[0] * shape[1], shape[2]), ("svd",), lead=2), View("experts", shape, ALL)]


def _heads(role: str, shape: Shape, config: Mapping[str, Any]) -> int | None:
    """The number of heads in the rows of q, k, v, qkv or the columns of o; None if it does not divide."""
    count = _number(config, "num_attention_heads", "n_head", "encoder_attention_heads")
    if role in ("k", "v"):
        count = _number(config, "num_key_value_heads", "n_head_kv") or count
    size = shape[1] if role == "o" else shape[0]
    dim = _number(config, "head_dim")
    if role in (*OUT_HEADS, "o"):
        if dim is not None and dim > 1 and size % dim == 0:
            count = size // dim
    elif role == "qkv" and count is not None:
        total = count + 2 * (_number(config, "num_key_value_heads", "n_head_kv") or count)
        count = total
    else:
        return None
    if count is None or count < 2 or size % count or size // count < 2:
        return None
    return count


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return None


def _product(sizes: Shape) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
