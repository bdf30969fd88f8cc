"""A vision transformer's patch stem as bits and as a low rank: bytes, loss, time of the stem and of the whole model.

    pip install scikit-learn pillow
    python benchmarks/patches.py train --out out/vit --hidden 384 --layers 4
    python benchmarks/patches.py compare out/vit --threads 2
    python benchmarks/patches.py times --hidden 384 --threads 2

A ViT of transformers learns the pictures of `convolution.py` (scikit-learn's digits on its photographs) in patches of 16 x
16. Its stem is a convolution that meets no pixel twice, a matrix [hidden, 768] of a patch's pixels: what natural pictures
have in few directions the stem needs in few directions, so that a low rank (a convolution with fewer outputs, then 1x1) may
take fewer multiplications at the same loss. Everything but the stem stays float32. Every form is encoded with the
statistics of the same calibration and runs from its codes; KLD and right answers are of 1,024 test pictures with int8
activations in the stem, as the files run. Times are of one picture of 224 x 224 (196 patches), all forms in turn. `times`
has those of the stem alone, with random codes, which take as long: the least and the middle of many rounds. With one thread
the clock is the processor time of the process, which other work on the machine disturbs less.
"""

import argparse
import copy
import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import photographs
import torch
import torch.nn.functional as F
from convolution import in_turn
from convolution_prices import integers
from photographs import CALIBRATION_SEED, SIZE, TEST_SEED, Pictures, accuracy, divergence, logits_of
from torch import nn

from nstf.runtime.fused import choose_products
from nstf.runtime.modules import attach
from nstf.runtime.parameter import EncodedParameter
from nstf_convert.budget import Budget
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.candidates import arrays_bytes
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.session import Session
from nstf_convert.speed.measure import Pool

PATCH, LARGE = 16, 224
RANKS = (8, 16, 24, 32, 48, 64, 96, 128, 192)


