"""Commands that are recorded once, undisturbed, and then disturbed: what they need and write, and what must hold after."""

import fnmatch
import hashlib
import importlib.util
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import faults
from small_llama import LLAMA, tensors

from nstf.runtime.artifact import write_artifact

OLD = b"the file that was there before"
# What a killed command may leave: temporary files of the work directory, of the output, of an export, of the system.
LEFT_OVERS = (".*.data.*", ".*.part.*", ".*.old.*", ".nstf-????????-????????????????.tmp")

_TEXT = ["--dataset", "{folder}/text.txt", "--samples", "2", "--seq-len", "16", "--threads", "1", "--quiet"]
_MEASURED = ["--windows", "2", "--seq-len", "16", "--threads", "1", "--quiet"]
_CONVERT = [
    "convert", "{folder}/model", "--budget", "0.5", "-o", "{folder}/out.nstf", "--work-dir", "{folder}/work", "--force",
    "--prefer", "size", "--formats", "int_grid", "--no-attention-plan", *_TEXT,
]  # fmt: skip


@dataclass(frozen=True)
class Command:
    """words: of the command line, {folder} where it works. output: the name that must appear whole or not at all: a file,
    or a folder when it has no ending."""

    words: list[str]
    output: str
    # Whether the output is replaced, with an older one there before.
    replaces: bool = False
    # Whether the shim sees every call.
    seen: bool = True

    @property
    def resumes(self) -> bool:
        """Whether the same words may be said again where the output is there."""
        return self.replaces or not self.output


# What writes these files: safetensors' own writer renames, and gguf's writes, by calls that the shim does not see.
UNSEEN = ("transformers", "gguf")


def _export(target: str, output: str, *more: str, source: str = "in.nstf") -> Command:
    words = ["export", f"{{folder}}/{source}", "--to", target, "-o", f"{{folder}}/{output}", "--quiet", *more]
    return Command(words, output, "--overwrite" in more, target not in UNSEEN)


