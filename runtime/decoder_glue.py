"""What a decoder does between its matrices, by Triton on a GPU and by torch elsewhere.

Where a product is of a kind that has endings (kernels/triton/ending.py), the gate, or the sum and norm of the residual
stream, come with the sum of its parts. Of such a norm the root mean square is left to the product that follows.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from nstf.kernels.linear import linear
from nstf.kernels.torch import decode_step as reference
from nstf.kernels.torch.decode_step import Cache, Heads
from nstf.kernels.triton.ended import ended, ended_specs
from nstf.kernels.triton.ending import Ending, Meeting
from nstf.kernels.triton.linear import arch_of
from nstf.runtime.sampling import Sampling, choose
from nstf.runtime.stacking import Matrix, together

if TYPE_CHECKING:
    from nstf.kernels.triton.peer_rows import Twins


@dataclass(frozen=True)
class Given:
    """Activations for the next product.

    squares: f32 [batch, n], whose sum over n is that of the residual stream's squares: its root mean square is still to be
    divided by. None: it was, or there is none.
    """

    values: Tensor
    squares: Tensor | None = None

    def some(self, rows: Tensor) -> "Given":
        """These rows alone."""
        squares = None if self.squares is None else self.squares.index_select(0, rows)
        return Given(self.values.index_select(0, rows), squares)


class Glue:
    """The functions of decode_step.py, by Triton on a GPU and by torch elsewhere. dtype: of activations."""

    def __init__(self, device: torch.device, epsilon: float, dtype: torch.dtype) -> None:
        self.device, self.arch, self.epsilon, self.dtype = device, arch_of(device), epsilon, dtype
        self.kernels: Any = None
        if device.type == "cuda":
            from nstf.kernels.triton import decode_step

            self.kernels = decode_step
        self._room: dict[Heads, Any] = {}
        self._choice: Any = None

    def reserve(self, batch: int, shapes: list[Heads]) -> None:
        """Room for attention over these shapes."""
        if self.kernels is not None:
            self._room = {s: self.kernels.scratch(batch, s, self.device) for s in dict.fromkeys(shapes)}

    def first(self, h: Tensor, gain: Tensor) -> Given:
        """The norm of the residual stream h."""
        return Given(self._add_norm(h, None, gain, None))

    def onto(
        self,
        h: Tensor,
        matrix: Matrix,
        x: Given,
        out_gain: Tensor | None,
        gain: Tensor,
        following: tuple[Matrix, ...],
        turn: int,
    ) -> Given:
        """Adds a product (normed first, with `out_gain`) onto h, in place, and norms that, for the products `following`.
        turn: which of the two products of a layer that add it is."""
        batch, peers = len(h), matrix.peers() if matrix.peers else None
        adds = Ending(adds=True) if peers is None else Ending(adds=True, rank=peers.rank, ranks=peers.ranks)
        if out_gain is None and self._ends(matrix, batch, adds):
            if all(self._ends(m, batch, Ending(normed=True)) for m in following):
                return Given(*self._ended(matrix, x, adds, Meeting(h=h, gain=gain, peers=peers)))
        twins = None if matrix.twins is None or self.kernels is None else matrix.twins(batch, self.dtype)
        if twins is not None:
            return Given(self._met(h, matrix, x, out_gain, gain, twins, turn))
        return Given(self._add_norm(h, self.products((matrix,), x), gain, out_gain))

    def _met(
        self,
        h: Tensor,
        matrix: Matrix,
        x: Given,
        out_gain: Tensor | None,
        gain: Tensor,
        twins: "Twins",
        turn: int,
    ) -> Tensor:
        """As `onto`, over the rows of a prompt of two ranks."""
        from nstf.kernels.triton.linear import matmul_twice, supports
        from nstf.kernels.triton.peer_rows import met_norm

        assert matrix.encoded is not None
        place = twins.place(turn, len(h), matrix.encoded.shape[0], self.dtype)
        with torch.cuda.device(self.device):
            if supports(matrix.encoded, self.device, len(h)):
                y = matmul_twice(x.values, matrix.encoded, place)
            else:  # on this rank perhaps: the others must not wait
                y = linear(x.values, matrix.encoded)
                place.copy_(y)
            return met_norm(h, y, gain, self.epsilon, twins, turn, self.arch, out_gain)

    def products(self, matrices: tuple[Matrix, ...], x: Given) -> Tensor:
        """Those with x, side by side."""
        if x.squares is None:
            return together(matrices, x.values)
        meeting = Meeting(squares=x.squares, epsilon=self.epsilon)
        found = [self._ended(m, x, Ending(normed=True), meeting)[0] for m in matrices]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def gate(self, gate_up: tuple[Matrix, ...], x: Given, gelu: bool) -> Given:
        """The gate of the products with x."""
        ending = Ending(gelu, x.squares is not None)
        if len(gate_up) == 1 and self._ends(gate_up[0], len(x.values), ending):
            return Given(self._ended(gate_up[0], x, ending, Meeting(x.squares, self.epsilon))[0])
        both = self.products(gate_up, x)
        found: Tensor = (
            reference.gate(both, gelu) if self.kernels is None else self.kernels.gate(both, gelu, self.arch)
        )
        return Given(found)

    def _ends(self, matrix: Matrix, batch: int, ending: Ending) -> bool:
        """Whether a product has this ending. Of a part of a matrix only one that sums over ranks."""
        if self.kernels is None or matrix.encoded is None:
            return False
        complete = (matrix.whole is None or ending.ranks > 1) and matrix.bias is None
        return complete and bool(ended_specs(matrix.encoded, batch, self.dtype, ending, self.arch))

    def _ended(
        self, matrix: Matrix, x: Given, ending: Ending, meeting: Meeting
    ) -> tuple[Tensor, Tensor | None]:
        assert matrix.encoded is not None
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return ended(x.values, matrix.encoded, ending, meeting, self.arch)

    def _add_norm(self, h: Tensor, y: Tensor | None, gain: Tensor, out_gain: Tensor | None) -> Tensor:
        if self.kernels is None:
            return reference.add_norm(h, y, gain, self.epsilon, self.dtype, out_gain)
        found: Tensor = self.kernels.add_norm(h, y, gain, self.epsilon, self.dtype, self.arch, out_gain)
        return found

    def attend(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        gains: tuple[Tensor, Tensor] | None,
        cache: Cache,
        position: Tensor,
        shape: Heads,
    ) -> Tensor:
        if self.kernels is None:
            return reference.attend(qkv, bias, gains, cache, position, shape)
        room = self._room[shape]
        found: Tensor = self.kernels.attend(qkv, bias, gains, cache, position, shape, room, self.arch)
        return found

    def attend_prompts(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        gains: tuple[Tensor, Tensor] | None,
        cache: Cache,
        tokens: int,
        shape: Heads,
        first: int,
    ) -> Tensor:
        """Causal attention of prompts of `tokens` each, or of pieces from `first` on, [batch * tokens, heads * size]
        as qkv; their keys and values are in the cache then. All keys are seen: no window is shorter than a prompt."""
        if self.kernels is None:
            q = reference.place(qkv, bias, gains, cache, tokens, shape, first)
        else:
            from nstf.kernels.triton.prompt_heads import place

            q = place(qkv, bias, gains, cache, tokens, shape, first, self.arch)
        q = q.view(-1, tokens, shape.heads, shape.size).transpose(1, 2)
        end = first + tokens
        k, v = cache.keys[:, :, :end], cache.values[:, :, :end]
        y = scaled_dot_product_attention(
            q, k, v,
            attn_mask=causal_lower_right(tokens, end) if first else None, is_causal=not first,
            scale=shape.scale, enable_gqa=shape.heads != shape.kv_heads,
        )  # fmt: skip
        return y.transpose(1, 2).reshape(len(qkv), -1)

    def advance(self, logits: Tensor, sampling: Sampling | None, tokens: Tensor, position: Tensor) -> None:
        """The next tokens by logits [batch, vocab] into tokens, int64 [batch], and the position after them, int64 [1]."""
        if self.kernels is None or sampling is not None:
            tokens.copy_(choose(logits, sampling))
            position.add_(1)
            return
        from nstf.kernels.triton import likeliest

        batch, vocab = logits.shape
        if self._choice is None or self._choice.fits != (batch, vocab):
            self._choice = likeliest.scratch(batch, vocab, logits.device)
        likeliest.advance(logits.contiguous(), tokens, position, self._choice, self.arch)
