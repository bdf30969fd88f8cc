"""From an `.nstf` file to something that runs: the model, its tokenizer, or its tensors alone.

The model is transformers' own class on a meta skeleton. Matrices stay as they are stored (views of the
mapped file on CPU) and are decoded by the kernels at each use; vectors, and matrices stored in the very
dtype that is computed in, become ordinary parameters. Nothing of the conversion side is imported, and no
code of the checkpoint's author is run.
"""

import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError, out_of_memory
from nstf.kernels.formats import EncodedTensor, FormatError, check_values, decode, dense
from nstf.runtime.artifact import Artifact, digests, open_artifact
from nstf.runtime.artifact.atomic_file import disk_errors, disk_fault
from nstf.runtime.artifact.config import limits_of
from nstf.runtime.artifact.generation import check_generation
from nstf.runtime.artifact.header import check_nesting, corrupt, short
from nstf.runtime.citizen import make_citizen
from nstf.runtime.compiled import use_compiled
from nstf.runtime.devices import stated_device
from nstf.runtime.divided_loading import DividedModel, check_options
from nstf.runtime.engine import KV_CACHES, Engine
from nstf.runtime.engine_generate import use_engine
from nstf.runtime.fused import choose_products
from nstf.runtime.modules import attach, dense_parameter, stays_encoded
from nstf.runtime.parameter import EncodedParameter
from nstf.runtime.ranks import Ranks, join, local_device
from nstf.runtime.skeleton import ARGUMENTS_OF, build_skeleton, harmless, leads_away, tied_aliases
from nstf.runtime.tokenizing import is_panic

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("nstf")

_ATTENTION = ("full", "planned")
_ENGINE = ("auto", "exact", "off")
_NOT_TOKENIZER = ("config.json", "generation_config.json")
# Of all files of a tokenizer together, unpacked: they are in memory, and in a temporary folder, at the same time.
MAX_TOKENIZER_BYTES = 1 << 29
# Of a tokenizer or a processor, whose keys become arguments of a class (so do all of the last, over the files that were
# found); the others are vocabularies, with words for keys.
_SETTINGS, _SPECIAL_TOKENS = "_config.json", "special_tokens_map.json"


def load(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    attention: str = "full",
    verify: bool = True,
    engine: str = "auto",
    kernels: str | os.PathLike[str] | None = None,
    kv_cache: str = "float16",
    mapped: bool = True,
    tensor_parallel: int = 1,
) -> "PreTrainedModel":
    """The transformers model an artifact holds, ready for inference, its weights still encoded.

    Its weights are not trained, but gradients pass through them: adapters (PEFT) train on it (docs/ecosystem.md).

    device: where the arrays go. dtype: what activations are computed in; None is float32 on CPU and the
    config's dtype elsewhere. attention: "full", or "planned" to run the attention plan stored in the
    artifact. verify: check every SHA-256 first (the file is read once, about 3 s per GB). engine: "auto" lets
    `model.generate` use the C++ engine on a CPU and captured graphs on a GPU where they can, "exact" the engine without
    its int8 activations, "off" neither. Convolutions on a CPU have int8 activations with
    "auto" alone (docs/convolutions.md).
    kernels: a file of `nstf compile`, whose code runs on the GPU: one that you made or trust. Without it, or where it
    does not match Triton and GPU, kernels are compiled at their first use. kv_cache: what that engine keeps keys and values
    as, "float16" or "int8" (half the memory; docs/cpu.md has what it costs). mapped: False reads the file into memory
    instead of mapping it: for files that others may truncate or write into (SECURITY.md). tensor_parallel: how many
    processes, started by torchrun, hold (and verify) a part each and run the model together (docs/scale.md).

    Raises UnsupportedError (an architecture that transformers does not know: use `load_tensors`),
    CorruptError, UsageError.
    """
    if attention not in _ATTENTION:
        raise UsageError(f"attention {attention!r} is not one of {', '.join(_ATTENTION)}")
    if engine not in _ENGINE:
        raise UsageError(f"engine {engine!r} is not one of {', '.join(_ENGINE)}")
    if kv_cache not in KV_CACHES:
        raise UsageError(f"kv_cache {kv_cache!r} is not one of {', '.join(KV_CACHES)}")
    if kv_cache != "float16" and (
        engine == "off" or attention != "full" or torch.device(device).type != "cpu"
    ):
        raise UsageError(
            f"kv_cache {kv_cache!r} is the CPU engine's: leave it out, or load for the CPU with full attention"
        )
    if tensor_parallel < 1:
        raise UsageError(f"tensor_parallel is {tensor_parallel}: give the number of processes")
    if tensor_parallel > 1:
        check_options(attention, kv_cache)
        device = local_device(device)
    device = stated_device(device)
    ranks = join(tensor_parallel, device) if tensor_parallel > 1 else None
    with _enough_memory(path):
        return _load(path, device, dtype, attention, verify, engine, kernels, kv_cache, mapped, ranks)


