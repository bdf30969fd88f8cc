"""The report as one HTML page: no network, no script, inline SVG; every text from the model is escaped."""

from collections.abc import Mapping, Sequence
from typing import Any

from nstf_convert.report import plots
from nstf_convert.report.choices import choices
from nstf_convert.report.parts import Raw, Row, measured
from nstf_convert.report.parts import details as _details
from nstf_convert.report.parts import number as _number
from nstf_convert.report.parts import table as _table
from nstf_convert.report.resources import pairs
from nstf_convert.report.speed import pairs as speed_pairs
from nstf_convert.report.style import STYLE
from nstf_convert.report.svg import escape

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(report: Mapping[str, Any]) -> str:
    """The page for a report of `nstf_convert.report.build`. Parts that were not measured are left out."""
    model = report["model"]
    body = [
        f"<h1>{escape(_title(model['name']))}</h1>",
        f'<p class="soft">{escape(_subtitle(report))}</p>',
        *(f'<p class="soft">{escape(note)}</p>' for note in model.get("notes", ())),
        _tiles(report),
        _bytes(report),
        _accuracy(report),
        _section(
            "Bytes against expected loss",
            plots.bytes_against_loss(report["tensors"]),
            "One mark a tensor, its area by the number of weights. Expected loss: half "
            "of tr(dW H dW^T), weighted by the sensitivity of the tensor's outputs.",
        ),
        _section(
            "Bits per weight by layer",
            plots.bits_by_layer(report["tensors"]),
            "On disk: codes, scales, zero points and factors.",
        ),
        _section(
            "What was rejected",
            _wrapped(plots.alternatives(report["tensors"])),
            "Grey: encodings that were priced, with their convex hull; orange: the one taken. A taken point "
            "above the hull was chosen by measurement or to make the bytes fit.",
        ),
        _families(report.get("families") or []),
        _not_tried(report["tensors"]),
        _attention(report.get("attention")),
        _section("Roofline", plots.roofline(report.get("roofline")), _roofline_text(report.get("roofline"))),
        _speed(report.get("speed")),
        _calibration(report.get("calibration")),
        _stages(report.get("stages") or [], report.get("resources")),
        _tensors(report["tensors"]),
        _footer(report),
    ]
    title = f"nstf: {_title(model['name'])}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing may be fetched and nothing may run, whatever a name in the model says.
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _title(name: str) -> str:
    """The last two parts of a path or hub name."""
    return "/".join(name.replace("\\", "/").rstrip("/").split("/")[-2:])


def _subtitle(report: Mapping[str, Any]) -> str:
    model = report["model"]
    return (
        f"{model['architecture']}, {model['parameters']:,} parameters in {model['tensors']} tensors, "
        f"{model['tensor_bytes']:,} bytes as {model['format']}"
    )


def _tiles(report: Mapping[str, Any]) -> str:
    file, final = report["file"], report["accuracy"].get("final") or {}
    budget = report["budget"].get("bytes")
    tiles = [
        (_size(file["size_bytes"]), f"{file['size_bytes']:,} bytes, {_percent(file['ratio'])} of the model")
    ]
    if budget:
        within = "" if file["size_bytes"] <= budget else ' class="bad"'
        tiles.append(
            (
                f"<span{within}>{100 * file['size_bytes'] / budget:.2f} %</span>"
                if within
                else f"{100 * file['size_bytes'] / budget:.2f} %",
                f"of the budget of {budget:,} bytes",
            )
        )
    tiles.append(
        (
            _number(file["bits_per_weight"], ".3f"),
            f"bits per weight, all counted; {_number(file['nominal_bits_per_weight'], '.3f')} nominal",
        )
    )
    if "mean_cosine" in final:
        tiles.append((_number(final["mean_cosine"], ".6f"), "mean cosine similarity"))
        tiles.append((_number(final["min_cosine"], ".6f"), "smallest cosine similarity"))
    elif final:
        value, error = measured(final["mean_kl"], final.get("mean_kl_se"), ".5f")
        tiles.append((value, f"mean KLD in nats{f' ± {error}' if error else ''}"))
        tiles.append((_percent(final["top1"]), f"same top token{_error(final, 'top1')}"))
        tiles.append(
            (_number(final["ppl"], ".3f"), f"perplexity, reference {_number(final['ppl_reference'], '.3f')}")
        )
    items = "".join(
        f'<div class="tile"><b>{big}</b><span>{escape(small)}</span></div>' for big, small in tiles
    )
    return f'<div class="tiles">{items}</div>'


def _bytes(report: Mapping[str, Any]) -> str:
    file = report["file"]
    rows = [
        (
            s["name"],
            f"{s['size_bytes']:,}",
            _percent(s["size_bytes"] / max(1, file["size_bytes"])),
            f"{s['source_bytes']:,}" if s["source_bytes"] else "-",
            _percent(s["size_bytes"] / s["source_bytes"]) if s["source_bytes"] else "-",
        )
        for s in file["sections"]
    ]
    columns = ("part", "bytes", "share of the file", "bytes in the model", "of those")
    return _section(
        "Where the bytes went", plots.sections(file["sections"], file["size_bytes"]) + _table(columns, rows)
    )


