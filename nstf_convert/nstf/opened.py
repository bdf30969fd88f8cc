"""`nstf.open`: a look inside an `.nstf` file without loading the model.

with nstf.open("model.nstf") as file:
    file.bits_per_weight, file.accuracy
    for name, tensor in file.tensors.items():
        print(name, tensor.shape, tensor.encoding, tensor.size_bytes)
    weight = file.decode("model.layers.0.mlp.down_proj.weight")

Opening reads the header alone and imports neither torch nor transformers; only `decode` needs torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nstf_convert import stated

if TYPE_CHECKING:
    import torch

    from nstf.runtime.artifact import Artifact, Verified


@dataclass(frozen=True)
class StoredTensor:
    """How one tensor is stored.

    shape: of the dense tensor. dtype: its type in the source, by torch's name. encoding: in a few words, `int4 g64`;
    `tree` is the same as the manifest has it (docs/format.md). size_bytes: what its arrays take, 0 for a tensor that
    is stored under the name `shared_with`. expected_loss: what the plan expected it to add to the loss, or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    tree: Mapping[str, Any]
    size_bytes: int
    shared_with: str | None
    expected_loss: float | None

    @property
    def parameters(self) -> int:
        """How many values the dense tensor has."""
        return math.prod(self.shape)

    @property
    def bits_per_weight(self) -> float:
        """Bits stored for each value, scales and tables counted; 0 for a shared tensor."""
        return 8 * self.size_bytes / self.parameters


class File:
    """An open `.nstf` file; made by `nstf.open`. Tensors that were decoded stay valid after `close`."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._artifact.path

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file, header and tokenizer included."""
        return self._artifact.size_bytes

    @property
    def format_version(self) -> int:
        """The version of the file's format."""
        return self._artifact.manifest.version

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor by name, in the order of the names."""
        return {name: self._describe(name) for name in self._artifact.names()}

    @property
    def parameters(self) -> int:
        """Values of all tensors; one that is shared counts once."""
        return sum(t.parameters for t in self.tensors.values() if t.shared_with is None)

    @property
    def bits_per_weight(self) -> float:
        """Bits of the whole file for each value, everything counted."""
        return 8 * self.size_bytes / max(1, self.parameters)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json; empty when the file holds none. Raises CorruptError when it is not JSON."""
        if "config.json" not in self.files:
            return {}
        return self._artifact.object("config.json")

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Where the file comes from: the source's fingerprint, the tool's version, the seed, the calibration."""
        return self._artifact.manifest.provenance

    @property
    def plan(self) -> Mapping[str, Any]:
        """The budget, and what was chosen for it."""
        return self._artifact.manifest.plan

    @property
    def report(self) -> Mapping[str, Any]:
        """The figures that the conversion measured and stored."""
        return self._artifact.manifest.report

    @property
    def accuracy(self) -> Mapping[str, Any] | None:
        """The measured accuracy of this file against its source, or None when none was measured.

        A language model has mean_kl (nats), median_kl, p99_kl, top1 and others; an encoder mean_cosine and others.
        """
        return stated.accuracy(self.report)

    @property
    def files(self) -> list[str]:
        """The names of the files inside: config.json, the tokenizer's and others."""
        return self._artifact.file_names()

    def read(self, name: str) -> bytes:
        """The content of a file inside. Raises UsageError for an unknown name, CorruptError if it does not unpack."""
        return self._artifact.file(name)

    def decode(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One dense tensor, computed in float32 and given back as `dtype` (None: float32).

        The other tensors are not read. Raises UsageError for an unknown name, CorruptError for stored numbers that
        contradict one another, NstfError where memory ends, ValueError after `close`.
        """
        from nstf.kernels.formats import decode
        from nstf.runtime.tensors import decoding

        encoded = self._artifact.encoded(name)
        with decoding(str(self.path), name):
            return decode(encoded, dtype).clone()

    def verify(self) -> Verified:
        """Reads the whole file and checks every SHA-256. Raises CorruptError that names what differs, NstfError where the
        file was written into since it was opened, ValueError after `close`."""
        from nstf.runtime.artifact.digests import verify_opened

        return verify_opened(self._artifact)

    def close(self) -> None:
        """Lets go of the file."""
        self._artifact.close()

    def __enter__(self) -> File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<nstf file {str(self.path)!r}: {len(self.tensors)} tensors, {self.size_bytes} bytes, "
            f"{self.bits_per_weight:.3f} bits per weight>"
        )

    def _describe(self, name: str) -> StoredTensor:
        from nstf.kernels.formats import node_to_json, stored_bytes
        from nstf_convert.report.describe import compact

        record, stored = self._artifact.record(name), self._artifact.stored_name(name)
        return StoredTensor(
            name=name,
            shape=record.shape,
            dtype=record.dtype,
            encoding=compact(record.tree),
            tree=node_to_json(record.tree),
            size_bytes=0 if stored != name else stored_bytes(record.tree, record.shape),
            shared_with=stored if stored != name else None,
            expected_loss=stated.expected_loss(self.plan, name),
        )


def open_file(path: str | os.PathLike[str], *, verify: bool = False) -> File:
    """An open `.nstf` file, its structure checked; no array is read. `verify`: check every SHA-256 as well.

    Use it in a `with` statement, or call `close`. Raises UsageError (no such file), UnsupportedError (another kind of
    file, or a newer version), CorruptError (damaged).
    """
    from nstf.runtime.artifact import open_artifact

    return File(open_artifact(path, verify=verify))
