"""Trains a ResNet-18 on photographs with handwritten digits, converts it with and without structure, and measures both.

    pip install scikit-learn pillow
    python benchmarks/convolution.py train --out out/resnet18
    python benchmarks/convolution.py compare out/resnet18 --budgets 0.15 0.1 0.07 --threads 2 --json out/convolution.json
    python benchmarks/convolution.py alike out/resnet18 --threads 2 --heal-steps 120
    python benchmarks/convolution.py layers --threads 2
    python benchmarks/convolution.py stems --threads 2
    python benchmarks/convolution.py gpu --batch 8

The pictures are real and come inside the package scikit-learn (BSD-3): its 1,797 handwritten digits (UCI, Optical
Recognition of Handwritten Digits, CC BY 4.0) laid over parts of its two photographs (china.jpg and flower.jpg, CC BY),
turned, scaled and shaded at random. Training and test differ in the digits and in the parts of the photographs.

`compare` converts the model at each budget twice (`nstf convert --prefer speed`): with formats of bits alone, and with
decompositions as well. Of every file: bytes, KL divergence from the float32 model and right answers on 1,024 test
pictures, and the time of a batch on this machine, in turn with float32 torch in both layouts; of one picture of 224 x
224 too, which the network reads as well. `alike` does the same, without a plan, for weights whose layers are all stored
alike, and with --heal-steps heals them first. `layers` times single convolutions of ResNet-18 and ResNet-50 against
decoding the weight for torch's convolution, as every version before did. `stems` has those of a ViT and of Whisper, with
random weights; `gpu` single convolutions in float16 with the Triton kernel. With one thread the clock is the processor time
of the process.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from photographs import CALIBRATION_SEED, TEST_SEED, Pictures, accuracy, divergence, logits_of, train

from nstf_convert.pipeline.heal.outputs import RATES

CALIBRATED, BATCH = 256, 16
BITS_ONLY = "int_grid,grid16"
STRUCTURED = f"{BITS_ONLY},svd,tucker"
LARGE_SIZE = 224
ROUNDS = 9
CALLS_BEFORE = 4


def in_turn(
    ways: dict[str, Callable[[], object]], rounds: int = ROUNDS, before: int = CALLS_BEFORE
) -> dict[str, float]:
    """Seconds of each way: the least of some rounds, in which they take turns. Each has some calls before the one that is
    timed: torch's threads look for work for milliseconds after its own, on the cores that the next way wants, and whoever
    runs one model finds its weights in the caches. After float32 a network of 4 ms needed four such calls."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            for _ in range(before):
                way()
            start = clock()
            way()
            times[name].append(clock() - start)
    return {name: min(found[1:]) for name, found in times.items()}


