"""Tokens per second on this CPU: nstf's engine and llama.cpp on the same model, turn by turn, as ratios.

    python benchmarks/cpu_engine.py model.nstf other.nstf --gguf Q4_0.gguf Q4_K_M.gguf --cache CACHE [--eager]

--isa runs ours as on a processor that has no more than that; --llama-bench then names a llama.cpp built for the same.

llama.cpp comes from the sdist of llama-cpp-python (pinned in peers/llama_cpp.py) and is built into CACHE for this processor,
without AMX when its AMX build does not run here; --llama-bench and --llama-simple name built ones. Every round runs each
file once, so that a busy neighbour hits all of them; rates are medians over rounds. --eager adds torch eager in float32 and
bfloat16.

Printed: decode and prefill rates, their ratios, the share of the read bandwidth measured in the same round that decoding
reached, time from process start to the first token, peak memory above Python's own with torch imported, and the product of
one 4-bit matrix with one row of activations against torch's `_weight_int4pack_mm_for_cpu`.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import Unavailable, llama_cpp

from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import compile_matrix
from nstf.kernels.formats import EncodedTensor, Node, integer
from nstf.runtime.artifact import open_artifact
from nstf.runtime.engine import Engine
from nstf.runtime.engine_bench import bytes_per_token

# What a build for this processor is without its matrix unit, which not every virtual machine lets programs use.
WITHOUT_AMX = tuple(
    f"-DGGML_{name}" for name in (
        "NATIVE=OFF", "AVX2=ON", "FMA=ON", "F16C=ON", "BMI2=ON", "AVX512=ON", "AVX512_VBMI=ON", "AVX512_VNNI=ON",
        "AVX512_BF16=ON",
    )
)  # fmt: skip
PROMPT_TEXT = "Once upon a time"
# The library alone, without the check of the digests, as llama.cpp's smallest program has no command line and no check
# either; and `nstf generate`, which has both.
FIRST_TOKEN = {
    "": [
        "-c",
        "import sys; from nstf.runtime.engine_text import stream; print(*stream(*sys.argv[1:], 1, verify=False))",
    ],
    " (nstf generate)": ["-m", "nstf_convert", "generate", "--max-new-tokens", "1", "--"],
}


def tools(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """(llama-bench, llama-simple), built when not given. Raises Unavailable."""
    if arguments.llama_bench:
        return arguments.llama_bench, arguments.llama_simple or arguments.llama_bench.with_name(
            "llama-simple"
        )
    names = ("llama-bench", "llama-simple")
    for flags in ((), WITHOUT_AMX):
        bench, simple = llama_cpp.build(arguments.cache / "llama.cpp", names, os.cpu_count() or 1, flags)
        if llama(bench, arguments.gguf[0], 16, 2, arguments.threads) is not None:
            return bench, simple
    raise Unavailable("llama-bench runs with no build tried")


def llama(bench: Path, model: Path, prompt: int, new: int, threads: int) -> tuple[float, float] | None:
    """(prefill, decode) in tokens per second, or None when it crashes."""
    command = [
        str(bench),
        "-m",
        str(model),
        "-p",
        str(prompt),
        "-n",
        str(new),
        "-t",
        str(threads),
        "-r",
        "1",
        "-o",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None
    rows = json.loads(done.stdout)
    return tuple(next(r["avg_ts"] for r in rows if bool(r["n_gen"]) == decode) for decode in (False, True))  # type: ignore[return-value]


def ours(engine: Engine, prompt: int, new: int) -> tuple[float, float]:
    """The same two rates: a prompt from nothing, and tokens from nothing."""
    ids = torch.randint(0, engine.vocab, (prompt,), generator=torch.Generator().manual_seed(0))
    engine.reset()
    engine.forward([1])
    engine.reset()
    start = time.perf_counter()
    engine.forward(ids)
    prefill = prompt / (time.perf_counter() - start)
    start = time.perf_counter()
    found = sum(1 for _ in engine.generate([1], new))
    return prefill, found / (time.perf_counter() - start)


def eager(artifact: Path, dtype: torch.dtype, new: int) -> float:
    """Decode rate of transformers on torch, keys and values cached, for a model of the same sizes with random weights."""
    import transformers

    with open_artifact(artifact) as opened:
        stated = json.loads(opened.file("config.json"))
    config = transformers.AutoConfig.for_model(**stated)
    net: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    ids = torch.tensor([[1]])
    transformers.logging.set_verbosity_error()
    net.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=-1)
    start = time.perf_counter()
    net.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)
    return new / (time.perf_counter() - start)


def gemv(rows: int, cols: int, threads: int) -> dict[str, float]:
    """Bytes a second of one 4-bit matrix times one row: ours (group 32), torch's (group 32), and the machine's bandwidth."""
    generator = torch.Generator().manual_seed(0)
    params = integer.Params(bits=4, group=32)
    arrays = {
        "codes": torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, generator=generator),
        "scale": torch.rand(rows, cols // 32, generator=generator).half(),
    }
    encoded = EncodedTensor(Node("int", params), (rows, cols), arrays)
    x = torch.randn(1, cols, generator=generator)
    matrix, y = compile_matrix(encoded), torch.empty(1, rows)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.randint(0, 16, (rows, cols), dtype=torch.int32, generator=generator), 1
    )
    scales = torch.rand(cols // 32, rows, 2, generator=generator).bfloat16()
    x16 = x.bfloat16()
    best = {
        "nstf": fastest(lambda: matrix.multiply_at(x.data_ptr(), 1, y.data_ptr(), threads)),
        "torch": fastest(lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x16, packed, 32, scales)),
    }
    size = encoded.size_bytes
    return {k: size / v for k, v in best.items()} | {"bandwidth": ext.read_bandwidth(256 << 20, threads)}


def fastest(call: Callable[[], object], times: int = 30) -> float:
    """Seconds of the fastest of some calls."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def first_token(command: list[str], echo: str = "") -> float:
    """Seconds from the start of a process until it has written its first token, after `echo` where it repeats the prompt.

    Python's modules are compiled, as pip leaves them: a process that may not keep what it compiles (PYTHONDONTWRITEBYTECODE)
    would do so every time.
    """
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    written, seconds = b"", None
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=compiled
    ) as process:
        assert process.stdout is not None
        while more := os.read(process.stdout.fileno(), 1 << 16):
            written += more
            if seconds is None and len(written.strip()) > len(echo.encode()):
                seconds = time.perf_counter() - start
    if process.returncode or seconds is None or not written.strip().startswith(echo.encode()):
        raise RuntimeError(f"{shlex.join(command)} wrote no token")
    return seconds


