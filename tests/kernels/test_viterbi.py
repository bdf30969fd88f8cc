"""The Viterbi search of the trellis: the torch reference against its definition, and the compiled one's error against it."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from nstf.kernels.cpu import ext
from nstf.kernels.formats import trellis
from nstf.kernels.torch import viterbi as reference
from nstf.kernels.trellis_encode import encode_tiles


def samples(tiles: int, coarse: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Targets and a codebook; the coarse ones, of few different numbers, tie at almost every state."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tiles, 256, generator=generator)
    codebook = torch.randn(1 << 16, generator=generator)
    return ((4 * x).round() / 4, (2 * codebook).round() / 2) if coarse else (x, codebook)


def exactly_rounded(d: float, m: float) -> float:
    """The float32 nearest to d * d + m, ties to even, by way of integers."""
    exact = Fraction(d) ** 2 + Fraction(m)
    exponent = 23
    while exact * Fraction(2) ** exponent >= 1 << 24:
        exponent -= 1
    while exact * Fraction(2) ** exponent < 1 << 23:
        exponent += 1
    return float(Fraction(round(exact * Fraction(2) ** exponent)) / Fraction(2) ** exponent)


def test_the_distance_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)
    # (1 + i 2^-12)^2, i odd, lies halfway between two float32 numbers: a small m decides, which float64 has no room for.
    d = torch.cat([torch.randn(200, generator=generator), 1 + 2.0**-12 * torch.arange(1, 400, 2)])
    m = torch.cat([torch.rand(200, generator=generator), torch.full((200,), 2.0**-70)])
    want = [exactly_rounded(a, b) for a, b in zip(d.tolist(), m.tolist(), strict=True)]
    assert reference._squared_plus(d, m).tolist() == want
    naive = (d.double().square() + m.double()).float().tolist()
    assert naive != want, "no sample is rounded twice"


def test_an_infinite_cost_stays_infinite() -> None:
    assert reference._squared_plus(torch.tensor([1.5]), torch.tensor([float("inf")])).item() == float("inf")


@pytest.mark.parametrize("quarter_bits", [4, 7, 10, 12, 24])
def test_codes_and_the_states_along_their_path_are_the_same_thing(quarter_bits: int) -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (3, 8 * quarter_bits), generator=generator, dtype=torch.uint8)
    states = reference.states_of_codes(codes, quarter_bits)
    for t in range(256):  # every step shifts its bits in at the top; the first follows the last
        k = reference.step_bits(t, quarter_bits)
        assert torch.equal(states[:, t] & ((1 << (16 - k)) - 1), states[:, t - 1] >> k)
    assert torch.equal(reference.codes_of_states(states, quarter_bits), codes)


@pytest.mark.parametrize("quarter_bits", [6, 11])
def test_a_tile_that_lies_on_a_path_is_found(quarter_bits: int) -> None:
    generator = torch.Generator().manual_seed(3)
    _, codebook = samples(1, coarse=False)
    codes = torch.randint(0, 256, (1, 8 * quarter_bits), generator=generator, dtype=torch.uint8)
    targets = codebook[reference.states_of_codes(codes, quarter_bits)]
    assert torch.equal(reference.viterbi(targets, quarter_bits, codebook), codes)


def test_no_code_nearby_is_better() -> None:
    targets, codebook = samples(1, coarse=False, seed=4)
    codes = reference.viterbi(targets, 8, codebook)

    flips = codes.repeat(512, 1)
    bit = torch.arange(512)
    flips[bit, bit // 8] ^= (1 << (bit % 8)).to(torch.uint8)
    assert bool((errors(targets, 8, codebook, flips) > errors(targets, 8, codebook, codes)).all())


def compiled(targets: Tensor, quarter_bits: int, codebook: Tensor, most_lanes: int = 16) -> Tensor:
    if not hasattr(ext, "trellis_viterbi"):
        pytest.skip("the extension is not built")
    codes = torch.empty(len(targets), 8 * quarter_bits, dtype=torch.uint8)
    ext.trellis_viterbi(targets, quarter_bits, codebook, codes, 1, most_lanes)
    return codes


def errors(targets: Tensor, quarter_bits: int, codebook: Tensor, codes: Tensor) -> Tensor:
    """The squared error of each tile as its codes decode: float64 [tiles]."""
    return (targets - codebook[reference.states_of_codes(codes, quarter_bits)]).square().double().sum(1)


@pytest.mark.parametrize("coarse", [False, True], ids=["gaussian", "ties"])
@pytest.mark.parametrize("quarter_bits", [4, 6, 9, 11, 12, 14, 17, 20, 22, 24])
def test_every_instruction_set_gives_the_same_codes(quarter_bits: int, coarse: bool) -> None:
    targets, codebook = samples(3, coarse, seed=quarter_bits)
    codes = [compiled(targets, quarter_bits, codebook, lanes) for lanes in (16, 8, 4)]
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(codes[0], codes[2])


@pytest.mark.parametrize("quarter_bits", [8, 12, 20])
def test_costs_of_16_bits_lose_at_most_two_percent(quarter_bits: int) -> None:
    targets, codebook = samples(2, coarse=False, seed=quarter_bits)
    exact = errors(targets, quarter_bits, codebook, reference.viterbi(targets, quarter_bits, codebook)).sum()
    found = errors(targets, quarter_bits, codebook, compiled(targets, quarter_bits, codebook)).sum()
    assert float(found) <= 1.02 * float(exact)


def out_of_order(codebook: Tensor) -> Tensor:
    """The codebook with two values exchanged: what looks at a window of values in order cannot be used."""
    out = codebook.clone()
    out[[0, 1]] = out[[1, 0]]
    assert float(out[0]) != float(codebook[0])
    return out


@pytest.mark.parametrize("quarter_bits", range(13, 25))
def test_a_window_of_values_gives_the_error_of_all_values_on_every_instruction_set(quarter_bits: int) -> None:
    # Beyond 3 the search of all values is the worse one: its distances end there.
    targets = samples(24, coarse=False, seed=quarter_bits)[0].clamp(-3, 3)
    codebook = trellis.codebook(quarter_bits)
    found = [compiled(targets, quarter_bits, codebook, lanes) for lanes in (16, 8, 4)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    every = compiled(targets, quarter_bits, out_of_order(codebook))
    full = errors(targets, quarter_bits, codebook, every).sum()
    assert float(errors(targets, quarter_bits, codebook, found[0]).sum()) <= 1.005 * float(full)


@pytest.mark.parametrize("quarter_bits", [13, 16, 20, 24])
def test_a_window_follows_a_tile_that_lies_on_a_path_all_around(quarter_bits: int) -> None:
    generator, codebook = torch.Generator().manual_seed(6), trellis.codebook(quarter_bits)
    codes = torch.randint(0, 256, (3, 8 * quarter_bits), generator=generator, dtype=torch.uint8)
    targets = codebook[reference.states_of_codes(codes, quarter_bits)]
    found = compiled(targets, quarter_bits, codebook)
    assert float((targets - codebook[reference.states_of_codes(found, quarter_bits)]).abs().max()) < 0.1


@pytest.mark.parametrize("quarter_bits", [13, 17, 24])
def test_a_window_reaches_the_last_value_for_targets_beyond_it(quarter_bits: int) -> None:
    targets, codebook = samples(2, coarse=False)[0], trellis.codebook(quarter_bits)
    targets[:, 100], targets[:, 200] = 1e30, -5.0
    values = codebook[reference.states_of_codes(compiled(targets, quarter_bits, codebook), quarter_bits)]
    assert bool((values[:, 100] > 3).all())
    assert bool((values[:, 200] < -3).all())


@pytest.mark.parametrize("quarter_bits", [14, 18, 22])
def test_a_window_bears_several_outliers_one_after_another(quarter_bits: int) -> None:
    targets, codebook = samples(8, coarse=False)[0].clamp(-3, 3), trellis.codebook(quarter_bits)
    targets[:, 66:70] = torch.tensor([3.2, 3.5, 4.9, -2.1])
    targets[:4, 71:74] = torch.tensor([-5.0, -4.0, -6.0])
    found = errors(targets, quarter_bits, codebook, compiled(targets, quarter_bits, codebook))
    every = errors(targets, quarter_bits, codebook, compiled(targets, quarter_bits, out_of_order(codebook)))
    # What is lost is the outliers' own error; a path that was lost cost 100 and more.
    assert bool((found < 1.5 * every).all())


def test_a_changed_codebook_is_noticed() -> None:
    targets, codebook = samples(1, coarse=False)
    compiled(targets, 8, codebook)
    assert torch.equal(compiled(targets, 8, -codebook), compiled(-targets, 8, codebook))


@pytest.mark.parametrize("quarter_bits", [4, 7, 10, 13, 18, 24])
def test_the_compiled_search_follows_a_tile_that_lies_on_a_path_all_around(quarter_bits: int) -> None:
    generator = torch.Generator().manual_seed(5)
    _, codebook = samples(1, coarse=False)
    codes = torch.randint(0, 256, (3, 8 * quarter_bits), generator=generator, dtype=torch.uint8)
    targets = codebook[reference.states_of_codes(codes, quarter_bits)]
    found = compiled(targets, quarter_bits, codebook)
    assert float((targets - codebook[reference.states_of_codes(found, quarter_bits)]).abs().max()) < 0.1


@pytest.mark.parametrize("quarter_bits", [6, 12, 16])
def test_targets_beyond_every_value_get_values_of_the_tail(quarter_bits: int) -> None:
    targets, codebook = samples(2, coarse=False)
    targets[:, 100], targets[:, 200] = 1e30, -9.0
    values = codebook[reference.states_of_codes(compiled(targets, quarter_bits, codebook), quarter_bits)]
    assert bool((values[:, 100] > 2).all())
    assert bool((values[:, 200] < -2).all())


def test_without_tiles_there_are_no_codes() -> None:
    _, codebook = samples(1, coarse=False)
    for search in (reference.viterbi, encode_tiles):
        assert search(torch.empty(0, 256), 10, codebook).shape == (0, 80)


def test_other_shapes_types_and_rates_are_refused() -> None:
    targets, codebook = samples(1, coarse=False)
    with pytest.raises(
        ValueError, match=r"targets are torch.float32 \(1, 128\), want float32 \[tiles, 256\]"
    ):
        encode_tiles(targets[:, :128], 8, codebook)
    with pytest.raises(ValueError, match=r"targets are torch.float64"):
        encode_tiles(targets.double(), 8, codebook)
    with pytest.raises(ValueError, match=r"the codebook is torch.float32 \(4,\), want float32 \[65536\]"):
        encode_tiles(targets, 8, codebook[:4])
    with pytest.raises(ValueError, match="the codebook is on meta, the targets are on cpu"):
        encode_tiles(targets, 8, codebook.to("meta"))
    with pytest.raises(ValueError, match="quarter_bits is 25, want 4 to 24"):
        encode_tiles(targets, 25, codebook)
