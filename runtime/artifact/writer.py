"""Writes `.nstf` files: the exact size is known beforehand, and few tensors at a time are in memory.

The header holds the digests of arrays that do not exist yet. Their length is fixed, so the header's is too:
the arrays are written behind its place first, and the header last. The same input gives the same bytes: no
time, path, host or thread count is stored. `safetensors.save_file` neither fsyncs nor honours the umask
(safetensors#782): `atomic_file` does both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nstf.errors import NstfError
from nstf.kernels.formats import EncodedTensor, FormatError, Node, check, stored_bytes
from nstf.kernels.lazy import torch
from nstf.runtime.artifact import manifest as mf
from nstf.runtime.artifact.atomic_file import replacing
from nstf.runtime.artifact.header import (
    SAFETENSORS_NAMES,
    Shape,
    TensorEntry,
    build_header,
    parse_header_bytes,
)
from nstf.runtime.artifact.manifest import FILE_PREFIX, FileRecord, Manifest, Shared, TensorRecord

if TYPE_CHECKING:
    from torch import Tensor


# Tensors are made and checked while those before them are written, by so many threads, as long as they take at most so many
# bytes of the file: checking a stored result takes longer than writing it.
AHEAD_THREADS, AHEAD_BYTES = 2, 1 << 27


@dataclass(frozen=True)
class Source:
    """A tensor to be written whose arrays are made when its turn comes.

    `load()` must return an EncodedTensor of exactly this tree and shape; it is called once, in any thread, beside those of
    the next tensors, and the result is dropped after writing. `dtype` is the tensor's dtype in the source model, by torch's
    name.
    """

    tree: Node
    shape: Shape
    dtype: str
    load: Callable[[], EncodedTensor]


@dataclass(frozen=True)
class Layout:
    """Where every byte of a file goes, known before any array is: `header` has zeros for the digests."""

    manifest: Manifest
    blobs: Mapping[str, bytes]
    arrays: Mapping[str, tuple[str, Shape]]
    entries: Mapping[str, TensorEntry]
    header: bytes

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return max((entry.end for entry in self.entries.values()), default=len(self.header))


def write_artifact(
    path: str | os.PathLike[str],
    tensors: Mapping[str, EncodedTensor | Source | Shared],
    files: Mapping[str, bytes] | None = None,
    meta: Mapping[str, Mapping[str, Any]] | None = None,
    dtypes: Mapping[str, str] | None = None,
    keep: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Writes an artifact and gives back its size in bytes.

    tensors: name -> EncodedTensor, `Source` (made when needed) or `Shared` (another name for a stored one).
    files: bare name -> content. meta: objects under `plan`, `provenance`, `attention`, `report`. dtypes: the
    source dtype of tensors given as EncodedTensor (float32 when not given). keep: what has the
    name by the end stays. ready: called when all is written, before the file gets its name; it does not where that raises.
    Raises NstfError when the disk is full or fails, or for what stays, UsageError for a destination that cannot be,
    ValueError for names, values or trees that an artifact cannot hold.
    """
    sources = {name: _source(value, (dtypes or {}).get(name)) for name, value in tensors.items()}
    stored = {name: s for name, s in sources.items() if isinstance(s, Source)}
    layout = plan_layout(
        {name: (s.tree, s.shape, s.dtype) for name, s in stored.items()},
        {name: s.name for name, s in sources.items() if isinstance(s, Shared)},
        files,
        meta,
    )
    with replacing(Path(path), layout.size_bytes, keep) as output:
        digests = {}
        for name, blob in layout.blobs.items():
            digests[FILE_PREFIX + name] = output.put(
                layout.entries[FILE_PREFIX + name].start, memoryview(blob)
            )
        with contextlib.closing(_in_order(dict(sorted(stored.items())))) as made:
            for name, encoded in made:
                for key in encoded.arrays:  # nothing of it stays while the next one is waited for
                    full = mf.array_name(name, key)
                    digests[full] = output.put(layout.entries[full].start, _bytes_of(encoded.arrays[key]))
                del encoded
        output.write(0, memoryview(final_header(layout, digests)))
        ready()
    return layout.size_bytes


def artifact_size(
    entries: Mapping[str, tuple[Node, Shape, str]],
    shared: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    meta: Mapping[str, Mapping[str, Any]] | None = None,
    checked: bool = True,
) -> int:
    """The exact size in bytes of the file that `write_artifact` would write.

    entries: name -> (tree, shape, source dtype). shared: alias -> stored name. files, meta: as in
    `write_artifact`. checked: whether the file is shown to the reader, which takes two thirds of the time. Raises
    ValueError for what it would refuse.
    """
    return plan_layout(entries, shared, files, meta, checked).size_bytes