def compare(
    folder: Path, budgets: Sequence[float], threads: int, extra: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows: every file, and float32."""
    from safetensors.torch import save_file
    from transformers import ResNetForImageClassification

    import nstf.runtime
    from nstf.runtime.fused import fuse

    torch.set_num_threads(threads)
    data = folder / "calibration.safetensors"
    save_file({"pixel_values": Pictures(test=False).draw(CALIBRATED, CALIBRATION_SEED)[0]}, str(data))
    model = ResNetForImageClassification.from_pretrained(folder).eval()
    last = ResNetForImageClassification.from_pretrained(folder).eval().to(memory_format=torch.channels_last)
    reference = logits_of(model)
    x = Pictures(test=True).draw(BATCH, TEST_SEED)[0]
    x_last = x.to(memory_format=torch.channels_last)
    large = F.interpolate(x[:1], size=(LARGE_SIZE, LARGE_SIZE), mode="bilinear")
    large_last = large.to(memory_format=torch.channels_last)
    rows: list[dict[str, Any]] = [
        {
            "file": "float32",
            "bytes": 4 * sum(p.numel() for p in model.parameters()),
            "top1": accuracy(reference),
        }
    ]
    ways: dict[str, Callable[[], object]] = {
        "float32": lambda: model(pixel_values=x),
        "float32 channels last": lambda: last(pixel_values=x_last),
        "float32, large": lambda: model(pixel_values=large),
        "float32 channels last, large": lambda: last(pixel_values=large_last),
    }
    for budget in budgets:
        for name, formats in (("bits", BITS_ONLY), ("structure", STRUCTURED)):
            out = folder / f"{name}-{budget}.nstf"
            report = out.with_suffix(".json")
            command = [
                *(
                    sys.executable,
                    "-m",
                    "nstf_convert",
                    "convert",
                    str(folder),
                    "--budget",
                    str(budget),
                    "-o",
                    str(out),
                ),
                *(
                    "--dataset",
                    str(data),
                    "--formats",
                    formats,
                    "--prefer",
                    "speed",
                    "--report",
                    str(report),
                    "--force",
                ),
                *("--work-dir", str(folder / f"{name}.work"), *extra),
            ]
            if code := subprocess.run(command, stdout=sys.stderr).returncode:
                print(f"{name} at {budget}: no file (exit code {code})", file=sys.stderr)
                continue
            loaded = nstf.runtime.load(out)
            fuse(loaded)
            logits = logits_of(loaded)
            kinds: dict[str, int] = {}
            for tensor in json.loads(report.read_text("utf-8"))["tensors"]:
                kind = str(tensor["encoding"]).split()[0]
                kinds[kind] = kinds.get(kind, 0) + 1
            rows.append(
                {
                    "file": f"{name} {budget}",
                    "bytes": out.stat().st_size,
                    "kld": divergence(logits, reference),
                    "top1": accuracy(logits),
                    "encodings": kinds,
                }
            )
            ways[f"{name} {budget}"] = lambda loaded=loaded: loaded(pixel_values=x)  # type: ignore[misc]
            ways[f"{name} {budget}, large"] = lambda loaded=loaded: loaded(pixel_values=large)  # type: ignore[misc]
    with torch.inference_mode():
        times = in_turn(ways)
    rows.insert(1, {**rows[0], "file": "float32 channels last"})
    for row in rows:
        row["seconds"], row["seconds_large"] = times[row["file"]], times[f"{row['file']}, large"]
    return rows


def alike(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows: all layers alike, as integers and as chains, with the time of one picture of 224 x 224."""
    import convolution_prices
    from convolution_forms import Work, compare, enlarged

    torch.set_num_threads(args.threads)
    how = Work(
        args.only, args.heal_steps, args.pictures, args.work_dir, args.device, args.code_rate, args.inputs, args.save,
        args.seconds, args.prices and convolution_prices.read(args.prices),
    )  # fmt: skip
    rows, models, picture = compare(args.model, how)
    if args.no_times:
        return rows
    large = enlarged(picture, LARGE_SIZE)
    models["float32"].to(memory_format=torch.channels_last)
    with torch.inference_mode():
        first = large.contiguous()  # which fused models take faster
        given = {n: large if n == "float32" else first for n in models}
        times = in_turn({n: lambda m=m, x=given[n]: m(pixel_values=x) for n, m in models.items()})  # type: ignore[misc]
    return [
        {**row, "ms": round(1e3 * times[row["file"]], 2),
         "times_float32": round(times["float32"] / times[row["file"]], 2)}
        for row in rows
    ]  # fmt: skip


def times(
    folder: Path, files: Sequence[Path], threads: int, pictures: int, losses: bool, batch: int = 1,
    before: int = CALLS_BEFORE,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows: saved files and float32 in both layouts, in turn on pictures of 224 x 224, `batch` at a time. ms: of a picture,
    the middle of the batches, each the least of some rounds; before: calls of each way before the one that is timed.
    losses: right answers and KLD, of 48 x 48 as for `alike`."""
    from convolution_forms import enlarged
    from transformers import ResNetForImageClassification

    import nstf.runtime
    from nstf.runtime.fused import fuse

    torch.set_num_threads(threads)
    plain = ResNetForImageClassification.from_pretrained(folder).eval()
    last = ResNetForImageClassification.from_pretrained(folder).eval().to(memory_format=torch.channels_last)
    models = {"float32 channels first": plain, "float32": last}
    for file in files:
        models[file.stem] = nstf.runtime.load(file)
        fuse(models[file.stem])
    found: dict[str, list[float]] = {n: [] for n in models}
    with torch.inference_mode():
        logits = {n: logits_of(m) for n, m in models.items()} if losses else {}
        for some in Pictures(test=True).draw(pictures, TEST_SEED)[0].split(batch):
            large = enlarged(some, LARGE_SIZE)
            given = {n: large if m is last else large.contiguous() for n, m in models.items()}
            ways = {n: lambda m=m, x=given[n]: m(pixel_values=x) for n, m in models.items()}  # type: ignore[misc]
            for name, seconds in in_turn(ways, 3, before).items():
                found[name].append(seconds / len(some))
    middle = {n: statistics.median(v) for n, v in found.items()}
    best = min(middle["float32"], middle["float32 channels first"])
    rows = [
        {"file": n, "ms": round(1e3 * middle[n], 2), "times_float32": round(best / middle[n], 3)}
        for n in models
    ]
    for row in rows if losses else ():
        own = logits[row["file"]]
        row |= {"kld": round(divergence(own, logits["float32"]), 5), "top1": accuracy(own)}
    return rows


LAYERS = {  # channels, outputs, kernel, stride, side of the image: ResNet-18 and ResNet-50 at 224 x 224
    "stem 7x7/2": (3, 64, 7, 2, 224),
    "3x3 64, 56": (64, 64, 3, 1, 56),
    "3x3 128, 28": (128, 128, 3, 1, 28),
    "3x3 256, 14": (256, 256, 3, 1, 14),
    "3x3 512, 7": (512, 512, 3, 1, 7),
    "3x3/2 128-256, 28": (128, 256, 3, 2, 28),
    "1x1 64-256, 56": (64, 256, 1, 1, 56),
    "1x1 256-1024, 14": (256, 1024, 1, 1, 14),
}
STEMS = {  # the same with height and width
    "ViT-B/16 patches": (3, 768, (16, 16), (16, 16), (224, 224), (0, 0)),
    "Whisper small, conv1": (80, 768, (1, 3), (1, 1), (1, 3000), (0, 1)),
    "Whisper small, conv2": (768, 768, (1, 3), (1, 2), (1, 3000), (0, 1)),
}


def encoded_weight(method: str, weight: Tensor, **params: Any) -> Any:
    from nstf import quantizers

    module = quantizers.method(method)
    return module.encode(weight, module.Params(**params))


def layers(threads: int, batch: int) -> list[dict[str, Any]]:
    """Single convolutions of ResNet-18 and ResNet-50, in 4-bit integers."""
    cases = {
        name: (c, o, (k, k), (s, s), (side, side), (k // 2, k // 2))
        for name, (c, o, k, s, side) in LAYERS.items()
    }
    return _timed(cases, threads, batch)


def stems(threads: int) -> list[dict[str, Any]]:
    """First layers of a ViT and of Whisper with random weights."""
    return _timed(STEMS, threads, 1)


def on_gpu(batch: int) -> list[dict[str, Any]]:
    """Convolutions of ResNet-18 and ResNet-50 and a ViT's stem on a GPU in float16: torch's, the Triton kernel on codes and
    its error beside torch's on the decoded weight, and decoding for torch's."""
    from nstf.kernels.convolution import Geometry, convolve
    from nstf.kernels.formats import decode
    from nstf_convert.pipeline.propose.recipe import on_device

    device = torch.device("cuda")
    cases = {n: (c, o, (k, k), (s, s), (h, h), (k // 2, k // 2)) for n, (c, o, k, s, h) in LAYERS.items()}
    cases["ViT-B/16 patches"] = STEMS["ViT-B/16 patches"]
    rows: list[dict[str, Any]] = []
    for name, (channels, out, kernel, stride, sides, padding) in cases.items():
        torch.manual_seed(0)
        weight = torch.randn(out, channels, *kernel) / math.sqrt(channels * math.prod(kernel))
        own = Geometry(stride, (padding[0], padding[0], padding[1], padding[1]))
        x = torch.randn(batch, channels, *sides, device=device).relu().half()
        row: dict[str, Any] = {"layer": name, "batch": batch}
        for layout in (torch.contiguous_format, torch.channels_last):
            last = layout is torch.channels_last
            given = x.contiguous(memory_format=layout)
            dense = weight.to(device).half().contiguous(memory_format=layout)
            way = lambda g=given, d=dense, s=stride, p=padding: F.conv2d(g, d, None, s, p)  # noqa: E731
            row["float16 last us" if last else "float16 us"] = _gpu_us(way)
            for kind, params in (
                ("int4 g64", {"bits": 4, "group": 64}),
                ("int8 row", {"bits": 8, "group": 0}),
            ):
                one = on_device(encoded_weight("int_grid", weight, **params), device)
                way = lambda g=given, o=one, w=own: convolve(g, o, None, w)  # type: ignore[misc]  # noqa: E731
                wanted = F.conv2d(given.float(), decode(one).float(), None, stride, padding)
                row[f"{kind} error"] = round(float((way().float() - wanted).norm() / wanted.norm()), 5)
                row[f"{kind}{' last' if last else ''} us"] = _gpu_us(way)
                if kind == "int4 g64" and not last:
                    row["decoded us"] = _gpu_us(
                        lambda g=given, o=one, s=stride, p=padding: F.conv2d(
                            g, decode(o, torch.float16), None, s, p
                        )  # type: ignore[misc]
                    )
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _gpu_us(way: Callable[[], object], calls: int = 20) -> float:
    """Microseconds of a call in a graph of `calls` in a row: the least of five replays."""
    from nstf.runtime.graphs import Graphs

    def step() -> None:
        for _ in range(calls):
            way()

    replay, found = Graphs(torch.device("cuda", torch.cuda.current_device()))(step), []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()  # type: ignore[no-untyped-call]
        replay()
        end.record()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / calls)
    return round(1e3 * min(found), 1)


def _timed(cases: dict[str, Any], threads: int, batch: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        return [{"layer": name, **_layer(batch, *case)} for name, case in cases.items()]


def _layer(
    batch: int, channels: int, out: int, kernel: Any, stride: Any, sides: Any, padding: Any
) -> dict[str, Any]:
    """Times of one convolution as multiples of float32's better layout, and the error of int8 activations."""
    from nstf.kernels.convolution import Geometry, convolve
    from nstf.kernels.formats import decode

    torch.manual_seed(0)
    weight = torch.randn(out, channels, *kernel) / math.sqrt(channels * math.prod(kernel))
    stored = {
        f"int{b} g{g}": encoded_weight("int_grid", weight, bits=b, group=g)
        for b, g in ((4, 64), (4, 0), (8, 0))
    }
    stored["grid g64"] = encoded_weight("grid16", weight, group=64)
    stored["shuffle 3"] = encoded_weight("shuffle", weight, quarter_bits=12, block=0)
    x = torch.randn(batch, channels, *sides).relu()
    own = Geometry(stride, (padding[0], padding[0], padding[1], padding[1]))
    x_last, w_last = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    first = stored["int4 g64"]
    ways: dict[str, Callable[[], object]] = {
        "float32": lambda: F.conv2d(x, weight, None, stride, padding),
        "float32 last": lambda: F.conv2d(x_last, w_last, None, stride, padding),
        "decoded": lambda: F.conv2d(x, decode(first), None, stride, padding),
        "int4 g64 last": lambda: convolve(x_last, first, None, own),
    }
    for kind, one in stored.items():
        ways[kind] = lambda one=one: convolve(x, one, None, own)  # type: ignore[misc]
    times = in_turn(ways)
    reference = convolve(x, first, None, own, exact=True)
    error = (convolve(x, first, None, own) - reference).norm() / reference.norm()
    best = min(times["float32"], times["float32 last"])
    speeds = {kind: round(best / seconds, 2) for kind, seconds in times.items()}
    return {"float32_us": round(best * 1e6), "int8_error": round(float(error), 4), **speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    known = ("train", "compare", "alike", "prices", "times", "layers", "stems", "gpu")
    parser.add_argument("what", choices=known)
    parser.add_argument("model", type=Path, nargs="?", default=Path("out/resnet18"))
    parser.add_argument("files", type=Path, nargs="*", help="of `times`: what `alike --save` left")
    parser.add_argument("--out", type=Path, help="where `train` writes the model")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=0, help="of training (32), of `layers` and `times` (1)")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--budgets", type=float, nargs="+", default=(0.15, 0.1, 0.07))
    parser.add_argument(
        "--threads", type=int, default=2, help="on a busy machine train with one: two wait for each other"
    )
    parser.add_argument("--extra", default="", help="further options of nstf convert, in one string")
    parser.add_argument("--only", nargs="+", metavar="FORM", help="of `alike`: only these forms")
    parser.add_argument(
        "--heal-steps",
        type=int,
        nargs="+",
        default=(0,),
        help="of `alike`: heal every form for so many steps; 0: not",
    )
    parser.add_argument("--code-rate", type=float, default=RATES.code_rate, help="of healing")
    parser.add_argument("--inputs", type=int, default=RATES.windows, help="of a step of healing")
    parser.add_argument("--device", default="cpu", help="that trains, calibrates and heals")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw pictures for `train`")
    parser.add_argument("--no-times", action="store_true", help="of `alike`: bytes and losses alone")
    parser.add_argument(
        "--pictures", type=int, default=1024, help="of `alike`: to calibrate on and to heal with"
    )
    parser.add_argument(
        "--calls-before",
        type=int,
        default=CALLS_BEFORE,
        help="of `times`: calls of each way before one is timed",
    )
    parser.add_argument("--no-losses", action="store_true", help="of `times`: times alone")
    parser.add_argument("--save", type=Path, help="of `alike`: a folder for the files of the forms")
    parser.add_argument(
        "--prices", type=Path, help="of `alike`: times that `chosen` goes by, from `prices --json`"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="`train` ends by then, `alike` begins no form later"
    )
    parser.add_argument("--work-dir", type=Path, help="of `alike`: what was worked out is kept here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.what == "train":
        torch.set_num_threads(args.threads)
        train(
            args.out or args.model, args.steps, args.batch or 32, args.rate, args.device, args.workers, args.seconds
        )  # fmt: skip
        return
    if args.what == "prices":
        import convolution_prices
        from transformers import ResNetForImageClassification

        model = ResNetForImageClassification.from_pretrained(args.model).eval().requires_grad_(False)
        convolution_prices.measure(model, args.threads).write(args.json)
        return
    if args.what == "times":
        rows = times(
            args.model, args.files, args.threads, args.pictures, not args.no_losses, args.batch or 1,
            args.calls_before,
        )  # fmt: skip
    elif args.what == "compare":
        rows = compare(args.model, args.budgets, args.threads, args.extra.split())
    elif args.what == "alike":
        rows = alike(args)
    elif args.what == "gpu":
        with torch.inference_mode():
            rows = on_gpu(args.batch or 1)
    else:
        rows = layers(args.threads, args.batch or 1) if args.what == "layers" else stems(args.threads)
    for row in rows if args.what != "gpu" else ():
        print(json.dumps(row))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
