"""Measures an artifact against the model it came from, and judges the figures by the gates a user set.

Language models: llama-perplexity's protocol (see nstf_convert.measure), all logits in float32. Encoders:
cosine similarity of the outputs; a last hidden state [batch, tokens, hidden] is averaged over the tokens.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nstf.errors import UnsupportedError, UsageError
from nstf.runtime import tokenizing
from nstf.runtime.artifact.header import short
from nstf_convert.dataset import load_text
from nstf_convert.gates.choices import Group
from nstf_convert.made_up import SPECTROGRAM_BY_TIME, frames, made_up_shape
from nstf_convert.measure import (
    Accuracy,
    LanguageModel,
    Similarity,
    compare_outputs,
    cut_windows,
    score_window,
    summarise,
    summarise_outputs,
)

log = logging.getLogger(__name__)

# Hidden states of one batch of windows stay in memory for both models: 64 MiB each at most.
MAX_HIDDEN_ELEMENTS = 1 << 24


class Encoder(Protocol):
    def outputs(self, **inputs: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Gates:
    """Bounds; None is no gate. max_kl, max_p99_kl in nats; min_top1 and min_cosine in [0, 1]."""

    max_kl: float | None = None
    max_p99_kl: float | None = None
    min_top1: float | None = None
    max_ppl_ratio: float | None = None
    min_cosine: float | None = None


@dataclass(frozen=True)
class TaskGates:
    """Bounds on multiple choice; None is no gate. Shares of the questions, in [0, 1]."""

    min_accuracy: float | None = None
    min_accuracy_norm: float | None = None
    max_flips: float | None = None


@dataclass(frozen=True)
class Check:
    """One gate applied: `value` against `bound`; `gate` is the field of Gates or TaskGates that states it."""

    name: str
    gate: str
    value: float
    bound: float
    passed: bool

    def message(self) -> str:
        """What was found, for example `mean KLD 0.0312 nats is above 0.01 (`max_kl`)`."""
        upper = self.gate.startswith("max_")
        if self.passed:
            relation = "within" if upper else "at least"
        else:
            relation = "above" if upper else "below"
        value = "not a number: it fails" if math.isnan(self.value) else f"{self.value:.6g} is {relation}"
        return f"{self.name} {value} {self.bound:g} (`{self.gate}`)"


# Said of a reference.
NO_NUMBERS = "what is compared with computes NaN: its weights or its config are damaged"
_RULES = (
    # field of Gates, words, field of Accuracy or Similarity
    ("max_kl", "mean KLD in nats", "mean_kl"),
    ("max_p99_kl", "99th percentile of the KLD in nats", "p99_kl"),
    ("min_top1", "top-1 agreement", "top1"),
    ("max_ppl_ratio", "perplexity ratio", "ppl_ratio"),
    ("min_cosine", "smallest cosine similarity", "min_cosine"),
)
_TASK_RULES = (
    # field of TaskGates, words, field of Group
    ("min_accuracy", "accuracy", "accuracy"),
    ("min_accuracy_norm", "length-normalised accuracy", "accuracy_norm"),
    ("max_flips", "share of flipped answers", "flips"),
)


def check(gates: Gates, measured: Accuracy | Similarity) -> list[Check]:
    """Every gate that was set, applied; NaN never passes.

    Raises UsageError for a gate of another kind of model.
    """
    checks = []
    for gate, words, key in _RULES:
        bound = getattr(gates, gate)
        if bound is None:
            continue
        value = getattr(measured, key, None)
        if value is None:
            kind = "an encoder" if isinstance(measured, Similarity) else "a language model"
            raise UsageError(f"`{gate}` does not apply to {kind}: remove it")
        checks.append(_check(words, gate, value, bound))
    return checks


def check_tasks(gates: TaskGates, measured: Group) -> list[Check]:
    """Every gate on multiple choice that was set, applied. Raises UsageError for max_flips without a reference."""
    checks = []
    for gate, words, key in _TASK_RULES:
        bound = getattr(gates, gate)
        if bound is None:
            continue
        value = getattr(measured, key)
        if value is None:
            raise UsageError(f"`{gate}` compares with the reference's answers: name the reference")
        checks.append(_check(words, gate, value, bound))
    return checks


def _check(words: str, gate: str, value: float, bound: float) -> Check:
    passed = value <= bound if gate.startswith("max_") else value >= bound
    return Check(words, gate, value, bound, passed)


def evaluate_language_model(reference: LanguageModel, test: LanguageModel, windows: Tensor) -> Accuracy:
    """windows: [count, seq_len] int64. Raises UsageError when the two models do not belong together, UnsupportedError for a
    reference that computes NaN."""
    scores = []
    step = 1
    done = 0
    with torch.inference_mode():
        while done < windows.shape[0]:
            ids = windows[done : done + step]
            hidden_ref, hidden_test = reference.hidden(ids), test.hidden(ids)
            for row in range(ids.shape[0]):
                try:
                    scores.append(score_window(reference, hidden_ref[row], test, hidden_test[row], ids[row]))
                except ValueError as error:
                    raise UsageError(
                        f"the artifact and the reference are different models: {error}"
                    ) from error
            if any(bool(score.nll_ref.isnan().any()) for score in scores[done:]):
                raise UnsupportedError(NO_NUMBERS)
            done += ids.shape[0]
            log.info("evaluated %d of %d windows", done, windows.shape[0])
            # Weights stream in once per batch: as many windows at a time as the memory bound allows.
            step = max(1, MAX_HIDDEN_ELEMENTS // max(1, hidden_ref[0].numel()))
    return summarise(scores)


def evaluate_encoder(
    reference: Encoder, test: Encoder, batches: Sequence[Mapping[str, Tensor]]
) -> Similarity:
    """batches: keyword inputs of the models. Raises UsageError when the outputs differ in shape, UnsupportedError for a
    reference that computes NaN."""
    cosines, errors = [], []
    with torch.inference_mode():
        for index, inputs in enumerate(batches):
            outputs = [
                pooled(model.outputs(**inputs), inputs.get("attention_mask")) for model in (reference, test)
            ]
            try:
                cosine, error = compare_outputs(*outputs)
            except ValueError as wrong:
                raise UsageError(f"the artifact and the reference are different models: {wrong}") from wrong
            if bool(outputs[0].isnan().any()):
                raise UnsupportedError(NO_NUMBERS)
            cosines.append(cosine)
            errors.append(error)
            log.info("evaluated %d of %d batches", index + 1, len(batches))
    return summarise_outputs(torch.cat(cosines), torch.cat(errors))


def pooled(output: Tensor, mask: Tensor | None) -> Tensor:
    """[batch, tokens, hidden] averaged over the tokens of `mask` [batch, tokens]; others as they are."""
    if output.ndim != 3:
        return output
    if mask is None or mask.shape != output.shape[:2]:
        return output.mean(1)
    weight = mask.to(output.dtype)[..., None]
    return (output * weight).sum(1) / weight.sum(1).clamp_min(1)


def read_text(dataset: Path, max_chars: int) -> str:
    """The first `max_chars` characters of a dataset, documents joined by a blank line. Raises UsageError."""
    pieces: list[str] = []
    length = 0
    for document in load_text(dataset):
        pieces.append(document[: max_chars - length])
        length += len(pieces[-1]) + 2
        if length >= max_chars:
            break
    return "\n\n".join(pieces)


def text_windows(tokenizer: Any, text: str, seq_len: int, count: int | None) -> Tensor:
    """Windows of a text for a language model, [count, seq_len]; each starts with BOS if the model uses it.

    Raises UsageError when the text is too short.
    """
    ids = tokenizing.encode(tokenizer, text, add_special_tokens=False)["input_ids"]
    try:
        windows = cut_windows(ids, seq_len, count).clone()
    except ValueError as error:
        raise UsageError(
            f"the dataset is too short: {error}; give more text or a smaller `seq_len`"
        ) from error
    if count is not None and windows.shape[0] < count:
        log.warning(
            "the dataset holds only %d windows of %d tokens; %d were asked for", len(windows), seq_len, count
        )
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and tokenizing.encode(tokenizer, "a")["input_ids"][:1] == [bos]:
        windows[:, 0] = bos
    return windows


def text_batches(tokenizer: Any, text: str, seq_len: int, count: int) -> list[dict[str, Tensor]]:
    """The first `count` lines of a text as padded inputs of an encoder. Raises UsageError without any."""
    lines = [line.strip() for line in text.splitlines() if line.strip()][:count]
    if not lines:
        raise UsageError("the dataset is empty: give a text with at least one line")
    limit = min(seq_len, getattr(tokenizer, "model_max_length", seq_len) or seq_len)
    if tokenizer.pad_token_id is None:
        return [
            dict(tokenizing.encode(tokenizer, line, truncation=True, max_length=limit, return_tensors="pt"))
            for line in lines
        ]
    return [
        dict(
            tokenizing.encode(
                tokenizer, lines, truncation=True, max_length=limit, padding=True, return_tensors="pt"
            )
        )
    ]


def synthetic_batches(config: Mapping[str, Any], count: int, seed: int) -> list[dict[str, Tensor]]:
    """Seeded noise for encoders of images, films or sound, which have no text to be measured on.

    Raises UsageError when the config tells neither an image's size nor a number of mel bands, or one beyond all use.
    """
    vision = config.get("vision_config") if isinstance(config.get("vision_config"), Mapping) else config
    size = vision.get("image_size") if vision else None
    if size is not None and vision is not None:
        height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
        shape = (*frames(config), vision.get("num_channels", 3), height, width)
        return [{"pixel_values": _noise(count, shape, seed)}]
    if config.get("model_type") == SPECTROGRAM_BY_TIME:
        shape = (config.get("max_length", 1024), config.get("num_mel_bins", 128))
        return [{"input_values": _noise(count, shape, seed)}]
    if config.get("num_mel_bins"):
        bands, positions = made_up_shape((config["num_mel_bins"], config.get("max_source_positions", 1500)))
        inputs = {"input_features": _noise(count, (bands, 2 * positions), seed)}
        start = config.get("decoder_start_token_id")
        if config.get("is_encoder_decoder") and start is not None:
            if type(start) is not int or not 0 <= start < 2**63:
                raise UsageError(
                    f"the config's decoder_start_token_id is {short(start, 60)}: a token is needed"
                )
            inputs["decoder_input_ids"] = torch.full((count, 1), start, dtype=torch.int64)
        return [inputs]
    raise UsageError("this encoder has no tokenizer, image size or mel bands: nstf cannot make inputs for it")


def _noise(count: int, sizes: Sequence[object], seed: int) -> Tensor:
    return torch.randn(count, *made_up_shape(sizes), generator=torch.Generator().manual_seed(seed))
