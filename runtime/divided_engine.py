"""The CPU engine for one rank of a divided model: its part of every matrix, and sums over the ranks between products.

The parts are those that the loaded modules hold, so nothing is read or kept twice. Ranks make the same calls, and the same
tokens come of them: sums and joined logits are alike on all, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError
from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.formats.dense import Params
from nstf.runtime.artifact import Artifact
from nstf.runtime.engine import Engine
from nstf.runtime.engine_config import EngineConfig
from nstf.runtime.modules import SUFFIX
from nstf.runtime.parameter import EncodedParameter
from nstf.runtime.ranks import Ranks
from nstf.runtime.tensor_parallel import vocabulary_part

# Arrays of the engine's numbers that are looked at as tensors: it grows its buffers, so that few addresses come back.
_MOST_VIEWS = 64


class HeldParts:
    """What the modules of a rank hold, read as the engine reads a file. Shapes are those of the parts."""

    def __init__(self, model: Any, artifact: Artifact, ranks: Ranks) -> None:
        self.ranks, self.where, self.size_bytes = ranks, artifact.where, artifact.size_bytes
        self.config, self.check_unchanged = artifact.config, artifact.check_unchanged
        self._held: dict[str, EncodedTensor] = {}
        self._first: dict[int, str] = {}  # of each object held, the first name it has
        self._stored: dict[str, str] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, EncodedParameter):
                self._hold(name.removesuffix(SUFFIX), module, module.encoded)
                continue
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    self._hold(f"{name}.{leaf}", parameter, _dense(parameter))

    def _hold(self, name: str, owner: object, encoded: EncodedTensor) -> None:
        self._held[name] = encoded
        self._stored[name] = self._first.setdefault(id(owner), name)

    def names(self) -> list[str]:
        return [*self._held]

    def stored_name(self, name: str) -> str:
        """The first name of a tensor that several share."""
        return self._stored[name]

    def encoded(self, name: str) -> EncodedTensor:
        return self._held[name]

    views = encoded

    def again(self) -> None:
        """No file whose codes could be repacked: the parts are in memory once."""

    def part_of(self, config: EngineConfig) -> dict[str, Any]:
        """The sizes of this rank's part, `config.shape` else. Raises UnsupportedError for tensors that are not there."""
        size, vocab = config.shape["head_size"], config.shape["vocab"]
        found = {}
        for key, module in (("heads", "q_proj"), ("kv_heads", "k_proj"), ("ffn", "gate_proj")):
            name = next((n for n in self._held if n.endswith(f"{module}.weight")), None)
            if name is None:
                raise UnsupportedError(f"{self.where}: no {module}, which the CPU engine needs")
            found[key] = self._held[name].shape[0] // (1 if key == "ffn" else size)
        width = vocabulary_part(vocab, self.ranks.size)
        first = self.ranks.rank * width
        return config.shape | found | {"first_row": first, "rows": min(vocab, first + width) - first}

    def connected(self, vocab: int) -> tuple[Callable[[int, int], None], Callable[[int, int, int], None]]:
        """What the C++ engine calls with addresses of float32: the sum of numbers in their place, and the logits of all
        tokens from this rank's."""
        ranks, width, seen = (
            self.ranks,
            vocabulary_part(vocab, self.ranks.size),
            dict[tuple[int, int], Tensor](),
        )
        rows = min(vocab, (ranks.rank + 1) * width) - ranks.rank * width

        def at(address: int, count: int) -> Tensor:
            view = seen.get((address, count))
            if view is None:
                if len(seen) >= _MOST_VIEWS:
                    seen.clear()
                with torch.inference_mode(False):  # looked at by later calls too, whatever mode those are in
                    view = torch.frombuffer(
                        (ctypes.c_float * count).from_address(address), dtype=torch.float32
                    )
                seen[address, count] = view
            return view

        def total(address: int, count: int) -> None:
            ranks.sum(at(address, count))

        def join(part: int, count: int, logits: int) -> None:
            found = ranks.joined(at(part, count * rows).view(count, rows), width, vocab)
            at(logits, count * vocab).view(count, vocab).copy_(found)

        return total, join


def _dense(parameter: Tensor) -> EncodedTensor:
    values = parameter.detach()
    name = str(values.dtype).removeprefix("torch.")
    return EncodedTensor(Node("dense", Params(name)), tuple(values.shape), {"values": values})


def divided_engine(model: Any, artifact: Artifact, ranks: Ranks, exact: bool) -> Engine:
    """The engine of this rank. Raises what Engine raises: the caller asks whether all ranks have one."""
    return Engine(HeldParts(model, artifact, ranks), exact)
