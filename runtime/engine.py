"""The CPU engine: an artifact of the Llama family run by one C++ call per token, without transformers' modules.

`Engine.open(path)` maps the file and copies integers and grids of a small one into panels; `forward` gives logits,
`generate` continues tokens. `nstf.runtime.load` gives models whose `generate` uses it where it can
(runtime/engine_generate.py).

Nothing here imports torch before logits are asked for as a tensor: a process that writes its first token greedily has no
need of it, and importing it would take ten times as long as that token.
"""

from __future__ import annotations

import math
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

from nstf.errors import NstfError, UnsupportedError, UsageError
from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import (
    PANEL_BYTES,
    PANEL_THREADS,
    available,
    compile_matrix,
    decode_row,
)
from nstf.kernels.formats import EncodedTensor
from nstf.kernels.lazy import torch
from nstf.kernels.records import changed
from nstf.runtime.artifact import Artifact, open_artifact
from nstf.runtime.artifact.digests import Verifying
from nstf.runtime.copying import Copying
from nstf.runtime.engine_config import EngineConfig, completed, read_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from torch import Tensor

    from nstf.runtime.attention_plan import AttentionPlan
    from nstf.runtime.divided_engine import HeldParts
    from nstf.runtime.token_sampler import TokenSampler

    # A file, or what a rank of a divided model holds of one.
    Stored: TypeAlias = Artifact | HeldParts

