"""`nstf compile`: the GPU kernels of an artifact, compiled ahead for cards that need not be here."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nstf.errors import GateFailed, NstfError, UnsupportedError, UsageError
from nstf_convert.cli import options
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import print_json, print_pairs, print_table
from nstf_convert.inputs import check_still_free

if TYPE_CHECKING:
    from nstf.kernels.triton.aot import Compiled
    from nstf.kernels.triton.architecture import Architecture
    from nstf.kernels.triton.spec import KernelSpec
    from nstf.runtime.artifact import Artifact

_log = logging.getLogger("nstf_convert")

# One token of one sequence, of a few, of many, and prompts: more batches make larger files, never wrong results.
# To 2048: how programs share the tiles of a large matrix, and so the kernel, changes up to there.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MAX_BATCHES = 64


def compile(
    artifact: ArtifactPath,
    target: Annotated[
        list[str] | None,
        typer.Option(help="gfx90a, gfx942, gfx950, gfx1100, gfx1201 or sm_90; may be repeated."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The side file; by default model.<target>.nstfk beside the model."
        ),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="LIST", help="Rows of activations to compile for, such as 1,16,512.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of activations: float16 or bfloat16; by default as the model's config."),
    ] = None,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Write the side file, or only look.")
    ] = True,
    report: Annotated[
        bool, typer.Option("--report", help="Say what each compiled kernel tells of itself.")
    ] = False,
    gate: Annotated[
        bool, typer.Option("--gate", help="Exit with code 4 when a kernel breaks one of its promises.")
    ] = False,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Compile the GPU kernels that an artifact needs, for cards that need not be in this machine.

    Example: nstf compile model.nstf --target gfx942 --report
    """
    options.check_file(artifact)
    from nstf.kernels.triton.architecture import architecture

    rows = [architecture(name) for name in dict.fromkeys(target or [])]
    if not rows:
        raise UsageError("no --target given: for example --target gfx942 (MI300X) or --target sm_90 (H200)")
    sizes = parse_batches(batches)
    places = {row.target: place_of(artifact, output, row.target, len(rows)) for row in rows}
    if store:
        for place in places.values():
            options.check_output(place, [str(artifact)], force)
    require_kernels()
    results = [
        run(artifact, row, places[row.target] if store else None, sizes, dtype, report or gate, force)
        for row in rows
    ]
    if json:
        print_json({"targets": results})
    else:
        for result in results:
            show(result, report)
    failed = [line for result in results for line in result["failed"]]
    if failed:
        raise NstfError(f"{len(failed)} kernels did not compile; the first: {failed[0]}")
    broken = sum(len(kernel["misses"]) for result in results for kernel in result["kernels"])
    if gate and broken:
        raise GateFailed(f"{broken} promises of compiled kernels are broken; --report lists them")


def require_kernels() -> None:
    """Raises NstfError without Triton."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        raise NstfError("compiling kernels needs Triton; run `pip install triton` (Linux)")


def parse_batches(text: str | None) -> tuple[int, ...]:
    """Batches from `1,16,512`, sorted. Raises UsageError."""
    if text is None:
        return BATCHES
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(words) > MAX_BATCHES or not all(w.isascii() and w.isdigit() for w in words):
        raise UsageError(f"--batches {text[:60]!r}: give 1 to {MAX_BATCHES} numbers such as 1,16,512")
    sizes = sorted({int(word[:12]) for word in words})
    if sizes[0] < 1 or sizes[-1] > 1 << 20:
        raise UsageError(f"--batches {text[:60]!r}: each must be from 1 to {1 << 20}")
    return tuple(sizes)


def place_of(artifact: Path, output: Path | None, target: str, targets: int) -> Path:
    """Where the side file of a target goes. Raises UsageError for one -o and several targets."""
    from nstf.runtime.compiled import SUFFIX, side_path

    if output is None:
        return side_path(artifact, target)
    if targets > 1:
        raise UsageError(
            "-o names one file, and each --target makes one: give a single --target, or leave -o out"
        )
    if output.suffix != SUFFIX:
        raise UsageError(f"the output {output.name} is no name for compiled kernels: end it with {SUFFIX}")
    return output


def run(
    artifact: Path,
    row: "Architecture",
    place: Path | None,
    batches: tuple[int, ...],
    dtype: str | None,
    report: bool,
    force: bool,
) -> dict[str, Any]:
    """Compiles for one target and writes the side file; the facts for screen and JSON."""
    from nstf.kernels.triton import aot, side_file
    from nstf.runtime.artifact import open_artifact
    from nstf.runtime.compiled import all_specs, matrices
    from nstf.runtime.tiles import use_tiles

    use_tiles(artifact, row.target)
    with open_artifact(artifact) as opened:
        word = dtype_of(opened, dtype)
        specs = all_specs(opened, batches, aot.DTYPES[word], row)
        count = sum(1 for _ in matrices(opened))
    if not specs:
        raise UnsupportedError(
            f"{artifact}: none of its {count} matrices has a kernel for {row.target}: nothing to compile; "
            "it runs on the reference path"
        )
    made, failed = compile_all(specs, row)
    result: dict[str, Any] = {
        "target": row.target,
        "card": row.card,
        "triton": aot.require_triton(),
        "dtype": word,
        "batches": list(batches),
        "path": None,
        "size_bytes": 0,
        "failed": failed,
        "kernels": [describe(c, row) for c in made]
        if report
        else [{"name": c.spec.name, "misses": []} for c in made],
    }
    if place is not None and made:
        check_still_free(place, force)
        result["size_bytes"] = write(place, side_file.pack(made, row, batches, word), force)
        result["path"] = str(place)
    return result


def compile_all(specs: "dict[str, KernelSpec]", row: "Architecture") -> "tuple[list[Compiled], list[str]]":
    """(compiled kernels, messages of those that failed): one kernel that fails costs that kernel alone."""
    from nstf.kernels.triton.aot import compile_spec

    made, failed = [], []
    for number, spec in enumerate(specs.values(), 1):
        _log.info("%s: kernel %d of %d, %s", row.target, number, len(specs), spec.name)
        try:
            made.append(compile_spec(spec, row))
        except NstfError as error:
            _log.warning("%s", error)
            failed.append(str(error))
    return made, failed


def dtype_of(artifact: "Artifact", given: str | None) -> str:
    """The dtype of activations: as asked, as the model's config says, or float16. Raises UsageError."""

    known = ("float16", "bfloat16")
    if given is not None:
        if given not in known:
            raise UsageError(f"--dtype {given[:40]!r}: choose one of {', '.join(known)}")
        return given
    stated = None
    if "config.json" in artifact.file_names():
        config = artifact.object("config.json")
        stated = config.get("dtype") or config.get("torch_dtype")
    return stated if stated in known else known[0]


