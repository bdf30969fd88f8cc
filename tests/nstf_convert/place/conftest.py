"""Small machines and models for tests of placement."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from nstf.kernels.formats import Node, dense, integer
from nstf_convert.place.costs import Facts, Matrix, Model
from nstf_convert.place.machine import Machine, from_json

DEVICE: dict[str, Any] = {
    "name": "gpu", "kind": "sm_90", "memory_bytes": 1e9, "bandwidth": 1e12, "rates": {"bfloat16": 1e14},
}  # fmt: skip
LINK: dict[str, Any] = {"from": "gpu*", "to": "switch", "bandwidth": 1e10, "latency_s": 1e-6}


@pytest.fixture
def machine() -> Callable[..., Machine]:
    """A machine of devices that differ from one plain device in what is given, all joined by one switch."""

    def make(*devices: Mapping[str, Any], link: Mapping[str, Any] | None = None, **more: Any) -> Machine:
        found = [DEVICE | {"name": f"gpu{i}"} | dict(d) for i, d in enumerate(devices)]
        data = {
            "nstf_machine": 1, "name": "test", "devices": found, "links": [LINK | dict(link or {})],
            "collectives": {"start_s": 0.0},
        }  # fmt: skip
        return from_json(data | more)

    return make


@pytest.fixture
def model() -> Callable[..., Model]:
    """A model of equal layers of an attention and a feed-forward matrix, 4 bits, or with a stack of experts."""

    def make(layers: int = 4, side: int = 1024, experts: int = 0, active: int = 0, ranks: int = 8) -> Model:
        tree = Node("int", integer.Params(bits=4, group=128))
        head = Matrix("lm_head.weight", Node("dense", dense.Params("bfloat16")), (64, side), "head", 0)
        made = []
        for i in range(layers):
            layer = [Matrix(f"layers.{i}.self_attn.o_proj.weight", tree, (side, side), "product", 1)]
            if experts:
                stack = Node("int", integer.Params(bits=4, group=128, lead=2))
                shape = (experts, side, side)
                layer.append(Matrix(f"layers.{i}.mlp.experts.down_proj", stack, shape, "experts", 0))
            else:
                layer.append(Matrix(f"layers.{i}.mlp.down_proj.weight", tree, (side, 4 * side), "product", 1))
            made.append(tuple(layer))
        facts = Facts(side, 8, 64, 512.0, 8, (4.0 * side, 4.0 * side), (0,) * layers, experts, active)
        return Model(
            "test", facts, tuple(made), None, head, False, 0, lambda n: None if n <= ranks else "too many"
        )

    return make
