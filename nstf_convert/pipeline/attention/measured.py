"""How far a plan's predictions are from dense attention's, on contexts, with the same weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nstf.runtime.attention_plan import LayerPlan
from nstf_convert.measure import compare
from nstf_convert.pipeline.attention import simulate
from nstf_convert.pipeline.attention.retrieval import Haystack, before_answers, right_answers
from nstf_convert.streamed import StreamedModel

# Neighbouring tokens are correlated; means over this many are about independent.
SEGMENT = 128
# Logits that exist at a time, of each of the two models.
LOGITS = 128 * 49152
# Texts differ in what a plan costs them: standard deviation of the logarithm of the mean loss of a window, and how many
# measured deviations this figure counts for. Reported over chosen losses were 1.24, 1.37, 1.64 and 1.77 in four runs on
# two models, one window each: a root mean square of 0.42 in the logarithm for the difference of two windows.
SPREAD = 0.3
PRIOR = 4
# What answers lose counts so many times, times the share of them that dense attention finds: a model that finds none has
# nothing to forget. Few tokens of a text need a word far back, and each needle does (docs/attention.md).
ANSWERS = 10.0


@dataclass(frozen=True)
class Loss:
    """Nats per token: the mean and its standard error. ratio: how many times the mean another text may lose, with 95 %
    confidence. answers: the mean at the answers to what was hidden in contexts times the share of them that dense attention
    finds, 0 where nothing was."""

    mean: float
    error: float
    ratio: float = 1.0
    answers: float = 0.0

    @property
    def of_text(self) -> float:
        """What a text that chose nothing stays below with 95 % confidence; infinite where it is not a number."""
        bound = max(self.mean + 1.645 * self.error, self.mean * self.ratio)
        return math.inf if math.isnan(bound + self.mean) else bound

    @property
    def of_answers(self) -> float:
        """What answers lose, as it counts beside a text's loss; infinite where it is not a number."""
        return math.inf if math.isnan(self.answers) else ANSWERS * self.answers

    @property
    def upper(self) -> float:
        """What has to stay within an allowance: the larger of both."""
        return max(self.of_text, self.of_answers)


class Measure:
    """Contexts with the outputs of dense attention, computed once; calling it measures a plan's layers.

    stacks: contexts with answers to what is hidden in them, whose loss counts too.
    """

    def __init__(
        self, model: StreamedModel, contexts: Sequence[Tensor], stacks: Sequence[Haystack] = ()
    ) -> None:
        self.model, self.contexts, self.stacks = model, contexts, stacks
        self.evaluations = 0
        self._dense: list[Tensor] = []
        self._answers: list[Tensor] = []
        self._found = 0.0

    def __call__(self, layers: Sequence[LayerPlan]) -> Loss:
        """The mean KLD over the second half of every context, where most of it lies behind a token."""
        self.evaluations += 1
        return replace(summarised(self.divergences(layers, 0.5)), answers=self.of_answers(layers))

    @torch.no_grad()
    def of_answers(self, layers: Sequence[LayerPlan]) -> float:
        """The mean KLD of a plan at the tokens of all answers, times the share of the answers that dense attention finds
        (at least that of one more); 0 without any."""
        if not self.stacks:
            return 0.0
        if not self._answers:
            self._answers = [self._answered(stack, simulate.dense) for stack in self.stacks]
            right = [right_answers(self.model, s, h) for s, h in zip(self.stacks, self._answers, strict=True)]
            self._found = (sum(right) + 1) / (sum(len(stack.answers) for stack in self.stacks) + 1)
        attend = simulate.by_plan(layers)
        found = []
        for stack, dense in zip(self.stacks, self._answers, strict=True):
            ids = torch.cat([stack.ids[first:end] for first, end in stack.answers])
            found.append(self._divergence(dense, self._answered(stack, attend), ids))
        return self._found * float(torch.cat(found).mean())

    def _answered(self, stack: Haystack, attend: simulate.Attend) -> Tensor:
        return before_answers(stack, self._hidden(stack.ids, attend))

    def divergences(self, layers: Sequence[LayerPlan], start: float = 0.0) -> list[Tensor]:
        """KL(dense || planned) in nats of every context, float64, of the positions from the share `start` of it on."""
        return self.divergences_of(simulate.by_plan(layers), start)

    @torch.no_grad()
    def divergences_of(self, attend: simulate.Attend, start: float = 0.0) -> list[Tensor]:
        """The same of any way to attend."""
        if not self._dense:
            # On the host: they wait there for every measurement.
            self._dense = [self._hidden(ids, simulate.dense).cpu() for ids in self.contexts]
        found = []
        for ids, dense in zip(self.contexts, self._dense, strict=True):
            planned, first = self._hidden(ids, attend), int(start * len(ids))
            found.append(self._divergence(dense[first:], planned[first:], ids[first:]))
        return found

    def _divergence(self, dense: Tensor, planned: Tensor, ids: Tensor) -> Tensor:
        """KL(dense || planned) of hidden states [tokens, hidden] each, float64 [tokens], on the host."""
        rows = max(1, LOGITS // self.model.module.config.get_text_config().vocab_size)
        with self.model.holding(self.model.head):
            parts = [
                compare(
                    self.model.logits(dense[i : i + rows].to(planned.device)),
                    self.model.logits(planned[i : i + rows]),
                    ids[i : i + rows].to(planned.device),
                ).kl.cpu()
                for i in range(0, len(ids), rows)
            ]
        return torch.cat(parts)

    def _hidden(self, ids: Tensor, attend: simulate.Attend) -> Tensor:
        with torch.no_grad(), simulate.attending(self.model.module, attend):
            return self.model.hidden(ids[None])[0]


def summarised(parts: Sequence[Tensor]) -> Loss:
    """The mean over all tokens. Its standard error is from the means of segments of 128 or, where that is larger, of
    whole contexts: documents differ by more than their tokens say. So does a text that was not measured, by the ratio."""
    segments = torch.cat([torch.stack([p.mean() for p in torch.split(kl, SEGMENT)]) for kl in parts])
    whole = torch.stack([kl.mean() for kl in parts])
    errors = [float(m.std()) / math.sqrt(len(m)) for m in (segments, whole) if len(m) > 1]
    return Loss(float(torch.cat(list(parts)).mean()), max(errors, default=0.0), _ratio(whole))


def _ratio(means: Tensor) -> float:
    """How many times the mean of these contexts [n] another one loses at most, in 95 of 100 cases.

    Losses of contexts are log-normal about their common level; their spread is that of these contexts and of those that
    were measured before (SPREAD, which counts for PRIOR of them).
    """
    logs = means.clamp_min(1e-12).log()
    freedom = PRIOR + len(logs) - 1
    squares = PRIOR * SPREAD**2 + float((logs - logs.mean()).square().sum())
    return math.exp(1.645 * math.sqrt(squares / freedom * (1 + 1 / len(logs))))


def by_length(parts: Sequence[Tensor], context: int) -> list[tuple[int, float]]:
    """(length, mean KLD of the positions in the half below it), from the context down to 256 tokens.

    A plan's rules go by the position of a query, so the positions around n of one long window are what a context of n
    tokens would give.
    """
    found = []
    length = context
    while length >= 256:
        found.append((length, float(torch.cat([kl[length // 2 : length] for kl in parts]).mean())))
        length //= 2
    return found[::-1]
