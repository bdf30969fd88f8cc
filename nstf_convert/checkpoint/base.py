"""The Checkpoint every reader ends in: parameters read one at a time, with config and tokenizer files."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf.runtime.artifact.config import Limits, limits_of_shapes
from nstf_convert.checkpoint import memory
from nstf_convert.checkpoint.naming import Plan, Recipe
from nstf_convert.checkpoint.source import Source, TensorInfo, is_sampled, source_digest
from nstf_convert.checkpoint.ties import find_ties
from nstf_convert.notice import NOTICE

log = logging.getLogger("nstf")

# Its square is a number of float32, as are sums of many.
LARGEST_VALUE = 1e18
# Looked at in one go: on a GPU each piece is waited for.
PIECE_VALUES = {"cpu": 1 << 20, "cuda": 1 << 26}


class Checkpoint:
    """One opened model. Nothing of the weights is in memory until `get`, and nothing stays after it.

    kind: "safetensors", "bin", "gguf" or "onnx"; path: what was opened; config: the allowed fields of config.json
    or None; architecture: transformers' class the names belong to, or None when they are those in the file;
    ties: alias -> stored name; missing: parameters of the class that the file lacks; notes: what a report should
    say about the reading.
    """

    def __init__(
        self,
        path: Path,
        source: Source,
        plan: Plan,
        config: dict[str, Any] | None,
        side_files: Callable[[], dict[str, bytes]],
        notes: tuple[str, ...] = (),
    ) -> None:
        self.kind = source.kind
        self.path = path
        self.config = config
        self.architecture = plan.architecture
        self.missing = plan.missing
        # Notes go into reports, and those must not depend on the folder; names in the files need not be text.
        self.notes = tuple(
            note.replace(str(path), path.name).encode("utf-8", "backslashreplace").decode()
            for note in (*notes, *plan.notes)
        )
        self.ties: Mapping[str, str] = find_ties(plan, source)
        self._keep_untied(plan)
        self._source = source
        _check_names(plan.recipes, source)
        self._side_files = side_files
        self._files: dict[str, bytes] | None = None
        self._fingerprint: str | None = None
        self._finite: set[str] = set()  # looked through already
        self._recipes = {name: r for name, r in plan.recipes.items() if name not in self.ties}
        self._names = sorted(self._recipes)
        if not self._names:
            raise UsageError(f"{path} holds no tensors; give a model with weights")

    def _keep_untied(self, plan: Plan) -> None:
        """Parameters that the class ties but whose values differ stay apart: the config must then say so.

        transformers' from_pretrained decides the same way.
        """
        apart = sorted(a for a, n in plan.declared.items() if self.ties.get(a, a) != self.ties.get(n, n))
        if apart and self.config is not None:
            self.config = {**self.config, "tie_word_embeddings": False}
            self.notes += (f"{apart[0]} differs from {plan.declared[apart[0]]}: they are not tied",)

    def names(self) -> list[str]:
        """The parameters that are stored, sorted; tied duplicates are left out (see `ties`)."""
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and size of a stored parameter, without reading it."""
        return self._recipe(name).info

    @property
    def limits(self) -> Limits:
        """What the tensors allow the model of a config to be made of."""
        shapes = [recipe.info.shape for recipe in self._recipes.values()]
        return limits_of_shapes(shapes, len(shapes) + len(self.ties))

    def get(self, name: str) -> Tensor:
        """The parameter, read from disk into memory of its own.

        The dtype is the stored one; parameters of a quantised GGUF come as float32 values rounded to bfloat16.
        Raises CorruptError for NaN or infinite values, UnsupportedError for those too large or small for float32.
        """
        tensor = self._recipe(name).build(self._source.read)
        if name not in self._finite:
            self._look_through(name, tensor)
            self._finite.add(name)
        return tensor

    def _look_through(self, name: str, tensor: Tensor) -> None:
        bad, low, high = _extremes(tensor)
        if bad:
            place = self._source.describe(self._recipe(name).sources[0])
            raise CorruptError(
                f"{place}: tensor {name!r} has {bad} NaN or infinite values of {tensor.numel()}; "
                f"the checkpoint is broken (a diverged training or a bad download), use another one"
            )
        if beyond := _beyond_float32(tensor, max(-low, high)):
            place = self._source.describe(self._recipe(name).sources[0])
            raise UnsupportedError(f"{place}: tensor {name[:80]!r} {beyond}, or leave it out")

    def files(self) -> dict[str, bytes]:
        """config.json, generation_config.json and the tokenizer's files by name, without keys that lead to code."""
        if self._files is None:
            files = self._side_files()
            if self.config is not None:
                files["config.json"] = json.dumps(self.config, indent=2, sort_keys=True).encode() + b"\n"
            self._files = dict(sorted(files.items()))
        return dict(self._files)

    def say_notes(self, where: str) -> None:
        """Says what was left out of it, and the like. where: what the user calls it."""
        for note in self.notes:
            log.log(NOTICE, "%s: %s", where, note)

    def paths(self) -> list[Path]:
        """The files that hold the tensors."""
        return sorted({Path(self._source.describe(name)) for name in self._source.infos})

    def stamps(self) -> dict[Path, tuple[int, int, int]]:
        """Of each of `paths` that is there now: its inode, when it was last written into and when anything of it last
        changed, in nanoseconds. Programs put the former back (`cp -p`), and none can the latter."""
        found = {}
        for path in self.paths():
            with suppress(OSError):
                at = path.stat()
                found[path] = (at.st_ino, at.st_mtime_ns, at.st_ctime_ns)
        return found

    @property
    def is_sampled(self) -> bool:
        """Whether the fingerprint is of samples: a change of a few values may not show in it."""
        return is_sampled(self._source)

    @property
    def total_bytes(self) -> int:
        """Bytes of all stored parameters in the reference dtype: what a budget is a fraction of."""
        return sum(recipe.info.size_bytes for recipe in self._recipes.values())

    def fingerprint(self) -> str:
        """SHA-256 of config, names and contents; the same in any folder.

        Above 512 MiB contents are sampled.
        """
        if self._fingerprint is None:
            config = json.dumps(self.config, sort_keys=True)
            names = json.dumps([self.kind, self._names, dict(self.ties)], sort_keys=True)
            text = f"{config}\n{names}\n{source_digest(self._source)}"
            self._fingerprint = hashlib.sha256(text.encode()).hexdigest()
        return self._fingerprint

    def close(self) -> None:
        """Close the files; `get` must not be called afterwards."""
        self._source.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _recipe(self, name: str) -> Recipe:
        name = self.ties.get(name, name)
        try:
            return self._recipes[name]
        except KeyError:
            raise NoParameterError(
                f"{self.path} has no parameter {name[:200]!r}; where its model needs it, the config belongs to another "
                "model or the file is not whole"
            ) from None


