"""`nstf place`: which devices should hold which part of a model, and how fast it is predicted to run."""

import json as json_text
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nstf.errors import NstfError, UsageError
from nstf_convert.cli import options
from nstf_convert.cli.output import print_json, print_pairs, print_table
from nstf_convert.cli.sizes import format_bytes
from nstf_convert.inputs import check_place, keep_inputs

if TYPE_CHECKING:
    from nstf_convert.place.costs import Model
    from nstf_convert.place.machine import Machine
    from nstf_convert.place.products import Products

AIMS = ("time", "cost", "prompt")
LONGEST_CONFIG = 1 << 24


def place(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="An .nstf file, or a config.json with --encoding.")
    ],
    machine: Annotated[
        str | None, typer.Option(metavar="FILE", help="A machine file, or an example's name such as h100x8.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine instead.")] = False,
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="With --measure on a CPU: processes, each a device.")
    ] = 2,
    save_machine: Annotated[
        Path | None,
        typer.Option(
            parser=options.file_path, metavar="FILE", help="With --measure: keep what was measured."
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Of a config.json's matrices: bf16, int4, trellis3 and so on.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=1 << 20, help="Sequences at a time.")] = 1,
    context: Annotated[int, typer.Option(min=1, max=1 << 27, help="Tokens in each one's cache.")] = 2048,
    prompt: Annotated[int, typer.Option(min=1, max=1 << 27, help="Tokens of a prompt.")] = 512,
    kv_bits: Annotated[float, typer.Option(min=1, max=32, help="Of a stored key or value.")] = 16,
    aim: Annotated[
        str, typer.Option(help="What is least: time of a token, cost of a token, or time of the prompt.")
    ] = "time",
    overlap: Annotated[
        float, typer.Option(min=0, max=1, help="Share of collectives hidden behind the next product.")
    ] = 0.0,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Use at most so many of the machine's devices.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Plans to list.")] = 8,
    json: options.Json = False,
) -> None:
    """Find the division of a model over a machine's devices with the least predicted time.

    Example: nstf place model.nstf --machine h100x8 --batch 16
    """
    if model.suffix == ".json" and not model.is_file():
        raise UsageError(f"no such file: {model}")
    options.check_file(model)
    if (machine is None) == (not measure):
        raise UsageError("give --machine FILE (or an example's name) or --measure, one of them")
    if aim not in AIMS:
        raise UsageError(f"--aim {aim[:40]!r}: choose one of {', '.join(AIMS)}")
    if save_machine is not None and not measure:
        raise UsageError("--save-machine keeps what --measure finds: add --measure")
    if save_machine is not None:
        keep_inputs(save_machine, [model], "--save-machine")
        keep_others(save_machine)
        check_place(save_machine)
    from nstf_convert.place.export import to_json
    from nstf_convert.place.fabric import Fabric
    from nstf_convert.place.machine import read_machine
    from nstf_convert.place.predict import Load, Predictor
    from nstf_convert.place.search import search

    chosen = None if machine is None else read_machine(machine)
    load = Load(batch, context, prompt, overlap)
    # An artifact stays open: what its trellis sections allow is read when a number of ranks is tried.
    with ExitStack() as stack:
        found = read_model(model, encoding, kv_bits, stack)
        products: Products | None = None
        if chosen is None:
            chosen, products = measured(processes, found, save_machine)
        result = search(Predictor(found, Fabric(chosen), load, products), aim, devices)  # type: ignore[arg-type]
    if not result.predictions:
        raise NstfError(too_large(found, chosen))
    data = to_json(result, chosen, found.name, load, aim, top)
    if json:
        print_json(data)
        return
    show(data, found, chosen, [row_of(p, chosen) for p in result.predictions[:top]])


def keep_others(path: Path) -> None:
    """Raises UsageError where a file that is no machine's lies at `path`: a model's config.json, say."""
    from nstf_convert.checkpoint.paths import exists
    from nstf_convert.place.machine import is_machine

    if exists(path) and path.is_file() and not is_machine(path):
        raise UsageError(f"--save-machine {path}: there is a file that is no machine's: give another name")


def read_model(path: Path, encoding: str | None, kv_bits: float, stack: ExitStack) -> "Model":
    """The costs of an artifact, which `stack` closes, or of a config. Raises UsageError."""
    from nstf_convert.place import costs

    if path.suffix != ".json":
        if encoding is not None:
            raise UsageError("--encoding is for a config.json: an .nstf file says how it is stored")
        from nstf.runtime.artifact import open_artifact

        return costs.of_artifact(stack.enter_context(open_artifact(path)), kv_bits)
    if encoding is None:
        raise UsageError(f"{path}: a config.json does not say how matrices are stored: add --encoding int4")
    from nstf.runtime.artifact.header import check_values
    from nstf_convert.checkpoint.paths import read_given

    try:
        raw = read_given(path, LONGEST_CONFIG, "the config")
        check_values(raw, "it")
        config = json_text.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({str(error)[:80]})") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: not an object: give a model's config.json")
    return costs.of_config(path.stem, config, encoding, kv_bits)


def measured(processes: int, model: "Model", keep: Path | None) -> "tuple[Machine, Products]":
    """This machine as measured, and prices of products: the kernels' own times on a CPU that has them.

    keep: a file for the machine. Where it cannot be written, that is said before anything is measured.
    """
    from nstf.runtime.artifact.atomic_file import replacing
    from nstf_convert.place.measure import measure_machine, measured_products

    if keep is None:
        machine = measure_machine(processes)
    else:
        with replacing(keep, 0) as output:
            machine = measure_machine(processes)
            text = json_text.dumps(machine.to_json(), indent=1) + "\n"
            output.write(0, memoryview(text.encode()))
    return machine, measured_products(machine, model.size_bytes)


def too_large(model: "Model", machine: "Machine") -> str:
    """Why no plan is left, in one line."""
    room = sum(max(0.0, d.memory_bytes - d.reserved_bytes) for d in machine.devices)
    return (
        f"no plan fits: {model.name} has {format_bytes(model.size_bytes)} of weights, and the devices of {machine.name} "
        f"have {format_bytes(room)} together; give a smaller --batch or --context, fewer bits, or more devices"
    )


def row_of(found: Any, machine: "Machine") -> list[str]:
    from nstf_convert.place.export import row

    return row(found, machine, format_bytes(max(found.memory)))


def show(data: dict[str, Any], model: "Model", machine: "Machine", rows: list[list[str]]) -> None:
    """The table, and what goes with it."""
    from nstf_convert.place.export import columns

    load, best = data["load"], data["plans"][0]
    print_pairs("", [
        ("model", f"{model.name}: {format_bytes(model.size_bytes)}, {model.facts.layers} layers"),
        ("machine", f"{machine.name}, {len(machine.devices)} devices"),
        ("load", f"batch {load['batch']}, context {load['context']}, prompt {load['prompt']}"),
        ("figures", "predicted, not measured" + (f"; {machine.note}" if machine.note else "")),
    ])  # fmt: skip
    typer.echo("")
    print_table(columns(), rows, left=2)
    typer.echo("")
    pairs: list[tuple[str, object]] = [("vLLM", " ".join(best["vllm"]))]
    if best["load"] is not None:
        pairs.append(("nstf.runtime", f"load(..., tensor_parallel={best['load']['tensor_parallel']})"))
    if best["environment"]:
        pairs.append(("environment", " ".join(f"{k}={v}" for k, v in best["environment"].items())))
    print_pairs("the best plan for engines", pairs)
    for name, why in data["refused"].items():
        typer.echo(f"without {name}: {why}")
