"""More text for healing than the statistics were fitted on, without a piece of what is held out."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nstf.errors import UsageError
from nstf_convert import dataset as texts
from nstf_convert.pipeline.calibrate import statistics as calibrations
from nstf_convert.pipeline.session import Session
from nstf_convert.windows import first_documents, tokenise_windows

# Windows that share this many tokens in a row with held-out text are left out.
OVERLAP_TOKENS = 16
# More than this many windows are never needed.
MAX_WINDOWS = 4096
# Windows of a text are at first thought to take so many characters a token; when that was too few, fewer are asked for.
CHARS_PER_TOKEN = 2.5
LESS = 0.85
MAX_CHARS_PER_TOKEN = 8


def healing_windows(session: Session, fit: Sequence[Tensor], wanted: int) -> list[Tensor]:
    """Windows [1, tokens] of the datasets, up to `wanted`; those of `fit` where the datasets have no more to give."""
    length = fit[0].shape[1]
    datasets = session.options.datasets
    if session.calibration is None or not datasets or any(d.endswith(".safetensors") for d in datasets):
        return list(fit)
    held = [
        *calibrations.held_out_batches(session.calibration),
        *calibrations.report_batches(session.calibration),
    ]
    known = _runs([b["input_ids"] for b in held])
    out = []
    for number, path in enumerate(datasets):
        for window in _text_windows(
            session, path, length, -(-wanted // len(datasets)), session.options.seed + number
        ):
            if known.isdisjoint(_runs([window])):
                out.append(window)
    session.job.check_datasets()
    return out if len(out) > len(fit) else list(fit)


def _text_windows(session: Session, path: str, length: int, wanted: int, seed: int) -> Iterator[Tensor]:
    """Windows of a text, as many as it has up to `wanted`."""
    tokenizer = session.tokenizer()
    documents: list[str] = []
    characters = 0
    for text in first_documents(texts.load_text(path), MAX_CHARS_PER_TOKEN * MAX_WINDOWS * length):
        documents.append(text)
        characters += len(text)
    wanted = min(wanted, MAX_WINDOWS, max(1, int(characters / (CHARS_PER_TOKEN * length))))
    while wanted:
        try:
            found = tokenise_windows(tokenizer, documents, length, wanted, 0, seed, path)
        except UsageError:
            wanted = int(wanted * LESS)
            continue
        yield from (row[None].clone() for row in found.fit)
        return


def _runs(windows: Sequence[Tensor]) -> set[tuple[int, ...]]:
    """Every stretch of OVERLAP_TOKENS tokens."""
    out: set[tuple[int, ...]] = set()
    for window in windows:
        ids = torch.as_tensor(window).reshape(-1).tolist()
        out |= {tuple(ids[i : i + OVERLAP_TOKENS]) for i in range(len(ids) - OVERLAP_TOKENS + 1)}
    return out
