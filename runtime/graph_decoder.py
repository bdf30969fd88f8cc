"""Decoding a model of the Llama family on a GPU, the whole of it one captured graph: a replay per token.

The prompt's keys and values go into a static cache (graph_prompt.py), and from there on a token is a replay of the launches
that `_step` makes: matrices by their kernels (q, k and v, gate and up as one each where their formats agree), the rest by
kernels/triton/decode_step.py, the choice of the next token at the end. The position is read from device memory, so that a
graph is right for every token until the cache is full; then it grows to twice the size, and the graph is captured anew. On a
CPU the same step runs without a graph, for tests.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError
from nstf.kernels.torch.decode_step import Cache, Heads
from nstf.kernels.torch.rows import decode_rows
from nstf.kernels.triton.linear import rows as rows_on_gpu
from nstf.kernels.triton.linear import unsuitable
from nstf.runtime.decoder_glue import Given, Glue
from nstf.runtime.divided_modules import DividedEmbedding
from nstf.runtime.engine_config import EngineConfig, read_config
from nstf.runtime.graph_prompt import MOST_ROWS, PIECES_FROM, PIECES_FROM_ON_RANKS, Prompts
from nstf.runtime.graphs import Graphs, Step, same_draws
from nstf.runtime.sampling import Sampling, choose
from nstf.runtime.stacking import Matrix, matrix_of, stacked

LARGEST_BATCH = 16
# Positions of the first cache: growing from it costs a capture each time the sequence doubles.
SMALLEST_CAPACITY = 512
# Graphs kept: one for each way of choosing tokens that was asked for.
KEPT_GRAPHS = 4


@dataclass(frozen=True)
class Layer:
    """Matrices of a layer, those that share activations together, and gains of its norms, f32."""

    qkv: tuple[Matrix, ...]
    qkv_bias: Tensor | None
    o: Matrix
    gate_up: tuple[Matrix, ...]
    down: Matrix
    attention_norm: Tensor
    ffn_norm: Tensor
    attention_out_norm: Tensor | None
    ffn_out_norm: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None
    heads: Heads
    rotation: int


@dataclass(frozen=True)
class State:
    """What a graph works on. tokens: int64 [batch], the last ones chosen; position: int64 [1], where they go."""

    capacity: int
    cache: Tensor  # [layers, 2, batch, kv_heads, capacity, size]
    angles: tuple[tuple[Tensor, Tensor], ...]  # (cos, sin) of each rotation, f32 [capacity, size / 2]
    tokens: Tensor
    position: Tensor

    def layer(self, i: int, rotation: int) -> Cache:
        return Cache(self.cache[i, 0], self.cache[i, 1], *self.angles[rotation])


class Decoder:
    """A loaded model ready to decode on its device. One call at a time; the cache stays for the next one."""

    def __init__(self, model: Any, capture: Callable[[Step], Step] | None = None) -> None:
        """model: of `nstf.runtime.load`. capture: makes a replay of a step; by default a graph on a GPU, the step itself
        on a CPU.

        Raises UnsupportedError for a model or device it does not run.
        """
        self.model, self.device, self.dtype = model, model.device, model.dtype
        if self.device.type == "cuda" and (reason := unsuitable(self.device.index or 0)):
            raise UnsupportedError(f"no captured decoding: {reason}")
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedError(f"no captured decoding in {self.dtype}")
        try:
            self.config: EngineConfig = read_config(model.config.to_dict())
        except UnsupportedError as error:
            raise UnsupportedError(str(error).replace("the CPU engine", "captured decoding")) from error
        self._rotations = tuple(torch.tensor(r, device=self.device) for r in self.config.rotations)
        try:
            self._embedding: Any = model.model.embed_tokens
            self._divided = isinstance(self._embedding, DividedEmbedding)
            self._head = matrix_of(model.lm_head)
            self._norm = self._gain(model.model.norm)
            self._layers = tuple(self._layer(i, layer) for i, layer in enumerate(model.model.layers))
        except AttributeError as error:
            raise UnsupportedError(
                f"{type(model).__name__} is not built as its config says: {error}"
            ) from error
        self._state: State | None = None
        self._steps: OrderedDict[Sampling | None, Step] = OrderedDict()
        self._glue = Glue(self.device, float(self.config.shape["epsilon"]), self.dtype)
        self._capture = capture or (Graphs(self.device) if self.device.type == "cuda" else lambda step: step)
        self._prompts = Prompts(
            model, len(self._layers), self._capture, getattr(model, "nstf_ranks", None),
            self._prompt_piece, self.longest_prompt, self._suits_pieces(),
        )  # fmt: skip

    @property
    def context(self) -> int:
        """Tokens a sequence may have."""
        return int(self.config.shape["context"])

    @property
    def longest_prompt(self) -> int:
        """Tokens that every window has room for: attention of such a prompt needs no mask but that no token sees those after
        it."""
        windows = [layer.heads.window for layer in self._layers if layer.heads.window]
        return min(windows, default=self.context)

    @property
    def _weights_a_layer(self) -> int:
        shape = self.config.shape
        heads = 2 * shape["heads"] + 2 * shape["kv_heads"]
        return int(shape["hidden"] * (heads * shape["head_size"] + 3 * shape["ffn"]))

    def _suits_pieces(self) -> bool:
        """Whether long prompts run in pieces: what a GPU has of a layer is large, and ranks sum its rows while they
        multiply. All ranks answer alike."""
        ranks = getattr(self.model, "nstf_ranks", None)
        if ranks is None:
            return self._weights_a_layer >= PIECES_FROM
        summed = (matrix for layer in self._layers for matrix in (layer.o, layer.down))
        twins = all(m.twins is not None and m.twins(MOST_ROWS, self.dtype) is not None for m in summed)
        return twins and self._weights_a_layer // int(ranks.size) >= PIECES_FROM_ON_RANKS

    @property
    def capacity(self) -> int:
        """Tokens for which there is room now."""
        return self._state.capacity if self._state else 0

    @property
    def matrix_bytes(self) -> int:
        """What decoding a token reads of the matrices."""
        matrices = [self._head]
        for layer in self._layers:
            matrices += [*layer.qkv, layer.o, *layer.gate_up, layer.down]
        return sum(matrix.size_bytes for matrix in matrices)

    def cache_bytes(self, position: int) -> int:
        """What decoding a token at a position reads of keys and values, in each sequence."""
        seen = sum(min(position, layer.heads.window or position) for layer in self._layers)
        heads = self._layers[0].heads
        return seen * 2 * heads.kv_heads * heads.size * int(self.dtype.itemsize)

    @staticmethod
    def first_room(count: int, new_tokens: int) -> int:
        """Tokens to make room for at first: not all that may come, many sequences end before."""
        return count + min(new_tokens, SMALLEST_CAPACITY // 2)

    def prepare(self, batch: int, tokens: int, sampling: Sampling | None) -> None:
        """Makes room for sequences of some tokens and captures the step, if need be. What was in the cache is lost."""
        self._make_room(batch, tokens)
        self._replay(sampling)

    def rehearse(self, batch: int, tokens: int, sampling: Sampling | None) -> None:
        """What of `prepare` may fail on one rank of several, before the others depend on it: makes room and runs the step,
        which compiles its kernels, uncaptured. Inside of `Ranks.alone`."""
        state = self._make_room(batch, tokens)
        if sampling not in self._steps:
            with same_draws(self.device):
                self._step(state, sampling)
            state.tokens.zero_()
            state.position.zero_()

    def _make_room(self, batch: int, tokens: int) -> State:
        capacity = self._rounded(tokens)
        state = self._state
        if state is None or len(state.tokens) != batch or state.capacity < capacity:
            self._renew(batch, capacity)
        assert self._state is not None
        # A capture runs the step: at the last sequence's position it could write beyond the cache.
        self._state.position.zero_()
        return self._state

    def drop(self) -> None:
        """Gives cache and graphs back; the next sequence makes them anew."""
        self._steps.clear()
        self._prompts.forget()
        self._state = None

    def prompt(self, ids: Tensor) -> Tensor:
        """Logits [batch, vocab] after prompts [batch, tokens], valid until the next ones. What was in the cache is lost."""
        return self._prompts.run(ids, self._make_room(*ids.shape).cache)

    def generate(self, ids: Tensor, new_tokens: int, sampling: Sampling | None = None) -> Iterator[list[int]]:
        """The next token of each sequence, `new_tokens` times. ids: int64 [batch, tokens], without padding.

        The device runs one token ahead of what the caller has.
        """
        batch, count = ids.shape
        self.prepare(batch, self.first_room(count, new_tokens), sampling)
        self._start(ids, sampling)
        for i in range(new_tokens):
            ready = self._fetch(i)
            if i + 1 < new_tokens:
                self._next(count + i, sampling)
            yield ready()

    def _start(self, ids: Tensor, sampling: Sampling | None) -> None:
        """The prompt, its keys and values into the cache, and the first token."""
        state = self._state
        assert state is not None
        state.tokens.copy_(choose(self._prompts.run(ids, state.cache), sampling))
        state.position.fill_(ids.shape[1])

    def _next(self, position: int, sampling: Sampling | None) -> None:
        """Runs the step for the token at `position`, with more room first if it does not fit."""
        assert self._state is not None
        if position >= self._state.capacity:
            self._renew(len(self._state.tokens), self._rounded(position + 1), position)
        self._replay(sampling)()

    def _fetch(self, i: int) -> Callable[[], list[int]]:
        """Starts the way of the chosen tokens to the host; the call waits for them."""
        assert self._state is not None
        tokens = self._state.tokens
        if tokens.device.type != "cuda":
            return tokens.clone().tolist
        here = self._pinned[i % 2]
        here.copy_(tokens, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(tokens.device))

        def ready() -> list[int]:
            arrived.synchronize()
            found: list[int] = here.tolist()
            return found

        return ready

    def _replay(self, sampling: Sampling | None) -> Step:
        """The captured step for a way of choosing, made at its first use."""
        if sampling not in self._steps:
            while len(self._steps) >= KEPT_GRAPHS:
                self._steps.popitem(last=False)
            state = self._state
            assert state is not None
            before = state.tokens.clone(), state.position.clone()
            with same_draws(self.device):
                self._steps[sampling] = self._capture(lambda: self._step(state, sampling))
            state.tokens.copy_(before[0])
            state.position.copy_(before[1])
        self._steps.move_to_end(sampling)
        return self._steps[sampling]

    def _renew(self, batch: int, capacity: int, keep: int = 0) -> None:
        """A cache of another size, with the first `keep` positions of the old one; graphs of the old one go."""
        old = self._state
        self._steps.clear()
        self._prompts.forget()
        self._state = None
        shape, kv_heads = self.config.shape, self._layers[0].heads.kv_heads
        if old is not None and not keep:
            old = None  # its memory is free before the new one takes its own
        cache = torch.empty(
            len(self._layers),
            2,
            batch,
            kv_heads,
            capacity,
            shape["head_size"],
            dtype=self.dtype,
            device=self.device,
        )
        tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        position = torch.zeros(1, dtype=torch.int64, device=self.device)
        if old is not None:
            cache[:, :, :, :, :keep].copy_(old.cache[:, :, :, :, :keep])
            tokens.copy_(old.tokens)
            position.copy_(old.position)
        places = torch.arange(capacity, device=self.device).float()
        angles = tuple((torch.outer(places, r).cos(), torch.outer(places, r).sin()) for r in self._rotations)
        self._state = State(capacity, cache, angles, tokens, position)
        self._glue.reserve(batch, [layer.heads for layer in self._layers])
        if self.device.type == "cuda":
            self._pinned = [torch.empty(batch, dtype=torch.int64).pin_memory() for _ in range(2)]

    def _rounded(self, tokens: int) -> int:
        """The next power of two, and no more than the context."""
        return min(max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length()), self.context)

    def _step(self, state: State, sampling: Sampling | None) -> None:
        """One token of each sequence from `state` to `state`: what a graph is captured of."""
        self._glue.advance(self.logits(state), sampling, state.tokens, state.position)

    def logits(self, state: State) -> Tensor:
        """[batch, vocab] after the tokens of `state` at its position; their keys and values are in the cache then."""
        h = self._embed(state.tokens).float()
        return self._through(h, lambda i, qkv: self._attend(i, qkv, state))

    def prompt_logits(self, ids: Tensor, last: Tensor, first: int = 0, state: State | None = None) -> Tensor:
        """[batch, vocab] after the tokens at the place `last`, int64 [1], of prompts ids [batch, tokens] that fit the cache
        and `longest_prompt`; their keys and values are in the cache then. first: the position of a piece that goes on from
        what the cache holds. state: in the place of the decoder's own."""
        state = state or self._state
        assert state is not None
        batch, count = ids.shape

        def attend(i: int, qkv: Tensor) -> Tensor:
            layer = self._layers[i]
            cache = state.layer(i, layer.rotation)
            return self._glue.attend_prompts(
                qkv, layer.qkv_bias, layer.qk_norms, cache, count, layer.heads, first
            )

        # The module looks at the ids, which the caller chose.
        h = self._embedding(ids).flatten(0, 1).float()
        return self._through(h, attend, torch.arange(batch, device=ids.device) * count + last)

    def _prompt_piece(self, ids: Tensor, last: Tensor, first: int, sequences: slice) -> Tensor:
        """`prompt_logits` of some sequences of the cache."""
        assert self._state is not None
        state = replace(self._state, cache=self._state.cache[:, :, sequences])
        return self.prompt_logits(ids, last, first, state)

    def _through(
        self, h: Tensor, attend: Callable[[int, Tensor], Tensor], kept: Tensor | None = None
    ) -> Tensor:
        """Logits after the layers and the head, of the residual stream h, f32 [rows, hidden], which is changed in place.

        attend: the attention of a layer, by its number and q, k and v side by side. kept: the rows whose logits are asked
        for, all by default.
        """
        glue, gelu = self._glue, bool(self.config.shape["gelu"])
        x = glue.first(h, self._layers[0].attention_norm)
        for i, layer in enumerate(self._layers):
            last = i + 1 == len(self._layers)
            gain = self._norm if last else self._layers[i + 1].attention_norm
            following = (self._head,) if last else self._layers[i + 1].qkv
            attended = Given(attend(i, glue.products(layer.qkv, x)))
            x = glue.onto(h, layer.o, attended, layer.attention_out_norm, layer.ffn_norm, layer.gate_up, 0)
            y = glue.gate(layer.gate_up, x, gelu)
            x = glue.onto(h, layer.down, y, layer.ffn_out_norm, gain, following, 1)
        logits = glue.products((self._head,), x if kept is None else x.some(kept))
        cap = float(self.config.shape["logit_cap"])
        return cap * torch.tanh(logits.float() / cap) if cap else logits

    def _attend(self, i: int, qkv: Tensor, state: State) -> Tensor:
        """Attention of layer i; the new keys and values go into the cache."""
        layer = self._layers[i]
        cache = state.layer(i, layer.rotation)
        return self._glue.attend(qkv, layer.qkv_bias, layer.qk_norms, cache, state.position, layer.heads)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Rows of the table, [batch, hidden], as the model scales them."""
        stored: Any = self._embedding._modules.get("weight_encoded")
        if stored is None:
            found: Tensor = self._embedding(tokens)
            return found
        ids, inside = self._embedding.own(tokens) if self._divided else (tokens, None)
        rows = rows_on_gpu(stored.encoded, ids, self.dtype)
        if rows is None:  # the tokens were chosen among those that exist: nothing to check on the host
            rows = decode_rows(stored.encoded, ids, self.dtype)
        scale = getattr(self._embedding, "embed_scale", None)
        rows = rows if scale is None else rows * scale.to(rows.dtype)
        return rows if inside is None else self._embedding.filled(rows, inside)

    def _layer(self, i: int, module: Any) -> Layer:
        attention, mlp, config = module.self_attn, module.mlp, self.config
        family, shape = config.family, config.shape
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [p.bias for p in projections]
        # As the matrices have them: a rank of several has some of the model's.
        size = shape["head_size"]
        heads = Heads(
            attention.q_proj.out_features // size,
            attention.k_proj.out_features // size,
            size,
            shape["score_scale"],
            config.windows[i],
            shape["epsilon"],
        )
        second = module.pre_feedforward_layernorm if family.out_norms else module.post_attention_layernorm
        return Layer(
            stacked(projections),
            None if biases[0] is None else torch.cat([b.float() for b in biases]),
            matrix_of(attention.o_proj),
            stacked((mlp.gate_proj, mlp.up_proj)),
            matrix_of(mlp.down_proj),
            self._gain(module.input_layernorm),
            self._gain(second),
            self._gain(module.post_attention_layernorm) if family.out_norms else None,
            self._gain(module.post_feedforward_layernorm) if family.out_norms else None,
            (self._gain(attention.q_norm), self._gain(attention.k_norm)) if family.qk_norm else None,
            heads,
            config.rotation_of[i],
        )

    def _gain(self, norm: Any) -> Tensor:
        values: Tensor = norm.weight.float()
        return values + 1 if self.config.family.unit_norms else values
