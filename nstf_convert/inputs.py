"""No file that is written takes the place of one that is read, with --force neither, or of one that came meanwhile."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path

from nstf.errors import UsageError
from nstf.runtime.artifact.atomic_file import appeared, is_unfinished
from nstf.runtime.artifact.side_names import HANDED_ON

# Endings of files that tools take for a model of theirs, or for its settings.
FOREIGN = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".json", ".html")
# Of those of texts: what appears in a folder of them becomes one.
_TEXTS = (".txt", ".md", ".jsonl", ".parquet")
# Of the small files that go into an artifact with the model: words of tokenizers, templates for chats, settings.
_BESIDE = tuple({Path(name).suffix for name in HANDED_ON})
# Weights that are read with the settings beside them.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
# Endings of ours: nobody reads such a file as part of a folder of models or texts.
_OURS = (".nstf", ".nstfk", ".html", ".svg", ".xml", ".calibration")
# What a run writes into its work directory beside the results in folders, and discards there.
RESULTS = re.compile(r"(?:calibration|profiled|float32|heal-[0-9a-f]{16})\.safetensors|job\.json")
# What else a run makes there.
_KEPT = frozenset(("lock", "store", "pieces", "claims"))


def keep_inputs(path: Path, inputs: Iterable[str | Path | None], what: str = "the output") -> None:
    """Raises UsageError where `path`, `what` for messages, is one of the inputs, a file of one that is a folder, or one that
    is read with a model's file; by another name or through a link, too."""
    try:
        place = path.resolve()
    except RuntimeError as error:  # a link that leads to itself
        raise UsageError(f"{what} {path} leads nowhere ({error}): give another name") from error
    if place.parent == _measured() and place.exists():
        raise UsageError(f"{what} {path} is kept for what was measured on this machine: give another name")
    for source in inputs:
        if source is None:
            continue
        given = _written_out(source)
        if not _is_there(given):  # a hub name
            if _is_cached(place, str(source)):
                raise UsageError(f"{what} {path} lies where {source} is kept: put it elsewhere")
            continue
        if same_file(place, given):
            raise UsageError(f"{what} {path} is the input{_named(path, source)}: give another name")
        if is_unfinished(given, place) and same_file(given.parent, place.parent):
            raise UsageError(
                f"{source} has the name of an unfinished {path.name}, which is removed: rename it, or give another name"
            )
        if any(same_file(place, file) for file in _beside(given, place)):
            raise UsageError(f"{what} {path} is read with {source}: give another name")
        if not given.is_dir():
            continue
        inside = holds(given, place)
        ending = path.suffix.lower()
        if inside and (ending in (*FOREIGN, *_TEXTS, *_BESIDE) or path.exists()) and ending not in _OURS:
            raise UsageError(
                f"{what} {path} would become part of the folder {source} that is read: put it elsewhere"
            )
        if place.exists() and (file := _entry(given, place)) is not None:
            raise UsageError(f"{what} {path} is read as {file}: give another name")


def _measured() -> Path | None:
    """The folder of measured speeds and tiles, which commands read without being told."""
    from nstf_convert.speed.cache import folder

    found = folder()
    return None if found is None else found.resolve()


def same_file(first: Path, second: Path) -> bool:
    """Whether two paths lead to one file, or will."""
    try:
        return first.resolve() == second.resolve() or first.samefile(second)
    except (OSError, RuntimeError):
        return False


def holds(folder: Path, file: Path) -> bool:
    """Whether a file is, or will be, in a folder or in one of its folders: also where another mount shows it elsewhere."""
    parents = file.resolve().parents
    return folder.resolve() in parents or (folder.is_dir() and any(same_file(folder, p) for p in parents))


def _entry(folder: Path, place: Path) -> str | None:
    """The path in a folder, or in its folders, that leads to a file: a link in the hub's cache, say, to it or its folder."""
    wanted = place.stat()
    for entry in _entries(folder):
        if entry.is_symlink() or entry.inode() == wanted.st_ino:
            with suppress(OSError):  # a link that leads nowhere
                if os.path.samestat(wanted, entry.stat()):
                    return entry.path
                if entry.is_dir() and Path(entry.path).resolve() in place.parents and _is_foreign(place):
                    return entry.path
    return None


def _is_foreign(file: Path) -> bool:
    return file.suffix.lower() not in _OURS


