"""A model whose encoded weights come from, or go to, a folder of transformers: which modules hold which trees.

The folder's config states a tree and a shape for every encoded parameter; its safetensors files hold the arrays under the
names of the modules' buffers. Tied weights are stored once.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nstf.errors import CorruptError
from nstf.kernels.formats import EncodedTensor, array_specs
from nstf.kernels.formats.tree import node_from_json, node_to_json
from nstf.runtime.citizen import make_citizen
from nstf.runtime.fused import choose_products
from nstf.runtime.modules import SUFFIX, attach, hold
from nstf.runtime.parameter import EncodedParameter


def describe(model: nn.Module) -> dict[str, Any]:
    """{parameter's name: its tree and shape, or {"shared": the name it is stored under}} of a model with encoded weights."""
    first: dict[int, str] = {}
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, EncodedParameter):
            parameter = name.removesuffix(SUFFIX)
            source = first.setdefault(id(module), parameter)
            found[parameter] = (
                {"tree": node_to_json(module.tree), "shape": list(module.shape)}
                if source == parameter
                else {"shared": source}
            )
    return found


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's arrays and dense tensors, each once."""
    shared = tuple(f"{n}{SUFFIX}." for n, entry in describe(model).items() if "shared" in entry)
    dense: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.startswith(shared):
            continue
        if isinstance(tensor, nn.Parameter):
            if id(tensor) in dense:
                continue
            dense.add(id(tensor))
        found[name] = tensor.detach().clone()
    return found


def prepare(model: Any, entries: Mapping[str, Any], path: str, dtype: torch.dtype) -> None:
    """Gives a skeleton on the meta device its encoded parameters, empty. Raises CorruptError for entries that do not fit."""
    made: dict[str, EncodedParameter] = {}
    # The config's file is sorted by name: a shared parameter may come before the one it shares.
    for name, entry in sorted(entries.items(), key=lambda item: "shared" in item[1]):
        owner, _, leaf = name.rpartition(".")
        try:
            module = model.get_submodule(owner)
            if "shared" in entry:
                hold(module, leaf, made[entry["shared"]])
                # Until `finish`: a model's own initialisation may ask for it (ModernBERT's).
                module.__dict__[leaf + SUFFIX] = made[entry["shared"]]
                # transformers must not look for its weight before `finish`. Other modules are left to it: it computes
                # buffers that no file holds, and draws no random numbers for a LazyWeight.
                module._is_hf_initialized = True  # type: ignore[assignment]
            else:
                made[name] = _empty(entry, dtype)
                attach(module, leaf, made[name])
            for holder in (module, model.get_submodule(owner.rpartition(".")[0])):
                if not any(v is not None for v in (*holder._parameters.values(), *holder._buffers.values())):
                    # It has nothing else to initialise but its children's, and may write into what is encoded (Funnel).
                    holder._is_hf_initialized = True  # type: ignore[assignment]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(
                f"{path}: the quantization_config's entry for {name!r} does not fit: {error}"
            ) from error
    # transformers would look for parameters of these names; what is shared is put in its place by `finish`.
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {name: source for name, source in ties.items() if name not in entries}
    make_citizen(model, path)
    model._nstf_shared = {n: e["shared"] for n, e in entries.items() if "shared" in e}
    model.nstf_when_filled = _filled
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = "eager"


def _filled(model: Any, missing_keys: set[str] | None = None) -> None:
    """Notes the arrays that were not read: transformers fills what the folder lacks with whatever is in memory, and marks
    what it has read. Ties what is not encoded, such as the bias of BERT's head.

    missing_keys: parameters that the folder lacks; those that are tied here leave it.
    """
    model._nstf_missing = [
        name.removesuffix(SUFFIX)
        for name, module in model.named_modules()
        if isinstance(module, EncodedParameter)
        and not all(getattr(b, "_is_hf_initialized", False) for b in module.buffers())
    ]
    missing = missing_keys or set()
    ties = model.all_tied_weights_keys.items()
    for name, source in sorted(ties, key=lambda tie: missing.issuperset(tie)):
        if (name in missing) == (source in missing):
            continue
        lacking, held = (name, source) if name in missing else (source, name)
        owner, _, leaf = lacking.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter_or_buffer(held))
        missing.remove(lacking)


def finish(model: Any) -> None:
    """After the arrays were loaded: shared weights are put in their places, and what has no bytes follows the device.

    Convolutions and experts have int8 activations on a CPU, as `nstf.runtime.load` gives them by itself.
    """
    del model.nstf_when_filled
    if missing := model.__dict__.pop("_nstf_missing", None):
        raise CorruptError(f"the arrays of {missing[0]} are missing from the folder: export it again")
    for name, source in model.__dict__.pop("_nstf_shared").items():
        stored = model.get_submodule(source + SUFFIX)
        owner, _, leaf = name.rpartition(".")
        del model.get_submodule(owner).__dict__[leaf + SUFFIX]
        model.get_submodule(owner).add_module(leaf + SUFFIX, stored)
    for module in model.modules():
        if isinstance(module, EncodedParameter):
            module.settle()
    model.requires_grad_(False)
    choose_products(model, exact=False)


def _empty(entry: Mapping[str, Any], dtype: torch.dtype) -> EncodedParameter:
    tree, shape = node_from_json(entry["tree"]), tuple(entry["shape"])
    arrays = {
        path: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for path, spec in array_specs(tree, shape).items()
    }
    parameter = EncodedParameter(EncodedTensor(tree, shape, arrays), dtype)
    # No file holds it, so transformers leaves it where it is, and accelerate moves nothing off the meta device.
    parameter.stand_for(torch.empty(0, dtype=dtype, device="cpu"))
    return parameter
