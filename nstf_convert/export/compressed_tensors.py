"""`--to compressed-tensors`: a folder that transformers (with compressed-tensors) and vLLM load quantised.

Integers of 2 to 8 bits in groups or rows go bit by bit (`pack-quantized`: one little-endian bit stream a row, as ours),
fp8 e4m3fn by rows and mxfp4 too; each scheme that occurs is one entry of `config_groups` with the modules' names. What no
scheme holds is written dense, in the folder's dtype, and so are embedding tables: transformers 5.23 fails on a packed one
(its initialisation looks for `weight`). Scales are loaded in that dtype, so float16 is the default: bfloat16
would round them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError
from nstf.kernels.formats import EncodedTensor, bitpack, stored_bytes
from nstf.kernels.formats.scales import read_scales
from nstf.runtime.artifact import Artifact
from nstf_convert.export import integers
from nstf_convert.export.hf import copy_files, exported_names, files_bytes
from nstf_convert.export.plan import ExportPlan, Item, decoded, without_attention_plan
from nstf_convert.export.shards import Array, write_weights
from nstf_convert.export.writing import Files, listed
from nstf_convert.pipeline.propose.recipe import describe

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Scheme:
    """One quantisation scheme: `args` as QuantizationArgs has them, the storage format, a word for the report."""

    args: tuple[tuple[str, Any], ...]
    format: str
    word: str


def plan(artifact: Artifact, dtype: str | None) -> ExportPlan:
    """What the folder holds. dtype: of scales and dense tensors, None for float16."""
    _check(artifact)
    items, schemes, tables = [], {}, _tables(artifact)
    for name in exported_names(artifact):
        encoded, target = artifact.encoded(name), dtype or "float16"
        scheme, kind = (None, "") if name in tables else _scheme_of(encoded, target)
        if scheme is not None:
            schemes[name] = scheme
            there, arrays = scheme.word, packed_arrays(name, encoded, scheme, target)
        else:
            there, arrays = target, {name: _dense(name, encoded, target)}
            kind = _dense_kind(encoded, target)
        size = sum(a.size_bytes for a in arrays.values())
        here = stored_bytes(encoded.tree, encoded.shape)
        items.append(Item(name, (name,), describe(encoded.tree), there, kind, here, size))
    notes = (*without_attention_plan(artifact, "the engine"), *_fused_notes(schemes))
    if any(not dict(s.args)["symmetric"] for s in schemes.values()):
        notes += ("vLLM reads packed zero points; transformers 5.23 loads them only with dequantize=True",)
    return ExportPlan(
        "compressed-tensors", tuple(items), files_bytes(artifact) + 65536, notes, {"schemes": schemes}
    )


def write(artifact: Artifact, plan: ExportPlan, folder: Path, dtype: str | None, shard_bytes: int) -> Files:
    """Writes config, tokenizer and safetensors."""
    target = dtype or "float16"
    schemes: dict[str, Scheme] = plan.extra["schemes"]
    config: dict[str, Any] = {"dtype": target}
    if schemes:
        config["quantization_config"] = quantization_config(schemes, [i.name for i in plan.items])
    copy_files(artifact, folder, config)
    arrays: dict[str, Array] = {}
    for item in plan.items:
        encoded = artifact.encoded(item.name)
        if item.name in schemes:
            arrays |= packed_arrays(item.name, encoded, schemes[item.name], target)
        else:
            arrays[item.name] = _dense(item.name, encoded, target)
    write_weights(arrays, folder, shard_bytes)
    return listed(folder)


def quantization_config(schemes: dict[str, Scheme], names: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json: one group a scheme, modules by name."""
    groups: dict[str, Any] = {}
    for number, scheme in enumerate(dict.fromkeys(schemes.values())):
        own = [n.removesuffix(".weight") for n, s in schemes.items() if s == scheme]
        groups[f"group_{number}"] = {
            "targets": own,
            "weights": dict(scheme.args),
            "input_activations": None,
            "output_activations": None,
            "format": scheme.format,
        }
    formats = {s.format for s in schemes.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [] if "lm_head.weight" in schemes else ["lm_head"],
        "kv_cache_scheme": None,
    }