COMMANDS = {
    "convert": Command([*_CONVERT, "--no-search", "--no-prefix"], "out.nstf", True),
    # Where nothing is, and nothing may be replaced.
    "convert anew": Command([w for w in (*_CONVERT, "--no-search", "--no-prefix") if w != "--force"], "out.nstf"),
    # Measured search, front to back, healing: as little of each as there can be.
    "whole": Command([*_CONVERT, "--effort", "fast", "--search", "--search-steps", "1", "--prefix", "--heal-steps", "1"],
                     "out.nstf", True),
    "calibrate": Command(["calibrate", "{folder}/model", "-o", "{folder}/out.calibration", "--work-dir", "{folder}/work",
                          "--force", *_TEXT], "out.calibration", True),
    "export hf": _export("hf", "hf"),
    "export hf again": _export("hf", "hf", "--overwrite"),
    "export compressed-tensors": _export("compressed-tensors", "ct", "--dtype", "float32", "--overwrite"),
    "export gguf": _export("gguf", "out.gguf", "--allow-loss", "--overwrite", source="plain.nstf"),
    "export onnx": _export("onnx", "out.onnx", "--overwrite"),
    "export transformers": _export("transformers", "tr", "--overwrite"),
    "serve": Command(["serve", "{folder}/in.nstf", "--threads", "1"], ""),
    # Those that only read.
    "inspect": Command(["inspect", "{folder}/in.nstf"], ""),
    "verify": Command(["verify", "{folder}/in.nstf"], ""),
    "generate": Command(["generate", "{folder}/in.nstf", "a", "--max-new-tokens", "2", "--threads", "1"], ""),
    "eval": Command(["eval", "{folder}/in.nstf", "-r", "{folder}/model", "--dataset", "{folder}/text.txt", *_MEASURED], ""),
    "diff": Command(["diff", "{folder}/model", "{folder}/in.nstf", "--dataset", "{folder}/text.txt", *_MEASURED], ""),
    "place": Command(["place", "{folder}/in.nstf", "--machine", "h100x8"], ""),
}  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """One undisturbed run: its folder, what was there before and after, its log, all contents that each name ever had."""

    command: Command
    folder: Path
    before: dict[str, bytes]
    after: dict[str, bytes]
    events: list[faults.Event]
    contents: dict[str, set[bytes]]
    cpu_s: float

    def disk(self) -> faults.Disk:
        """The disk before the run."""
        return faults.Disk(
            {str(self.folder / n): faults.File(bytearray(c), c, False) for n, c in self.before.items()}
        )

    def name(self, path: str) -> str:
        return str(Path(path).relative_to(self.folder))

    def wanted(self) -> dict[str, bytes]:
        """What the command is run for."""
        return self.of_output(self.after)

    def of_output(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """The files of a state that are, or lie in, the output."""
        root = self.command.output
        return {n: c for n, c in files.items() if root and (n == root or n.startswith(f"{root}/"))}

    def check_output(self, files: dict[str, bytes], where: object) -> None:
        """The output is the old one or the new one."""
        assert self.of_output(files) in (self.of_output(self.before), self.wanted()), where


def samples() -> ModuleType:
    """The conftest of tests/nstf_convert/pipeline, which makes small models."""
    place = Path(__file__).parents[1] / "nstf_convert" / "pipeline" / "conftest.py"
    spec = importlib.util.spec_from_file_location("pipeline_conftest", place)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["pipeline_conftest"] = made
    spec.loader.exec_module(made)
    return made


def make_inputs(folder: Path, **shape: Any) -> None:
    """A model of one layer and a text; and an artifact without a tokenizer, since GGUF has no form for that of the model.

    shape: what is otherwise with the model, as make_llama takes it.
    """
    made = samples()
    made.make_llama(folder / "model", **{"layers": 1, **shape})
    rng = random.Random(0)
    (folder / "text.txt").write_text(" ".join(rng.choice(made.WORDS) for _ in range(1500)))
    write_artifact(folder / "plain.nstf", tensors(), {"config.json": json.dumps(LLAMA).encode()})


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def temporary(name: str) -> bool:
    """Whether any part of a path is a temporary name."""
    parts = Path(name).parts
    return parts[:1] == ("tmp",) or any(
        fnmatch.fnmatch(part, pattern) for part in parts for pattern in LEFT_OVERS
    )


def prepare(folder: Path, inputs: Path, command: Command) -> None:
    """A folder in which the command can run."""
    shutil.copytree(inputs, folder)
    (folder / "tmp").mkdir()
    if command.replaces and Path(command.output).suffix:
        (folder / command.output).write_bytes(OLD)
    elif command.replaces:
        (folder / command.output).mkdir()
        (folder / command.output / "README.md").write_text(
            "tags:\n- nstf\n"
        )  # what makes it an export of ours
        (folder / command.output / "model-00009-of-00009.safetensors").write_bytes(OLD)


def record(runner: faults.Runner, folder: Path, inputs: Path, command: Command) -> Recorded:
    prepare(folder, inputs, command)
    before = files_of(folder)
    log = folder.with_name(f"{folder.name}.log")
    answer = runner.ask(folder=str(folder), log=str(log), words=command.words)
    assert answer["code"] == 0, answer
    after, events = files_of(folder), faults.read_log(log)
    contents = {name: {content} for name, content in before.items()}
    found = Recorded(command, folder, before, after, events, contents, answer["cpu_s"])
    disk = found.disk()
    for event in events:
        disk.apply(event)
        if event.op not in ("rename", "exchange", "create", "truncate"):
            continue
        for path in disk.names:
            if any(path == name or path.startswith(f"{name}/") for name in (event.path, event.other) if name):
                contents.setdefault(found.name(path), set()).add(bytes(disk.names[path].seen))
    # The model of the disk is right: it ends with the very files that are there.
    if command.seen:
        assert {found.name(path): content for path, content in disk.running().items()} == after
    return found


def place(state: dict[str, bytes], folder: Path) -> None:
    """Writes a state, by names, into a folder."""
    faults.place({f"/{name}": content for name, content in state.items()}, Path("/"), folder)
    (folder / "tmp").mkdir(exist_ok=True)


def check_state(recorded: Recorded, state: dict[str, bytes], where: object) -> frozenset[str]:
    """Every file under its name is one that was whole at some time; gives back the names.

    state: by paths in the folder that was recorded.
    """
    files = {recorded.name(path): content for path, content in state.items()}
    names = {name for name in files if not temporary(name)}
    for name in names:
        assert files[name] in recorded.contents[name], f"{where}: {name} is neither old nor new"
    recorded.check_output(files, where)
    return frozenset(names)


def states(recorded: Recorded) -> dict[frozenset[str], dict[str, bytes]]:
    """What a kill at any call can leave, by names: one state for every set of complete files, with its left-overs."""
    disk, found = recorded.disk(), {}
    for number, event in enumerate(recorded.events):
        disk.apply(event)
        state = disk.running()
        names = check_state(recorded, state, f"killed after call {number}, {event.op}")
        found[names] = {recorded.name(path): content for path, content in state.items()}
    return found


def resume(runner: faults.Runner, folder: Path, recorded: Recorded, where: object) -> dict[str, Any]:
    """Runs the command in the folder as it is: it ends well, with identical bytes, and nothing is left over."""
    answer = runner.ask(folder=str(folder), words=recorded.command.words)
    check_done(answer, folder, recorded, where)
    return answer


def check_done(answer: dict[str, Any], folder: Path, recorded: Recorded, where: object) -> None:
    """A run ended well, with identical bytes, and nothing is left over."""
    assert answer.get("code") == 0, (where, answer)
    files = files_of(folder)
    assert recorded.of_output(files) == recorded.wanted(), where
    # But for the system's own folder of temporary files, which is the system's to clean.
    assert [name for name in files if temporary(name) and not name.startswith("tmp/")] == [], where


def state_of(files: dict[str, bytes]) -> frozenset[tuple[str, str]]:
    """A state of a folder, the same for two that a command cannot tell apart: temporary names are drawn at random."""
    return frozenset(
        (
            "/".join("*" if temporary(part) else part for part in Path(name).parts),
            hashlib.sha256(content).hexdigest(),
        )
        for name, content in files.items()
        if not name.startswith("tmp/")
    )


def resume_from(
    runner: faults.Runner, recorded: Recorded, folder: Path, chosen: Iterable[dict[str, bytes]]
) -> int:
    """Resumes from each state; how many there were."""
    number = 0
    for number, state in enumerate(chosen, 1):
        place(state, folder)
        if recorded.command.resumes or not recorded.of_output(
            state
        ):  # an export that is there is not made again
            resume(runner, folder, recorded, f"state {number}")
    return number


def seconds_left() -> Callable[[], bool]:
    """Whether NSTF_FUZZ_SECONDS, without end unless stated, are not over yet."""
    until = time.monotonic() + float(os.environ.get("NSTF_FUZZ_SECONDS", "inf"))
    return lambda: time.monotonic() < until
