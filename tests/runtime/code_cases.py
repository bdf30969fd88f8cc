"""Models of one format: random codes, with weights of a size at which logits answer to the prompt."""

import json
from pathlib import Path
from typing import Any

import torch

from nstf import quantizers
from nstf.kernels.formats import EncodedTensor, Node, array_specs, bitpack, decode
from nstf.kernels.formats.tree import format_of
from nstf.runtime.artifact import write_artifact
from nstf.runtime.skeleton import build_skeleton

# Of widths that the kernels of GPUs take, and that two ranks divide.
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def _node(kind: str, inside: Node | None = None, **params: Any) -> Node:
    return Node(kind, format_of(kind).Params(**params), {} if inside is None else {"x": inside})


TRELLIS, SHUFFLE = _node("trellis", quarter_bits=(12,)), _node("shuffle", quarter_bits=16)
# The same for CPUs, where the definition of each format is what runs.
SMALL = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32,
}  # fmt: skip
# What the layers have, in turn; None for integers.
FORMATS: dict[str, tuple[Node | None, ...]] = {
    "int4": (None,),
    "trellis": (TRELLIS,),
    "trellis of two rates": (_node("trellis", quarter_bits=(12, 8), rows=(16, 16)),),
    "rotated trellis": (_node("rotated", TRELLIS, block_in=64),),
    "shuffle": (SHUFFLE,),
    "dense": (_node("dense", dtype="bfloat16"),),
    "mixed": (None, TRELLIS, _node("rotated", SHUFFLE, block_in=64)),
}


def write(path: Path, name: str, **changes: Any) -> Path:
    """An artifact whose layers have a format of FORMATS; table and head are 8-bit integers, norms dense."""
    config = {**CONFIG, **changes}
    trees, tensors = FORMATS[name], {}
    for seed, (parameter, value) in enumerate(build_skeleton(config).named_parameters()):
        shape = tuple(value.shape)
        if len(shape) == 1:
            tensors[parameter] = EncodedTensor(
                _node("dense", dtype="float32"), shape, {"values": torch.ones(shape)}
            )
            continue
        layer = int(parameter.split(".")[2]) if ".layers." in parameter else None
        tree = None if layer is None else trees[layer % len(trees)]
        tensors[parameter] = matrix(tree, shape, seed, 8 if layer is None else 4)
    write_artifact(path, tensors, {"config.json": json.dumps(config).encode()})
    return path


def matrix(tree: Node | None, shape: tuple[int, ...], seed: int, bits: int = 4) -> EncodedTensor:
    """A matrix that keeps the size of what it multiplies. tree: None for integers of some bits."""
    generator = torch.Generator().manual_seed(seed)
    if tree is None or tree.kind == "dense":
        weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        if tree is not None:
            return EncodedTensor(tree, shape, {"values": weight.bfloat16()})
        method: Any = quantizers.method("int_grid")
        encoded: EncodedTensor = method.encode(weight, method.Params(bits=bits, group=32))
        return encoded
    arrays, tree = _random(tree, shape, generator)
    some = (64, shape[1])  # decoding all of a large one takes a CPU long
    sample, alike = _random(tree, some, generator)
    size = float(decode(EncodedTensor(alike, some, sample)).std())
    scale = next(key for key in arrays if key.endswith("scale_super"))
    arrays[scale] = arrays[scale] * (shape[1] ** -0.5 / size)
    return EncodedTensor(tree, shape, arrays)


def _random(
    tree: Node, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], Node]:
    """Random arrays, and the tree with the rows of its sections."""
    arrays: dict[str, torch.Tensor] = {}
    in_two = tree.kind == "trellis" and len(tree.params.quarter_bits) == 2
    if in_two:
        half = shape[0] // 2
        tree = _node("trellis", quarter_bits=tree.params.quarter_bits, rows=(half, half))
    for key, spec in array_specs(tree, shape).items():
        if spec.dtype == torch.uint8:
            arrays[key] = torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=generator)
        else:
            arrays[key] = (torch.rand(spec.shape, generator=generator) + 0.5).to(spec.dtype)
    if in_two:  # rows of one rate and of the other in turn
        arrays["section"] = bitpack.pack((torch.arange(shape[0])[None] % 2).byte(), 1)[0]
    return arrays, tree
