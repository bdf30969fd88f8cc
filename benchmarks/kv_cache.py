"""Keys and values in int8 against float16 in the CPU engine: decode speed by context, memory, and KLD.

    python benchmarks/kv_cache.py model.nstf [--text heldout.txt ...] [--contexts 64 1800] [--rounds 7]

Both caches take turns in every round, on one copy of the file; rates are medians over rounds of `--tokens` tokens decoded
after a context, and the ratio is of the medians. Without --exact the rates are those of the usual kernels; KLD is always
measured with float32 activations on both sides, so that it is the cache's alone: nats of the int8 cache's
logits against the float16 one's over `--windows` windows of 512 tokens of each text, the second half of a window.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from nstf.runtime.artifact import Artifact, open_artifact
from nstf.runtime.engine import KV_CACHES, Engine, greedy

WINDOW = 512


def decode_rate(engine: Engine, context: int, tokens: int) -> float:
    """Tokens a second after `context` random ones."""
    ids = torch.randint(0, engine.vocab, (context,), generator=torch.Generator().manual_seed(0))
    engine.reset()
    logits = engine.forward(ids)
    start = time.perf_counter()
    engine.go_on(greedy(logits), tokens)
    return tokens / (time.perf_counter() - start)


def cache_bytes(artifact: Artifact, cache: str, positions: int) -> int:
    """Bytes of keys and values once `positions` tokens have been seen."""
    engine = Engine(artifact, kv_cache=cache)
    engine.forward([0] * positions)
    return engine.cache_bytes


def divergence(artifact: Artifact, ids: list[int], windows: int) -> tuple[float, float]:
    """KLD of whole prompts, and of tokens one at a time after a prompt."""
    base, other = (Engine(artifact, exact=True, kv_cache=cache) for cache in KV_CACHES)
    half, prompt, alone = WINDOW // 2, [], []
    for w in range(windows):
        window = ids[w * WINDOW : (w + 1) * WINDOW]
        for engine in (base, other):
            engine.reset()
        expected, found = (e.forward(window, all_logits=True)[half:].log_softmax(-1) for e in (base, other))
        prompt.append(float((expected.exp() * (expected - found)).sum(-1).mean()))
        other.reset()
        other.forward(window[:half])
        steps = torch.stack([other.forward([token]) for token in window[half : half + 128]]).log_softmax(-1)
        part = expected[:128]
        alone.append(float((part.exp() * (part - steps)).sum(-1).mean()))
    return statistics.mean(prompt), statistics.mean(alone)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="held-out texts for the KLD")
    parser.add_argument("--contexts", type=int, nargs="*", default=[64, 1800])
    parser.add_argument("--memory-at", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--exact", action="store_true", help="float32 activations in the timed runs too")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for path in arguments.artifacts:
        artifact = open_artifact(path)
        engines = {cache: Engine(artifact, arguments.exact, kv_cache=cache) for cache in KV_CACHES}
        for context in arguments.contexts:
            rates: dict[str, list[float]] = {cache: [] for cache in KV_CACHES}
            for _ in range(arguments.rounds):
                for cache, engine in engines.items():
                    rates[cache].append(decode_rate(engine, context, arguments.tokens))
            base, other = (statistics.median(rates[cache]) for cache in KV_CACHES)
            print(f"{path.name}, context {context}: {base:.1f} tokens a second with float16, {other:.1f} with int8,"
                  f" {other / base:.2f}x", flush=True)  # fmt: skip
        for positions in arguments.memory_at:
            if positions > engines["int8"].context:
                print(f"{path.name}: its context holds no {positions} positions")
                continue
            base, other = (cache_bytes(artifact, cache, positions) for cache in KV_CACHES)
            print(
                f"{path.name}, {positions} positions: {base:,} bytes float16, {other:,} int8, {other / base:.3f}"
            )
        if arguments.text:
            tokenizer = Tokenizer.from_str(artifact.file("tokenizer.json").decode())
        for text in arguments.text:
            ids = tokenizer.encode(text.read_text()).ids
            prompt, alone = divergence(artifact, ids, arguments.windows)
            print(
                f"{path.name}, {text.name}: KLD {prompt:.6f} of a prompt, {alone:.6f} token by token",
                flush=True,
            )


if __name__ == "__main__":
    main()
