"""The table and the plot of `quality.py`: KLD against file bytes, a panel per domain, logarithmic KLD."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from nstf_convert.report.svg import Scale, axes, circle, fit, label, path

Points = Sequence[Mapping[str, Any]]
COLOURS = ("#0b5cd6", "#c2570c", "#6d5bb8", "#12855f", "#c02d7a", "#6b6b6b")
PANEL, HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 520.0, 460.0, 64.0, 60.0, 76.0, 18.0


def table(points: Points, domains: Sequence[str], whole: int) -> str:
    """A markdown table of all points; `whole` is the original's bytes."""
    heads = [f"{d} {what}" for d in domains for what in ("KLD", "top-1", "ppl ratio")]
    lines = [
        "| file | bytes | share | " + " | ".join(heads) + " |",
        "|---|---|---|" + "---|" * len(heads),
    ]
    for p in points:
        cells = []
        for d in domains:
            a = p["accuracy"][d]
            cells += [_number(a["mean_kl"], 5) + _error(a), _number(a["top1"], 4), _number(a["ppl_ratio"], 4)]
        name = f"{p['family']} {p['name']}" if p["family"] != "nstf" else _our_name(p)
        share = p["size_bytes"] / whole
        lines.append(f"| {name} | {p['size_bytes']:,} | {share:.4f} | " + " | ".join(cells) + " |")
    if points:
        a = points[0]["accuracy"]
        texts = (
            f"{d}: perplexity {a[d]['ppl_reference']:.3f} on {a[d]['windows']} windows, {a[d]['tokens']} tokens"
            for d in domains
        )
        lines += ["", f"Reference, {whole:,} bytes: " + "; ".join(texts) + "."]
    return "\n".join(lines) + "\n"


def plot(points: Points, domains: Sequence[str], title: str) -> str:
    """An SVG file. The line of a family joins its files that no smaller file of it beats."""
    families = list(dict.fromkeys(p["family"] for p in points))
    colours = {f: COLOURS[min(i, len(COLOURS) - 1)] for i, f in enumerate(families)}
    width = PANEL * len(domains)
    parts = [f'<rect width="{width:.0f}" height="{HEIGHT:.0f}" fill="#ffffff"/>', _style(colours)]
    parts.append(
        label(LEFT, 22, f"{title}: what a file loses, by its bytes (lower is better)", style="title")
    )
    x = LEFT
    for i, family in enumerate(families):
        parts.append(circle(x + 5, 40, 4, f"f{i}"))
        parts.append(label(x + 14, 44, family, style="name"))
        x += 34 + 6.6 * len(family)
    for number, domain in enumerate(domains):
        parts.append(
            f'<g transform="translate({number * PANEL:.0f} 0)">{_panel(points, domain, families)}</g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(title)}" '
        f'viewBox="0 0 {width:.0f} {HEIGHT:.0f}">{"".join(parts)}</svg>\n'
    )


def _panel(points: Points, domain: str, families: Sequence[str]) -> str:
    found = [
        (p, p["size_bytes"] / 1e6, p["accuracy"][domain]["mean_kl"])
        for p in points
        if p["accuracy"][domain]["mean_kl"]
    ]
    if not found:
        return ""
    x: Scale = fit([f[1] for f in found], LEFT, PANEL - RIGHT)
    y: Scale = fit([f[2] for f in found], HEIGHT - BOTTOM, TOP, log=True)
    parts = [axes(x, y, f"file size in MB, {domain}", "mean KLD in nats")]
    for i, family in enumerate(families):
        own = sorted(((p, b, k) for p, b, k in found if p["family"] == family), key=lambda f: (f[1], f[2]))
        front: list[tuple[float, float]] = []
        best = float("inf")
        for _, size, kl in own:
            if kl < best:
                best = kl
                front.append((x(size), y(kl)))
        parts.append(path(front, f"f{i}"))
        for p, size, kl in own:
            parts.append(
                circle(x(size), y(kl), 3.6, f"f{i}", f"{family} {p['name']}: {size:.2f} MB, KLD {kl:.5f}")
            )
            if family != "nstf":
                parts.append(label(x(size) + 6, y(kl) - 5, p["name"], style="small"))
    return "".join(parts)


def _style(colours: Mapping[str, str]) -> str:
    rules = [
        "text{font:12px system-ui,sans-serif;fill:#333}",
        "text.title{font-size:14px;font-weight:600}",
        "text.small{font-size:9.5px;fill:#666}",
        ".grid{stroke:#e4e4e4;stroke-width:1}",
        "path{fill:none;stroke-width:1.8}",
    ]
    for i, colour in enumerate(colours.values()):
        rules.append(f"path.f{i}{{stroke:{colour}}}circle.f{i}{{fill:{colour}}}")
    return f"<style>{''.join(rules)}</style>"


def _our_name(point: Mapping[str, Any]) -> str:
    """`nstf`, with what it was asked for and the variant's label."""
    label_text = str(point["name"]).rpartition(" ")[0]
    return " ".join(filter(None, ("nstf", label_text, f"at {point.get('target', '')}".rstrip())))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _error(accuracy: Mapping[str, Any]) -> str:
    error = accuracy.get("mean_kl_se")
    return "" if error is None else f" ± {error:.{5 if error < 0.01 else 4}f}"