def plan_layout(
    entries: Mapping[str, tuple[Node, Shape, str]],
    shared: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    meta: Mapping[str, Mapping[str, Any]] | None = None,
    checked: bool = True,
) -> Layout:
    """The manifest and header of a file before its arrays exist. Raises ValueError as `artifact_size`."""
    unknown = sorted(set(meta or {}) - set(mf.META_KEYS))
    if unknown:
        raise ValueError(f"meta has the key {unknown[0]!r}; known are {', '.join(mf.META_KEYS)}")
    tensors: dict[str, TensorRecord | Shared] = {
        name: TensorRecord(shape, dtype, tree) for name, (tree, shape, dtype) in entries.items()
    }
    for name, target in (shared or {}).items():
        if name in tensors:
            raise ValueError(f"tensor {name!r} is both stored and shared")
        tensors[name] = Shared(target)
    records, blobs = {}, {}
    for name, content in sorted((files or {}).items()):
        records[name], blobs[name] = _packed(content)
    manifest = Manifest(tensors, records, **cast(Any, dict(meta or {})))
    arrays = mf.expected_arrays(manifest, {name: len(blob) for name, blob in blobs.items()})
    manifest = dataclasses.replace(manifest, sha256=(mf.NO_DIGEST,) * len(arrays))
    text = mf.to_json(manifest)
    header, placed = build_header(arrays, {mf.KEY: text})
    layout = Layout(manifest, blobs, arrays, placed, header)
    if not checked:
        return layout
    where = "the artifact to be written"
    try:  # what the writer writes, the reader must accept
        parsed = mf.from_json(text, where)
        found, _ = parse_header_bytes(header[8:], layout.size_bytes, where, artifact=True)
        mf.check_arrays(parsed, found, where)
    except NstfError as error:
        raise ValueError(str(error).partition("; the file is damaged")[0]) from error
    return layout


def final_header(layout: Layout, digests: Mapping[str, str]) -> bytes:
    """The header with the arrays' digests and its own. Its length is that of the layout's header."""
    manifest = dataclasses.replace(layout.manifest, sha256=tuple(digests[name] for name in sorted(digests)))
    zeroed, _ = build_header(layout.arrays, {mf.KEY: mf.to_json(manifest)})
    manifest = dataclasses.replace(manifest, header_sha256=hashlib.sha256(zeroed).hexdigest())
    header, _ = build_header(layout.arrays, {mf.KEY: mf.to_json(manifest)})
    if len(header) != len(layout.header):
        raise ValueError(f"the header became {len(header)} bytes instead of {len(layout.header)}")
    return header


def _source(value: EncodedTensor | Source | Shared, dtype: str | None) -> Source | Shared:
    if isinstance(value, EncodedTensor):
        if value.tree.kind == "dense":
            dtype = dtype or value.tree.params.dtype
        return Source(value.tree, tuple(value.shape), dtype or "float32", lambda: value)
    return value


def _in_order(stored: Mapping[str, Source]) -> Generator[tuple[str, EncodedTensor], None, None]:
    """The tensors, the next ones under way while one is written: AHEAD_BYTES with that one."""
    waiting = deque(
        (name, source, stored_bytes(source.tree, source.shape)) for name, source in stored.items()
    )
    pending: deque[tuple[str, int, Future[EncodedTensor]]] = deque()
    with ThreadPoolExecutor(AHEAD_THREADS, "write-ahead") as pool:
        try:
            while waiting or pending:
                while waiting and (
                    not pending or sum(size for _, size, _ in pending) + waiting[0][2] <= AHEAD_BYTES
                ):
                    name, source, size = waiting.popleft()
                    pending.append((name, size, pool.submit(_loaded, name, source)))
                yield pending[0][0], pending[0][2].result()
                pending.popleft()
        finally:
            for _, _, made in pending:
                made.cancel()


def _loaded(name: str, source: Source) -> EncodedTensor:
    """The arrays of a source, checked against what was announced: the header is fixed by now."""
    encoded = source.load()
    if (encoded.tree, tuple(encoded.shape)) != (source.tree, tuple(source.shape)):
        raise ValueError(f"tensor {name!r}: the encoded tensor has another tree or shape than announced")
    try:
        check(encoded)
    except FormatError as error:
        raise FormatError(f"tensor {name!r}: {error}") from error
    return encoded


@functools.lru_cache(maxsize=64)  # a planner asks for the size of many files that hold the same tokenizer
def _packed(content: bytes) -> tuple[FileRecord, bytes]:
    """A file's record and stored bytes: zlib when smaller, or when empty (no array may have 0 bytes)."""
    packed = zlib.compress(content, 9)
    if len(packed) < len(content) or not content:
        return FileRecord(len(content), "zlib"), packed
    return FileRecord(len(content), "raw"), bytes(content)


def _bytes_of(array: Tensor) -> memoryview:
    """The bytes of an array in row-major order; a copy only when it is not contiguous on the CPU."""
    if str(array.dtype).removeprefix("torch.") not in SAFETENSORS_NAMES:
        raise ValueError(f"dtype {array.dtype} cannot be stored")
    flat = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
