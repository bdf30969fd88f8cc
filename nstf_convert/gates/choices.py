"""Multiple choice by log-likelihood: which of several continuations a language model finds most likely.

As lm-eval does it (Gao et al., A framework for few-shot language model evaluation, 2021): the score of a choice is the sum
of the log-probabilities of its tokens after the context; the normalised score is that divided by the choice's length in
characters, so that long choices are not at a disadvantage. Everything is computed in float32.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UsageError
from nstf.runtime import tokenizing
from nstf_convert.gates.tasks import Question
from nstf_convert.measure import LanguageModel

log = logging.getLogger(__name__)

# Tokens of one forward pass: the weights stream in once for all of them.
BATCH_TOKENS = 8192
# Logits of this many rows exist at a time.
BLOCK_ELEMENTS = 1 << 23
# Hidden states that differ by more than this share of the largest do so by what follows; rounding makes 1e-6 in float32.
# In types of 16 bits so many times their step: there rows of one product may be summed up in other orders.
SEEN, SEEN_STEPS = 1e-4, 16
# Rows of the first block, before the size of the vocabulary is known.
FIRST_ROWS = 16


@dataclass(frozen=True)
class Pair:
    """A context with one of its choices, as tokens: the last `scored` of `ids` are the choice's."""

    ids: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class Answers:
    """What a model chose. raw, normalised: the index of the choice with the best score, for every question; scores: the
    log-likelihoods in nats, for every question and choice."""

    raw: tuple[int, ...]
    normalised: tuple[int, ...]
    scores: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Group:
    """Figures over some questions. The standard errors are those of the mean over questions, None for a single one.

    flips: share of questions with another raw choice than the reference's; lost and gained: questions that only the
    reference, and only the artifact, got right; change: artifact less reference in accuracy, its error over the same
    questions, which is far smaller than either accuracy's own. All four None without a reference.
    """

    questions: int
    accuracy: float
    accuracy_se: float | None
    accuracy_norm: float
    accuracy_norm_se: float | None
    reference_accuracy: float | None = None
    reference_accuracy_norm: float | None = None
    change: float | None = None
    change_se: float | None = None
    flips: float | None = None
    lost: int | None = None
    gained: int | None = None


def encode(tokenizer: Any, question: Question, limit: int) -> list[Pair]:
    """One pair for each choice; contexts lose their oldest tokens where a pair is longer than `limit` tokens.

    Context and choice are encoded together, as the text they make, and split where the context's own tokens end. Spaces
    at the context's end go with the choice, as they do in running text. Raises UsageError for a choice that is too long, or
    makes one token with its context.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    starts = tokenizing.encode(tokenizer, "a")["input_ids"][:1] == [bos]
    whole_context = question.context.rstrip()
    trailing = question.context[len(whole_context) :]
    context = _last(tokenizer, whole_context, limit)
    for text in (trailing, *question.choices):
        if len(text) > limit and len(text) > limit * _longest_word(tokenizer):
            raise UsageError(
                f"question {question.name}: a choice, or the spaces before it, of {len(text)} characters does not fit "
                f"the model's {limit} positions"
            )
    first: list[int] = [bos] if bos is not None and starts else []
    prefix = first + _tokens(tokenizer, context) if context else first
    if not prefix:
        start = bos if bos is not None else getattr(tokenizer, "eos_token_id", None)
        if start is None:
            raise UsageError(
                f"question {question.name}: the context is empty and the tokenizer has no token to begin with: "
                "give a context"
            )
        first = prefix = [start]
    pairs = []
    for choice in question.choices:
        whole = first + _tokens(tokenizer, context + trailing + choice)
        if len(whole) < 2:
            raise UsageError(
                f"question {question.name}: context and choice make one token, which nothing foretells: give a context"
            )
        scored = len(whole) - min(len(prefix), len(whole) - 1)
        if scored >= limit:
            raise UsageError(
                f"question {question.name}: a choice of {scored} tokens does not fit the model's {limit} positions"
            )
        pairs.append(Pair(tuple(whole[-limit:]), scored))
    return pairs


def _last(tokenizer: Any, text: str, limit: int) -> str:
    """The end of a text that surely holds its last `limit` tokens: tokenizers take hundreds of bytes for each of a text."""
    if len(text) <= 2 * limit:
        return text
    return text[-2 * limit * _longest_word(tokenizer) :]


@lru_cache(maxsize=1)
def _longest_word(tokenizer: Any) -> int:
    """Characters that a token stands for, at most."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizing.encode(tokenizer, text, add_special_tokens=False)["input_ids"])


def answer(model: LanguageModel, pairs: Sequence[Sequence[Pair]], questions: Sequence[Question]) -> Answers:
    """What the model chooses. pairs: those of every question, in the order of its choices."""
    flat = [pair for group in pairs for pair in group]
    scores = log_likelihoods(model, flat)
    raw, normalised, rows, at = [], [], [], 0
    for group, question in zip(pairs, questions, strict=True):
        row = scores[at : at + len(group)]
        at += len(group)
        lengths = [max(1, len(choice.strip())) for choice in question.choices]
        raw.append(_best(row))
        normalised.append(_best([s / n for s, n in zip(row, lengths, strict=True)]))
        rows.append(tuple(row))
    return Answers(tuple(raw), tuple(normalised), tuple(rows))


