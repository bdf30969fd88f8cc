"""Collectives on a graph: the closed forms on equal links, and what shared links cost."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from nstf_convert.place.fabric import Fabric, interpolated
from nstf_convert.place.machine import Machine, from_json, read_machine

# Of the conftest's links: to the switch and from it.
LATENCY, BANDWIDTH = 2e-6, 1e10
SIZE = 1e6


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_reduces_on_a_switch_take_what_their_formulas_say(
    machine: Callable[..., Machine], ranks: int
) -> None:
    fabric, group = Fabric(machine(*[{}] * ranks)), tuple(range(ranks))
    ring = 2 * (ranks - 1) * (LATENCY + SIZE / ranks / BANDWIDTH)
    assert fabric.all_reduce(group, SIZE, "ring") == pytest.approx(ring)
    one_step = LATENCY + (ranks - 1) * SIZE / BANDWIDTH
    two_steps = 2 * (LATENCY + (ranks - 1) / ranks * SIZE / BANDWIDTH)
    assert fabric.all_reduce(group, SIZE, "direct") == pytest.approx(min(one_step, two_steps))
    assert fabric.all_reduce(group, 8, "direct") == pytest.approx(LATENCY, rel=1e-2)
    steps = 2 * math.ceil(math.log2(ranks)) * LATENCY
    # Each half goes up in one tree and down again; between two ranks there is one link, and two children share theirs.
    times = 1 if ranks == 2 else 2
    assert fabric.all_reduce(group, SIZE, "tree") == pytest.approx(steps + times * SIZE / BANDWIDTH)
    assert fabric.all_gather(group, SIZE) == pytest.approx(LATENCY + (ranks - 1) / ranks * SIZE / BANDWIDTH)
    assert fabric.all_to_all(group, SIZE) == pytest.approx(LATENCY + (ranks - 1) / ranks * SIZE / BANDWIDTH)


def test_one_rank_sends_nothing(machine: Callable[..., Machine]) -> None:
    fabric = Fabric(machine({}))
    assert (
        fabric.all_reduce((0,), SIZE) == fabric.all_gather((0,), SIZE) == fabric.all_to_all((0,), SIZE) == 0
    )


def test_transfers_share_a_link_and_half_duplex_links_both_ways(machine: Callable[..., Machine]) -> None:
    full, half = Fabric(machine({}, {}, {})), Fabric(machine({}, {}, {}, link={"duplex": "half"}))
    assert full.together([(0, 1), (1, 0)]).at(SIZE) == pytest.approx(LATENCY + SIZE / BANDWIDTH)
    assert half.together([(0, 1), (1, 0)]).at(SIZE) == pytest.approx(LATENCY + 2 * SIZE / BANDWIDTH)
    assert full.together([(0, 2), (1, 2)]).at(SIZE) == pytest.approx(LATENCY + 2 * SIZE / BANDWIDTH)


def test_a_mesh_has_a_link_for_every_pair() -> None:
    fabric = Fabric(read_machine("mi300x8"))
    link = fabric.machine.links[0]
    whole = tuple(range(8))
    assert fabric.together((a, b) for a in whole for b in whole if a != b).per_byte_s == pytest.approx(
        1 / link.rate
    )
    # So all to all uses seven times the links that a ring does.
    assert fabric.all_reduce(whole, 1e8, "direct") < fabric.all_reduce(whole, 1e8, "ring") / 3


def test_two_hosts_are_reduced_within_first(machine: Callable[..., Machine]) -> None:
    fabric = Fabric(read_machine("h100x16"))
    whole = tuple(range(16))
    assert fabric.best_algorithm(whole, 1e8) == "hierarchical"
    inner, outer = (
        next(x for x in fabric.machine.links if x.kind == k).rate for k in ("NVLink", "InfiniBand")
    )
    # Seven eighths twice within a host, an eighth twice by half between the two.
    expected = 2 * 7 / 8 * 1e8 / inner + 2 / 2 / 8 * 1e8 / outer
    assert fabric.all_reduce(whole, 1e8) == pytest.approx(expected, rel=0.05)


def test_a_pcie_tree_is_shared() -> None:
    fabric = Fabric(read_machine("rtx4090x4"))
    near, far = fabric.route(0, 1), fabric.route(0, 2)
    assert len(near[1]) == 2 and len(far[1]) == 4 and near[0] < far[0]
    # Both pairs that cross the bridges at the same time have half of what one has.
    crossing = fabric.together([(0, 2), (1, 3)]).per_byte_s
    assert crossing == pytest.approx(2 / 40e9) and crossing > fabric.together([(0, 2)]).per_byte_s


def test_measured_all_reduces_are_taken_as_they_are(machine: Callable[..., Machine]) -> None:
    data: dict[str, Any] = machine({}, {}, {}).to_json()
    data["collectives"]["measured"] = {"2": [[1000, 1e-5], [3000, 3e-5]]}
    fabric = Fabric(from_json(data))
    found = [fabric.all_reduce((0, 1), n) for n in (10, 1000, 2000, 3000, 5000)]
    assert found == pytest.approx([1e-5, 1e-5, 2e-5, 3e-5, 5e-5])
    assert fabric.all_reduce((0, 1, 2), 1000) == pytest.approx(LATENCY + 2 * 1000 / BANDWIDTH)


def test_points_between_measurements_lie_on_lines() -> None:
    curve = [(1.0, 1.0), (3.0, 2.0), (5.0, 10.0)]
    assert [interpolated(curve, x) for x in (0, 1, 2, 3, 4, 5, 6)] == [1, 1, 1.5, 2, 6, 10, 14]
