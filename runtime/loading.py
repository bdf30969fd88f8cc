"""From an `.nstf` file to a model that runs.

The model is transformers' own class on a meta skeleton. Matrices stay as they are stored (views of the
mapped file on CPU) and are decoded by the kernels at each use; vectors, and matrices stored in the very
dtype that is computed in, become ordinary parameters. Nothing of the conversion side is imported, and no
code of the checkpoint's author is run.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nstf.errors import CorruptError, NstfError, UsageError, out_of_memory
from nstf.runtime import peer_sums
from nstf.runtime.artifact import Artifact, digests, open_artifact
from nstf.runtime.artifact.config import limits_of
from nstf.runtime.artifact.generation import check_generation
from nstf.runtime.citizen import make_citizen
from nstf.runtime.compiled import use_compiled
from nstf.runtime.devices import stated_device
from nstf.runtime.divided_loading import DividedModel, check_options
from nstf.runtime.engine import KV_CACHES, Engine
from nstf.runtime.engine_generate import use_engine
from nstf.runtime.filling import fill
from nstf.runtime.fused import choose_products
from nstf.runtime.memory_limit import watch_limit
from nstf.runtime.norms import fuse_norms
from nstf.runtime.ranks import Ranks, join, local_device
from nstf.runtime.skeleton import build_skeleton
from nstf.runtime.staging import Staging
from nstf.runtime.tensors import named_dtype
from nstf.runtime.torch_state import usual_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("nstf")

_ATTENTION = ("full", "planned")
_ENGINE = ("auto", "exact", "off")


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
    its int8 activations, "off" neither. Convolutions and experts on a CPU have int8 activations with
    "auto" alone (docs/convolutions.md, docs/structure.md).
    kernels: a file of `nstf compile`, whose code runs on the GPU: one that you made or trust. Without it, or where it
    does not match Triton and GPU, kernels are compiled at their first use. kv_cache: what that engine keeps keys and values
    as, "float16" or "int8" (half the memory; docs/cpu.md has what it costs). mapped: False reads the file into memory
    instead of mapping it: for files that others may truncate or write into (SECURITY.md). tensor_parallel: how many
    processes, started by torchrun, hold (and verify) a part each and run the model together (docs/scale.md).

    Raises UnsupportedError (an architecture that transformers does not know: use `load_tensors`),
    CorruptError, UsageError.
    """
    watch_limit()
    if attention not in _ATTENTION:
        raise UsageError(f"attention {attention!r} is not one of {', '.join(_ATTENTION)}")
    if engine not in _ENGINE:
        raise UsageError(f"engine {engine!r} is not one of {', '.join(_ENGINE)}")
    if kv_cache not in KV_CACHES:
        raise UsageError(f"kv_cache {kv_cache!r} is not one of {', '.join(KV_CACHES)}")
    if kv_cache != "float16" and (engine == "off" or attention != "full" or not _is_cpu(device)):
        raise UsageError(
            f"kv_cache {kv_cache!r} is the CPU engine's: leave it out, or load for the CPU with full attention"
        )
    if type(tensor_parallel) is not int or tensor_parallel < 1:
        raise UsageError(f"tensor_parallel is {tensor_parallel}: give the number of processes")
    if tensor_parallel > 1:
        check_options(attention, kv_cache)
        device = local_device(device)
    device = stated_device(device)
    # In inference mode tensors have no versions, by which the engine sees that they were changed.
    with usual_thread():
        ranks = join(tensor_parallel, device) if tensor_parallel > 1 else None
        if ranks is not None:
            peer_sums.make(ranks, device)
        with _enough_memory(path):
            return _load(path, device, dtype, attention, verify, engine, kernels, kv_cache, mapped, ranks)


def _is_cpu(device: str | torch.device) -> bool:
    try:
        return torch.device(device).type == "cpu"
    except RuntimeError:
        return stated_device(device).type == "cpu"  # which says what is wrong with it


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
        with Staging(artifact, device) if device.type == "cuda" else nullcontext() as staging:
            if parts is not None and staging is not None:
                parts.copy = staging.copy
            fill(model, artifact, compute, parts, None if staging is None else staging.copy)
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
    if generates and device.type == "cpu" and compute == torch.float32 and ranks is not None:
        from nstf.runtime.divided_engine import divided_engine

        use_engine(model, lambda _: divided_engine(model, artifact, ranks, engine == "exact"), ranks)
    elif generates and device.type == "cpu" and compute == torch.float32:
        # Its matrices are views of the same mapping, or panels: then pages of the mapping are only in memory as far as
        # modules read them. Of arrays that were written into, there is no file to make panels of.
        def build(as_loaded: bool) -> Engine:
            return _engine(artifact, engine == "exact", kv_cache, attention, None if as_loaded else False)

        use_engine(model, build, check=artifact.check_unchanged)
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
    if device.type == "cuda":
        fuse_norms(model)
    return artifact, model, compute


def _engine(artifact: Artifact, exact: bool, kv_cache: str, attention: str, panels: bool | None) -> Engine:
    try:
        return Engine(artifact, exact=exact, kv_cache=kv_cache, attention=attention, panels=panels)
    except NstfError as error:
        if kv_cache != "float16":
            _log.warning("keys and values are not kept as %s: %s", kv_cache, error)
        raise


def _compute_dtype(
    dtype: torch.dtype | str | None, device: torch.device, config: Mapping[str, Any]
) -> torch.dtype:
    if dtype is not None:
        return named_dtype(dtype)
    stated = config.get("dtype") or config.get("torch_dtype")
    if device.type == "cpu" or not isinstance(stated, str):
        return torch.float32
    return named_dtype(stated)


def _use_expert_loop(model: Any) -> None:
    """Where experts are not grouped (experts.py) they run one by one, so that only those that are hit are decoded."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = "eager"


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
