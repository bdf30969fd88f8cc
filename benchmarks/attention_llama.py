"""Long contexts on a CPU: attention plans in nstf, and llama.cpp with flash attention over f16, q8_0 and q4_0 caches.

    python benchmarks/attention_llama.py model.nstf --gguf model.gguf --llama-bench BUILD/bin/llama-bench
        --plans attention.json [--report-text eval.txt] [--context 8192] [--rounds 2] [--threads 2] [--new 24]

model.nstf and model.gguf are the same model. Every round runs all of them in turn; medians. --plans: what
benchmarks/attention.py wrote, beside it. llama.cpp reads a prompt of the context's length once for its prefill and once
before it decodes, which takes minutes over q8_0 and q4_0: it multiplies them query by query.

--report-text: KLD of llama.cpp's caches against dense attention, on the text that the plans report on and with the same
weights (the GGUF's, in float32), so that it is the cache's alone: keys and values turned by Hadamard matrices of 64 and
rounded to blocks of 32 with one scale, queries rounded to q8_0, as llama.cpp does (llama-cpp-python 0.3.36).
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from attention import load
from attention_cpu import measure, written
from torch import Tensor

from nstf.runtime.artifact import open_artifact
from nstf.runtime.engine import Engine
from nstf.runtime.kv_formats import rotated
from nstf_convert.dataset import load_text
from nstf_convert.made_up import longest_window
from nstf_convert.pipeline.attention import simulate
from nstf_convert.pipeline.attention.contexts import contexts
from nstf_convert.pipeline.attention.measured import Measure, summarised

# Bits of a number with its share of the scale, as llama.cpp stores a block of 32.
BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}


def rounded(x: Tensor, kind: str) -> Tensor:
    """x [.., D] as a cache of llama.cpp reads it back, turned: D a multiple of 32. Scales are float16."""
    blocks = x.float().reshape(*x.shape[:-1], -1, 32)
    if kind == "q8_0":
        step = blocks.abs().amax(-1, keepdim=True) / 127
        codes = torch.where(step > 0, blocks / step, 0.0).round()
    else:
        # The number that is farthest from zero gets code -8.
        far = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        step = far / -8
        codes = (torch.where(step != 0, blocks / step, 0.0) + 8.5).floor().clamp(0, 15) - 8
    return (codes * step.half().float()).reshape(x.shape)


def llama_attention(kind: str) -> simulate.Attend:
    """Causal attention over a cache of this kind."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        query = rounded(rotated(query), "q8_0")
        key, value = (rounded(rotated(x), kind) for x in (key, value))
        return rotated(simulate.dense(layer, query, key, value, scale, window))

    return attend


def bench(arguments: argparse.Namespace, kind: str, prompt: int, new: int, depth: int) -> float:
    """Tokens a second of llama-bench. Exits when it fails."""
    command = [
        str(arguments.llama_bench), "-m", str(arguments.gguf), "-t", str(arguments.threads), "-fa", "1", "-ctk", kind,
        "-ctv", kind, "-p", str(prompt), "-n", str(new), "-d", str(depth), "-r", "1", "--no-warmup", "-o", "json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr[-500:]}")
    return float(json.loads(done.stdout)[0]["avg_ts"])


def llama_klds(arguments: argparse.Namespace) -> dict[str, float]:
    """KLD of llama.cpp's caches on the report's contexts, as benchmarks/attention.py cuts them."""
    model, tokenizer = load(arguments.gguf, torch.device("cpu"))
    limit = longest_window(model)
    # Texts are read once: those that would choose here are the same, and are not used.
    others, texts = ({str(p): load_text(p) for p in arguments.report_text} for _ in range(2))
    cut = contexts(tokenizer, others, min(arguments.context, limit), limit, report_sources=texts)
    report = Measure(model, cut.report)
    return {
        kind: summarised(report.divergences_of(llama_attention(kind), 0.5)).mean
        for kind in arguments.caches
        if kind != "f16"
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--plans", type=Path, nargs="+", default=[])
    parser.add_argument("--report-text", type=Path, nargs="+", default=[])
    parser.add_argument("--caches", nargs="+", choices=list(BITS), default=list(BITS))
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    losses = llama_klds(arguments) if arguments.report_text else {}
    for kind, loss in losses.items():
        print(f"llama.cpp {kind}: KLD {loss:.5f}", flush=True)
    prompt = arguments.context - arguments.new
    plans = written(arguments.plans)
    sizes: dict[str, float] = {}
    rates: dict[str, list[tuple[float, float]]] = {}
    with open_artifact(arguments.artifact) as artifact:
        engines = {"dense float16": Engine(artifact, threads=arguments.threads)}
        engines |= {n: Engine(artifact, threads=arguments.threads, attention=p) for n, p in plans.items()}
        shape = engines["dense float16"].config.shape
        ids = torch.randint(0, shape["vocab"], (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
        for _ in range(arguments.rounds):
            for name, engine in engines.items():
                prefill, decode, size = measure(engine, ids, arguments.new)
                rates.setdefault(f"nstf {name}", []).append((prompt / prefill, 1 / decode))
                sizes[f"nstf {name}"] = size
            for kind in arguments.caches:
                prefill = bench(arguments, kind, prompt, 0, 0)
                decode = bench(arguments, kind, 0, arguments.new, prompt)
                rates.setdefault(f"llama.cpp {kind}", []).append((prefill, decode))
                wide = 2 * shape["layers"] * shape["kv_heads"] * shape["head_size"] * arguments.context
                sizes[f"llama.cpp {kind}"] = wide * BITS[kind] / 8
    klds = {f"nstf {n}": p.kld.report for n, p in plans.items()}
    klds |= {f"llama.cpp {kind}": loss for kind, loss in losses.items()}
    print("| cache | MB | KLD | prefill tok/s | decode tok/s |\n|---|---|---|---|---|")
    results = []
    for name, found in rates.items():
        prefill, decode = (statistics.median(r[i] for r in found) for i in (0, 1))
        kld = klds.get(name)
        shown = "" if kld is None else f"{kld:.5f}"
        print(f"| {name} | {sizes[name] / 1e6:.1f} | {shown} | {prefill:.1f} | {decode:.1f} |", flush=True)
        results.append(
            {"cache": name, "bytes": sizes[name], "kld": kld, "prefill": prefill, "decode": decode}
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
