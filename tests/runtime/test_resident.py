"""A parameter whose packed codes are kept as a GPU's kernels want them: what a module sees of it, tried on the CPU."""

import pytest
import torch

from nstf.kernels.formats import Node, decode
from nstf.kernels.formats.tree import EncodedTensor, array_specs, format_of
from nstf.kernels.triton.packed import PackedCodes, compact
from nstf.runtime import parameter
from nstf.runtime.parameter import EncodedParameter, embedding


def encoded_int(bits: int = 4) -> EncodedTensor:
    tree, generator = (
        Node("int", format_of("int").Params(bits=bits, group=32)),
        torch.Generator().manual_seed(0),
    )
    arrays = {}
    for path, spec in array_specs(tree, (24, 96)).items():
        if spec.dtype == torch.uint8:
            arrays[path] = torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=generator)
        else:
            arrays[path] = torch.randn(spec.shape, generator=generator).to(spec.dtype)
    return EncodedTensor(tree, (24, 96), arrays)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> EncodedParameter:
    """As after moving to a GPU."""
    monkeypatch.setattr(parameter, "resident", compact)
    return EncodedParameter(encoded_int(), torch.float32).to(torch.float32)


def test_the_stored_bytes_are_let_go_of(kept: EncodedParameter) -> None:
    assert isinstance(kept.encoded.arrays["codes"], PackedCodes)
    assert kept._buffers["codes"] is kept.encoded.arrays["codes"]
    assert torch.equal(decode(kept.encoded), decode(encoded_int()))


def test_the_state_dict_holds_what_was_stored(kept: EncodedParameter) -> None:
    stored = encoded_int().arrays
    assert isinstance(kept.encoded.arrays["codes"], PackedCodes)
    found = kept.state_dict()
    assert not isinstance(found["codes"], PackedCodes)
    assert all(torch.equal(found[path], stored[path]) for path in stored)


def test_words_last_through_a_change_of_dtype(kept: EncodedParameter) -> None:
    codes = kept.encoded.arrays["codes"]
    assert kept.to(torch.bfloat16).encoded.arrays["codes"] is codes and kept.dtype == torch.bfloat16


def test_writing_to_codes_kept_as_words_is_refused(kept: EncodedParameter) -> None:
    stored = encoded_int().arrays
    assert isinstance(kept.encoded.arrays["codes"], PackedCodes)
    with pytest.raises(RuntimeError, match="kept as words cannot be written to"):
        kept.load_state_dict(dict(stored))


def test_rows_of_an_embedding_come_from_the_gpus_kernel_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded, ids = encoded_int(), torch.tensor([[3, 1], [0, 3]])
    assert torch.equal(embedding(ids, encoded, torch.float32), decode(encoded)[ids])
    asked = []

    def rows(encoded: EncodedTensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        asked.append(ids.tolist())
        return torch.full((len(ids), encoded.shape[1]), 7, dtype=dtype)

    monkeypatch.setattr(parameter, "rows_on_gpu", rows)
    found = embedding(ids, encoded, torch.float16)
    assert asked == [[3, 1, 0, 3]] and found.shape == (2, 2, 96) and bool((found == 7).all())
