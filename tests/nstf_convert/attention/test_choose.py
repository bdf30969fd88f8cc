"""A budget to a plan: bytes are kept, measurements decide, and what cannot be is refused with what could."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from nstf.errors import BudgetError
from nstf.runtime.attention_plan import LayerPlan
from nstf.runtime.kv_formats import PLAIN, group_bytes
from nstf_convert.pipeline.attention import chooser as module
from nstf_convert.pipeline.attention.choose import choose
from nstf_convert.pipeline.attention.measured import ANSWERS, Loss, by_length, summarised
from nstf_convert.pipeline.attention.options import choices, layers_of, uniforms
from nstf_convert.pipeline.attention.profile import FORMATS, THRESHOLDS, Profile, sampled_blocks

LAYERS, GROUPS, HEADS, CONTEXT, SIZE = 3, 2, 4, 1024, 64
WINDOWS = (128, 256)


def profile(seed: int = 0, layers: int = LAYERS) -> Profile:
    """Groups that differ by factors of a hundred; losses fall with bits and windows."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return 10 ** (-4 + 2 * torch.rand(*shape, 1, generator=generator, dtype=torch.float64))

    steps = torch.tensor([4.0 ** (4 - f.bits) for f in FORMATS], dtype=torch.float64)
    window = torch.tensor([30 / w for w in WINDOWS], dtype=torch.float64)
    blocks = weight(layers, HEADS) * (1 - torch.tensor(THRESHOLDS, dtype=torch.float64)) * 1e-3
    return Profile(
        CONTEXT,
        WINDOWS,
        (0,) * layers,
        keys=weight(layers, GROUPS) * steps,
        values=weight(layers, GROUPS) * steps,
        rings=weight(layers, GROUPS) * window,
        streaming=weight(layers, HEADS) * window,
        blocks=blocks,
        density=torch.tensor(THRESHOLDS, dtype=torch.float64).expand(layers, HEADS, -1) / 3,
        error=torch.full((layers, HEADS, 6), 0.1, dtype=torch.float64),
        mass=torch.full((layers, HEADS, 6), 0.9, dtype=torch.float64),
    )


class Truth:
    """Losses as a measurement would find them: the expected ones, keys `keys` times as large, with an error."""

    def __init__(self, found: Profile, keys: float = 1.0, error: float = 0.0, ratio: float = 1.0) -> None:
        self.found, self.keys, self.error, self.ratio, self.calls = found, keys, error, ratio, 0

    def __call__(self, layers: Sequence[LayerPlan]) -> Loss:
        self.calls += 1
        total = 0.0
        for layer, plan in enumerate(layers):
            for index, group in enumerate(plan.groups):
                for fmt, losses, factor in (
                    (group.keys, self.found.keys, self.keys),
                    (group.values, self.found.values, 1.0),
                ):
                    if fmt != PLAIN:
                        total += factor * float(losses[layer, index, FORMATS.index(fmt)])
                if group.recent:
                    total += float(self.found.rings[layer, index, WINDOWS.index(group.recent)])
            for head, rule in enumerate(plan.heads):
                if rule.block_sparse:
                    total += float(self.found.blocks[layer, head, THRESHOLDS.index(rule.block_sparse[0])])
        return Loss(total, self.error, self.ratio)


def size_of(layers: Sequence[LayerPlan]) -> int:
    return sum(group_bytes(group, SIZE, CONTEXT) for plan in layers for group in plan.groups)


@pytest.mark.parametrize("budget", [0.6, 0.4, 0.25])
def test_a_plan_keeps_the_budget_and_beats_every_single_setting(budget: float) -> None:
    found = profile()
    truth = Truth(found)
    chosen = choose(found, SIZE, truth, budget, None)
    dense = LAYERS * GROUPS * CONTEXT * SIZE * 4
    assert chosen.size_bytes == size_of(chosen.layers) <= budget * dense
    assert chosen.share == chosen.size_bytes / dense
    singles = [layers_of(same, found) for same in uniforms(found)]
    fitting = [truth(layers).mean for layers in singles if size_of(layers) <= budget * dense]
    # At 0.6 it is 8 bits everywhere; below, groups differ.
    assert fitting and chosen.loss.mean <= min(fitting) * (1.0 if budget == 0.6 else 0.9)
    assert len(chosen.rivals) == 2 and not chosen.is_uniform


