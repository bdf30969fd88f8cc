"""The CPU engine's logits against transformers' modules on the decoded weights in float32, one format at a time.

    python benchmarks/engine_error.py MODEL --text heldout.txt [--formats int4_g32 fp8 ...] [--json FILE]

Every matrix of the model is rounded to the format (to the nearest, uncalibrated: what is measured is the engine, not the
format), written to a file, and run three ways: by the modules, by the engine with float32 activations (`--exact`), and as
the engine comes. Printed for each: the largest difference of a logit from the modules' and the mean KLD in nats, over a
window read in one piece; then the KLD of int8 activations token by token, after half the window.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nstf.runtime
from nstf.kernels.formats import EncodedTensor, Node, dense
from nstf.quantizers.stats import Stats
from nstf.runtime.artifact import Shared, write_artifact
from nstf.runtime.engine import Engine
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.pipeline.propose.recipe import Recipe, encode

FORMATS = {
    **{f"int{b}_g32": Recipe("int_grid", {"bits": b, "group": 32}) for b in range(2, 9)},
    "int4_g64_asymmetric": Recipe("int_grid", {"bits": 4, "group": 64, "symmetric": False}),
    "int8_row": Recipe("int_grid", {"bits": 8, "group": 0}),
    "grid_g32": Recipe("grid16", {"group": 32}),
    "mxfp4": Recipe("mxfp4"),
    "fp8_row": Recipe("fp8"),
    "float16": Recipe("dense", {"dtype": "float16"}),
    "svd64_int8": Recipe("svd", {"rank": 64}, {"factor": Recipe("int_grid", {"bits": 8, "group": 32})}),
    "trellis2": Recipe("trellis", {"quarter_bits": 8}),
    "trellis3": Recipe("trellis", {"quarter_bits": 12}),
    "trellis4": Recipe("trellis", {"quarter_bits": 16}),
}


def write(model: str, recipe: Recipe, path: Path, layers: int | None) -> None:
    """The checkpoint with every matrix stored by a recipe, only its first `layers` layers when given."""
    with open_checkpoint(model) as checkpoint:
        kept = [n for n in checkpoint.names() if layers is None or not _beyond(n, layers)]
        tensors: dict[str, Any] = {name: _stored(checkpoint.get(name), recipe) for name in kept}
        tensors |= {alias: Shared(name) for alias, name in checkpoint.ties.items() if name in tensors}
        files = checkpoint.files()
        if layers is not None:
            config = json.loads(files["config.json"]) | {"num_hidden_layers": layers}
            files["config.json"] = json.dumps(config).encode()
        write_artifact(path, tensors, files=files)


def _beyond(name: str, layers: int) -> bool:
    parts = name.split(".")
    return "layers" in parts and int(parts[parts.index("layers") + 1]) >= layers


def _stored(weight: Tensor, recipe: Recipe) -> EncodedTensor:
    weight = weight.float()
    if weight.dim() == 2:
        return encode(recipe, weight, Stats(), 1)
    return EncodedTensor(Node(dense.KIND, dense.Params("float32")), tuple(weight.shape), {"values": weight})


def divergence(reference: Tensor, logits: Tensor) -> float:
    """Mean KLD in nats of logits [tokens, vocab]."""
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def measure(path: Path, text: str, window: int) -> dict[str, float]:
    """The figures of one file."""
    ids = nstf.runtime.load_tokenizer(path)(text)["input_ids"][:window]
    model: Any = nstf.runtime.load(path, engine="off", verify=False)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].float()
    exact, usual = (Engine.open(path, exact=e, verify=False) for e in (True, False))
    whole, rounded = exact.forward(ids, all_logits=True), usual.forward(ids, all_logits=True)
    usual.reset()
    half = window // 2
    usual.forward(ids[:half])
    single = torch.stack([usual.forward([token]) for token in ids[half:]])
    return {
        "range": float(expected.max() - expected.min()),
        "exact_largest": float((whole - expected).abs().max()),
        "exact_kld": divergence(expected, whole),
        "int8_largest": float((rounded - expected).abs().max()),
        "int8_kld": divergence(expected, rounded),
        "int8_single_kld": divergence(expected[half:], single),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--layers", type=int, help="only the first so many layers")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {}
    print("| format | logits range | exact: largest, KLD | int8: largest, KLD | int8, single tokens: KLD |")
    print("|---|---|---|---|---|")
    for name in arguments.formats:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.nstf")
            write(arguments.model, FORMATS[name], path, arguments.layers)
            r = found[name] = measure(path, arguments.text.read_text(encoding="utf-8"), arguments.window)
        print(
            f"| {name} | {r['range']:.0f} | {r['exact_largest']:.4f}, {r['exact_kld']:.1e} | "
            f"{r['int8_largest']:.2f}, {r['int8_kld']:.5f} | {r['int8_single_kld']:.5f} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