def _check_names(recipes: Mapping[str, Recipe], source: Source) -> None:
    """Raises CorruptError for a name that is no text."""
    for name, recipe in recipes.items():
        try:
            name.encode()
        except UnicodeEncodeError as error:  # half of a pair of surrogates, escaped
            where = source.describe(recipe.sources[0])
            raise CorruptError(f"{where}: {name[:80]!a} is no name of a tensor; download it again") from error


class NoParameterError(UnsupportedError, KeyError):
    """A parameter that a checkpoint lacks: a KeyError for who asks by name, an error of a file for who runs its model."""

    def __str__(self) -> str:
        return str(self.args[0])


def _beyond_float32(tensor: Tensor, largest: float) -> str:
    """What of it would be lost in float32 altogether, or "": imaginary parts, numbers whose squares are beyond it, or that
    are all below it. largest: of its magnitudes."""
    if tensor.is_complex():
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"has the type {kind}, which no model here computes with; save it as float32"
    if tensor.dtype in (torch.float64, torch.float32, torch.bfloat16):
        # A vector is stored as it is: a mask of the lowest numbers, say.
        most = LARGEST_VALUE if tensor.dim() > 1 else torch.finfo(torch.float32).max
        if largest > most:
            return f"has values up to {largest:.3g}, and {most:.3g} is supported; save smaller ones"
        if tensor.dtype == torch.float64 and 0 < largest < torch.finfo(torch.float32).tiny:
            return f"has no value beyond {largest:.3g}, which float32 rounds to 0 or to few digits; save larger ones"
    return ""


def _extremes(tensor: Tensor) -> tuple[int, float, float]:
    """(how many elements are NaN or infinite, the smallest, the largest; zeros where there are no fractions).

    Found in pieces, so that nothing of the tensor's size is made, and on the GPU that a tensor is read for, where there is
    one: a processor takes longer for it than for all else that it does with a weight.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return 0, 0.0, 0.0
    device = memory.device() or tensor.device
    bad, low, high = 0, math.inf, -math.inf
    for piece in torch.split(tensor.reshape(-1), PIECE_VALUES[device.type]):
        values = memory.to_device(piece, device)
        values = values.to(torch.float32) if values.element_size() == 1 else values
        least, most = torch.stack(torch.aminmax(values)).tolist()  # NaN where there is one
        if not (math.isfinite(least) and math.isfinite(most)):
            bad += int(values.numel() - torch.isfinite(values).sum())
        low, high = min(low, least), max(high, most)
    return bad, low, high