def test_a_plan_that_measures_worse_than_one_setting_is_replaced_by_it() -> None:
    found = profile()

    def measure(layers: Sequence[LayerPlan]) -> Loss:
        # Whatever is not the same everywhere loses more here: expectations cannot know that.
        return Loss(0.01 if len({plan.groups for plan in layers}) == 1 else 0.5, 0.0)

    chosen = choose(found, SIZE, measure, 0.4, None)
    assert chosen.is_uniform and chosen.loss.mean == 0.01


def test_measurements_correct_what_is_expected() -> None:
    found = profile()
    truth = Truth(found, keys=20.0)
    chosen = choose(found, SIZE, truth, 0.3, None)
    assert chosen.factors == pytest.approx((20.0, 1.0, 1.0))
    naive = choose(found, SIZE, Truth(found), 0.3, None)
    assert chosen.loss.mean < truth(naive.layers).mean


def test_an_allowance_gives_the_smallest_plan_that_holds_it_with_its_error() -> None:
    found = profile()
    loose = choose(found, SIZE, Truth(found, keys=3.0), None, 0.05)
    tight = choose(found, SIZE, Truth(found, keys=3.0), None, 0.005)
    unsure = choose(found, SIZE, Truth(found, keys=3.0, error=0.002), None, 0.005)
    assert loose.loss.upper <= 0.05 and tight.loss.upper <= 0.005 and unsure.loss.upper <= 0.005
    assert loose.share < tight.share <= unsure.share < 1
    assert loose.loss.mean > 0.02


def test_an_allowance_is_held_for_a_text_that_loses_more() -> None:
    found = profile()
    here = choose(found, SIZE, Truth(found), None, 0.005)
    elsewhere = choose(found, SIZE, Truth(found, ratio=2.0), None, 0.005)
    assert 2 * elsewhere.loss.mean <= 0.005 < 2 * here.loss.mean
    assert here.share < elsewhere.share < 1


def test_a_budget_is_a_limit_where_an_allowance_is_given() -> None:
    found = profile()
    both = choose(found, SIZE, Truth(found), 0.6, 0.005)
    smallest = choose(found, SIZE, Truth(found), None, 0.005)
    assert smallest.share < both.share < 0.5 and both.loss.upper <= 0.005
    # Where the budget binds, the best plan within it.
    tight = choose(found, SIZE, Truth(found), smallest.share + 0.002, 0.006)
    assert tight.share <= smallest.share + 0.002 and tight.loss.upper <= 0.006


def test_known_factors_are_not_measured_again() -> None:
    found = profile()
    first, again = Truth(found, keys=20.0), Truth(found, keys=20.0)
    chosen = choose(found, SIZE, first, 0.3, None)
    same = choose(found, SIZE, again, 0.3, None, chosen.factors)
    assert same.layers == chosen.layers and same.factors == chosen.factors
    assert again.calls <= first.calls - 3


def test_heads_are_thinned_out_as_far_as_the_allowance_holds() -> None:
    found = profile()
    chosen = choose(found, SIZE, Truth(found), None, 0.0005)
    kinds = {rule.pattern for plan in chosen.layers for rule in plan.heads}
    assert "block_sparse" in kinds
    assert chosen.loss.upper <= 0.0005
    without = choose(found, SIZE, Truth(found), 0.6, None)
    assert {rule.pattern for plan in without.layers for rule in plan.heads} <= {"full", "streaming"}


def test_no_allowance_at_all_keeps_the_dense_cache() -> None:
    chosen = choose(profile(), SIZE, lambda layers: Loss(1.0, 0.1), None, 1e-9)
    assert chosen.share == 1.0 and chosen.loss == Loss(0.0, 0.0)


def test_a_budget_below_every_plan_names_the_smallest() -> None:
    with pytest.raises(
        BudgetError, match=r"no plan takes 0.01 .* give at least `kv_budget` 0\.\d+"
    ) as caught:
        choose(profile(), SIZE, Truth(profile()), 0.01, None)
    share = caught.value.smallest_bytes / (LAYERS * GROUPS * CONTEXT * SIZE * 4)
    chosen = choose(profile(), SIZE, Truth(profile()), share + 1e-9, None)
    assert chosen.share == pytest.approx(share)


