"""Forms of a convolutional network, all layers stored alike: bytes, loss and time of each, healed or not.

Part of `convolution.py alike`. Each form is a mix of recipes that the conversion's own encoder carries out with the
statistics of a calibration, healed by the conversion's own healing, and run as a loaded file that was fused.

`chosen 0.25` and its like pick the share of every 3x3 kernel, or integers, so that the convolutions take as long as with
low ranks of that share everywhere and lose least by what the encoder expects; times are measured where this runs.
"""

import copy
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from photographs import CALIBRATION_SEED, TEST_SEED, Pictures, accuracy, divergence, logits_of
from torch import nn

from nstf.kernels.convolution import convolve
from nstf.runtime.fused import choose_products, fuse
from nstf.runtime.modules import attach, geometry_of
from nstf.runtime.parameter import EncodedParameter
from nstf_convert.budget import Budget
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.heal.heal import heal
from nstf_convert.pipeline.heal.outputs import RATES
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose import chains
from nstf_convert.pipeline.propose.candidates import arrays_bytes
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session

# 3x3 kernels of fewer weights are not decomposed where only large ones are.
LARGE = 100_000
# Shares of the multiplications that `chosen` picks from, and those whose time it keeps to.
SHARES = (0.15, 0.2, 0.25, 0.35, 0.5, 0.7)
CHOSEN = (0.35, 0.25, 0.2)
LARGE_SIDE, ROUNDS = 224, 5


def integers(bits: int, group: int = 64) -> Recipe:
    """Integers with 8-bit scales of groups, or one 16-bit scale a row."""
    return Recipe(
        "int_grid", {"bits": bits, "group": group, "symmetric": True, "scale_bits": 8 if group else 16}
    )


def chain(method: str, unit: Unit, share: float) -> Recipe:
    """A decomposition of a 3x3 kernel at a share of its multiplications, its factors in 6 bits; other tensors, and kernels
    without one, are such integers themselves."""
    shape = unit.inner_shape
    params = chains.parameters(method, shape, share, unit.stride) if shape[2:] == (3, 3) else None
    return integers(6, 0) if params is None else Recipe(method, params, {"factor": integers(6, 0)})


def forms() -> dict[str, Callable[[Unit], Recipe]]:
    """By name: what a tensor is stored as."""
    found: dict[str, Callable[[Unit], Recipe]] = {}
    for bits, group in ((8, 0), (4, 0), (4, 64), (3, 64), (3, 0), (2, 64)):
        found[f"int{bits} {f'g{group}' if group else 'row'}"] = lambda u, b=bits, g=group: integers(b, g)  # type: ignore[misc]
    for share in (0.55, 0.5, 0.35, 0.25, 0.2):
        found[f"low rank {share} everywhere"] = lambda u, s=share: chain("svd", u, s)  # type: ignore[misc]
        found[f"low rank {share}"] = lambda u, s=share: (  # type: ignore[misc]
            chain("svd", u, s) if u.elements >= LARGE else integers(6, 0)
        )
    found["Tucker-2 0.35"] = lambda u: chain("tucker", u, 0.35) if u.elements >= LARGE else integers(6, 0)
    return found


def names() -> list[str]:
    """Of all forms."""
    return [*forms(), *(f"chosen {share}" for share in CHOSEN)]


def chosen(session: Session, model: nn.Module, units: Sequence[Unit], share: float) -> dict[str, Recipe]:
    """The mix that takes as long as low ranks of `share` everywhere and is expected to lose least."""
    shares = (*SHARES, math.inf)
    options = {u.name: [_option(u, s) for s in shares] for u in units}
    lost: dict[str, list[float]] = {u.name: [] for u in units}
    for i in range(len(shares)):
        done = session.encoder.encode_all([(u, options[u.name][i]) for u in units], lambda unit: None)
        for name, result in done.items():
            lost[name].append(result.loss)
    seconds = _seconds(session, model, options, units)
    room = sum(seconds[u.name][shares.index(share)] for u in units)

    def best(price: float) -> dict[str, int]:
        return {
            n: min(range(len(shares)), key=lambda i, n=n: lost[n][i] + price * seconds[n][i])  # type: ignore[misc]
            for n in options
        }

    low, high = 1e-9, 1e15
    for _ in range(100):  # the least price of a second at which it is fast enough
        middle = math.sqrt(low * high)
        slow = sum(seconds[n][i] for n, i in best(middle).items()) > room
        low, high = (middle, high) if slow else (low, middle)
    found = best(high)
    mix = {n: options[n][i] for n, i in found.items()}
    print({n: shares[found[n]] if r.method == "svd" else "int6" for n, r in mix.items()}, flush=True)
    return mix


def _option(unit: Unit, share: float) -> Recipe:
    return integers(6, 0) if share > 1 else chain("svd", unit, share)


