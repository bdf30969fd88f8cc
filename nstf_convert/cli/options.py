"""The options that calibrate, plan and convert share, and their checks."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nstf.errors import UsageError
from nstf_convert.checkpoint.paths import expanded
from nstf_convert.cli.sizes import BudgetKind, parse_budget, parse_bytes
from nstf_convert.inputs import check_place, keep_inputs

if TYPE_CHECKING:
    from nstf.runtime.token_sampler import Settings
    from nstf_convert.options import ConvertOptions


def at_home(model: str | None) -> str | None:
    """The name of a model, which may be a hub's, with `~` as a home folder."""
    return str(expanded(model)) if model and model.startswith("~") else model


Model = Annotated[
    str,
    typer.Argument(callback=at_home, help="A Hugging Face folder, a .gguf or .onnx file, or a hub name."),
]
BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="SHARE",
        help="Share of the checkpoint's bytes, 0.5 or 50%; a size such as 800MB is taken as --target-size.",
    ),
]
TargetSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Size of the file: 1.5GiB, 800MB or bytes (1G is 1GiB).")
]
TargetBpw = Annotated[
    str | None, typer.Option(metavar="BITS", help="Bits per weight, everything in the file counted: 4.25.")
]
MaxKl = Annotated[
    str | None,
    typer.Option(metavar="NATS", help="The smallest file whose mean KL divergence stays within this: 0.01."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]
SeqLen = Annotated[int, typer.Option(min=8, max=1 << 20, help="Tokens of a window.")]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads; all cores by default.")]
KvCache = Annotated[
    str,
    typer.Option(help="What the CPU engine keeps keys and values as: float16, or int8 in half the memory."),
]
Attention = Annotated[str, typer.Option(help="full, or planned: as the artifact's attention plan says.")]
TensorParallel = Annotated[
    int,
    typer.Option(
        min=1, max=1024, metavar="N", help="Divide the model over N processes, a GPU each with cuda."
    ),
]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=10.0, help="0 takes the most likely token; higher is more varied.")
]
TopK = Annotated[int, typer.Option(min=0, help="Draw from this many likeliest tokens; 0: from all.")]
TopP = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens that have this share together."),
]
MinP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Draw from tokens with this share of the likeliest one's.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(min=0.01, max=100.0, help="Above 1: tokens that occurred become less likely.")
]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given several times.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output.")]


def file_path(text: str) -> Path:
    """The path of a file to write. Raises UsageError for one that ends as a folder's does: Path forgets that, and a file of
    that name would lie where a folder was meant."""
    if text.endswith(os.sep):
        raise UsageError(f"the output {text} is a folder: give the name of a file in it")
    return Path(text)


# The pipeline is asked for a budget even when none matters (calibrate): the whole checkpoint.
NO_BUDGET: tuple[BudgetKind, float] = ("ratio", 1.0)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def check_model(model: str) -> None:
    """Raises UsageError for a path that does not exist; a hub name is left to the checkpoint reader."""
    if not model.strip():
        raise UsageError("the model's name is empty: give a folder, a .gguf or .onnx file, or a hub name")
    looks_local = model.startswith((".", "/", "~")) or model.endswith((".gguf", ".onnx", ".nstf", "/"))
    if not Path(model).exists() and (looks_local or not _HUB_NAME.fullmatch(model)):
        raise UsageError(f"no such file or folder: {model}")


def check_file(path: Path) -> None:
    """Raises UsageError for an artifact that is not there."""
    # typer makes a path of "", which is this folder's.
    if path.is_dir() and str(path) == ".":
        raise UsageError("the file's name is empty, or this folder: give an .nstf file")
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give an .nstf file")
    if not path.exists():
        raise UsageError(f"no such file: {path}")


def check_kv_cache(value: str) -> None:
    """Raises UsageError for what the CPU engine does not keep keys and values as."""
    from nstf.runtime.engine import KV_CACHES

    if value not in KV_CACHES:
        raise UsageError(f"--kv-cache {value!r}: choose one of {', '.join(KV_CACHES)}")


def check_attention(attention: str, kv_cache: str) -> None:
    """Raises UsageError for what is no way of attention, and for a cache beside a plan, which says its own."""
    from nstf.runtime.engine import ATTENTION

    if attention not in ATTENTION:
        raise UsageError(f"--attention {attention!r}: choose one of {', '.join(ATTENTION)}")
    if attention == "planned" and kv_cache != "float16":
        raise UsageError("--kv-cache: an attention plan says how keys and values are kept; leave it out")


