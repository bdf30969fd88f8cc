"""A report as a conversion of a small language model would make it: every part present, figures made up."""

import math
import random
from typing import Any

from nstf.kernels.formats import Node, add, dense, grid, low_rank, stored_bytes
from nstf.kernels.formats import integer as int_format
from nstf_convert.report import build as report

LAYERS, HIDDEN, FFN, KV = 30, 576, 1536, 192
SHAPES = {
    "q": (HIDDEN, HIDDEN),
    "k": (KV, HIDDEN),
    "v": (KV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (FFN, HIDDEN),
    "up": (FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}


def integer(bits: int, group: int = 64) -> Node:
    return Node("int", int_format.Params(bits=bits, group=group))


def corrected(bits: int, rank: int) -> Node:
    factors = {"a": integer(8, 0), "b": integer(8, 0)}
    return Node(
        "add", add.Params(), {"x": integer(bits), "y": Node("low_rank", low_rank.Params(rank), factors)}
    )


def candidates() -> list[Node]:
    nodes = [integer(bits, group) for bits in range(2, 9) for group in (32, 64, 128)]
    return [
        *nodes,
        Node("grid", grid.Params()),
        *(corrected(bits, rank) for bits in (2, 3, 4) for rank in (8, 16)),
    ]


def loss_of(tree: Node, shape: tuple[int, ...], weight: float) -> float:
    bits = 8 * stored_bytes(tree, shape) / math.prod(shape)
    penalty = {"add": 1.3, "grid": 0.7}.get(tree.kind, 1.0)
    return weight * penalty * 4.0 ** (-bits)


def tensor(name: str, role: str, shape: tuple[int, ...], tree: Node, weight: float) -> report.TensorReport:
    rejected = [report.Alternative(n, loss_of(n, shape, weight)) for n in candidates() if n != tree]
    return report.TensorReport(
        name,
        role,
        shape,
        "bfloat16",
        tree,
        2 * math.prod(shape),
        loss_of(tree, shape, weight),
        True,
        signature={"effective_rank": 120.5, "kurtosis": 4.2},
        rejected=rejected,
        not_tried=[
            report.NotTried("low_rank", "a bound", 4096, 1.5 + weight),
            report.NotTried("cp", "it won on no matrix that was measured"),
        ],
    )


def tensors() -> list[report.TensorReport]:
    rng = random.Random(0)
    rows = [tensor("model.embed_tokens.weight", "embedding", (49152, HIDDEN), integer(5), 40.0)]
    for layer in range(LAYERS):
        for role, shape in SHAPES.items():
            block = "self_attn" if role in "qkvo" else "mlp"
            bits = rng.choice([3, 4, 4, 4, 5, 6] if role != "v" else [6, 8])
            tree = (
                corrected(bits, 8)
                if rng.random() < 0.12
                else Node("grid", grid.Params())
                if bits == 4 and rng.random() < 0.4
                else integer(bits)
            )
            name = f"model.layers.{layer}.{block}.{role}_proj.weight"
            rows.append(
                tensor(name, role, shape, tree, rng.lognormvariate(0, 1) * (3 if role == "down" else 1))
            )
        name = f"model.layers.{layer}.input_layernorm.weight"
        copied = Node("dense", dense.Params("bfloat16"))
        rows.append(
            report.TensorReport(
                name, "norm", (HIDDEN,), "bfloat16", copied, 2 * HIDDEN, note="copied: 576 values"
            )
        )
    return rows


def accuracy(mean_kl: float) -> dict[str, Any]:
    return {
        "mean_kl": mean_kl,
        "mean_kl_se": mean_kl / 15,
        "median_kl": mean_kl / 3,
        "p99_kl": mean_kl * 9,
        "max_kl": mean_kl * 80,
        "top1": 1 - 6 * mean_kl,
        "top1_se": 0.002,
        "ppl_reference": 5.7345,
        "ppl_reference_se": 0.31,
        "ppl": 5.7345 * (1 + mean_kl),
        "ppl_se": 0.31,
        "ppl_ratio": 1 + mean_kl,
        "ppl_ratio_se": 0.0011,
        "windows": 16,
        "tokens": 4080,
    }


def attention_plan() -> dict[str, Any]:
    rng = random.Random(1)
    names = ["full", "streaming", "streaming", "block_sparse"]
    layers = []
    for _ in range(LAYERS):
        heads = [
            {
                "pattern": rng.choice(names),
                "params": {"sink": 16, "window": 256},
                "min_length": 1024,
                "error": rng.random() / 10,
                "mass": 0.98,
            }
            for _ in range(9)
        ]
        fmt = {"bits": 4, "by": "token", "rotate": True}
        groups = [
            {
                "sink": 16,
                "recent": 256 * all(h["pattern"] == "streaming" for h in heads[3 * g : 3 * g + 3]),
                "min_length": 1024,
                "keys": fmt,
                "values": fmt,
            }
            for g in range(3)
        ]
        layers.append({"heads": heads, "groups": groups})
    return {
        "version": 2,
        "context": 2048,
        "kv_budget": 0.4,
        "head_dim": 64,
        "kld": {"allowed": 0.002, "choose": 0.0011, "report": 0.0012},
        "layers": layers,
        "lengths": [
            {"length": 1024, "kld": 0.0009, "passkey": None, "needles": None},
            {"length": 2048, "kld": 0.0012, "passkey": [4, 4, 4], "needles": [9, 8, 10]},
        ],
        "choice": {"share": 0.39},
    }


def roofline() -> dict[str, Any]:
    rng = random.Random(2)
    flops, bandwidth, phases = 120e9, 18e9, []
    for name, tokens in (("prefill", 128), ("decode", 1)):
        operators = []
        for layer in range(LAYERS):
            for role, (out, inner) in SHAPES.items():
                work, moved = 2.0 * tokens * out * inner, out * inner * 0.6 + 4.0 * tokens * (out + inner)
                time_s = max(work / flops, moved / bandwidth) * rng.uniform(1.1, 3)
                operators.append(
                    {
                        "name": f"model.layers.{layer}.{role}",
                        "kind": "linear",
                        "calls": 1,
                        "flops": work,
                        "bytes": moved,
                        "time_s": time_s,
                        "bound": "memory",
                        "limit_s": 0.0,
                    }
                )
        phases.append(
            {
                "name": name,
                "tokens": tokens,
                "batch": 1,
                "time_s": sum(o["time_s"] for o in operators),
                "flops": 1e9,
                "bytes": 1e8,
                "mfu": 0.41 if tokens > 1 else 0.03,
                "operators": operators,
            }
        )
    return {
        "device": {"name": "CPU, 2 threads", "flops": flops, "bandwidth": bandwidth, "source": "measured"},
        "phases": phases,
    }


def sample(**changes: Any) -> dict[str, Any]:
    """The report; keywords replace arguments of `build`."""
    rows = tensors()
    used = sum(stored_bytes(t.tree, t.shape) for t in rows)
    size = used + 690_000 + 61_440
    arguments: dict[str, Any] = {
        "model": report.ModelFacts(
            "SmolLM2-135M-docs",
            "LlamaForCausalLM",
            "safetensors",
            "3f7c" * 16,
            134_515_008,
            269_060_552,
            len(rows),
        ),
        "budget": {"kind": "ratio", "value": 0.338, "bytes": size + 20_481},
        "size_bytes": size,
        "tensors": rows,
        "files_bytes": 690_000,
        "accuracy": report.AccuracyFacts(
            accuracy(0.0214),
            {"windows": 16, "seq_len": 512, "scored_per_window": 255, "dataset": "eval.txt"},
            "mix",
            report.Uniform("int4 g64", size - 1000, accuracy(0.0389)),
            [
                {"name": "planned", "size_bytes": size, "mean_kl": 0.0241},
                {"name": "search 1", "size_bytes": size, "mean_kl": 0.0214},
            ],
        ),
        "attention": attention_plan(),
        "calibration": report.CalibrationFacts(
            "calibration.txt",
            False,
            64,
            32768,
            8192,
            0,
            [report.ExpertTokens("model.layers.0.mlp.experts", (900, 420, 0, 77, 130, 610, 12, 250))],
        ),
        "stages": [
            report.Stage("calibration", 141.2, 1_930_000_000),
            report.Stage("candidates", 198.7, 2_210_000_000),
            report.Stage("plan", 3.1, 1_100_000_000),
            report.Stage("measure and search", 120.4, 2_040_000_000),
        ],
        "roofline": roofline(),
        "command": "nstf convert ./model --budget 0.338 -o model.nstf --report model.html",
    }
    return report.build(**(arguments | changes))
