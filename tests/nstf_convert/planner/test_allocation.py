"""The allocator against exhaustive search, and its promises."""

import itertools
import os
import random
import signal
import threading

import numpy as np
import pytest

from nstf_convert.planner import Infeasible, Option, TooSlow, allocate, allocation, lower_hull, pareto, timed
from nstf_convert.planner.exchange import exchanged
from nstf_convert.planner.table import reduced_costs, table_of


def _units(seed: int, count: int, options: int) -> list[list[Option]]:
    rng = random.Random(seed)
    return [
        [Option(rng.randint(10, 400), rng.random() * 10 ** rng.uniform(-4, 0)) for _ in range(options)]
        for _ in range(count)
    ]


def _best(units: list[list[Option]], budget: int) -> float:
    totals = [
        sum(o.loss for o in mix)
        for mix in itertools.product(*units)
        if sum(o.size_bytes for o in mix) <= budget
    ]
    return min(totals)


@pytest.mark.parametrize("seed", range(30))
def test_allocation_is_as_good_as_exhaustive_search(seed: int) -> None:
    units = _units(seed, 6, 5)
    smallest = sum(min(o.size_bytes for o in u) for u in units)
    largest = sum(max(o.size_bytes for o in u) for u in units)
    for share in (0.0, 0.1, 0.35, 0.7, 1.0):
        budget = int(smallest + share * (largest - smallest))
        found = allocate(units, budget)
        assert found.size_bytes <= budget
        assert found.loss <= _best(units, budget) * 1.05 + 1e-12


