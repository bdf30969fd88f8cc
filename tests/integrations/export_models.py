"""Artifacts for the tests of exports: the trained sample model in many formats, and tiny random ones by architecture."""

from pathlib import Path
from typing import Any

import torch

from nstf import quantizers
from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.formats.tree import format_of
from nstf.runtime.artifact import Shared, write_artifact

SAMPLE = Path(__file__).parent.parent.parent / "examples" / "tiny_llama" / "model"
TEXTS = ("Once upon a time", "The little 12 cats' house", "def f(x):\n    return")


def encode(weight: torch.Tensor, kind: str, **params: Any) -> EncodedTensor:
    """A matrix by a quantiser, rounded to nearest."""
    module: Any = quantizers.method(kind)
    return module.encode(weight.float(), module.Params(**params))  # type: ignore[no-any-return]


def dense(value: torch.Tensor) -> EncodedTensor:
    name = str(value.dtype).removeprefix("torch.")
    node = Node("dense", format_of("dense").Params(dtype=name))
    return EncodedTensor(node, tuple(value.shape), {"values": value.contiguous()})


def sample(path: Path, table: dict[str, Any], *layers: dict[str, Any]) -> Path:
    """The sample model as an artifact. table, layers: quantiser's parameters with `kind`, layers in turn by matrix."""
    from safetensors.torch import load_file

    weights = load_file(SAMPLE / "model.safetensors")
    tensors: dict[str, Any] = {}
    at = 0
    for name, value in sorted(weights.items()):
        if value.dim() < 2:
            tensors[name] = dense(value)
            continue
        form = table if "embed" in name else layers[at % len(layers)]
        at += "embed" not in name
        tensors[name] = dense(value) if form["kind"] == "dense" else encode(value, **form)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = Shared("model.embed_tokens.weight")
    files = {f.name: f.read_bytes() for f in SAMPLE.iterdir() if f.suffix == ".json"}
    write_artifact(path, tensors, files, {})
    return path