def _accuracy(report: Mapping[str, Any]) -> str:
    accuracy = report["accuracy"]
    final, uniform = accuracy.get("final"), accuracy.get("uniform")
    if not final:
        return _section("Accuracy", "<p>Not measured: nstf could not run this model.</p>")
    kept = "uniform" if accuracy.get("chosen") == "uniform" else "mix"
    files = [(f"this file ({kept})", report["file"]["size_bytes"], final)]
    if uniform:
        encoding = uniform["encoding"].removeprefix("uniform ")
        files.append((f"best uniform: {encoding}", uniform["size_bytes"], uniform["accuracy"]))
    if "mean_cosine" in final:
        lines: tuple[tuple[str, str, str], ...] = (
            ("mean cosine", "mean_cosine", ".6f"),
            ("smallest cosine", "min_cosine", ".6f"),
            ("relative L2 error", "relative_l2", ".5f"),
        )
    else:
        lines = (
            ("mean KLD", "mean_kl", ".5f"),
            ("median", "median_kl", ".5f"),
            ("99th percentile", "p99_kl", ".5f"),
            ("same top token", "top1", ".5f"),
            ("perplexity", "ppl", ".4f"),
            ("ratio", "ppl_ratio", ".5f"),
        )
    # A line a figure and a column a file: two or three columns fit a telephone.
    columns: Row = ("", *(name for name, _, _ in files))
    rows: list[Row] = [("bytes", *(f"{size:,}" for _, size, _ in files))]
    rows += [(name, *(_figure(a, key, form) for _, _, a in files)) for name, key, form in lines]
    content = (
        _table(columns, rows) + f'<p class="soft">{escape(_protocol(accuracy.get("protocol") or {}))}</p>'
    )
    content += _domains(accuracy) + choices(accuracy)
    return _section(
        "Accuracy",
        content,
        "Divergence in nats against the original model in float32, lower is better; "
        "± is the standard error of the mean over windows.",
    )


def _domains(accuracy: Mapping[str, Any]) -> str:
    """The score by dataset, when there are several."""
    final = accuracy.get("domains") or {}
    other = (accuracy.get("uniform") or {}).get("domains") or {}
    if len(final) < 2:
        return ""
    rows = [(name, _number(v, ".5f"), _number(other.get(name), ".5f")) for name, v in final.items()]
    return _table(("dataset", "this file", "best uniform"), rows)


def _families(families: Sequence[Mapping[str, Any]]) -> str:
    """How each family of encodings did against the same bytes spent on rate."""
    rows = [
        (
            f["family"],
            f["tensors"],
            f["candidates"],
            f["exact"],
            f["won"],
            f["chosen"],
            _number(f["median_ratio"], ".3g"),
            _number(f["best_ratio"], ".3g"),
            f.get("ruled_out", 0),
            _number(f.get("bound_ratio"), ".3g"),
        )
        for f in families
    ]
    columns = (
        "family",
        "tensors",
        "tried",
        "of these encoded",
        "won on",
        "chosen for",
        "median ratio",
        "best",
        "not tried on",
        "bound or estimate",
    )
    return _section(
        "Families against the same bytes spent on rate",
        _table(columns, rows) if rows else "",
        "Ratio: expected loss over that of the convex hull of the (other) plain formats at equal bytes, the best of "
        "each tensor; below 1 the family wins. Not tried on: tensors where a bound from below of the ratio is above 1; "
        "the least of them.",
    )


def _not_tried(tensors: Sequence[Mapping[str, Any]]) -> str:
    """Why methods have no form of tensors: by method and reason the number of tensors and the least bound."""
    found: dict[tuple[str, str], list[float | None]] = {}
    for tensor in tensors:
        for entry in tensor.get("not_tried") or ():
            found.setdefault((entry["method"], entry["reason"]), []).append(entry["bound_ratio"])
    rows = []
    for (method, reason), ratios in sorted(found.items()):
        known = [r for r in ratios if r is not None]
        rows.append((method, reason, len(ratios), _number(min(known, default=None), ".3g")))
    return _section(
        "What was not tried",
        _table(("method", "reason", "tensors", "least bound"), rows) if rows else "",
        "Bound: how many times as much as what has to be beaten any form of the method loses at its bytes.",
    )


def _protocol(protocol: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in protocol.items())


