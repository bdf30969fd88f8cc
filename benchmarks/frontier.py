"""Bytes, speed and loss of files converted with default options, beside llama.cpp's of the same bytes, in turn.

    python benchmarks/frontier.py MODEL --dataset calibration.txt --eval docs=eval.txt:123652- --eval drama=eval.txt:0-20700

llama.cpp's files (--types) set the bytes. For every instruction set of --isas, `nstf convert MODEL --target-size BYTES
--target T` writes ours with no other option (options that this script does not know are handed on). llama.cpp comes from the
sdist pinned in peers/llama_cpp.py and is built once for every instruction set, a quarter of an hour each, so that both sides
run what a processor with no more than that would run. Each round runs all files of an instruction set once; rates are
medians over rounds. KLD is that of the weights, expanded to float32, as in quality.py: nats on up to --windows windows
of 512 tokens of each text.

--parts: any of `files`, `kld`, `speed`, `start` (time to the first token of a new process), `equal` (a file of ours that
loses as much as llama.cpp's Q4_K_M on the text where that takes more bytes, by the losses at the types' bytes, and both
speeds in turn). Files and KLD lie in --cache and are not made again: parts can be run one after the other, and a run that
was stopped goes on. Speeds are measured anew, since machines have good and bad hours. The table is of all that is there.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cpu_engine
import quality
import torch
from peers import Unavailable, Work, llama_cpp

from nstf.kernels.cpu import ext
from nstf.runtime.artifact import open_artifact
from nstf.runtime.engine import Engine
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.streamed import StreamedModel

TYPES = ("Q8_0", "Q4_0", "Q4_K_M", "Q3_K_M")
PARTS = ("files", "kld", "speed", "start", "equal")
AVX2 = tuple(f"-DGGML_{name}" for name in ("NATIVE=OFF", "AVX2=ON", "FMA=ON", "F16C=ON", "BMI2=ON"))
# What `--target` and llama.cpp's build are called for an instruction set of the engine.
TARGETS = {
    "avx2": ("avx2", AVX2),
    "avx512-vnni": ("avx512", cpu_engine.WITHOUT_AMX),
    "avx512-vbmi": ("avx512", cpu_engine.WITHOUT_AMX),
}
PEER = "llama.cpp"
# The file of llama.cpp whose loss ours has in the part `equal`, and by how much larger than expected it is made.
EQUAL_TO = "Q4_K_M"
SPARE = 1.02


def processor() -> str:
    """The processor's name as the system states it."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Results:
    """What was measured, in one JSON file that is written after every figure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, value: Any, *keys: str) -> None:
        at = self.all
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = value
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.all, indent=1, sort_keys=True) + "\n")
        part.replace(self._path)

    def get(self, *keys: str) -> Any:
        at: Any = self.all
        for key in keys:
            at = at.get(key, {})
        return at


def ours(work: Work, kind: str, isa: str) -> Path:
    """Our file of the bytes of llama.cpp's `kind`, for an instruction set."""
    return work.cache / f"{kind}-{TARGETS[isa][0]}.nstf"


def theirs(work: Work, kind: str) -> Path:
    return work.cache / "gguf" / f"{kind}.gguf"


def make_files(args: argparse.Namespace, work: Work) -> None:
    """llama.cpp's files, and ours of their bytes for each instruction set."""
    for kind in args.types:
        size = llama_cpp.make(kind, work).size_bytes
        for isa in args.isas:
            convert(args, work, ours(work, kind, isa), isa, size)


def convert(args: argparse.Namespace, work: Work, output: Path, isa: str, size_bytes: int) -> None:
    """Our file of so many bytes, unless it is there."""
    if not output.exists():
        quality.nstf(["convert", str(work.model), "--target-size", str(size_bytes), "-o", str(output),
                      "--target", TARGETS[isa][0], "--dataset", str(work.text),
                      "--calibration", str(work.calibration), "--work-dir", str(work.cache / "work"),
                      "--threads", str(work.threads), "--report", str(output.with_suffix(".json")),
                      *args.convert])  # fmt: skip


def measure_loss(args: argparse.Namespace, work: Work, results: Results, types: Sequence[str] = ()) -> None:
    """KLD of every file on every text; of ours of `types` only where these are given."""
    with open_checkpoint(str(work.model)) as original:
        domains = [
            quality.read_domain(text, quality.load_tokenizer(original), args.windows) for text in args.eval
        ]
        model = StreamedModel.from_checkpoint(original)
        (work.cache / "reference").mkdir(exist_ok=True)
        with model.holding(model.head):
            reference = quality.Kept(model, work.cache / "reference")
            for kind in types or args.types:
                if not types and not results.get("kld", PEER, kind):
                    with tempfile.TemporaryDirectory(dir=work.cache) as folder:
                        expanded = llama_cpp.make(kind, work).expand(Path(folder))
                        with open_checkpoint(str(expanded)) as checkpoint:
                            found = quality.measure(
                                reference, StreamedModel.from_checkpoint(checkpoint), domains
                            )
                    results.put({d: a["mean_kl"] for d, a in found.items()}, "kld", PEER, kind)
                for isa in args.isas:
                    target = TARGETS[isa][0]
                    if not results.get("kld", target, kind):
                        with open_artifact(ours(work, kind, isa)) as artifact:
                            found = quality.measure(reference, StreamedModel.from_artifact(artifact), domains)
                        results.put({d: a["mean_kl"] for d, a in found.items()}, "kld", target, kind)