def test_allocation_within_one_percent_of_the_relaxation_on_a_model_sized_problem() -> None:
    rng = random.Random(0)
    units = []
    for _ in range(210):
        weights, importance = rng.choice([110_592, 331_776, 884_736]), 10 ** rng.uniform(-4, -1)
        units.append([Option(weights * b // 8 + 300, importance * 4.0**-b) for b in range(2, 9)])
    budget = sum(weights[0].size_bytes * 2 for weights in units)
    found = allocate(units, budget)
    assert found.size_bytes <= budget
    assert budget - found.size_bytes < 150_000
    uniform = sum(u[2].loss for u in units)
    assert found.loss < uniform


def test_infeasible_budget_names_the_smallest_total() -> None:
    units = [[Option(100, 1.0), Option(200, 0.5)], [Option(50, 1.0)]]
    with pytest.raises(Infeasible) as caught:
        allocate(units, 149)
    assert caught.value.smallest_bytes == 150
    assert allocate(units, 150).choice == (0, 0)


def test_a_unit_without_options_is_refused() -> None:
    with pytest.raises(ValueError, match="no options"):
        allocate([[]], 100)


def test_pareto_and_hull_drop_what_no_budget_wants() -> None:
    options = [
        Option(10, 9.0),
        Option(20, 8.5),
        Option(30, 1.0),
        Option(30, 2.0),
        Option(40, 1.5),
        Option(50, 0.5),
    ]
    assert pareto(options) == [0, 1, 2, 5]
    assert lower_hull(options) == [0, 2, 5]


def test_a_forked_process_plans_where_its_parent_has(monkeypatch) -> None:
    """With more than two processors HiGHS keeps threads, for which a forked process waited without end."""
    units = _units(1, 60, 8)
    budget = int(1.5 * sum(min(o.size_bytes for o in u) for u in units))
    from scipy.optimize import _milp

    plain = _milp._highs_wrapper
    monkeypatch.setattr(_milp, "_highs_wrapper", lambda *a: plain(*a[:-1], {**a[-1], "threads": 4}))
    found = allocate(units, budget)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(int(allocate(units, budget) != found))
    assert os.waitpid(child, 0)[1] == 0


def test_same_input_gives_the_same_choice() -> None:
    units = _units(3, 40, 8)
    budget = sum(u[0].size_bytes for u in units)
    assert allocate(units, budget) == allocate(units, budget)


def _timed_units(seed: int, count: int, options: int) -> list[list[Option]]:
    """Options whose seconds follow neither bytes nor losses."""
    rng = random.Random(seed)
    return [
        [
            Option(rng.randint(10, 400), rng.random() * 10 ** rng.uniform(-4, 0), rng.uniform(0.1, 3.0))
            for _ in range(options)
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_two_bounds_are_kept_and_nearly_as_good_as_exhaustive_search(seed: int) -> None:
    units = _timed_units(seed, 6, 5)
    smallest = sum(min(o.size_bytes for o in u) for u in units)
    largest = sum(max(o.size_bytes for o in u) for u in units)
    budget = int(smallest + 0.6 * (largest - smallest))
    mixes = [m for m in itertools.product(*units) if sum(o.size_bytes for o in m) <= budget]
    fastest = min(sum(o.seconds for o in m) for m in mixes)
    free = allocate(units, budget).seconds
    for share in (0.2, 0.5, 0.8):
        bound = fastest + share * (free - fastest) + 1e-9
        best = min(sum(o.loss for o in m) for m in mixes if sum(o.seconds for o in m) <= bound)
        found = allocate(units, budget, bound_seconds=bound)
        assert found.size_bytes <= budget and found.seconds <= bound
        assert found.loss <= best * 1.02 + 1e-12


def test_a_bound_that_does_not_bind_costs_nothing() -> None:
    units = _timed_units(0, 20, 8)
    budget = sum(sorted(o.size_bytes for o in u)[3] for u in units)
    free = allocate(units, budget)
    bounded = allocate(units, budget, bound_seconds=free.seconds)
    assert bounded.loss <= free.loss and bounded.seconds <= free.seconds


def test_less_time_costs_loss_and_never_the_bounds() -> None:
    units = _timed_units(1, 60, 12)
    budget = sum(sorted(o.size_bytes for o in u)[6] for u in units)
    free = allocate(units, budget)
    losses = [free.loss]
    for share in (0.9, 0.7, 0.5):
        for exact in (False, True):
            found = allocate(units, budget, exact, bound_seconds=share * free.seconds)
            assert found.size_bytes <= budget and found.seconds <= share * free.seconds
        losses.append(found.loss)
    assert losses == sorted(losses)


@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_three_units_improves_an_exchanged_choice(seed: int) -> None:
    units = _timed_units(seed, 9, 6)
    budget = sum(sorted(o.size_bytes for o in u)[3] for u in units)
    bound = 0.7 * allocate(units, budget).seconds
    table, _ = table_of(units, budget, bound)
    fastest = timed._filled(
        table, timed._within_bytes(table, table.seconds)[0], table.seconds, check_time=False
    )
    _, a, b = timed._within_both(table, fastest)
    found = exchanged(table, fastest, a, b)
    assert table.fits(found)
    loss = table.totals(found)[1]
    assert loss <= table.totals(fastest)[1]
    for changed in itertools.combinations(range(len(units)), 3):
        for options in itertools.product(range(6), repeat=3):
            other = found.copy()
            other[list(changed)] = options
            assert not table.fits(other) or table.totals(other)[1] >= loss * (1 - 1e-9)


def test_a_model_sized_plan_with_two_bounds_needs_no_program(monkeypatch) -> None:
    # Units of seven shapes whose losses fall with the bytes as those of quantisers, some formats slower than others.
    rng = random.Random(5)
    units = []
    for u in range(210):
        scale, size = rng.uniform(0.5, 2.0), (100, 300, 300, 900, 900, 900, 2700)[u % 7]
        units.append(
            [Option(size * q // 8, scale * 4.0 ** (-q / 4) * kind, size * q * slow)
             for q in range(8, 33) for kind, slow in ((1.0, 3.0), (1.4, 1.0))]
        )  # fmt: skip
    budget = sum(u[0].size_bytes for u in units) * 2
    free = allocate(units, budget)
    bound = 0.6 * free.seconds
    monkeypatch.setattr("scipy.optimize.milp", lambda *args, **kwargs: pytest.fail("a program was asked"))
    found = allocate(units, budget, bound_seconds=bound)
    assert found.size_bytes <= budget and found.seconds <= bound
    table, _ = table_of(units, budget, bound)
    _, least = reduced_costs(
        table, *timed._within_both(table, timed._within_bytes(table, table.seconds)[0])[1:]
    )
    assert table.totals(np.array(found.choice))[1] * (1 - timed._NEAR) <= least


def test_a_bound_nobody_meets_names_the_fastest_choice() -> None:
    units = [[Option(100, 1.0, 2.0), Option(200, 0.5, 1.0)], [Option(50, 1.0, 3.0)]]
    assert allocate(units, 300, bound_seconds=4.0).choice == (1, 0)
    with pytest.raises(TooSlow) as caught:
        allocate(units, 200, bound_seconds=4.0)
    assert caught.value.fastest_seconds == pytest.approx(5.0)


def test_bytes_alone_are_not_planned_to_the_end_where_that_is_far_too_slow(monkeypatch) -> None:
    units = _timed_units(1, 60, 12)
    budget = sum(sorted(o.size_bytes for o in u)[6] for u in units)
    quick, found = allocate(units, budget, False), allocate(units, budget)
    programs = []
    real = allocation._exact
    monkeypatch.setattr(allocation, "_exact", lambda *given: programs.append(1) or real(*given))
    # By bytes alone the end of it cannot get within the bound: what is found within it is the same.
    assert found.seconds > 0.9 * quick.seconds
    slow = allocate(units, budget, bound_seconds=0.8 * quick.seconds)
    assert not programs and slow.seconds <= 0.8 * quick.seconds
    assert allocate(units, budget, bound_seconds=2 * quick.seconds).loss <= found.loss
    assert programs


def test_a_choice_that_no_other_can_beat_by_much_asks_no_program(monkeypatch) -> None:
    units = [[Option(100 + 9 * i, (1 + u % 7) * 0.5 ** (i / 4)) for i in range(40)] for u in range(600)]
    budget = 600 * 280
    monkeypatch.setattr("scipy.optimize.milp", lambda *args, **kwargs: pytest.fail("a program was asked"))
    found = allocate(units, budget)
    least = allocation._least_loss(units, found.multiplier, budget)
    assert least <= found.loss <= (1 + allocation.GAP) * least
    # Nor where a bound on time does not bind.
    assert allocate(units, budget, bound_seconds=1.0) == found


def test_the_program_is_given_all_options_of_the_best_choice(monkeypatch) -> None:
    rng = random.Random(3)
    for _ in range(20):
        units = [[Option(rng.randint(10, 400), rng.random()) for _ in range(6)] for _ in range(5)]
        budget = int(1.5 * sum(min(o.size_bytes for o in u) for u in units))
        hulls = [allocation.lower_hull(u) for u in units]
        choice, multiplier = allocation._lagrangian(units, hulls, budget)
        best = min(
            (m for m in itertools.product(*map(range, map(len, units)))
             if sum(u[i].size_bytes for u, i in zip(units, m, strict=True)) <= budget),
            key=lambda m: sum(u[i].loss for u, i in zip(units, m, strict=True)),
        )  # fmt: skip
        loss = [sum(u[i].loss for u, i in zip(units, m, strict=True)) for m in (choice, best)]
        monkeypatch.setattr(allocation, "_near", lambda options, current, multiplier: range(len(options)))
        worth = allocation._worth_asking(units, choice, multiplier, budget)
        near_enough = loss[0] - loss[1] <= allocation.GAP * loss[0]
        assert near_enough or all(i in found for i, found in zip(best, worth, strict=True))


def _plain_bisection(table, cost):
    """What `timed._within_bytes` gives, with every unit asked in every round."""
    choice = np.lexsort((table.size, cost), axis=1)[:, 0]
    if table.totals(choice)[0] <= table.budget:
        return choice, 0.0
    best, finite = np.lexsort((cost, table.size), axis=1)[:, 0], cost[np.isfinite(cost)]
    spread = max(float(finite.max() - finite.min()), 1e-30)
    low, high = np.log(spread * 1e-16 / table.budget), np.log(spread * 1e6)
    for _ in range(timed._ROUNDS_BYTES):
        middle = (low + high) / 2
        choice = np.argmin(cost + np.exp(middle) * table.size, axis=1)
        if table.totals(choice)[0] <= table.budget:
            high, best = middle, choice
        else:
            low = middle
    return best, float(np.exp(high))


@pytest.mark.parametrize("seed", range(20))
def test_a_bisection_of_open_units_finds_what_one_of_all_does(seed: int) -> None:
    units = _units(seed, 30, 12)
    units[0] = units[0][:3]  # of fewer options than the others
    smallest = sum(min(o.size_bytes for o in u) for u in units)
    for more in (0, 50, 2000, 10**6):
        table, _ = table_of(units, smallest + more, 1.0)
        found, price = timed._within_bytes(table, table.loss)
        expected, expected_price = _plain_bisection(table, table.loss)
        assert found.tolist() == expected.tolist() and price == expected_price


def test_stdout_is_as_it_was_after_programs_of_several_threads() -> None:
    """One that kept stdout while another had it sent away could leave it so."""
    before = os.fstat(1)
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with allocation.contained_highs():
            entered.set()
            leave.wait(30)

    def second() -> None:
        entered.wait(30)
        with allocation.contained_highs():
            pass

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    entered.wait(30)
    threads[1].join(0.2)
    leave.set()
    for thread in threads:
        thread.join(30)
    assert os.path.samestat(os.fstat(1), before)
