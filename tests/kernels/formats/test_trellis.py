"""The trellis leaf: what its bits mean, sections of rows, and what is refused."""

import pytest
import torch

from nstf.kernels.cpu import ext
from nstf.kernels.formats import EncodedTensor, FormatError, Node, check, decode, trellis
from nstf.kernels.formats.tree import array_specs
from nstf.kernels.linear import linear
from nstf.kernels.torch.rows import decode_rows


def random_leaf(params: trellis.Params, shape: tuple[int, ...], seed: int = 0) -> EncodedTensor:
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for name, spec in array_specs(Node(trellis.KIND, params), shape).items():
        if spec.dtype == torch.uint8:
            arrays[name] = torch.randint(0, 256, spec.shape, generator=generator, dtype=torch.uint8)
        else:
            arrays[name] = torch.rand(spec.shape, generator=generator).to(spec.dtype) + 0.5
    if params.rows:
        numbers = torch.repeat_interleave(torch.arange(len(params.rows)), torch.tensor(params.rows))
        numbers = numbers[torch.randperm(len(numbers), generator=generator)]
        width = max(1, (len(params.rows) - 1).bit_length())
        arrays["section"] = trellis.bitpack.pack(numbers.to(torch.uint8)[None], width)[0]
    return EncodedTensor(Node(trellis.KIND, params), shape, arrays)


def value_by_the_definition(codes: torch.Tensor, q: int, position: int) -> float:
    """The value at a position of one tile, bit by bit, from the words of the format's docstring."""
    stream = [int(codes[i // 8]) >> (i % 8) & 1 for i in range(64 * q)]
    end = (position + 1) * q // 4
    state = sum(stream[(end - 16 + i) % (64 * q)] << i for i in range(16))
    return float(trellis.codebook(q)[state])


@pytest.mark.parametrize("q", [4, 5, 7, 8, 10, 12, 13, 16, 19, 24])
def test_every_weight_is_the_codebook_at_the_16_bits_before_its_end(q):
    leaf = random_leaf(trellis.Params((q,)), (16, 16))
    values = decode(leaf) / trellis.read_scales(leaf.tree.params, dict(leaf.arrays))[:, None]
    for position in (0, 1, 2, 3, 17, 100, 254, 255):
        expected = value_by_the_definition(leaf.arrays["codes"], q, position)
        assert float(values[position // 16, position % 16]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(not hasattr(ext, "trellis_decode"), reason="the extension is not built")
@pytest.mark.parametrize("q", [4, 9, 12, 18, 24])
def test_the_compiled_decoder_gives_what_torch_gives(q, monkeypatch):
    codes = torch.randint(
        0, 256, (3, 5, 8 * q), generator=torch.Generator().manual_seed(q), dtype=torch.uint8
    )
    compiled = trellis.section_values(codes, q, 40, 77)
    monkeypatch.setattr(trellis, "ext", None)
    assert torch.equal(trellis.section_values(codes, q, 40, 77), compiled)


@pytest.mark.parametrize("name", ["_sums", "_quantiles"])
def test_codebooks_have_zero_mean_and_unit_variance(name):
    table = getattr(trellis, name)()
    assert table.shape == (65536,)
    assert abs(float(table.mean())) < 0.01 and float(table.square().mean()) == pytest.approx(1, abs=0.01)


def test_sections_give_rows_their_own_rates():
    params = trellis.Params((16, 8, 4), (16, 48, 30), 16)
    leaf = random_leaf(params, (94, 40))
    check(leaf)
    values = decode(leaf)
    at = 0
    for n, q in zip(params.rows, params.quarter_bits, strict=True):
        size = trellis.tiles(n) * 3 * 8 * q
        codes = leaf.arrays["codes"][at : at + size].view(-1, 3, 8 * q)
        at += size
        numbers = trellis.bitpack.unpack(leaf.arrays["section"][None], 2, 94)[0]
        members = numbers == params.quarter_bits.index(q)
        scales = trellis.read_scales(params, dict(leaf.arrays))[members][:, None]
        assert torch.equal(values[members], trellis.section_values(codes, q, n, 40) * scales)


def test_rows_decode_alone():
    leaf = random_leaf(trellis.Params((12, 6), (50, 30)), (80, 48))
    rows = torch.tensor([79, 3, 3, 0, 41])
    assert torch.equal(decode_rows(leaf, rows), decode(leaf)[rows])
    assert torch.equal(decode_rows(leaf, slice(5, 9)), decode(leaf)[5:9])


@pytest.mark.skipif(not hasattr(ext, "trellis_matmul"), reason="the extension is not built")
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_the_compiled_product_is_that_of_the_values_at_any_width_of_vectors(lanes):
    leaf = random_leaf(trellis.Params((11,)), (48, 64))
    codes, q, _ = next(trellis.sections(leaf.tree.params, dict(leaf.arrays), 48, 64))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    out = torch.empty(3, 48)
    ext.trellis_matmul(codes, q, trellis.codebook(q), x, out, 1, lanes)
    torch.testing.assert_close(out, x @ trellis.section_values(codes, q, 48, 64).T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_products_with_sections_are_those_of_the_decoded_matrix(batch):
    leaf = random_leaf(trellis.Params((16, 8, 4), (16, 48, 30)), (94, 40))
    x = torch.randn(batch, 40, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(x, leaf), x @ decode(leaf).T, rtol=1e-4, atol=1e-3)


def test_sections_that_do_not_match_their_rows_are_refused():
    leaf = random_leaf(trellis.Params((12, 6), (50, 30)), (80, 48))
    wrong = {**leaf.arrays, "section": torch.zeros_like(leaf.arrays["section"])}
    with pytest.raises(FormatError, match="sections have"):
        decode(EncodedTensor(leaf.tree, leaf.shape, wrong))
    with pytest.raises(FormatError, match="do not make"):
        array_specs(leaf.tree, (81, 48))


@pytest.mark.parametrize(
    "arguments",
    [
        ((3,),),
        ((25,),),
        ((),),
        ((12, 8),),
        ((12, 8), (16,)),
        ((12,), (16,)),
        ((12, 8), (16, 0)),
        ((12,), (), 4),
        (tuple(range(4, 21)), (16,) * 17),
    ],
)
def test_parameters_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError):
        trellis.Params(*arguments)


@pytest.mark.parametrize("scale_bits", [8, 16])
def test_stored_scales_are_close_and_zeros_stay_zero(scale_bits):
    params = trellis.Params((12,), (), scale_bits)
    scales = torch.tensor([3.0, 1.0, 0.1, 0.0, 2.5])
    back = trellis.read_scales(params, trellis.store_scales(params, scales))
    assert float(back[3]) == 0
    torch.testing.assert_close(back, scales, rtol=0.03 if scale_bits == 8 else 1e-3, atol=0)
