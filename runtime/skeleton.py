"""The empty model a checkpoint or an artifact is poured into: parameters on the meta device, buffers real.

Buffers that no checkpoint stores (rotary frequencies, position ids, Gemma's embedding scale) are computed by
the model's constructor. So the constructor runs as usual, initialisation included, and only
`register_parameter` is watched: each parameter moves to the meta device the moment it is assigned, before
anything writes to it. A `torch.empty` that nobody touches costs address space, not memory, so the peak stays
near zero for any model.
"""

import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nstf.errors import NstfError, UnsupportedError, out_of_memory
from nstf.runtime.artifact.atomic_file import raise_disk_fault
from nstf.runtime.artifact.config import Limits
from nstf.runtime.imports import uncollected
from nstf.runtime.offline import without_hub
from nstf.runtime.small_buffers import small_buffers

# Keys that name code or a repository, or that make transformers expect weights in another library's format. An
# artifact is input from a stranger even though `nstf convert` filters what it writes (CVE-2026-4372, -5241). And
# `return_dict`, which changes what every call gives back.
_IGNORED_KEYS = frozenset(
    "attn_implementation auto_map base_model_name_or_path cache_dir checkpoint_path code_revision compression_config "
    "configuration_files custom_generate custom_pipelines experts_implementation gguf_file kernel_config name_or_path "
    "pretrained pretrained_model_name_or_path quantization_config return_dict revision rng_state tokenizer_file "
    "transformers_weights trust_remote_code use_kernels use_pretrained_backbone use_timm_backbone".split()
)
# Whether OPT has a last norm, its only word for that: a private field like others, but true or false leads nowhere.
_PRIVATE_FLAG = "_remove_final_layer_norm"
_DTYPES = frozenset(
    "auto float float16 half bfloat16 float32 float64 double float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz int8 "
    "uint8 int16 int32 int64".split()
)
_LABELS = ("id2label", "label2id")
# How transformers calls the modules of models, of their configs and of what makes their inputs, and those that stand for
# missing libraries. They lie in the first, or are called as their bases' modules are.
_PLACES = (
    "models.", "configuration_utils", "feature_extraction", "image_processing", "modeling_utils", "processing_utils",
    "tokenization_", "video_processing",
)  # fmt: skip
_OF_MODELS = (
    "configuration_", "feature_extraction_", "image_processing_", "modeling_", "processing_", "tokenization_",
    "video_processing_",
)  # fmt: skip
_MAX_DEPTH = 16
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")

_log = logging.getLogger("nstf")

# What building changes is the process's, PyTorch's own functions among it: threads take turns.
_BUILDING = threading.RLock()


def build_skeleton(
    config: Mapping[str, Any],
    architecture: str | None = None,
    dtype: torch.dtype = torch.float32,
    limits: Limits | None = None,
) -> nn.Module:
    """The transformers model a config describes: parameters on meta, buffers real, eval mode.

    config: the content of config.json. No hub access, no remote code: see `harmless`.
    architecture: the class's name; None takes `config["architectures"][0]`, or failing that the class the
    Auto mappings give for `model_type` (causal LM, then encoder-decoder, then the base model).
    dtype: the default dtype while the model is built, that of its meta parameters.
    limits: what the tensors of a stranger's file allow: building ends when it takes more.

    Raises UnsupportedError when transformers does not know the architecture or refuses the config, or when the model would
    be beyond `limits`.
    """
    given: dict[str, Any] = harmless(config)
    stated = given.get("architectures")
    name = architecture or (stated[0] if isinstance(stated, list) and stated else None)
    with uncollected():
        import transformers

        model_class = _named_class(name) if name else _auto_class(given.get("model_type"))
    try:
        with without_hub():
            model_config = _config_class(given, model_class).from_dict(given)
        if isinstance(getattr(model_config, "rescale_every", None), int):
            # RWKV would halve weights in place before its first pass, so that float16 holds its sums. Encoded weights, and
            # those that are read when they are needed, are not written to; without it the numbers are the same.
            model_config.rescale_every = 0
        # As `from_pretrained` does: models inside of others are built in what their config states (classifiers', say).
        for part in (model_config, *(getattr(model_config, n, None) for n in model_config.sub_configs)):
            if part is not None:
                part.dtype = dtype
        with building(limits), _default_dtype(dtype), torch.no_grad():
            _keep_off_stdout(model_class)
            with without_hub():
                model: nn.Module = model_class(model_config)
    except Exception as error:
        if out_of_memory(error):
            raise NstfError(
                f"not enough memory to build {model_class.__name__}; free some, or raise its limit"
            ) from error
        raise_disk_fault(error, f"build {model_class.__name__}")
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedError(
            f"transformers {transformers.__version__} cannot build {model_class.__name__} from this config: "
            f"{type(error).__name__}: {reason}"
        ) from error
    _real_buffers(model)
    model.requires_grad_(False)
    return model.eval()


