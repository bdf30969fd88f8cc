"""The few pieces of SVG the report draws with: scales, axes, marks. Colours are the style's classes."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FONT = 12


def escape(value: object) -> str:
    """`value` as text of an element or of a quoted attribute; control characters become a visible sign."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in str(value))
    return html.escape(text, quote=True)


@dataclass(frozen=True)
class Scale:
    """A value to a position: [low, high] to [start, end], linear or logarithmic, clamped."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, v = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, v = math.log(low), math.log(high), math.log(v)
        share = (v - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """Round values within the scale, about `count` of them."""
        if self.log:
            return _log_ticks(self.low, self.high, count)
        step = _round_step((self.high - self.low) / max(1, count))
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def fit(values: Iterable[float], start: float, end: float, log: bool = False, zero: bool = False) -> Scale:
    """A scale around the values with a margin; `zero` starts a linear one at 0."""
    kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(kept), max(kept)) if kept else (1.0, 10.0)
    if log:
        return Scale(low / 1.5, high * 1.5, start, end, log=True)
    low = 0.0 if zero else low
    margin = 0.06 * (high - low) or abs(high) or 1.0
    return Scale(low if zero else low - margin, high + margin, start, end)


def axes(x: Scale, y: Scale, x_label: str, y_label: str, form_x: object = None, form_y: object = None) -> str:
    """Grid lines, tick labels and axis names. form_x, form_y: value -> text; `short` by default."""
    text_x = form_x if callable(form_x) else short
    text_y = form_y if callable(form_y) else short
    parts = []
    for value in x.ticks():
        at = x(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{y.end:.1f}" x2="{at:.1f}" y2="{y.start:.1f}"/>')
        parts.append(label(at, y.start + 17, text_x(value), "middle"))
    for value in y.ticks():
        at = y(value)
        parts.append(f'<line class="grid" x1="{x.start:.1f}" y1="{at:.1f}" x2="{x.end:.1f}" y2="{at:.1f}"/>')
        parts.append(label(x.start - 7, at + 4, text_y(value), "end"))
    parts.append(label((x.start + x.end) / 2, y.start + 36, x_label, "middle", "name"))
    middle = (y.start + y.end) / 2
    left = x.start - 52
    parts.append(
        f'<text class="name" text-anchor="middle" transform="translate({left:.1f} {middle:.1f}) rotate(-90)">'
        f"{escape(y_label)}</text>"
    )
    return "".join(parts)


def svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A figure that scales down with the page and never above its own width."""
    return (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px">{"".join(parts)}</svg>'
    )


def label(x: float, y: float, text: object, anchor: str = "start", style: str = "tick") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def circle(x: float, y: float, radius: float, style: str, tip: str = "") -> str:
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">{_tip(tip)}</circle>'


def rect(
    x: float, y: float, width: float, height: float, style: str, tip: str = "", opacity: float = 1.0
) -> str:
    shade = "" if opacity >= 1 else f' fill-opacity="{opacity:.2f}"'
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect class="{style}" {size}{shade}>{_tip(tip)}</rect>'


def path(points: Sequence[tuple[float, float]], style: str) -> str:
    """Straight lines through the points."""
    steps = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    return f'<path class="{style}" d="{steps}"/>' if points else ""


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """A row of colour names in HTML. entries: (class of the colour, text)."""
    items = "".join(f'<span><i class="{style}"></i>{escape(text)}</span>' for style, text in entries)
    return f'<p class="legend">{items}</p>'


def short(value: float) -> str:
    """A number in a few characters: 1.2e-05, 0.003, 12, 4.5k, 3M, 2G."""
    if value == 0:
        return "0"
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e")


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _round_step(step: float) -> float:
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next((power * m for m in (1, 2, 5, 10) if power * m >= step - 1e-12), power * 10)


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        stride = max(1, math.ceil((last - first) / count))
        return [10.0**i for i in range(first, last + 1, stride)]
    ticks = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
    return [t for t in ticks if low <= t <= high]
