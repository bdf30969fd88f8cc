"""Memory and text of a conversion in a few lines."""

from collections.abc import Mapping
from typing import Any


def pairs(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lines about a report's resources: peaks beside bounds, and how many windows there was room for."""
    out = []
    for key, what in (("host", "memory"), ("gpu", "GPU memory")):
        peak, bound = facts.get(f"{key}_peak_bytes"), facts.get(f"{key}_bound_bytes")
        if peak and bound:
            out.append((what, f"{peak / 2**30:.2f} GiB at the peak, bound {bound / 2**30:.2f} GiB"))
    windows = facts.get("windows") or {}
    if windows:
        used = [f"{windows['calibrated']} of {windows['asked']} calibrated on"]
        if "front_to_back" in windows:
            used.append(f"{windows['front_to_back']} front to back")
        if "encode" in windows:
            used.append(f"{windows['encode']} encoded for")
        short = "; memory was short" if facts.get("memory_short") else ""
        out.append(("windows", ", ".join(used) + short))
    return out
