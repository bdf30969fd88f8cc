"""Families of encodings against the same bytes spent on rate."""

from types import SimpleNamespace
from typing import Any

import pytest

from nstf.kernels.formats import Node, dense
from nstf.kernels.formats.tree import format_of
from nstf.proposals import Look
from nstf_convert.pipeline.reporting import _ruled_out
from nstf_convert.report.families import (
    HYBRID,
    SHARED,
    Priced,
    Tensor,
    compare,
    family_of,
    family_of_kind,
    lines,
    ratio,
)


def integers(bits: int) -> Node:
    return Node("int", format_of("int").Params(bits, 32, True, 8))


def low_rank() -> Node:
    children = {"a": integers(4), "b": integers(4)}
    return Node("low_rank", format_of("low_rank").Params(4), children)


PLAIN = (
    Priced(integers(2), 100, 8.0, False),
    Priced(integers(3), 200, 2.0, True),
    Priced(integers(4), 300, 1.0, False),
)


def test_a_ratio_is_taken_on_the_hull_at_equal_bytes() -> None:
    assert ratio(Priced(low_rank(), 150, 4.0, True), PLAIN) == pytest.approx(0.8)
    assert ratio(Priced(low_rank(), 200, 4.0, True), PLAIN) == pytest.approx(2.0)
    assert ratio(Priced(low_rank(), 500, 1.5, True), PLAIN) == pytest.approx(1.5)
    assert ratio(Priced(low_rank(), 500, 0.5, True), PLAIN) is None
    # Smaller than every plain format: a win where it loses less than the smallest.
    assert ratio(Priced(low_rank(), 99, 9.0, True), PLAIN) is None
    assert ratio(Priced(low_rank(), 99, 2.0, True), PLAIN) == pytest.approx(0.25)
    assert ratio(Priced(low_rank(), 150, 1.0, True), ()) is None
    # A plain format that loses nothing is no measure, least of all beside an estimate that rounding took below zero.
    assert ratio(Priced(low_rank(), 99, -1e-12, True), [Priced(integers(2), 100, 0.0, False)]) is None


def test_families_are_counted_by_tensor_with_median_and_best() -> None:
    tensors = [
        Tensor(
            "a", (*PLAIN, Priced(low_rank(), 150, 2.5, True), Priced(low_rank(), 200, 4.0, False)), low_rank()
        ),
        Tensor("b", (*PLAIN, Priced(low_rank(), 150, 10.0, False)), integers(3)),
        Tensor("c", (Priced(Node("dense", dense.Params("float32")), 900, 0.0, True),), integers(3)),
    ]
    found = {f["family"]: f for f in compare(tensors)}
    assert list(found) == ["SVD", "int"]
    svd = found["SVD"]
    assert (svd["tensors"], svd["candidates"], svd["exact"], svd["won"], svd["chosen"]) == (2, 3, 1, 1, 1)
    assert svd["best_ratio"] == pytest.approx(0.5)
    assert svd["median_ratio"] == pytest.approx(1.25)
    # No other plain format to compare with.
    assert found["int"]["median_ratio"] is None and found["int"]["won"] == 0
    assert "SVD: tried on 2 tensors, won on 1, chosen for 1" in lines(compare(tensors))[0]


def test_what_a_bound_ruled_out_is_said_with_the_bound() -> None:
    tensors = [
        Tensor("a", (*PLAIN, Priced(low_rank(), 150, 2.5, True)), low_rank()),
        Tensor("b", PLAIN, integers(3)),
    ]
    rows = compare(tensors, {"SVD": [3.0, 2.0], "CP": [4.8, 9.0]})
    assert [(f["family"], f["ruled_out"], f["bound_ratio"]) for f in rows] == [
        ("CP", 2, 4.8), ("SVD", 2, 2.0), ("int", 0, None),
    ]  # fmt: skip
    said = lines(rows)
    assert said[0] == "CP: bound 4.80x the loss of the same bytes in rate on the best of 2 tensors; not tried"
    assert said[1].endswith("; not tried on 2 others, where the bound is 2.00x that loss at best")


def test_what_experts_share_is_a_family_of_its_own_ruled_out_by_an_estimate() -> None:
    assert (family_of_kind("add"), family_of_kind("add", experts=True)) == (HYBRID, SHARED)
    assert family_of_kind("low_rank", experts=True) == "SVD"
    encoder = SimpleNamespace(looks=lambda unit, allowed: [Look("add", 100, 6.0, 2.0)])
    units = {"stack": SimpleNamespace(lead=2), "matrix": SimpleNamespace(lead=1)}
    plain = [SimpleNamespace(recipe=SimpleNamespace(method="int_grid"))]
    run: Any = SimpleNamespace(
        session=SimpleNamespace(encoder=encoder, units=units),
        allowed={"add"},
        table=SimpleNamespace(candidates=dict.fromkeys(units, plain)),
    )
    found = _ruled_out(run)
    assert found == {SHARED: [3.0], HYBRID: [3.0]}
    said = lines(compare([], found))
    assert said[0].startswith(f"{HYBRID}: bound 3.00x") and said[1].startswith(f"{SHARED}: estimate 3.00x")


def test_wrappers_belong_to_what_they_hold() -> None:
    permuted = Node("permute", format_of("permute").Params((1, 0)), {"x": integers(4)})
    assert family_of(permuted) == ("int", True)
    hybrid = Node("add", format_of("add").Params(), {"x": integers(2), "y": low_rank()})
    assert family_of(hybrid) == ("low rank on low bits", False)


def test_wins_at_sizes_that_no_plain_format_has_do_not_bend_the_median() -> None:
    tensors = [
        # Below the smallest plain size a form that loses more has no ratio, one that loses less has.
        Tensor("a", (*PLAIN, Priced(low_rank(), 50, 4.0, True)), low_rank()),
        Tensor("b", (*PLAIN, Priced(low_rank(), 50, 12.0, True)), integers(3)),
        Tensor("c", (*PLAIN, Priced(low_rank(), 150, 10.0, True)), integers(3)),
    ]
    svd = compare(tensors)[0]
    assert (svd["family"], svd["won"], svd["best_ratio"]) == ("SVD", 1, pytest.approx(0.5))
    assert svd["median_ratio"] == pytest.approx(2.0)
