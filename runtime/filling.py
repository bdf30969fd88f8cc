"""The parameters and stored buffers of a model's skeleton, from the arrays of an artifact."""

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from nstf.errors import CorruptError, UnsupportedError
from nstf.kernels.formats import EncodedTensor, check_values, decode
from nstf.runtime.artifact import Artifact
from nstf.runtime.artifact.header import short
from nstf.runtime.divided_loading import DividedModel
from nstf.runtime.modules import attach, dense_parameter, stays_encoded
from nstf.runtime.parameter import EncodedParameter
from nstf.runtime.skeleton import tied_aliases
from nstf.runtime.tensors import decoded, decoding

_log = logging.getLogger("nstf")


Copy = Callable[[Tensor], Tensor]


def fill(
    model: nn.Module,
    artifact: Artifact,
    dtype: torch.dtype,
    divided: DividedModel | None = None,
    copy: Copy | None = None,
) -> None:
    """Every parameter and stored buffer of the skeleton from the artifact; of a divided model, this rank's part. copy: what
    takes the arrays of encoded tensors to where they will be used; None leaves them in the file's mapping."""
    aliases = tied_aliases(model)
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    buffers = dict(model.named_buffers(remove_duplicate=False))
    names = _stored_names([*parameters, *buffers], artifact, getattr(model, "base_model_prefix", ""))
    made: dict[str, EncodedParameter | nn.Parameter] = {}
    missing, sources = [], {}
    for name in parameters:
        source = names.get(name) or names.get(aliases.get(name, name)) or _tied_source(name, aliases, names)
        if source is None:
            missing.append(name)
        else:
            sources[name] = artifact.stored_name(source)
    if missing:
        raise UnsupportedError(
            f"{artifact.path}: {type(model).__name__} needs {len(missing)} tensors that are not in it, "
            f"for instance {missing[0]!r}; use nstf.runtime.load_tensors to read those it holds"
        )
    if divided is not None:
        divided.narrow(model, sources)
    read = artifact.encoded if divided is None else divided.encoded
    for name, source in sources.items():
        _place(model, name, artifact, source, read, dtype, made, copy)
    if divided is not None:
        divided.connect(model, sources)
    for name, buffer in buffers.items():
        if name in names:
            _fill_buffer(model, name, buffer, artifact, names[name])
    unused = sorted(set(artifact.names()) - set(names.values()))
    if unused:
        _log.warning("%s: %d tensors are not used by %s: %s", artifact.path, len(unused),
                     type(model).__name__, ", ".join(unused[:3]))  # fmt: skip


def _fill_buffer(model: nn.Module, name: str, buffer: Tensor, artifact: Artifact, source: str) -> None:
    """A stored buffer of the skeleton, in its place; zeros that take no memory (`_real_buffers`) are replaced."""
    values = decoded(artifact, source)
    if values.numel() != buffer.numel():
        raise CorruptError(
            f"{artifact.path}: buffer {short(source)} has shape {list(values.shape)}, "
            f"but its config.json asks for {list(buffer.shape)}"
        )
    values = values.reshape(buffer.shape)
    if buffer.is_contiguous():
        with torch.no_grad():
            buffer.copy_(values)
    else:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = values.to(buffer.dtype)


def _stored_names(wanted: list[str], artifact: Artifact, prefix: str) -> dict[str, str]:
    """Name in the model -> name in the artifact, allowing a base model's prefix to be there or not."""
    stored = set(artifact.names())
    found = {}
    for name in wanted:
        for candidate in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
            if candidate in stored:
                found[name] = candidate
                break
    return found


def _tied_source(name: str, aliases: Mapping[str, str], names: Mapping[str, str]) -> str | None:
    """The stored name of another member of the group that `name` is tied to."""
    group = [alias for alias, source in aliases.items() if source == aliases.get(name, name)]
    return next((names[member] for member in group if member in names), None)


def _place(
    model: nn.Module,
    name: str,
    artifact: Artifact,
    source: str,
    read: Callable[[str], EncodedTensor],
    dtype: torch.dtype,
    made: dict[str, EncodedParameter | nn.Parameter],
    copy: Copy | None,
) -> None:
    """One parameter, sharing the arrays of `source` when another parameter already uses them."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    shape = tuple(module._parameters[leaf].shape)  # type: ignore[union-attr]
    if source not in made:
        encoded = read(source)
        with decoding(artifact.where, source):
            check_values(encoded)
        if encoded.shape != shape:
            raise CorruptError(
                f"{artifact.path}: tensor {source!r} has shape {list(encoded.shape)}, "
                f"but its config.json asks for {list(shape)}"
            )
        as_stored = encoded.tree.kind == "dense" and encoded.arrays["values"].dtype == dtype
        stays = len(shape) >= 2 and not as_stored and stays_encoded(module, leaf, math.prod(shape))
        if stays and copy is not None:
            arrays = {path: copy(array) for path, array in encoded.arrays.items()}
            encoded = EncodedTensor(encoded.tree, encoded.shape, arrays)
        with decoding(artifact.where, source):
            made[source] = (
                EncodedParameter(encoded, dtype) if stays else dense_parameter(decode(encoded), dtype)
            )
    value = made[source]
    if isinstance(value, EncodedParameter):
        attach(module, leaf, value)
    else:
        module._parameters[leaf] = value
