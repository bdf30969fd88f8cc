"""Second moments: half of a symmetric product is enough."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nstf.analyzers.moments import (
    STRIP,
    ExpertMoments,
    InputMoments,
    begun_mean_outer,
    rows_of,
    second_moment,
)


@pytest.mark.parametrize("features", [5, STRIP, STRIP + 1, 2 * STRIP + 40])
def test_a_second_moment_is_symmetric_and_that_of_all_rows(features: int) -> None:
    rows = torch.randn(70, features, generator=torch.Generator().manual_seed(features))
    wanted = (rows.double().T @ rows.double()).float()
    found = second_moment(rows)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    if features > STRIP:
        assert torch.equal(found, found.T)
    twice = second_moment(rows, found.clone())
    torch.testing.assert_close(twice, 2 * wanted, rtol=1e-4, atol=1e-4)


def test_a_mean_with_weights_is_the_same_for_one_input_twice_and_for_two_copies() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(n, STRIP + 30, generator=generator) for n in (40, 9)]
    weights = [torch.rand(n, generator=generator) for n in (40, 9)]
    for given in (weights, None):
        same = begun_mean_outer(rows, rows, given)()
        copies = begun_mean_outer(rows, [r.clone() for r in rows], given, workers=2)()
        torch.testing.assert_close(same, copies, rtol=1e-4, atol=1e-5)


def test_inputs_of_several_batches_are_added_up() -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(n, STRIP + 30, generator=generator) for n in (11, 40)]
    moments = InputMoments()
    for rows in batches:
        moments.add("x", rows)
    joined = torch.cat(batches)
    torch.testing.assert_close(
        moments.pop()["x"].hessian, joined.T @ joined / len(joined), rtol=1e-4, atol=1e-5
    )


def test_convolutions_of_one_input_share_its_moment_only_where_they_unfold_it_alike() -> None:
    """TextNet's branches read one input by kernels of 3 x 3, 3 x 1 and 1 x 3."""

    def conv(kernel: tuple[int, int], padding: tuple[int, int], stride: int = 1) -> nn.Conv2d:
        return nn.Conv2d(4, 2, kernel, stride=stride, padding=padding)

    layers = {
        "square": conv((3, 3), (1, 1)), "again": conv((3, 3), (1, 1)), "tall": conv((3, 1), (1, 0)),
        "strided": conv((3, 1), (1, 0), stride=2), "point": conv((1, 1), (0, 0)),
    }  # fmt: skip
    moments, x = InputMoments(), torch.randn(2, 4, 6, 5)
    for name, layer in layers.items():
        moments.watch(name, layer)
    for layer in layers.values():
        layer(x)
    found = moments.pop()
    assert {key: moment.members for key, moment in found.items()} == {
        "square": ("again", "square"), "tall": ("tall",), "strided": ("strided",), "point": ("point",),
    }  # fmt: skip
    for key, moment in found.items():
        rows = rows_of(layers[key], x)
        torch.testing.assert_close(moment.hessian, rows.T @ rows / rows.shape[0])


def test_a_mean_of_differences_is_that_of_the_left_rows_without_the_right() -> None:
    generator = torch.Generator().manual_seed(3)
    right = [torch.randn(n, 20, generator=generator) for n in (30, 9)]
    left = [r + 0.01 * torch.randn(r.shape, generator=generator) for r in right]
    weights = [torch.rand(n, generator=generator) for n in (30, 9)]
    for given in (weights, None):
        wanted = begun_mean_outer(left, right, given)() - begun_mean_outer(right, right, given)()
        found = begun_mean_outer(left, right, given, workers=2, difference=True)()
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_moments_are_in_float32_while_the_model_runs_in_16_bits() -> None:
    rows = torch.randn(300, 200, generator=torch.Generator().manual_seed(3))
    found = []
    for enabled in (False, True):
        moments = InputMoments({"x": torch.linspace(0.5, 1.5, 300)})
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            moments.add("x", rows)
        found.append(moments.pop()["x"].hessian)
    assert found[1].dtype == torch.float32 and torch.equal(*found)


@pytest.mark.parametrize("kind", ["MiniMaxM3VL", "DeepseekV4"])
def test_experts_are_followed_through_their_own_gate(kind: str) -> None:
    """Bounds and other activations were left out, or ended in an AttributeError (MiniMax M3)."""
    folder = {"MiniMaxM3VL": "minimax_m3_vl", "DeepseekV4": "deepseek_v4"}[kind]
    models = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_local_experts": 2}
    gate = {"swiglu_limit": 0.5, "swiglu_alpha": 1.7, "hidden_act": "silu"}
    torch.manual_seed(0)
    experts = getattr(models, f"{kind}Experts")(
        SimpleNamespace(**sizes, **gate, _experts_implementation="eager")
    )
    rows, index = torch.randn(40, 8), torch.arange(40)[:, None] % 2
    moments = InputMoments()
    ExpertMoments(moments).watch("experts", experts)
    with torch.no_grad():
        experts.gate_up_proj.normal_()
        experts.down_proj.copy_(torch.eye(8).expand(2, 8, 8))
        gated = experts(rows, index, torch.ones(40, 1))
    found = moments.pop(["experts.gate_up_proj", "experts.down_proj"])["experts.down_proj"]
    torch.testing.assert_close(found.hessian, gated.T @ gated / 40, rtol=1e-4, atol=1e-5)
