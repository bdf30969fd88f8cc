"""What the peers' programs share; runs inside their environments and imports nothing of nstf."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def weights_of(source: Path) -> dict[str, Tensor]:
    """The model's tensors."""
    return load_file(source / "model.safetensors")


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of a linear layer inside the model (not the table, not the head)."""
    return name.endswith("_proj.weight")


def save_packed(source: Path, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a model folder whose weights are `tensors`, with the original's config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "model.safetensors":
            shutil.copyfile(file, folder / file.name)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def save_float32(source: Path, folder: Path, replaced: Mapping[str, Tensor]) -> None:
    """Writes the model in float32 with some weights replaced; a KeyError when one of them is not its own."""
    weights = {n: v.float() for n, v in weights_of(source).items()}
    for name, value in replaced.items():
        if weights[name].shape != value.shape:
            raise KeyError(f"{name}: {list(value.shape)} instead of {list(weights[name].shape)}")
        weights[name] = value.detach().float().contiguous()
    save_packed(source, folder, weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")


def packed_layer(
    name: str, weight: Tensor, scale: Tensor, zero: Tensor, bits: int, group: int
) -> dict[str, Tensor]:
    """What is stored of a layer whose weights lie on a grid: weight = (code - zero) * scale.

    weight: [out, in]; scale, zero: [out, in / group], zero from 0. Codes and zero points take exactly `bits` bits,
    scales 16. Raises ValueError when the weights do not lie on the grid.
    """
    rows = weight.shape[0]
    scale, zero = scale.float().reshape(rows, -1, 1), zero.float().reshape(rows, -1, 1)
    groups = weight.float().reshape(rows, -1, group)
    codes = torch.round(groups / scale) + zero
    if not torch.allclose((codes - zero) * scale, groups, atol=1e-6, rtol=1e-4):
        raise ValueError(f"{name}: the weights are not on their grid")
    return {
        f"{name}.codes": _bits(codes, bits),
        f"{name}.zero": _bits(zero, bits),
        f"{name}.scale": scale.to(torch.bfloat16).contiguous(),
    }


def _bits(codes: Tensor, bits: int) -> Tensor:
    """Codes of 0 to 2^bits - 1 as a bit stream. Raises ValueError for one that needs more bits."""
    flat = codes.flatten().to(torch.int64)
    if int(flat.min()) < 0 or int(flat.max()) >= 2**bits:
        raise ValueError(f"codes from {int(flat.min())} to {int(flat.max())} need more than {bits} bits")
    planes = ((flat[:, None] >> torch.arange(bits)) & 1).to(torch.uint8)
    return torch.from_numpy(np.packbits(planes.numpy().reshape(-1), bitorder="little"))
