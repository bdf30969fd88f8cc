"""Sizes and budgets as people write them: `0.5`, `50%`, `1.5GiB`, `800MB`, `800000000`."""

import math
import re
from typing import Literal

from nstf.errors import UsageError

BudgetKind = Literal["ratio", "bytes", "bpw", "max_kl"]

# kB is 1000 bytes and KiB 1024, as the standards say; a bare letter is binary, as in `ls -h` and llama.cpp.
UNITS: dict[str, int] = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
    **{letter: 1024**power for power, letter in enumerate("kmgt", 1)},
}

MAX_BYTES = 1 << 60
_NUMBER = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_SIZE_EXAMPLES = "write for example 1.5GiB, 800MB or a number of bytes"
_RATIO_EXAMPLES = "write a fraction of the checkpoint's bytes such as 0.5 or 50%"


def parse_ratio(text: str, option: str = "--budget") -> float:
    """A fraction in (0, 1] from `0.5` or `50%`. Raises UsageError."""
    body, percent = (text.strip()[:-1], True) if text.strip().endswith("%") else (text.strip(), False)
    value = _number(body.strip(), text, option, _RATIO_EXAMPLES) / (100 if percent else 1)
    if value > 1:
        raise UsageError(
            f"{option} {_shown(text)} is more than the whole checkpoint: {_RATIO_EXAMPLES}, "
            "or give bytes with --target-size"
        )
    return value


def parse_bytes(text: str, option: str = "--target-size") -> int:
    """Whole bytes from `1.5GiB`, `800MB` or `800000000`; a fraction of a byte is dropped.

    Raises UsageError.
    """
    body = text.strip()
    unit = re.search(r"[a-z]*$", body, re.ASCII | re.IGNORECASE)
    name = unit.group().lower() if unit else ""
    if body.endswith("%"):
        raise UsageError(f"{option} {_shown(text)} is a share, not a size: use --budget {_shown(text)}")
    if name and name not in UNITS:
        # `1e9` ends in a digit, so a trailing word can only be a unit (or nan, inf, nonsense).
        raise UsageError(f"{option} {_shown(text)} is not a size: {_SIZE_EXAMPLES}")
    number = _number(body[: len(body) - len(name)].rstrip(), text, option, _SIZE_EXAMPLES)
    size = number * UNITS[name or "b"]
    if size > MAX_BYTES:
        raise UsageError(f"{option} {_shown(text)} is more than {MAX_BYTES} bytes: {_SIZE_EXAMPLES}")
    if size < 1:
        raise UsageError(f"{option} {_shown(text)} is less than one byte: {_SIZE_EXAMPLES}")
    return math.floor(size)


def parse_positive(text: str, option: str, limit: float, examples: str) -> float:
    """A number in (0, limit]. Raises UsageError."""
    value = _number(text.strip(), text, option, examples)
    if value > limit:
        raise UsageError(f"{option} {_shown(text)} is above {limit:g}: {examples}")
    return value


def parse_budget(
    budget: str | None, target_size: str | None, target_bpw: str | None, max_kl: str | None
) -> tuple[BudgetKind, float]:
    """The one budget that was given, as (kind, value). Raises UsageError for none, for several, for nonsense.

    ratio: share of the checkpoint's tensor bytes; bytes: of the file; bpw: bits per weight, everything in the
    file counted; max_kl: mean KL divergence in nats that the smallest file may have.
    """
    given = {
        "--budget": budget,
        "--target-size": target_size,
        "--target-bpw": target_bpw,
        "--max-kl": max_kl,
    }
    used = [name for name, value in given.items() if value is not None]
    if not used:
        raise UsageError(
            "no budget: give one of --budget 0.5, --target-size 1.5GiB, --target-bpw 4.25 or --max-kl 0.01"
        )
    if len(used) > 1:
        raise UsageError(f"{' and '.join(used)} exclude each other: give exactly one of them")
    if budget is not None:
        if re.search(r"[a-z]$", budget.strip(), re.IGNORECASE) and not _is_word(budget):
            return "bytes", float(parse_bytes(budget, "--budget"))
        return "ratio", parse_ratio(budget)
    if target_size is not None:
        return "bytes", float(parse_bytes(target_size))
    if target_bpw is not None:
        return "bpw", parse_positive(target_bpw, "--target-bpw", 32, "write bits per weight such as 4.25")
    return "max_kl", parse_positive(str(max_kl), "--max-kl", 100, "write nats such as 0.01")


def format_bytes(size: float) -> str:
    """`1.50 GiB`, `800.0 MiB`, `512 B`: for people; the exact number stands beside it where it matters."""
    for unit, name in ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"


def _number(body: str, text: str, option: str, examples: str) -> float:
    match = _NUMBER.fullmatch(body)
    if match is None:
        raise UsageError(f"{option} {_shown(text)} is not a number: {examples}")
    value = float(match.group(2) + (match.group(3) or ""))
    if match.group(1) == "-" and value != 0:
        raise UsageError(f"{option} {_shown(text)} is negative: {examples}")
    if value == 0:
        raise UsageError(f"{option} {_shown(text)} is zero: {examples}")
    if not math.isfinite(value):
        raise UsageError(f"{option} {_shown(text)} is too large: {examples}")
    return value


def _is_word(text: str) -> bool:
    """True for `nan`, `half` and other text that has no digit: the ratio's message fits better."""
    return not any(c.isdigit() for c in text)


def _shown(text: str) -> str:
    return repr(text[:40])