def _attention(plan: Mapping[str, Any] | None) -> str:
    if not plan:
        return ""
    kld = plan["kld"]
    figures = [
        f"{kld[name]:.5g} nats {words}"
        for name, words in (("allowed", "allowed"), ("choose", "where it was chosen"), ("report", "reported"))
        if kld[name] is not None
    ]
    choice = plan.get("choice") or {}
    share = f"{choice['share']:.3f} of a dense 16-bit cache at {plan['context']} tokens. " if choice else ""
    dots = "A dot: the group forgets positions. Point at a head for its figures."
    text = f"{share}KLD against dense attention: {', '.join(figures) or 'not measured'}. {dots}"
    rows = [[n["length"], _or_dash(n["kld"]), *_retrieved(n)] for n in plan.get("lengths", ())]
    columns = ("tokens", "KLD", "passkeys, dense", "planned", "asked", "needles, dense", "planned", "asked")
    return _section(
        "Attention and KV cache", plots.attention(plan) + (_table(columns, rows) if rows else ""), text
    )


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"


def _retrieved(measured: Mapping[str, Any]) -> list[str]:
    return [str(n) for name in ("passkey", "needles") for n in measured[name] or ("-", "-", "-")]


def _roofline_text(data: Mapping[str, Any] | None) -> str:
    if not data:
        return ""
    phases = "; ".join(
        f"{p['name']} {p['time_s'] * 1e3:.2f} ms, MFU {100 * p['mfu']:.1f} %" for p in data["phases"]
    )
    return f"{data['device']['name']}, peaks {data['device']['source']}. {phases}."


def _calibration(facts: Mapping[str, Any] | None) -> str:
    if not facts:
        return ""
    own = (
        " (sampled from the model itself; real text of the use is better)"
        if facts.get("self_generated")
        else ""
    )
    rows = [
        ("text", f"{facts['source']}{own}"),
        ("windows", facts["windows"]),
        ("tokens", f"{facts['tokens']:,}"),
        ("held-out tokens", f"{facts['held_out_tokens']:,}"),
        ("seed", facts["seed"]),
    ]
    content = _facts(rows)
    strips = plots.experts(facts.get("experts") or [])
    if strips:
        content += (
            f"<p>Tokens each expert saw; orange experts saw none and are rounded without data.</p>{strips}"
        )
    return _section("Calibration", content)


def _speed(facts: Mapping[str, Any] | None) -> str:
    rows = speed_pairs(facts)
    return _section("Speed", _facts(rows) if rows else "")


def _stages(stages: Sequence[Mapping[str, Any]], resources: Mapping[str, Any] | None) -> str:
    rows: list[Row] = [
        (s["name"], f"{s['seconds']:.1f}", f"{s['peak_memory_bytes'] / 2**30:.2f}") for s in stages
    ]
    if not rows:
        return ""
    peak = max(s["peak_memory_bytes"] for s in stages) / 2**30
    rows.append(("all", f"{sum(s['seconds'] for s in stages):.1f}", f"{peak:.2f}"))
    facts = _facts(pairs(resources or {}))
    return _section("Time and memory", _table(("stage", "seconds", "peak resident GiB"), rows) + facts)


def _tensors(tensors: Sequence[Mapping[str, Any]]) -> str:
    columns = ("tensor", "role", "shape", "encoding", "nominal bits", "bits on disk", "bytes", "loss", "note")
    rows = [
        (
            t["name"],
            t["role"],
            "×".join(str(n) for n in t["shape"]),
            t["encoding"],
            f"{t['nominal_bits']:.2f}",
            f"{t['disk_bits']:.3f}",
            f"{t['size_bytes']:,}",
            _number(t["expected_loss"], ".3g"),
            t["note"],
        )
        for t in tensors
    ]
    table = _table(columns, rows, left=("role", "shape", "encoding", "note"))
    return _section("Tensors", _details(f"All {len(rows)} tensors", table))


def _footer(report: Mapping[str, Any]) -> str:
    tool, model = report["tool"], report["model"]
    command = f"<p><code>{escape(tool['command'])}</code></p>" if tool.get("command") else ""
    origin = escape(f"{tool['name']} {tool['version']}, source {model['fingerprint']}")
    return f'{command}<p class="soft">{origin}</p>'


def _section(title: str, content: str, text: str = "") -> str:
    if not content:
        return ""
    words = f'<p class="soft">{escape(text)}</p>' if text else ""
    return f"<section><h2>{escape(title)}</h2>{words}{content}</section>"


def _wrapped(content: str) -> str:
    return f'<div class="thirds">{content}</div>' if content else ""


def _facts(rows: Sequence[tuple[str, object]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f'<dl class="facts">{items}</dl>'


def _figure(accuracy: Mapping[str, Any], key: str, form: str) -> Raw:
    """A figure with its standard error below it."""
    value, error = measured(accuracy.get(key), accuracy.get(f"{key}_se"), form)
    return Raw(value + (f"<br><small>± {error}</small>" if error else ""))


def _percent(value: object) -> str:
    return f"{100 * value:.2f} %" if isinstance(value, int | float) else "-"


def _error(accuracy: Mapping[str, Any], key: str, form: str = ".2g") -> str:
    error = accuracy.get(f"{key}_se")
    return f" ± {format(error, form)}" if isinstance(error, int | float) else ""


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.2f} MiB"