def peer_tools(args: argparse.Namespace, isa: str) -> tuple[Path, Path]:
    """(llama-bench, llama-simple) for an instruction set."""
    names = ("llama-bench", "llama-simple")
    bench, simple = llama_cpp.build(args.cache / "llama.cpp", names, args.threads, TARGETS[isa][1])
    return bench, simple


def measure_speed(args: argparse.Namespace, work: Work, results: Results) -> None:
    """Prefill and decode rates of all files of each instruction set, in turn."""
    for isa in args.isas:
        bench, _ = peer_tools(args, isa)
        ext.use_isa(isa)
        engines = {
            kind: Engine(open_artifact(ours(work, kind, isa)), threads=args.threads) for kind in args.types
        }
        ext.use_isa("")
        rates: dict[str, list[tuple[float, float]]] = {}
        for number in range(args.rounds):
            for kind, engine in engines.items():
                rates.setdefault(f"nstf {kind}", []).append(cpu_engine.ours(engine, args.prompt, args.tokens))
                found = cpu_engine.llama(bench, theirs(work, kind), args.prompt, args.tokens, args.threads)
                if found is None:
                    raise Unavailable(f"{bench} does not run {theirs(work, kind)} here")
                rates.setdefault(f"{PEER} {kind}", []).append(found)
            print(f"{isa}: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        for name, all_found in rates.items():
            prefill, decode = (statistics.median(x) for x in zip(*all_found, strict=True))
            results.put({"prefill": prefill, "decode": decode}, "speed", isa, name)
        results.put(
            {"threads": args.threads, "rounds": args.rounds, "prompt": args.prompt, "tokens": args.tokens},
            "speed", isa, "how",
        )  # fmt: skip


def measure_start(args: argparse.Namespace, work: Work, results: Results) -> None:
    """Seconds from the start of a process to its first token. Ours has this machine's own kernels: a new process chooses."""
    isa = args.isas[-1]
    _, simple = peer_tools(args, isa)
    text = cpu_engine.PROMPT_TEXT
    for kind in args.types:
        own = [sys.executable, *cpu_engine.FIRST_TOKEN[""], str(ours(work, kind, isa)), text]
        other = [str(simple), "-m", str(theirs(work, kind)), "-n", "1", text]
        found = [
            (cpu_engine.first_token(own), cpu_engine.first_token(other, text)) for _ in range(args.rounds)
        ]
        seconds = (statistics.median(x) for x in zip(*found, strict=True))
        results.put(dict(zip(("nstf", PEER), seconds, strict=True)), "start", kind)


def equal_size(losses: Mapping[int, Mapping[str, float]], wanted: Mapping[str, float]) -> int:
    """Bytes at which no text loses more than wanted. losses: by bytes and text, at two sizes at least; logarithms of losses
    lie on lines between sizes, and beyond them on those of the nearest two."""
    sizes, found = sorted(losses), 0.0
    for text, loss in wanted.items():
        heights = [math.log(losses[size][text]) for size in sizes]
        above = [i for i in range(1, len(sizes) - 1) if heights[i] > math.log(loss)]
        i = above[-1] if above else 0
        slope = (heights[i + 1] - heights[i]) / (sizes[i + 1] - sizes[i])
        found = max(found, sizes[i] + (math.log(loss) - heights[i]) / slope)
    return int(SPARE * found)


def measure_equal(args: argparse.Namespace, work: Work, results: Results) -> None:
    """For each instruction set a file of ours that loses as much as llama.cpp's of EQUAL_TO, and both rates in turn."""
    for isa in args.isas:
        target = TARGETS[isa][0]
        losses = {results.get("bytes", k, target): results.get("kld", target, k) for k in args.types}
        output = ours(work, "equal", isa)
        convert(args, work, output, isa, equal_size(losses, results.get("kld", PEER, EQUAL_TO)))
        measure_loss(argparse.Namespace(**vars(args) | {"isas": [isa]}), work, results, ("equal",))
        bench, _ = peer_tools(args, isa)
        ext.use_isa(isa)
        engine = Engine(open_artifact(output), threads=args.threads)
        ext.use_isa("")
        rates: dict[str, list[tuple[float, float]]] = {"nstf": [], PEER: []}
        for _ in range(args.rounds):
            rates["nstf"].append(cpu_engine.ours(engine, args.prompt, args.tokens))
            found = cpu_engine.llama(bench, theirs(work, EQUAL_TO), args.prompt, args.tokens, args.threads)
            if found is None:
                raise Unavailable(f"{bench} does not run {theirs(work, EQUAL_TO)} here")
            rates[PEER].append(found)
        medians = {n: [statistics.median(x) for x in zip(*r, strict=True)] for n, r in rates.items()}
        results.put({"bytes": output.stat().st_size, **medians}, "equal", isa)


def table(results: Mapping[str, Any]) -> str:
    """The figures as Markdown: a table for each instruction set, ours over llama.cpp's in brackets."""
    lines = []
    for isa, speed in results.get("speed", {}).items():
        how, target = speed["how"], TARGETS[isa][0]
        domains = sorted(next(iter(results.get("kld", {}).get(PEER, {}).values()), {}))
        heading = (
            f"{results['processor']}, {isa}, {how['threads']} threads, medians of {how['rounds']} rounds; "
            f"prompt {how['prompt']}, {how['tokens']} tokens decoded. In brackets: ours over llama.cpp's."
        )
        lines += [
            heading,
            "",
            "| bytes of | bytes | prefill | decode | " + " | ".join(f"KLD {d}" for d in domains) + " |",
            "|---|---|---|---|" + "---|" * len(domains),
        ]
        for kind, sizes in results["bytes"].items():
            if f"nstf {kind}" not in speed:
                continue
            own, other = speed[f"nstf {kind}"], speed[f"{PEER} {kind}"]
            cells = [kind, f"{sizes[target]:,}"]
            cells += [f"{own[k]:.1f} ({own[k] / other[k]:.2f})" for k in ("prefill", "decode")]
            loss = results.get("kld", {})
            for d in domains:
                a, b = loss.get(target, {}).get(kind, {}).get(d), loss[PEER].get(kind, {}).get(d)
                cells.append("" if a is None or b is None else f"{a:.5f} ({a / b:.2f})")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    for isa, found in results.get("equal", {}).items():
        own, other = found["nstf"], found[PEER]
        loss = results["kld"][TARGETS[isa][0]]["equal"]
        shares = ", ".join(f"{loss[d] / results['kld'][PEER][EQUAL_TO][d]:.2f}" for d in sorted(loss))
        lines.append(
            f"{EQUAL_TO}'s loss, {isa}: {found['bytes']:,} bytes, {shares} times its KLD, "
            f"prefill {own[0]:.0f} ({own[0] / other[0]:.2f}), decode {own[1]:.0f} ({own[1] / other[1]:.2f})"
        )
    for kind, seconds in results.get("start", {}).items():
        ratio = seconds["nstf"] / seconds[PEER]
        lines.append(f"first token, {kind}: {seconds['nstf']:.2f} s, {ratio:.2f} times {PEER}'s")
    return "\n".join(lines).rstrip() + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = [isa for isa in TARGETS if isa in ext.isas()]
    parser.add_argument("model", type=Path, help="a folder of a Llama, or a .gguf file")
    parser.add_argument("--dataset", type=Path, required=True, help="calibration text of both")
    parser.add_argument("--eval", action="append", default=[], metavar="NAME=PATH[:FROM-TO]")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--types", nargs="+", default=list(TYPES), help="llama.cpp's types")
    parser.add_argument(
        "--isas",
        nargs="+",
        choices=here,
        default=["avx2"] * ("avx2" in here) + here[-1:] * (here[-1:] != ["avx2"]),
    )
    parser.add_argument("--windows", type=int, default=16, help="windows of 512 tokens per text, at most")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows of 512 tokens")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--llama-quantize", type=Path, help="a built llama-quantize, instead of building one")
    parser.add_argument("--cache", type=Path, default=Path("out/frontier"))
    parser.add_argument("--table", type=Path)
    args, args.convert = parser.parse_known_args()
    if "kld" in args.parts and not args.eval:
        parser.error("the part kld needs --eval NAME=PATH for each text")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    with open_checkpoint(str(args.model)) as original:
        cache = args.cache / f"{args.model.stem}-{original.fingerprint()[:8]}"
    cache.mkdir(parents=True, exist_ok=True)
    calibration = cache / "calibration.safetensors"
    if not calibration.exists():
        quality.nstf(["calibrate", str(args.model), "--dataset", str(args.dataset), "--samples", str(args.samples),
                      "--threads", str(args.threads), "-o", str(calibration)])  # fmt: skip
    options = {"llama_quantize": str(args.llama_quantize)} if args.llama_quantize else {}
    work = Work(args.model, args.dataset, calibration, cache, args.samples, args.threads, options)
    results = Results(cache / "frontier.json")
    results.put(processor(), "processor")
    try:
        if "files" in args.parts:
            make_files(args, work)
        for kind in args.types:
            sizes = {TARGETS[isa][0]: ours(work, kind, isa).stat().st_size for isa in args.isas}
            sizes[PEER] = theirs(work, kind).stat().st_size
            results.put(results.get("bytes", kind) | sizes, "bytes", kind)
        for part, measure in (
            ("kld", measure_loss), ("speed", measure_speed), ("start", measure_start), ("equal", measure_equal),
        ):  # fmt: skip
            if part in args.parts:
                measure(args, work, results)
    except (Unavailable, FileNotFoundError) as error:
        sys.exit(
            f"{PEER}: {error}" if isinstance(error, Unavailable) else f"{error}; run the part files first"
        )
    text = table(results.all)
    print(text)
    if args.table:
        args.table.write_text(text)


if __name__ == "__main__":
    main()
