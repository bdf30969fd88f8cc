"""Modules of a model by their kind: those that multiply, and what the code of others reads."""

import inspect
import re
from contextlib import suppress

import torch
from torch import nn

# In the code of a module's class: the weight of a part of it, for more than its type.
_PARTS_WEIGHT = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size))")

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LINEAR_TYPES: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)


def read_parts(kind: type[nn.Module]) -> set[str]:
    """Parts of a module whose weights its own code takes without a call of the part: `dt_proj` of Mamba, `out_proj` of
    torch's attention (in SigLIP) and of WavLM's."""
    found: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for method in filter(inspect.isfunction, vars(base).values()):
            with suppress(OSError, TypeError):  # made without a file
                found.update(_PARTS_WEIGHT.findall(inspect.getsource(method)))
    return found


def buffers_to(module: nn.Module, device: torch.device) -> None:
    """Moves the buffers (rotary frequencies and the like) to a device; parameters stay where they are."""
    for part in module.modules():
        for name, value in part.named_buffers(recurse=False):
            setattr(part, name, value.to(device))


def conv1d() -> tuple[type[nn.Module], ...]:
    """GPT-2's transposed linear layer, when transformers has it."""
    from transformers.pytorch_utils import Conv1D

    return (Conv1D,)
