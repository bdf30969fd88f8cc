"""The part of `nstf eval` that answers multiple-choice questions."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nstf.errors import UnsupportedError, UsageError
from nstf_convert.cli.output import print_pairs, print_table

if TYPE_CHECKING:
    from nstf_convert.gates.choices import Answers, Group
    from nstf_convert.gates.tasks import Question

# Tokens of a question at most, for a model whose config does not say how many it has.
POSITIONS = 2048


@dataclass(frozen=True)
class Answered:
    """The questions, what the artifact and the reference (None: none was given) chose, and the figures: of all
    questions under "", of every task under its name."""

    questions: "list[Question]"
    test: "Answers"
    reference: "Answers | None"
    groups: "dict[str, Group]"

    def figures(self) -> dict[str, Any]:
        """The figures over all questions, those that exist."""
        return {key: value for key, value in asdict(self.groups[""]).items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Everything, question by question."""
        rows = []
        for i, question in enumerate(self.questions):
            row = {
                "id": question.name,
                "task": question.task,
                "answer": question.answer,
                "chosen": self.test.raw[i],
                "chosen_norm": self.test.normalised[i],
                "log_likelihoods": self.test.scores[i],
            }
            if self.reference is not None:
                row |= {
                    "reference_chosen": self.reference.raw[i],
                    "reference_chosen_norm": self.reference.normalised[i],
                    "reference_log_likelihoods": self.reference.scores[i],
                }
            rows.append(row)
        tasks = {name: asdict(group) for name, group in self.groups.items() if name}
        return {"all": asdict(self.groups[""]), "tasks": tasks, "questions": rows}


def measure_tasks(
    artifact: Path, reference: str | None, tasks: Path, limit: int | None, threads: int | None
) -> Answered:
    """Both models' answers. Raises NstfError of every kind."""
    import torch

    from nstf_convert.gates.choices import summarise
    from nstf_convert.gates.evaluate import NO_NUMBERS
    from nstf_convert.gates.sides import open_side, warn_about_source
    from nstf_convert.gates.tasks import read_tasks

    questions = read_tasks(tasks, limit)
    warn_about_spaces(questions)
    if threads is not None:
        torch.set_num_threads(threads)
    before = None
    with open_side(str(artifact), artifact=True) as test:
        tokenizer = test.tokenizer()
        if tokenizer is None:
            raise UsageError(f"{artifact} holds no tokenizer: --tasks needs a language model")
        after = answers(test.model(), tokenizer, questions)
        if reference is not None:
            with open_side(reference) as original:
                warn_about_source(test, original)
                before = answers(original.model(), tokenizer, questions)
            if min(before.raw) < 0:
                raise UnsupportedError(NO_NUMBERS)
    return Answered(questions, after, before, summarise(questions, after, before))


def answers(model: Any, tokenizer: Any, questions: "list[Question]") -> "Answers":
    """What a streamed model chooses. Raises UsageError when it is no language model."""
    from nstf_convert.gates.choices import answer, encode
    from nstf_convert.made_up import UNBOUNDED, longest_window

    if not model.is_causal_lm:
        raise UsageError(f"--tasks needs a language model, and {type(model.module).__name__} is none")
    known = longest_window(model)
    limit = known if known < UNBOUNDED else POSITIONS
    return answer(model, [encode(tokenizer, q, limit) for q in questions], questions)


def warn_about_spaces(questions: "list[Question]") -> None:
    """Says so when choices run into the last word of their context."""
    import logging

    from nstf_convert.gates.tasks import joined_without_space

    if count := joined_without_space(questions):
        logging.getLogger(__name__).warning(
            "in %d of %d questions a choice follows the context without a space: it is scored as it is written",
            count,
            len(questions),
        )


def print_tasks(answered: Answered) -> None:
    """The figures as text: all questions, and a table of the tasks when there are several."""
    every = answered.groups[""]
    pairs: list[tuple[str, object]] = [
        ("accuracy", share(every.accuracy, every.accuracy_se, every.reference_accuracy)),
        ("per character", share(every.accuracy_norm, every.accuracy_norm_se, every.reference_accuracy_norm)),
    ]
    if every.flips is not None and every.change is not None:
        error = "" if every.change_se is None else f" ± {every.change_se:.4f}"
        pairs += [
            ("change", f"{every.change:+.4f}{error}, over the same questions"),
            (
                "flipped answers",
                f"{every.flips:.4f} ({every.lost} right ones lost, {every.gained} gained)",
            ),
        ]
    print_pairs(f"{every.questions} multiple-choice questions", pairs)
    tasks = {name: group for name, group in answered.groups.items() if name}
    if len(tasks) > 1:
        columns = ["task", "questions", "accuracy", "per character"]
        rows = [[n, g.questions, f"{g.accuracy:.4f}", f"{g.accuracy_norm:.4f}"] for n, g in tasks.items()]
        if every.flips is not None:
            columns.append("flipped")
            rows = [[*row, f"{g.flips:.4f}"] for row, g in zip(rows, tasks.values(), strict=True)]
        print_table(columns, rows)


def share(value: float, error: float | None, reference: float | None) -> str:
    """`0.6150 ± 0.0344, reference 0.6200`."""
    text = f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
    return text if reference is None else f"{text}, reference {reference:.4f}"