def build(hidden: int, layers: int) -> nn.Module:
    """A ViT for ten classes, untrained."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=max(1, hidden // 64),
        intermediate_size=4 * hidden, image_size=SIZE, patch_size=PATCH, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def forms(out: int, width: int) -> dict[str, Recipe]:
    """By name: what the stem is stored as."""
    found = {f"int{bits} row": integers(bits, 0) for bits in (8, 6, 4, 3, 2)}
    found["int4 g64"] = integers(4, 64)
    for quarters in (8, 12):
        found[f"shuffle {quarters / 4:g}"] = Recipe("shuffle", {"quarter_bits": quarters})
    for rank in RANKS:
        if rank * (out + width) < 0.8 * out * width:
            found[f"low rank {rank}"] = Recipe("svd", {"rank": rank}, {"factor": integers(6, 0)})
    return found


def compare(folder: Path, threads: int, pictures: int, only: Sequence[str] | None) -> list[dict[str, Any]]:
    """Rows: every form of the stem, with the times of the stem alone and of the whole model beside float32."""
    from safetensors.torch import save_file
    from transformers import ViTForImageClassification

    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)
    model = ViTForImageClassification.from_pretrained(folder).eval().requires_grad_(False)
    reference = logits_of(model)
    stem = _stem(model)
    rows = [{"stem": "float32", "bytes": 4 * stem.weight.numel(), "kld": 0.0, "top1": accuracy(reference)}]
    models: dict[str, nn.Module] = {"float32": model}
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "pictures.safetensors"
        save_file({"pixel_values": Pictures(test=False).draw(pictures, CALIBRATION_SEED)[0]}, str(data))
        options = ConvertOptions(
            str(folder), Path(temporary) / "none.nstf", Budget("ratio", 0.25), (str(data),), prefer="size",
            samples=pictures, work_dir=Path(temporary) / "work", threads=threads,
        )  # fmt: skip
        with Session(options, Stages(), only_calibrates=True) as session:
            unit = next(u for u in session.units.values() if u.role == "conv")
            rank = math.prod(unit.inner_shape[1:])
            for name, recipe in forms(unit.inner_shape[0], rank).items():
                if only and name not in only:
                    continue
                made = copy.deepcopy(model)
                encoded = session.encoder.load(unit, recipe)
                attach(_stem(made), "weight", EncodedParameter(encoded, torch.float32))
                choose_products(made, exact=False)
                logits = logits_of(made)
                rows.append({
                    "stem": name, "bytes": arrays_bytes(unit, recipe), "kld": divergence(logits, reference),
                    "top1": accuracy(logits), "expected": session.encoder.encode(unit, recipe).loss,
                })  # fmt: skip
                models[name] = made
    x = Pictures(test=True).draw(1, TEST_SEED)[0]
    large = F.interpolate(x, size=(LARGE, LARGE), mode="bilinear")
    with torch.inference_mode():
        alone: dict[str, Callable[[], object]] = {n: lambda m=m: _stem(m)(large) for n, m in models.items()}  # type: ignore[misc]
        whole: dict[str, Callable[[], object]] = {
            n: lambda m=m: m(pixel_values=large, interpolate_pos_encoding=True)  # type: ignore[misc]
            for n, m in models.items()
        }
        stems, all_of = in_turn(alone), in_turn(whole)
    for row in rows:
        name = str(row["stem"])
        row |= {"stem_us": round(1e6 * stems[name], 1), "whole_ms": round(1e3 * all_of[name], 3)}
        print(json.dumps(row), flush=True)
    return rows


def times(hidden: int, threads: int, rounds: int, only: Sequence[str] | None) -> list[dict[str, Any]]:
    """Rows: a stem in every form with random codes, in microseconds; each is called once before the call that is timed."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    pool, shape = Pool(0), (hidden, 3, PATCH, PATCH)
    stems = {"float32": nn.Conv2d(3, hidden, PATCH, PATCH).requires_grad_(False)}
    for name, recipe in forms(hidden, 3 * PATCH * PATCH).items():
        stems[name] = copy.deepcopy(stems["float32"])
        encoded = pool.filled(recipes.tree_of(recipe, shape, 1), shape)
        attach(stems[name], "weight", EncodedParameter(encoded, torch.float32))
        choose_products(stems[name], exact=False)
    stems = {name: stem for name, stem in stems.items() if not only or name in only}
    seconds: dict[str, list[float]] = {name: [] for name in stems}
    x = torch.randn(1, 3, LARGE, LARGE)
    with torch.inference_mode():
        for _ in range(rounds):
            for name, stem in stems.items():
                stem(x)
                start = clock()
                stem(x)
                seconds[name].append(clock() - start)
    return [
        {"stem": name, "least_us": round(1e6 * min(found), 1),
         "middle_us": round(1e6 * statistics.median(found), 1)}
        for name, found in seconds.items()
    ]  # fmt: skip


def _stem(model: nn.Module) -> Any:
    return next(m for m in model.modules() if isinstance(m, nn.Conv2d))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=("train", "compare", "times"))
    parser.add_argument("model", type=Path, nargs="?", default=Path("out/vit"))
    parser.add_argument("--out", type=Path, help="where `train` writes the model")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--seconds", type=float, default=math.inf, help="`train` ends by then")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw pictures for `train`")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pictures", type=int, default=512, help="of `compare`: to calibrate on")
    parser.add_argument("--only", nargs="+", metavar="FORM", help="only these forms")
    parser.add_argument("--rounds", type=int, default=200, help="of `times`")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.what == "train":
        torch.set_num_threads(args.threads)
        photographs.train(
            args.out or args.model, args.steps, args.batch, args.rate, args.device, args.workers, args.seconds,
            lambda: build(args.hidden, args.layers),
        )  # fmt: skip
        return
    if args.what == "times":
        rows = times(args.hidden, args.threads, args.rounds, args.only)
        for row in rows:
            print(json.dumps(row))
    else:
        rows = compare(args.model, args.threads, args.pictures, args.only)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
