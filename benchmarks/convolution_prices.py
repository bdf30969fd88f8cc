"""Seconds of single convolutions by what they are stored as: what `convolution.py alike` chooses by.

A table is measured where its file will run (`convolution.py prices MODEL --json FILE`) and may be taken to where networks
are healed (`alike --prices FILE`). Times do not depend on what weights say: random ones do, and the model need not be
trained.
"""

import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nstf.decomposers import chains
from nstf.kernels.convolution import Geometry, convolve
from nstf.kernels.formats import EncodedTensor
from nstf.proposals import Recipe
from nstf.quantizers.stats import Stats
from nstf.runtime.modules import geometry_of
from nstf_convert.pipeline.propose import recipe as recipes

# Shares of the multiplications of a 3x3 kernel that are measured; integers beside them.
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.38, 0.42, 0.5, 0.6, 0.7)
TUCKER_SHARES = (0.05, 0.1, 0.15, 0.25, 0.35)
LARGE_SIDE, ROUNDS = 224, 15


@dataclass(frozen=True)
class Prices:
    """seconds: by `key`; machine, threads: where and how they were measured."""

    machine: str
    threads: int
    seconds: dict[str, float]

    def of(self, recipe: Recipe, shape: Sequence[int], image: Sequence[int], stride: Sequence[int]) -> float:
        """Raises SystemExit for what was not measured."""
        name = key(recipe, shape, image, stride)
        if name not in self.seconds:
            raise SystemExit(
                f"error: the table of times has no {name}; measure it again with `convolution.py prices`"
            )
        return self.seconds[name]

    def write(self, path: Path) -> None:
        facts = {"machine": self.machine, "threads": self.threads, "seconds": self.seconds}
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Prices:
    """A table that `Prices.write` left."""
    return Prices(**json.loads(path.read_text(encoding="utf-8")))


def key(recipe: Recipe, shape: Sequence[int], image: Sequence[int], stride: Sequence[int]) -> str:
    """Names a recipe of a weight [out, in, height, width] on an image [batch, in, height, width]."""
    return json.dumps([recipe.to_json(), list(shape), list(image), list(stride)], sort_keys=True)


def integers(bits: int, group: int = 64) -> Recipe:
    """Integers with 8-bit scales of groups, or one 16-bit scale a row (group 0)."""
    return Recipe(
        "int_grid", {"bits": bits, "group": group, "symmetric": True, "scale_bits": 8 if group else 16}
    )


def chain(method: str, shape: Sequence[int], stride: tuple[int, ...], share: float) -> Recipe:
    """A decomposition of a 3x3 kernel at a share of its multiplications, its factors in 6 bits; other tensors, and kernels
    without one, are such integers themselves."""
    shape = tuple(shape)
    params = None
    if shape[2:] == (3, 3):
        low_rank = method == "svd"
        params = (
            chains.low_rank_params(shape, share) if low_rank else chains.tucker_params(shape, share, stride)
        )
    return integers(6, 0) if params is None else Recipe(method, params, {"factor": integers(6, 0)})


def options(shape: Sequence[int], stride: tuple[int, ...]) -> dict[str, Recipe]:
    """What `chosen` picks from, by name: "svd 0.25", "tucker 0.25", "integers"."""
    if tuple(shape[2:]) != (3, 3):
        return {"integers": integers(6, 0)}
    found = {f"svd {s}": chain("svd", shape, stride, s) for s in SHARES}
    for share in TUCKER_SHARES:
        recipe = chain("tucker", shape, stride, share)
        if recipe.method == "tucker":
            # Bases as the unfoldings have them: what turns would gain, healing gains too.
            found[f"tucker {share}"] = replace(recipe, params={**recipe.params, "iterations": 0})
    return {**found, "integers": integers(6, 0)}


def convolutions(model: nn.Module) -> dict[str, tuple[Any, torch.Size]]:
    """(module, shape of what it sees of a picture of 224 x 224) by name of the weight."""
    found: dict[str, tuple[Any, torch.Size]] = {}
    hooks = [
        m.register_forward_pre_hook(lambda m, given, n=n: found.update({f"{n}.weight": (m, given[0].shape)}))  # type: ignore[misc]
        for n, m in model.named_modules() if isinstance(m, nn.Conv2d)
    ]  # fmt: skip
    try:
        with torch.inference_mode():
            model(pixel_values=torch.zeros(1, 3, LARGE_SIDE, LARGE_SIDE))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def measure(model: nn.Module, threads: int) -> Prices:
    """Of every convolution in each of its forms, channels last, without what follows it. With one thread by processor
    time, else by the clock: that wants an idle machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    seconds: dict[str, float] = {}
    try:
        with torch.inference_mode():
            for module, image in convolutions(model).values():
                shape, stride = tuple(module.weight.shape), tuple(module.stride)
                forms = {key(r, shape, image, stride): r for r in options(shape, stride).values()}
                wanted = {n: r for n, r in forms.items() if n not in seconds}
                if wanted:
                    weight = torch.randn(shape) / math.sqrt(math.prod(shape[1:]))
                    made = {n: recipes.encode(r, weight, Stats(), 1) for n, r in wanted.items()}
                    x = torch.randn(image).relu().to(memory_format=torch.channels_last)
                    seconds |= _times(made, x, geometry_of(module), threads)
    finally:
        torch.set_num_threads(before)
    return Prices(processor(), threads, seconds)


def _times(made: dict[str, EncodedTensor], x: Tensor, geometry: Geometry, threads: int) -> dict[str, float]:
    """The least of some rounds, in which the forms take turns."""
    clock = time.process_time if threads == 1 else time.perf_counter
    least = dict.fromkeys(made, math.inf)
    for _ in range(ROUNDS + 1):
        for name, weight in made.items():
            start = clock()
            convolve(x, weight, None, geometry)
            least[name] = min(least[name], clock() - start)
    return least


def processor() -> str:
    """The processor's name, as far as the system knows it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
