"""Runs two models on the same inputs, whatever kind they are, and gives back how far the outputs are apart."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nstf.errors import UnsupportedError, UsageError, out_of_memory
from nstf_convert.gates import evaluate as gates
from nstf_convert.gates.sides import Side
from nstf_convert.made_up import longest_window
from nstf_convert.streamed import StreamedModel

if TYPE_CHECKING:
    from nstf_convert.measure import Accuracy, Similarity

log = logging.getLogger(__name__)

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
    text = tokenizer = None
    if dataset is not None:
        tokenizer = test.tokenizer()
        text = gates.read_text(dataset, CHARS_PER_TOKEN * seq_len * windows)
    if before.is_causal_lm:
        if text is None:
            raise UsageError("`dataset` is missing: give the path of held-out text")
        if tokenizer is None:
            raise UsageError(f"{test.where} holds no tokenizer: a language model cannot be measured on text")
        try:
            found, tokens = _language(before, after, tokenizer, text, seq_len, windows), seq_len
        except (IndexError, UnsupportedError) as error:
            tokens = longest_window(before)
            if seq_len <= tokens or out_of_memory(error):
                raise
            log.warning(
                "the model has positions for %d tokens: windows of so many, not of %d", tokens, seq_len
            )
            found = _language(before, after, tokenizer, text, tokens, windows)
        protocol = {"kind": "language model", "windows": found.windows, "seq_len": tokens,
                    "scored_per_window": tokens - 1 - tokens // 2, "dataset": str(dataset)}  # fmt: skip
        return found, protocol
    read = text is not None and tokenizer is not None
    if text is not None and tokenizer is not None:
        limit = min(seq_len, longest_window(before))
        inputs, kind = gates.text_batches(tokenizer, text, limit, windows), "text"
    else:
        try:
            inputs = gates.synthetic_batches(before.module.config.to_dict(), windows, seed=0)
        except UsageError as error:
            if text is None and kinds[0][1] == "input_ids" and test.tokenizer() is not None:
                raise UsageError("`dataset` is missing: give the path of held-out text") from error
            raise
        kind = "seeded noise"
        if text is not None:
            log.warning("%s holds no tokenizer: measured on seeded noise, not on %s", test.where, dataset)
    with torch.inference_mode():
        for model in (before, after):
            model.try_outputs("nstf makes no other inputs", **{n: v[:1] for n, v in inputs[0].items()})
    protocol = {"kind": "encoder", "inputs": kind, "dataset": str(dataset) if read else None}
    return gates.evaluate_encoder(before, after, inputs), protocol


def _language(
    before: StreamedModel, after: StreamedModel, tokenizer: Any, text: str, seq_len: int, windows: int
) -> "Accuracy":
    return gates.evaluate_language_model(before, after, gates.text_windows(tokenizer, text, seq_len, windows))
