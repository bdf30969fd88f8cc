"""Forms of a convolutional network, all layers stored alike: bytes, loss and time of each, healed or not.

Part of `convolution.py alike`. Each form is a mix of recipes that the conversion's own encoder carries out with the
statistics of a calibration, healed by the conversion's own healing, and run as `nstf.runtime.load` runs a file.
"""

import copy
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from photographs import CALIBRATION_SEED, TEST_SEED, Pictures, accuracy, divergence, logits_of
from torch import nn

from nstf.runtime.fused import choose_products
from nstf.runtime.modules import attach
from nstf.runtime.parameter import EncodedParameter
from nstf_convert.budget import Budget
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.heal.heal import heal
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose import chains
from nstf_convert.pipeline.propose.candidates import arrays_bytes
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session

# 3x3 kernels of fewer weights are not decomposed where only large ones are.
LARGE = 100_000


def integers(bits: int, group: int = 64) -> Recipe:
    """Integers with 8-bit scales of groups, or one 16-bit scale a row."""
    return Recipe(
        "int_grid", {"bits": bits, "group": group, "symmetric": True, "scale_bits": 8 if group else 16}
    )


def forms() -> dict[str, Callable[[Unit], Recipe]]:
    """By name: what a tensor is stored as."""

    def chain(method: str, share: float, bits: int, smallest: int) -> Callable[[Unit], Recipe]:
        def form(unit: Unit) -> Recipe:
            shape = unit.inner_shape
            if len(shape) != 4 or shape[2:] != (3, 3) or unit.elements < smallest:
                return integers(bits, 0)
            params = chains.parameters(method, shape, share, unit.stride)
            return (
                integers(bits, 0) if params is None else Recipe(method, params, {"factor": integers(bits, 0)})
            )

        return form

    found: dict[str, Callable[[Unit], Recipe]] = {}
    for bits, group in ((8, 0), (4, 0), (4, 64), (3, 64), (2, 64)):
        found[f"int{bits} {f'g{group}' if group else 'row'}"] = lambda u, b=bits, g=group: integers(b, g)  # type: ignore[misc]
    for share in (0.55, 0.35, 0.25):
        found[f"low rank {share}"] = chain("svd", share, 6, LARGE)
    for share in (0.35, 0.25):
        found[f"low rank {share} everywhere"] = chain("svd", share, 6, 0)
    found["Tucker-2 0.35"] = chain("tucker", 0.35, 6, LARGE)
    return found


def compare(
    folder: Path, only: list[str] | None, heal_steps: int, pictures: int, work: Path | None
) -> tuple[Any, Any, Any]:
    """(rows, models by name, one picture of 48 x 48). heal_steps: 0 is no healing. pictures: of the calibration, which
    healing learns from as well."""
    from safetensors.torch import save_file
    from transformers import ResNetForImageClassification

    logging.disable(logging.WARNING)
    model = ResNetForImageClassification.from_pretrained(folder).eval().requires_grad_(False)
    reference = logits_of(model)
    size = 4 * sum(p.numel() for p in model.parameters())
    rows: list[dict[str, Any]] = [{"file": "float32", "bytes": size, "top1": accuracy(reference)}]
    models: dict[str, nn.Module] = {"float32": model}
    unknown = set(only or ()) - set(forms())
    if unknown:
        raise SystemExit(f"error: there is no form {sorted(unknown)[0]!r}; there are: {', '.join(forms())}")
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "pictures.safetensors"
        save_file({"pixel_values": Pictures(test=False).draw(pictures, CALIBRATION_SEED)[0]}, str(data))
        options = ConvertOptions(
            str(folder), Path(temporary) / "none.nstf", Budget("ratio", 0.25), (str(data),), prefer="size",
            samples=pictures, work_dir=work or Path(temporary) / "work", threads=torch.get_num_threads(),
        )  # fmt: skip
        with Session(options, Stages(), may_drop=False) as session:
            session.wait_for_kernels()
            units = [u for u in session.units.values() if u.kept is None and len(u.shape) == 4]
            for name, form in forms().items():
                if only and name not in only:
                    continue
                mix = {u.name: form(u) for u in units}
                load = mixes.encoder_loader(session)
                row: dict[str, Any] = {
                    "file": name,
                    "bytes": sum(arrays_bytes(u, mix[u.name]) for u in units),
                }
                if heal_steps:
                    healed = heal(session, mix, 0.0, steps=heal_steps)
                    load, row["healed"] = healed.loader(load), healed.facts["kept"]
                models[name] = _filled(model, session, mix, load)
                logits = logits_of(models[name])
                row |= {"kld": divergence(logits, reference), "top1": accuracy(logits)}
                rows.append(row)
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
    return made


def enlarged(picture: torch.Tensor, side: int) -> torch.Tensor:
    """A picture as large as networks usually see one, channels last."""
    large = F.interpolate(picture, size=(side, side), mode="bilinear")
    return large.to(memory_format=torch.channels_last)
