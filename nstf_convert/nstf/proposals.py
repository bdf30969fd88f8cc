"""What a method is told about a tensor, and what it answers with: the protocol of `quantizers/` and `decomposers/`.

    proposals(signature, target, room) -> recipes

signature: what was learnt of the tensor. target: whether time counts where the file will run. room: the bytes that are of
interest, what the same bytes buy elsewhere, and how hard to look. A recipe says how the tensor would be stored; the pipeline
prices it, finds its loss and lets the planner choose. A module with `proposals` in one of the two folders is a method of
`nstf convert`; nothing else names it.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

Shape = tuple[int, ...]

# Bits a weight that a plan gives a tensor up to which methods are asked once more (`Room.planned`).
FEW_BITS = 4.0


@dataclass(frozen=True)
class Recipe:
    """How one tensor is to be stored, before it is. method: a quantiser, a decomposer or `dense`. params: its parameters,
    plain JSON values. parts: recipes of its parts. least: a loss (nats) that it is known not to be below, no part of what
    it is.

    Recipe("int_grid", {"bits": 4, "group": 64})                              a quantiser
    Recipe("svd", {"rank": 16}, {"factor": Recipe("int_grid", ...)})          a decomposition with quantised factors
    Recipe("add", {}, {"base": Recipe("int_grid", ...), "correction": Recipe("svd", ...)})
    Recipe("dense", {"dtype": "bfloat16"})                                    as it is
    """

    method: str
    params: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, "Recipe"] = field(default_factory=dict)
    least: float = field(default=0.0, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Plain values, canonical enough to be hashed."""
        out: dict[str, Any] = {"method": self.method, "params": dict(self.params)}
        if self.parts:
            out["parts"] = {n: p.to_json() for n, p in self.parts.items()}
        return out

    @cached_property
    def key(self) -> str:
        """The recipe as text: equal for equal ones."""
        return json.dumps(self.to_json(), sort_keys=True)

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def family(self) -> str:
        """`quantised`, `decomposed`, `hybrid` or `dense`: what the report counts."""
        from nstf import decomposers, quantizers

        if self.method == "dense":
            return "dense"
        if self.method in quantizers.METHODS:
            return "quantised"
        composed = self.method in decomposers.METHODS and hasattr(decomposers.method(self.method), "compose")
        return "hybrid" if composed else "decomposed"


class Unfolding(Protocol):
    """The matrix that a tensor becomes when some axes of a view are its rows and the others its columns, in the norm of the
    expected loss."""

    side: int
    """The number of rows or of columns, the smaller one: no rank is above it."""
    tails: Any
    """Losses (nats) that no tensor of rank 0, 1, ... `side` in this unfolding is below: float64 [side + 1], falling."""

    @property
    def energies(self) -> Tensor:
        """Squared singular values, falling, float64 [side]."""
        ...

    def left_out(self, rank: int) -> float:
        """The one of `tails` at a rank."""
        ...

    def sharpen(self) -> None:
        """From now on `tails` are as high as they can be; before, they may come from the energies' moments alone."""
        ...


class Signature(Protocol):
    """What was learnt of one tensor (nstf.analyzers.signatures makes them).

    shape: of the tensor that is encoded, [out, in, ...] or [experts, out, in]. lead: leading axes that make the rows of its
    matrix. role: as in nstf.analyzers.roles. dtype: the checkpoint's. config: the model's config.json. weight: the tensor.
    stride: of a convolution, empty where there is none.
    stats: `hessian` [cols, cols] or None, `row_weight` [rows] or None (nstf.quantizers.stats). signal: the loss of erasing
    the tensor, nats.
    """

    shape: Shape
    lead: int
    role: str
    dtype: str
    config: Mapping[str, Any]
    weight: Tensor
    stats: Any
    rows: int
    cols: int
    stride: tuple[int, ...]

    @property
    def signal(self) -> float: ...

    @property
    def matrix(self) -> Unfolding:
        """The tensor as the matrix that it is stored as."""
        ...

    @property
    def plain(self) -> Unfolding:
        """The matrix with the weights of its rows but without the inputs' second moment."""
        ...

    def unfolding(self, dims: Shape, axes: tuple[int, ...]) -> Unfolding:
        """That of the view `dims` with `axes` as rows. The first axes of the view make the rows of the matrix."""
        ...


@dataclass(frozen=True)
class FactorForm:
    """One way to store the factors of a decomposition. bytes_of: shape of a factor -> its bytes. bits: that a number
    takes at least. noise: squared error of rounding a Gaussian factor, as a share of its energy."""

    recipe: Recipe
    bytes_of: Callable[[Shape], int]
    bits: float
    noise: float


