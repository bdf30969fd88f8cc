"""`nstf diff`: how two files of one model differ."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nstf.errors import UsageError
from nstf_convert.cli import options
from nstf_convert.cli.convert import accuracy_pairs
from nstf_convert.cli.output import print_json, print_pairs, print_table
from nstf_convert.cli.sizes import format_bytes

if TYPE_CHECKING:
    from nstf_convert.gates.difference import Difference, TensorDifference

HELP = "An .nstf file, or an original model: a folder, a .gguf or .onnx file, or a hub name."


def diff(
    first: Annotated[
        str, typer.Argument(metavar="A", callback=options.at_home, help=f"What is compared with. {HELP}")
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="B", callback=options.at_home, help="What is compared: the same kinds of file."
        ),
    ],
    dataset: Annotated[
        Path | None,
        typer.Option(help="Text to measure the KL divergence on: .txt, .jsonl, .parquet or a folder."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text, or inputs of an encoder.")] = 16,
    seq_len: options.SeqLen = 512,
    largest: Annotated[
        int | None, typer.Option(min=0, help="Only so many tensors, those with the largest errors.")
    ] = None,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Compare two files of one model: encoding, bytes and error of every tensor, and KL(A || B) on a text.

    Example: nstf diff ./model model.nstf --dataset held-out.txt
    """
    for where in (first, second):
        check_side(where)
    if dataset is not None and not dataset.exists():
        raise UsageError(f"--dataset: no such file or folder: {dataset}")
    import torch

    from nstf_convert.gates.difference import compare_sides
    from nstf_convert.gates.measuring import measure
    from nstf_convert.gates.sides import open_side, warn_about_source

    if threads is not None:
        torch.set_num_threads(threads)
    figures: dict[str, Any] | None = None
    protocol: dict[str, Any] | None = None
    with open_side(first) as a, open_side(second) as b:
        warn_about_source(a, b)
        warn_about_source(b, a)
        found = compare_sides(a, b)
        if not found.tensors:
            raise UsageError(
                f"{first} and {second} have no tensor of the same name: they are different models"
            )
        if dataset is not None:
            measured, protocol = measure(a, b, dataset, windows, seq_len)
            figures = measured.to_json()
    sizes = [file_bytes(where) for where in (first, second)]
    if json:
        print_json(
            {"first": first, "second": second, "first_file_bytes": sizes[0], "second_file_bytes": sizes[1]}
            | found.to_json()
            | {"measured": figures, "protocol": protocol}
        )
        return
    print_tensors(found, largest)
    print_pairs(f"{second} against {first}", summary(found, sizes))
    if figures is not None:
        print_pairs("", accuracy_pairs(figures))
    else:
        typer.echo("  give --dataset TEXT to measure how far their outputs are apart")


def check_side(where: str) -> None:
    """Raises UsageError for what is neither an artifact nor a model."""
    if where.endswith(".nstf"):
        options.check_file(Path(where))
    else:
        options.check_model(where)


def file_bytes(where: str) -> int | None:
    """Bytes of a file; None for a folder, whose files are not all the model's."""
    path = Path(where)
    return path.stat().st_size if path.is_file() else None


def print_tensors(found: "Difference", largest: int | None) -> None:
    """The table of tensors, all by name or the worst by error."""
    rows = list(found.tensors)
    if largest is not None:
        rows = sorted(rows, key=worst_first)[:largest]
    if rows:
        columns = ["tensor", "shape", "A", "B", "bytes A", "bytes B", "relative error", "largest error"]
        print_table(columns, [cells(row) for row in rows], left=4)
        typer.echo("")


def worst_first(row: "TensorDifference") -> float:
    """Sorts the largest errors to the front, and before them what has none: other shapes, values that are not finite."""
    return -math.inf if math.isnan(row.relative_error) else -row.relative_error


def cells(row: "TensorDifference") -> list[object]:
    """One line of the table."""
    shapes = ["x".join(map(str, shape)) or "scalar" for shape in (row.shape, row.second_shape)]
    if not row.comparable:
        errors = ["other shape", "-"]
    else:
        finite = row.equal or row.finite
        errors = [f"{row.relative_error:.4g}" if finite else "not finite", f"{row.largest_error:.4g}"]
    shape = shapes[0] if row.comparable else "/".join(shapes)
    return [row.name, shape, row.first, row.second, row.first_bytes, row.second_bytes, *errors]


def summary(found: "Difference", sizes: list[int | None]) -> list[tuple[str, object]]:
    """Totals, and what only one of the two has."""
    counts = [f"{len(found.tensors)} in both", f"{found.equal} of them equal"]
    counts += [f"{found.of_other_shapes} of other shapes"] if found.of_other_shapes else []
    counts += [f"{found.not_finite} not finite"] if found.not_finite else []
    pairs: list[tuple[str, object]] = [("tensors", ", ".join(counts))]
    for name, names in (("only in A", found.only_first), ("only in B", found.only_second)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            pairs.append((name, ", ".join(names[:5]) + more))
    totals = (sum(t.first_bytes for t in found.tensors), sum(t.second_bytes for t in found.tensors))
    for name, total, size in zip("AB", totals, sizes, strict=True):
        whole = "" if size is None else f" of tensors, {size} bytes in the file"
        pairs.append((f"bytes {name}", f"{total} ({format_bytes(total)}){whole}"))
    pairs.append(("relative error", overall(found)))
    return pairs


def overall(found: "Difference") -> str:
    """The relative error over all values that have one, and of how many tensors they are."""
    of_one_shape = len(found.tensors) - found.of_other_shapes
    if not of_one_shape:
        return "none: no tensor has the same shape in both"
    if math.isnan(found.relative_error):
        return "none: no tensor of one shape is finite in both"
    counted = of_one_shape - found.not_finite
    if counted == len(found.tensors):
        return f"{found.relative_error:.4g}, over all values"
    kind = "of one shape" + (" and finite" if found.not_finite else "")
    return f"{found.relative_error:.4g}, over all values of the {counted} tensor{'s' * (counted != 1)} {kind}"
