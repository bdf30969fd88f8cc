"""The signature of a tensor."""

import json

import pytest
import torch

from nstf.analyzers import signatures
from nstf.analyzers.signatures import summary


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hessian_of(size: int) -> torch.Tensor:
    x = noise(4 * size, size, seed=1) * torch.logspace(0, -2, size)
    return x.T @ x / x.shape[0]


def test_a_projection_has_everything() -> None:
    name = "model.layers.3.self_attn.q_proj.weight"
    s = summary(name, noise(32, 24), hessian_of(24), reshapes=[(4, 8, 24)])
    assert (s.role, s.layer, s.shape, s.rows, s.cols, s.sampled) == ("q", 3, (32, 24), 32, 24, False)
    assert s.spectrum is not None and s.whitened is not None
    assert s.whitened.effective_rank < s.spectrum.effective_rank
    assert [v.dims for v in s.views] == [(4, 8, 24)]
    assert [0 < rank <= size for rank, size in zip(s.views[0].effective_ranks, (4, 8, 24), strict=True)]


@pytest.mark.parametrize(
    "name,shape,hessian,matrix",
    [
        ("model.norm.weight", (16,), None, (1, 16)),
        ("model.layers.0.mlp.experts.down_proj", (3, 8, 6), 6, (24, 6)),
        ("stem.conv1.weight", (8, 4, 3, 3), 4, (8, 36)),
        ("stem.conv1.weight", (8, 4, 3, 3), 36, (8, 36)),
        ("model.encoder.conv1.weight", (8, 4, 3), 12, (8, 12)),
        ("lm_head.weight", (40, 6), None, (40, 6)),
        ("scale", (), None, (1, 1)),
    ],
)
def test_every_kind_of_tensor_has_one(name, shape, hessian, matrix) -> None:
    s = summary(name, noise(*shape), None if hessian is None else hessian_of(hessian))
    assert (s.rows, s.cols) == matrix
    assert (s.whitened is None) == (hessian is None)
    text = json.dumps(s.to_json(), allow_nan=False)
    assert json.loads(text)["name"] == name


def test_rows_beyond_the_limit_are_sampled_and_said_so(monkeypatch) -> None:
    monkeypatch.setattr(signatures, "ROW_LIMIT", 64)
    s = summary("model.embed_tokens.weight", noise(1000, 16))
    assert s.rows_used == 64 and s.sampled and s.to_json()["sampled"] is True


def test_same_tensor_gives_the_same_signature() -> None:
    first, second = (summary("a.weight", noise(20, 12), hessian_of(12)) for _ in range(2))
    assert first == second


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="hessian of shape"):
        summary("a.weight", noise(20, 12), hessian_of(20))
    with pytest.raises(ValueError, match="NaN or infinity"):
        summary("a.weight", torch.full((4, 4), torch.nan))
