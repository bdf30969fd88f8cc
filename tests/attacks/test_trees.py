"""Random changes to trees of every kind: a tree is refused, or its arrays decode to its shape."""

import json
import random
import time
from typing import Any

import torch

from nstf.kernels.formats import (
    EncodedTensor,
    FormatError,
    array_specs,
    check,
    child_encoded,
    decode,
    kinds,
    leaf_code_bits,
    node_from_json,
    node_to_json,
    stored_bytes,
)

VALUES: list[Any] = [
    None, True, False, -(2**70), -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 24, 32, 33, 64, 2**20, 2**31, 2**63, 2**70,
    0.5, "", "x", "e4m3fn", "e4m3fnuz", "bool", "int64", "float64", "float16", [], {}, [0], [1],
    [2, 2], [1, 0], [0, 0], [-1, 2], [2**70], [3, 4], [4, 3], [2, 6], [12], [1, 12], [2, 2, 3], [1] * 9, ["1"],
    [None],
]  # fmt: skip
SHAPES = [
    (),
    (1,),
    (2,),
    (12,),
    (3, 4),
    (4, 3),
    (1, 12),
    (12, 1),
    (2, 6),
    (2, 2, 3),
    (3, 2, 2),
    (2, 1, 3, 2),
    (1, 33),
    (2, 32),
]
LEAVES: list[dict[str, Any]] = [
    *({"kind": "dense", "dtype": dtype} for dtype in ("bool", "int8", "float16", "bfloat16", "float64")),
    *({"kind": kind} for kind in ("int", "grid", "fp8", "mxfp4", "shuffle", "trellis")),
]


def random_tree(rng: random.Random, depth: int) -> dict[str, Any]:
    """A tree that may fit nothing: right in its words, random in its numbers."""
    if depth == 0 or rng.random() < 0.3:
        return dict(rng.choice(LEAVES))

    def child() -> dict[str, Any]:
        return random_tree(rng, depth - 1)

    view = list(rng.choice(SHAPES[4:]))
    rank = rng.randint(1, 3)
    kind = rng.choice(("add", "permute", "low_rank", "rotated", "cp", "tucker", "tensor_train"))
    if kind == "add":
        return {"kind": kind, "children": {"x": child(), "y": child()}}
    if kind == "permute":
        return {"kind": kind, "dims": rng.sample(range(len(view)), len(view)), "children": {"x": child()}}
    if kind == "rotated":
        blocks = {"block_in": rng.choice((0, 32)), "block_out": rng.choice((0, 0, 32))}
        return {"kind": kind, **blocks, "lead": rng.randint(1, 2), "children": {"x": child()}}
    if kind == "low_rank":
        return {
            "kind": kind,
            "rank": rank,
            "lead": rng.randint(1, 2),
            "children": {"a": child(), "b": child()},
        }
    if kind == "cp":
        children = {f"factor{i}": child() for i in range(len(view))}
        return {"kind": kind, "rank": rank, "view": view, "children": children}
    if kind == "tucker":
        ranks = [rng.randint(1, size) for size in view]
        factors = {f"factor{i}": child() for i in range(len(view)) if ranks[i] < view[i]}
        return {"kind": kind, "ranks": ranks, "view": view, "children": {"core": child(), **factors}}
    ranks = [rng.randint(1, 2) for _ in view[1:]]
    return {
        "kind": kind,
        "ranks": ranks,
        "view": view,
        "children": {f"core{i}": child() for i in range(len(view))},
    }


def damaged(rng: random.Random, tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with one thing changed somewhere."""
    node = tree
    while node.get("children") and rng.random() < 0.5:
        node = node["children"][rng.choice(list(node["children"]))]
    kind = rng.randrange(6)
    key = rng.choice(list(node))
    if kind == 0:
        del node[key]
    elif kind == 1:
        node["kind"] = rng.choice(kinds())
    elif kind == 2:
        node[
            rng.choice(("rank", "ranks", "view", "lead", "bits", "group", "children", "dims", "levels", "x"))
        ] = rng.choice(VALUES)
    elif kind == 3 and isinstance(node.get("children"), dict):
        node["children"][rng.choice(("a", "x", "core", "factor0", "core1", "1", "a.b", ""))] = dict(
            rng.choice(LEAVES)
        )
    elif kind == 4 and isinstance(node.get("children"), dict) and node["children"]:
        del node["children"][rng.choice(list(node["children"]))]
    else:
        node[key] = rng.choice(VALUES)
    return tree


def arrays_for(rng: random.Random, specs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Arrays of random bits, NaN and infinities among them."""
    arrays = {}
    for path, spec in specs.items():
        raw = torch.frombuffer(bytearray(rng.randbytes(max(spec.size_bytes, 1))), dtype=torch.uint8)[
            : spec.size_bytes
        ]
        raw = raw % 2 if spec.dtype == torch.bool else raw
        arrays[path] = raw.clone().view(spec.dtype).reshape(spec.shape)
    return arrays


def test_every_tree_is_refused_or_decodes_to_its_shape() -> None:
    rng = random.Random(3)
    decoded: set[str] = set()
    refused = 0
    for number in range(8_000):
        data = random_tree(rng, 2)
        data = damaged(rng, data) if number % 2 else data
        view = data.get("view")
        fits = isinstance(view, list) and view and rng.random() < 0.9
        shape = tuple(view) if fits else rng.choice(SHAPES)
        start = time.process_time()
        try:
            node = node_from_json(json.loads(json.dumps(data)))
            specs = array_specs(node, shape)
            if stored_bytes(node, shape) > 1 << 20:
                continue
            encoded = EncodedTensor(node, shape, arrays_for(rng, specs))
            check(encoded)
            assert leaf_code_bits(node, shape) <= 8 * encoded.size_bytes
            for name in node.children:
                check(child_encoded(encoded, name))
            dense = decode(encoded)
        except FormatError:
            refused += 1
        except Exception as error:
            error.add_note(f"tree {number}: {data} of shape {shape}")
            raise
        else:
            assert tuple(dense.shape) == shape and dense.dtype == torch.float32, data
            assert node_from_json(node_to_json(node)) == node
            decoded.add(node.kind)
        assert time.process_time() - start < 1, f"tree {number} is slow: {data}"
    assert decoded == set(kinds())
    assert refused > 2_000
