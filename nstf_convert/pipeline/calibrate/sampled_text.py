"""Text sampled from the model itself: calibration data that needs no file and no network.

Self-generated text is competitive with real text for quantisation (Williams et al., 2024, arXiv 2410.17170); a mix of
real domains is better, and the report says which one was used.
"""

from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError
from nstf_convert.streamed import StreamedModel

# Sequences sampled at once: the key-value cache of 20 x 512 tokens of a 135 M model takes 470 MB.
BATCH = 20


@torch.no_grad()
def sample_windows(model: StreamedModel, count: int, seq_len: int, seed: int, start: int) -> Tensor:
    """`count` windows of `seq_len` tokens, [count, seq_len] int64, drawn at temperature 1 after the token `start`."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    windows = []
    for first in range(0, count, BATCH):
        rows = min(BATCH, count - first)
        ids = torch.full((rows, 1), start, dtype=torch.int64)
        cache: Any = DynamicCache(config=model.module.config)
        last = ids
        while ids.shape[1] < seq_len:
            hidden = model.hidden(last, cache)
            probabilities = torch.softmax(model.logits(hidden[:, -1]).double(), dim=-1)
            if not bool(probabilities.sum().isfinite()):
                raise UnsupportedError(
                    "the model's outputs are not finite: its weights or its config are damaged"
                )
            last = torch.multinomial(probabilities, 1, generator=generator)
            ids = torch.cat([ids, last], dim=1)
        windows.append(ids)
    return torch.cat(windows)
