"""Which reshapes are offered for which tensor."""

import math

import pytest

from nstf.decomposers.views import balanced, views

CONFIG = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}


def dims(role: str, shape: tuple[int, ...], config=CONFIG) -> dict[str, tuple[int, ...]]:
    return {v.name: v.dims for v in views(role, shape, config)}


def test_projections_are_split_by_heads() -> None:
    assert dims("q", (576, 576))["heads"] == (9, 64, 576)
    assert dims("k", (192, 576))["heads"] == (3, 64, 576)
    assert dims("o", (576, 576))["heads"] == (576, 9, 64)
    assert dims("qkv", (960, 576))["heads"] == (15, 64, 576)
    assert "heads" not in dims("gate", (1536, 576))
    assert "heads" not in dims("q", (577, 576), {"num_attention_heads": 9})


def test_heads_follow_without_head_dim() -> None:
    assert dims("v", (192, 576), {"num_attention_heads": 9, "num_key_value_heads": 3})["heads"] == (
        3,
        64,
        576,
    )
    assert dims("q", (768, 768), {"n_head": 12})["heads"] == (12, 64, 768)


def test_experts_convolutions_and_tables_have_their_own_views() -> None:
    assert dims("expert_stack", (8, 64, 32)) == {"tall": (512, 32), "experts": (8, 64, 32)}
    assert dims("conv", (64, 48, 3, 3)) == {
        "patches": (64, 432),
        "kernel": (64, 48, 3, 3),
        "taps": (64, 48, 9),
    }
    assert dims("conv", (64, 48, 1, 1)) == {"patches": (64, 48)}
    assert dims("embedding", (49152, 576)) == {"matrix": (49152, 576), "vocabulary": (192, 256, 576)}


@pytest.mark.parametrize("shape", [(), (7,), (1, 7), (1, 1, 9), (2,) * 9])
def test_what_is_not_a_matrix_has_no_view(shape) -> None:
    assert views("other", shape) == []


@pytest.mark.parametrize("role", ["q", "o", "gate", "embedding", "conv", "expert_stack", "other"])
@pytest.mark.parametrize("shape", [(576, 576), (31, 37), (8, 6, 5), (8, 6, 3, 3), (2, 2)])
def test_every_view_has_all_elements(role, shape) -> None:
    found = views(role, shape, CONFIG)
    assert found
    for view in found:
        assert math.prod(view.dims) == math.prod(shape)
        assert view.methods


@pytest.mark.parametrize(
    "size,parts,expected",
    [(576, 2, (24, 24)), (49152, 3, (32, 32, 48)), (50257, 2, (29, 1733)), (13, 2, None), (12, 3, (2, 2, 3))],
)
def test_balanced_factors_are_as_equal_as_possible(size, parts, expected) -> None:
    assert balanced(size, parts) == expected
