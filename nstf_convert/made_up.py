"""How large the inputs are that are made up for a model, images, spectrograms or windows of a text: a stranger's config says
that alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from nstf.errors import UsageError
from nstf.runtime.artifact.header import short

# Elements of one: images of 1,024 x 1,024 and more. Layers take many times the memory of their inputs.
MOST_ELEMENTS = 1 << 22
# Positions of a model whose config does not say how many it has.
UNBOUNDED = 1 << 30
# The type of AST, whose spectrograms are [time, bands] and called `input_values`, as waveforms are elsewhere.
SPECTROGRAM_BY_TIME = "audio-spectrogram-transformer"


def made_up_shape(sizes: Sequence[object]) -> tuple[int, ...]:
    """The shape of one input. Raises UsageError for sizes that no input has, or that would take what memory there is."""
    shape = tuple(size for size in sizes if type(size) is int and size > 0)
    if len(shape) != len(sizes) or math.prod(shape) > MOST_ELEMENTS:
        raise UsageError(
            f"inputs of the shape {short(list(sizes), 60)}, as the config has it, cannot be made up: correct the config, or "
            f"give real inputs where a dataset is taken; nstf makes at most {MOST_ELEMENTS} elements of each"
        )
    return shape


def frames(config: Mapping[str, Any]) -> tuple[object, ...]:
    """How many images one input of a model of films is (VideoMAE, ViViT, TimeSformer), first of its sizes; () of others."""
    found = config.get("num_frames")
    return () if found is None else (found,)


def longest_window(model: Any) -> int:
    """The most tokens that a streamed model has positions for; UNBOUNDED where it does not say."""
    config = model.module.config.get_text_config()
    limits = [
        getattr(config, n, None) for n in ("max_position_embeddings", "n_positions", "max_target_positions")
    ]
    # OPT and RoBERTa count their positions from 2.
    found = [v - 2 if v <= 2050 and v % 64 == 2 else v for v in limits if isinstance(v, int) and v > 0]
    # ProphetNet's decoder looks up the position of the token that it foretells, too.
    ahead = int(getattr(config, "ngram", None) is not None)
    for path, table in model.module.named_modules():
        # RoBERTa, ESM and others: from behind the one of padding.
        if "position" in path and isinstance(table, nn.Embedding) and table.padding_idx is not None:
            found.append(max(1, table.num_embeddings - table.padding_idx - 1 - ahead))
    return min(found or [UNBOUNDED])
