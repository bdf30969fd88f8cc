"""The leaf formats: their arrays, what their codes mean, and what they refuse."""

import math

import pytest
import torch

from nstf.kernels.formats import (
    EncodedTensor,
    FormatError,
    Node,
    array_specs,
    bitpack,
    check,
    decode,
    fp8,
    grid,
    integer,
    kinds,
    leaf_code_bits,
    mxfp4,
    node_from_json,
    node_to_json,
    stored_bytes,
)

LEAVES = [
    Node("int", integer.Params(3, 32, True, 16)),
    Node("int", integer.Params(5, 8, False, 8)),
    Node("int", integer.Params(2, 0, False, 16, lead=2)),
    Node("grid", grid.Params(16, 32, 8)),
    Node("fp8", fp8.Params("e4m3fnuz", 0, 32)),
    Node("mxfp4", mxfp4.Params()),
]


def filled(tree: Node, shape: tuple[int, ...]) -> EncodedTensor:
    """Arbitrary stored bytes of the right shapes."""
    generator = torch.Generator().manual_seed(3)
    arrays = {}
    for name, spec in array_specs(tree, shape).items():
        if spec.dtype == torch.uint8:
            high = 120 if tree.kind in ("fp8", "mxfp4") else 256
            arrays[name] = torch.randint(0, high, spec.shape, generator=generator).to(torch.uint8)
        else:
            arrays[name] = torch.randn(spec.shape, generator=generator).to(spec.dtype)
    return EncodedTensor(tree, shape, arrays)


def test_all_leaf_kinds_are_known():
    assert {"dense", "int", "grid", "fp8", "mxfp4"} <= set(kinds())
    assert "bitpack" not in kinds() and "scales" not in kinds()


@pytest.mark.parametrize("tree", LEAVES, ids=lambda t: f"{t.kind}-{t.params}")
@pytest.mark.parametrize("shape", [(4, 64), (3, 5), (2, 3, 33), (5, 2, 3, 3)])
def test_any_bytes_of_the_right_shape_decode(tree, shape):
    encoded = filled(tree, shape)
    check(encoded)
    assert encoded.size_bytes == stored_bytes(tree, shape)
    values = decode(encoded)
    assert values.shape == shape and values.dtype == torch.float32
    assert bool(torch.isfinite(values).all())
    assert leaf_code_bits(tree, shape) <= encoded.size_bytes * 8
    assert node_from_json(node_to_json(tree)) == tree


def test_int_value_is_scale_times_code_less_zero():
    tree = Node("int", integer.Params(4, 8, False, 16))
    codes = torch.arange(12, dtype=torch.uint8).reshape(1, 12)
    arrays = {
        "codes": bitpack.pack(codes, 4),
        "scale": torch.tensor([[0.5, -2.0]], dtype=torch.float16),
        "zeros": bitpack.pack(torch.tensor([[3, 10]], dtype=torch.uint8), 4),
    }
    values = decode(EncodedTensor(tree, (1, 12), arrays))
    expected = [0.5 * (c - 3) for c in range(8)] + [-2.0 * (c - 10) for c in range(8, 12)]
    assert values[0].tolist() == expected


def test_symmetric_zero_is_the_middle_and_eight_bit_scales_multiply():
    tree = Node("int", integer.Params(2, 0, True, 8))
    arrays = {
        "codes": bitpack.pack(torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8), 2),
        "scale_codes": torch.tensor([[127]], dtype=torch.uint8),
        "scale_super": torch.tensor([3.0], dtype=torch.float16),
    }
    assert decode(EncodedTensor(tree, (1, 4), arrays))[0].tolist() == [-3.0, -1.5, 0.0, 1.5]


@pytest.mark.parametrize("variant", ["e4m3fn", "e4m3fnuz"])
def test_fp8_decodes_all_256_codes_like_the_definition(variant):
    """Sign, 4 exponent bits, 3 mantissa bits; bias 7 or 8; subnormals; the NaNs of each type."""
    bias = 7 if variant == "e4m3fn" else 8
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    tree = Node("fp8", fp8.Params(variant))
    values = decode(EncodedTensor(tree, (1, 256), {"codes": codes, "scale": torch.ones(1, 1).half()}))[0]
    for code, value in enumerate(values.tolist()):
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
        if (variant == "e4m3fn" and code & 127 == 127) or (variant == "e4m3fnuz" and code == 128):
            assert math.isnan(value)
        elif exponent == 0:
            assert value == sign * mantissa * 2.0 ** (1 - bias - 3)
        else:
            assert value == sign * (8 + mantissa) * 2.0 ** (exponent - bias - 3)
    assert torch.equal(fp8.values_of_codes(variant).nan_to_num(9e9), values.nan_to_num(9e9))


def test_mxfp4_elements_and_scales_are_those_of_the_standard():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).reshape(1, 32)
    for scale in (0, 1, 126, 127, 130, 254):
        arrays = {"codes": bitpack.pack(codes, 4), "scale": torch.tensor([[scale]], dtype=torch.uint8)}
        values = decode(EncodedTensor(Node("mxfp4", mxfp4.Params()), (1, 32), arrays))[0, :16].double()
        element = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64) * 2.0 ** (scale - 127)
        expected = torch.cat([element, -element])
        assert torch.equal(values.float(), expected.float())
    assert bool(torch.isnan(mxfp4.scale_value(torch.tensor([255]))).all())


def test_grid_looks_codes_up():
    table = torch.linspace(-1, 2, 16).half()
    arrays = {
        "table": table,
        "codes": bitpack.pack(torch.tensor([[15, 0, 7]], dtype=torch.uint8), 4),
        "scale": torch.tensor([[2.0]], dtype=torch.float16),
    }
    values = decode(EncodedTensor(Node("grid", grid.Params()), (1, 3), arrays))
    assert values[0].tolist() == [2 * float(table[i]) for i in (15, 0, 7)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: integer.Params(bits=1), "bits must be 2 to 8, not 1"),
        (lambda: integer.Params(bits=9), "bits must be 2 to 8, not 9"),
        (lambda: integer.Params(group=12), "group must be 0"),
        (lambda: integer.Params(group=-8), "group must be 0"),
        (lambda: integer.Params(scale_bits=4), "scale_bits must be one of 8, 16, not 4"),
        (lambda: integer.Params(lead=9), "lead must be 0 to 8, not 9"),
        (lambda: grid.Params(levels=8), "levels must be 16, not 8"),
        (lambda: fp8.Params("e5m2"), "variant must be one of e4m3fn, e4m3fnuz, not 'e5m2'"),
        (lambda: fp8.Params(scale_bits=8), "scale_bits must be one of 16, 32, not 8"),
        (lambda: mxfp4.Params(lead=-1), "lead must be 0 to 8"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("tree", LEAVES, ids=lambda t: t.kind)
def test_a_shape_with_fewer_dimensions_than_lead_is_refused(tree):
    with pytest.raises(FormatError, match="lead"):
        array_specs(Node(tree.kind, type(tree.params)(**{**vars(tree.params), "lead": 3})), (4, 4))
