"""Norms of a loaded model on a GPU in two passes over their numbers, where transformers' own code makes seven.

A prompt's norms move more bytes than all else in it that is no product, and ranks do not divide them. Only norms whose code
is Llama's, which Qwen, Mistral and others repeat: rounded to 16 bits before they are multiplied by their weights, as here.
"""

import inspect
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import rms_norm


class _Fused(nn.Module):
    """First in the bases of a norm's class."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., size] over the root of its mean square, times the weights."""
        if (
            hidden_states.is_cuda
            and hidden_states.dtype == self.weight.dtype
            and hidden_states.element_size() == 2
        ):
            # In float32 inside; the library rounds once.
            return self.weight * rms_norm(hidden_states, self.weight.shape, None, self.variance_epsilon)
        found: Tensor = super().forward(hidden_states)
        return found


def fuse_norms(model: nn.Module) -> None:
    """Norms like Llama's compute as above from now on."""
    for module in model.modules():
        kind: Any = type(module)
        if _is_llamas(kind):
            module.__class__ = _fused(kind)


@cache
def _fused(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with another forward; its name stays."""
    made: Any = type(kind.__name__, (_Fused, kind), {"__module__": kind.__module__})
    return made  # type: ignore[no-any-return]


@cache
def _is_llamas(kind: type[nn.Module]) -> bool:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    if not kind.__name__.endswith("RMSNorm") or issubclass(kind, _Fused):
        return False
    try:
        return inspect.getsource(kind.forward) == inspect.getsource(LlamaRMSNorm.forward)
    except (OSError, TypeError):  # made without a file
        return False
