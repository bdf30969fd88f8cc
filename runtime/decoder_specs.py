"""The kernels of captured decoding that an artifact's model needs beside those of its matrices: known without a card."""

from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from nstf.errors import CorruptError, UnsupportedError
from nstf.kernels.formats import EncodedTensor
from nstf.kernels.torch.decode_step import Heads
from nstf.kernels.triton.architecture import Architecture
from nstf.kernels.triton.ended import ended_specs
from nstf.kernels.triton.ending import Ending
from nstf.kernels.triton.linear import row_specs
from nstf.kernels.triton.spec import KernelSpec, hollow
from nstf.runtime.artifact import Artifact
from nstf.runtime.engine_config import EngineConfig, completed, read_config
from nstf.runtime.graph_decoder import LARGEST_BATCH, SMALLEST_CAPACITY
from nstf.runtime.planned_specs import planned_specs
from nstf.runtime.stacking import agree

# Matrices that meet the same activations, as runtime/graph_decoder.py stacks them.
_STACKS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
# Rows of the table that a launch looks up: a token of each sequence, or a prompt. Programs read blocks of 64 rows at most.
_LOOKED_UP = 64


def stacked_matrices(artifact: Artifact) -> Iterator[EncodedTensor]:
    """The stacks that decoding will make of an artifact's matrices, without their arrays."""
    for stack in _STACKS:
        for matrices in _together(artifact, stack):
            if len(matrices) == 1:
                yield matrices[0]


def _together(artifact: Artifact, stack: tuple[str, ...]) -> Iterator[list[EncodedTensor]]:
    """For each layer the stack of its matrices, without arrays, or these matrices where they do not agree."""
    names = set(artifact.names())
    first, *others = stack
    end = f".{first}.weight"
    for name in sorted(n for n in names if n.endswith(end)):
        members = [name, *(f"{name.removesuffix(end)}.{other}.weight" for other in others)]
        if names.issuperset(members):
            parts = [artifact.encoded(member) for member in members]
            if agree(parts):
                shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
                parts = [hollow(parts[0].tree, shape)]
            yield parts


def _ended(
    artifact: Artifact, config: EngineConfig, batch: int, dtype: torch.dtype, target: str
) -> Iterator[KernelSpec]:
    """Products with their endings, as decoder_glue.py launches them."""

    def named(*ends: str) -> list[EncodedTensor]:
        names = (n for n in artifact.names() if n.endswith(tuple(f"{end}.weight" for end in ends)))
        found = (artifact.encoded(name) for name in names)
        return list({(repr(m.tree), m.shape): m for m in found}.values())

    gelu, out_norms = bool(config.shape["gelu"]), config.family.out_norms
    qkv, gate_up = (list(_together(artifact, stack)) for stack in _STACKS)
    o, down = named(".self_attn.o_proj"), named(".mlp.down_proj")
    head = named("lm_head", "embed_tokens")
    normed = Ending(normed=True)
    wanted = [(m, normed) for m in [*chain(*qkv), *head]]
    for parts in gate_up:
        endings = (normed,) if len(parts) > 1 else (normed, Ending(gelu), Ending(gelu, normed=True))
        wanted += [(m, ending) for m in parts for ending in endings]
    wanted += [(m, Ending(adds=True)) for m in (*o, *down) if not out_norms]
    done = set()
    for matrix, ending in wanted:
        key = repr(matrix.tree), tuple(matrix.shape), ending
        if key not in done:
            done.add(key)
            yield from ended_specs(matrix, batch, dtype, ending, target)


def decoder_specs(
    artifact: Artifact, batches: Iterable[int], dtype: torch.dtype, row: Architecture
) -> list[KernelSpec]:
    """Every launch between the matrices, for some batches; [] for a model that captured decoding does not run."""
    if "config.json" not in artifact.file_names():
        return []
    try:
        config = read_config(completed(artifact.config()))
    except (CorruptError, UnsupportedError, ValueError, AttributeError):
        return []
    made: list[KernelSpec] = []
    rows = sorted(set(batches))
    sizes = [b for b in rows if b <= LARGEST_BATCH]
    for batch in sizes:
        made += _step(config, batch, dtype, row.target)
    for batch in rows:
        made += _prompt(config, batch, dtype, row.target)
        made += _ended(artifact, config, batch, dtype, row.target)
    made += planned_specs(artifact, config, sizes, dtype, row)
    for name in artifact.names():
        if name.endswith("embed_tokens.weight"):
            table = artifact.encoded(name)
            for i in range(_LOOKED_UP.bit_length()):
                made += row_specs(table, 1 << i, dtype, row.target)
    return made


def _prompt(config: EngineConfig, rows: int, dtype: torch.dtype, target: str) -> Iterator[KernelSpec]:
    """Of prompts of so many tokens in all."""
    from nstf.kernels.triton.decode_step import gate_spec, norm_spec
    from nstf.kernels.triton.prompt_heads import place_spec

    shape, family = config.shape, config.family
    yield norm_spec(rows, shape["hidden"], dtype, target)
    yield norm_spec(rows, shape["hidden"], dtype, target, dtype, family.out_norms)
    yield gate_spec(rows, shape["ffn"], dtype, shape["gelu"], target)
    heads = Heads(shape["heads"], shape["kv_heads"], shape["head_size"], shape["score_scale"])
    # Filled up to whole STEPs; what fills a short context may be no multiple of 16.
    sizes = ("tokens", "first_at", "capacity") if shape["context"] % 16 == 0 else ("first_at",)
    yield place_spec(rows, heads, sizes, dtype, family.qk_norm, bool(config.biases), target)


def _step(config: EngineConfig, batch: int, dtype: torch.dtype, target: str) -> Iterator[KernelSpec]:
    from nstf.kernels.triton.decode_step import attend_spec, gate_spec, norm_spec
    from nstf.kernels.triton.likeliest import likeliest_spec

    shape, family = config.shape, config.family
    yield norm_spec(batch, shape["hidden"], dtype, target)
    yield norm_spec(batch, shape["hidden"], dtype, target, dtype, family.out_norms)
    yield gate_spec(batch, shape["ffn"], dtype, shape["gelu"], target)
    # Capped logits are float32.
    yield likeliest_spec(batch, shape["vocab"], torch.float32 if shape["logit_cap"] else dtype, target)
    for window in sorted(set(config.windows)):
        heads = Heads(shape["heads"], shape["kv_heads"], shape["head_size"], shape["score_scale"], window)
        for capacity in sorted({min(SMALLEST_CAPACITY, shape["context"]), shape["context"]}):
            bias = bool(config.biases)
            for slots in (False, True):  # `generate`, and runtime/graph_batch.py
                yield attend_spec(batch, heads, capacity, dtype, family.qk_norm, bias, target, slots=slots)
