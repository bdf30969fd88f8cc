"""What a product does with the sums of its parts in its own launch (sums.py). Nothing here imports triton."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.kernels.triton.spec import pointer_type

# Programs along the rows of a launch whose sums of squares another one adds up.
MOST_SQUARES = 512


@dataclass(frozen=True)
class Ending:
    """What a product does with the sums of its parts, in its own launch.

    gelu: Y [batch, rows / 2] is act(g) u of the two halves [g, u] of a product's rows, with GELU by tanh or SiLU; None: no gate.
    normed: X was not divided by its root mean square, whose squares come with it; the sums are.
    adds: onto the residual stream h; Y is the new h times the next norm's gain, not yet divided by its root mean square.
    """

    gelu: bool | None = None
    normed: bool = False
    adds: bool = False

    @property
    def name(self) -> str:
        gate = {None: "", False: "_silu", True: "_gelu"}[self.gelu]
        return gate + "_normed" * self.normed + "_adds" * self.adds


PLAIN = Ending()


@dataclass(frozen=True)
class Meeting:
    """What an ending works on. squares: f32 [batch, places], sums of the squares of X's numbers (normed); h: f32
    [batch, rows], changed in place, and gain: f32 [rows] (adds)."""

    squares: Tensor | None = None
    epsilon: float = 0.0
    h: Tensor | None = None
    gain: Tensor | None = None


def is_parted(split: int, ending: Ending) -> bool:
    """Whether the programs of a launch leave parts to add up."""
    return split > 1 or ending != PLAIN


def ending_name(split: int, ending: Ending, batch: int, dtype: torch.dtype, out: torch.dtype) -> str:
    """What of these is part of a kernel's name."""
    if not is_parted(split, ending):
        return f"_{pointer_type(out)[1:]}" if out != dtype else ""
    return f"_p{split}{pointer_type(out)[1:]}{'' if batch == 1 else 'm'}{ending.name}"