def write(path: Path, data: bytes, force: bool) -> int:
    """Writes the side file, complete or not at all; its size in bytes. force: in the place of what came meanwhile, too."""
    from nstf.runtime.artifact.atomic_file import replacing

    with replacing(path, len(data), keep=not force) as output:
        output.put(0, memoryview(data))
    return len(data)


def describe(compiled: "Compiled", row: "Architecture") -> dict[str, Any]:
    """What a code object tells, for JSON and the table."""
    from nstf.kernels.triton.gates import check, expected

    found = compiled.report(row.target)
    wanted, loop = expected(compiled.spec, row, found), found.loop
    return {
        "name": compiled.spec.name,
        "kind": compiled.spec.kind,
        "waves": found.waves,
        "vector_registers": found.vector_registers,
        "accumulation_registers": found.accumulation_registers,
        "scalar_registers": found.scalar_registers,
        "spills": found.vector_spills + found.scalar_spills,
        "scratch_bytes": found.scratch_bytes,
        "local_bytes": found.lds_bytes,
        "waves_per_simd": found.occupancy.waves_per_simd,
        "occupancy_limit": found.occupancy.limit,
        "matrix_instructions": loop.matrix,
        "matrix_kinds": list(loop.matrix_kinds),
        "vector_instructions": loop.vector,
        "vector_per_weight": found.vector_per_weight(wanted.weights) if wanted.weights else None,
        "loads_16_bytes": loop.loads.get(16, 0),
        "loads_narrower": sum(count for width, count in loop.loads.items() if width < 16),
        "code_bytes": found.code_bytes,
        "read_from": found.listing,
        "misses": check(compiled.spec, found, row),
    }


def show(result: dict[str, Any], report: bool) -> None:
    """One target's result as text."""
    if report:
        columns = [
            "kernel",
            "regs",
            "spills",
            "LDS",
            "waves",
            "matrix",
            "vector/weight",
            "16-byte loads",
            "narrower",
        ]
        cells = []
        for k in result["kernels"]:
            weight = k["vector_per_weight"]
            cells.append(
                [
                    k["name"],
                    k["vector_registers"],
                    k["spills"],
                    k["local_bytes"],
                    f"{k['waves_per_simd']:g}",
                    k["matrix_instructions"],
                    "-" if weight is None else f"{weight:.2f}",
                    k["loads_16_bytes"],
                    k["loads_narrower"],
                ]
            )
        print_table(columns, cells)
        for k in result["kernels"]:
            for line in k["misses"]:
                typer.echo(f"{k['name']}: {line}")
        typer.echo("")
    pairs: list[tuple[str, object]] = [
        ("kernels", len(result["kernels"])),
        ("activations", f"{result['dtype']}, batches {', '.join(str(b) for b in result['batches'])}"),
        ("Triton", result["triton"]),
        ("file", f"{result['path']} ({result['size_bytes']} bytes)" if result["path"] else "not written"),
    ]
    if report:
        pairs.append(("promises broken", sum(len(k["misses"]) for k in result["kernels"])))
    print_pairs(f"{result['target']} ({result['card']}), compiled and inspected, not run", pairs)
