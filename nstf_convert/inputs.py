"""No file that is written takes the place of one that is read, with --force neither, or of one that came meanwhile."""

from collections.abc import Iterable
from pathlib import Path

from nstf.errors import NstfError, UsageError

# Endings of files that tools take for a model of theirs, or for its settings.
FOREIGN = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".json", ".html")
# Endings of ours: nobody reads such a file as part of a folder of models or texts.
_OURS = (".nstf", ".nstfk", ".html", ".svg", ".xml", ".calibration")


def keep_inputs(path: Path, inputs: Iterable[str | Path | None], what: str = "the output") -> None:
    """Raises UsageError where `path`, `what` for messages, is one of the inputs or a file of one that is a folder."""
    place = path.resolve()
    for source in inputs:
        if source is None or not _is_there(Path(source)):  # a hub name
            continue
        if place == Path(source).resolve():
            raise UsageError(f"{what} {path} is the input{_named(path, source)}: give another name")
        if (
            Path(source).is_dir()
            and Path(source).resolve() in place.parents
            and (path.suffix.lower() in FOREIGN or path.exists())
            and path.suffix.lower() not in _OURS
        ):
            raise UsageError(
                f"{what} {path} would become part of the folder {source} that is read: put it elsewhere"
            )


def check_still_free(output: Path, force: bool) -> None:
    """Raises NstfError where something is at `output` now that was not when the work for it began. No UsageError: with those
    a work directory goes, and this one is worth hours."""
    if output.exists() and not force:
        raise NstfError(
            f"{output} was written by something else meanwhile, and stays: move it and run the same again, which goes on "
            "from here, or `force`"
        )


def _is_there(path: Path) -> bool:
    """Whether there is something at a path; where no file can be called so, others say that."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _named(path: Path, source: str | Path) -> str:
    """The input's own name where it is another: a link to it, say."""
    return "" if str(source) == str(path) else f" {source}"