@dataclass(frozen=True)
class Target:
    """What a method is told of where the file will run: nothing but whether time counts there, no device and no prices.
    timed: forms are wanted that are faster than others of the same bytes though they lose more."""

    timed: bool = False


@dataclass(frozen=True)
class Look:
    """A form that was looked at and not tried: no form of the method and of these bytes loses less than `least`, and to be
    chosen it has to lose less than `rival`, which is what plain formats lose there or what its bytes are worth elsewhere.
    reason: why nothing of the method was looked at, where it was no bound; the numbers are 0 then."""

    method: str
    size_bytes: int = 0
    least: float = 0.0
    rival: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Room:
    """What is of interest for one tensor.

    methods: those of the conversion. from_bits: below so many bits a weight another method of the conversion is known to
    lose less than scalar grids (0: none is). sizes: bytes of the arrays at which structure is compared. factors: how factors
    may be stored. bits: the bits a weight of the whole file, or None where its size is not known; a form that no plan of
    about so many can take is not wanted. rival: bytes of the arrays -> loss that plain formats, and what was made already,
    have there, or that such a plan allows; plain: that of plain formats alone. size_of: recipe -> bytes of its arrays.
    planned: None, or the bits a weight that a first plan gives the tensor: all methods are asked once more, without
    sizes, where these are few (at most FEW_BITS) and the effort is not the least, for what is only worth a look at a known
    rate; of what they propose again nothing is made again. faster: whether forms of a convolution are wanted that take fewer
    multiplications than the dense weight, whatever their bytes; without sizes. near: None, or such a form that a plan took:
    of its method the next ranks on both sides are wanted then, and nothing else. quick: whether only what is expected to
    win is wanted. looks: what was ruled out and why, filled by `may_win`, `beats` and `skip`.
    """

    methods: frozenset[str] = frozenset()
    from_bits: int = 0
    sizes: Sequence[int] = ()
    factors: Sequence[FactorForm] = ()
    bits: float | None = None
    rival: Callable[[int], float] = lambda size_bytes: math.inf
    plain: Callable[[int], float] = lambda size_bytes: math.inf
    size_of: Callable[[Recipe], int] = lambda recipe: 0
    planned: float | None = None
    faster: bool = False
    near: Recipe | None = None
    quick: bool = False
    looks: list[Look] = field(default_factory=list, compare=False)

    def rules_out(
        self, least: float, size_bytes: int, factor: FactorForm | None = None, signal: float = 0.0
    ) -> bool:
        """Whether plain formats of so many bytes lose no more than `least`, with the rounding of the last factor added,
        which takes its share of what is kept of `signal`."""
        return _rounded(least, factor, signal) >= self.rival(size_bytes)

    def may_win(
        self,
        method: str,
        size_bytes: int,
        least: float,
        factor: FactorForm | None = None,
        signal: float = 0.0,
    ) -> bool:
        """The opposite of `rules_out`, which notes what is ruled out for the report. method: whose form it is."""
        if not self.rules_out(least, size_bytes, factor, signal):
            return True
        self.looks.append(Look(method, size_bytes, _rounded(least, factor, signal), self.rival(size_bytes)))
        return False

    def beats(self, method: str, size_bytes: int, least: float, rival: float) -> bool:
        """Whether a form may lose less than another one that is known to lose `rival`; notes where it may not."""
        if least < rival:
            return True
        self.looks.append(Look(method, size_bytes, least, rival))
        return False

    def skip(self, method: str, reason: str) -> None:
        """Notes why nothing of a method is looked at, where it is no bound."""
        self.looks.append(Look(method, reason=reason))


@dataclass(frozen=True)
class Tools:
    """What a method that says what its recipes are expected to lose (`losses`) works with, for one tensor.

    leaf: (a quantiser's recipe, dense factor, its metric or None) -> the factor encoded. estimate: (a quantiser's recipe,
    dense tensor) -> its expected loss, without encoding. beaten: (recipe, loss) -> whether another candidate of no more
    bytes loses no more. remembered: what decompositions of the tensor have found (nstf.decomposers.remembered).
    """

    leaf: Callable[[Recipe, Tensor, Tensor | None], Any]
    estimate: Callable[[Recipe, Tensor], float]
    beaten: Callable[[Recipe, float], bool]
    remembered: Any


def _rounded(least: float, factor: FactorForm | None, signal: float) -> float:
    return least if factor is None else least + factor.noise * max(0.0, signal - least)