def _entries(folder: str | Path) -> Iterator["os.DirEntry[str]"]:
    """What lies in a folder and in its folders, but for files that nobody reads as part of it."""
    try:
        found = list(os.scandir(folder))
    except OSError:  # those who read it say that
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path)
        elif Path(entry.name).suffix.lower() not in _OURS:
            yield entry


def _is_cached(place: Path, name: str) -> bool:
    """Whether a place belongs to what the hub's cache keeps of a name."""
    from huggingface_hub.constants import HF_HUB_CACHE

    names = [f"{kind}--{name.replace('/', '--')}" for kind in ("models", "datasets")]
    # The cache, or a folder of it, may be a link to another disk.
    kept = {Path(HF_HUB_CACHE, folder).resolve() for folder in names}
    return any(folder.name in names or folder in kept for folder in place.parents)


def keep_apart(work_dir: Path | None, files: Iterable[str | Path | None]) -> None:
    """Raises UsageError where a file that is read or written is the work directory, or named as what is kept there."""
    for file in [_written_out(given) for given in files if given]:
        if work_dir is None:
            continue
        # A model's or a dataset's folder, too: what is kept there would be read as a part of it the next time.
        if same_file(file, work_dir):
            raise UsageError(f"{file} is the work directory: choose another work directory")
        is_folder = file.is_dir()
        for path in (file.absolute(), Path(os.path.realpath(file))):  # a link, and what it leads to
            named = RESULTS.fullmatch(path.name) or (path.name in _KEPT and not is_folder)
            if not named or not same_file(path.parent, work_dir):
                continue
            raise UsageError(
                f"{file} has the name of a result in the work directory {work_dir}: choose another work directory"
            )


def check_artifact_name(output: Path) -> None:
    """Raises UsageError for a name that other tools would take for a format of theirs and load wrongly."""
    if output.suffix.lower() in FOREIGN:
        raise UsageError(
            f"the output {output.name} would be taken for a {output.suffix} file and loaded wrongly: "
            f"name it {output.with_suffix('.nstf').name}"
        )


def check_place(path: Path) -> None:
    """Raises UsageError where no file can be put, before the work for it is done."""
    # A link among devices (/dev/stdout) may lead to a file, and would itself be replaced.
    named = path.is_symlink() and path.absolute().parts[1:2] in (("dev",), ("proc",))
    if named or (path.exists() and not path.is_file()):
        raise UsageError(
            f"{path} is a folder, a device or a pipe, which a file would replace: give another path"
        )
    if not path.parent.exists():
        raise UsageError(
            f"{path}: the folder {path.absolute().parent} does not exist: make it, or give another path"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(
            f"{path}: the folder {path.absolute().parent} cannot be written into: give another path"
        )


def check_still_free(output: Path, force: bool) -> None:
    """Raises NstfError where something is at `output` now that was not when the work for it began."""
    if os.path.lexists(output) and not force:
        raise appeared(output)


def _beside(source: Path, place: Path) -> list[Path]:
    """The files that a model is read with, as far as they may be at `place`."""
    if source.is_dir():
        return [file for model in source.glob("*.onnx") for file in _beside(model, place)]
    if source.suffix == ".onnx":
        from nstf_convert.checkpoint import open_checkpoint

        if not place.exists():
            return []
        with open_checkpoint(source) as model:
            return model.paths()
    # Measured for GPUs: an artifact's, which is known by what it holds and not by its name.
    measured = list(source.parent.glob(f"{escape(source.stem)}.*.tiles.json"))
    if source.suffix not in _WEIGHTS:
        return measured
    from nstf.runtime.artifact.side_names import CONTENT, SETTINGS
    from nstf_convert.checkpoint.side_files import TEMPLATES

    folder = source.absolute().parent
    named = (folder / TEMPLATES).glob("*.jinja")
    return [*(folder / name for name in ("config.json", *SETTINGS, *CONTENT)), *named, *measured]


def _written_out(path: str | Path) -> Path:
    """The path with `~` as a home folder, as who reads it takes it; of a user who has none, others say that."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _is_there(path: Path) -> bool:
    """Whether there is something at a path; where no file can be called so, others say that."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _named(path: Path, source: str | Path) -> str:
    """The input's own name where it is another: a link to it, say."""
    return "" if str(source) == str(path) else f" {source}"
