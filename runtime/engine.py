"""The CPU engine: an artifact of the Llama family run by one C++ call per token, without transformers' modules.

`Engine.open(path)` maps the file; `forward` gives logits, `generate` continues tokens. `nstf.runtime.load` gives models
whose `generate` uses it where it can (runtime/engine_generate.py).
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import available, compile_matrix
from nstf.kernels.formats import decode
from nstf.runtime.artifact import Artifact, open_artifact
from nstf.runtime.engine_config import EngineConfig, completed, read_config

_PREFIXES = ("", "language_model.", "model.language_model.")
_MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Engine:
    """A model ready to run on the CPU: matrices as views of the mapped file, a float16 cache of keys and values.

    One sequence at a time, for one caller at a time; `position` tokens of it are in the cache.
    """

    def __init__(self, artifact: Artifact, exact: bool = False) -> None:
        """Raises UnsupportedError for a model the engine does not run as transformers would."""
        if not available():
            raise UnsupportedError("the CPU engine was not built; install nstf where a C++ compiler is")
        if "config.json" not in artifact.file_names():
            raise UnsupportedError(f"{artifact.path}: no config.json inside, which the CPU engine needs")
        try:
            stated = json.loads(artifact.file("config.json"))
        except ValueError as error:
            raise CorruptError(f"{artifact.path}: its config.json is not JSON ({error})") from error
        if not isinstance(stated, dict):
            raise CorruptError(f"{artifact.path}: its config.json is not an object")
        self.config: EngineConfig = read_config(completed(stated))
        self.exact = exact
        self.position = 0
        try:
            self._engine, self.kernels = _build(artifact, self.config, exact)
        except ValueError as error:
            raise UnsupportedError(f"{artifact.path}: the CPU engine does not run it ({error})") from error

    @classmethod
    def open(cls, path: str | os.PathLike[str], exact: bool = False, verify: bool = True) -> "Engine":
        """The engine of an artifact. exact: no int8 activations. verify: check every SHA-256 first.

        Raises UnsupportedError, CorruptError, UsageError.
        """
        return cls(open_artifact(path, verify=verify), exact)

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

    def reset(self) -> None:
        """Forgets the sequence."""
        self.position = 0

    def forward(self, ids: Sequence[int] | Tensor, all_logits: bool = False) -> Tensor:
        """Appends tokens to the sequence; logits of the last one, float32 [vocab], or of all [tokens, vocab].

        Raises UsageError for no tokens, tokens that do not exist and sequences longer than the context.
        """
        tokens = torch.as_tensor(ids, dtype=torch.int64).reshape(-1).contiguous()
        count = len(tokens)
        if count == 0:
            raise UsageError("there are no tokens to run")
        if self.position + count > self.context:
            raise UsageError(
                f"{self.position + count} tokens do not fit the model's context of {self.context}"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab:
            raise UsageError(f"a token is outside the vocabulary of {self.vocab}")
        logits = torch.empty((count, self.vocab) if all_logits else (self.vocab,))
        self._engine.run(
            tokens.data_ptr(), count, self.position, logits.data_ptr(), all_logits, torch.get_num_threads()
        )
        self.position += count
        return logits

    def generate(
        self,
        ids: Sequence[int] | Tensor,
        max_new_tokens: int,
        stop: frozenset[int] = frozenset(),
        choose: Callable[[Tensor], int] | None = None,
    ) -> Iterator[int]:
        """New tokens after `ids`, one at a time, up to and with one of `stop`. The sequence starts anew.

        choose: logits [vocab] -> token; the likeliest when None.
        """
        self.reset()
        room = self.context - len(torch.as_tensor(ids).reshape(-1))
        logits = self.forward(ids)
        for i in range(min(max_new_tokens, room)):
            token = greedy(logits) if choose is None else choose(logits)
            yield token
            if token in stop or i + 1 == min(max_new_tokens, room):
                return
            logits = self.forward([token])


def greedy(logits: Tensor) -> int:
    """The likeliest token. Not by torch: its threads would go on looking for work while the engine's start on theirs."""
    return int(logits.numpy().argmax())


def _build(artifact: Artifact, config: EngineConfig, exact: bool) -> tuple[Any, dict[str, str]]:
    """The C++ engine, and the kernel of every matrix by tensor name."""
    names = set(artifact.names())
    prefix = next((p for p in _PREFIXES if f"{p}model.embed_tokens.weight" in names), None)
    if prefix is None:
        raise UnsupportedError(
            f"{artifact.path}: no model.embed_tokens.weight, which the CPU engine starts from"
        )
    kernels: dict[str, str] = {}
    made: dict[str, Any] = {}

    def matrix(name: str) -> Any:
        stored = artifact.stored_name(name)
        if stored not in made:
            made[stored] = compile_matrix(artifact.encoded(name), exact)
        kernels[name] = made[stored].kernel
        return made[stored]

    def vector(name: str) -> Tensor:
        if name not in names:
            raise UnsupportedError(f"{artifact.path}: no tensor {name!r}, which the CPU engine needs")
        return decode(artifact.encoded(name)).to(torch.float32).reshape(-1).contiguous()

    def norm(name: str) -> Tensor:
        values = vector(name)
        return values + 1 if config.family.unit_norms else values

    root = f"{prefix}model."
    embedding = f"{root}embed_tokens.weight"
    head = f"{prefix}lm_head.weight"
    if head not in names:
        if not config.tied:
            raise UnsupportedError(f"{artifact.path}: no tensor {head!r}, which the CPU engine needs")
        head = embedding
    engine = ext.Engine(config.shape, matrix(embedding), matrix(head), norm(f"{root}norm.weight"))
    for frequencies in config.rotations:
        engine.add_rotation(frequencies)
    known = {embedding, head, f"{root}norm.weight"}
    for i in range(config.shape["layers"]):
        at = f"{root}layers.{i}."
        layer: dict[str, Any] = {key: matrix(f"{at}{path}.weight") for key, path in _MATRICES.items()}
        known |= {f"{at}{path}.weight" for path in _MATRICES.values()}
        for key in config.biases:
            layer[f"{key}_bias"] = vector(f"{at}{_MATRICES[key]}.bias")
            known.add(f"{at}{_MATRICES[key]}.bias")
        for key, name in _norms(config).items():
            layer[key] = norm(f"{at}{name}.weight")
            known.add(f"{at}{name}.weight")
        engine.add_layer(layer | {"window": config.windows[i], "rotation": config.rotation_of[i]})
    unused = sorted(n for n in names - known if n.startswith(root) and not n.endswith("rotary_emb.inv_freq"))
    if unused:
        raise UnsupportedError(f"{artifact.path}: the CPU engine would ignore {unused[0]!r}")
    return engine, kernels


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
