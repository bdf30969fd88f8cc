"""No file that is written takes the place of one that is read, with --force neither, or of one that came meanwhile."""

import re
from collections.abc import Iterable
from pathlib import Path

from nstf.errors import NstfError, UsageError

# Endings of files that tools take for a model of theirs, or for its settings.
FOREIGN = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".json", ".html")
# Weights that are read with the settings beside them.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
# Endings of ours: nobody reads such a file as part of a folder of models or texts.
_OURS = (".nstf", ".nstfk", ".html", ".svg", ".xml", ".calibration")
# What a run writes into its work directory beside the results in folders, and discards there.
RESULTS = re.compile(r"(?:calibration|float32|heal-[0-9a-f]{16})\.safetensors|job\.json")


def keep_inputs(path: Path, inputs: Iterable[str | Path | None], what: str = "the output") -> None:
    """Raises UsageError where `path`, `what` for messages, is one of the inputs, a file of one that is a folder, or one that
    is read with a model's file."""
    place = path.resolve()
    for source in inputs:
        if source is None or not _is_there(Path(source)):  # a hub name
            continue
        if place == Path(source).resolve():
            raise UsageError(f"{what} {path} is the input{_named(path, source)}: give another name")
        if place in _beside(Path(source), path):
            raise UsageError(f"{what} {path} is read with {source}: give another name")
        if (
            Path(source).is_dir()
            and Path(source).resolve() in place.parents
            and (path.suffix.lower() in FOREIGN or path.exists())
            and path.suffix.lower() not in _OURS
        ):
            raise UsageError(
                f"{what} {path} would become part of the folder {source} that is read: put it elsewhere"
            )


def keep_apart(work_dir: Path | None, files: Iterable[str | Path | None]) -> None:
    """Raises UsageError where a file that is read or written has the name of a result in the work directory."""
    for file in [Path(given) for given in files if given]:
        if work_dir is None or not RESULTS.fullmatch(file.name):
            continue
        if file.absolute().parent.resolve() == work_dir.resolve():
            raise UsageError(
                f"{file} has the name of a result in the work directory {work_dir}: choose another work directory"
            )


def check_still_free(output: Path, force: bool) -> None:
    """Raises NstfError where something is at `output` now that was not when the work for it began. No UsageError: with those
    a work directory goes, and this one is worth hours."""
    if output.exists() and not force:
        raise NstfError(
            f"{output} was written by something else meanwhile, and stays: move it and run the same again, which goes on "
            "from here, or `force`"
        )


def _beside(source: Path, path: Path) -> list[Path]:
    """The files that a model's file is read with, where `path` lies in its folder."""
    folder = source.absolute().parent
    if path.absolute().parent.resolve() != folder.resolve():
        return []
    if source.suffix == ".onnx":
        from nstf_convert.checkpoint import open_checkpoint

        if not path.exists() or path.suffix.lower() in _OURS:
            return []
        with open_checkpoint(source) as model:
            return [file.resolve() for file in model.paths()]
    if source.suffix not in _WEIGHTS:
        return []
    from nstf_convert.checkpoint.side_files import CONTENT, SETTINGS

    return [(folder / name).resolve() for name in ("config.json", *SETTINGS, *CONTENT)]


def _is_there(path: Path) -> bool:
    """Whether there is something at a path; where no file can be called so, others say that."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _named(path: Path, source: str | Path) -> str:
    """The input's own name where it is another: a link to it, say."""
    return "" if str(source) == str(path) else f" {source}"