def _seconds(
    session: Session, model: nn.Module, options: Mapping[str, Sequence[Recipe]], units: Sequence[Unit]
) -> dict[str, list[float]]:
    """Of each convolution in each of its forms, on one thread, for what it sees of a picture of 224 x 224."""
    shapes: dict[str, torch.Size] = {}
    hooks = [
        m.register_forward_pre_hook(lambda _, given, n=n: shapes.update({f"{n}.weight": given[0].shape}))  # type: ignore[misc]
        for n, m in model.named_modules() if isinstance(m, nn.Conv2d)
    ]  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[tuple[Any, ...], float] = {}  # layers that are alike are timed once
    out: dict[str, list[float]] = {}
    try:
        with torch.inference_mode():
            model(pixel_values=torch.zeros(1, 3, LARGE_SIDE, LARGE_SIDE))
            for unit in units:
                module: Any = model.get_submodule(unit.name.rpartition(".")[0])
                image = torch.randn(shapes[unit.name]).relu().to(memory_format=torch.channels_last)
                kinds = [
                    (str(r.to_json()), unit.shape, image.shape, module.stride) for r in options[unit.name]
                ]
                for kind, recipe in zip(kinds, options[unit.name], strict=True):
                    if kind not in found:
                        weight, geometry = session.encoder.load(unit, recipe), geometry_of(module)
                        found[kind] = _least(lambda w=weight, g=geometry, x=image: convolve(x, w, None, g))  # type: ignore[misc]
                out[unit.name] = [found[kind] for kind in kinds]
    finally:
        torch.set_num_threads(threads)
        for hook in hooks:
            hook.remove()
    return out


def _least(way: Callable[[], object]) -> float:
    """Seconds of processor time, the least of some rounds after one that warms up."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        way()
        times.append(time.process_time() - start)
    return min(times[1:])


def compare(
    folder: Path,
    only: list[str] | None,
    heal_steps: Sequence[int],
    pictures: int,
    work: Path | None,
    device: str = "cpu",
    code_rate: float = RATES.code_rate,
    inputs: int = RATES.windows,
) -> tuple[Any, Any, Any]:
    """(rows, models by name, one picture of 48 x 48). heal_steps: 0 is no healing. pictures: of the calibration, which
    healing learns from as well. code_rate, inputs: of healing."""
    from safetensors.torch import save_file
    from transformers import ResNetForImageClassification

    logging.disable(logging.WARNING)
    model = ResNetForImageClassification.from_pretrained(folder).eval().requires_grad_(False)
    reference = logits_of(model)
    size = 4 * sum(p.numel() for p in model.parameters())
    rows: list[dict[str, Any]] = [{"file": "float32", "bytes": size, "top1": accuracy(reference)}]
    print(rows[0], flush=True)
    models: dict[str, nn.Module] = {"float32": model}
    if unknown := set(only or ()) - set(names()):
        raise SystemExit(f"error: there is no form {sorted(unknown)[0]!r}; there are: {', '.join(names())}")
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "pictures.safetensors"
        save_file({"pixel_values": Pictures(test=False).draw(pictures, CALIBRATION_SEED)[0]}, str(data))
        options = ConvertOptions(
            str(folder), Path(temporary) / "none.nstf", Budget("ratio", 0.25), (str(data),), prefer="size",
            samples=pictures, work_dir=work or Path(temporary) / "work", threads=torch.get_num_threads(), device=device,
        )  # fmt: skip
        with Session(options, Stages(), may_drop=False) as session:
            session.wait_for_kernels()
            units = [u for u in session.units.values() if u.kept is None and len(u.shape) == 4]
            for name in only or names():
                if name in forms():
                    mix = {u.name: forms()[name](u) for u in units}
                else:
                    mix = chosen(session, model, units, float(name.split()[1]))
                size = sum(arrays_bytes(u, mix[u.name]) for u in units)
                for steps in heal_steps or (0,):
                    load, start = mixes.encoder_loader(session), time.monotonic()
                    row: dict[str, Any] = {"file": name, "bytes": size}
                    if steps:
                        row["file"] += f", healed {steps}"
                        settings = replace(RATES, code_rate=code_rate, windows=inputs)
                        healed = heal(session, mix, 0.0, steps=steps, settings=settings)
                        load, row["healed"] = healed.loader(load), healed.facts["kept"]
                        row["steps"], row["score"] = healed.facts["steps"], round(healed.after.score, 5)
                        row["seconds"] = round(time.monotonic() - start, 1)
                    made = _filled(model, session, mix, load)
                    logits = logits_of(made)
                    row |= {"kld": divergence(logits, reference), "top1": accuracy(logits)}
                    row["agree"] = float((logits.argmax(-1) == reference.argmax(-1)).float().mean())
                    rows.append(row)
                    models[row["file"]] = made
                    print(row, flush=True)
    return rows, models, Pictures(test=True).draw(1, TEST_SEED)[0]


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
