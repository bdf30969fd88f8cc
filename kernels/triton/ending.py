"""What follows a product in the launch that adds up its parts (sums.py). Nothing here imports triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from nstf.kernels.triton.peers import Peers


@dataclass(frozen=True)
class Ending:
    """What is done with the sums of a product's parts.

    gelu: Y [batch, rows / 2] is act(g) u of the two halves [g, u] of the product's rows, GELU by tanh or SiLU; None: no
    gate.
    normed: X was not divided by its root mean square; the sums are, by the squares that come with it.
    adds: the sums are added onto the residual stream h; Y is h times the next norm's gain, to be divided by its root mean
    square after the next product.
    rank, ranks: the product's columns are divided over `ranks` GPUs, of which this is number `rank`, and the sums are over
    all of them (peers.py).
    """

    gelu: bool | None = None
    normed: bool = False
    adds: bool = False
    rank: int = 0
    ranks: int = 1

    @property
    def name(self) -> str:
        gate = {None: "", False: "_silu", True: "_gelu"}[self.gelu]
        divided = f"_{self.rank}of{self.ranks}" if self.ranks > 1 else ""
        return gate + "_normed" * self.normed + "_adds" * self.adds + divided


@dataclass(frozen=True)
class Meeting:
    """What an ending works on. squares: f32 [batch, programs], sums of the squares of h (normed); h: f32 [batch, rows],
    changed in place, and gain: f32 [rows] (adds). peers: memory for the sum over ranks (more than one)."""

    squares: Tensor | None = None
    epsilon: float = 0.0
    h: Tensor | None = None
    gain: Tensor | None = None
    peers: Peers | None = None
