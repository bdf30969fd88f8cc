"""The two things that are compared: artifacts or original models, read tensor by tensor through one interface."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from nstf.errors import UsageError
from nstf.runtime.artifact import Artifact, open_artifact
from nstf_convert.checkpoint.paths import open_regular, pread_all
from nstf_convert.streamed import StreamedModel

TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json"}


class Side:
    """One of the two: its tensors by name, and what may be asked about each."""

    def __init__(self, where: str, source: Any) -> None:
        self.where = where
        self._source = source

    @property
    def artifact(self) -> Artifact | None:
        """The open artifact, or None for an original model."""
        return self._source if isinstance(self._source, Artifact) else None

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The model's config, or None without one."""
        if self.artifact is None:
            found: Mapping[str, Any] | None = self._source.config
            return found
        names = self.artifact.file_names()
        return self.artifact.object("config.json") if "config.json" in names else None

    def tensors(self) -> dict[str, str]:
        """Every tensor's name, and the one it is stored under: another one where weights are tied."""
        if self.artifact is not None:
            return {name: self.artifact.stored_name(name) for name in self.artifact.names()}
        return {name: name for name in self._source.names()} | dict(self._source.ties)

    def shape(self, stored: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        if self.artifact is not None:
            return self.artifact.record(stored).shape
        return tuple(self._source.info(stored).shape)

    def size_bytes(self, stored: str) -> int:
        """The bytes that a tensor's arrays take."""
        from nstf.kernels.formats import stored_bytes

        if self.artifact is not None:
            record = self.artifact.record(stored)
            return stored_bytes(record.tree, record.shape)
        return int(self._source.info(stored).size_bytes)

    def encoding(self, stored: str) -> str:
        """How a tensor is stored, in a few words; an original's dtype."""
        from nstf_convert.report.describe import compact

        if self.artifact is not None:
            return compact(self.artifact.record(stored).tree)
        return str(self._source.info(stored).dtype).removeprefix("torch.")

    def get(self, stored: str) -> Tensor:
        """The dense tensor, float32 where it is of a floating type."""
        from nstf.runtime.tensors import decoded

        if self.artifact is not None:
            return decoded(self.artifact, stored)
        found: Tensor = self._source.get(stored)
        return found.float() if found.is_floating_point() else found

    def model(self) -> StreamedModel:
        """The model, its weights streamed. Raises UsageError without a config."""
        if self.config is None:
            raise UsageError(f"{self.where} has no config.json: it cannot be run")
        if self.artifact is not None:
            made = StreamedModel.from_artifact(self.artifact)
        else:
            made = StreamedModel.from_checkpoint(self._source)
        if made.missing_said:
            logging.getLogger(__name__).warning("%s %s", self.where, made.missing_said)
        return made

    def tokenizer(self) -> Any:
        """The tokenizer inside, or None."""
        import nstf.runtime
        from nstf.runtime.tokenizer_files import tokenizer_from_files

        if self.artifact is not None:
            has = TOKENIZER_FILES & set(self.artifact.file_names())
            return nstf.runtime.load_tokenizer(self.artifact.path) if has else None
        files = self._source.files()
        return tokenizer_from_files(files, self.where) if TOKENIZER_FILES & set(files) else None


@contextmanager
def open_side(where: str, artifact: bool | None = None) -> Iterator[Side]:
    """An artifact, every digest of which is checked, or an original model. artifact: which of the two it has to be (None:
    by what is there). Raises NstfError.
    """
    from nstf_convert.checkpoint import open_checkpoint

    if artifact or (artifact is None and is_artifact(where)):
        with open_artifact(where, verify=True) as opened:
            yield Side(where, opened)
        return
    with open_checkpoint(where) as checkpoint:
        checkpoint.say_notes(where)
        yield Side(where, checkpoint)


def is_artifact(where: str) -> bool:
    """Whether a path names an artifact, by its suffix or by what it begins with."""
    path = Path(where)
    if path.suffix.lower() == ".nstf":
        return True
    if not path.is_file() or path.suffix.lower() in (".gguf", ".onnx", ".bin", ".safetensors"):
        return False
    with open_regular(path) as file:
        size = min(64, os.fstat(file.fileno()).st_size)
        return b'{"__metadata__":{"nstf":' in pread_all(file, 0, size, where)


def warn_about_source(artifact: Side, original: Side) -> None:
    """Says so when an artifact was made from another model than the one it is held against."""
    if artifact.artifact is None or original.artifact is not None:
        return
    recorded = artifact.artifact.manifest.provenance.get("checkpoint")
    if recorded and recorded != original._source.fingerprint():
        logging.getLogger(__name__).warning(
            "%s was not made from %s: fingerprints differ", artifact.where, original.where
        )
