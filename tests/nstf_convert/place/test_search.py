"""The search finds what trying everything finds; memory, unlike devices and experts decide as they should."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nstf_convert.place.costs import Model
from nstf_convert.place.fabric import Fabric
from nstf_convert.place.machine import Machine
from nstf_convert.place.plans import Layout, Plan, Stage, microbatches
from nstf_convert.place.predict import Load, Prediction, Predictor, busiest, touched
from nstf_convert.place.search import search
from nstf_convert.place.split import split, step_seconds

Made = Callable[..., Any]


def every_plan(predictor: Predictor) -> Iterator[Plan]:
    """All plans of a dense model: devices in every order, layers in every division."""
    count, layers = len(predictor.fabric.machine.devices), predictor.model.facts.layers
    for stages, ranks in itertools.product(range(1, count + 1), repeat=2):
        layout = Layout(stages, ranks)
        for devices in itertools.permutations(range(count), layout.devices):
            groups = [tuple(sorted(devices[s * ranks : (s + 1) * ranks])) for s in range(stages)]
            for cuts in itertools.combinations(range(1, layers), stages - 1):
                made = [
                    Stage((g,), a, b) for g, a, b in zip(groups, (0, *cuts), (*cuts, layers), strict=True)
                ]
                for parts in microbatches(layout, predictor.load.batch):
                    yield Plan(layout, tuple(made), parts)


def fits(found: Prediction, machine: Machine) -> bool:
    rooms = [machine.devices[i].memory_bytes - machine.devices[i].reserved_bytes for i in found.plan.devices]
    return all(size <= room for size, room in zip(found.memory, rooms, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_what_trying_everything_finds(machine: Made, model: Made, seed: int) -> None:
    draw = random.Random(seed)
    of = model(layers=4)
    devices = [
        {
            "bandwidth": draw.choice([1e11, 3e11, 1e12]),
            "memory_bytes": draw.choice([0.3, 0.7, 2.0]) * of.size_bytes + 4e7,
            "cost_per_hour": draw.choice([1, 2, 5]),
        }
        for _ in range(3)
    ]
    here = machine(
        *devices, link={"bandwidth": draw.choice([1e9, 1e11]), "latency_s": draw.choice([1e-7, 1e-5])}
    )
    predictor = Predictor(of, Fabric(here), Load(batch=draw.choice([1, 4]), context=64, prompt=8))
    known = [p for p in map(predictor.predict, every_plan(predictor)) if fits(p, here)]
    found = search(predictor).predictions
    assert known and found
    assert all(fits(p, here) for p in found)
    assert found[0].step_s == pytest.approx(min(p.step_s for p in known), rel=1e-9)


def test_layers_are_divided_at_the_least_time_within_memory() -> None:
    draw = random.Random(0)
    for case in range(80):
        count, layers, parts = draw.randint(1, 3), draw.randint(3, 6), draw.choice([1, 2, 8])
        alike, uniform = case % 2 == 0, case % 4 == 0
        rows = [[draw.uniform(1, 3) for _ in range(layers)] for _ in range(count)]
        times = [rows[0][:1] * layers if uniform else rows[0]] * count if alike else rows
        sizes = [[1.5] * layers if uniform else [draw.uniform(1, 2) for _ in range(layers)]] * count
        fixed = [draw.uniform(0, 1) for _ in range(count)]
        rooms = [draw.uniform(1, 9) for _ in range(count)]
        costs = {}
        for cuts in itertools.combinations(range(1, layers), count - 1):
            spans = list(itertools.pairwise((0, *cuts, layers)))
            if all(sum(sizes[s][a:b]) <= rooms[s] for s, (a, b) in enumerate(spans)):
                own = [sum(times[s][a:b]) + fixed[s] for s, (a, b) in enumerate(spans)]
                costs[*cuts, layers] = step_seconds(own, [], parts)
        found = split(times, fixed, sizes, rooms, parts)
        assert (found is None) == (not costs)
        if found is not None:
            assert costs[found] == pytest.approx(min(costs.values()), rel=1e-9)


def test_unlike_devices_get_unlike_parts(machine: Made, model: Made) -> None:
    of = model(layers=8)
    here = machine({"bandwidth": 1.5e12}, {"bandwidth": 5e10}, link={"bandwidth": 1e8})
    predictor = Predictor(of, Fabric(here), Load(batch=2))
    found = next(p for p in search(predictor).predictions if p.plan.layout == Layout(2))
    fast = next(s for s in found.plan.stages if s.groups == ((0,),))
    assert fast.stop - fast.first > 4
    even = Plan(Layout(2), (Stage(((0,),), 0, 4), Stage(((1,),), 4, 8)), found.plan.microbatches)
    assert predictor.predict(even).step_s > 1.2 * found.step_s


def test_what_does_not_fit_is_left_out_and_named(machine: Made, model: Made) -> None:
    of = model(layers=4)
    small = {"memory_bytes": 0.4 * of.size_bytes}
    predictor = Predictor(
        of, Fabric(machine(small, small, small, small)), Load(batch=1, context=16, prompt=1)
    )
    result = search(predictor)
    assert all(len(p.plan.devices) >= 3 for p in result.predictions)
    assert {"one device", "tensor 2", "pipeline 2"} <= set(result.refused)
    assert not search(predictor, most_devices=2).predictions
    # Keys and values count.
    long = Predictor(of, Fabric(machine({"memory_bytes": 1e9})), Load(batch=1000, context=10_000))
    assert not search(long).predictions


def test_a_number_of_ranks_that_the_model_does_not_allow_is_not_planned(machine: Made, model: Made) -> None:
    predictor = Predictor(model(ranks=2), Fabric(machine({}, {}, {}, {})), Load())
    result = search(predictor)
    assert {p.plan.layout.ranks for p in result.predictions} == {1, 2}
    assert result.refused["tensor 4"] == "too many"


def test_slow_links_keep_a_model_on_one_device(machine: Made, model: Made) -> None:
    of = model(layers=4, side=4096)
    for latency, best in ((1e-7, Layout(1, 2)), (1e-3, Layout(1, 1))):
        here = machine({}, {}, link={"latency_s": latency, "bandwidth": 1e12})
        assert search(Predictor(of, Fabric(here), Load())).predictions[0].plan.layout == best
    # And by cost a device more has to pay for itself.
    here = machine({}, {}, link={"latency_s": 1e-7, "bandwidth": 1e12})
    assert search(Predictor(of, Fabric(here), Load()), "cost").predictions[0].plan.layout == Layout(1, 1)


def test_experts_are_dealt_out_where_rows_are_many_and_links_fast(machine: Made, model: Made) -> None:
    of = model(layers=2, side=1024, experts=64, active=2)
    here = machine({}, {}, {}, {}, link={"bandwidth": 1e12, "latency_s": 1e-7})
    best = (
        search(Predictor(of, Fabric(here), Load(batch=256, context=16, prompt=4))).predictions[0].plan.layout
    )
    assert best.experts == "whole" and best.ranks * best.replicas == 4
    # One row touches two of 64 experts: dealt out, one device may have both, and cut in slices each has its part of both.
    one = search(Predictor(of, Fabric(here), Load(batch=1, context=16, prompt=4))).predictions[0].plan.layout
    assert one.experts == "slices"


def test_the_busiest_device_has_at_least_its_share() -> None:
    assert touched(64, 2, 1) == pytest.approx(2) and touched(64, 64, 1) == 64
    for rows in (1, 4, 64, 4096):
        assert touched(64, 2, rows) / 8 <= busiest(64, 8, 2, rows) <= 8
    assert busiest(64, 8, 2, 4096) == pytest.approx(8)
    # As a sum over all numbers gives it, and where its terms are no floats: more than 2,056 of them.
    assert busiest(512, 2, 8, 64) == pytest.approx(166.9068, abs=1e-3)
    for experts in (4096, 1 << 20):
        even = touched(experts, 8, 1000) / 8
        assert even < busiest(experts, 8, 8, 1000) < even + 6 * even**0.5
    # Trying it: one row's two experts of 64 on 8 devices.
    draw = random.Random(0)
    seen = [
        max(n.count(d) for d in range(8))
        for n in ([e // 8 for e in draw.sample(range(64), 2)] for _ in range(4000))
    ]
    assert busiest(64, 8, 2, 1) == pytest.approx(sum(seen) / len(seen), rel=0.12)


def test_equal_devices_are_tried_once(machine: Made, model: Made) -> None:
    from nstf_convert.place.plans import arrangements

    same, unlike = Fabric(machine(*[{}] * 8)), Fabric(machine({}, {}, {"bandwidth": 5e11}))
    assert len(list(arrangements(same, Layout(4, 2)))) == 1
    assert len(list(arrangements(unlike, Layout(1, 2)))) == 2
    assert len(list(arrangements(unlike, Layout(3, 1)))) == 3


def test_a_model_is_not_cut_into_more_stages_than_layers(machine: Made, model: Made) -> None:
    of: Model = model(layers=2)
    found = search(Predictor(of, Fabric(machine(*[{}] * 4)), Load())).predictions
    assert max(p.plan.layout.stages for p in found) == 2
