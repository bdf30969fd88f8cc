"""A whole encoded model decoding on a GPU in captured graphs, against bfloat16 in captured graphs and in torch.compile.

    python benchmarks/gpu_model.py [--preset 8b] [--format NAME] [--head NAME | --plan FILE] [--batch 1]
        [--rounds 5] [--no-compile] [--json FILE]

The model has the shape of Llama-3 8B (or of a smaller one) and random weights, made on the device in a format of
gpu_kernels.py (int4 in groups of 128 if none is named, `--head` for table and output layer), all matrices included; the
bfloat16 model has the same values. `--plan`: formats by name from what `nstf plan --json` or the report of `nstf convert`
says; each layer of a smaller model stands for several neighbours. Compared, in rounds that alternate:

    coded graph      what `model.generate` of a loaded artifact does: runtime/graph_decoder.py
    bf16 graph       the same step with dense matrices (q, k, v and gate, up as one each): the strongest we know to make
    bf16 compile     transformers' model with its static cache, torch.compile(mode="reduce-overhead")

A rate is new tokens after a prompt over the time from the first to the last of them, each token seen by the host. Memory is
the peak of torch's allocator in a run of prompt and decoding, without what was there before the model was made.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_kernels import FORMATS, bandwidth, random_encoded
from torch import nn

from nstf.kernels.formats import EncodedTensor, Node, decode, node_from_json
from nstf.runtime.graph_decoder import Decoder
from nstf.runtime.modules import attach
from nstf.runtime.parameter import EncodedParameter
from nstf.runtime.skeleton import build_skeleton

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "vocab_size": 128256,
    "num_key_value_heads": 8,
}
PRESETS: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
}
DTYPE = torch.bfloat16
PROMPT = 128


def named(tree: Node, head: Node) -> Callable[[str], Node]:
    """The format of each matrix. head: of table and output layer."""
    return lambda name: head if name.endswith(("embed_tokens.weight", "lm_head.weight")) else tree


def planned(path: Path, layers: int) -> Callable[[str], Node]:
    """The format of each matrix of a model with so many layers, by a plan for it or for one with fewer."""
    trees = {t["name"]: node_from_json(t["tree"]) for t in json.loads(path.read_text())["tensors"]}
    given = len({name.split(".")[2] for name in trees if name.startswith("model.layers.")})

    def format_of_name(name: str) -> Node:
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(int(parts[2]) * given // layers)
        found = trees.get(".".join(parts)) or trees["model.embed_tokens.weight"]
        return _fitted(found)

    return format_of_name


def _fitted(tree: Node) -> Node:
    """A format for other sizes: of groups that are short rows groups of 128, of several rates their mean."""
    params = tree.params
    if tree.kind == "int" and (params.group == 0 or params.group > 128):
        params = replace(params, group=128)
    if tree.kind == "trellis" and params.rows:
        mean = sum(q * r for q, r in zip(params.quarter_bits, params.rows, strict=True)) / sum(params.rows)
        params = replace(params, quarter_bits=(round(mean),), rows=())
    return Node(tree.kind, params, {name: _fitted(child) for name, child in tree.children.items()})


def models(config: dict[str, Any], format_of_name: Callable[[str], Node]) -> tuple[Any, Callable[[], Any]]:
    """(the encoded model on the device, how to make the dense one of the same values)."""
    model: Any = build_skeleton(config, dtype=DTYPE)
    stored = {}
    for seed, (name, parameter) in enumerate(list(model.named_parameters())):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if parameter.dim() < 2:
            setattr(
                module, leaf, nn.Parameter(torch.ones(parameter.shape, dtype=DTYPE, device="cuda"), False)
            )
            continue
        own = format_of_name(name)
        encoded = random_encoded(own, tuple(parameter.shape), seed)
        some = decode(EncodedTensor(own, encoded.shape, encoded.arrays))[:256].std()
        # Weights of 0.02, as models begin with.
        scales = [a for end in ("scale_super", "scale") for a in encoded.arrays if a.split(".")[-1] == end]
        encoded.arrays[scales[0]].mul_(0.02 / some)
        stored[name] = EncodedParameter(encoded, DTYPE)
        attach(module, leaf, stored[name])

    def dense() -> Any:
        made: Any = build_skeleton(config, dtype=DTYPE)
        for name, parameter in list(made.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            source = stored[name].encoded if name in stored else None
            values = torch.ones_like(parameter, device="cuda") if source is None else decode(source, DTYPE)
            setattr(made.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=False))
        return made.to("cuda")

    return model.to("cuda"), dense


class Captured:
    """A Decoder of a model, as `model.generate` uses it."""

    def __init__(self, model: Any) -> None:
        self.decoder = Decoder(model)

    def run(self, ids: torch.Tensor, new: int) -> float:
        """Tokens a second of each sequence."""
        start = 0.0
        for i, _ in enumerate(self.decoder.generate(ids, new)):
            start = time.perf_counter() if i == 0 else start
        return (new - 1) / (time.perf_counter() - start)

    def replay_seconds(self, count: int = 50) -> float:
        """Time of one replay, without the host's part."""
        self.decoder.prepare(1, PROMPT, None)
        replay = self.decoder._replay(None)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / count