def test_a_budget_that_breaks_the_allowance_names_one_that_holds_it() -> None:
    found = profile()
    with pytest.raises(
        BudgetError, match=r"are\s+allowed: about `kv_budget` 0\.\d+ would hold that"
    ) as caught:
        choose(found, SIZE, Truth(found), 0.25, 0.0002)
    share = caught.value.smallest_bytes / (LAYERS * GROUPS * CONTEXT * SIZE * 4)
    assert choose(found, SIZE, Truth(found), share + 0.02, 0.0002).loss.upper <= 0.0002


def test_something_must_be_asked_for() -> None:
    with pytest.raises(ValueError, match="a budget, an allowance or both"):
        choose(profile(), SIZE, Truth(profile()), None, None)


def test_every_ring_has_its_heads_streaming() -> None:
    found = profile()
    ring = next(c for c in choices(found)[0] if c.group.recent)
    layers = layers_of([ring, *(unit[0] for unit in choices(found)[1:])], found)
    bands = [rule.streaming for rule in layers[0].heads]
    expected = (ring.group.sink, ring.group.recent, ring.group.min_length)
    assert bands == [expected, expected, None, None]


def test_a_choice_of_one_kind_stores_the_rest_as_it_is() -> None:
    ring = next(
        c
        for c in choices(profile())[0]
        if c.group.recent and c.group.keys.bits == 4 and c.group.values.bits == 2
    )
    assert ring.of("keys").group == replace(ring.group, sink=0, recent=0, min_length=0, values=PLAIN)
    assert ring.of("ring").group == replace(ring.group, keys=PLAIN, values=PLAIN)
    assert ring.of("values").losses == (0.0, ring.losses[1], 0.0)


def test_measured_losses_are_means_with_errors_of_segments() -> None:
    loss = summarised([torch.tensor([0.0] * 128 + [1.0] * 128, dtype=torch.float64)])
    assert loss.mean == 0.5 and loss.error == pytest.approx(0.5)
    assert loss.upper == pytest.approx(0.5 + 1.645 * 0.5)
    # Of one window another may lose exp(1.645 x 0.3 sqrt(1 + 1 / 1)) times as much.
    assert loss.ratio == pytest.approx(2.0097, abs=1e-3)
    equal = summarised([torch.ones(256, dtype=torch.float64)] * 4)
    assert equal.upper == equal.ratio and 1.4 < equal.ratio < loss.ratio
    unlike = summarised([torch.full((256,), x, dtype=torch.float64) for x in (0.1, 1.0)])
    assert unlike.ratio > 3.0
    apart = summarised([torch.zeros(1280, dtype=torch.float64), torch.ones(1280, dtype=torch.float64)])
    assert apart.mean == 0.5 and apart.error == pytest.approx(0.5)
    assert Loss(float("nan"), 0.0).upper == float("inf")
    rising = torch.arange(1024, dtype=torch.float64)
    assert by_length([rising], 1024) == [(256, 191.5), (512, 383.5), (1024, 767.5)]


def test_sampled_blocks_end_with_the_last() -> None:
    assert sampled_blocks(8192) == [7, 15, 23, 31, 39, 47, 55, 63]
    assert sampled_blocks(512) == [0, 1, 2, 3]
    assert module.RIVALS == 2


def test_a_plan_loses_no_more_at_answers_than_is_allowed() -> None:
    """Needles lose by their rings what a text does not notice."""
    found = profile()
    plain = Truth(found)

    def measure(layers: Sequence[LayerPlan]) -> Loss:
        lost = 3.0 * plain(layers).mean
        return replace(plain(layers), answers=lost)

    free, careful = (choose(found, SIZE, way, None, 0.02) for way in (plain, measure))
    assert 0.0 < ANSWERS * careful.loss.answers <= 0.02 < ANSWERS * 3.0 * free.loss.mean
    assert careful.loss.upper <= 0.02 and careful.size_bytes > free.size_bytes
    assert Loss(0.0, 0.0, answers=float("nan")).upper == float("inf")


