"""The `.nstf` file: a strict reader, a crash-safe writer, and the check of every digest.

write_artifact(path, tensors, files, meta)   one tensor in memory at a time
artifact_size(entries, shared, files, meta)  the exact bytes beforehand
open_artifact(path)                          lazy, memory-mapped
verify(path)                                 every SHA-256
parse_header(path)                           the header of any safetensors file
"""

from nstf.runtime.artifact.header import TensorEntry, parse_header
from nstf.runtime.artifact.manifest import FileRecord, Manifest, Shared, TensorRecord
from nstf.runtime.artifact.reader import Artifact, open_artifact
from nstf.runtime.artifact.verify import Verified, verify
from nstf.runtime.artifact.writer import Source, artifact_size, write_artifact

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
