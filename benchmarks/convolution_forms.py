"""Forms of a convolutional network, all layers stored alike: bytes, loss and time of each, healed or not.

Part of `convolution.py alike`. Each form is a mix of recipes that the conversion's own encoder carries out with the
statistics of a calibration, healed by the conversion's own healing, and run as a loaded file that was fused.

`chosen 0.25` and its like pick a low rank, Tucker-2 or integers for every 3x3 kernel, so that the convolutions take as
long as with low ranks of that share everywhere and lose least by what the encoder expects. Times are those of a table that
was measured where the file will run (`convolution_prices.py`), or are measured here.
"""

import copy
import itertools
import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import convolution_prices
import torch
import torch.nn.functional as F
from convolution_prices import Prices, chain, integers
from photographs import CALIBRATION_SEED, TEST_SEED, Pictures, accuracy, divergence, logits_of
from torch import nn

from nstf.decomposers import svd
from nstf.runtime.artifact import write_artifact
from nstf.runtime.fused import choose_products, fuse
from nstf.runtime.modules import attach
from nstf.runtime.parameter import EncodedParameter
from nstf_convert.budget import Budget
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.heal.heal import heal
from nstf_convert.pipeline.heal.outputs import RATES
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.candidates import arrays_bytes
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session

# 3x3 kernels of fewer weights are not decomposed where only large ones are.
LARGE = 100_000
# Shares of the multiplications everywhere whose time `chosen` keeps to.
CHOSEN = (0.7, 0.6, 0.5, 0.46, 0.42, 0.38, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)


def chained(method: str, unit: Unit, share: float) -> Recipe:
    """`chain` of a unit."""
    return chain(method, unit.inner_shape, unit.stride, share)


def forms() -> dict[str, Callable[[Unit], Recipe]]:
    """By name: what a tensor is stored as."""
    found: dict[str, Callable[[Unit], Recipe]] = {}
    for bits, group in ((8, 0), (4, 0), (4, 64), (3, 64), (3, 0), (2, 64), (2, 0)):
        found[f"int{bits} {f'g{group}' if group else 'row'}"] = lambda u, b=bits, g=group: integers(b, g)  # type: ignore[misc]
    # Bits alone at the bytes of mixes; trellis codes have no kernel for convolutions, and are decoded.
    for quarters in (4, 5, 6, 8):
        found[f"trellis {quarters / 4:g}"] = lambda u, q=quarters: Recipe("trellis", {"quarter_bits": q})  # type: ignore[misc]
    for quarters in (8, 10, 12):
        found[f"shuffle {quarters / 4:g}"] = lambda u, q=quarters: Recipe("shuffle", {"quarter_bits": q})  # type: ignore[misc]
    for share in (0.55, 0.5, 0.35, 0.25, 0.2):
        found[f"low rank {share} everywhere"] = lambda u, s=share: chained("svd", u, s)  # type: ignore[misc]
        found[f"low rank {share}"] = lambda u, s=share: (  # type: ignore[misc]
            chained("svd", u, s) if u.elements >= LARGE else integers(6, 0)
        )
    for share in (0.35, 0.25):
        found[f"Tucker-2 {share} everywhere"] = lambda u, s=share: chained("tucker", u, s)  # type: ignore[misc]
    return found


def names() -> list[str]:
    """Of all forms."""
    return [*forms(), *(f"chosen {share}" for share in CHOSEN)]


