"""Bit packing, as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nstf.kernels.formats import bitpack


@st.composite
def code_matrices(draw: st.DrawFn) -> tuple[Tensor, int]:
    bits, rows, cols = draw(st.integers(1, 8)), draw(st.integers(0, 5)), draw(st.integers(0, 70))
    values = draw(st.binary(min_size=rows * cols, max_size=rows * cols))
    codes = torch.tensor(list(values), dtype=torch.uint8).reshape(rows, cols)
    return codes & ((1 << bits) - 1), bits


@given(code_matrices())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_unpack_gives_back_what_was_packed(case):
    codes, bits = case
    packed = bitpack.pack(codes, bits)
    assert packed.shape == (codes.shape[0], bitpack.packed_bytes(codes.shape[1], bits))
    assert torch.equal(bitpack.unpack(packed, bits, codes.shape[1]), codes)


@given(code_matrices())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_row_is_one_little_endian_bit_stream(case):
    codes, bits = case
    packed = bitpack.pack(codes, bits)
    for row, data in zip(codes.tolist(), packed.tolist(), strict=True):
        stream = sum(code << (i * bits) for i, code in enumerate(row))
        assert bytes(data) == stream.to_bytes((len(row) * bits + 7) // 8, "little")


@given(code_matrices(), st.data())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_rows_are_packed_on_their_own(case, data):
    codes, bits = case
    packed = bitpack.pack(codes, bits)
    rows = data.draw(st.lists(st.integers(0, max(0, len(codes) - 1)), max_size=4)) if len(codes) else []
    index = torch.tensor(rows, dtype=torch.int64)
    assert torch.equal(bitpack.unpack(packed[index], bits, codes.shape[1]), codes[index])


@pytest.mark.parametrize("bits", range(1, 9))
def test_many_rows_are_packed_in_chunks(bits, monkeypatch):
    codes = torch.randint(0, 1 << bits, (50, 37), dtype=torch.uint8)
    whole = bitpack.pack(codes, bits)
    monkeypatch.setattr(bitpack, "_CHUNK", 100)
    assert torch.equal(bitpack.pack(codes, bits), whole)
    assert torch.equal(bitpack.unpack(whole, bits, 37), codes)


@pytest.mark.parametrize(
    ("codes", "bits", "message"),
    [
        (torch.tensor([[8]], dtype=torch.uint8), 3, "code 8 does not fit 3 bits"),
        (torch.tensor([[1]], dtype=torch.int32), 3, "expected uint8"),
        (torch.tensor([1], dtype=torch.uint8), 3, "expected uint8"),
        (torch.tensor([[1]], dtype=torch.uint8), 0, "bits must be 1 to 8, not 0"),
        (torch.tensor([[1]], dtype=torch.uint8), 9, "bits must be 1 to 8, not 9"),
    ],
)
def test_codes_that_do_not_fit_are_refused(codes, bits, message):
    with pytest.raises(ValueError, match=message):
        bitpack.pack(codes, bits)


def test_unpack_refuses_a_width_that_does_not_follow():
    with pytest.raises(ValueError, match="5 codes of 3 bits take 2 bytes a row, not 3"):
        bitpack.unpack(torch.zeros(1, 3, dtype=torch.uint8), 3, 5)