def test_a_budget_that_answers_do_not_bear_is_refused_with_what_they_lose() -> None:
    found = profile()
    plain = Truth(found)
    with pytest.raises(BudgetError, match=r"far back [0-9.]+, which counts 10 times, 0\.02 are\s+allowed"):
        choose(found, SIZE, lambda layers: replace(plain(layers), answers=1.0), 0.3, 0.02)


def test_of_plans_within_a_budget_one_that_holds_the_allowance_at_answers_is_taken() -> None:
    """Also where another one loses less on text."""
    found = profile()

    def measure(layers: Sequence[LayerPlan]) -> Loss:
        same = len({plan.groups for plan in layers}) == 1
        return Loss(0.015, 0.0) if same else Loss(0.001, 0.0, answers=0.004)

    chosen = choose(found, SIZE, measure, 0.4, 0.02)
    assert chosen.is_uniform and chosen.loss.upper <= 0.02 and chosen.share <= 0.4
    assert not choose(found, SIZE, measure, 0.4, None).is_uniform


def test_groups_that_answers_need_keep_more_where_answers_decide() -> None:
    """What half of the groups store is all that answers hear: prices of a text alone buy it dearly."""
    found = profile(layers=20)
    needed = torch.zeros(20, GROUPS, 1, dtype=torch.float64)
    needed[:, 0] = 8.0
    heads = needed.repeat_interleave(HEADS // GROUPS, 1)
    at_answers = replace(
        found,
        keys=found.keys * needed,
        values=found.values * needed,
        rings=found.rings * needed,
        streaming=found.streaming * heads,
        blocks=found.blocks * heads,
    )
    of_text, of_answers = Truth(found), Truth(at_answers)
    asked = 0

    def measure(layers: Sequence[LayerPlan]) -> Loss:
        # Twice what is expected: the prices follow what is measured.
        return replace(of_text(layers), answers=2 * of_answers(layers).mean)

    def answers() -> Profile:
        nonlocal asked
        asked += 1
        return at_answers

    plain = choose(found, SIZE, measure, None, 0.02)
    heeding = choose(found, SIZE, measure, None, 0.02, at_answers=answers)
    assert asked == 1 and heeding.loss.upper <= 0.02 and plain.loss.upper <= 0.02
    assert heeding.size_bytes < 0.98 * plain.size_bytes
    # Within a budget that text alone breaks the allowance with.
    budget = heeding.share + 0.01
    with pytest.raises(BudgetError, match="at answers"):
        choose(found, SIZE, measure, budget, 0.02)
    kept = choose(found, SIZE, measure, budget, 0.02, at_answers=answers)
    assert kept.share <= budget and kept.loss.upper <= 0.02


def test_answers_are_not_profiled_where_they_lose_less_than_text() -> None:
    def never() -> Profile:
        raise AssertionError

    found = profile()
    assert choose(found, SIZE, Truth(found), 0.6, 0.005, at_answers=never).loss.upper <= 0.005


def test_what_is_no_number_at_answers_is_refused_and_prices_nothing() -> None:
    found = profile()
    plain, calls = Truth(found), 0

    def measure(layers: Sequence[LayerPlan]) -> Loss:
        nonlocal calls
        calls += 1
        return replace(plain(layers), answers=float("nan"))

    with pytest.raises(BudgetError, match="at answers"):
        choose(found, SIZE, measure, 0.3, 0.02, at_answers=lambda: found)
    assert calls < 12


@pytest.mark.parametrize("kind", ["text", "answers"])
def test_a_kind_that_measures_as_no_number_alone_is_dear_and_breaks_nothing(kind: str) -> None:
    found = profile()
    plain = Truth(found)

    def measure(layers: Sequence[LayerPlan]) -> Loss:
        loss = replace(plain(layers), answers=2 * plain(layers).mean)
        alone = {g.values for plan in layers for g in plan.groups} == {PLAIN}
        if not alone or not any(g.recent or g.keys.bits <= 4 for plan in layers for g in plan.groups):
            return loss
        return replace(loss, mean=float("nan")) if kind == "text" else replace(loss, answers=float("nan"))

    for budget in (None, 0.6):
        chosen = choose(found, SIZE, measure, budget, 0.02, at_answers=lambda: found)
        assert chosen.loss.upper <= 0.02