def _best(scores: Sequence[float]) -> int:
    """The index of the largest; -1, which is neither right nor wrong, when one is not a number."""
    if any(math.isnan(s) for s in scores):
        return -1
    return max(range(len(scores)), key=scores.__getitem__)


def log_likelihoods(model: LanguageModel, pairs: Sequence[Pair]) -> list[float]:
    """log p(choice | context) in nats for every pair. Raises UsageError for a model that sees what it has to foretell."""
    found = [0.0] * len(pairs)
    # Of like lengths together: nothing is computed for padding. It stands behind, where a causal model does not see it.
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i].ids))
    done = 0
    with torch.inference_mode():
        while done < len(order):
            batch = [order[done]]
            while done + len(batch) < len(order):
                longest = len(pairs[order[done + len(batch)]].ids)
                if longest * (len(batch) + 1) > BATCH_TOKENS:
                    break
                batch.append(order[done + len(batch)])
            for index, value in zip(batch, _score(model, [pairs[i] for i in batch], not done), strict=True):
                found[index] = value
            done += len(batch)
            log.info("scored %d of %d choices", done, len(order))
    return found


def _score(model: LanguageModel, pairs: Sequence[Pair], first: bool) -> list[float]:
    """As `log_likelihoods`, in one forward pass. first: look whether the model is causal."""
    width = max(len(p.ids) for p in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    for row, pair in enumerate(pairs):
        ids[row, : len(pair.ids)] = torch.tensor(pair.ids)
    hidden = _causal(model, ids) if first else model.hidden(ids)
    # Row t of the hidden states predicts token t + 1.
    rows = torch.cat([hidden[i, len(p.ids) - p.scored - 1 : len(p.ids) - 1] for i, p in enumerate(pairs)])
    labels = torch.cat([torch.tensor(p.ids[-p.scored :]) for p in pairs]).to(hidden.device)
    values: list[Tensor] = []
    step = FIRST_ROWS
    at = 0
    while at < len(labels):
        logits = model.logits(rows[at : at + step]).float()
        wanted = logits.gather(1, labels[at : at + step, None]).squeeze(1)
        values.append((wanted - logits.logsumexp(-1)).double().cpu())
        at += step
        step = max(1, BLOCK_ELEMENTS // logits.shape[1])
    parts = torch.split(torch.cat(values), [p.scored for p in pairs])
    return [float(part.sum()) for part in parts]


def _causal(model: LanguageModel, ids: Tensor) -> Tensor:
    """The hidden states of ids [n, tokens]. Raises UsageError where another last token changes those before it: XLNet,
    XLM and BERT without `is_decoder` read a choice before they score it, and the padding."""
    other = ids[:1].clone()
    other[0, -1] = int(other[0, -1] == 0)
    hidden = model.hidden(torch.cat([ids, other]))
    plain, changed = hidden[0, :-1].float(), hidden[-1, :-1].float()
    share = max(SEEN, SEEN_STEPS * torch.finfo(hidden.dtype).eps)
    if bool((plain - changed).abs().max() > share * plain.abs().max()):
        raise UsageError(
            "multiple choice needs a model that reads from left to right: this one sees the tokens that it has to foretell"
        )
    return hidden[:-1]


def summarise(
    questions: Sequence[Question], test: Answers, reference: Answers | None = None
) -> dict[str, Group]:
    """The figures of all questions under "", and of every task by its name. Raises ValueError without a question."""
    if not questions:
        raise ValueError("no questions")
    names = {"": list(range(len(questions)))}
    for index, question in enumerate(questions):
        if question.task:
            names.setdefault(question.task, []).append(index)
    return {name: _group(rows, questions, test, reference) for name, rows in names.items()}


def _group(
    rows: Sequence[int], questions: Sequence[Question], test: Answers, reference: Answers | None
) -> Group:
    right = [_right(test.raw[i], questions[i]) for i in rows]
    right_norm = [_right(test.normalised[i], questions[i]) for i in rows]
    accuracy, accuracy_se = _mean_se(right)
    accuracy_norm, accuracy_norm_se = _mean_se(right_norm)
    if reference is None:
        return Group(len(rows), accuracy, accuracy_se, accuracy_norm, accuracy_norm_se)
    before = [_right(reference.raw[i], questions[i]) for i in rows]
    before_norm = [_right(reference.normalised[i], questions[i]) for i in rows]
    change, change_se = _mean_se([a - b for a, b in zip(right, before, strict=True)])
    return Group(
        len(rows),
        accuracy,
        accuracy_se,
        accuracy_norm,
        accuracy_norm_se,
        reference_accuracy=_mean_se(before)[0],
        reference_accuracy_norm=_mean_se(before_norm)[0],
        change=change,
        change_se=change_se,
        # A choice by NaN is none.
        flips=math.nan
        if any(test.raw[i] < 0 for i in rows)
        else sum(test.raw[i] != reference.raw[i] for i in rows) / len(rows),
        lost=sum(b > a for a, b in zip(right, before, strict=True)),
        gained=sum(a > b for a, b in zip(right, before, strict=True)),
    )


def _right(chosen: int, question: Question) -> float:
    return math.nan if chosen < 0 else float(chosen == question.answer)


def _mean_se(values: Sequence[float]) -> tuple[float, float | None]:
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