def chosen(
    session: Session, model: nn.Module, units: Sequence[Unit], share: float, prices: Prices | None
) -> dict[str, Recipe]:
    """The mix that takes as long as low ranks of `share` everywhere and is expected to lose least; of the choices of
    each tensor (`convolution_prices.options`) Tucker's and integers' losses are measured. prices: times of
    where it will run; measured here on one thread without them."""
    prices = prices or convolution_prices.measure(model, 1)
    seen = convolution_prices.convolutions(model)
    choices = {u.name: convolution_prices.options(u.inner_shape, u.stride) for u in units}
    made = {
        u.name: {k: r for k, r in choices[u.name].items() if r.method != "svd"} for u in units
    }  # what else there is than low ranks, whose losses one spectrum says
    lost: dict[str, dict[str, float]] = {}
    for unit in units:
        own = {k: session.encoder.encode(unit, r).loss for k, r in made[unit.name].items()}
        lost[unit.name] = own | _losses(session, unit, choices[unit.name])
    seconds = {
        u.name: {
            k: prices.of(r, u.inner_shape, seen[u.name][1], seen[u.name][0].stride)
            for k, r in choices[u.name].items()
        }
        for u in units
    }
    room = sum(seconds[u.name].get(f"svd {share}", seconds[u.name]["int4"]) for u in units)
    found = cheapest(lost, seconds, room)
    facts = {"expected": sum(lost[n][k] for n, k in found.items()), "room_ms": 1e3 * room}
    print(
        json.dumps({**facts, "ms": 1e3 * sum(seconds[n][k] for n, k in found.items()), **found}), flush=True
    )
    return {n: choices[n][k] for n, k in found.items()}


def _losses(session: Session, unit: Unit, choices: Mapping[str, Recipe]) -> dict[str, float]:
    """Expected losses of a tensor's low ranks: what they leave out. Factors are rounded so finely that it counts little
    beside that."""
    ranks = {k: int(r.params["rank"]) for k, r in choices.items() if r.method == "svd"}
    if not ranks:
        return {}
    inner, stats = session.encoder.inputs(unit)
    spectrum = svd.prepare(inner, stats.hessian, stats.row_weight, unit.lead)
    return {k: spectrum.loss(rank) / 2 for k, rank in ranks.items()}


def cheapest(
    lost: Mapping[str, Mapping[str, float]], seconds: Mapping[str, Mapping[str, float]], room: float
) -> dict[str, str]:
    """By tensor: the choice with which all together take at most `room` seconds and lose least, on the lower hull."""

    def best(price: float) -> dict[str, str]:
        return {n: min(own, key=lambda s, n=n: own[s] + price * seconds[n][s]) for n, own in lost.items()}  # type: ignore[misc]

    low, high = 1e-9, 1e15
    for _ in range(100):  # the least price of a second at which it is fast enough
        middle = math.sqrt(low * high)
        slow = sum(seconds[n][s] for n, s in best(middle).items()) > room
        low, high = (middle, high) if slow else (low, middle)
    return best(high)


@dataclass(frozen=True)
class Work:
    """How forms are made. only: their names, None: all. heal_steps: 0 is no healing. pictures: of the calibration, which
    healing learns from as well. code_rate, inputs: of healing. save: a folder for the files. seconds: no form begins
    later. prices: times that `chosen` goes by."""

    only: Sequence[str] | None = None
    heal_steps: Sequence[int] = (0,)
    pictures: int = 1024
    work_dir: Path | None = None
    device: str = "cpu"
    code_rate: float = RATES.code_rate
    inputs: int = RATES.windows
    save: Path | None = None
    seconds: float = math.inf
    prices: Prices | None = None


