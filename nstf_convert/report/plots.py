"""The figures of the report, each from a part of the report to SVG; nothing gives an empty string."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nstf_convert.report import svg

WIDTH = 940
FAMILIES = {
    "int": ("c1", "integer grid"),
    "grid": ("c2", "non-uniform grid"),
    "fp8": ("c3", "FP8"),
    "mxfp4": ("c4", "MXFP4"),
    "trellis": ("c9", "trellis"),
    "shuffle": ("c10", "shuffle"),
    "low_rank": ("c5", "low rank"),
    "factored": ("c6", "CP, Tucker, tensor train"),
    "add": ("c7", "sum of two"),
    "dense": ("c8", "dense"),
}
PATTERNS = {
    "full": ("c8", "full"),
    "streaming": ("c1", "sink and window"),
    "block_sparse": ("c5", "predicted blocks"),
}
ROLES = (
    "embedding",
    "q",
    "k",
    "v",
    "qkv",
    "o",
    "gate",
    "up",
    "gate_up",
    "down",
    "router",
    "expert_stack",
    "conv",
)

Rows = Sequence[Mapping[str, Any]]


def family(tree: Mapping[str, Any]) -> str:
    """The key of FAMILIES a tree belongs to."""
    kind = str(tree.get("kind"))
    if kind in ("permute", "rotated"):  # belong to what they hold
        return family((tree.get("children") or {}).get("x") or {})
    if kind in ("cp", "tucker", "tensor_train"):
        return "factored"
    return kind if kind in FAMILIES else "dense"


def sections(rows: Rows, size_bytes: int) -> str:
    """One stacked bar: where the bytes of the file are."""
    x = svg.Scale(0, max(1, size_bytes), 0, WIDTH)
    at, parts, names = 0.0, [], []
    for index, row in enumerate(r for r in rows if r["size_bytes"] > 0):
        style = f"c{index % 8 + 1}"
        share = row["size_bytes"] / max(1, size_bytes)
        width = x(row["size_bytes"])
        tip = f"{row['name']}: {row['size_bytes']} bytes, {100 * share:.2f} %"
        parts.append(svg.rect(at, 0, width, 34, style, tip))
        if share > 0.08:
            parts.append(svg.label(at + width / 2, 22, f"{100 * share:.1f} %", "middle", "on"))
        names.append((style, row["name"]))
        at += width
    return svg.svg(WIDTH, 34, "where the bytes went", parts) + svg.legend(names)


def bytes_against_loss(tensors: Rows) -> str:
    """Every tensor: bytes it takes, expected loss it costs, colour by method, area by elements."""
    rows = [t for t in tensors if (t.get("expected_loss") or 0) > 0]
    if not rows:
        return ""
    x = svg.fit((t["size_bytes"] for t in rows), 78, WIDTH - 12, log=True)
    y = svg.fit((t["expected_loss"] for t in rows), 330, 12, log=True)
    parts = [svg.axes(x, y, "bytes in the file", "expected loss")]
    largest = max(math.prod(t["shape"]) for t in rows)
    used = []
    for t in sorted(rows, key=lambda t: -math.prod(t["shape"])):
        key = family(t["tree"])
        used.append(key)
        radius = 3 + 7 * math.sqrt(math.prod(t["shape"]) / largest)
        tip = f"{t['name']}: {t['encoding']}, {t['size_bytes']} bytes, loss {t['expected_loss']:.3g}"
        parts.append(
            svg.circle(x(t["size_bytes"]), y(t["expected_loss"]), radius, f"mark {FAMILIES[key][0]}", tip)
        )
    figure = svg.svg(WIDTH, 375, "bytes against expected loss, one mark a tensor", parts)
    return figure + svg.legend([FAMILIES[k] for k in FAMILIES if k in used])


def bits_by_layer(tensors: Rows) -> str:
    """A map of bits per weight on disk: one row a role, one column a layer."""
    cells: dict[tuple[str, int], tuple[float, float, list[str]]] = {}
    for t in tensors:
        if t.get("layer") is None or len(t["shape"]) < 2:
            continue
        key = (t["role"], t["layer"])
        numel = math.prod(t["shape"])
        bits, total, names = cells.get(key, (0.0, 0.0, []))
        cells[key] = (bits + 8 * t["size_bytes"], total + numel, [*names, f"{t['name']}: {t['encoding']}"])
    if not cells:
        return ""
    roles = sorted({r for r, _ in cells}, key=lambda r: (ROLES.index(r) if r in ROLES else 99, r))
    layers = sorted({n for _, n in cells})
    left, top, row_height = 96, 8, 26
    width = min(42.0, (WIDTH - left - 4) / len(layers))
    values = [bits / total for bits, total, _ in cells.values()]
    low, high = min(values), max(values)
    parts = []
    for i, role in enumerate(roles):
        parts.append(svg.label(left - 8, top + i * row_height + 17, role, "end"))
    for j, layer in enumerate(layers):
        if j % max(1, math.ceil(22 / width)) == 0:
            parts.append(
                svg.label(left + (j + 0.5) * width, top + len(roles) * row_height + 16, layer, "middle")
            )
    for (role, layer), (bits, total, names) in cells.items():
        value = bits / total
        shade = 0.12 + 0.88 * ((value - low) / (high - low) if high > low else 0.5)
        x, y = left + layers.index(layer) * width, top + roles.index(role) * row_height
        tip = f"{value:.3f} bits per weight; " + "; ".join(names[:4])
        parts.append(svg.rect(x, y, width - 1.5, row_height - 1.5, "c1", tip, shade))
        if width >= 26:
            parts.append(
                svg.label(x + width / 2, y + 17, f"{value:.1f}", "middle", "on" if shade > 0.55 else "tick")
            )
    below = top + len(roles) * row_height + 34
    parts.append(svg.label(left, below, "layer", "start", "name"))
    parts.append(svg.label(left + 60, below, f"palest {low:.2f}, strongest {high:.2f} bits per weight"))
    return svg.svg(WIDTH, top + len(roles) * row_height + 42, "bits per weight by layer and role", parts)


def alternatives(tensors: Rows, count: int = 6) -> str:
    """Rate and distortion of the tensors that matter most: what was taken among what was priced."""
    rows = [t for t in tensors if t.get("rejected") and (t.get("expected_loss") or 0) > 0]
    by_role: dict[str, Mapping[str, Any]] = {}
    for t in sorted(rows, key=lambda t: -t["size_bytes"]):
        by_role.setdefault(t["role"], t)
    # One of every role first: tensors of the same role look alike.
    chosen = sorted(by_role.values(), key=lambda t: -t["size_bytes"])[:count]
    chosen += [t for t in sorted(rows, key=lambda t: -t["size_bytes"]) if t not in chosen][
        : count - len(chosen)
    ]
    return "".join(f'<figure class="third">{_one_curve(t)}</figure>' for t in chosen)


def _one_curve(tensor: Mapping[str, Any]) -> str:
    points = [(a["size_bytes"], a["expected_loss"], a["encoding"]) for a in tensor["rejected"]]
    points = [p for p in points if p[0] > 0 and p[1] is not None and p[1] > 0]
    taken = (tensor["size_bytes"], tensor["expected_loss"], tensor["encoding"])
    numel = math.prod(tensor["shape"])
    every = [*points, taken]
    x = svg.fit((8 * p[0] / numel for p in every), 70, 304)
    y = svg.fit((p[1] for p in every), 208, 10, log=True)
    parts = [svg.axes(x, y, "bits per weight", "expected loss")]
    parts.append(svg.path([(x(8 * s / numel), y(loss)) for s, loss in _hull([p[:2] for p in every])], "hull"))
    for size, loss, encoding in points:
        tip = f"{encoding}: {size} bytes, loss {loss:.3g}"
        parts.append(svg.circle(x(8 * size / numel), y(loss), 3.5, "mark c8", tip))
    tip = f"taken: {taken[2]}, {taken[0]} bytes, loss {taken[1]:.3g}"
    parts.append(svg.circle(x(8 * taken[0] / numel), y(taken[1]), 6, "mark c7 taken", tip))
    name, encoding = svg.escape(tensor["name"]), svg.escape(tensor["encoding"])
    caption = f"<figcaption><code>{name}</code><br>{encoding}</figcaption>"
    return svg.svg(310, 250, f"alternatives for {tensor['name']}", parts) + caption


def _hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull, from few bytes to many, falling."""
    hull: list[tuple[float, float]] = []
    for p in sorted(set(points)):
        if hull and p[1] >= hull[-1][1]:
            continue
        while len(hull) >= 2 and _turns_up(hull[-2], hull[-1], p):
            hull.pop()
        hull.append(p)
    return hull


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def attention(plan: Mapping[str, Any] | None) -> str:
    """A grid of heads: one column a layer, coloured by pattern; a dot marks heads whose group forgets positions."""
    layers = (plan or {}).get("layers") or []
    if not layers:
        return ""
    most = max(len(layer["heads"]) for layer in layers)
    size = max(6.0, min(28.0, (WIDTH - 64) / len(layers), 520 / most))
    parts, used = [], []
    for i, layer in enumerate(layers):
        heads, groups = layer["heads"], layer.get("groups") or []
        if i % max(1, math.ceil(20 / size)) == 0:
            parts.append(svg.label(60 + (i + 0.47) * size, most * size + 15, i, "middle"))
        for j, head in enumerate(heads):
            style, _ = PATTERNS.get(head["pattern"], ("c8", ""))
            used.append(head["pattern"])
            params = ", ".join(f"{k} {v:g}" for k, v in (head.get("params") or {}).items())
            tip = f"layer {i} head {j}: {head['pattern']} {params}, error {head.get('error', 0):.3g}"
            parts.append(svg.rect(60 + i * size, j * size, size - 1.5, size - 1.5, style, tip))
            if groups and groups[j * len(groups) // len(heads)].get("recent"):
                parts.append(svg.circle(60 + (i + 0.47) * size, (j + 0.47) * size, size * 0.14, "dot"))
    for j in range(0, most, max(1, math.ceil(13 / size))):
        parts.append(svg.label(52, (j + 0.5) * size + 3, j, "end"))
    parts.append(svg.label(0, most * size / 2 + 4, "head", "start", "name"))
    height = most * size + 40
    parts.append(svg.label(60, height - 6, "layer", "start", "name"))
    figure = svg.svg(WIDTH, height, "attention pattern of every head", parts)
    return figure + svg.legend([PATTERNS[k] for k in PATTERNS if k in used])


def roofline(data: Mapping[str, Any] | None) -> str:
    """Operators under the roofs of the device: intensity against what was reached, per phase."""
    if not data or not data.get("phases"):
        return ""
    device = data["device"]
    marks = []
    for index, phase in enumerate(data["phases"]):
        for o in phase["operators"]:
            if o["flops"] > 0 and o["bytes"] > 0 and o.get("time_s"):
                marks.append((index, phase["name"], o, o["flops"] / o["bytes"], o["flops"] / o["time_s"]))
    if not marks:
        return ""
    ridge = device["flops"] / device["bandwidth"]
    x = svg.fit([*(m[3] for m in marks), ridge, ridge * 4], 78, WIDTH - 12, log=True)
    y = svg.fit([*(m[4] for m in marks), device["flops"]], 330, 12, log=True)
    roof = [(x(i), y(min(device["flops"], i * device["bandwidth"]))) for i in (x.low, ridge, x.high)]
    parts = [svg.axes(x, y, "FLOPs per byte", "FLOP/s"), svg.path(roof, "roof")]
    parts.append(
        svg.label(x(x.high) - 4, y(device["flops"]) - 6, f"{device['flops'] / 1e9:.0f} GFLOP/s", "end")
    )
    parts.append(
        svg.label(x(ridge) - 8, y(device["flops"]) - 6, f"{device['bandwidth'] / 1e9:.0f} GB/s", "end")
    )
    for index, name, o, intensity, speed in marks:
        tip = f"{name}: {o['name']}, {o['time_s'] * 1e3:.3f} ms, {o['bound']} bound"
        parts.append(svg.circle(x(intensity), y(speed), 4, f"mark c{(1, 7, 2)[index % 3]}", tip))
    names = [(f"c{(1, 7, 2)[i % 3]}", p["name"]) for i, p in enumerate(data["phases"])]
    return svg.svg(WIDTH, 375, "roofline", parts) + svg.legend(names)


def experts(rows: Rows) -> str:
    """Tokens each expert saw, one strip a stack: pale experts were hardly calibrated."""
    rows = [r for r in rows if r.get("tokens")]
    if not rows:
        return ""
    most = max(max(r["tokens"]) for r in rows) or 1
    width = min(24.0, (WIDTH - 330) / max(len(r["tokens"]) for r in rows))
    parts = []
    for i, row in enumerate(rows):
        parts.append(svg.label(318, i * 20 + 14, row["name"][-46:], "end"))
        for j, tokens in enumerate(row["tokens"]):
            style = "c1" if tokens else "c7"
            tip = f"{row['name']}, expert {j}: {tokens} tokens"
            shade = 0.15 + 0.85 * tokens / most if tokens else 1.0
            parts.append(svg.rect(326 + j * width, i * 20, width - 1, 18, style, tip, shade))
    return svg.svg(WIDTH, len(rows) * 20, "calibration tokens per expert", parts)
