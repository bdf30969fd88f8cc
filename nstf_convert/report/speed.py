"""Decode speed of a conversion in a few lines: predicted before the file was written, and measured afterwards."""

from collections.abc import Mapping
from typing import Any

# Where a prediction is off by more than this, the lines say so.
MISSED = 0.15


def pairs(facts: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Lines about a report's `speed`: tokens a second on every target, and what bounded the plan."""
    out = []
    for target in (facts or {}).get("targets") or []:
        name = f"decode, {target['target']}" + (f" ({target['isa']})" if target.get("isa") else "")
        said = _said(target)
        if said:
            out.append((name, said))
        if target.get("predicted_prefill_rate"):
            prefill = (
                f"products allow about {target['predicted_prefill_rate']:.0f} tokens of a prompt a second"
            )
            out.append((name.replace("decode", "prefill", 1), prefill))
    bound = (facts or {}).get("bound")
    if bound and out:
        out.append(("planned for", str(bound)))
    return out


def _said(target: Mapping[str, Any]) -> str:
    predicted, measured = target.get("predicted_rate"), target.get("measured_rate")
    source = "" if target.get("prices") == "measured" else ", by a model of the processor"
    if measured and predicted:
        off = predicted / measured - 1
        note = f", {100 * off:+.0f} %" if abs(off) > MISSED else ""
        return f"{measured:.1f} tokens a second measured, {predicted:.1f} predicted{note}"
    if predicted:
        return f"about {predicted:.1f} tokens a second predicted{source}"
    seconds = target.get("products_seconds")
    return f"{1e3 * seconds:.3g} ms of products a token predicted{source}" if seconds else ""
