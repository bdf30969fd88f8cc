"""Runs two models on the same inputs, whatever kind they are, and gives back how far the outputs are apart."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nstf.errors import UsageError
from nstf_convert.gates import evaluate as gates
from nstf_convert.gates.sides import Side

if TYPE_CHECKING:
    from nstf_convert.measure import Accuracy, Similarity

# Generous: 512-token windows of text have about 2,000 characters, of dense code or CJK fewer.
CHARS_PER_TOKEN = 12


def measure(
    reference: Side, test: Side, dataset: Path | None, windows: int, seq_len: int
) -> "tuple[Accuracy | Similarity, dict[str, Any]]":
    """The figures of `test` against `reference`, and the protocol they were measured by.

    Language models need a text; encoders without a tokenizer get seeded noise. The tokenizer is the one of `test`.
    Raises UsageError.
    """
    after, before = test.model(), reference.model()
    kinds = [(model.is_causal_lm, getattr(model.module, "main_input_name", "")) for model in (before, after)]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{reference.where} ({type(before.module).__name__}) and {test.where} ({type(after.module).__name__}) are "
            "different models: they do not take the same inputs"
        )
    tokenizer = test.tokenizer()
    text = None
    if dataset is not None:
        text = gates.read_text(dataset, CHARS_PER_TOKEN * seq_len * windows)
    if before.is_causal_lm:
        if text is None:
            raise UsageError("`dataset` is missing: give the path of held-out text")
        if tokenizer is None:
            raise UsageError(f"{test.where} holds no tokenizer: a language model cannot be measured on text")
        batch = gates.text_windows(tokenizer, text, seq_len, windows)
        protocol = {"kind": "language model", "windows": int(batch.shape[0]), "seq_len": seq_len,
                    "scored_per_window": seq_len - 1 - seq_len // 2, "dataset": str(dataset)}  # fmt: skip
        return gates.evaluate_language_model(before, after, batch), protocol
    if text is not None and tokenizer is not None:
        inputs, kind = gates.text_batches(tokenizer, text, seq_len, windows), "text"
    else:
        inputs, kind = gates.synthetic_batches(before.config, windows, seed=0), "seeded noise"
    protocol = {"kind": "encoder", "inputs": kind, "dataset": str(dataset) if text else None}
    return gates.evaluate_encoder(before, after, inputs), protocol
