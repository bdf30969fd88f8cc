"""How large the inputs are that are made up for a model, images or spectrograms: a stranger's config says that alone."""

import math
from collections.abc import Sequence

from nstf.errors import UsageError
from nstf.runtime.artifact.header import short

# Elements of one: images of 1,024 x 1,024 and more. Layers take many times the memory of their inputs.
MOST_ELEMENTS = 1 << 22


def made_up_shape(sizes: Sequence[object]) -> tuple[int, ...]:
    """The shape of one input. Raises UsageError for sizes that no input has, or that would take what memory there is."""
    shape = tuple(size for size in sizes if type(size) is int and size > 0)
    if len(shape) != len(sizes) or math.prod(shape) > MOST_ELEMENTS:
        raise UsageError(
            f"inputs of the shape {short(list(sizes), 60)}, as the config has it, cannot be made up: correct the config, or "
            f"give real inputs where a dataset is taken; nstf makes at most {MOST_ELEMENTS} elements of each"
        )
    return shape
