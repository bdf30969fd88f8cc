"""Prompts of `nstf serve` on a GPU, in pieces: by the captured decoder's layers and by transformers' modules, in turn.

    python benchmarks/gpu_pieces.py [--layers 8] [--format "int4 g128"] [--pieces 32 256 1024] [--rounds 5]

Layers of the shape of Llama-3 8B with random weights. A prompt of 1024 tokens goes into a slot of `GraphBatch` a piece a
step; tokens a second are medians of rounds in turn. Logits after the prompt are compared: in bfloat16 both are a rounding
noise of random weights away from float32.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from gpu_kernels import FORMATS
from gpu_model import LLAMA, PRESETS, models, named
from torch import Tensor

from nstf.runtime.engine_batch import Part
from nstf.runtime.graph_batch import GraphBatch
from nstf.runtime.graph_decoder import Decoder

TOKENS = 1024


class ByModules(Decoder):
    """A decoder whose layers take no prompt."""

    longest_prompt = 0  # type: ignore[assignment]


def prompt(batch: GraphBatch, ids: list[int], piece: int) -> tuple[float, Tensor]:
    """(tokens a second, the logits after the prompt)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for first in range(0, TOKENS, piece):
        batch.step([Part(1, first, ids[first : first + piece], wanted=first + piece >= TOKENS)])
    return TOKENS / (time.perf_counter() - start), batch._host[0].clone()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--format", choices=sorted(FORMATS), default="int4 g128")
    parser.add_argument("--pieces", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    tree = FORMATS[args.format]
    model: Any
    with torch.no_grad():
        model, _ = models(LLAMA | PRESETS["8b"] | {"num_hidden_layers": args.layers}, named(tree, tree))
        ways = {"layers": GraphBatch(Decoder(model), 4), "modules": GraphBatch(ByModules(model), 4)}
        ids = torch.randint(3, model.config.vocab_size, (TOKENS,)).tolist()
        for piece in args.pieces:
            rates: dict[str, list[float]] = {name: [] for name in ways}
            logits = {}
            for at in range(args.rounds + 2):
                for name, batch in ways.items():
                    rate, logits[name] = prompt(batch, ids, piece)
                    if at >= 2:  # the first compile kernels
                        rates[name].append(rate)
            own, other = median(rates["layers"]), median(rates["modules"])
            far = float((logits["layers"] - logits["modules"]).norm() / logits["modules"].norm())
            print(
                f"pieces of {piece}: layers {own:.0f}, modules {other:.0f} tokens/s ({own / other:.2f}), logits {far:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
