"""Options of KV groups with what they are expected to lose, and plans by them: within bytes, or within a loss.

Without answers the price of an option is its expected loss on text. With them a plan counts by the larger of both, which no
sum of prices says; the weights of text and answers at which both are about equal are found by halving.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nstf.runtime.attention_plan import LayerPlan
from nstf.runtime.kv_formats import dense_group_bytes, group_bytes
from nstf_convert.pipeline.attention.measured import Loss
from nstf_convert.pipeline.attention.options import (
    KINDS,
    Choice,
    Losses,
    choices,
    layers_of,
    uniforms,
)
from nstf_convert.pipeline.attention.profile import Profile
from nstf_convert.planner.allocation import allocate
from nstf_convert.planner.hull import Option

log = logging.getLogger("nstf")

# Rivals that are measured: the best by expectation.
RIVALS = 2
# Factors between measured and expected losses are kept within this: beyond, one of both is noise.
FACTOR = 30.0
# Halvings of the weight of answers among expected losses.
HALVINGS = 8
TINY = 1e-12

Measurement = Callable[[Sequence[LayerPlan]], Loss]


@dataclass
class Chosen:
    """A chosen plan with what was measured on the way. share: of the dense 16-bit cache at the profile's context."""

    layers: list[LayerPlan]
    loss: Loss
    size_bytes: int
    share: float
    is_uniform: bool = False
    rivals: list[tuple[str, float, float]] = field(default_factory=list)
    factors: tuple[float, ...] = (1.0, 1.0, 1.0)