def peak_memory(artifact: Path, prompt: int, threads: int) -> dict[str, int]:
    """Bytes: the peak of a process that runs a prompt and 16 tokens, less that of one that only imports torch."""
    script = (
        "import sys, torch\n"
        "torch.set_num_threads(int(sys.argv[3]))\n"
        "cache = 0\n"
        "if sys.argv[1] != '-':\n"
        "    from nstf.runtime.engine import Engine\n"
        "    e = Engine.open(sys.argv[1], verify=False)\n"
        "    e.forward(torch.arange(int(sys.argv[2])))\n"
        "    for _ in range(16): e.forward([1])\n"
        "    cache = e.cache_bytes\n"
        "line = next(l for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "print(int(line.split()[1]) * 1024, cache)\n"
    )
    found = []
    for path in ("-", str(artifact)):
        out = subprocess.run(
            [sys.executable, "-c", script, path, str(prompt), str(threads)],
            capture_output=True,
            text=True,
            check=True,
        )
        found.append([int(word) for word in out.stdout.split()])
    return {"above_torch": found[1][0] - found[0][0], "cache": found[1][1]}


HOLDING = """
import sys, time
from nstf.runtime.engine import Engine
start = time.perf_counter()
engine = Engine.open(sys.argv[1], verify=False)
seconds = time.perf_counter() - start
next(engine.generate([1, 2, 3], 1))
print(seconds, flush=True)
sys.stdin.read()
"""