KV_CACHES = ("float16", "int8")
ATTENTION = ("full", "planned")
_NAN = "the model computes no numbers (NaN) for this text; the file may be broken"
# Tokens that are made in one call: for so many seconds, and so many at most. A reader sees no difference, and what is made
# after the last one asked for is not worth mentioning.
_RUN_S, _RUN_MOST = 0.01, 32
_PREFIXES = ("", "language_model.", "model.language_model.")
MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Engine:
    """A model ready to run on the CPU: matrices as views of the mapped file or repacked copies (panels), a cache of keys
    and values.

    One sequence at a time, for one caller at a time; `position` tokens of it are in the cache.
    """

    def __init__(
        self,
        artifact: Stored,
        exact: bool = False,
        threads: int | None = None,
        kv_cache: str = "float16",
        attention: str | AttentionPlan = "full",
        panels: bool | None = None,
        copy_later: bool = False,
    ) -> None:
        """threads: None for as many as torch uses. kv_cache: what keys and values are kept as, `float16` or `int8`.
        attention: `full`, or `planned` for the artifact's attention plan, which says how they are kept itself; or a plan.
        panels: repack integers and grids, which are multiplied faster then; None: those of files up to 512 MiB that are
        mapped, where this takes the place of the file's pages in memory. Where memory does not suffice, the rest stays as it
        is stored. Panels are made of the file: what was written into the artifact's arrays is only seen with False.
        copy_later: panels are made while the caller goes on; it calls `finish`, whatever happens, before anything else here.

        Raises UnsupportedError for a model the engine does not run as transformers would, UsageError for another kv_cache
        or attention and where there is no plan, CorruptError for a plan that cannot be read.
        """
        if kv_cache not in KV_CACHES:
            raise UsageError(f"KV cache {str(kv_cache)[:40]!r} is not one of {', '.join(KV_CACHES)}")
        if isinstance(attention, str) and attention not in ATTENTION:
            raise UsageError(f"attention {str(attention)[:40]!r} is not one of {', '.join(ATTENTION)}")
        if attention != "full" and kv_cache != "float16":
            raise UsageError(f"kv_cache {kv_cache!r}: an attention plan says how keys and values are kept")
        if not available():
            raise UnsupportedError("the CPU engine was not built; install nstf where a C++ compiler is")
        stated = artifact.config()
        self.config: EngineConfig = read_config(completed(stated))
        parts = None if isinstance(artifact, Artifact) else artifact
        if parts is not None:
            self.config = changed(self.config, shape=parts.part_of(self.config))
        self.exact = exact
        self.threads = threads
        self.kv_cache = kv_cache
        self.plan: AttentionPlan | None = None
        plans: list[dict[str, Any]] = []
        if isinstance(artifact, Artifact):
            self.plan, plans = _planned(artifact, self.config, kv_cache, attention)
        self._divided = parts is not None
        self.position = 0
        self._check_unchanged = artifact.check_unchanged
        try:
            source = self._panel_source(artifact, panels)
            matrices = _Matrices(artifact, exact, source)
            self._engine, self.kernels = _build(artifact, self.config, matrices, plans)
            if parts is not None:
                self._engine.divide(*parts.connected(self.vocab))
            self._copying = Copying(
                matrices.copies, min(threads or usual_threads(), PANEL_THREADS), copy_later
            )
            if not copy_later:
                self._copying.finish()
            if matrices.left:
                _warn_of(artifact, matrices.left)
        except MemoryError as error:
            raise NstfError(f"{artifact.where}: not enough memory for the CPU engine to open it") from error
        except (ValueError, TypeError, RuntimeError) as error:  # nanobind's own of a size beyond 64 bits, too
            _refuse_contradictions(artifact)
            raise UnsupportedError(f"{artifact.where}: the CPU engine does not run it ({error})") from error

    def _panel_source(self, artifact: Stored, panels: bool | None) -> Stored | None:
        """Where what is repacked is read from; None for nothing."""
        if self.exact or panels is False or (panels is None and not may_repack(artifact, self.exact)):
            return None
        return artifact.again() or (artifact if panels else None)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        exact: bool = False,
        verify: bool = True,
        kv_cache: str = "float16",
        attention: str = "full",
    ) -> Engine:
        """The engine of an artifact. exact: no int8 activations. verify: check every SHA-256 first. kv_cache: what keys
        and values are kept as, `float16` or `int8`. attention: `full`, or `planned` as the artifact's plan says.

        Raises UnsupportedError, CorruptError, UsageError.
        """
        artifact = open_artifact(path)
        if not verify:
            return cls(artifact, exact, kv_cache=kv_cache, attention=attention)
        with Verifying(artifact, may_repack(artifact, exact)) as check:
            try:
                return cls(artifact, exact, kv_cache=kv_cache, attention=attention)
            finally:
                check.wait()  # a damaged file is called that, whatever the engine says of it

    def finish(self) -> None:
        """Returns when all panels are made; before, nothing else may be called. Raises NstfError where memory does not
        suffice."""
        try:
            self._copying.finish()
        except MemoryError as error:
            raise NstfError("not enough memory to repack the file's codes") from error

    @property
    def context(self) -> int:
        """Tokens a sequence may have."""
        return int(self.config.shape["context"])

    @property
    def vocab(self) -> int:
        return int(self.config.shape["vocab"])

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return int(self._engine.cache_bytes)

    @property
    def held_bytes(self) -> int:
        """Memory taken for keys and values, with pages that are free again."""
        return int(self._engine.held_bytes)

    def reset(self) -> None:
        """Forgets the sequence."""
        self.position = 0

    def forward(self, ids: Sequence[int] | Tensor, all_logits: bool = False) -> Tensor:
        """Appends tokens to the sequence; logits of the last one, float32 [vocab], or of all [tokens, vocab].

        Raises UsageError for no tokens, tokens that do not exist and sequences longer than the context, NstfError at the
        start of a sequence when the mapped file was changed and in a process forked while another thread ran the engine.
        """
        logits = torch.frombuffer(self._run(ids, all_logits), dtype=torch.float32)
        return logits.reshape(-1, self.vocab) if all_logits else logits

    def _run(
        self, ids: Sequence[int] | Tensor, all_logits: bool = False, room: array[float] | None = None
    ) -> array[float]:
        """The logits, in `room` where there is one of their size: an array of a large vocabulary takes as long to make
        as a small model's layer."""
        tokens = _integers(ids)
        count = len(tokens)
        self._check(tokens, count)
        try:
            logits = room or array("f", bytes(4 * self.vocab * (count if all_logits else 1)))
            threads = self.threads or usual_threads()
            self._engine.run(_address(tokens), count, self.position, _address(logits), all_logits, threads)
        except MemoryError as error:
            raise NstfError(f"not enough memory for {self.position + count} tokens") from error
        self.position += count
        return logits

    def _check(self, tokens: Sequence[int], count: int) -> None:
        """Raises UsageError unless `tokens` exist and `count` fit into the sequence."""
        if count == 0:
            raise UsageError("there are no tokens to run")
        if self.position + count > self.context:
            raise UsageError(
                f"{self.position + count} tokens do not fit the model's context of {self.context}"
            )
        if min(tokens) < 0 or max(tokens) >= self.vocab:
            raise UsageError(f"a token is outside the vocabulary of {self.vocab}")
        if self.position == 0:
            self._check_unchanged()

    def generate(
        self,
        ids: Sequence[int] | Tensor,
        max_new_tokens: int,
        stop: frozenset[int] = frozenset(),
        choose: Callable[[Tensor], int] | None = None,
        sampler: TokenSampler | None = None,
    ) -> Iterator[int]:
        """New tokens after `ids`, one at a time, up to and with one of `stop`. The sequence starts anew.

        choose: logits [vocab] -> token; sampler: draws without torch; the likeliest when both are None. Raises as
        `forward`, and NstfError when the logits are NaN.
        """
        self.reset()
        tokens = _integers(ids)
        count = min(max_new_tokens, self.context - len(tokens))
        if sampler is None and choose is None:
            yield from self._likeliest(tokens, count, stop)
            return
        logits = None
        for i in range(count):
            # Whoever chooses may keep what it was shown.
            logits = self._run(tokens, room=logits if choose is None else None)
            if sampler is not None:
                token = sampler.choose(_address(logits), self.vocab)
            elif choose is not None:
                token = choose(torch.frombuffer(logits, dtype=torch.float32))
            if math.isnan(logits[token]):
                raise NstfError(_NAN)
            yield token
            if token in stop or i + 1 == count:
                return
            tokens = array("q", [token])

    def _likeliest(self, prompt: array[int], count: int, stop: frozenset[int]) -> Iterator[int]:
        """The same without a choice of its own, several tokens for each call of the engine: handing one out takes as long as
        a small model's layer."""
        if count <= 0:
            return
        logits = self._run(prompt)
        token = ext.argmax_at(_address(logits), self.vocab)
        if math.isnan(logits[token]):
            raise NstfError(_NAN)
        yield token
        if token in stop:
            return
        for start, found in self._runs(token, count - 1, stop):
            for i, token in enumerate(found):
                # Whoever leaves here goes on from what was handed out.
                self.position = start + i + 1
                yield token

    def go_on(self, token: int, count: int, stop: frozenset[int] = frozenset()) -> array[int]:
        """Appends `token` to the sequence and goes on with the likeliest ones: `count` of them, or up to and with one of
        `stop`. The last of them is not in the sequence yet.

        Raises as `forward`, and NstfError when the logits are NaN.
        """
        if count < 1:
            raise UsageError("there are no tokens to run")
        self._check([token], count)
        found = array("q")
        for _, some in self._runs(token, count, stop):
            found.extend(some)
        return found

    def _runs(self, token: int, count: int, stop: frozenset[int]) -> Iterator[tuple[int, array[int]]]:
        """The same in pieces of as many tokens as take _RUN_S, each with the position it began at; between them an
        interruption is heard.

        With an attention plan one by one: its rings and few bits do not go back to a position before. So do ranks, which
        must have made as many tokens when a caller leaves.
        """
        together = 1
        while count:
            start, began = self.position, time.perf_counter()
            found, nan = self._go_on(token, min(count, together), stop)
            took = time.perf_counter() - began
            if found:
                yield start, found
                token, count = found[-1], count - len(found)
            if nan:
                raise NstfError(_NAN)
            if token in stop:
                return
            if self.plan is None and not self._divided:
                together = max(1, min(_RUN_MOST, int(_RUN_S * len(found) / took)))

    def _go_on(self, token: int, count: int, stop: frozenset[int]) -> tuple[array[int], bool]:
        """The tokens found, and whether the logits after them were NaN."""
        found = array("q", bytes(8 * count))
        threads, known = self.threads or usual_threads(), [t for t in stop if 0 <= t < self.vocab]
        try:
            number, nan = self._engine.go_on(token, self.position, count, known, _address(found), threads)
        except MemoryError as error:
            raise NstfError(f"not enough memory for {self.position + count} tokens") from error
        self.position += number
        return found[: number - nan], nan