def _real_buffers(model: nn.Module) -> None:
    """Buffers that a constructor made like a parameter (I-BERT's whole weights) are on meta, too: zeros in their place,
    which take no memory until the file's values come."""
    for part in model.modules():
        for name, value in list(part.named_buffers(recurse=False)):
            if value.is_meta:
                part._buffers[name] = torch.zeros((), dtype=value.dtype, device="cpu").expand(value.shape)


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with every key its class has, older spellings brought up to date, as transformers reads it.

    Raises UnsupportedError when transformers does not know the architecture or refuses the config.
    """
    given: dict[str, Any] = harmless(config)
    try:
        # Not the model's class: importing that takes another second.
        with without_hub():
            complete: dict[str, Any] = _config_class(given, None).from_dict(given).to_dict()
    except UnsupportedError:
        raise
    except Exception as error:
        raise_disk_fault(error, "read the model's config")
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedError(
            f"transformers refuses this config: {type(error).__name__}: {reason}"
        ) from error
    return complete


def harmless(value: Any, depth: int = 0) -> Any:
    """A config without the keys, and without the texts, that can lead transformers to code or to a repository.

    Private keys (but for a flag of OPT's) and those of `_IGNORED_KEYS` go, at every depth, and so does text with
    a path separator (a kernel or backbone by its hub name), except in labels.
    """
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        kept = {}
        for key, item in value.items():
            if key in _LABELS or is_private_flag(key, item):
                kept[key] = item
            elif key.endswith("dtype") and not _is_dtype(item):
                continue
            elif not key.startswith("_") and key not in _IGNORED_KEYS and not _names_a_place(item):
                kept[key] = harmless(item, depth + 1)
        return kept
    if isinstance(value, list | tuple):
        return [harmless(item, depth + 1) for item in value if not _names_a_place(item)]
    return value


def _is_dtype(value: Any) -> bool:
    """Whether a text, or every text of a dictionary, names a dtype. transformers asks torch for any, which imports a part of
    torch of that name."""
    if isinstance(value, Mapping):
        return all(map(_is_dtype, value.values()))
    return not isinstance(value, str) or value.removeprefix("torch.") in _DTYPES


def is_private_flag(key: str, value: object) -> bool:
    """Whether it is the one private field of a config that a model is made by."""
    return key == _PRIVATE_FLAG and isinstance(value, bool)


# Of settings of tokenizers: how keys end that name files or folders, and keys whose text is taken for a file's name. The
# arguments by place (`init_inputs`) are what a slow tokenizer of long ago was made with: files too.
_FILE_ENDINGS = ("_files", "_path", "_dir", "_spm", "mecab_option")
_FILE_TEXTS = ("vocab", "merges", "font")
# How keys end whose dictionaries hold arguments, too: of a library that a tokenizer calls, of a part of a processor.
ARGUMENTS_OF = ("_kwargs", "_processor", "_extractor", "tokenizer")


def leads_away(key: str, argument: bool = True) -> bool:
    """Whether a setting of a tokenizer leads to code, to a repository or to another file; `__type` marks an added token.

    argument: whether the key becomes an argument of a class; words and tokens are keys of other dictionaries.
    """
    if (key.startswith("_") and key != "__type") or key in _IGNORED_KEYS or key.endswith("_file"):
        return True
    if not argument:
        return False
    return key in _FILE_TEXTS or key == "init_inputs" or key.endswith(_FILE_ENDINGS)


def _names_a_place(value: object) -> bool:
    return isinstance(value, str) and any(c in value for c in "/\\:")


def parameter_names(model: nn.Module) -> list[str]:
    """The names of the parameters a checkpoint must hold, in module order: all but the tied aliases."""
    aliases = tied_aliases(model)
    return [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in aliases]


def tied_aliases(model: nn.Module) -> dict[str, str]:
    """Names of one and the same parameter: alias -> the name it is stored under.

    The source is the one transformers states (`lm_head.weight` -> `model.embed_tokens.weight`); where it
    states none, the first in module order.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    stated = dict(getattr(model, "all_tied_weights_keys", None) or {})
    aliases: dict[str, str] = {}
    for names in groups.values():
        source = next((stated[name] for name in names if stated.get(name) in names), names[0])
        aliases |= {name: source for name in names if name != source}
    return aliases


def exported(name: str) -> Any:
    """What transformers has under a name that stands in a file; None where it has nothing, or nothing of a model, a config,
    a tokenizer or a processor: asking for another one imports the module that it is in (its trainer, its pipelines).

    Raises ImportError or RuntimeError where its module cannot be imported.
    """
    import transformers

    place = getattr(transformers, "_class_to_module", {}).get(name, "")
    module = place.split(".")[-1]
    known = module.startswith("dummy_") or (place.startswith(_PLACES) and module.startswith(_OF_MODELS))
    return getattr(transformers, name, None) if known else None


def _named_class(name: object) -> Any:
    """The model class of transformers called `name`; nothing else that transformers exports will do."""
    import transformers

    found = None
    if isinstance(name, str) and _IDENTIFIER.fullmatch(name):
        try:
            found = exported(name)
        except (ImportError, RuntimeError):
            found = None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        if getattr(found, "forward", None) is not nn.Module.forward:  # an abstract base
            return found
    raise UnsupportedError(
        f"architecture {str(name)[:80]!r} is not known to transformers {transformers.__version__}; "
        "update transformers, or use nstf.runtime.load_tensors to read the tensors without a model"
    )


def _auto_class(model_type: object) -> Any:
    """The class the Auto mappings give for a `model_type`, for configs that name no architecture."""
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    if isinstance(model_type, str) and model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        for mapping in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
            names: Any = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
            if model_type in names:
                return _named_class(names[model_type])
        base = modeling_auto.MODEL_MAPPING_NAMES.get(model_type)
        if base is not None:
            return _named_class(base if isinstance(base, str) else base[0])
    raise UnsupportedError(
        f"the config names no architecture, and model_type {str(model_type)[:80]!r} is not known to "
        f"transformers {transformers.__version__}; "
        "use nstf.runtime.load_tensors to read the tensors without a model"
    )


def _config_class(config: Mapping[str, Any], model_class: Any) -> Any:
    """The config class: the model's own, unless `model_type` names another one of its family."""
    from transformers.models.auto import configuration_auto

    own = getattr(model_class, "config_class", None)
    model_type = config.get("model_type")
    if own is not None and model_type in (None, own.model_type):
        return own
    if isinstance(model_type, str) and model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        return configuration_auto.CONFIG_MAPPING[model_type]
    raise UnsupportedError(f"model_type {str(model_type)[:80]!r} has no config class in this transformers")


@contextmanager
def building(limits: Limits | None) -> Iterator[None]:
    """What a model class makes of a config inside: parameters on meta, and no more of them, nor larger buffers and tables,
    than `limits` allows (ValueError)."""
    with _BUILDING, parameters_on_meta(limits), small_buffers(limits):
        yield


@contextmanager
def parameters_on_meta(limits: Limits | None) -> Iterator[None]:
    """Every parameter assigned to a module inside this context, in this thread, moves to the meta device at once."""
    owner = threading.get_ident()
    made = 0

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal made
        if threading.get_ident() != owner:  # another thread's module
            original(self, name, param)
            return
        made += param is not None
        if limits is not None and made > limits.parameters:
            raise ValueError(
                f"it has more than {limits.parameters} parameters, and the file {limits.tensors} tensors"
            )
        # Some constructors fill a table over all positions in a loop afterwards.
        if limits is not None and param is not None and max(param.shape, default=0) > limits.size:
            raise ValueError(f"it has a parameter of shape {list(param.shape)}, beyond the file's tensors")
        original(self, name, param)
        # A parameter that is on meta already stays the same object: that is how tied weights are recognised.
        if param is not None and param.device.type != "meta":
            moved = type(param)(param.detach().to("meta"), requires_grad=False)
            moved.__dict__.update(param.__dict__)
            # What transformers' initialisation looks for: random numbers on meta take it 4 ms a matrix, for nothing.
            moved._is_hf_initialized = True  # type: ignore[attr-defined]
            self._parameters[name] = moved

    with _BUILDING:
        original = nn.Module.register_parameter
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


def _keep_off_stdout(model_class: type) -> None:
    """What a model prints goes to the log: Reformer says for each token which of `generate`'s own arguments it has no use
    for, in the middle of the text that a command writes to stdout."""

    def log(*said: object, **_: Any) -> None:
        _log.debug("%s: %s", model_class.__name__, " ".join(map(str, said)))

    setattr(sys.modules[model_class.__module__], "print", log)  # noqa: B010


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype, set for the time of the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
