"""What a decoder of the Llama family does between its matrices, for new tokens and for prompts: plain torch.

The definition that kernels/triton/decode_step.py and prompt_heads.py are checked against, and what runs where they cannot.
Positions of new tokens are on the device, so that nothing waits for the host: int64 [1] where all sequences are equally
long, else [batch, 2], the position of each token and the sequence of the cache that it belongs to.
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
    batch, size = len(qkv), shape.size
    slots = position.dim() == 2
    place = position[:, 0] if slots else position
    q, k, v = _turned(qkv, bias, gains, cache, place, shape)
    keys, values = cache.keys, cache.values
    if slots:
        own = position[:, 1]
        keys[own, :, place] = k.to(keys.dtype)
        values[own, :, place] = v.to(values.dtype)
        keys, values = keys[own], values[own]
    else:
        keys.index_copy_(2, position, k[:, :, None].to(keys.dtype))
        values.index_copy_(2, position, v[:, :, None].to(values.dtype))
    at = torch.arange(keys.shape[2], device=qkv.device)
    seen = at <= place[:, None]
    if shape.window:
        seen &= at > place[:, None] - shape.window
    grouped = q.view(batch, shape.kv_heads, -1, size) * shape.scale
    scores = grouped @ keys.float().transpose(-1, -2)
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(dim=-1)
    # Places that nothing was written to may hold anything, NaN too.
    held = values.float().masked_fill(~seen[:, None, :, None], 0.0)
    return (weights @ held).view(batch, shape.heads * size).to(qkv.dtype)


def place(
    qkv: Tensor,
    bias: Tensor | None,
    gains: tuple[Tensor, Tensor] | None,
    cache: Cache,
    tokens: int,
    shape: Heads,
    first: int = 0,
) -> Tensor:
    """The queries of prompts of `tokens` each, or of such pieces of longer ones, turned, [batch * tokens, heads, size] in
    qkv's dtype; keys and values go into the cache, from the position `first` on.

    qkv: [batch * tokens, width], sequence by sequence. bias, gains: as of `attend`.
    """
    at = torch.arange(first, first + tokens, device=qkv.device).repeat(len(qkv) // tokens)
    q, k, v = _turned(qkv, bias, gains, cache, at, shape)
    for kept, new in ((cache.keys, k), (cache.values, v)):
        rows = new.view(-1, tokens, shape.kv_heads, shape.size).transpose(1, 2)
        kept[:, :, first : first + tokens].copy_(rows)
    return q.to(qkv.dtype)


def _turned(
    qkv: Tensor,
    bias: Tensor | None,
    gains: tuple[Tensor, Tensor] | None,
    cache: Cache,
    at: Tensor,
    shape: Heads,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values f32 [rows, heads, size] of tokens at the positions `at`, int64 [rows] or [1]: with bias, norm
    and rotation."""
    rows, size, pairs = len(qkv), shape.size, shape.size // 2
    numbers = qkv.float() if bias is None else qkv.float() + bias
    parts = [n * size for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    q, k, v = (part.reshape(rows, -1, size) for part in torch.split(numbers, parts, dim=-1))
    if gains is not None:
        q, k = (_norm(x, gain, shape.epsilon) for x, gain in zip((q, k), gains, strict=True))
    cos, sin = (table.index_select(0, at)[:, None] for table in (cache.cos, cache.sin))

    def turned(x: Tensor) -> Tensor:
        low, high = x[..., :pairs], x[..., pairs:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    return turned(q), turned(k), v


def gate(x: Tensor, gelu: bool) -> Tensor:
    """act(g) u for x = [g, u] of [batch, 2 ffn]: SiLU, or GELU by tanh. Returns [batch, ffn]."""
    g, u = x.float().chunk(2, dim=-1)
    return ((F.gelu(g, approximate="tanh") if gelu else F.silu(g)) * u).to(x.dtype)


def _norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon) * gain