@contextmanager
def _enough_memory(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns a failed allocation into a NstfError of one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            raise NstfError(
                f"{os.fspath(path)}: not enough memory to load it; free some, or raise its limit"
            ) from error
        raise


def _load(
    path: str | os.PathLike[str],
    device: torch.device,
    dtype: torch.dtype | str | None,
    attention: str,
    verify: bool,
    engine: str,
    kernels: str | os.PathLike[str] | None,
    kv_cache: str,
    mapped: bool,
    ranks: Ranks | None,
) -> Any:
    """`load`, its arguments checked."""
    opened = partial(_opened, path, device, dtype, verify, mapped, ranks)
    parts = None
    if ranks is None:
        artifact, model, compute = opened()
    else:
        artifact, model, compute = ranks.agree(opened, lambda found: found[0].manifest.header_sha256)
        parts = DividedModel(artifact, ranks, device)

    def finish() -> None:
        _fill(model, artifact, compute, parts)
        choose_products(model, exact=engine != "auto")
        _set_generation_config(model, artifact)
        make_citizen(model, path)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if device.type == "cuda":
                from nstf.kernels.triton.aot import target_here
                from nstf.runtime.tiles import use_tiles

                use_tiles(path, target_here())
            if kernels is not None:
                use_compiled(artifact, kernels)
        model.to(device)

    if ranks is None:
        finish()
    else:
        ranks.agree(finish, lambda _: artifact.manifest.header_sha256)
        model.nstf_ranks = ranks
    plan = artifact.manifest.attention
    if attention == "planned":
        if not plan:
            raise UsageError(f"{os.fspath(path)}: no attention plan inside; load it with full attention")
        from nstf.runtime.attention import apply_plan

        try:
            apply_plan(model, dict(plan))
        except ValueError as error:
            raise CorruptError(f"{os.fspath(path)}: {error}; load it with full attention") from error
    generates = engine != "off" and hasattr(model, "generate")
    if generates and device.type == "cpu" and compute == torch.float32 and ranks is None:
        # Its matrices are views of the same mapping, or panels: then pages of the mapping are only in memory as far as
        # modules read them. Of arrays that were written into, there is no file to make panels of.
        def build(as_loaded: bool) -> Engine:
            return _engine(artifact, engine == "exact", kv_cache, attention, None if as_loaded else False)

        use_engine(model, build)
    elif generates and device.type == "cuda":
        from nstf.runtime.graph_generate import use_graphs

        use_graphs(model)
    return model


def _opened(
    path: str | os.PathLike[str],
    device: torch.device,
    dtype: torch.dtype | str | None,
    verify: bool,
    mapped: bool,
    ranks: Ranks | None,
) -> tuple[Artifact, Any, torch.dtype]:
    """(the file, checked; the model without weights; what it computes in). Ranks check a part of the file each."""
    artifact = open_artifact(path, verify=verify and ranks is None, mapped=mapped)
    if verify and ranks is not None:
        digests.verify_opened(artifact, ranks.rank, ranks.size)
    config = artifact.config()
    compute = _compute_dtype(dtype, device, config)
    model = build_skeleton(config, dtype=compute, limits=limits_of(artifact.manifest))
    _use_expert_loop(model)
    return artifact, model, compute


def _engine(artifact: Artifact, exact: bool, kv_cache: str, attention: str, panels: bool | None) -> Engine:
    try:
        return Engine(artifact, exact=exact, kv_cache=kv_cache, attention=attention, panels=panels)
    except NstfError as error:
        if kv_cache != "float16":
            _log.warning("keys and values are not kept as %s: %s", kv_cache, error)
        raise


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer (or, for a model without text, the processor) whose files the artifact holds.

    The files are written to a private temporary folder for the time of the call. Never runs remote code.
    Raises UnsupportedError when there are no such files or transformers cannot read them, CorruptError for a config that the
    tensors do not bear out.
    """
    with open_artifact(path) as artifact:
        names = [name for name in artifact.file_names() if name not in _NOT_TOKENIZER]
        if not names:
            raise UnsupportedError(f"{os.fspath(path)}: no tokenizer inside")
        if (size := sum(artifact.manifest.files[name].size for name in names)) > MAX_TOKENIZER_BYTES:
            raise corrupt(path, f"its tokenizer's files unpack to {size} bytes, above {MAX_TOKENIZER_BYTES}")
        files = {name: artifact.file(name) for name in names}
        if "config.json" in artifact.file_names():
            # transformers makes the model's config to find the tokenizer's class: a label for each of num_labels, say.
            files["config.json"] = json.dumps(harmless(artifact.config())).encode()
        return tokenizer_from_files(files, os.fspath(path))


def tokenizer_from_files(files: Mapping[str, bytes], where: str) -> Any:
    """The tokenizer a folder of these files (config.json among them) would give. `where` names it in errors."""
    from transformers import AutoTokenizer

    # What cannot be removed from a folder for temporary files is no reason to fail.
    with tempfile.TemporaryDirectory(prefix="nstf-", ignore_cleanup_errors=True) as folder:
        with disk_errors(Path(folder)):
            for name, content in files.items():
                Path(folder, name).write_bytes(_without_code(name, content, where))
        try:
            made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            _check_settings(made)
            return made
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            if out_of_memory(error):
                raise NstfError(
                    f"{where}: not enough memory for its tokenizer; free some, or raise its limit"
                ) from error
            if fault := disk_fault(error):
                raise NstfError(f"{folder}: cannot be read ({fault.strerror}); check the disk") from error
            reason = " ".join(str(error).split()).replace(folder, where)[:300]
            names = ", ".join(sorted(set(files) - set(_NOT_TOKENIZER)))
            raise UnsupportedError(
                f"{where}: transformers cannot build a tokenizer of {names}: {reason}"
            ) from error


def _check_settings(tokenizer: Any) -> None:
    """Raises ValueError for a setting that every call would stumble over."""
    longest = getattr(tokenizer, "model_max_length", 0)
    if type(longest) not in (int, float):
        raise ValueError(f"model_max_length is {short(longest)}, expected a number")


def _without_code(name: str, content: bytes, where: str) -> bytes:
    """A tokenizer's file, where it holds settings without those that lead to code or to another file.

    Raises CorruptError for settings that cannot be read here: transformers may read them all the same.
    """
    if not name.endswith(_SETTINGS) and name not in (_SPECIAL_TOKENS, "config.json"):
        return content
    try:
        check_nesting(content, "the text")
        found = json.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise corrupt(where, f"its {name} is not JSON that can be read ({error})") from error
    if isinstance(found, dict) and name != _SPECIAL_TOKENS:
        _check_class(found.get("tokenizer_class"), name, where)
    if name == "config.json":
        return content
    if name == _SPECIAL_TOKENS and isinstance(found, dict):
        found = {key: value for key, value in found.items() if key.endswith(("_token", "_tokens"))}
    return json.dumps(_stripped(found)).encode()


def _check_class(stated: object, source: str, where: str) -> None:
    """Raises UnsupportedError for a class that is none of a tokenizer or a processor: transformers would make of the files
    whatever of its own objects has that name, a model say. One that it lacks is left to it."""
    if not isinstance(stated, str):
        return
    import transformers as library

    for name in (stated, stated.removesuffix("Fast"), f"{stated}Fast"):
        try:
            found = getattr(library, name, None)
        except (ImportError, RuntimeError):
            continue
        if found is None or (isinstance(found, type) and _makes_inputs(found)):
            continue
        raise UnsupportedError(
            f"{where}: its {source} names {short(stated)}, which is no class of a tokenizer"
        )


def _makes_inputs(found: type) -> bool:
    """Whether a class of transformers is one of tokenizers or processors, or stands for one whose libraries are missing."""
    import transformers as library

    if "requires_backends" in vars(found) or hasattr(found, "_backends"):
        return True
    # The others are asked for after it: importing them takes two seconds.
    return issubclass(found, library.PreTrainedTokenizerBase) or issubclass(
        found, (library.ProcessorMixin, library.FeatureExtractionMixin, library.ImageProcessingMixin)
    )


def _stripped(value: Any, arguments: bool = True) -> Any:
    """arguments: whether the keys of a dictionary become arguments of a class, not words or tokens."""
    if isinstance(value, dict):
        return {
            k: _stripped(v, k.endswith(ARGUMENTS_OF))
            for k, v in value.items()
            if not leads_away(k, v, arguments)
        }
    return [_stripped(v, False) for v in value] if isinstance(value, list) else value


def load_tensors(
    path: str | os.PathLike[str],
    dtype: torch.dtype | str | None = torch.float32,
    verify: bool = True,
    mapped: bool = True,
) -> "DecodedTensors":
    """The tensors of an artifact by name, each decoded when it is asked for: works for any architecture.

    dtype: of the decoded floating-point tensors; None gives each the dtype it had in the source model.
    verify: check every SHA-256 first; a wrong one raises CorruptError. mapped: as for `load`.
    """
    return DecodedTensors(
        open_artifact(path, verify=verify, mapped=mapped), None if dtype is None else _dtype(dtype)
    )


class DecodedTensors(Mapping[str, Tensor]):
    """Name -> dense tensor, decoded at each access and not kept. Shared names give equal tensors."""

    def __init__(self, artifact: Artifact, dtype: torch.dtype | None) -> None:
        self._artifact, self._dtype = artifact, dtype
        self._names = artifact.names()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._artifact.manifest.tensors:
            raise KeyError(name)
        self._artifact.check_unchanged()
        try:
            values = decode(self._artifact.encoded(name))
        except FormatError as error:
            raise corrupt(self._artifact.path, f"tensor {short(name)}: {error}") from error
        stated = self._artifact.record(name).dtype
        source = dense.torch_dtype(stated) if stated in dense.DTYPES else torch.float32
        dtype = self._dtype or source
        return values.to(dtype) if values.is_floating_point() and dtype.is_floating_point else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype by object or torch's name. Raises UsageError."""
    name = str(dtype).removeprefix("torch.")
    found = dense.torch_dtype(name) if name in dense.DTYPES else None
    if found is None or not found.is_floating_point:
        raise UsageError(f"dtype {str(dtype)[:40]!r} is not one of float32, bfloat16, float16, float64")
    return found


def _compute_dtype(
    dtype: torch.dtype | str | None, device: torch.device, config: Mapping[str, Any]
) -> torch.dtype:
    if dtype is not None:
        return _dtype(dtype)
    stated = config.get("dtype") or config.get("torch_dtype")
    if device.type == "cpu" or not isinstance(stated, str):
        return torch.float32
    return _dtype(stated)


def _use_expert_loop(model: Any) -> None:
    """Experts run one by one, so that only those that are hit are decoded."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = "eager"


def _fill(
    model: nn.Module, artifact: Artifact, dtype: torch.dtype, divided: DividedModel | None = None
) -> None:
    """Every parameter and stored buffer of the skeleton from the artifact; of a divided model, this rank's part."""
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
        _place(model, name, artifact, source, read, dtype, made)
    if divided is not None:
        divided.connect(model, sources)
    with torch.no_grad():
        for name, buffer in buffers.items():
            if name in names:
                buffer.copy_(decode(artifact.encoded(names[name])).reshape(buffer.shape))
    unused = sorted(set(artifact.names()) - set(names.values()))
    if unused:
        _log.warning("%s: %d tensors are not used by %s: %s", artifact.path, len(unused),
                     type(model).__name__, ", ".join(unused[:3]))  # fmt: skip


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
) -> None:
    """One parameter, sharing the arrays of `source` when another parameter already uses them."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    shape = tuple(module._parameters[leaf].shape)  # type: ignore[union-attr]
    if source not in made:
        encoded = read(source)
        try:
            check_values(encoded)
        except FormatError as error:
            raise corrupt(artifact.path, f"tensor {short(source)}: {error}") from error
        if encoded.shape != shape:
            raise CorruptError(
                f"{artifact.path}: tensor {source!r} has shape {list(encoded.shape)}, "
                f"but its config.json asks for {list(shape)}"
            )
        as_stored = encoded.tree.kind == "dense" and encoded.arrays["values"].dtype == dtype
        stays = len(shape) >= 2 and not as_stored and stays_encoded(module, leaf, math.prod(shape))
        made[source] = EncodedParameter(encoded, dtype) if stays else dense_parameter(decode(encoded), dtype)
    value = made[source]
    if isinstance(value, EncodedParameter):
        attach(module, leaf, value)
    else:
        module._parameters[leaf] = value


def _set_generation_config(model: Any, artifact: Artifact) -> None:
    if "generation_config.json" not in artifact.file_names() or not hasattr(model, "generation_config"):
        return
    from transformers import GenerationConfig

    stated = check_generation(
        artifact.object("generation_config.json"), artifact.path, vocab=_vocabulary(model)
    )
    try:
        model.generation_config = GenerationConfig.from_dict(stated)
    except MemoryError:  # not the file's fault
        raise
    except Exception as error:
        raise CorruptError(f"{artifact.path}: its generation_config.json cannot be used ({error})") from error


def _vocabulary(model: Any) -> int | None:
    """How many tokens a model has scores for, at most; None where its config does not say.

    Idefics has some beside its `vocab_size`, and Marian may have others for what it writes than for what it reads.
    """
    names = ("vocab_size", "decoder_vocab_size", "tgt_vocab_size")
    stated = [n for name in names if type(n := getattr(model.config, name, None)) is int]
    more = getattr(model.config, "additional_vocab_size", None)
    return max(stated) + (more if type(more) is int else 0) if stated else None
