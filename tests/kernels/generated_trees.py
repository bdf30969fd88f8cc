"""Random valid trees over every kind, nested in every way that shapes allow; not only those that the converter writes."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from nstf.kernels.formats import FormatError, Node, array_specs, stored_bytes
from nstf.kernels.formats.tensor_train import max_ranks
from nstf.kernels.formats.tree import Shape, format_of

Draw = Callable[[random.Random, Shape], dict[str, Any]]
MOST_BYTES = 1 << 18
SIDES = (1, 2, 3, 4, 8, 12, 16, 20, 32, 33, 48, 64, 96)


def _lead(rng: random.Random, shape: Shape) -> int:
    """Mostly what a matrix has; sometimes another split of the axes into rows and columns."""
    return 1 if rng.random() < 0.7 else rng.randint(0, len(shape))


def _view(rng: random.Random, shape: Shape) -> tuple[int, ...]:
    """2 to 4 axes of as many elements; with and without a split where the rows of a matrix end."""
    if rng.random() < 0.4 and len(shape) >= 2:
        return tuple(shape)
    view, left = [], math.prod(shape)
    for _ in range(rng.randint(1, 3)):
        divisors = [d for d in range(1, left + 1) if left % d == 0]
        view.append(rng.choice(divisors))
        left //= view[-1]
    return (*view, left)


def _permutation(rng: random.Random, shape: Shape) -> dict[str, Any]:
    return {"dims": tuple(rng.sample(range(len(shape)), len(shape)))}


def _cp(rng: random.Random, shape: Shape) -> dict[str, Any]:
    view = _view(rng, shape)
    return {"rank": rng.randint(1, min(4, math.prod(view) // max(view))), "view": view}


def _tucker(rng: random.Random, shape: Shape) -> dict[str, Any]:
    view = _view(rng, shape)
    return {"ranks": tuple(rng.choice((size, rng.randint(1, size))) for size in view), "view": view}


def _tensor_train(rng: random.Random, shape: Shape) -> dict[str, Any]:
    view = _view(rng, shape)
    return {"ranks": tuple(rng.randint(1, min(3, most)) for most in max_ranks(view)), "view": view}


LEAVES: dict[str, Draw] = {
    "dense": lambda rng, _: {"dtype": rng.choice(("float32", "float16", "bfloat16"))},
    "int": lambda rng, shape: {
        "bits": rng.randint(2, 8),
        "group": rng.choice((0, 8, 16, 24, 32, 64)),
        "symmetric": rng.random() < 0.5,
        "scale_bits": rng.choice((8, 16)),
        "lead": _lead(rng, shape),
    },
    "grid": lambda rng, shape: {
        "group": rng.choice((0, 8, 32, 64)),
        "scale_bits": rng.choice((8, 16)),
        "lead": _lead(rng, shape),
    },
    "fp8": lambda rng, shape: {
        "variant": rng.choice(("e4m3fn", "e4m3fnuz")),
        "group": rng.choice((0, 16, 32)),
        "scale_bits": rng.choice((16, 32)),
        "lead": _lead(rng, shape),
    },
    "mxfp4": lambda rng, shape: {"lead": _lead(rng, shape)},
    "shuffle": lambda rng, shape: {
        "quarter_bits": rng.randint(8, 20),
        "scale_bits": rng.choice((8, 16)),
        "lead": _lead(rng, shape),
    },
    "trellis": lambda rng, shape: {
        "quarter_bits": (rng.randint(4, 24),),
        "scale_bits": rng.choice((8, 16)),
        "lead": _lead(rng, shape),
    },
}
NODES: dict[str, Draw] = {
    "add": lambda rng, _: {},
    "permute": _permutation,
    "low_rank": lambda rng, shape: {"rank": rng.randint(1, 6), "lead": _lead(rng, shape)},
    "rotated": lambda rng, shape: {
        "block_in": rng.choice((0, 32, 64)),
        "block_out": rng.choice((0, 0, 32)),
        "seed": rng.randrange(1 << 31),
        "lead": _lead(rng, shape),
    },
    "cp": _cp,
    "tucker": _tucker,
    "tensor_train": _tensor_train,
}


def tree_of(
    rng: random.Random, shape: Shape, depth: int, kind: str | None = None, below: str | None = None
) -> Node:
    """A tree for a tensor of `shape`, at most `depth` nodes above its leaves; kind: of its root; below: of its children,
    where such a one fits."""
    for _ in range(100):
        chosen = kind or rng.choice([*LEAVES, *NODES, *NODES] if depth else [*LEAVES])
        draw = {**LEAVES, **NODES}[chosen]
        module = format_of(chosen)
        try:
            params = module.Params(**draw(rng, shape))
            shapes = module.children(params, shape)
            children = {name: tree_of(rng, inner, depth - 1, below) for name, inner in shapes.items()}
            tree = Node(chosen, params, children)
            array_specs(tree, shape)
        except (FormatError, ValueError):  # parameters that do not fit this shape: draw others
            continue
        return tree
    return Node("dense", format_of("dense").Params("float32"))


def trees(seed: int) -> Iterator[tuple[Node, tuple[int, int]]]:
    """Trees for matrices without end, every kind as the root in turn, up to three nodes deep."""
    rng = random.Random(seed)
    while True:
        for kind in (*LEAVES, *NODES):
            shape = (rng.choice(SIDES), rng.choice(SIDES))
            tree = tree_of(rng, shape, rng.randint(1, 3), kind)
            if stored_bytes(tree, shape) <= MOST_BYTES:
                yield tree, shape


def pairs() -> Iterator[tuple[Node, tuple[int, int]]]:
    """Every node above every kind."""
    rng = random.Random(0)
    for parent in NODES:
        for child in (*LEAVES, *NODES):
            while True:
                shape = (rng.choice(SIDES), rng.choice(SIDES))
                tree = tree_of(rng, shape, 2, parent, child)
                if stored_bytes(tree, shape) <= MOST_BYTES and (parent, child) in kinds_in(tree):
                    yield tree, shape
                    break


def kinds_in(tree: Node) -> set[tuple[str, str]]:
    """Every (kind, kind of a child) inside; ("", kind) for the root."""
    found = {("", tree.kind)}
    for child in tree.children.values():
        found |= {(tree.kind, child.kind)} | {pair for pair in kinds_in(child) if pair[0]}
    return found
