"""Encoded tensors with random arrays: every format without needing its quantiser."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.kernels.formats import EncodedTensor, Node, array_specs, check
from nstf.kernels.formats.tree import format_of


def leaf(kind: str, **params: Any) -> Node:
    return Node(kind, format_of(kind).Params(**params))


def node(kind: str, children: dict[str, Node], **params: Any) -> Node:
    return Node(kind, format_of(kind).Params(**params), children)


def random_encoded(tree: Node, shape: tuple[int, ...], seed: int = 0) -> EncodedTensor:
    """Arrays of the right dtypes and shapes, with values of moderate size and no NaN."""
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for path, spec in array_specs(tree, shape).items():
        owner = _node_at(tree, path)
        if spec.dtype == torch.uint8:
            low, high = (120, 130) if owner.kind == "mxfp4" and path.endswith("scale") else (0, 256)
            array = torch.randint(low, high, spec.shape, dtype=torch.uint8, generator=generator)
            if owner.kind == "fp8":
                array[(array & 0x7F == 0x7F) | (array == 0x80)] = 3
        else:
            size = 0.1 if "scale" in path else 1.0
            array = (torch.randn(spec.shape, generator=generator) * size).to(spec.dtype)
        arrays[path] = array
    encoded = EncodedTensor(tree, shape, arrays)
    check(encoded)
    return encoded


def _node_at(tree: Node, path: str) -> Node:
    for part in path.split(".")[:-1]:
        tree = tree.children[part]
    return tree


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """This file's functions, for the tests of this folder."""
    return sys.modules[__name__]
