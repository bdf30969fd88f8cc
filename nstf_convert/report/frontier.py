"""The choice between bytes, speed and loss, as lines and as a figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from nstf_convert.report import svg
from nstf_convert.report.style import STYLE

WIDTH, HEIGHT = 940, 375
_COLOURS = {"balance": "c1", "size": "c2", "speed": "c7"}
HEADER = ("prefer", "bytes", "bits", "tokens/s", "expected KLD")


def rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for every point: preference, bytes, bits per weight, tokens a second on each target, expected loss."""
    return [
        (
            p["prefer"],
            str(p["size_bytes"]),
            f"{p['bits_per_weight']:.2f}",
            ", ".join(_speed(r, s) for r, s in zip(p["rates"], p["products_seconds"], strict=True)),
            f"{p['expected_loss']:.3g}",
        )
        for p in found["points"]
    ]


def figure(found: Mapping[str, Any]) -> str:
    """An SVG file: tokens a second on the first target (where they are not known, its products a second) against
    expected loss; a mark for every plan, joined by preference, with bytes in its tip."""
    points = [p for p in found["points"] if p["expected_loss"] > 0 and _first(p) > 0]
    x = svg.fit((_first(p) for p in points), 78, WIDTH - 12)
    y = svg.fit((p["expected_loss"] for p in points), HEIGHT - 45, 12, log=True)
    name = "tokens" if any(p["rates"][0] for p in points) else "passes through all matrices"
    parts = [svg.axes(x, y, f"{name} a second, {found['targets'][0]}", "expected KLD in nats")]
    for prefer, colour in _COLOURS.items():
        own = [p for p in points if p["prefer"] == prefer]
        parts.append(svg.path([(x(_first(p)), y(p["expected_loss"])) for p in own], "hull"))
        for p in own:
            tip = f"{prefer}: {p['size_bytes']} bytes, {p['bits_per_weight']:.2f} bits per weight"
            parts.append(svg.circle(x(_first(p)), y(p["expected_loss"]), 4.5, f"mark {colour}", tip))
    for i, (prefer, colour) in enumerate(_COLOURS.items()):
        parts.append(svg.circle(WIDTH - 100, 22 + 18 * i, 4.5, f"mark {colour}"))
        parts.append(svg.label(WIDTH - 90, 26 + 18 * i, prefer))
    drawn = svg.svg(WIDTH, HEIGHT, "bytes, speed and expected loss", [f"<style>{STYLE}</style>", *parts])
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _first(point: Mapping[str, Any]) -> float:
    rates: Sequence[float | None] = point["rates"]
    seconds: Sequence[float] = point["products_seconds"]
    return rates[0] or (1.0 / seconds[0] if seconds[0] else 0.0)


def _speed(rate: float | None, seconds: float) -> str:
    return f"{rate:.1f}" if rate else f"({1e3 * seconds:.3g} ms)"