def processes(artifact: Path, count: int) -> dict[str, float]:
    """Seconds to open the engine, and bytes of all of `count` processes that hold it at once (Linux: their shares of what
    they share, Pss)."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDING, str(artifact)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    seconds = [float(process.stdout.readline()) for process in running if process.stdout]
    held = 0
    for process in running:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        held += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    for process in running:
        process.communicate()
    return {"open": statistics.median(seconds), "bytes": held}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--gguf", type=Path, nargs="+", default=[])
    parser.add_argument("--eager", action="store_true", help="also torch eager, in float32 and bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--exact", action="store_true", help="ours without int8 activations")
    parser.add_argument(
        "--isa", default="", help="ours with the kernels of another instruction set: avx2, ..."
    )
    parser.add_argument("--cache", type=Path, default=Path("out/cpu_engine"))
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--llama-simple", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ext.use_isa(arguments.isa)
    bench = simple = None
    if arguments.gguf:
        try:
            bench, simple = tools(arguments)
        except Unavailable as error:
            sys.exit(f"llama.cpp: {error}")
    engines = {}
    reads = {}
    for path in arguments.artifacts:
        artifact = open_artifact(path)
        engines[path] = Engine(artifact, arguments.exact)
        reads[path] = bytes_per_token(artifact, engines[path], arguments.tokens // 2)
    rates: dict[str, list[tuple[float, float]]] = {}
    shares: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        bandwidth = ext.read_bandwidth(256 << 20, arguments.threads)
        for path, engine in engines.items():
            found = ours(engine, arguments.prompt, arguments.tokens)
            rates.setdefault(path.name, []).append(found)
            shares.setdefault(path.name, []).append(found[1] * reads[path] / bandwidth)
        for gguf in arguments.gguf:
            assert bench is not None
            got = llama(bench, gguf, arguments.prompt, arguments.tokens, arguments.threads)
            if got is not None:
                rates.setdefault(gguf.name, []).append(got)
                shares.setdefault(gguf.name, []).append(got[1] * gguf.stat().st_size / bandwidth)
    result = report(arguments, rates, shares)
    single = {f"{r} x {c}": gemv(r, c, arguments.threads) for r, c in ((4096, 4096), (65536, 2048))}
    print("\none 4-bit matrix, group 32, one row of activations, GB/s of the file's bytes:")
    for name, found in single.items():
        print(
            f"  {name}: nstf {found['nstf'] / 1e9:.1f}, torch int4pack {found['torch'] / 1e9:.1f} "
            f"({found['nstf'] / found['torch']:.2f}x), read bandwidth {found['bandwidth'] / 1e9:.1f} "
            f"({found['nstf'] / found['bandwidth']:.2f} of it)"
        )
    result["gemv"] = single
    result |= start_and_memory(arguments, simple)
    if arguments.eager:
        result["eager"] = {}
        best = max(statistics.median(d for _, d in rates[p.name]) for p in arguments.artifacts)
        for dtype in (torch.float32, torch.bfloat16):
            rate = eager(arguments.artifacts[0], dtype, 24)
            result["eager"][str(dtype)] = rate
            print(
                f"torch eager {dtype}: {rate:.1f} tokens a second decoded; the fastest file {best / rate:.1f}x that"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


def report(
    arguments: argparse.Namespace, rates: dict[str, list[tuple[float, float]]], shares: dict[str, list[float]]
) -> dict[str, Any]:
    """Prints the table of rates and ratios; returns the medians."""
    sizes = {p.name: p.stat().st_size for p in [*arguments.artifacts, *arguments.gguf]}
    median = {n: tuple(statistics.median(x) for x in zip(*found, strict=True)) for n, found in rates.items()}
    peers = [p.name for p in arguments.gguf if p.name in median]
    print(
        f"{arguments.threads} threads, {ext.isa()}, medians of {arguments.rounds} rounds; "
        f"prompt {arguments.prompt}, {arguments.tokens} tokens decoded"
    )
    print(
        "| file | bytes | prefill | decode | of bandwidth | "
        + " | ".join(f"prefill, decode / {n}" for n in peers)
        + " |"
    )
    print("|---|---|---|---|---|" + "---|" * len(peers))
    for name, (prefill, decode) in median.items():
        against = [f"{prefill / median[p][0]:.2f}, {decode / median[p][1]:.2f}" for p in peers]
        share = statistics.median(shares[name])
        print(
            f"| {name} | {sizes[name]:,} | {prefill:.0f} | {decode:.1f} | {share:.2f} | "
            + " | ".join(against)
            + " |"
        )
    return {
        "bytes": sizes,
        "rates": median,
        "share_of_bandwidth": {n: statistics.median(s) for n, s in shares.items()},
    }


def start_and_memory(arguments: argparse.Namespace, simple: Path | None) -> dict[str, Any]:
    """Prints time to the first token of a new process and peak memory."""
    found: dict[str, Any] = {"first_token": {}, "memory": {}}
    rounds = range(arguments.rounds)
    for path in arguments.artifacts:
        for how, program in FIRST_TOKEN.items():
            command = [sys.executable, *program, str(path), PROMPT_TEXT]
            found["first_token"][path.name + how] = statistics.median(first_token(command) for _ in rounds)
        memory = peak_memory(path, arguments.prompt, arguments.threads)
        over = memory["above_torch"] - path.stat().st_size - memory["cache"]
        found["memory"][path.name] = memory | {"over_file_and_cache": over}
        print(
            f"{path.name}: peak {memory['above_torch'] / 2**20:.0f} MiB above Python with torch, "
            f"{over / 2**20:+.0f} MiB beside file and cache"
        )
        if Path("/proc/self/smaps_rollup").exists():
            one, four = processes(path, 1), processes(path, 4)
            found["memory"][path.name] |= {"one_process": one, "four_processes": four}
            print(
                f"{path.name}: opened in {one['open'] * 1000:.0f} ms; one process holds {one['bytes'] / 2**20:.0f} MiB, "
                f"four at once {four['bytes'] / 2**20:.0f} MiB in all"
            )
    if simple is not None:
        for gguf in arguments.gguf:
            command = [str(simple), "-m", str(gguf), "-n", "1", PROMPT_TEXT]
            found["first_token"][gguf.name] = statistics.median(
                first_token(command, PROMPT_TEXT) for _ in rounds
            )
    for name, seconds in found["first_token"].items():
        print(f"{name}: first token {seconds:.2f} s after the start of the process")
    return found


if __name__ == "__main__":
    main()
