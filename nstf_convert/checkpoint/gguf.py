"""GGUF checkpoints: one tensor at a time from the file, dequantised in pieces, under transformers' names.

The reference of a quantised GGUF is its bfloat16 expansion: every parameter is reported as bfloat16, and `get`
gives float32 values rounded to it. A file whose tensors are all F32, F16 or BF16 keeps its own dtypes.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from nstf.errors import CorruptError, NstfError, UnsupportedError
from nstf_convert.checkpoint.base import Checkpoint
from nstf_convert.checkpoint.gguf_arch import (
    Architecture,
    Metadata,
    build_config,
    llama3_rope,
    parameter_name,
)
from nstf_convert.checkpoint.gguf_check import GgufHeader, GgufTensor, read_header
from nstf_convert.checkpoint.gguf_tokenizer import tokenizer_files
from nstf_convert.checkpoint.naming import Plan, Read, Recipe, plan_of_recipes
from nstf_convert.checkpoint.paths import open_regular, pread_all, read_into
from nstf_convert.checkpoint.source import Source, TensorInfo

# ggml's ids of the types that are stored as plain values.
PLAIN = {
    0: "float32",
    1: "float16",
    30: "bfloat16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
}
PIECE_VALUES = 1 << 22


def open_file(path: Path) -> Checkpoint:
    """The model of a GGUF file.

    Raises CorruptError or UnsupportedError; an unknown architecture keeps ggml's names.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise NstfError(f"{path}: reading GGUF needs the package gguf; run `pip install gguf`") from error
    header = read_header(path)
    if header.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedError(
            f"{path} is one part of a split GGUF; join the parts with `llama-gguf-split --merge` first"
        )
    source = _source(path, header, open_regular(path))
    try:
        meta = Metadata(header.metadata, {name: t.shape for name, t in header.tensors.items()}, path)
        try:
            config, architecture = build_config(meta)
            config["dtype"] = source.infos["token_embd.weight"].dtype
            config = _with_rope_freqs(config, source, path)
            recipes = _recipes(source, architecture, config, path)
            plan = plan_of_recipes(recipes, config, str(path))
            # What llama.cpp adds and the class does not: another model, whatever its other tensors are.
            if lost := next((n for n in recipes if n.endswith(".bias") and n not in plan.recipes), None):
                raise UnsupportedError(f"{path}: tensor {lost!r} has no place in {plan.architecture}")
        except UnsupportedError as error:
            note = f"{error}: tensors keep the names in the file, and no config is made"
            return Checkpoint(path, source, Plan(_under_own_names(source), notes=(note,)), None, dict)
        return Checkpoint(path, source, plan, config, lambda: _side_files(path, header))
    except NstfError:
        source.close()
        raise


def _source(path: Path, header: GgufHeader, file: BinaryIO) -> Source:
    tensors = header.tensors
    quantised = any(t.ggml_type not in PLAIN for t in tensors.values())

    def info(tensor: GgufTensor) -> TensorInfo:
        dtype = PLAIN.get(tensor.ggml_type, "bfloat16")
        is_float = (
            tensor.ggml_type not in PLAIN or torch.empty(0, dtype=getattr(torch, dtype)).is_floating_point()
        )
        return TensorInfo.of(tensor.shape, "bfloat16" if quantised and is_float else dtype)

    def read(name: str) -> Tensor:
        return _read(file, tensors[name], f"{path}: tensor {name!r}")

    def read_bytes(name: str, start: int, length: int) -> bytes:
        return pread_all(file, tensors[name].start + start, length, f"{path}: tensor {name!r}")

    return Source(
        kind="gguf",
        infos={name: info(tensor) for name, tensor in tensors.items()},
        stored_bytes={name: tensor.size_bytes for name, tensor in tensors.items()},
        read=read,
        read_bytes=read_bytes,
        describe=lambda name: str(path),
        close=file.close,
    )


def _read(file: BinaryIO, tensor: GgufTensor, what: str) -> Tensor:
    """A tensor as stored when it is of a plain type, else dequantised to float32 in pieces of whole rows."""
    if tensor.ggml_type in PLAIN:
        buffer = bytearray(tensor.size_bytes)
        read_into(file, tensor.start, memoryview(buffer), what)
        return torch.frombuffer(buffer, dtype=getattr(torch, PLAIN[tensor.ggml_type])).reshape(tensor.shape)
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.ggml_type)
    columns = tensor.shape[-1]
    rows = math.prod(tensor.shape) // columns
    row_bytes = tensor.size_bytes // rows
    result = torch.empty(rows, columns, dtype=torch.float32)
    step = max(1, PIECE_VALUES // columns)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        raw = pread_all(file, tensor.start + row * row_bytes, count * row_bytes, what)
        blocks = np.frombuffer(raw, dtype=np.uint8).reshape(count, row_bytes)
        try:
            with np.errstate(all="ignore"):  # scales that are no numbers: `get` says so
                values = gguf.dequantize(blocks, kind)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{what} has type {kind.name}, which gguf cannot dequantise; give another file"
            ) from error
        result[row : row + count] = torch.from_numpy(np.ascontiguousarray(values))
    return result.reshape(tensor.shape)


