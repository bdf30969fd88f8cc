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


def mixture(path: Path) -> Path:
    """The sample mixture of experts as an artifact: its stacks in two formats, the rest in a third."""
    from safetensors.torch import load_file

    folder = SAMPLE.parent.parent / "tiny_moe" / "model"
    forms: dict[str, dict[str, Any]] = {
        "gate_up_proj": {"kind": "int_grid", "bits": 4, "group": 32, "symmetric": False, "lead": 2},
        "down_proj": {"kind": "grid16", "group": 32, "lead": 2},
    }
    rest = {"kind": "int_grid", "bits": 8, "group": 32, "symmetric": True}
    tensors: dict[str, Any] = {}
    for name, value in sorted(stacks(load_file(folder / "model.safetensors")).items()):
        form = forms.get(name.rpartition(".")[2], rest)
        # A router's few numbers stay as they are.
        plain = value.dim() < 2 or name.endswith("gate.weight")
        tensors[name] = dense(value) if plain else encode(value, **form)
    tensors["lm_head.weight"] = Shared("model.embed_tokens.weight")
    files = {f.name: f.read_bytes() for f in folder.iterdir() if f.suffix == ".json"}
    write_artifact(path, tensors, files, {})
    return path


def stacks(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint with experts one by one, as transformers holds them: gate and up [experts, 2 wide, in], down."""
    found = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in sorted({n.partition(".experts.")[0] for n in weights if ".experts." in n}):
        own = {n: v for n, v in weights.items() if n.startswith(f"{layer}.experts.")}
        count = len(own) // 3

        def one(number: int, leaf: str, own: Any = own, layer: str = layer) -> torch.Tensor:
            value: torch.Tensor = own[f"{layer}.experts.{number}.{leaf}.weight"]
            return value

        pairs = [torch.cat([one(i, "gate_proj"), one(i, "up_proj")]) for i in range(count)]
        found[f"{layer}.experts.gate_up_proj"] = torch.stack(pairs)
        found[f"{layer}.experts.down_proj"] = torch.stack([one(i, "down_proj") for i in range(count)])
    return found


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
