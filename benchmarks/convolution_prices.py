"""Seconds of single convolutions by what they are stored as: what `convolution.py alike` chooses by.

A table is measured where its file will run (`convolution.py prices MODEL --json FILE`) and may be taken to where networks
are healed (`alike --prices FILE`). Times do not depend on what weights say: random codes do, and the model need not be
trained. A chain's stages are timed in one call, as they run in a fused model.
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
from torch import nn

from nstf.decomposers import chains
from nstf.proposals import Recipe
from nstf.runtime.modules import geometry_of
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.speed.convolutions import way_of
from nstf_convert.speed.measure import Pool

# Shares of the multiplications of a 3x3 kernel that are measured; integers beside them.
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.38, 0.42, 0.46, 0.5, 0.6, 0.7)
TUCKER_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.45)
# Of factors, and of what is stored as integers: with AVX2 fewer bits are faster, since more products add up in 16 bits.
FACTOR_BITS, INTEGER_BITS = 5, (4, 5, 6)
LARGE_SIDE, ROUNDS = 224, 40


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
    """A decomposition of a 3x3 kernel at a share of its multiplications, its factors in FACTOR_BITS; other tensors, and
    kernels without one, are such integers themselves."""
    shape = tuple(shape)
    params = None
    if shape[2:] == (3, 3):
        low_rank = method == "svd"
        params = (
            chains.low_rank_params(shape, share) if low_rank else chains.tucker_params(shape, share, stride)
        )
    factor = integers(FACTOR_BITS, 0)
    return factor if params is None else Recipe(method, params, {"factor": factor})


def options(shape: Sequence[int], stride: tuple[int, ...]) -> dict[str, Recipe]:
    """What `chosen` picks from, by name: "svd 0.25", "tucker 0.25", "int4"."""
    plain = {f"int{bits}": integers(bits, 0) for bits in INTEGER_BITS}
    if tuple(shape[2:]) != (3, 3):
        return plain
    found = {f"svd {s}": chain("svd", shape, stride, s) for s in SHARES}
    for share in TUCKER_SHARES:
        recipe = chain("tucker", shape, stride, share)
        if recipe.method == "tucker":
            # Bases as the unfoldings have them: what turns would gain, healing gains too.
            found[f"tucker {share}"] = replace(recipe, params={**recipe.params, "iterations": 0})
    return found | plain


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
    """Of every convolution in each of its forms, channels first, without what follows it: the least of some rounds, in which
    the forms take turns. With one thread by processor time, else by the clock: that wants an idle machine."""
    clock = time.process_time if threads == 1 else time.perf_counter
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    pool = Pool(4 * sum(p.numel() for p in model.parameters()))
    seconds: dict[str, float] = {}
    try:
        with torch.inference_mode():
            for module, image in convolutions(model).values():
                shape, stride = tuple(module.weight.shape), tuple(module.stride)
                forms = {key(r, shape, image, stride): r for r in options(shape, stride).values()}
                x, geometry = torch.rand(image), geometry_of(module)
                ways = {
                    name: way_of(x, pool.filled(recipes.tree_of(r, shape, 1), shape), geometry).run
                    for name, r in forms.items() if name not in seconds
                }  # fmt: skip
                for turn in range(ROUNDS if ways else 0):
                    pool.pass_by()
                    first = turn % len(ways)  # whoever comes first finds its codes and the image in memory
                    for name in (*ways, *ways)[first : first + len(ways)]:
                        start = clock()
                        ways[name]()
                        seconds[name] = min(seconds.get(name, math.inf), clock() - start)
    finally:
        torch.set_num_threads(before)
    return Prices(processor(), threads, seconds)


def processor() -> str:
    """The processor's name, as far as the system knows it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
