"""How the mix was found, as HTML: the measured search, the last steps, every mix that was measured."""

from collections.abc import Mapping
from typing import Any

from nstf_convert.report.parts import details, number, table
from nstf_convert.report.svg import escape


def choices(accuracy: Mapping[str, Any]) -> str:
    """What the report's `accuracy` says about the choice; parts that were not done are left out."""
    return _steps(accuracy) + _structure(accuracy) + _search(accuracy.get("search")) + _tried(accuracy)


def _steps(accuracy: Mapping[str, Any]) -> str:
    rows = [
        (
            s["step"],
            number(s["before"], ".5f"),
            number(s["after"], ".5f"),
            "kept" if s["kept"] else "not kept",
        )
        for s in accuracy.get("steps") or []
    ]
    return table(("last steps", "score before", "after", ""), rows) if rows else ""


def _structure(accuracy: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{r['factor']:.3g}",
            f"{r['size_bytes']:,}",
            "-" if r["seconds"] is None else f"{1e3 * r['seconds']:.3f}",
            number(r["score"], ".5f"),
            number(r["promise"], ".5f"),
            "kept" if r["kept"] else "broken",
        )
        for r in accuracy.get("structure") or []
    ]
    columns = (
        "decompositions expected to lose, times",
        "bytes",
        "ms of products",
        "score",
        "may lose",
        "promise",
    )
    return table(columns, rows) if rows else ""


def _search(search: Mapping[str, Any] | None) -> str:
    if not search or not search["steps"]:
        return ""
    limits = [
        f"{search[key]:g} {unit}"
        for key, unit in (("minutes", "minutes"), ("steps_allowed", "moves"))
        if search[key] is not None
    ]
    allowed = " and ".join(limits)
    text = (
        f"Local search within {allowed}: {search['accepted']} of {search['steps']} moves accepted in "
        f"{search['seconds']:.0f} s, ended by: {search['ended']}. A move is accepted when its paired gain is above "
        "its standard error and no dataset loses by more than noise."
    )
    rows = [
        (
            m["move"],
            number(m["score"], ".5f"),
            f"{number(m['gain'], '.2g')} ± {number(m['error'], '.1g')}",
            "accepted" if m["accepted"] else "rejected",
        )
        for m in search["moves"]
    ]
    return f'<p class="soft">{escape(text)}</p>' + details(
        "Every move of the search", table(("move", "score", "gain", ""), rows)
    )


def _tried(accuracy: Mapping[str, Any]) -> str:
    rows = [
        (
            t["name"],
            f"{t['size_bytes']:,}",
            number(t.get("mean_kl", t.get("relative_l2")), ".5f"),
            number(t.get("expected_loss"), ".3g"),
        )
        for t in accuracy.get("tried") or []
    ]
    columns = ("mix", "bytes", "score on the windows that choose", "expected")
    return details("Every mix that was measured", table(columns, rows)) if rows else ""
