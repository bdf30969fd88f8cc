"""Whether a plan still finds what was said far back: one passkey, and several needles in one context.

Answers are forced: the digits stand in the prompt, and each digit counts as found when it would have been chosen. An
answer is right when all its digits are. One pass over a context so asks for many answers.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nstf.runtime import tokenizing
from nstf_convert.pipeline.attention import simulate
from nstf_convert.streamed import StreamedModel

NAMES = ("Alice", "Bruno", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Irene", "Jacob")
DIGITS = 5


@dataclass(frozen=True, eq=False)
class Haystack:
    """ids: [T], the context with questions and answers; answers: (first, last + 1) positions of each answer."""

    ids: Tensor
    answers: tuple[tuple[int, int], ...]


def haystack(tokenizer: Any, filler: Tensor, length: int, needles: int, seed: int) -> Haystack:
    """`needles` keys hidden at random depths in other text, asked for in another order. Raises ValueError when so many
    do not fit or there are no names for them."""
    if not 1 <= needles <= len(NAMES):
        raise ValueError(f"{needles} needles; 1 to {len(NAMES)} can be hidden in one context")
    chance = random.Random(seed)
    names = chance.sample(NAMES, needles)
    keys = {name: "".join(chance.choices("123456789", k=DIGITS)) for name in names}
    head = _ids(tokenizer, "Pass keys are hidden in the text below. Remember them.\n\n")
    hidden = [_ids(tokenizer, f"\n\nThe pass key of {n} is {keys[n]}. Remember it.\n\n") for n in names]
    questions: list[int] = []
    marks = []
    for name in chance.sample(names, needles):
        questions += _ids(tokenizer, f"\n\nWhat is the pass key of {name}? The pass key of {name} is ")
        answer = _ids(tokenizer, keys[name])
        marks.append((len(questions), len(questions) + len(answer)))
        questions += answer
    room = length - len(head) - len(questions) - sum(map(len, hidden))
    if room < needles or len(filler) < room:
        raise ValueError(f"{needles} needles and {len(filler)} tokens of text do not make {length} tokens")
    text = filler[:room].tolist()
    places = sorted(chance.sample(range(room), needles))
    body: list[int] = []
    for needle, start, end in zip(hidden, [0, *places], [*places, room], strict=False):
        body += text[start:end] + needle
    body += text[places[-1] :]
    start = len(head) + len(body)
    answers = tuple((start + a, start + b) for a, b in marks)
    return Haystack(torch.tensor(head + body + questions), answers)


@torch.no_grad()
def found(model: StreamedModel, stack: Haystack, attend: simulate.Attend) -> int:
    """How many answers are right."""
    with simulate.attending(model.module, attend):
        hidden = model.hidden(stack.ids[None])[0]
    return right_answers(model, stack, before_answers(stack, hidden))


def before_answers(stack: Haystack, hidden: Tensor) -> Tensor:
    """Of hidden states [T, hidden] those before each token of the answers, [tokens, hidden]."""
    return torch.cat([hidden[first - 1 : end - 1] for first, end in stack.answers])


def right_answers(model: StreamedModel, stack: Haystack, before: Tensor) -> int:
    """How many answers are right by the hidden states before their tokens, [tokens, hidden]."""
    with model.holding(model.head):
        guesses = model.logits(before).argmax(-1).cpu()
    lengths = [end - first for first, end in stack.answers]
    return sum(
        torch.equal(guess, stack.ids[first:end])
        for guess, (first, end) in zip(torch.split(guesses, lengths), stack.answers, strict=True)
    )


def compared(
    model: StreamedModel, stacks: Sequence[Haystack], attend: simulate.Attend, known: dict[bytes, int]
) -> tuple[int, int, int]:
    """(answers right with dense attention, with the plan, asked). known: what dense attention found, by the bytes of a
    stack's ids; what is not there is added."""
    for stack in stacks:
        if _key(stack) not in known:
            known[_key(stack)] = found(model, stack, simulate.dense)
    dense = sum(known[_key(stack)] for stack in stacks)
    planned = sum(found(model, stack, attend) for stack in stacks)
    return dense, planned, sum(len(stack.answers) for stack in stacks)


def _key(stack: Haystack) -> bytes:
    return stack.ids.numpy().tobytes()


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a piece in the middle of a text: nothing is put around it."""
    ids: list[int] = tokenizing.encode(tokenizer, text, add_special_tokens=False).input_ids
    return ids
