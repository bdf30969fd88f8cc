"""What a conversion takes: time by stage, memory of host and GPU, how busy the GPU was, beside what was predicted.

    python benchmarks/conversion.py 8b 1b 135m --effort balanced fast [--json FILE] [--table FILE]
    python benchmarks/conversion.py MODEL --eval heldout.txt --sizes bpw:3 --device cpu -- --memory 6GiB

A model is one of random weights (135m, 1b, 8b, 70b-layers, 30b-a3b-layers: published shapes, made once in --cache; the last
two have a few layers, --layers for another number) or a folder or GGUF file of a trained one, whose KLD on --eval is then
measured. Each conversion is a process of its own. Without --dataset the text is Python's documentation. What follows `--`
goes to `nstf convert`.

Host memory is the sum over the conversion's processes: `own` is what they allocated, the rest files that they have mapped
and the system can take back. The GPU is asked five times a second; busy is the share of the time in which it ran
something, in the encoding stages and in all. For `-layers` models, the time of a layer is that of the stages that work
layer by layer over their number.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import random_models
import watch

ENCODING = ("candidates", "encode", "encode front to back")
BY_LAYER = (*ENCODING, "calibration")
STAGE = re.compile(r"(?:^|\s)([a-z][a-z ]*): (\d+\.\d) s, peak memory")


def texts(folder: Path) -> tuple[Path, Path]:
    """(calibration text, held-out text) from Python's documentation; every tenth topic is held out."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    held = set(names[::10])
    found = folder / "calibration.txt", folder / "heldout.txt"
    for path, wanted in zip(found, (False, True), strict=True):
        path.write_text("\n\n".join(topics[n] for n in names if (n in held) == wanted), encoding="utf-8")
    return found


def model_folder(name: str, cache: Path, layers: int | None, text: Path) -> tuple[str, Path, bool]:
    """(label, path, trained) of what the command line names. Exits when there is no such model."""
    if name in random_models.CONFIGS:
        label = name if layers is None else f"{name}-{layers}"
        return label, random_models.make(name, cache / label, text.read_text(encoding="utf-8"), layers), False
    if not Path(name).exists():
        raise SystemExit(f"{name}: neither a path nor one of {', '.join(random_models.CONFIGS)}")
    path = Path(name).resolve()
    return path.parent.name if path.name == "model" else path.stem, path, True


def size_options(size: str) -> list[str]:
    """`bpw:3`, `share:0.5` or `bytes:30000000` as options of `nstf convert`. Exits for anything else."""
    kind, _, value = size.partition(":")
    option = {"bpw": "--target-bpw", "share": "--budget", "bytes": "--target-size"}.get(kind)
    if option is None or not value:
        raise SystemExit(f"--sizes {size}: give bpw:N, share:N or bytes:N")
    return [option, value]


def convert(model: Path, output: Path, options: list[str]) -> dict[str, Any]:
    """Runs one conversion and gives what it took. options: of `nstf convert`. Exits when it fails."""
    report = output.with_suffix(".json")
    _, usage = nstf(["convert", str(model), "-o", str(output), "--report", str(report), "--verbose",
                       "--no-profile", *options])  # fmt: skip
    return {"size_bytes": output.stat().st_size, **figures(json.loads(report.read_text()), usage)}


def mean_kl(model: Path, output: Path, text: Path, windows: int) -> float:
    """Mean KLD of a file on held-out text, nats."""
    out, _ = nstf(["eval", str(output), "--reference", str(model), "--dataset", str(text),
                   "--windows", str(windows), "--json"])  # fmt: skip
    return float(json.loads(out)["measured"]["mean_kl"])


def nstf(arguments: list[str]) -> tuple[str, watch.Usage]:
    """(stdout, what it used) of an `nstf` command. Exits with its last lines when it fails."""
    out, usage = watch.run([sys.executable, "-m", "nstf_convert", *arguments])
    if usage.code:
        print("\n".join(line for _, line in usage.lines[-20:]), file=sys.stderr)
        raise SystemExit(f"nstf {' '.join(arguments)} failed ({usage.code})")
    return out, usage


