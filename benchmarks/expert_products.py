"""A layer of experts from its codes on a CPU: grouped products, one product an expert, and transformers' own loop.

    python benchmarks/expert_products.py [--shape 8,512,1024,2] [--tokens 1,16,128] [--threads 2] [--isa avx2]

`loop`: what ran before, and runs where nothing is grouped: transformers' loop over the experts that are hit, each product
by the registry's kernels in float32. `each`: the kernels of `grouped`, int8 activations, with one parallel loop for every
expert's product, as llama.cpp goes through its experts. `exact`: grouped without int8 activations. Microseconds for a whole
layer: sorting, both products, the activation between them, the weighted sum. Weights are random, and so are the experts
of a token. As many layers as fill --memory MB take turns, so that weights come from memory as a model's do. All ways run
in turn in each round, and the least time of all rounds counts: the processor's with one thread, which hardly sees what else
runs on the machine, and the clock's with several.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from cpu_kernels import random_arrays
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from nstf.kernels.cpu import engine_matrix, ext
from nstf.kernels.formats import EncodedTensor, Node, stored_bytes
from nstf.kernels.formats.tree import Shape, format_of
from nstf.kernels.torch.rows import expert
from nstf.runtime.modules import attach
from nstf.runtime.parameter import EncodedParameter


def leaf(kind: str, **params: Any) -> Node:
    return Node(kind, format_of(kind).Params(lead=2, **params))


def forms(shape: Shape) -> dict[str, Node]:
    """Trees of a stack, by name."""

    def node(kind: str, children: dict[str, Node], **params: Any) -> Node:
        return Node(kind, format_of(kind).Params(**params), children)

    def integers(bits: int) -> Node:
        return leaf("int", bits=bits, group=64, scale_bits=8)

    def rotated(inner: Node) -> Node:
        return node("rotated", {"x": inner}, block_in=min(128, shape[2] & -shape[2]), lead=2, seed=1)

    def trellis(quarter_bits: int) -> Node:
        return rotated(leaf("trellis", quarter_bits=(quarter_bits,)))

    numbers = Node("int", format_of("int").Params(bits=8, group=0))
    shared = node("tucker", {"core": integers(4), "factor0": numbers}, ranks=(1, *shape[1:]), view=shape)
    found = {f"int{b} g64": integers(b) for b in (2, 3, 4)}
    found |= {f"trellis {q / 4:g}": trellis(q) for q in (8, 12, 18)}
    if shape[1] % 256 == 0:
        found |= {f"shuffle {q / 4:g}": rotated(leaf("shuffle", quarter_bits=q)) for q in (8, 12, 18)}
        both = {"x": rotated(leaf("shuffle", quarter_bits=10)), "y": shared}
        found["int4 for all + shuffle 2.5"] = node("add", both)
    found["int4 for all + trellis 2.5"] = node("add", {"x": trellis(10), "y": shared})
    found["float32"] = Node("dense", format_of("dense").Params(dtype="float32"))
    return found


class Layers:
    """Modules of experts of one form, the ways to run them, and tokens."""

    def __init__(
        self, name: str, shape: tuple[int, int, int, int], memory: int, exact: bool, most: int
    ) -> None:
        count, hidden, ffn, _ = shape
        shapes = {"gate_up_proj": (count, 2 * ffn, hidden), "down_proj": (count, hidden, ffn)}
        trees = {n: forms(s).get(name) for n, s in shapes.items()}
        # What experts of a few rows are not stored in is stored in trellis codes of the rate.
        trees = {n: t or forms(shapes[n])[name.replace("shuffle", "trellis")] for n, t in trees.items()}
        self.size = sum(stored_bytes(trees[n], s) for n, s in shapes.items())
        config = Qwen3MoeConfig(
            hidden_size=hidden, moe_intermediate_size=ffn, num_experts=count, hidden_act="silu"
        )
        config._experts_implementation_internal = "eager"
        self.modules = []
        for _ in range(max(1, min(most, memory // self.size))):
            with torch.device("meta"):
                module: Any = Qwen3MoeExperts(config)
            for n, s in shapes.items():
                attach(
                    module,
                    n,
                    EncodedParameter(EncodedTensor(trees[n], s, random_arrays(trees[n], s)), torch.float32),
                )
            module.exact_products = exact
            self.modules.append(module)
        self.turn = 0

    def next(self) -> Any:
        self.turn = (self.turn + 1) % len(self.modules)
        return self.modules[self.turn]


def loop(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Transformers' own."""
    y: Tensor = module.encoded_base.forward(module, x, index, weights)
    return y


