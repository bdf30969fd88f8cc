"""What a decoder of the Llama family does between its matrices, for one new token of each sequence: plain torch.

The definition that kernels/triton/decode_step.py is checked against, and what runs where that cannot. Positions are on the
device, so that nothing waits for the host: int64 [1] where all sequences are equally long, else [batch, 2], the position of
each token and the sequence of the cache that it belongs to.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """The attention of a layer. scale: of q k; window: keys that a query sees, 0 for all; epsilon: of the norms of q, k."""

    heads: int
    kv_heads: int
    size: int
    scale: float
    window: int = 0
    epsilon: float = 1e-6

    @property
    def width(self) -> int:
        """Numbers of q, k and v side by side."""
        return (self.heads + 2 * self.kv_heads) * self.size


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, [sequences, kv_heads, capacity, size], and the angles' cos and sin, f32
    [capacity, size / 2]."""

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor


def add_norm(
    h: Tensor,
    y: Tensor | None,
    gain: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    out_gain: Tensor | None = None,
) -> Tensor:
    """h += y, then the root-mean-square norm of h times `gain`, as `dtype` [batch, hidden].

    h: f32 [batch, hidden], the residual stream, changed in place. y: what the last block gives, normed with `out_gain`
    first where that is given (Gemma); None: nothing. gain, out_gain: f32 [hidden].
    """
    if y is not None:
        y = y.float()
        h += y if out_gain is None else _norm(y, out_gain, epsilon)
    return _norm(h, gain, epsilon).to(dtype)


def attend(
    qkv: Tensor,
    bias: Tensor | None,
    gains: tuple[Tensor, Tensor] | None,
    cache: Cache,
    position: Tensor,
    shape: Heads,
) -> Tensor:
    """Attention of one query per sequence over the keys so far; the new key and value go into the cache at `position`
    (int64 [1] or [batch, 2], see above).

    qkv: [batch, width]. bias: f32 [width], of the projections. gains: f32 [size] each, of the norms of q and k. Returns
    [batch, heads * size] in qkv's dtype.
    """
    batch, size, pairs = len(qkv), shape.size, shape.size // 2
    numbers = qkv.float() if bias is None else qkv.float() + bias
    parts = [n * size for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    q, k, v = (part.view(batch, -1, size) for part in torch.split(numbers, parts, dim=-1))
    if gains is not None:
        q, k = (_norm(x, gain, shape.epsilon) for x, gain in zip((q, k), gains, strict=True))
    slots = position.dim() == 2
    place = position[:, 0] if slots else position
    cos, sin = (table.index_select(0, place)[:, None] for table in (cache.cos, cache.sin))

    def turned(x: Tensor) -> Tensor:
        low, high = x[..., :pairs], x[..., pairs:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    keys, values = cache.keys, cache.values
    if slots:
        own = position[:, 1]
        keys[own, :, place] = turned(k).to(keys.dtype)
        values[own, :, place] = v.to(values.dtype)
        keys, values = keys[own], values[own]
    else:
        keys.index_copy_(2, position, turned(k)[:, :, None].to(keys.dtype))
        values.index_copy_(2, position, v[:, :, None].to(values.dtype))
    at = torch.arange(keys.shape[2], device=qkv.device)
    seen = at <= place[:, None]
    if shape.window:
        seen &= at > place[:, None] - shape.window
    grouped = turned(q).view(batch, shape.kv_heads, -1, size) * shape.scale
    scores = grouped @ keys.float().transpose(-1, -2)
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(dim=-1)
    # Places that nothing was written to may hold anything, NaN too.
    held = values.float().masked_fill(~seen[:, None, :, None], 0.0)
    return (weights @ held).view(batch, shape.heads * size).to(qkv.dtype)


def gate(x: Tensor, gelu: bool) -> Tensor:
    """act(g) u for x = [g, u] of [batch, 2 ffn]: SiLU, or GELU by tanh. Returns [batch, ffn]."""
    g, u = x.float().chunk(2, dim=-1)
    return ((F.gelu(g, approximate="tanh") if gelu else F.silu(g)) * u).to(x.dtype)


def _norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon) * gain
