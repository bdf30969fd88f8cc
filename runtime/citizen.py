"""What a loaded model does differently from transformers' own class: saving, tying, counting, resizing, printing.

transformers and the libraries around it (PEFT, lm-eval, accelerate) call these on any model, and take for granted that
every weight is a dense parameter. The class of a loaded model becomes one derived from its own, of the same name.
"""

import copy
import os
import shlex
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

from torch import nn

from nstf.errors import UnsupportedError
from nstf.runtime.parameter import EncodedParameter

# Set by nstf.integrations.transformers: writes a folder that from_pretrained loads with that import.
save_with: Callable[..., None] | None = None


class EncodedModel:
    """Goes before the model's own class."""

    nstf_path: str

    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """A folder that from_pretrained loads encoded, once nstf.integrations.transformers is imported.

        Raises UnsupportedError without: from_pretrained would ignore the arrays and fill the model with random weights.
        """
        if getattr(self, "nstf_ranks", None) is not None:
            raise UnsupportedError(
                "this process holds a part of the model: save it from one that was loaded without tensor_parallel"
            )
        if save_with is not None:
            save_with(self, super().save_pretrained, save_directory, *args, **kwargs)  # type: ignore[misc]
            return
        raise UnsupportedError(
            "save_pretrained cannot store encoded weights so that a plain from_pretrained finds them. The .nstf file is "
            "the saved model: copy it, import nstf.integrations.transformers first, or decode it into a folder: "
            f"nstf export {shlex.quote(self.nstf_path)} -o {shlex.quote(os.fspath(save_directory))}"
        )

    def tie_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing where the weights are encoded: those that belong together were loaded as one.

        In from_pretrained this is where the model is filled and nothing was moved to other devices yet.
        """
        if "nstf_when_filled" in self.__dict__:
            self.nstf_when_filled(self, kwargs.get("missing_keys"))
        if not _encoded_ends(self):
            super().tie_weights(*args, **kwargs)  # type: ignore[misc]

    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """The embedding, when it need not change. Raises UnsupportedError for another size of an encoded one."""
        if not _encoded_ends(self):
            return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)  # type: ignore[misc]
        embedding = self.get_input_embeddings()
        if new_num_tokens in (None, embedding.num_embeddings) and not (
            args or kwargs.get("pad_to_multiple_of")
        ):
            return embedding
        raise UnsupportedError(
            f"the embedding of {embedding.num_embeddings} tokens is encoded and keeps its size: add tokens to the "
            f"original model and convert it again, or decode this one: "
            f"nstf export {shlex.quote(self.nstf_path)} -o folder"
        )

    def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As transformers counts them, the encoded ones included."""
        dense: int = super().num_parameters(only_trainable, exclude_embeddings)  # type: ignore[misc]
        if only_trainable:
            return dense
        owners = dict(self.named_modules())
        counted: dict[int, int] = {}
        for name, module in owners.items():
            if isinstance(module, EncodedParameter):
                skipped = exclude_embeddings and isinstance(owners[name.rpartition(".")[0]], nn.Embedding)
                counted.setdefault(id(module), 0 if skipped else module.numel)
        return dense + sum(counted.values())

    def __copy__(self: Any) -> Any:
        """Another model with the same modules, as of any module; its `generate` is its own."""
        clone: Any = type(self).__new__(type(self))  # type: ignore[call-overload]
        state = self.__dict__.copy()
        for name, value in state.items():
            if isinstance(value, MethodType) and value.__self__ is self:
                state[name] = MethodType(value.__func__, clone)
        clone.__setstate__(state)
        return clone

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        clone: Any = type(self).__new__(type(self))  # type: ignore[call-overload]
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__dict__, memo))
        return clone

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        raise UnsupportedError(
            "an encoded model is not pickled (torch.save): the .nstf file is the saved model, "
            f"nstf.runtime.load({self.nstf_path!r}) makes it again; state_dict() can be saved"
        )

    def extra_repr(self: Any) -> str:
        """What the file makes of the model, and which decoder `generate` uses."""
        encoded = [m for m in self.modules() if isinstance(m, EncodedParameter)]
        held = sum(m.size_bytes for m in encoded)
        numel = sum(m.numel for m in encoded)
        bits = f" at {8 * held / numel:.2f} bits" if numel else ""
        return f"file={self.nstf_path!r}, {numel} weights encoded{bits}, {_decoder(self)}"


class EncodedPart(EncodedModel):
    """A model inside of another, as `model.model` of a language model."""

    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError: what would be written is loaded with random weights."""
        raise UnsupportedError(
            f"this {type(self).__name__} is a part of an encoded model: save the whole one, or decode it into a folder, "
            f"nstf export {shlex.quote(self.nstf_path)} -o folder, and load the part from there"
        )

    def extra_repr(self: Any) -> str:
        """Nothing: the whole model says what is encoded."""
        return ""


def make_citizen(model: Any, path: str | os.PathLike[str]) -> None:
    """Gives a loaded transformers model, and those inside of it, the behaviour above. path: the file it came from, for
    messages."""
    import transformers

    parts = model.modules() if isinstance(model, nn.Module) else ()
    for part in parts:
        if isinstance(part, transformers.PreTrainedModel) and not isinstance(part, EncodedModel):
            behaviour = EncodedModel if part is model else EncodedPart
            part.__class__ = _derived(type(part), behaviour)  # type: ignore[arg-type, assignment]
            part.nstf_path = os.fspath(path)  # type: ignore[assignment]


@cache
def _derived(base: type, behaviour: type) -> type:
    return type(base.__name__, (behaviour, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def _encoded_ends(model: Any) -> bool:
    """Whether the embedding or the head, which transformers ties and resizes, is encoded."""
    try:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
    except NotImplementedError:  # a model of images
        return False
    return any(isinstance(end, nn.Module) and "weight_encoded" in end._modules for end in ends)


def _decoder(model: Any) -> str:
    slot = getattr(model, "nstf_engine", None) or getattr(model, "nstf_graphs", None)
    if slot is None:
        return "generate by transformers"
    kind = "the CPU engine" if hasattr(model, "nstf_engine") else "captured graphs"
    if not slot.tried:
        return f"generate by {kind} where it knows the model"
    return f"generate by {kind}" if slot.engine is not None else "generate by transformers"