def each(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The engine's product for one expert after the other."""
    made: dict[tuple[str, int], Any] = module.__dict__.setdefault("_made", {})
    y = torch.zeros_like(x)

    def product(name: str, e: int, inputs: Tensor) -> Tensor:
        if (name, e) not in made:
            encoded = expert(module._modules[f"{name}_encoded"].encoded, e)
            assert encoded is not None
            made[name, e] = engine_matrix.compile_matrix(encoded, module.exact_products)
        return engine_matrix.matmul(inputs, made[name, e])

    for e in index.unique().tolist():
        token, choice = torch.where(index == e)
        inner = module._apply_gate(product("gate_up_proj", e, x[token]))
        y.index_add_(0, token, product("down_proj", e, inner) * weights[token, choice, None])
    return y


def grouped(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y: Tensor = module(x, index, weights)
    return y


WAYS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "loop": (loop, True),
    "each": (each, False),
    "exact": (grouped, True),
    "grouped": (grouped, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="8,512,1024,2", help="experts, hidden, ffn, experts of a token")
    parser.add_argument("--tokens", default="1,16,128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="")
    parser.add_argument("--memory", type=int, default=96, help="MB of weights of a form, at most")
    parser.add_argument("--layers", type=int, default=8, help="that take turns, at most")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="+", metavar="FORM")
    args = parser.parse_args()
    numbers = [int(n) for n in args.shape.split(",")]
    shape = (numbers[0], numbers[1], numbers[2], numbers[3])
    ext.use_isa(args.isa)
    torch.set_num_threads(args.threads)
    names = args.only or list(forms((shape[0], 2 * shape[2], shape[1])))
    print(
        f"{ext.isa()}, {args.threads} threads, {shape[0]} experts of {shape[1]} x {shape[2]}, top {shape[3]}; us"
    )
    print("| form | bits | tokens | " + " | ".join(WAYS) + " | loop / grouped |")
    print("|---|---|---|" + "---|" * (len(WAYS) + 1))
    clock = time.process_time if args.threads == 1 else time.perf_counter
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for name in names:
            exact, fast = (Layers(name, shape, args.memory << 20, e, args.layers) for e in (True, False))
            bits = 8 * exact.size / (3 * shape[0] * shape[1] * shape[2])
            for tokens in [int(t) for t in args.tokens.split(",")]:
                x = torch.randn(tokens, shape[1], generator=generator)
                least = dict.fromkeys(WAYS, float("inf"))
                for turn in range(args.rounds + 2):
                    index = torch.rand(tokens, shape[0], generator=generator).topk(shape[3]).indices
                    weights = torch.full(index.shape, 1 / shape[3])
                    for way, (run, is_exact) in WAYS.items():
                        module = (exact if is_exact else fast).next()
                        if turn < 2:  # what is made once, of every layer
                            for m in (exact if is_exact else fast).modules:
                                run(m, x, index, weights)
                        before = clock()
                        run(module, x, index, weights)
                        if turn >= 2:
                            least[way] = min(least[way], clock() - before)
                figures = " | ".join(f"{1e6 * least[way]:.0f}" for way in WAYS)
                print(
                    f"| {name} | {bits:.2f} | {tokens} | {figures} | {least['loop'] / least['grouped']:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