def check_device(name: str) -> str:
    """Raises UsageError for a device that this machine or this torch does not have, or that nothing here runs on."""
    from nstf.runtime.devices import usable

    try:
        usable(name, ("cpu", "cuda"))
    except RuntimeError as error:
        raise UsageError(f"--device {name}: {error}; --device cpu runs everywhere") from error
    return name


def refuse_cpu_options(exact: bool, kv_cache: str) -> None:
    """Raises UsageError for options that only the CPU engine has."""
    if exact or kv_cache != "float16":
        raise UsageError("--exact and --kv-cache are the CPU engine's: leave them out, or add --device cpu")


def check_kernels(kernels: Path | None, device: str) -> None:
    """Raises UsageError for compiled kernels of a GPU where none is asked for."""
    if kernels is not None and device.partition(":")[0] == "cpu":
        raise UsageError("--kernels is for a GPU: leave it out, or add --device cuda")


def check_stops(stops: list[str] | None) -> list[str]:
    """Raises UsageError for an empty stop string."""
    if not all(stops or []):
        raise UsageError("--stop is empty: give the text to end before")
    return list(stops or [])


def sampling(
    temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float, seed: int | None
) -> "Settings":
    """How tokens are drawn. Raises UsageError for values out of range."""
    from nstf.runtime.token_sampler import Settings

    return Settings(temperature, top_k, top_p, min_p, repetition_penalty, seed)


def default_output(model: str) -> Path:
    """`<name of the model>.nstf` in the current folder: `./models/tiny` and `models/tiny.gguf` give `tiny.nstf`."""
    path = Path(model).resolve() if Path(model).exists() else Path(model)
    name = path.stem if path.suffix.lower() in (".gguf", ".onnx", ".safetensors", ".bin") else path.name
    return Path(f"{name}.nstf")


def check_output(output: Path, inputs: list[str], force: bool) -> None:
    """Raises UsageError unless `output` can be written without losing anything."""
    keep_inputs(output, inputs)
    if output.is_dir():
        raise UsageError(f"the output {output} is a folder: give a file name such as {output / 'model.nstf'}")
    if os.path.lexists(output) and not force:
        raise UsageError(f"the output {output} exists: give another name, or --force to replace it")
    if not output.parent.is_dir():
        if os.path.lexists(output.parent):
            raise UsageError(f"{output.parent} is no folder: give another -o")
        raise UsageError(f"the folder {output.parent} does not exist: create it, or give another -o")
    check_place(output)


def parse_formats(text: str | None) -> tuple[str, ...] | None:
    """The names in `--formats`; the planner knows which exist. Raises UsageError when there is none."""
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError("--formats: no format named, write for example --formats int,grid,low_rank")
    return names


def check_datasets(datasets: list[str] | None) -> tuple[str, ...]:
    """Raises UsageError for a path that does not exist; hub names are left to the reader. `~` is left to ConvertOptions."""
    for name in datasets or []:
        there = expanded(name).exists()
        if not there and not _HUB_NAME.fullmatch(name):
            raise UsageError(f"--dataset: no such file or folder: {name}")
        if not there and name.endswith((".txt", ".jsonl", ".parquet")):
            raise UsageError(f"--dataset: no such file: {name}")
    return tuple(datasets or ())


def check_calibration(path: Path | None) -> Path | None:
    """Raises UsageError for a calibration file that is not there."""
    if path is not None and not path.is_file():
        raise UsageError(f"--calibration: no such file: {path}; write it with `nstf calibrate`")
    return path


def build_options(
    model: str,
    output: Path,
    budget: tuple[str | None, str | None, str | None, str | None] | None,
    settings: Mapping[str, Any],
    **changes: Any,
) -> "ConvertOptions":
    """The pipeline's options, after every check that needs neither torch nor the model.

    settings: the options as the command line gives them (nstf_convert.cli.schema); changes: set by the command itself.
    Raises UsageError.
    """
    from nstf_convert.budget import Budget
    from nstf_convert.options import ConvertOptions

    kind, value = NO_BUDGET if budget is None else parse_budget(*budget)
    check_model(model)
    given = {**settings, **changes}
    if "datasets" in given:
        given["datasets"] = check_datasets(given["datasets"])
    check_calibration(given.get("calibration"))
    work_dir = given.get("work_dir")
    if work_dir is not None and work_dir.exists() and not work_dir.is_dir():
        raise UsageError(f"--work-dir {work_dir} is a file: give a folder")
    if "formats" in given:
        given["formats"] = parse_formats(given["formats"])
    for name in ("memory", "gpu_memory"):
        if given.get(name) is not None:
            given[name] = parse_bytes(given[name], f"--{name.replace('_', '-')}")
    return ConvertOptions(model=model, output=output, budget=Budget(kind, value), **given)