def _warn_of(artifact: Stored, name: str) -> None:
    line = f"{artifact.where}: not enough memory to repack {name} and what follows, which stay as they are stored"
    try:
        import logging
    except MemoryError:  # there is none even for that: as logging would where nobody set it up
        sys.stderr.write(f"{line}\n")
    else:
        logging.getLogger("nstf").warning("%s", line)


def may_repack(artifact: Stored, exact: bool) -> bool:
    """Whether an engine repacks a file when nothing is said of panels."""
    return not exact and artifact.size_bytes <= PANEL_BYTES


def _planned(
    artifact: Artifact, config: EngineConfig, kv_cache: str, attention: str | AttentionPlan
) -> tuple[AttentionPlan | None, list[dict[str, Any]]]:
    """The attention plan, and what each layer is told of it: nothing for dense attention over float16, which most files
    have and which does without these modules."""
    if attention == "full" and kv_cache == "float16":
        return None, []
    from nstf.runtime.engine_attention import int8_plan, layer_plan, read_plan

    if attention == "full":
        return None, [int8_plan(config.shape["kv_heads"])] * int(config.shape["layers"])
    plan = read_plan(artifact, config, attention)
    return plan, [layer_plan(layer) for layer in plan.layers]


class _Matrices:
    """A file's matrices for the C++ engine, each made once, and the kernel of every one by tensor name.

    source: where what is repacked into panels is read from, which is not kept; None for no panels. They may be used once
    `copies` have run.
    """

    def __init__(self, artifact: Stored, exact: bool, source: Stored | None) -> None:
        self.kernels: dict[str, str] = {}
        self.left = ""  # the first matrix that there was no memory to repack
        self.copies = ext.EngineCopies()
        self._artifact, self._exact, self._source = artifact, exact, source
        self._made: dict[str, Any] = {}

    def __call__(self, name: str) -> Any:
        stored = self._artifact.stored_name(name)
        if stored not in self._made:
            self._made[stored] = self._compiled(name)
        self.kernels[name] = self._made[stored].kernel
        return self._made[stored]

    def _compiled(self, name: str) -> Any:
        encoded = self._artifact.views(name)
        if self._source is not None:
            try:
                source = self._source.views(name)
                return compile_matrix(encoded, self._exact, panel_source=source, copies=self.copies)
            except MemoryError:
                self._source, self.left = None, name
        return compile_matrix(encoded, self._exact)