def figures(report: dict[str, Any], usage: watch.Usage) -> dict[str, Any]:
    """The figures of one run, of its report and of what was sampled."""
    resources = report.get("resources") or {}
    spans = stage_spans(usage.lines)
    accuracy = report["accuracy"]["final"]
    return {
        "seconds": usage.seconds,
        "processor_seconds": usage.processor_seconds,
        "predicted_seconds": resources.get("predicted_seconds"),
        "stages": {stage["name"]: stage["seconds"] for stage in report["stages"]},
        "host_bytes": usage.host_bytes,
        "host_own_bytes": usage.anonymous_bytes,
        "predicted_host_bytes": resources.get("predicted_host_bytes"),
        "gpu_bytes": usage.gpu_bytes,
        "predicted_gpu_bytes": resources.get("predicted_gpu_bytes"),
        "busy": usage.busy([(0.0, usage.seconds)]),
        "busy_encoding": usage.busy([s for name in ENCODING for s in spans.get(name, [])]),
        "bits_per_weight": report["file"]["bits_per_weight"],
        "calibration_kl": accuracy.get("mean_kl") if accuracy else None,
        "devices": resources.get("devices"),
        "threads": resources.get("threads"),
    }


def stage_spans(lines: list[tuple[float, str]]) -> dict[str, list[tuple[float, float]]]:
    """Stage -> when it ran, (from, to) in seconds: it logs its time at its end."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for end, line in lines:
        if found := STAGE.search(line):
            spans.setdefault(found[1], []).append((end - float(found[2]), end))
    return spans


def by_layer(stages: dict[str, float], layers: int) -> float:
    """Seconds a layer of the stages that work layer by layer."""
    return sum(stages.get(name, 0.0) for name in BY_LAYER) / layers


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row a conversion, then its stages."""
    head = ("model", "effort", "size", "file MB", "bpw", "time", "predicted", "host GB", "of it own", "predicted",
            "GPU GB", "predicted", "GPU busy encoding", "in all", "KLD", "s a layer")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = (
            row["model"], row["effort"], row["size"], _number(row["size_bytes"], 1e6, 1), _number(row["bits_per_weight"]),
            _time(row["seconds"]), _time(row["predicted_seconds"]), _number(row["host_bytes"], 1e9),
            _number(row["host_own_bytes"], 1e9), _number(row["predicted_host_bytes"], 1e9),
            _number(row["gpu_bytes"], 1e9), _number(row["predicted_gpu_bytes"], 1e9), _share(row["busy_encoding"]),
            _share(row["busy"]), _number(row.get("kl"), digits=5), _number(row.get("layer_seconds")),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        parts = sorted(row["stages"].items(), key=lambda item: -item[1])
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts if seconds >= 0.05)
        lines.append(f"\n{row['model']}, {row['effort']}, {row['size']}: {stages}.")
    return "\n".join(lines) + "\n"


def _number(value: float | None, unit: float = 1.0, digits: int = 2) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help=f"{', '.join(random_models.CONFIGS)}, or a path")
    parser.add_argument(
        "--sizes", nargs="+", default=["bpw:3"], metavar="SIZE", help="bpw:N, share:N, bytes:N"
    )
    parser.add_argument("--effort", nargs="+", default=["balanced"], help="fast, balanced, best")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--layers", type=int, help="of the models of random weights, instead of their own number"
    )
    parser.add_argument("--dataset", action="append", help="calibration text")
    parser.add_argument("--eval", type=Path, help="held-out text, for trained models")
    parser.add_argument("--windows", type=int, default=16, help="windows of --eval that are scored")
    parser.add_argument(
        "--cache", type=Path, default=Path("out/conversion"), help="where the models are made"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    ours, more = sys.argv[1:], []
    if "--" in ours:
        ours, more = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    args = parser.parse_args(ours)
    args.more = more
    return args


def main() -> None:
    args = parse()
    args.cache.mkdir(parents=True, exist_ok=True)
    calibration, _ = texts(args.cache)
    datasets = [part for path in args.dataset or [calibration] for part in ("--dataset", str(path))]
    rows = []
    for name in args.models:
        label, model, trained = model_folder(name, args.cache, args.layers, calibration)
        for size in args.sizes:
            for effort in args.effort:
                options = [
                    *size_options(size),
                    "--effort",
                    effort,
                    "--device",
                    args.device,
                    *datasets,
                    *args.more,
                ]
                with tempfile.TemporaryDirectory(dir=args.cache) as scratch:
                    output = Path(scratch) / f"{label}.nstf"
                    row = {"model": label, "size": size, "effort": effort, **convert(model, output, options)}
                    if trained and args.eval:
                        row["kl"] = mean_kl(model, output, args.eval, args.windows)
                if not trained:
                    config = json.loads((model / "config.json").read_text())
                    row["layer_seconds"] = by_layer(row["stages"], config["num_hidden_layers"])
                rows.append(row)
                print(table([row]), flush=True)
                # Kept after each: a long series may be stopped.
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.table:
        args.table.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
