"""`nstf export`: an artifact in the formats of other engines, one file a target.

A target's module has `plan(artifact, dtype)`, what it would hold and lose, and `write`. Adding one: a module here, its
entry in `TARGETS` and `_write`, its way to be loaded in `card.py`, and a test with the engine that reads it.
"""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nstf.errors import UsageError
from nstf.kernels.formats import FormatError
from nstf.runtime.artifact import Artifact, open_artifact
from nstf.runtime.artifact.header import corrupt
from nstf_convert.export import writing
from nstf_convert.export.plan import ExportPlan
from nstf_convert.export.writing import Files
from nstf_convert.inputs import holds, same_file

# Word of the command line -> module.
TARGETS = {
    "hf": "hf",
    "transformers": "transformers",
    "compressed-tensors": "compressed_tensors",
    "gguf": "gguf",
    "onnx": "onnx",
}
# Targets whose output may be one file: by its ending.
SINGLE = {"gguf": ".gguf", "onnx": ".onnx"}


@dataclass(frozen=True)
class Request:
    """One export. dtype: of what is decoded, None for the target's own; shard_bytes: largest weight file of a folder;
    source: for onnx, the user's model that is rewritten; command: for the card."""

    target: str
    output: Path
    dtype: str | None = None
    shard_bytes: int = 5 * 10**9
    allow_loss: bool = False
    overwrite: bool = False
    source: Path | None = None
    facts: tuple[tuple[str, str], ...] = ()
    command: str = "nstf export"


def plan(artifact: Artifact, request: Request) -> ExportPlan:
    """What the export would hold. Raises UnsupportedError for a model that the target has no form for."""
    module = _module(request)
    if request.source is not None:
        return module.plan(artifact, request.dtype, request.source)  # type: ignore[no-any-return]
    return module.plan(artifact, request.dtype)  # type: ignore[no-any-return]


def export(path: Path, request: Request, planned: Any = None) -> tuple[ExportPlan, Files]:
    """Plans, checks and writes an export; returns the plan and the files with their bytes.

    planned: called with the plan before anything is written. Raises UsageError (destination), UnsupportedError (target or
    loss), NstfError (space), and what `open_artifact` raises. A failed export leaves nothing.
    """
    from nstf.runtime.torch_state import usual_process, usual_thread

    with usual_process(), usual_thread():
        return _exported(path, request, planned)


def _exported(path: Path, request: Request, planned: Any) -> tuple[ExportPlan, Files]:
    # Where a link leads, which is where the files go.
    output = request.output.resolve()
    single = output.suffix == SINGLE.get(request.target)
    stem = output.stem if single else _stem(output.name)
    names = _names(request.target, stem) if single else ()
    beside = [name for name in names if name != output.name]
    writing.check_destination(request.output, request.overwrite, single, beside)
    written = [output, *(output.with_name(name) for name in beside)]
    _keep(path, written, f"is or holds the artifact {path}")
    if request.source is not None:
        _keep_source(request.source, written)
    with open_artifact(path, verify=True) as artifact, _as_corrupt(artifact):
        found = plan(artifact, request)
        if planned is not None:
            planned(found)
        found.check_loss(request.allow_loss)
        writing.check_space(request.output, found.size_bytes)
        given = [path] if request.source is None else [path, request.source]
        with writing.staged(request.output, single, request.overwrite, given) as folder:
            _write(artifact, found, request, folder, stem)
            if single:  # tokenizer and config would take the place of neighbours of these names
                for file in [f for f in folder.iterdir() if f.name not in (*names, writing.UNFINISHED)]:
                    file.unlink()
            (folder / (f"{stem}.README.md" if single else "README.md")).write_text(
                _card(artifact, found, request, stem)
            )
            files = writing.listed(folder)
            # Another export may have come first, or files of the user's.
            writing.check_destination(request.output, request.overwrite, single, beside)
    return found, files


@contextmanager
def _as_corrupt(artifact: Artifact) -> Iterator[None]:
    """Arrays whose numbers contradict one another are found when they are decoded. Raises CorruptError."""
    try:
        yield
    except FormatError as error:
        raise corrupt(artifact.path, error) from error


def _names(target: str, stem: str) -> tuple[str, ...]:
    """The files that a single-file export may write."""
    main = f"{stem}{SINGLE[target]}"
    weights = (f"{main}.data",) if target == "onnx" else ()
    return (main, *weights, f"{stem}.README.md")


def _keep(file: Path, written: list[Path], what: str) -> None:
    """Raises UsageError where the export would take the place of a file that it reads."""
    for output in written:
        if same_file(output, file) or holds(output, file):
            raise UsageError(f"the output {output} {what}: give another -o")


def _keep_source(source: Path, written: list[Path]) -> None:
    """Raises UsageError where the export would take the place of the model that it rewrites, or of its weights."""
    from nstf_convert.export.onnx_rewrite import weight_files

    _keep(source, written, f"is or holds the source {source}")
    for file in weight_files(source):
        _keep(file, written, f"would replace {file}, weights of {source}")


def _write(artifact: Artifact, found: ExportPlan, request: Request, folder: Path, stem: str) -> None:
    module = _module(request)
    if request.target in SINGLE:
        module.write(artifact, found, folder, stem)
    elif request.target == "transformers":
        module.write(artifact, found, folder, request.shard_bytes)
    else:
        module.write(artifact, found, folder, request.dtype, request.shard_bytes)


def _card(artifact: Artifact, found: ExportPlan, request: Request, stem: str) -> str:
    from nstf_convert.export.card import card

    config = artifact.object("config.json") if "config.json" in artifact.file_names() else {}
    main = f"{stem}{SINGLE.get(request.target, '')}"
    return card(artifact, found, {**config, **dict(request.facts)}, main, request.command)


def _module(request: Request) -> Any:
    name = TARGETS[request.target]
    if request.source is not None:
        name = "onnx_rewrite"
    return importlib.import_module(f"nstf_convert.export.{name}")


def _stem(name: str) -> str:
    """A file's name for what stands in a folder of this name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip(".-") or "model"
