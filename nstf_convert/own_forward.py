"""Logits by the forward of a model's own class, from the last hidden states of its base model.

A class may do more to them than multiply: transform them before its head (BERT, ModernBERT's decoder), scale or cap the
logits, each by a setting of another name. So its forward runs, with the base model left out.
"""

import copy
import inspect
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn


def takes_embeddings(module: nn.Module) -> bool:
    """Whether a model can be given what the base model reads in place of token ids."""
    return "inputs_embeds" in inspect.signature(type(module).forward).parameters


def needs_images(module: nn.Module) -> bool:
    """Whether a model reads no text without images (BLIP-2, InstructBLIP); most of its kind do (LLaVA)."""
    taken = inspect.signature(type(module).forward).parameters.get("pixel_values")
    return taken is not None and taken.default is taken.empty


def logits_of(module: Any, base: nn.Module, hidden: Tensor) -> Tensor:
    """Logits [n, vocabulary] of a model, which `takes_embeddings`, for hidden states [n, hidden] of its `base`, a child."""
    top = copy.copy(module)
    top._modules = {n: _Given(base) if m is base else m for n, m in module._modules.items()}
    return top(inputs_embeds=hidden[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


class _Given(nn.Module):
    """In the place of a base model: gives back as last hidden states what it is given as embeddings."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["_base"] = base  # no child: it is not run
        if hasattr(base, "decoder"):  # OPT's head follows a part of the base
            self.__dict__["decoder"] = self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return _GivenStates(last_hidden_state=inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


class _GivenStates(OrderedDict[str, Any]):
    """As an output of transformers that has nothing else."""

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.get(name)
