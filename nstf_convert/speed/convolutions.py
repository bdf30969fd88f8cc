"""Seconds of whole convolutions, chains of a decomposition included, at the size of image that the model gives each.

What a convolution takes depends on the image more than on the weight, so a layer is timed as it is: one image, random codes,
the kernels of `nstf.kernels.convolution`, a chain's stages in one call as `nstf.runtime.fused` runs them. Formats of one
layer are timed in turn. Where the target is not
here, a layer takes as many products of one row as it has pixels, divided by what several rows at once save.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from nstf.kernels.convolution import Geometry, convolve, multiplications, stages
from nstf.kernels.cpu import convolution as cpu
from nstf.kernels.formats import EncodedTensor, Node, node_to_json, stored_bytes
from nstf.kernels.formats.tree import Shape
from nstf_convert.speed.measure import Pool, clock_for, pool_bytes, typical, using

log = logging.getLogger("nstf")

ROUNDS = 7
# Rows of activations at once against one: a row of codes is read and unpacked for all of them.
SEVERAL = 8.0
# Bytes of weights that are held to be timed in turn; and of one weight: as stored (float32 at most), and what kernels make
# of its parts (a byte each).
AT_ONCE = 1 << 28
WEIGHT_BYTES = 5


@dataclass(frozen=True)
class Layer:
    """A convolution of the model. shape: its weight's, [out, channels / groups, kh, kw]; image: height, width."""

    shape: Shape
    geometry: Geometry
    image: tuple[int, int]

    @property
    def pixels(self) -> int:
        """Of the result."""
        own, kernel = self.geometry, self.shape[2:]
        sides = (
            (
                self.image[i]
                + own.padding[2 * i]
                + own.padding[2 * i + 1]
                - own.dilation[i] * (kernel[i] - 1)
                - 1
            )
            // own.stride[i]
            + 1
            for i in (0, 1)
        )
        return math.prod(sides)

    def key(self, tree: Node) -> str:
        """Of a measurement, as a file's."""
        text = json.dumps(node_to_json(tree), sort_keys=True, separators=(",", ":"))
        own = self.geometry
        return f"conv {text} {self.shape} {self.image} {own.stride} {own.padding} {own.dilation} {own.groups}"


def layers_of(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, Layer]:
    """The convolutions over one or two axes of a model on the meta device, by the name of their weight. inputs: those of one
    forward, on the meta device. A model whose forward needs values gives those that were reached before it did."""
    found: dict[str, Layer] = {}
    hooks = []

    def note(name: str, part: Any, given: Any) -> None:
        sides, shape = len(part.kernel_size), tuple(given[0].shape)
        if len(shape) != sides + 2 or part.padding_mode != "zeros":
            return
        around = part._reversed_padding_repeated_twice
        one = sides == 1
        own = Geometry(
            (1, *part.stride) if one else part.stride,
            (0, 0, around[0], around[1]) if one else (around[2], around[3], around[0], around[1]),
            (1, *part.dilation) if one else part.dilation,
            part.groups,
        )
        weight = tuple(part.weight.shape)
        found[f"{name}.weight"] = Layer(
            (*weight[:2], 1, weight[2]) if one else weight,
            own,
            (1, shape[2]) if one else (shape[2], shape[3]),
        )

    for name, part in module.named_modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d):
            hooks.append(part.register_forward_pre_hook(lambda m, given, name=name: note(name, m, given)))
    try:
        with torch.no_grad():
            module(**inputs)
    except (
        Exception
    ) as error:  # a model's own code, without values and perhaps without inputs that it expects
        log.debug("convolutions after %s are priced as products with one row: %s", list(found)[-1:], error)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def measure(layer: Layer, trees: Sequence[Node], isa: str, threads: int, size_bytes: int) -> list[float]:
    """Seconds of a layer with its weight stored as each of the trees, so many in turn as AT_ONCE holds. size_bytes: of the
    whole model's weights."""
    pool = Pool(size_bytes)
    at_once = max(1, AT_ONCE // (WEIGHT_BYTES * math.prod(layer.shape)))
    found = []
    for start in range(0, len(trees), at_once):
        found += _measure(layer, trees[start : start + at_once], isa, threads, pool)
    return found


def _measure(layer: Layer, trees: Sequence[Node], isa: str, threads: int, pool: Pool) -> list[float]:
    x = torch.rand(1, layer.shape[1] * layer.geometry.groups, *layer.image)
    times: list[list[float]] = [[] for _ in trees]
    before, clock = torch.get_num_threads(), clock_for(threads)
    torch.set_num_threads(threads)
    try:
        with using(isa), torch.inference_mode():
            ways = [way_of(x, pool.filled(tree, layer.shape), layer.geometry) for tree in trees]
            pairs = list(zip(times, ways, strict=True))
            # The library's own come last: its threads look for more work for milliseconds after each call, on the cores that
            # the next way wants. A chain beside them seemed to take a third longer.
            for part in ([p for p in pairs if p[1].ours], [p for p in pairs if not p[1].ours]):
                for turn in range(ROUNDS + 1 if part else 0):
                    pool.pass_by()
                    for found, way in part:
                        start = clock()
                        way.run()
                        if turn:  # what is made at the first use is not counted
                            found.append(clock() - start)
    finally:
        torch.set_num_threads(before)
    return [typical(found) for found in times]


class Way(NamedTuple):
    """A layer stored in one way. ours: whether the extension runs all of it."""

    run: Callable[[], object]
    ours: bool


def way_of(x: torch.Tensor, encoded: EncodedTensor, geometry: Geometry) -> Way:
    """What is timed. Python between the stages of a chain took as long as a stage, and is not there where layers are run
    together."""
    made = stages(encoded, geometry) if cpu.available() else None
    if made is None:
        return Way(lambda: convolve(x, encoded, None, geometry), False)
    together = cpu.in_turn(made)
    if together.run(x) is None:
        raise ValueError(f"images {list(x.shape)} do not fit these convolutions")
    return Way(lambda: together.run(x), True)


def modelled(layer: Layer, tree: Node, product_seconds: float) -> float:
    """Seconds on a machine that is not here, from those of a product of the whole matrix with one row."""
    share = multiplications(tree, layer.shape, layer.geometry.stride) / math.prod(layer.shape)
    return product_seconds * max(1.0, share * layer.pixels / SEVERAL)


def pool_key(layer: Layer, tree: Node, size_bytes: int) -> str:
    """A measurement's key, with the caches that it was made with."""
    return f"{pool_bytes(size_bytes)} {layer.key(tree)} {stored_bytes(tree, layer.shape)}"
