"""The `.nstf` file: a strict reader, a crash-safe writer, and the check of every digest.

write_artifact(path, tensors, files, meta)   one tensor in memory at a time
artifact_size(entries, shared, files, meta)  the exact bytes beforehand
open_artifact(path)                          lazy, memory-mapped
verify(path)                                 every SHA-256
parse_header(path)                           the header of any safetensors file
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nstf.runtime.artifact.digests import Verified, verify
    from nstf.runtime.artifact.header import TensorEntry, parse_header
    from nstf.runtime.artifact.manifest import FileRecord, Manifest, Shared, TensorRecord
    from nstf.runtime.artifact.reader import Artifact, open_artifact
    from nstf.runtime.artifact.writer import Source, artifact_size, write_artifact

# Imported when asked for: the writer and the digests are needed by few who open a file. The module of `verify` has another
# name, since importing it would put it in the place of the function.
_WHERE = {
    "TensorEntry": "header", "parse_header": "header", "FileRecord": "manifest", "Manifest": "manifest",
    "Shared": "manifest", "TensorRecord": "manifest", "Artifact": "reader", "open_artifact": "reader",
    "Verified": "digests", "verify": "digests", "Source": "writer", "artifact_size": "writer", "write_artifact": "writer",
}  # fmt: skip

__all__ = [
    "Artifact",
    "FileRecord",
    "Manifest",
    "Shared",
    "Source",
    "TensorEntry",
    "TensorRecord",
    "Verified",
    "artifact_size",
    "open_artifact",
    "parse_header",
    "verify",
    "write_artifact",
]


def __getattr__(name: str) -> object:
    import importlib

    if name in _WHERE:
        found = getattr(importlib.import_module(f"nstf.runtime.artifact.{_WHERE[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'nstf.runtime.artifact' has no attribute {name!r}")
