"""Attention in torch by the rules of quantised pages and predicted blocks: what runs where the kernels do not.

Exact to the rules of nstf.runtime.kv_formats, for any device and dtype; it keeps 16-bit numbers beside those read back from
their stored form, so that it saves no memory: the CPU engine and the GPU kernels do.

Shapes of one sequence: h query heads, g KV heads, N queries (the last ones), T positions, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nstf.runtime.attention_plan import HeadPlan
from nstf.runtime.kv_formats import BLOCK, PAGE, KVFormat, chosen_blocks, predicted_mass, stored


class StoredRows:
    """Keys (or values) of one sequence as they are read back, page by page as pages are complete."""

    def __init__(self, fmt: KVFormat) -> None:
        self.fmt = fmt
        self.rows: Tensor | None = None

    def read(self, x: Tensor) -> Tensor:
        """The stored form of the whole pages of x [g, T, D]; only pages that are new since the last call are made."""
        done = 0 if self.rows is None else self.rows.shape[1]
        whole = x.shape[1] // PAGE * PAGE
        if whole > done or self.rows is None:
            new = x[:, done:whole]
            if self.fmt.bits < 16 and whole > done:
                new = stored(new, self.fmt).to(x.dtype)
            self.rows = new if self.rows is None else torch.cat([self.rows, new], dim=1)
        return self.rows[:, :whole]


def attend_stored(
    query: Tensor,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    slots: tuple[int, ...],
    plans: tuple[HeadPlan, ...],
    scale: float,
) -> Tensor:
    """Attention of query [h, N, D] over keys and values near [g, T, D] and their stored whole pages far: [h, N, D].

    slots: the KV head of each query head. plans: the pattern of each.
    """
    count, total = query.shape[1], near[0].shape[1]
    start = total - count
    index = torch.tensor(slots, device=query.device)
    parts = []
    for first in range(start // BLOCK * BLOCK, total, BLOCK):
        low, high = max(first, start), min(first + BLOCK, total)
        # What some query of these reads in 16 bits, and what some query reads as stored.
        border, end = max(low // PAGE - 1, 0) * PAGE, max((high - 1) // PAGE - 1, 0) * PAGE
        at = torch.cat([torch.arange(end), torch.arange(border, high)]).to(query.device)
        position = torch.arange(low, high, device=query.device)
        is_far = torch.arange(len(at), device=query.device) < end
        old = position[:, None] // PAGE - at // PAGE >= 2
        seen = (at <= position[:, None]) & (old == is_far)
        keys, values = (
            torch.cat([f[:, :end], n[:, border:high]], dim=1) for f, n in zip(far, near, strict=True)
        )
        rows = query[:, low - start : high - start]
        mask = _patterns(seen, rows, keys, at, position, is_far, index, plans, scale, high - low == BLOCK)
        parts.append(
            F.scaled_dot_product_attention(
                rows[None], keys[index][None], values[index][None], attn_mask=mask[None], scale=scale
            )[0]
        )
    return torch.cat(parts, dim=1)


def _patterns(
    seen: Tensor,
    rows: Tensor,
    keys: Tensor,
    at: Tensor,
    position: Tensor,
    is_far: Tensor,
    index: Tensor,
    plans: tuple[HeadPlan, ...],
    scale: float,
    whole: bool,
) -> Tensor:
    """[h, rows, keys] bool: what each head's pattern leaves of `seen`."""
    found = []
    first = int(position[0])
    for head, plan in enumerate(plans):
        mask = seen
        if plan.streaming is not None:
            sink, window, length = plan.streaming
            band = (at < sink) | (at > position[:, None] - window) | (position[:, None] + 1 < length)
            mask = seen & band
        elif plan.block_sparse is not None and whole and first + 1 >= plan.block_sparse[2]:
            threshold, stride, _ = plan.block_sparse
            # As the first query of the block reads them, in order of position.
            read = torch.where(is_far, at < first - PAGE, at >= max(first - PAGE, 0))
            keep = chosen_blocks(
                predicted_mass(rows[head][None], keys[index[head]][read], scale=scale, stride=stride)[0],
                threshold,
            )
            mask = seen & keep[at // BLOCK]
        found.append(mask)
    return torch.stack(found)