class Compiled:
    """transformers' forward compiled as its documentation has it: a static cache, reduce-overhead."""

    def __init__(self, model: Any) -> None:
        from transformers import StaticCache

        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=512)

        def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            logits = model(input_ids=token, position_ids=position, past_key_values=self.cache).logits
            found: torch.Tensor = logits[:, -1].argmax(dim=-1, keepdim=True)
            return found

        self.step = torch.compile(step, mode="reduce-overhead", fullgraph=True)

    def run(self, ids: torch.Tensor, new: int) -> float:
        self.cache.reset()
        count = ids.shape[1]
        logits = self.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=1).logits
        token = logits[:, -1].argmax(dim=-1, keepdim=True)
        position = torch.full((1, 1), count, device="cuda")
        token.tolist()
        start = time.perf_counter()
        for i in range(new - 1):
            token = self.step(token, position.fill_(count + i)).clone()
            token.tolist()
        return (new - 1) / (time.perf_counter() - start)


def with_peak(call: Callable[[], object], before: int) -> int:
    """Bytes at the peak of a call, above `before`."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="8b")
    parser.add_argument("--format", choices=FORMATS, default="int4 g128", help="of all matrices")
    parser.add_argument("--head", choices=FORMATS, help="of table and output layer, where another")
    parser.add_argument("--plan", type=Path, help="formats by the JSON of a plan, in their place")
    parser.add_argument("--batch", type=int, default=1, help="sequences that are decoded together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="tokens to decode in a round")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out torch.compile, which takes a minute"
    )
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "gpu_model.py: torch sees no GPU; nothing was measured\n")
    read = bandwidth()
    torch.cuda.empty_cache()
    config = LLAMA | PRESETS[options.preset]
    ids = torch.randint(0, config["vocab_size"], (options.batch, PROMPT), device="cuda")
    before = torch.cuda.memory_allocated()
    own = named(FORMATS[options.format], FORMATS[options.head or options.format])
    if options.plan:
        own = planned(options.plan, config["num_hidden_layers"])
    model, make_dense = models(config, own)
    contenders: dict[str, Any] = {"coded graph": Captured(model)}
    peaks = {"coded graph": with_peak(lambda: contenders["coded graph"].run(ids, options.tokens), before)}
    before = torch.cuda.memory_allocated()
    dense = make_dense()
    contenders["bf16 graph"] = Captured(dense)
    peaks["bf16 graph"] = with_peak(lambda: contenders["bf16 graph"].run(ids, options.tokens), before)
    failed = {}
    if not options.no_compile:
        try:
            compiled = Compiled(dense)
            compiled.run(ids, 8)
            contenders["bf16 compile"] = compiled
        except Exception as error:  # whatever the compiler of this torch does: the others are measured
            failed["bf16 compile"] = " ".join(str(error).split())[:200]
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, contender in contenders.items():
            rates[name].append(contender.run(ids, options.tokens))
    medians = {name: median(values) for name, values in rates.items()}
    report(options, read, contenders, medians, peaks, failed, rates)


def report(
    options: argparse.Namespace,
    read: float,
    contenders: dict[str, Any],
    medians: dict[str, float],
    peaks: dict[str, int],
    failed: dict[str, str],
    rates: dict[str, list[float]],
) -> None:
    """The table, and the JSON where it was asked for."""
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{device}; reads {read / 1e12:.2f} TB/s; {options.preset}, batch {options.batch}")
    print(f"{'':16}{'tokens/s':>10}{'ms':>8}{'GB/token':>10}{'of read':>9}{'peak GB':>9}{'coded is':>9}")
    rows = []
    for name, rate in medians.items():
        decoder = getattr(contenders[name], "decoder", contenders["bf16 graph"].decoder)
        size = decoder.matrix_bytes
        row = {
            "name": name,
            "tokens_per_s": rate * options.batch,
            "ms": 1e3 / rate,
            "bytes_per_token": size,
            "bandwidth_share": size * rate / read,
            "peak_bytes": peaks.get(name),
            "coded_times": medians["coded graph"] / rate,
            "rounds": rates[name],
        }
        if isinstance(contenders[name], Captured) and options.batch == 1:
            row["replay_ms"] = 1e3 * contenders[name].replay_seconds()
        rows.append(row)
        peak = f"{peaks[name] / 1e9:9.2f}" if name in peaks else f"{'':9}"
        print(
            f"{name:16}{row['tokens_per_s']:10.1f}{row['ms']:8.3f}{size / 1e9:10.2f}"
            f"{100 * row['bandwidth_share']:7.0f} %{peak}{row['coded_times']:8.2f}x"
        )
    ratio = peaks["coded graph"] / peaks["bf16 graph"]
    print(f"peak memory, coded over bf16: {ratio:.3f}")
    for name, reason in failed.items():
        print(f"{name}: did not run ({reason})")
    if options.json:
        found = {
            "device": device,
            "read_bytes_per_s": read,
            "rows": rows,
            "peak_ratio": ratio,
            "failed": failed,
        }
        found |= {"preset": options.preset, "batch": options.batch, "tokens": options.tokens}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
