"""Shuffle codes times activations on the CPU: the engine's float32 kernel, which decodes groups of rows into the caches."""

from typing import Any

import torch
from torch import Tensor

from nstf.kernels.cpu import engine_matrix, ext
from nstf.kernels.formats import shuffle
from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.memo import per_encoded

NAME = "cpu.shuffle_linear"
FORMATS = (shuffle.KIND,)

# Above, decoding once and a library's dense product are faster.
LARGEST_BATCH = 32


def available() -> bool:
    return hasattr(ext, "engine_shuffle")


def supports(encoded: EncodedTensor, device: torch.device, batch: int) -> bool:
    return (
        device.type == "cpu"
        and batch <= LARGEST_BATCH
        and len(encoded.shape) == 2
        and encoded.tree.params.lead == 1
    )


def matmul(x: Tensor, encoded: EncodedTensor) -> Tensor:
    """x: [batch, in] -> [batch, out], computed in float32."""
    return engine_matrix.matmul(x, _matrix(encoded)).to(x.dtype)


@per_encoded
def _matrix(encoded: EncodedTensor) -> Any:
    return engine_matrix.compile_matrix(encoded, exact=True)