def compare(folder: Path, how: Work) -> tuple[Any, Any, Any]:
    """(rows, models by name, one picture of 48 x 48)."""
    from safetensors.torch import save_file
    from transformers import ResNetForImageClassification

    until = time.monotonic() + how.seconds
    logging.disable(logging.WARNING)
    model = ResNetForImageClassification.from_pretrained(folder).eval().requires_grad_(False)
    reference = logits_of(model)
    size = 4 * sum(p.numel() for p in model.parameters())
    rows: list[dict[str, Any]] = [{"file": "float32", "bytes": size, "top1": accuracy(reference)}]
    print(rows[0], flush=True)
    models: dict[str, nn.Module] = {"float32": model}
    if unknown := set(how.only or ()) - set(names()):
        raise SystemExit(f"error: there is no form {sorted(unknown)[0]!r}; there are: {', '.join(names())}")
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "pictures.safetensors"
        save_file({"pixel_values": Pictures(test=False).draw(how.pictures, CALIBRATION_SEED)[0]}, str(data))
        options = ConvertOptions(
            str(folder), Path(temporary) / "none.nstf", Budget("ratio", 0.25), (str(data),), prefer="size",
            samples=how.pictures, work_dir=how.work_dir or Path(temporary) / "work", threads=torch.get_num_threads(),
            device=how.device,
        )  # fmt: skip
        with Session(options, Stages(), only_calibrates=True) as session:
            units = [u for u in session.units.values() if u.kept is None and len(u.shape) == 4]
            mixed: dict[str, dict[str, Recipe]] = {}
            # All forms once with each number of steps: when time runs out it is the most steps that are missing.
            for steps, name in itertools.product(how.heal_steps or (0,), how.only or names()):
                if time.monotonic() > until:
                    print(f"{name}, {steps} steps: no time left", flush=True)
                    continue
                if name in forms():
                    mixed[name] = {u.name: forms()[name](u) for u in units}
                elif name not in mixed:
                    mixed[name] = chosen(session, model, units, float(name.split()[1]), how.prices)
                row, load = _row(session, name, mixed[name], steps, how)
                made = _filled(model, session, mixed[name], load)
                logits = logits_of(made)
                row |= {"kld": divergence(logits, reference), "top1": accuracy(logits)}
                row["agree"] = float((logits.argmax(-1) == reference.argmax(-1)).float().mean())
                if how.save is not None:
                    how.save.mkdir(parents=True, exist_ok=True)
                    sources = mixes.sources(session, mixed[name], load)
                    path = how.save / f"{row['file'].replace(',', '').replace(' ', '-')}.nstf"
                    row["saved"] = write_artifact(path, sources, session.checkpoint.files())
                rows.append(row)
                models[row["file"]] = made
                print(json.dumps(row), flush=True)
    return rows, models, Pictures(test=True).draw(1, TEST_SEED)[0]


def _row(
    session: Session, name: str, mix: dict[str, Recipe], steps: int, how: Work
) -> tuple[dict[str, Any], mixes.Loader]:
    """(bytes, and what healing did; what gives the tensors)."""
    load, start = mixes.encoder_loader(session), time.monotonic()
    row: dict[str, Any] = {
        "file": name, "bytes": sum(arrays_bytes(session.units[n], r) for n, r in mix.items()),
    }  # fmt: skip
    if steps:
        row["file"] += f", healed {steps}"
        settings = replace(RATES, code_rate=how.code_rate, windows=how.inputs)
        healed = heal(session, mix, 0.0, steps=steps, settings=settings)
        load, row["healed"] = healed.loader(load), healed.facts["kept"]
        row["steps"], row["score"] = healed.facts["steps"], round(healed.after.score, 5)
        row["seconds"] = round(time.monotonic() - start, 1)
    return row, load


def _filled(model: nn.Module, session: Session, mix: dict[str, Recipe], load: mixes.Loader) -> nn.Module:
    """The model with its tensors as a mix stores them, ready to run from codes."""
    from nstf.kernels.formats import decode

    made = copy.deepcopy(model)
    for name, unit in session.units.items():
        owner, _, local = name.rpartition(".")
        part: Any = made.get_submodule(owner)
        encoded = load(unit, mix.get(name))
        if name in mix:
            attach(part, local, EncodedParameter(encoded, torch.float32))
        elif local in part._parameters:
            part._parameters[local] = nn.Parameter(decode(encoded).float(), requires_grad=False)
    choose_products(made, exact=False)
    fuse(made)
    return made


def enlarged(picture: torch.Tensor, side: int) -> torch.Tensor:
    """A picture as large as networks usually see one, channels last."""
    large = F.interpolate(picture, size=(side, side), mode="bilinear")
    return large.to(memory_format=torch.channels_last)
