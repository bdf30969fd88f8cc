"""Mixtures of experts whose stacks of weights stay encoded.

On a CPU all experts of a layer run from their codes in one grouped product each way (kernels/cpu/grouped.py). Elsewhere,
where gradients are wanted, and for stacks whose experts no kernel reads, transformers' own loop multiplies with one expert
after the other (`experts_implementation` must be "eager": the others gather the stack).
"""

from typing import Any

import torch
from torch import Tensor

from nstf.kernels.cpu import grouped
from nstf.runtime.parameter import LazyWeight


class EncodedExperts:
    """A module with stacks [experts, ...]: `self.stack[i]` stays encoded, so only experts that are hit are read.

    exact_products: no int8 activations; `nstf.runtime.load` turns them on where it was not asked for exact products.
    """

    exact_products = True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # torch.compile takes transformers' loop apart, and nothing of the extension.
        if not torch.compiler.is_compiling() and not kwargs and len(args) == 3:
            y = products(self, *args)
            if y is not None:
                return y
        each: Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        return each


def products(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor | None:
    """What transformers' `grouped_mm` gives for a module of experts, or None where its stacks are not for grouped products.

    hidden: [tokens, in]. index: [tokens, choices], `num_experts` for none; weights alike. Returns [tokens, in] in hidden's
    dtype, computed in float32. Raises ValueError for an expert that is not there.
    """
    if not _plain(module, hidden, index, weights):
        return None
    stacks = []
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weight = getattr(module, name)
        # An adapter on a stack, or a stack that is not encoded.
        if not isinstance(weight, LazyWeight):
            return None
        found = grouped.stack(weight.source, module.is_transposed, module.exact_products)
        if found is None:
            return None
        stacks.append(found)
    up, down = stacks
    routing = grouped.route(index, up.experts)
    if not (up.ready(routing) and down.ready(routing)):
        return None
    with torch.no_grad():
        own = index.reshape(-1)[routing.order[: routing.taken]] if module.has_bias else None
        y = up.multiply(hidden.float().contiguous(), routing, gather=True)
        if own is not None:
            y += (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[own]
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
        y = down.multiply(y.contiguous(), routing, gather=False)
        if own is not None:
            y += module.down_proj_bias[own]
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y).contiguous()
        return grouped.combine(y, routing, weights.float().contiguous()).to(hidden.dtype)


def _plain(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> bool:
    """Whether these are tokens on a CPU that nobody differentiates, for a module that transformers describes."""
    if hidden.device.type != "cpu" or not grouped.available():
        return False
    if hidden.dim() != 2 or not len(hidden) or index.dim() != 2 or weights.shape != index.shape:
        return False
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate")):
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(t.requires_grad for t in (hidden, weights, *module.parameters()))
