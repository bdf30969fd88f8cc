"""Random trees of every kind, with arrays made from the specs alone: a new kind costs one line."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nstf.kernels.formats import EncodedTensor, Node, array_specs, node_from_json

LEAVES: list[dict[str, Any]] = [
    {"kind": "dense", "dtype": "bfloat16"},
    {"kind": "dense", "dtype": "float64"},
    {"kind": "dense", "dtype": "bool"},
    {"kind": "int", "bits": 3, "group": 8},
    {"kind": "int", "bits": 5, "group": 0, "symmetric": False, "scale_bits": 8},
    {"kind": "grid", "group": 16},
    {"kind": "fp8", "scale_bits": 32},
    {"kind": "mxfp4"},
]


def random_node(rng: random.Random, shape: tuple[int, ...], depth: int = 2) -> dict[str, Any]:
    """The JSON of a tree for a tensor of `shape`."""
    if not shape:
        return rng.choice(LEAVES[:3])
    kinds = ["leaf", "leaf", "add", "permute", "low_rank", "cp", "tucker", "tensor_train"]
    kind = rng.choice(kinds) if depth and len(shape) > 1 else "leaf"

    def below(*child_shape: int) -> dict[str, Any]:
        return random_node(rng, child_shape, depth - 1)

    if kind == "add":
        return {"kind": "add", "children": {"x": below(*shape), "y": below(*shape)}}
    if kind == "permute":
        dims = rng.sample(range(len(shape)), len(shape))
        stored = [0] * len(shape)
        for axis, source in enumerate(dims):
            stored[source] = shape[axis]
        return {"kind": "permute", "dims": dims, "children": {"x": below(*stored)}}
    if kind == "low_rank":
        cols = 1
        for size in shape[1:]:
            cols *= size
        rank = rng.randint(1, min(shape[0], cols))
        return {"kind": kind, "rank": rank, "children": {"a": below(shape[0], rank), "b": below(rank, cols)}}
    if kind == "cp":
        factors = {f"factor{i}": below(size, 1) for i, size in enumerate(shape)}
        return {"kind": kind, "rank": 1, "view": list(shape), "children": factors}
    if kind == "tucker":
        ranks = [1, *shape[1:]] if shape[0] > 1 else list(shape)
        children = {"core": below(*ranks)}
        if shape[0] > 1:
            children["factor0"] = below(shape[0], 1)
        return {"kind": kind, "ranks": ranks, "view": list(shape), "children": children}
    if kind == "tensor_train":
        cores = {f"core{i}": below(1, size, 1) for i, size in enumerate(shape)}
        return {"kind": kind, "ranks": [1] * (len(shape) - 1), "view": list(shape), "children": cores}
    return dict(rng.choice(LEAVES))


def random_arrays(rng: random.Random, tree: Node, shape: tuple[int, ...]) -> EncodedTensor:
    """The tree with arrays of random finite values."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    arrays = {}
    for path, spec in array_specs(tree, shape).items():
        if spec.dtype.is_floating_point:
            arrays[path] = torch.randn(spec.shape, generator=generator).to(spec.dtype)
        else:
            high = 2 if spec.dtype == torch.bool else 127
            arrays[path] = torch.randint(0, high, spec.shape, generator=generator).to(spec.dtype)
    return EncodedTensor(tree, shape, arrays)


@pytest.fixture(scope="session")
def random_tensor() -> Callable[[int], EncodedTensor]:
    """random_tensor(seed): an encoded tensor with a random tree."""

    def make(seed: int) -> EncodedTensor:
        rng = random.Random(seed)
        shape = tuple(rng.choice((1, 2, 3, 5, 8, 17, 40)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 4))))
        return random_arrays(rng, node_from_json(random_node(rng, shape)), shape)

    return make


@pytest.fixture(scope="session")
def sample(random_tensor: Callable[[int], EncodedTensor]) -> dict[str, Any]:
    """Arguments of `write_artifact` for a small artifact: tensors, files, meta."""
    from nstf.runtime.artifact import Shared

    tensors: dict[str, Any] = {f"model.layers.{seed}.weight": random_tensor(seed) for seed in range(8)}
    tensors["lm_head.weight"] = Shared("model.layers.0.weight")
    files = {
        "config.json": b'{"model_type": "tiny"}' * 9,
        "merges.txt": b"",
        "tokenizer.model": bytes(range(256)),
    }
    meta = {"plan": {"budget_bytes": 1000}, "report": {"kld": 0.25, "note": "é \U0001f600"}}
    return {"tensors": tensors, "files": files, "meta": meta}