def greedy(logits: Tensor) -> int:
    """The likeliest token. Not by torch: its threads would go on looking for work while the engine's start on theirs."""
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or not logits.is_contiguous():
        return ext.argmax(logits)
    return ext.argmax_at(logits.data_ptr(), logits.numel())


def usual_threads() -> int:
    """torch's number of threads where torch is in use, and what it would be where it is not."""
    if "torch" in sys.modules:
        return torch.get_num_threads()
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if stated.isdecimal() and len(stated) < 10 and int(stated):  # the engine's are 32 bits
        return int(stated)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _integers(ids: Sequence[int] | Tensor) -> array[int]:
    flat = (
        ids
        if isinstance(ids, list | tuple | array)
        else torch.as_tensor(ids, dtype=torch.int64, device="cpu").reshape(-1).tolist()
    )
    return array("q", flat)


def _address(values: array[Any]) -> int:
    return values.buffer_info()[0]


def _refuse_contradictions(artifact: Stored) -> None:
    """Raises CorruptError for arrays whose numbers contradict one another: no other runtime reads them either."""
    from nstf.kernels.formats import check_values
    from nstf.runtime.tensors import decoding

    for name in artifact.names():
        with decoding(artifact.where, name):
            check_values(artifact.encoded(name))


def _build(
    artifact: Stored, config: EngineConfig, matrix: _Matrices, plans: list[dict[str, Any]]
) -> tuple[Any, dict[str, str]]:
    """The C++ engine, and the kernel of every matrix by tensor name. plans: of every layer's attention, or none."""
    names = set(artifact.names())
    prefix = next((p for p in _PREFIXES if f"{p}model.embed_tokens.weight" in names), None)
    if prefix is None:
        raise UnsupportedError(
            f"{artifact.where}: no model.embed_tokens.weight, which the CPU engine starts from"
        )

    def vector(name: str) -> array[float]:
        if name not in names:
            raise UnsupportedError(f"{artifact.where}: no tensor {name!r}, which the CPU engine needs")
        encoded = artifact.views(name)
        if encoded.tree.kind != "dense":
            from nstf.runtime.tensors import decoded

            return array("f", decoded(artifact, name).float().reshape(-1).tolist())
        return decode_row(
            compile_matrix(EncodedTensor(encoded.tree, (1, math.prod(encoded.shape)), encoded.arrays)), 0
        )

    def norm(name: str) -> array[float]:
        values = vector(name)
        return array("f", [v + 1 for v in values]) if config.family.unit_norms else values

    root = f"{prefix}model."
    embedding = f"{root}embed_tokens.weight"
    head = f"{prefix}lm_head.weight"
    if head not in names:
        if not config.tied:
            raise UnsupportedError(f"{artifact.where}: no tensor {head!r}, which the CPU engine needs")
        head = embedding
    engine = ext.Engine(config.shape, matrix(embedding), matrix(head), norm(f"{root}norm.weight"))
    for frequencies in config.rotations:
        engine.add_rotation(frequencies)
    known = {embedding, head, f"{root}norm.weight"}
    for i in range(config.shape["layers"]):
        at = f"{root}layers.{i}."
        layer: dict[str, Any] = {key: matrix(f"{at}{path}.weight") for key, path in MATRICES.items()}
        known |= {f"{at}{path}.weight" for path in MATRICES.values()}
        for key in config.biases:
            layer[f"{key}_bias"] = vector(f"{at}{MATRICES[key]}.bias")
            known.add(f"{at}{MATRICES[key]}.bias")
        for key, name in _norms(config).items():
            layer[key] = norm(f"{at}{name}.weight")
            known.add(f"{at}{name}.weight")
        plan = plans[i] if plans else {}
        engine.add_layer(layer | plan | {"window": config.windows[i], "rotation": config.rotation_of[i]})
    unused = sorted(n for n in names - known if n.startswith(root) and not n.endswith("rotary_emb.inv_freq"))
    if unused:
        raise UnsupportedError(f"{artifact.where}: the CPU engine would ignore {unused[0]!r}")
    return engine, matrix.kernels


def _norms(config: EngineConfig) -> dict[str, str]:
    """The engine's name -> the model's name of a layer's norms."""
    found = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    if config.family.out_norms:
        found["ffn_norm"] = "pre_feedforward_layernorm"
        found |= {
            "attention_out_norm": "post_attention_layernorm",
            "ffn_out_norm": "post_feedforward_layernorm",
        }
    if config.family.qk_norm:
        found |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    return found
