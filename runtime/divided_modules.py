"""Modules of which every rank has a part (Shoeybi et al., Megatron-LM, 2019).

Products cut by rows need nothing new: they give this rank's columns, which the next product, cut by columns, takes. Its
results are summed. Tables, heads and experts know which rows they have. As in modules.py a module stays the instance that
it was and its class becomes one derived from its own. Inference only: sums let no gradients through.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nstf.kernels.linear import linear, linear32
from nstf.kernels.triton.blocks import product32
from nstf.runtime.ahead import MOST_BYTES, decoded_ahead
from nstf.runtime.ranks import Ranks

if TYPE_CHECKING:
    from nstf.kernels.triton.peer_rows import Twins
    from nstf.kernels.triton.peers import Peers

# Prompts of so many rows are multiplied in pieces, which still fill a GPU: only the last piece's sum is waited for.
LONG_ROWS, PIECES = 4096, 4
# From so many rows on a sum takes its time by its bytes.
SHORT_ROWS = 256


class Divided:
    """What all have in common."""

    ranks: Ranks


class SummedLinear(Divided):
    """A product cut by columns: the sum over ranks, of float32 and rounded once, as one process would (but for prompts of
    SHORT_ROWS and more on GPUs, whose parts are rounded before); then the bias.

    following: the encoded weights of the products that come next. Those that will be decoded as a whole are decoded while
    the sum is under way.
    """

    following: tuple[Any, ...]

    def forward(self: Any, input: Tensor) -> Tensor:
        """The product of all ranks, in x's dtype."""
        x = input.reshape(-1, input.shape[-1])
        # By the rows alone: all ranks must divide alike, whatever their kernels are.
        y: Tensor = self._rounded(self._sum_of(x), x.dtype) if len(x) < LONG_ROWS else self._in_pieces(x)
        return y.view(*input.shape[:-1], -1)

    def product(self: Any, x: Tensor) -> Tensor:
        """The product of all ranks, for a caller who adds it to float32: in that; of many rows on GPUs in x's dtype, in
        which parts are added then."""
        y: Tensor = self.ranks.sum(self._term(x))
        return y if self.bias is None else y + self.bias

    def peers(self: Any) -> Peers | None:
        """What the product's last launch needs to sum over ranks; None where the sum is a step of its own."""
        stored = self._stored()
        if stored is None or self.bias is not None:
            return None
        found: Peers | None = self.ranks.peers(stored.like.device)
        return found

    def twins(self: Any, rows: int, dtype: torch.dtype) -> Twins | None:
        """What adds so many rows of the product over two ranks while it runs; None where the sum is a step of its own."""
        stored = self._stored()
        if stored is None or self.bias is not None or rows < SHORT_ROWS:
            return None
        found: Twins | None = self.ranks.twins(stored.like.device)
        return found if found is not None and found.takes(rows, self.out_features, dtype) else None

    def _stored(self: Any) -> Any:
        return self._modules.get("weight_encoded")

    def _part(self: Any, x: Tensor) -> Tensor:
        """This rank's term, x [..., columns of this rank] -> float32 [..., out]."""
        stored = self._stored()
        if stored is not None:
            return linear32(x, stored.encoded)
        return product32(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], len(self.weight))

    def _sum_of(self: Any, x: Tensor) -> Tensor:
        def meanwhile() -> None:
            decode_following(self.following, x)

        # A sum that nothing is done beside needs no second stream.
        some = any(_may_decode(parameter, x) for parameter in self.following)
        y: Tensor = self.ranks.sum(self._term(x), meanwhile if some else None)
        return y

    def _term(self: Any, x: Tensor) -> Tensor:
        """As `_part`; of many rows in x's type, where sums are made in that."""
        if len(x) < SHORT_ROWS or not _adds_short(x):
            part: Tensor = self._part(x)
            return part
        stored = self._stored()
        return nn.functional.linear(x, self.weight) if stored is None else linear(x, stored.encoded)

    def _in_pieces(self: Any, x: Tensor) -> Tensor:
        """The product of all ranks: the sum of some rows is under way while the next rows are multiplied."""
        stored = self._stored()
        weight = self.weight if stored is None else decoded_ahead(stored.encoded, len(x), x.dtype)
        y = x.new_empty(len(x), self.out_features)
        before: tuple[Any, Tensor, Tensor] | None = None
        short = _adds_short(x)

        def arrived(under_way: Any, part: Tensor, into: Tensor) -> None:
            under_way.wait()
            if part is not into:
                into.copy_(part if self.bias is None else self._rounded(part, x.dtype))
            elif self.bias is not None:
                into += self.bias

        rows = -(-len(x) // PIECES)
        for some, into in zip(torch.split(x, rows), torch.split(y, rows), strict=True):
            if weight is None:
                part = self._part(some)
            else:
                part = torch.mm(some, weight.t(), out=into) if short else product32(some, weight)
            under_way = self.ranks.start_sum(part)
            if before is not None:
                arrived(*before)
            before = under_way, part, into
        decode_following(self.following, x)
        if before is not None:
            arrived(*before)
        return y

    def _rounded(self: Any, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """With the bias, rounded where one process rounds: torch's own product adds the bias before, ours after."""
        bias: Tensor | None = self.bias
        if bias is None:
            return sums.to(dtype)
        return sums.to(dtype) + bias if self._stored() is not None else (sums + bias).to(dtype)


def _adds_short(x: Tensor) -> bool:
    """Whether parts of a long prompt are added in 16 bits, as every engine does: on GPUs a sum of float32 takes twice as
    long, and processors from a product beside it. Each part is rounded once more by that."""
    return x.is_cuda and x.element_size() == 2


def decode_following(following: tuple[Any, ...], x: Tensor) -> None:
    """Decodes what products of x [rows, in] would decode whole anyway, up to MOST_BYTES, and leaves it with them."""
    left = MOST_BYTES
    for parameter in following:
        if not _may_decode(parameter, x):
            continue  # asking which kernel it is takes longer on the host than many a sum
        parameter.ahead = decoded_ahead(parameter.encoded, len(x), x.dtype, left)
        if parameter.ahead is None:
            parameter.not_ahead = (len(x), x.dtype)
        else:
            left -= parameter.ahead.nbytes


def _may_decode(parameter: Any, x: Tensor) -> bool:
    """False where it was asked before, and products of x read the codes themselves."""
    return getattr(parameter, "not_ahead", None) != (len(x), x.dtype)


class AheadLinear:
    """A product that takes the weight decoded during the sum before it, if it was."""

    def forward(self: Any, input: Tensor) -> Tensor:
        stored = self.weight_encoded
        weight, stored.ahead = getattr(stored, "ahead", None), None
        if weight is not None and weight.dtype == input.dtype:
            return nn.functional.linear(input, weight, self.bias)
        y: Tensor = super().forward(input)  # type: ignore[misc]
        return y


class DividedNorm(Divided):
    """A root-mean-square norm over the queries or keys of all ranks, of which this one has some heads (OLMo 2).

    whole: their number on all ranks; copies: how many ranks have each, where ranks share KV heads.
    """

    whole: int
    copies: float

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        squares = self.ranks.sum(x.square().sum(-1, keepdim=True)) / self.copies
        y: Tensor = self.weight * (x * torch.rsqrt(squares / self.whole + self.variance_epsilon))
        return y.to(hidden_states.dtype)


class DividedEmbedding(Divided):
    """A table of which this rank has the rows from `first` on: zero for others' rows, then the sum over ranks.

    An id outside of the vocabulary raises IndexError; on a GPU it gives NaN, as an encoded table does in one process.
    """

    first: int
    rows: int
    vocabulary: int

    def forward(self: Any, input: Tensor) -> Tensor:
        known = (input >= 0) & (input < self.vocabulary)
        on_gpu = input.device.type == "cuda"
        if not on_gpu and not bool(known.all()):
            raise IndexError(f"a token id is outside of the {self.vocabulary} of the vocabulary")
        ids, inside = self.own(input)
        rows: Tensor = self.filled(super().forward(ids), inside)  # type: ignore[misc]
        return rows.masked_fill(~known.unsqueeze(-1), float("nan")) if on_gpu else rows

    def own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rows of this rank's part, which of them were asked for)."""
        local = ids - self.first
        near = local.clamp(0, max(self.rows - 1, 0))  # few launches: a token on GPUs waits for each
        return near, near == local

    def filled(self, rows: Tensor, inside: Tensor) -> Tensor:
        """The rows asked for, from the ranks that have them."""
        return self.ranks.sum(torch.where(inside.unsqueeze(-1), rows, 0.0))


class DividedHead(Divided):
    """The output layer: every rank has the logits of some tokens and is given those of all. width: tokens of a full part."""

    width: int
    vocabulary: int

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input)

    def product(self, x: Tensor) -> Tensor:
        """The logits of all tokens."""
        return self.ranks.joined(super().forward(x), self.width, self.vocabulary)  # type: ignore[misc]


class DividedExperts(Divided):
    """Experts of which this rank has those from `first` on. To transformers' loop the others are the one that is none; older
    versions know no such, there a token of others goes to an expert of this rank and counts nothing."""

    first: int
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        local = top_k_index - self.first
        own = (local >= 0) & (local < self.num_experts)
        if _knows_no_expert():
            local = torch.where(own, local, self.num_experts)
            y: Tensor = super().forward(hidden_states, local, top_k_weights)  # type: ignore[misc]
        else:
            # Zeros go there in the token's place: an expert that it was not meant for may overflow, and 0 times infinity
            # is NaN. So each choice of a token is a row of its own.
            rows = torch.where(own[..., None], hidden_states[:, None], 0).flatten(0, 1)
            weights = torch.where(own, top_k_weights, 0).view(-1, 1)
            each: Tensor = super().forward(rows, local.remainder(self.num_experts).view(-1, 1), weights)  # type: ignore[misc]
            y = each.view(*own.shape, -1).float().sum(1).to(hidden_states.dtype)
        return self.ranks.sum(y.float()).to(y.dtype)


@cache
def _knows_no_expert() -> bool:
    """Whether transformers' loop over experts passes by tokens whose expert is `num_experts`: 5.23 does, 5.17 does not, and
    those between were not tried."""
    import transformers

    return version_numbers(transformers.__version__) >= (5, 23)


def version_numbers(version: str) -> tuple[int, int]:
    """(5, 23) of "5.23.0.dev0"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def derive(module: Any, kind: type, **attributes: Any) -> None:
    """Puts `kind` before the module's class and sets attributes."""
    base: Any = type(module)
    module.__class__ = _derived(kind, base)
    for name, value in attributes.items():
        setattr(module, name, value)


@cache
def _derived(kind: type, base: type) -> type:
    return type(f"{kind.__name__}Of{base.__name__}", (kind, base), {"__doc__": kind.__doc__})
