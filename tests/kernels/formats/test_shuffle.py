"""The shuffle leaf: what its bytes mean, paths that start anew, rows alone, and what is refused."""

import math

import pytest
import torch

from nstf.kernels.formats import EncodedTensor, Node, check, decode, leaf_code_bits, shuffle
from nstf.kernels.formats.shuffle_tables import STEPS, TABLES
from nstf.kernels.formats.tree import array_specs
from nstf.kernels.linear import linear
from nstf.kernels.torch.rows import decode_rows


def random_leaf(params: shuffle.Params, shape: tuple[int, ...], seed: int = 0) -> EncodedTensor:
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for name, spec in array_specs(Node(shuffle.KIND, params), shape).items():
        if spec.dtype == torch.uint8:
            arrays[name] = torch.randint(0, 256, spec.shape, generator=generator, dtype=torch.uint8)
        else:
            arrays[name] = torch.rand(spec.shape, generator=generator).to(spec.dtype) + 0.5
    return EncodedTensor(Node(shuffle.KIND, params), shape, arrays)


def level_by_the_definition(codes: torch.Tensor, q: int, row: int, col: int) -> int:
    """The sum of two entries, from the words of the format's docstring."""
    phases = 16 // math.gcd(q, 16)
    entries = bytes.fromhex(TABLES[q])

    def symbol(group: int, i: int) -> int:
        if i < 0 and group % 8 == 0:
            return 0
        group, i = (group - 1, i + 2 * q) if i < 0 else (group, i)
        return int(codes[group, col // 64, i, col % 64 // 2]) >> (4 * (col % 2)) & 15

    group, r = divmod(row, 32)
    end = math.ceil((r + 1) * q / 16) - 1
    a, b, c = (symbol(group, end - i) for i in range(3))
    second = r > 0 and math.ceil(r * q / 16) - 1 == end
    table = entries[32 * (r % phases) :]
    return table[a ^ b] + table[16 + (a ^ c)] if second else table[a ^ c] + table[16 + b]


@pytest.mark.parametrize("q", shuffle.RATES)
def test_every_weight_is_the_sum_of_two_entries_at_its_symbols(q):
    leaf = random_leaf(shuffle.Params(q), (300, 130))
    levels = shuffle.levels(leaf.arrays["codes"], q)
    for row in (*range(34), 63, 64, 255, 256, 257, 299):
        for col in (0, 1, 65, 129):
            assert int(levels[row, col]) == level_by_the_definition(leaf.arrays["codes"], q, row, col)
    scales = shuffle.read_scales(leaf.tree.params, dict(leaf.arrays))[:, None]
    expected = (levels[:300, :130].float() - 31.5) * STEPS[q] * scales
    torch.testing.assert_close(decode(leaf), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("q", shuffle.RATES)
def test_sums_of_entries_fit_six_bits_and_reach_both_sides(q):
    table = shuffle.tables(q).int()
    assert table.shape == (16 // math.gcd(q, 16), 2, 16)
    assert int(table.amax(2).sum(1).max()) <= 63 and int(table.min()) >= 0
    assert int(table.amax(2).sum(1).min()) > 45 and int(table.amin(2).sum(1).max()) < 18


@pytest.mark.parametrize("q", [8, 13, 16, 20])
def test_rows_decode_alone(q):
    leaf = random_leaf(shuffle.Params(q), (600, 70))
    rows = torch.tensor([599, 3, 3, 0, 32, 255, 256, 511])
    assert torch.equal(decode_rows(leaf, rows), decode(leaf)[rows])
    assert torch.equal(decode_rows(leaf, slice(250, 290)), decode(leaf)[250:290])


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_products_are_those_of_the_decoded_matrix(batch):
    leaf = random_leaf(shuffle.Params(14), (94, 40))
    x = torch.randn(batch, 40, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(x, leaf), x @ decode(leaf).T, rtol=1e-4, atol=1e-3)


def test_stored_bytes_are_the_rate_and_a_scale_for_each_row():
    tree = Node(shuffle.KIND, shuffle.Params(12))
    leaf = random_leaf(tree.params, (256, 128))
    check(leaf)
    assert leaf.size_bytes == 256 * 128 * 3 // 8 + 256 + 4
    assert leaf_code_bits(tree, (256, 128)) == 256 * 128 * 3
    assert leaf_code_bits(tree, (3, 5)) == 45


@pytest.mark.parametrize(
    "bad",
    [{"quarter_bits": 7}, {"quarter_bits": 21}, {"quarter_bits": 12.0}, {"scale_bits": 4}, {"lead": -1}],
)
def test_parameters_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=r"must be"):
        shuffle.Params(**bad)
