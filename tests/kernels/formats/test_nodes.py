"""Contract of the inner nodes: shapes follow from the parameters, decode agrees with a written-out sum."""

import math

import pytest
import torch

from nstf.kernels.formats import (
    EncodedTensor,
    FormatError,
    Node,
    add,
    array_specs,
    check,
    child_encoded,
    cp,
    decode,
    dense,
    low_rank,
    node_from_json,
    node_to_json,
    permute,
    stored_bytes,
    tensor_train,
    tucker,
)

DENSE = Node("dense", dense.Params("float32"))


def node(kind: str, module, params, shape: tuple[int, ...]) -> Node:
    return Node(kind, params, dict.fromkeys(module.children(params, shape), DENSE))


def random_encoding(tree: Node, shape: tuple[int, ...], seed: int = 0) -> EncodedTensor:
    generator = torch.Generator().manual_seed(seed)
    specs = array_specs(tree, shape)
    return EncodedTensor(
        tree, shape, {k: torch.randn(s.shape, generator=generator) for k, s in specs.items()}
    )


CASES = [
    ("low_rank", low_rank, low_rank.Params(3), (7, 5)),
    ("low_rank", low_rank, low_rank.Params(1), (1, 9)),
    ("low_rank", low_rank, low_rank.Params(4, lead=2), (3, 5, 4)),
    ("low_rank", low_rank, low_rank.Params(2), (6, 3, 3, 3)),
    ("add", add, add.Params(), (4, 3, 2)),
    ("permute", permute, permute.Params((1, 0)), (5, 3)),
    ("permute", permute, permute.Params((2, 0, 1)), (5, 3, 2)),
    ("cp", cp, cp.Params(3, (7, 5)), (35,)),
    ("cp", cp, cp.Params(11, (4, 3, 5)), (12, 5)),
    ("cp", cp, cp.Params(12, (2, 3, 2, 5)), (6, 10)),
    ("tucker", tucker, tucker.Params((2, 3, 5), (4, 3, 5)), (12, 5)),
    ("tucker", tucker, tucker.Params((1, 1, 1, 1), (4, 3, 2, 2)), (4, 3, 2, 2)),
    ("tucker", tucker, tucker.Params((4, 3), (4, 3)), (4, 3)),
    ("tensor_train", tensor_train, tensor_train.Params((2, 5), (4, 3, 5)), (12, 5)),
    ("tensor_train", tensor_train, tensor_train.Params((1,), (4, 3)), (4, 3)),
    ("tensor_train", tensor_train, tensor_train.Params((2, 6, 2), (2, 3, 5, 2)), (6, 10)),
]
IDS = [f"{kind}-{i}" for i, (kind, *_) in enumerate(CASES)]


