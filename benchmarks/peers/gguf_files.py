"""GGUF files as llama.cpp's tools read and write them: export of a model, expansion to float32, importance matrix."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.pipeline.store.tensorfile import TensorFile
from peers import Unavailable

# What describes the stored types and not the model.
OF_THE_FILE = ("GGUF.", "quantize.", "general.file_type", "general.quantization_version")


def export(model: Path, out: Path) -> None:
    """Writes `model`, a .gguf file or the folder of a Llama, as a bfloat16 GGUF; norms stay float32.

    Raises Unavailable for another architecture.
    """
    if model.suffix == ".gguf":
        _copy(model, out, gguf.GGMLQuantizationType.BF16)
        return
    with open_checkpoint(str(model)) as checkpoint:
        config = checkpoint.config or {}
        if config.get("model_type") != "llama":
            raise Unavailable(
                f"no GGUF export for {config.get('model_type')}: give a .gguf file of the model"
            )
        writer = gguf.GGUFWriter(str(out), "llama")
        _llama_settings(writer, config)
        _tokenizer(writer, model)
        for name in checkpoint.names():
            value = checkpoint.get(name).to(torch.float32)
            for kind, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                if name.endswith(f"{kind}_proj.weight"):
                    value = _interleaved(value, int(config[heads]))
            _add(writer, ggml_name(name, config), value.numpy(), gguf.GGMLQuantizationType.BF16)
        _finish(writer)


def expand(quantised: Path, out: Path) -> None:
    """Writes every tensor of a GGUF file in float32, the metadata unchanged."""
    _copy(quantised, out, gguf.GGMLQuantizationType.F32)


def ggml_name(name: str, config: dict[str, Any]) -> str:
    """ggml's name of a transformers parameter of a Llama. Raises Unavailable when there is none."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, int(config["num_hidden_layers"]))
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise Unavailable(f"parameter {name} has no place in a GGUF of a Llama")
    return str(found)


def write_importance(calibration: Path, model: Path, out: Path) -> None:
    """Writes the importance matrix that llama-quantize reads: sums of squares of each linear layer's inputs.

    They are the diagonals of the calibration's Hessians, that is of the same tokens. As llama-imatrix does by
    default, the output layer and the table get none.
    """
    with open_checkpoint(str(model)) as checkpoint:
        config = checkpoint.config or {}
    file = TensorFile(calibration)
    writer = gguf.GGUFWriter(str(out), "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["calibration"])
    writer.add_uint32("imatrix.chunk_count", int(file.metadata["fit"]))
    writer.add_uint32("imatrix.chunk_size", 512)
    for key, member in file.metadata["hessians"].items():
        if key == "head":
            continue
        diagonal = file.get(f"hessian:{key}").diagonal().to(torch.float32)
        tokens = float(member["tokens"])
        for weight in member["weights"]:
            name = ggml_name(weight, config)
            writer.add_tensor(f"{name}.in_sum2", (diagonal * tokens).numpy())
            writer.add_tensor(f"{name}.counts", np.array([tokens], dtype=np.float32))
    _finish(writer)


def _copy(source: Path, out: Path, kind: gguf.GGMLQuantizationType) -> None:
    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(out), architecture)
    for key, entry in reader.fields.items():
        if key == "general.architecture" or key.startswith(OF_THE_FILE):
            continue
        sub = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, entry.contents(), entry.types[0], sub)
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        _add(writer, tensor.name, value.reshape([int(n) for n in tensor.shape[::-1]]), kind)
    _finish(writer)


def _add(
    writer: gguf.GGUFWriter, name: str, value: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType
) -> None:
    if value.ndim < 2 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(value))
    else:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of [heads * head_dim, in] from transformers' rotary halves to llama.cpp's interleaved pairs."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def _llama_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The byte-level BPE tokenizer of a model folder."""
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if data["model"]["type"] != "BPE":
        raise Unavailable("no GGUF export for a tokenizer that is not byte-level BPE")
    vocabulary = data["model"]["vocab"] | {t["content"]: t["id"] for t in data.get("added_tokens", [])}
    special = {t["content"] for t in data.get("added_tokens", [])}
    tokens = sorted(vocabulary, key=lambda t: int(vocabulary[t]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if t in special else normal for t in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
