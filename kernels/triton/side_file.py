# mypy: disable-error-code="no-untyped-call"
"""Compiled kernels in a file beside an artifact, and their way into Triton's cache where they run.

The side file is a safetensors file: for each kernel its code object and what the compiler found out about it, under a
key made of the kernel's source, its types, constants, attributes and options. `install` puts the entries of the
kernels that this process would launch into Triton's own cache, where the JIT finds them; names in the file select
nothing else, and a kernel that is missing, of another Triton or of another nstf is compiled as usual. The code in a
side file runs on the GPU with the rights of the process: load only files that you made or trust.
"""

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError, no_place
from nstf.kernels.bounded_json import bounded_json
from nstf.kernels.triton.aot import DTYPES, Compiled, gpu_target, require_triton, source
from nstf.kernels.triton.architecture import Architecture, architecture
from nstf.kernels.triton.spec import KernelSpec

SUFFIX = ".nstfk"
VERSION = 1
MAX_KERNELS = 1 << 16
MAX_BYTES = 1 << 30
_KEY = "nstf_kernels"

Needed = Callable[[Iterable[int], torch.dtype, Architecture], Mapping[str, KernelSpec]]
# What a file may say of a kernel beside Triton's own options: the compiler found it out.
_FOUND_FIELDS = ("name", "shared", "num_warps")
# Of a kernel: bytes of local memory, and warps.
MAX_SHARED, MAX_WARPS = 1 << 20, 64


def pack(compiled: Iterable[Compiled], row: Architecture, batches: Iterable[int], dtype: str) -> bytes:
    """The side file's bytes: the same kernels give the same bytes."""
    import safetensors.torch

    kernels, arrays = {}, {}
    for entry in sorted(compiled, key=lambda c: c.key):
        binary = entry.binary
        kernels[entry.key] = {
            "name": entry.spec.name,
            "sha256": hashlib.sha256(binary).hexdigest(),
            "metadata": portable_metadata(entry.metadata, entry.options, row),
        }
        arrays[entry.key] = torch.frombuffer(bytearray(binary), dtype=torch.uint8)
    header = {
        "version": VERSION,
        "triton": require_triton(),
        "target": row.target,
        "batches": sorted(set(batches)),
        "dtype": dtype,
        "kernels": kernels,
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    data: bytes = safetensors.torch.save(arrays, {_KEY: text})
    return data


def portable_metadata(
    metadata: Mapping[str, Any], options: Mapping[str, Any], row: Architecture
) -> dict[str, Any]:
    """What the compiler found out: Triton's metadata without this machine's paths, environment and options."""
    known = {"hash", "target", "triton_version", *_options(options, row).__dict__, *_environment()}
    kept = {k: v for k, v in metadata.items() if k not in known or k in _FOUND_FIELDS}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=vars))
    return plain


def _backend(row: Architecture) -> Any:
    from triton.compiler.compiler import make_backend

    return make_backend(gpu_target(row))


def _options(options: Mapping[str, Any], row: Architecture) -> Any:
    return _backend(row).parse_options(dict(options))


def _environment() -> dict[str, str]:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    found: dict[str, str] = get_cache_invalidating_env_vars()
    return found


@dataclass(frozen=True)
class SideFile:
    """The header of a side file and its code objects by key."""

    triton: str
    target: str
    batches: tuple[int, ...]
    dtype: str
    kernels: Mapping[str, Mapping[str, Any]]
    binaries: Mapping[str, bytes]


def read(path: str | os.PathLike[str]) -> SideFile:
    """A side file, every digest checked. Raises CorruptError, UnsupportedError (a newer version), UsageError."""
    where = Path(path)
    try:
        found = where.stat()  # first: opening a pipe would wait for ever
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            raise UsageError(f"{where}: no regular file of at most {MAX_BYTES} bytes; give a {SUFFIX} file")
        data = where.read_bytes()
    except OSError as error:
        mistake = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError) or no_place(
            error
        )
        kind = UsageError if mistake else NstfError
        raise kind(f"{where}: cannot be read ({error.strerror}); give a {SUFFIX} file") from error
    except ValueError as error:  # a NUL, or half of a pair of surrogates
        raise UsageError(f"{str(where)!a}: no file can have such a name") from error
    return parse(data, where)