def written_out(kind: str, params, child: dict[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """The definition of the node as one einsum over all indices, in float64."""
    c = {k: v.double() for k, v in child.items()}
    if kind == "low_rank":
        return (c["a"] @ c["b"]).reshape(shape)
    if kind == "add":
        return c["x"] + c["y"]
    if kind == "permute":
        return c["x"].permute(params.dims)
    axes = "abcdefgh"[: len(params.view)]
    if kind == "cp":
        terms = ",".join(f"{a}r" for a in axes)
        return torch.einsum(f"{terms}->{axes}", *[c[f"factor{i}"] for i in range(len(axes))]).reshape(shape)
    if kind == "tucker":
        inner = axes.upper()
        factors = [c.get(f"factor{i}", torch.eye(n, dtype=torch.float64)) for i, n in enumerate(params.view)]
        terms = ",".join(f"{a}{b}" for a, b in zip(axes, inner, strict=True))
        return torch.einsum(f"{inner},{terms}->{axes}", c["core"], *factors).reshape(shape)
    bonds = "zyxwvuts"
    terms = ",".join(f"{bonds[i]}{a}{bonds[i + 1]}" for i, a in enumerate(axes))
    return torch.einsum(f"{terms}->{axes}", *[c[f"core{i}"] for i in range(len(axes))]).reshape(shape)


@pytest.mark.parametrize("kind,module,params,shape", CASES, ids=IDS)
def test_decode_is_the_written_out_sum(kind, module, params, shape) -> None:
    encoded = random_encoding(node(kind, module, params, shape), shape)
    check(encoded)
    out = decode(encoded)
    assert out.dtype == torch.float32 and tuple(out.shape) == shape
    children = {name: decode(child_encoded(encoded, name)) for name in encoded.tree.children}
    torch.testing.assert_close(out.double(), written_out(kind, params, children, shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind,module,params,shape", CASES, ids=IDS)
def test_tree_survives_json_and_stores_only_its_children(kind, module, params, shape) -> None:
    tree = node(kind, module, params, shape)
    assert node_from_json(node_to_json(tree)) == tree
    sizes = [math.prod(s) for s in module.children(params, shape).values()]
    assert stored_bytes(tree, shape) == 4 * sum(sizes)


@pytest.mark.parametrize("kind,module,params,shape", CASES, ids=IDS)
def test_half_precision_factors_decode_to_float32(kind, module, params, shape) -> None:
    half = Node("dense", dense.Params("bfloat16"))
    tree = Node(kind, params, dict.fromkeys(module.children(params, shape), half))
    arrays = {k: torch.ones(s.shape, dtype=s.dtype) for k, s in array_specs(tree, shape).items()}
    assert decode(EncodedTensor(tree, shape, arrays)).dtype == torch.float32


def test_nodes_nest() -> None:
    inner = node("low_rank", low_rank, low_rank.Params(2), (6, 4))
    tree = Node("permute", permute.Params((1, 0)), {"x": Node("add", add.Params(), {"x": DENSE, "y": inner})})
    encoded = random_encoding(tree, (4, 6))
    a = encoded.arrays
    expected = (a["x.x.values"] + a["x.y.a.values"] @ a["x.y.b.values"]).T
    torch.testing.assert_close(decode(encoded), expected)
    assert node_from_json(node_to_json(tree)) == tree


BAD_PARAMS = [
    ("low_rank", {"rank": 0}, "positive"),
    ("low_rank", {"rank": -3}, "positive"),
    ("low_rank", {"rank": 1, "lead": 0}, "positive"),
    ("low_rank", {"rank": True}, "must be int"),
    ("low_rank", {"rank": 1.0}, "must be int"),
    ("low_rank", {"rank": 2, "alpha": 1}, "unknown key"),
    ("add", {"x": 1}, "unknown key"),
    ("permute", {"dims": [0, 0]}, "not a permutation"),
    ("permute", {"dims": [1, 2]}, "not a permutation"),
    ("permute", {"dims": []}, "between 1 and"),
    ("permute", {"dims": list(range(9))}, "between 1 and"),
    ("cp", {"rank": 1, "view": [6]}, "between 2 and"),
    ("cp", {"rank": 1, "view": [6, -1]}, "positive integer"),
    ("cp", {"rank": 1, "view": [1 << 30, 1 << 30]}, "2\\*\\*40"),
    ("cp", {"rank": 4, "view": [3, 5]}, "not in 1..3"),
    ("cp", {"rank": 10**30, "view": [3, 5]}, "not in 1..3"),
    ("tucker", {"ranks": [1], "view": [3, 5]}, "one rank for each"),
    ("tucker", {"ranks": [1, 6], "view": [3, 5]}, "not between 1 and 5"),
    ("tucker", {"ranks": [0, 1], "view": [3, 5]}, "not between 1 and 3"),
    ("tensor_train", {"ranks": [1, 1], "view": [3, 5]}, "name the 1 bonds"),
    ("tensor_train", {"ranks": [4], "view": [3, 5]}, "not between 1 and 3"),
    ("tensor_train", {"ranks": [2, 3], "view": [2, 2, 2]}, "not between 1 and 2"),
    ("tensor_train", {"ranks": [1] * 8, "view": [2] * 9}, "between 2 and 8"),
]


@pytest.mark.parametrize("kind,params,message", BAD_PARAMS)
def test_bad_parameters_are_refused(kind, params, message) -> None:
    with pytest.raises(FormatError, match=message):
        node_from_json({"kind": kind, **params})


BAD_SHAPES = [
    ("low_rank", low_rank.Params(4), {"a": DENSE, "b": DENSE}, (3, 5), "rank 4 is above"),
    ("low_rank", low_rank.Params(1), {"a": DENSE, "b": DENSE}, (15,), "lead 1 leaves no columns"),
    ("low_rank", low_rank.Params(1, lead=2), {"a": DENSE, "b": DENSE}, (3, 5), "lead 2 leaves no columns"),
    ("low_rank", low_rank.Params(1), {"a": DENSE}, (3, 5), "children"),
    ("add", add.Params(), {"x": DENSE}, (3, 5), "children"),
    ("permute", permute.Params((1, 0)), {"x": DENSE}, (3, 5, 2), "do not fit"),
    ("cp", cp.Params(1, (3, 4)), {"factor0": DENSE, "factor1": DENSE}, (3, 5), "number of elements"),
    ("tucker", tucker.Params((3, 4), (3, 4)), {"core": DENSE}, (3, 5), "number of elements"),
    ("tucker", tucker.Params((2, 5), (3, 5)), {"core": DENSE}, (3, 5), "children"),
    ("tensor_train", tensor_train.Params((1,), (3, 4)), {}, (3, 5), "number of elements"),
]


@pytest.mark.parametrize("kind,params,children,shape,message", BAD_SHAPES)
def test_a_shape_that_does_not_fit_is_refused(kind, params, children, shape, message) -> None:
    with pytest.raises(FormatError, match=message):
        array_specs(Node(kind, params, children), shape)


def test_full_rank_axes_of_tucker_have_no_factor() -> None:
    assert tucker.children(tucker.Params((2, 3), (4, 3)), (12,)) == {"core": (2, 3), "factor0": (4, 2)}


def test_tensor_train_rank_limits_are_the_smaller_side() -> None:
    assert tensor_train.max_ranks((2, 3, 5, 7)) == (2, 6, 7)


def test_cp_of_high_rank_decodes_in_chunks_to_the_same_sum() -> None:
    params = cp.Params(30, (5, 6, 7))
    encoded = random_encoding(node("cp", cp, params, (5, 42)), (5, 42))
    f = [encoded.arrays[f"factor{i}.values"].double() for i in range(3)]
    torch.testing.assert_close(
        decode(encoded).double(), torch.einsum("ir,jr,kr->ijk", *f).reshape(5, 42), rtol=1e-5, atol=1e-5
    )
