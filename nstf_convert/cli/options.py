"""The options that calibrate, plan and convert share, and their checks."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nstf.errors import UsageError
from nstf_convert.cli.sizes import BudgetKind, parse_budget

if TYPE_CHECKING:
    from nstf_convert.pipeline import ConvertOptions

Model = Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf or .onnx file, or a hub name.")]
BudgetText = Annotated[
    str | None, typer.Option("--budget", metavar="SHARE", help="Share of the checkpoint's bytes: 0.5 or 50%.")
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
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset",
        help="Text for calibration: .txt, .jsonl, .parquet, a folder of these or a hub "
        "name; may be repeated. Without it the model writes its own.",
    ),
]
Calibration = Annotated[Path | None, typer.Option(help="A file written by `nstf calibrate`.")]
WorkDir = Annotated[Path | None, typer.Option(help="Where intermediate results are kept for a resume.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Calibration windows.")]
SeqLen = Annotated[int, typer.Option(min=8, max=1 << 20, help="Tokens of a window.")]
Formats = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Only these methods: int,grid,fp8,mxfp4,low_rank,..."),
]
Search = Annotated[
    bool, typer.Option("--search/--no-search", help="Improve the mix by measured local search.")
]
SearchTime = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1e6,
        metavar="MINUTES",
        help="Time for the local search; 0: none; by default a few moves, the same on every machine.",
    ),
]
SearchSteps = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Moves of the local search: the same file on every machine."),
]
Probes = Annotated[
    bool, typer.Option("--probes/--no-probes", help="Correct the expected losses by a few measurements.")
]
Prefix = Annotated[
    bool,
    typer.Option(
        "--prefix/--no-prefix", help="Encode the final mix front to back, where that measures better."
    ),
]
Heal = Annotated[
    float,
    typer.Option(
        "--heal",
        min=0.0,
        max=1e6,
        metavar="MINUTES",
        help="Tune scales, norms, biases and factors against the original's logits for about this long.",
    ),
]
HealSteps = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Heal for so many steps, whatever they take: the same file every time."
    ),
]
HealLayers = Annotated[
    bool,
    typer.Option(
        "--heal-layers/--no-heal-layers",
        help="Spend most of the healing on encoding layer by layer while what is left learns; wants a GPU.",
    ),
]
AttentionPlan = Annotated[
    bool,
    typer.Option("--attention-plan/--no-attention-plan", help="Measure which heads may attend sparsely."),
]
Fuse = Annotated[
    bool, typer.Option("--fuse", help="One format for q/k/v and for gate/up, as fused kernels ask.")
]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads; all cores by default.")]
KvCache = Annotated[
    str,
    typer.Option(help="What the CPU engine keeps keys and values as: float16, or int8 in half the memory."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output.")]

# The pipeline is asked for a budget even when none matters (calibrate): the whole checkpoint.
NO_BUDGET: tuple[BudgetKind, float] = ("ratio", 1.0)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_FOREIGN = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".json", ".html")


def check_model(model: str) -> None:
    """Raises UsageError for a path that does not exist; a hub name is left to the checkpoint reader."""
    if not model.strip():
        raise UsageError("the model's name is empty: give a folder, a .gguf or .onnx file, or a hub name")
    looks_local = model.startswith((".", "/", "~")) or model.endswith((".gguf", ".onnx", ".nstf", "/"))
    if not Path(model).exists() and (looks_local or not _HUB_NAME.fullmatch(model)):
        raise UsageError(f"no such file or folder: {model}")


def check_file(path: Path) -> None:
    """Raises UsageError for an artifact that is not there."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give an .nstf file")
    if not path.exists():
        raise UsageError(f"no such file: {path}")


def check_kv_cache(value: str) -> None:
    """Raises UsageError for what the CPU engine does not keep keys and values as."""
    from nstf.runtime.engine import KV_CACHES

    if value not in KV_CACHES:
        raise UsageError(f"--kv-cache {value!r}: choose one of {', '.join(KV_CACHES)}")


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