def packed_arrays(name: str, encoded: EncodedTensor, scheme: Scheme, dtype: str) -> dict[str, Array]:
    """The arrays of a quantised module under their names."""
    stem, (rows, cols) = name.removesuffix(".weight"), encoded.shape
    kind: torch.dtype = getattr(torch, dtype)

    def array(suffix: str, at: torch.dtype, shape: tuple[int, ...], make: Callable[[], Tensor]) -> None:
        found[f"{stem}.{suffix}"] = Array(at, shape, make)

    found: dict[str, Array] = {}
    params = encoded.tree.params
    if scheme.format == "mxfp4-pack-quantized":
        array("weight_packed", torch.uint8, (rows, cols // 2), lambda: encoded.arrays["codes"])
        array("weight_scale", torch.uint8, (rows, cols // 32), lambda: encoded.arrays["scale"])
        return found
    groups = 1 if params.group == 0 else cols // params.group
    scale_bits = params.scale_bits
    scale = partial(_scale, encoded, scale_bits, kind)
    array("weight_scale", kind, (rows, groups), scale)
    if scheme.format == "float-quantized":
        array("weight", torch.float8_e4m3fn, (rows, cols), partial(_float8, encoded))
        return found
    words = math.ceil(cols * params.bits / 32)
    array("weight_packed", torch.int32, (rows, words), lambda: _words(encoded.arrays["codes"], words))
    array("weight_shape", torch.int64, (2,), lambda: torch.tensor([rows, cols]))
    if not params.symmetric:
        high = math.ceil(rows * params.bits / 32)
        array("weight_zero_point", torch.int32, (high, groups), partial(_zeros, encoded, high))
    return found


def _scheme_of(encoded: EncodedTensor, dtype: str) -> tuple[Scheme | None, str]:
    tree, shape = encoded.tree, encoded.shape
    if len(shape) != 2:
        return None, ""
    cols = shape[1]
    if tree.kind == "mxfp4" and cols % 32 == 0:
        args = (("num_bits", 4), ("type", "float"), ("strategy", "group"), ("group_size", 32), ("symmetric", True),
                ("scale_dtype", "torch.uint8"), ("dynamic", False))  # fmt: skip
        return Scheme(args, "mxfp4-pack-quantized", "mxfp4"), "exact"
    whole = tree.kind in ("int", "fp8") and tree.params.group == 0
    if tree.kind == "fp8" and tree.params.variant == "e4m3fn" and whole:
        args8 = (
            ("num_bits", 8),
            ("type", "float"),
            ("strategy", "channel"),
            ("symmetric", True),
            ("dynamic", False),
        )
        return Scheme(args8, "float-quantized", "fp8 row"), _scale_kind(encoded, dtype)
    if tree.kind == "int" and (whole or cols % tree.params.group == 0):
        p = tree.params
        place = (("strategy", "channel"),) if whole else (("strategy", "group"), ("group_size", p.group))
        args4 = (
            ("num_bits", p.bits),
            ("type", "int"),
            *place,
            ("symmetric", p.symmetric),
            ("dynamic", False),
        )
        word = f"int{p.bits} {'row' if whole else f'g{p.group}'}{'' if p.symmetric else ' asym'}"
        kind = _scale_kind(encoded, dtype)
        return (
            (None, "")
            if kind == "lossy" and dtype == "float32"
            else (Scheme(args4, "pack-quantized", word), kind)
        )
    return None, ""


def _scale_kind(encoded: EncodedTensor, dtype: str) -> str:
    scale = read_scales(dict(encoded.arrays), encoded.tree.params.scale_bits)
    same = bool((scale.to(getattr(torch, dtype)).float() == scale).all())
    return "exact" if same else "lossy"


def _dense_kind(encoded: EncodedTensor, dtype: str) -> str:
    if encoded.tree.kind != "dense":
        return "widened" if dtype == "float32" else "lossy"
    if str(encoded.tree.params.dtype) == dtype:
        return "exact"
    values = encoded.arrays["values"]
    same = bool((values.to(getattr(torch, dtype)).to(values.dtype) == values).all())
    wider = getattr(torch, dtype).itemsize > values.dtype.itemsize
    return ("widened" if wider else "exact") if same else "lossy"


def _dense(name: str, encoded: EncodedTensor, dtype: str) -> Array:
    kind: torch.dtype = getattr(torch, dtype)
    return Array(kind, tuple(encoded.shape), partial(decoded, encoded, kind, name))


def _scale(encoded: EncodedTensor, bits: int, kind: torch.dtype) -> Tensor:
    return read_scales(dict(encoded.arrays), bits).to(kind)


def _float8(encoded: EncodedTensor) -> Tensor:
    return encoded.arrays["codes"].view(torch.float8_e4m3fn)


def _words(codes: Tensor, words: int) -> Tensor:
    """Rows of bytes, filled up to whole 32-bit words."""
    padded = torch.nn.functional.pad(codes, (0, 4 * words - codes.shape[1]))
    return padded.contiguous().view(torch.int32)


def _zeros(encoded: EncodedTensor, words: int) -> Tensor:
    """Zero points packed along the rows: [words, groups]."""
    packed = bitpack.pack(integers.zeros(encoded).t().contiguous(), encoded.tree.params.bits)
    return _words(packed, words).t().contiguous()


def _tables(artifact: Artifact) -> set[str]:
    """The parameters of embedding modules, and what is tied to them. Raises UnsupportedError for an unknown model."""
    from nstf.runtime.artifact.config import limits_of
    from nstf.runtime.skeleton import build_skeleton

    skeleton = build_skeleton(artifact.config(), limits=limits_of(artifact.manifest))
    linear = {f"{n}.weight" for n, m in skeleton.named_modules() if isinstance(m, torch.nn.Linear)}
    return {n for n in artifact.names() if n not in linear}


def _fused_notes(schemes: dict[str, Scheme]) -> tuple[str, ...]:
    """vLLM multiplies q, k, v (and gate, up) as one matrix and wants one scheme for them."""
    for name in schemes:
        for parts in FUSED:
            stem = name.removesuffix(f"{parts[0]}.weight")
            own = {schemes.get(f"{stem}{p}.weight") for p in parts}
            if stem != name and len(own) > 1:
                return (
                    f"vLLM refuses {stem}{{{','.join(parts)}}}, whose schemes differ: convert with `fuse` for it",
                )
    return ()


def _check(artifact: Artifact) -> None:
    if "config.json" not in artifact.file_names():
        raise UnsupportedError(
            f"{artifact.path} has no config.json: target 'compressed-tensors' holds models"
        )
    if artifact.object("config.json").get("quantization_config"):
        raise UnsupportedError(f"{artifact.path}: its config names a quantisation already: use target 'hf'")
