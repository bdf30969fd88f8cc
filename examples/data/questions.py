"""Makes questions.jsonl: multiple-choice questions for `nstf eval --tasks`, from the held-out text.

`ending`: which of four pieces of the book goes on from here. `order`: which of four orders of the same words was written.
They need no knowledge, so that a model of three million parameters can answer more of them than chance (0.25).

    python examples/data/questions.py
"""

import json
import random
import re
from pathlib import Path

HERE = Path(__file__).parent
EACH = 60  # questions of each task
CONTEXT_WORDS = 40
ENDING_WORDS = 8
CHOICES = 4


def questions(text: str) -> list[dict[str, object]]:
    """The questions of a text, the same every time."""
    chance = random.Random(0)
    words = re.sub(r"\s+", " ", text).strip().split(" ")
    size = CONTEXT_WORDS + ENDING_WORDS
    starts = chance.sample(range(0, len(words) - size, size), 2 * EACH)
    found: list[dict[str, object]] = []
    for number, start in enumerate(starts):
        context = words[start : start + CONTEXT_WORDS]
        ending = words[start + CONTEXT_WORDS : start + size]
        task = "ending" if number < EACH else "order"
        wrong: list[list[str]] = []
        while len(wrong) < CHOICES - 1:
            if task == "ending":
                at = chance.randrange(len(words) - ENDING_WORDS)
                other = words[at : at + ENDING_WORDS]
            else:
                other = chance.sample(ending, ENDING_WORDS)
            if other != ending and other not in wrong:
                wrong.append(other)
        choices = [ending, *wrong]
        chance.shuffle(choices)
        found.append(
            {
                "id": f"{task}-{number % EACH}",
                "task": task,
                "context": " ".join(context),
                "choices": [" " + " ".join(choice) for choice in choices],
                "answer": choices.index(ending),
            }
        )
    return found


def main() -> None:
    text = (HERE / "heldout.txt").read_text("utf-8")
    lines = [json.dumps(question, ensure_ascii=False) for question in questions(text)]
    (HERE / "questions.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
