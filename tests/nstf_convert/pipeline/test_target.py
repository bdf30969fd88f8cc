"""The weight a compressed prefix calls for undoes what can be undone, and goes no further than held-out tokens bear."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nstf_convert.pipeline.improve import target as target_module
from nstf_convert.pipeline.improve.target import Moments, Rows, joined, moments, targets


def target(
    weight: torch.Tensor, fit: Moments, held: Moments, damping: float = 1e-4
) -> tuple[torch.Tensor, float]:
    """Of one weight whose outputs count alike."""
    [found], _ = targets([(weight, torch.ones(len(weight)))], [fit, held], damping)
    return found


def drifted(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [tokens, 12] and what a prefix that shrinks and mixes them gives."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 12, generator=g)
    mixed = x @ (0.8 * torch.eye(12) + 0.1 * torch.randn(12, 12, generator=torch.Generator().manual_seed(9)))
    return x, mixed + 0.05 * torch.randn(tokens, 12, generator=g)


def test_target_reproduces_what_the_original_gives() -> None:
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    x, seen = drifted(4000)
    data = Rows(seen.split(500), x.split(500))
    new, share = target(
        weight, moments([data.part(slice(0, 6))], 1)[0], moments([data.part(slice(6, None))], 1)[0]
    )
    assert share > 0.95
    assert (seen @ new.T - x @ weight.T).norm() < 0.2 * (seen @ weight.T - x @ weight.T).norm()


def test_target_makes_up_for_the_residual_stream() -> None:
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    x, _ = drifted(4000)
    lag = x @ torch.randn(12, 5, generator=torch.Generator().manual_seed(2))
    data = Rows(x.split(500), x.split(500), lag.split(500))
    new, _ = target(
        weight, moments([data.part(slice(0, 6))], 1)[0], moments([data.part(slice(6, None))], 1)[0]
    )
    assert torch.allclose(x @ (new - weight).T, lag, atol=0.05)


def test_target_stays_when_held_out_tokens_gain_nothing() -> None:
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(3)
    x = torch.randn(40, 12, generator=g)
    noise = torch.randn(40, 5, generator=g)
    fit = Rows([x[:16]], [x[:16]], [noise[:16]])
    held = Rows([x[16:]], [x[16:]], [noise[16:]])
    new, share = target(weight, moments([fit], 1)[0], moments([held], 1)[0], 1e-3)
    assert share < 0.3
    assert (new - weight).norm() < 0.3 * noise[:16].norm()


def test_joined_moments_are_those_of_all_tokens() -> None:
    x, seen = drifted(900)
    w = torch.rand(900, generator=torch.Generator().manual_seed(4))
    data = Rows(seen.split(300), x.split(300), weights=w.split(300))
    both = joined(moments([data.part(slice(0, 1))], 1)[0], moments([data.part(slice(1, None))], 2)[0])
    whole = moments([data], 1)[0]
    assert torch.allclose(both.hessian, whole.hessian, atol=1e-5)
    assert torch.allclose(whole.hessian, (seen * w[:, None]).T @ seen / w.sum(), atol=1e-5)
    assert both.shift is not None and whole.shift is not None
    assert torch.allclose(both.shift, whole.shift, atol=1e-5)
    assert both.stream is None and abs(both.mass - whole.mass) < 1e-2


def test_rows_are_solved_in_as_many_parts_as_the_scratch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    x, seen = drifted(2000)
    data = Rows(seen.split(500), x.split(500))
    parts: list[int] = []
    solve = torch.linalg.solve_triangular

    def counted(a: torch.Tensor, b: torch.Tensor, *, upper: bool) -> torch.Tensor:
        parts.append(b.shape[1])
        return solve(a, b, upper=upper)

    monkeypatch.setattr(torch.linalg, "solve_triangular", counted)
    monkeypatch.setattr(target_module, "ROWS", 2)
    monkeypatch.setattr(target_module, "ELEMENTS", 24)
    found = []
    for scratch in (0, 12 * 8 * target_module.SCRATCH_BYTES):
        known = moments([data.part(slice(0, 3)), data.part(slice(3, None))], 1)
        (new, share), = targets([(weight, None)], known, 1e-4, scratch=scratch)[0]  # fmt: skip
        found.append((new, share, sorted(set(parts))))
        parts.clear()
    (some, share, sizes), (whole, other, all_rows) = found
    assert (sizes, all_rows) == ([2], [8])
    assert torch.allclose(some, whole, atol=1e-6)
    assert abs(share - other) < 1e-6


def test_only_how_far_to_go_is_judged_by_rounded_products() -> None:
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    x, seen = drifted(2000)
    data = Rows(seen.split(500), x.split(500))
    inside, products = [False], []

    @contextmanager
    def judging() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def each(work: Callable[..., Any], *items: Sequence[Any]) -> list[Any]:
        products.append(inside[0])
        return list(map(work, *items))

    known = moments([data.part(slice(0, 3)), data.part(slice(3, None))], 1)
    targets([(weight, None)], known, 1e-4, each, judging=judging)
    assert products == [False, True, False]  # the direction, its share, the correction
