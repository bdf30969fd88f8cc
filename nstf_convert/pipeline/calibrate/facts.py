"""The metadata of a calibration file by a strict schema: keys, types, ranges, and what must agree with what."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from nstf_convert.pipeline.calibrate.text import ORIGINS

# The splits, and what the references of their batches are called.
SPLITS = {"fit": None, "held_out": "reference", "report": "report_reference"}
# Longer than any name of a dataset or of a tensor; more than there are tokens anywhere.
MOST_TEXT, MOST_COUNT = 4096, 2**53
COUNTS = (
    "fit",
    "held_out",
    "report",
    "fit_tokens",
    "held_out_tokens",
    "report_tokens",
    "gradient_windows",
    "version",
)
WINDOWS = ("fit_windows", "held_out_windows", "report_windows")
KEYS = {
    *COUNTS,
    "checkpoint",
    "device",
    "domains",
    "held_out_digest",
    "hessians",
    "identity",
    "language",
    "seed",
    "source",
}
SOURCE_KEYS = {"origin", *WINDOWS}
SOURCE_MAY = {"datasets", "seq_len", "input", "found_windows", "window_tokens", "tokens_at_a_time"}
ENTRY_KEYS = {"tokens", "shrinkage", "weights"}


class Problem(Exception):
    """Why a calibration file is refused, in a few words."""


def short(value: Any) -> str:
    """A value in quotes, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_metadata(facts: Mapping[str, Any]) -> None:
    """Raises Problem for metadata that nstf does not write; what `attention` says is for `check_attention`."""
    keys(facts, "its metadata", KEYS, {"attention", "job", "tokenizer"})
    for name in COUNTS:
        count(facts[name], name)
    count(facts["seed"], "seed", 0, 2**64)
    if not isinstance(facts["language"], bool):
        raise Problem(f"language is {short(facts['language'])}")
    for name in ("identity", "held_out_digest", "checkpoint", *sorted({"job", "tokenizer"} & facts.keys())):
        if not re.fullmatch("[0-9a-f]{64}", text(facts[name], name)):
            raise Problem(f"{name} is {short(facts[name])}")
    text(facts["device"], "device")
    _check_source(facts)
    keys(facts["domains"], "domains", set(SPLITS), set())
    for split in SPLITS:
        windows = facts["source"]["fit_windows"] if split == "fit" else facts[split]
        if len(texts(facts["domains"][split], f"domains of {split}")) != windows:
            raise Problem(f"there are {windows} windows of {split}, and other numbers of domains")
    if facts["held_out"] == 0:
        raise Problem("nothing is held out")
    if not isinstance(facts["hessians"], dict):
        raise Problem("hessians is no object")
    for key, entry in facts["hessians"].items():
        keys(entry, f"hessians: {short(key)}", ENTRY_KEYS, set())
        count(entry["tokens"], f"hessians: {short(key)}: tokens")
        number(entry["shrinkage"], f"hessians: {short(key)}: shrinkage", 0, 1)
        if not texts(entry["weights"], f"hessians: {short(key)}: weights"):
            raise Problem(f"hessians: {short(key)} has no weights")


def _check_source(facts: Mapping[str, Any]) -> None:
    source = facts["source"]
    keys(source, "source", SOURCE_KEYS, SOURCE_MAY)
    if text(source["origin"], "source: origin") not in ORIGINS:
        raise Problem(f"source: origin is {short(source['origin'])}")
    for name in sorted(
        {*WINDOWS, "found_windows", "seq_len", "window_tokens", "tokens_at_a_time"} & source.keys()
    ):
        count(source[name], f"source: {name}")
    if "input" in source:
        text(source["input"], "source: input")
    if not texts(source.get("datasets", []), "source: datasets") and source["origin"] == "dataset":
        raise Problem("source: there are no datasets")
    kept = source["fit_windows"]
    if facts["fit"] > kept or kept > source.get("found_windows", kept):
        raise Problem(f"source: fit_windows is {kept}")
    for split in ("held_out", "report"):
        if source[f"{split}_windows"] != facts[split]:
            raise Problem(f"source: {split}_windows is {source[f'{split}_windows']}")


def keys(value: Any, where: str, must: Collection[str], may: Collection[str]) -> None:
    """Raises Problem unless value is an object with these keys."""
    if not isinstance(value, dict):
        raise Problem(f"{where} is no object")
    for name in sorted(set(must) - value.keys()):
        raise Problem(f"{where}: {name} is missing")
    for name in sorted(value.keys() - set(must) - set(may)):
        raise Problem(f"{where}: {short(name)} is unknown")


def count(value: Any, where: str, least: int = 0, most: int = MOST_COUNT) -> int:
    """A whole number within a range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Problem(f"{where} is {_said(value)}")
    return value


def number(value: Any, where: str, least: float, most: float) -> float:
    """A number within a range."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise Problem(f"{where} is {_said(value)}")
    return float(value)


def text(value: Any, where: str) -> str:
    """A short text that can be written anywhere: it may go into the artifact."""
    if not isinstance(value, str) or len(value) > MOST_TEXT or any("\ud800" <= c <= "\udfff" for c in value):
        raise Problem(f"{where} is {_said(value)}")
    return value


def texts(value: Any, where: str) -> list[str]:
    """A list of such texts."""
    if not isinstance(value, list):
        raise Problem(f"{where} is {_said(value)}")
    return [text(v, where) for v in value]


def _said(value: Any) -> str:
    """A value in a few words; of a long list or number not even its text is made."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MOST_COUNT:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return short(value[:100])
    return short(value) if isinstance(value, int | float | None) else f"of type {type(value).__name__}"
