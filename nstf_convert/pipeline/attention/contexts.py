"""Contiguous text at the length that will be used: windows that choose a plan, and windows that report what it loses.

A window lies within one document. Windows that were joined from unrelated pieces make far positions look useless: what
lies further back than the piece is another text, and dropping it is free there.
"""

import heapq
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UsageError
from nstf.runtime import tokenizing
from nstf.runtime.kv_formats import BLOCK
from nstf_convert.pipeline.calibrate.text import readable
from nstf_convert.windows import first_documents

log = logging.getLogger("nstf")

# Windows of each split and dataset. A window has thousands of scored positions.
WINDOWS = 1
# Shorter ones say nothing about a cache.
SHORTEST = 2 * BLOCK
# Enough text of a dataset to find its long documents in.
POOL_CHARS = 32 << 20
# In a file without structure of its own, two empty lines separate documents.
SEPARATOR = "\n\n\n"


def check_length(wanted: int, limit: int) -> None:
    """Raises UsageError for a context that is longer than the model's positions or too short to say anything."""
    if wanted > limit:
        raise UsageError(
            f"a context of {wanted} tokens: the model has positions for {limit}; ask for at most that"
        )
    if wanted < SHORTEST:
        raise UsageError(
            f"a context of {wanted} tokens is too short for a cache plan: ask for at least {SHORTEST}"
        )


@dataclass(frozen=True, eq=False)
class Contexts:
    """choose, report: token ids [length] each, no token in two of them; domains: their datasets, in order.

    length: tokens of every window, at most `wanted`; note: one line when it is shorter, else None.
    """

    choose: tuple[Tensor, ...]
    report: tuple[Tensor, ...]
    domains: dict[str, tuple[str, ...]]
    length: int
    wanted: int
    note: str | None


def contexts(
    tokenizer: Any,
    sources: Mapping[str, Iterable[str]],
    wanted: int,
    limit: int,
    windows: int = WINDOWS,
    report_sources: Mapping[str, Iterable[str]] | None = None,
) -> Contexts:
    """`windows` windows for each split and dataset, of `wanted` tokens or the longest there are.

    limit: the most tokens the model has positions for; report_sources: texts of their own for the report, otherwise
    documents (or, where a dataset has one long document, stretches of it) that do not choose. Raises UsageError when
    even short contexts cannot be cut, or the model's limit is below `wanted`.
    """
    check_length(wanted, limit)
    pools = {name: _documents(tokenizer, text, wanted, windows) for name, text in sources.items()}
    own = {n: _documents(tokenizer, text, wanted, windows) for n, text in (report_sources or {}).items()}
    length = wanted // BLOCK * BLOCK
    per_pool = windows if own else 2 * windows
    while not all(_count(p, length) >= per_pool for p in pools.values()) or not all(
        _count(p, length) >= windows for p in own.values()
    ):
        length -= BLOCK
        if length < SHORTEST:
            short = min({**pools, **own}.items(), key=lambda item: max(map(len, item[1]), default=0))
            raise UsageError(
                f"{short[0]}: its longest document has {max(map(len, short[1]), default=0)} tokens, too few "
                f"for contexts of {SHORTEST} to choose and to report on: give longer text as `datasets`"
            )
    parts: dict[str, list[Tensor]] = {"choose": [], "report": []}
    domains: dict[str, list[str]] = {"choose": [], "report": []}
    for name, pool in pools.items():
        cut = _cut(pool, length, per_pool)
        splits = [("choose", cut[:windows])] + ([] if own else [("report", cut[windows:])])
        for split, found in splits:
            parts[split] += found
            domains[split] += [readable(Path(name).name)] * len(found)
    for name, pool in own.items():
        found = _cut(pool, length, windows)
        parts["report"] += found
        domains["report"] += [readable(Path(name).name)] * len(found)
    note = None
    if length < wanted // BLOCK * BLOCK:
        note = (
            f"no text has documents of {wanted} tokens for both splits: contexts of {length} tokens are used"
        )
        log.warning("%s", note)
    splits_of = {split: tuple(names) for split, names in domains.items()}
    return Contexts(tuple(parts["choose"]), tuple(parts["report"]), splits_of, length, wanted, note)


def _documents(tokenizer: Any, texts: Iterable[str], wanted: int, windows: int) -> list[Tensor]:
    """Token ids of the longest documents of a dataset, the longest first."""
    pool = (part for text in first_documents(texts, POOL_CHARS) for part in text.split(SEPARATOR))
    # Only those that are read on. Text has two characters a token at least, mostly: enough that as many windows can be cut.
    longest = heapq.nsmallest(8 * windows, pool, key=lambda text: (-len(text), text))
    found: list[Tensor] = []
    for text in longest:
        ids = tokenizing.encode(tokenizer, text[: 16 * wanted * windows]).input_ids
        found.append(torch.tensor(ids, dtype=torch.int64))
    return sorted(found, key=len, reverse=True)


def _count(documents: Sequence[Tensor], length: int) -> int:
    return sum(len(ids) // length for ids in documents)


def _cut(documents: Sequence[Tensor], length: int, count: int) -> list[Tensor]:
    """`count` windows, one of each document in turn before a second one of any: other documents first."""
    found = []
    for turn in range(max(len(ids) // length for ids in documents)):
        found += [ids[turn * length :][:length] for ids in documents if len(ids) >= (turn + 1) * length]
    return found[:count]