def default_output(model: str) -> Path:
    """`<name of the model>.nstf` in the current folder: `./models/tiny` and `models/tiny.gguf` give `tiny.nstf`."""
    path = Path(model).resolve() if Path(model).exists() else Path(model)
    name = path.stem if path.suffix.lower() in (".gguf", ".onnx", ".safetensors", ".bin") else path.name
    return Path(f"{name}.nstf")


def check_output(output: Path, inputs: list[str], force: bool) -> None:
    """Raises UsageError unless `output` can be written without losing anything."""
    for source in inputs:
        if Path(source).exists() and output.resolve() == Path(source).resolve():
            raise UsageError(f"the output {output} is the input: give another name with -o")
        if (
            Path(source).is_dir()
            and Path(source).resolve() in output.resolve().parents
            and output.suffix in _FOREIGN
        ):
            raise UsageError(
                f"the output {output} would become part of the model it is made from: put it elsewhere"
            )
    if output.is_dir():
        raise UsageError(f"the output {output} is a folder: give a file name such as {output / 'model.nstf'}")
    if output.exists() and not force:
        raise UsageError(f"the output {output} exists: give another name, or --force to replace it")
    if not output.parent.is_dir():
        raise UsageError(f"the folder {output.parent} does not exist: create it, or give another -o")


def check_artifact_name(output: Path) -> None:
    """Raises UsageError for a name that other tools would take for a format of theirs and load wrongly."""
    if output.suffix.lower() in _FOREIGN:
        raise UsageError(
            f"the output {output.name} would be taken for a {output.suffix} file and loaded wrongly: "
            f"name it {output.with_suffix('.nstf').name}"
        )


def parse_formats(text: str | None) -> tuple[str, ...] | None:
    """The names in `--formats`; the planner knows which exist. Raises UsageError when there is none."""
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError("--formats: no format named, write for example --formats int,grid,low_rank")
    return names


def check_datasets(datasets: list[str] | None) -> tuple[str, ...]:
    """Raises UsageError for a path that does not exist; hub names are left to the reader."""
    for name in datasets or []:
        if not Path(name).exists() and not _HUB_NAME.fullmatch(name):
            raise UsageError(f"--dataset: no such file or folder: {name}")
        if not Path(name).exists() and name.endswith((".txt", ".jsonl", ".parquet")):
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
    *,
    datasets: list[str] | None,
    calibration: Path | None = None,
    work_dir: Path | None = None,
    seed: int = 0,
    samples: int | None = None,
    seq_len: int = 512,
    formats: str | None = None,
    probes: bool = True,
    search: bool = True,
    search_minutes: float | None = None,
    search_steps: int | None = None,
    prefix: bool = True,
    heal_minutes: float = 0.0,
    heal_steps: int | None = None,
    heal_layers: bool = False,
    attention_plan: bool = True,
    fuse: bool = False,
    threads: int | None = None,
    force: bool = False,
) -> "ConvertOptions":
    """The pipeline's options, after every check that needs neither torch nor the model. Raises UsageError."""
    kind, value = NO_BUDGET if budget is None else parse_budget(*budget)
    check_model(model)
    names = check_datasets(datasets)
    check_calibration(calibration)
    if work_dir is not None and work_dir.exists() and not work_dir.is_dir():
        raise UsageError(f"--work-dir {work_dir} is a file: give a folder")
    chosen = parse_formats(formats)

    from nstf_convert.pipeline import ConvertOptions
    from nstf_convert.pipeline.budget import Budget

    return ConvertOptions(
        model=model,
        output=output,
        budget=Budget(kind, value),
        datasets=names,
        calibration=calibration,
        work_dir=work_dir,
        seed=seed,
        samples=samples,
        seq_len=seq_len,
        formats=chosen,
        probes=probes,
        search=search,
        search_minutes=search_minutes,
        search_steps=search_steps,
        prefix=prefix,
        heal_minutes=heal_minutes,
        heal_steps=heal_steps,
        heal_layers=heal_layers,
        attention_plan=attention_plan,
        fuse=fuse,
        threads=threads,
        force=force,
    )