def _recipes(
    source: Source, architecture: Architecture, config: dict[str, Any], path: Path
) -> dict[str, Recipe]:
    """One recipe per transformers parameter.

    Raises UnsupportedError for a tensor the architecture has no place for.
    """
    recipes: dict[str, Recipe] = {}
    joined: dict[str, dict[str, str]] = {}
    for stored, info in source.infos.items():
        if stored == "rope_freqs.weight":
            continue
        name = parameter_name(architecture, stored)
        if name is None:
            raise UnsupportedError(f"{path}: tensor {stored!r} has no place in {architecture.model_class}")
        if name.endswith("gate_up_proj") and "_exps" in stored:
            joined.setdefault(name, {})["gate" if "ffn_gate_exps" in stored else "up"] = stored
            continue
        if name in recipes:
            raise CorruptError(f"{path}: two tensors are {name!r}; download it again")
        undo = _undo(architecture, config, stored, name, info.shape, path)
        shape = (
            (1, *info.shape)
            if stored.endswith("ffn_gate_inp_shexp.weight") and len(info.shape) == 1
            else info.shape
        )
        recipes[name] = Recipe(
            (stored,),
            TensorInfo.of(shape, info.dtype),
            partial(_build, stored, undo, shape, info.dtype),
            as_stored=undo is None and shape == info.shape,
        )
    for name, parts in joined.items():
        recipes[name] = _joined(source, name, parts, path)
    return recipes


def _under_own_names(source: Source) -> dict[str, Recipe]:
    """Every tensor under ggml's name, for an architecture that is not known."""
    return {
        name: Recipe((name,), info, partial(_build, name, None, info.shape, info.dtype), as_stored=True)
        for name, info in source.infos.items()
    }


def _joined(source: Source, name: str, parts: dict[str, str], path: Path) -> Recipe:
    """Experts' gate [E, ffn, in] and up [E, ffn, in] as one [E, 2 * ffn, in]."""
    shapes = [source.infos[stored].shape for stored in parts.values()]
    if len(parts) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 3:
        raise CorruptError(
            f"{path}: the tensors of {name!r} are {sorted(parts.values())}, expected gate and up alike"
        )
    gate, up = parts["gate"], parts["up"]
    experts, rows, columns = shapes[0]
    dtype = source.infos[gate].dtype

    def build(read: Read) -> Tensor:
        first = read(gate)
        result = torch.empty(experts, 2 * rows, columns, dtype=first.dtype)
        result[:, :rows] = first
        del first
        result[:, rows:] = read(up)
        return _rounded(result, dtype)

    return Recipe((gate, up), TensorInfo.of((experts, 2 * rows, columns), dtype), build)


def _undo(
    architecture: Architecture,
    config: dict[str, Any],
    stored: str,
    name: str,
    shape: tuple[int, ...],
    path: Path,
) -> Callable[[Tensor], Tensor] | None:
    """The inverse of what llama.cpp's converter did to this tensor; None when it did nothing."""
    if architecture.permuted and (".attn_q." in stored or ".attn_k." in stored):
        heads = config["num_attention_heads"] if ".attn_q." in stored else config["num_key_value_heads"]
        if shape[0] % (2 * heads):
            raise CorruptError(
                f"{path}: the {shape[0]} rows of {stored!r} are not {heads} heads of an even size; download it again"
            )
        return partial(_unpermute, heads=heads)
    if architecture.offset_norms and name.endswith("norm.weight"):
        return _minus_one
    return None


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Rows of [heads * head_dim, ...] from ggml's interleaved rotary pairs back to transformers' halves."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _minus_one(weight: Tensor) -> Tensor:
    """Gemma's norms multiply by 1 + w; GGUF stores 1 + w."""
    return (weight.float() - 1.0).to(weight.dtype)


def _build(
    stored: str, undo: Callable[[Tensor], Tensor] | None, shape: tuple[int, ...], dtype: str, read: Read
) -> Tensor:
    tensor = read(stored)
    if undo is not None:
        tensor = undo(tensor)
    return _rounded(tensor.reshape(shape), dtype)


def _rounded(tensor: Tensor, dtype: str) -> Tensor:
    """float32 values rounded to bfloat16 when that is the reference dtype and the stored one is another."""
    if dtype != "bfloat16" or tensor.dtype == torch.bfloat16:
        return tensor
    result = tensor.to(torch.float32)
    for piece in torch.split(result.view(-1), PIECE_VALUES):
        piece.copy_(piece.to(torch.bfloat16))
    return result


def _with_rope_freqs(config: dict[str, Any], source: Source, path: Path) -> dict[str, Any]:
    """The config with Llama 3's rope scaling, when the file carries its factors.

    Raises UnsupportedError if they fit nothing.
    """
    info = source.infos.get("rope_freqs.weight")
    if info is None:
        return config
    count, most = math.prod(info.shape), config["head_dim"] // 2
    if count > most:
        raise UnsupportedError(
            f"{path}: its rope_freqs are {count} numbers, a head has {most} pairs: convert it again"
        )
    factors = source.read("rope_freqs.weight").flatten().tolist()
    if all(f == 1.0 for f in factors):
        return config
    rope = llama3_rope(config["rope_parameters"], config["head_dim"], factors)
    if rope is None:
        raise UnsupportedError(f"{path}: its rope_freqs follow no rope scaling that transformers knows")
    return config | {"rope_parameters": rope}


def _side_files(path: Path, header: GgufHeader) -> dict[str, bytes]:
    files = tokenizer_files(path, header)
    meta = Metadata(header.metadata, {}, path)
    end, end_of_turn = meta.token_id("eos"), meta.token_id("eot")
    # A chat model stops at either.
    ends = [end, end_of_turn] if None not in (end, end_of_turn) and end != end_of_turn else end
    ids = {
        "bos_token_id": meta.token_id("bos"),
        "eos_token_id": ends,
        "pad_token_id": meta.token_id("padding"),
    }
    known = {key: value for key, value in ids.items() if value is not None}
    files["generation_config.json"] = json.dumps(known, indent=2, sort_keys=True).encode() + b"\n"
    return files