class Chooser:
    """Options with prices: factors of measured to expected losses, and what a nat counts on text and at answers."""

    def __init__(
        self,
        profile: Profile,
        head_dim: int,
        measure: Measurement,
        factors: tuple[float, ...] | None,
        at_answers: Callable[[], Profile] | None,
    ) -> None:
        self.profile, self.head_dim, self.measure = profile, head_dim, measure
        self.at_answers = at_answers
        self.answers: Profile | None = None
        self.options = choices(profile)
        self.are_known = factors is not None
        self.factors = Losses(*(factors or (1.0,) * len(KINDS)))
        self.answer_factors = self.factors
        self.counts = (1.0, 0.0)
        self.weights = (1.0, 0.0)
        self.alone: dict[str, tuple[list[Choice], Loss]] = {}
        self.dense_bytes = dense_cache_bytes(profile, head_dim)
        self._expect()

    def _expect(self) -> None:
        """Bytes and expected losses on text and at answers of every option, and prices by them."""
        self.parts = [
            [
                (
                    group_bytes(option.group, self.head_dim, self.profile.context),
                    option.losses.dot(self.factors),
                    option.answers.dot(self.answer_factors),
                )
                for option in unit
            ]
            for unit in self.options
        ]
        self._price()

    def _price(self) -> None:
        a, b = self.weights
        self.prices = [
            [Option(size, a * text + b * told) for size, text, told in unit] for unit in self.parts
        ]

    def correct(self, chosen: Sequence[Choice]) -> None:
        """Factors from measuring each kind of loss of a plan alone, where they are not known."""
        if self.are_known or self.answers is not None:
            return
        for kind in KINDS:
            only = [choice.of(kind) for choice in chosen]
            if sum(getattr(choice.losses, kind) for choice in only) > 0:
                self.alone[kind] = only, self.measure(layers_of(only, self.profile))
        self.factors = self._factors("losses", self.factors)
        names = ", ".join(KINDS)
        log.info("attention: measured / expected loss of %s: %.2g, %.2g, %.2g", names, *self.factors)
        self._expect()

    def _factors(self, name: str, otherwise: Losses) -> Losses:
        """Measured over expected `losses` on text or at `answers`, of the kinds that were measured alone."""
        found = otherwise
        for kind, (chosen, loss) in self.alone.items():
            measured = loss.mean if name == "losses" else loss.answers
            expected = sum(getattr(getattr(choice, name), kind) for choice in chosen)
            if expected > 0:
                ratio = FACTOR if math.isnan(measured) else measured / expected
                found = found._replace(**{kind: min(max(ratio, 1 / FACTOR), FACTOR)})
        return found

    def heed_answers(self, chosen: Sequence[Choice], loss: Loss) -> bool:
        """From here on options are priced by what they lose on text and at answers, as this plan was measured to; False
        where they are not: answers lose less than text, or are not known, or nothing measured is a number."""
        if self.at_answers is None or not math.isfinite(loss.upper):
            return False
        if self.answers is None and loss.of_answers <= loss.of_text:
            return False
        if self.answers is None:
            self.answers = self.at_answers()
            self.options = choices(self.profile, self.answers)
            self.alone = {kind: (self._heeding(only), found) for kind, (only, found) in self.alone.items()}
            self.answer_factors = self._factors("answers", self.factors)
            self._expect()
        self.counts = 1.0, 1.0
        text, told = self.expected(self._heeding(chosen))
        self.counts = loss.of_text / max(text, TINY), loss.of_answers / max(told, TINY)
        return True

    def expected(self, chosen: Sequence[Choice]) -> tuple[float, float]:
        """What counts against an allowance: on text, at answers."""
        text, told = self.counts
        return (
            text * sum(choice.losses.dot(self.factors) for choice in chosen),
            told * sum(choice.answers.dot(self.answer_factors) for choice in chosen),
        )

    def _heeding(self, chosen: Sequence[Choice]) -> list[Choice]:
        """The same choices with what they are expected to lose at answers."""
        found = []
        for unit, choice in zip(self.options, chosen, strict=True):
            kinds = [
                next(getattr(o.answers, kind) for o in unit if o.of(kind).group == choice.of(kind).group)
                for kind in KINDS
            ]
            found.append(replace(choice, answers=Losses(*kinds)))
        return found

    def within(self, budget_bytes: int, exact: bool = True) -> list[Choice]:
        """The choice within the bytes that is expected to lose least; on text or at answers, whichever is more, where
        both have prices. Raises Infeasible."""
        if self.answers is None:
            return self._allocated(budget_bytes, exact)
        low, high = 0.0, 1.0
        best: tuple[float, tuple[float, float]] | None = None
        for _ in range(HALVINGS):
            share = (low + high) / 2
            self.weights = (1 - share) * self.counts[0], share * self.counts[1]
            self._price()
            found = self._allocated(budget_bytes, exact=False)
            text, told = self.expected(found)
            if best is None or max(text, told) < best[0]:
                best, chosen = (max(text, told), self.weights), found
            low, high = (share, high) if told > text else (low, share)
        assert best is not None
        self.weights = best[1]
        self._price()
        closer = self._allocated(budget_bytes, exact) if exact else chosen
        return min((chosen, closer), key=lambda c: max(self.expected(c)))

    def _allocated(self, budget_bytes: int, exact: bool) -> list[Choice]:
        found = allocate(self.prices, budget_bytes, exact)
        return [unit[i] for unit, i in zip(self.options, found.choice, strict=True)]

    def cheapest(self, loss: float) -> list[Choice]:
        """The choice of the fewest bytes that is expected to lose at most so much."""
        low, high = sum(min(o.size_bytes for o in unit) for unit in self.prices), self.dense_bytes
        while high - low > self.dense_bytes // 512:
            middle = (low + high) // 2
            if max(self.expected(self.within(middle, exact=False))) <= loss:
                high = middle
            else:
                low = middle
        return self.within(high)

    def size(self, chosen: Sequence[Choice]) -> int:
        """Bytes of the cache at the profile's context."""
        return sum(group_bytes(c.group, self.head_dim, self.profile.context) for c in chosen)

    def measured(self, chosen: Sequence[Choice], is_uniform: bool = False) -> Chosen:
        """The plan of these choices with what it is measured to lose."""
        layers = layers_of(chosen, self.profile)
        size = self.size(chosen)
        loss = Loss(0.0, 0.0) if all(c.is_plain for c in chosen) else self.measure(layers)
        share = size / self.dense_bytes
        log.info("attention: %.3f of the dense cache, KLD %.5f +- %.5f", share, loss.mean, loss.error)
        return Chosen(layers, loss, size, share, is_uniform, factors=self.factors)

    def rivals(self, budget_bytes: int, most: float = math.inf) -> list[Chosen]:
        """The single settings within the bytes that are expected to lose least, measured; none that is expected to lose
        more than `most`."""
        found = []
        for same in uniforms(self.profile):
            size = self.size(same)
            loss = sum(c.losses.dot(self.factors) for c in same)
            if size <= budget_bytes and loss <= most:
                found.append((loss, size, same))
        best = sorted(found, key=lambda item: item[:2])[:RIVALS]
        return [self.measured(same, is_uniform=True) for _, _, same in best]


def dense_cache_bytes(profile: Profile, head_dim: int) -> int:
    """Of the cache without a plan, in 16 bits; layers that slide hold their windows alone."""
    groups = profile.keys.shape[1]
    return groups * sum(dense_group_bytes(head_dim, profile.context, own) for own in profile.layer_windows)