def parse(data: bytes, where: object) -> SideFile:
    """As `read`, for the bytes of a file."""
    import safetensors
    import safetensors.torch

    again = "write it again with `nstf compile`"
    try:
        (size,) = struct.unpack("<Q", data[:8])
        outer = bounded_json(data[8 : 8 + size].decode())
        if len(outer) > MAX_KERNELS + 1:
            raise ValueError(f"{len(outer)} arrays")
        header = bounded_json(outer["__metadata__"][_KEY])
        arrays = safetensors.torch.load(data)
    except (
        safetensors.SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        struct.error,
        RuntimeError,  # a RecursionError is one, and what torch says of a shape beyond 2^63 elements
    ) as error:
        raise CorruptError(f"{where}: not a file of compiled kernels; {again}") from error
    if not isinstance(header, dict):
        raise CorruptError(f"{where}: its header is not an object; {again}")
    if header.get("version") != VERSION:
        raise UnsupportedError(
            f"{where}: compiled kernels of version {str(header.get('version'))[:20]}; this nstf reads {VERSION}"
        )
    kernels = header.get("kernels")
    if not isinstance(kernels, dict) or set(kernels) != set(arrays) or len(kernels) > MAX_KERNELS:
        raise CorruptError(f"{where}: its kernels and its code objects differ; {again}")
    binaries = {}
    for name, entry in kernels.items():
        if arrays[name].dtype != torch.uint8:
            raise CorruptError(f"{where}: the code object of kernel {name[:16]} is no bytes; {again}")
        binaries[name] = arrays[name].numpy().tobytes()
        if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict):
            raise CorruptError(f"{where}: kernel {name[:16]} has no metadata; {again}")
        if entry.get("sha256") != hashlib.sha256(binaries[name]).hexdigest():
            raise CorruptError(f"{where}: kernel {name[:16]} differs from its SHA-256; {again}")
        symbol, shared, warps = (entry["metadata"].get(key) for key in _FOUND_FIELDS)
        found = isinstance(symbol, str) and symbol.isidentifier() and isinstance(entry.get("name"), str)
        if not found or type(shared) is not int or not 0 <= shared <= MAX_SHARED:
            raise CorruptError(f"{where}: kernel {name[:16]} has no symbol or no local memory; {again}")
        if warps is not None and (type(warps) is not int or not 1 <= warps <= MAX_WARPS):
            raise CorruptError(f"{where}: kernel {name[:16]} has no number of warps; {again}")
    texts = header.get("triton"), header.get("target"), header.get("dtype")
    batches = header.get("batches")
    if (
        not all(isinstance(text, str) for text in texts)
        or texts[2] not in DTYPES
        or not isinstance(batches, list)
        or len(batches) > 64
        or any(type(b) is not int or not 1 <= b <= 1 << 30 for b in batches)
    ):
        raise CorruptError(f"{where}: its header says nothing of Triton, target, dtype or batches; {again}")
    return SideFile(str(texts[0]), str(texts[1]), tuple(batches), str(texts[2]), kernels, binaries)


@dataclass(frozen=True)
class Installed:
    """How many kernels the JIT will find, how many it will compile, and why none was taken (else empty)."""

    found: int
    missing: int
    reason: str = ""


def install(side: SideFile, needed: Needed, target: str | None) -> Installed:
    """Puts a side file's kernels, those that are needed, into Triton's cache, where the JIT looks before it compiles.

    needed: gives them by key for the side file's batches, dtype and architecture. target: of the GPU here
    (`target_here()`). A file of another Triton or target is left alone: the reason says so.
    """
    version = require_triton()
    if target != side.target:
        return Installed(
            0, 0, f"compiled for {side.target}, the GPU here is {target or 'of no known target'}"
        )
    if version != side.triton:
        return Installed(0, 0, f"compiled by Triton {side.triton}, here is {version}")
    row = architecture(target)
    wanted = needed(side.batches, DTYPES[side.dtype], row)
    found = 0
    for name, spec in wanted.items():
        if name in side.binaries:
            _put(spec, row, side.binaries[name], side.kernels[name]["metadata"])
            found += 1
    return Installed(found, len(wanted) - found)


def _put(spec: KernelSpec, row: Architecture, binary: bytes, metadata: Mapping[str, Any]) -> None:
    """Writes one entry of Triton's cache, under the key that the JIT computes on this machine."""
    from triton import __version__
    from triton.runtime.cache import get_cache_key, get_cache_manager

    made, given = source(spec, row)
    backend = _backend(row)
    # The JIT parses a launch's options twice; once more changes nothing, and the key is that of the second time.
    options = backend.parse_options(dict(backend.parse_options(dict(given)).__dict__))
    environment = _environment()
    digest = hashlib.sha256(get_cache_key(made, backend, options, environment).encode()).hexdigest()
    manager = get_cache_manager(digest)
    name = made.name[:150]
    if manager.get_group(f"{name}.json"):
        return
    full = {"hash": digest, "target": gpu_target(row), **options.__dict__, **environment}
    # The file's fields never replace those of this machine, but for the three that the compiler finds out.
    full |= {k: v for k, v in metadata.items() if k not in full or k in _FOUND_FIELDS}
    full["triton_version"] = __version__
    group = {f"{name}.{backend.binary_ext}": manager.put(binary, f"{name}.{backend.binary_ext}")}
    group[f"{name}.json"] = manager.put(json.dumps(full, default=vars), f"{name}.json", binary=False)
    manager.put_group(f"{name}.json", group)
