"""Where dividing a model stops paying: `nstf place`'s model of cost run for 8, 64 and 512 devices. Nothing here is measured.

    python benchmarks/scale_study.py [--out docs] [--quick]

Writes placement-tables.md and placement-*.svg:

    reduces     an all-reduce over 8, 64 and 512 devices by ring, tree, all at once and hierarchy
    tensor      a token's time by ranks of tensor parallelism for 16, 8, 4 and 3 bits, and what the links take of it
    plans       the best division for each number of devices, batch and width: dense shapes of 70B and 405B, mixtures of
                30B and 671B
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from nstf_convert.place.costs import Model, of_config
from nstf_convert.place.fabric import Fabric
from nstf_convert.place.machine import Machine, from_json, read_machine
from nstf_convert.place.plans import Layout, Plan, Stage
from nstf_convert.place.predict import Load, Prediction, Predictor
from nstf_convert.place.search import search
from nstf_convert.report.svg import axes, circle, fit, label, path

SHAPES = Path(__file__).parents[1] / "examples" / "shapes"
ENCODINGS = {"bf16": "16 bits", "int8": "8 bits", "int4": "4 bits", "trellis3": "3 bits"}
COLOURS = ("#0b5cd6", "#c2570c", "#6d5bb8", "#12855f", "#c02d7a", "#6b6b6b")
PANEL, HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 460.0, 360.0, 64.0, 56.0, 76.0, 18.0
# A doubling of ranks that gives less than this no longer pays.
PAYS = 1.3
CONTEXT = 4096
# That one copy of a model is divided over.
MOST_DEVICES = 64
Series = dict[str, list[tuple[float, float]]]


@cache
def cluster(name: str, hosts: int) -> Machine:
    """So many hosts of an example of 8 devices, joined by a 400 Gb/s adapter for each device."""
    if hosts == 1:
        return read_machine(name)
    one, wide = read_machine(name).to_json(), read_machine("h100x16").to_json()
    outer = next(link for link in wide["links"] if link["kind"] == "InfiniBand")
    devices, links = [], []
    for host in range(hosts):
        inner = {d["name"] for d in one["devices"]}

        def of(word: str, host: int = host) -> str:
            return f"h{host}.{word}"

        devices += [d | {"name": of(d["name"]), "host": host} for d in one["devices"]]
        links += [link | {"from": of(link["from"]), "to": of(link["to"])} for link in one["links"]]
        links += [outer | {"from": of(d), "to": "infiniband"} for d in sorted(inner)]
    algorithms = sorted({*one["collectives"]["algorithms"], "hierarchical"})
    return from_json(
        one
        | {"name": f"{hosts} hosts of {one['name']}", "devices": devices, "links": links}
        | {"collectives": one["collectives"] | {"algorithms": algorithms}}
    )


@cache
def fabric_of(name: str, hosts: int) -> Fabric:
    return Fabric(cluster(name, hosts))


@cache
def shape(name: str, encoding: str) -> Model:
    return of_config(name, json.loads((SHAPES / f"{name}.json").read_text()), encoding)


def tensor(predictor: Predictor, ranks: int) -> Prediction | None:
    """Tensor parallelism alone on the first devices, whether it fits or not; None where tensors cannot be cut so."""
    model = predictor.model
    if ranks > 1 and model.problem(ranks) is not None:
        return None
    stage = Stage((tuple(range(ranks)),), 0, model.facts.layers)
    return predictor.predict(Plan(Layout(1, ranks), (stage,)))


def reduces(sizes: Sequence[int]) -> tuple[str, str]:
    """(table, figure) of all-reduces."""
    lines = ["| bytes | devices | " + " | ".join(("ring", "tree", "direct", "hierarchical")) + " | least |"]
    lines.append("|---|---|---|---|---|---|---|")
    panels: dict[str, Series] = {}
    for hosts in (1, 8, 64):
        fabric = fabric_of("h100x8", hosts)
        everyone = tuple(range(8 * hosts))
        series: Series = {}
        for size in sizes:
            cells = {}
            for algorithm in ("ring", "tree", "direct", "hierarchical"):
                if (hosts > 1 and algorithm == "direct") or (hosts == 1 and algorithm == "hierarchical"):
                    continue
                cells[algorithm] = 1e6 * fabric.all_reduce(everyone, size, algorithm)
                series.setdefault(algorithm, []).append((size, cells[algorithm]))
            row = " | ".join(
                f"{cells[a]:.0f} us" if a in cells else "-"
                for a in ("ring", "tree", "direct", "hierarchical")
            )
            lines.append(f"| {size:,} | {8 * hosts} | {row} | {min(cells, key=lambda a: cells[a])} |")
        panels[f"{8 * hosts} devices"] = series
    names = ("ring", "tree", "direct", "hierarchical")
    return "\n".join(lines) + "\n", figure(
        "An all-reduce by algorithm (model, not measured)", panels, names, "bytes", "us"
    )


def tensor_study(name: str, machine: str, batch: int) -> tuple[str, Series, Series]:
    """(rows of the table, times by ranks, links' shares by ranks)."""
    times: Series = {}
    shares: Series = {}
    lines = []
    fabric = fabric_of(machine, 4)
    for encoding, words in ENCODINGS.items():
        predictor = Predictor(shape(name, encoding), fabric, Load(batch=batch, context=CONTEXT))
        found = {n: p for n in (1, 2, 4, 8, 16, 32) if (p := tensor(predictor, n)) is not None}
        times[words] = [(n, 1e3 * p.step_s) for n, p in found.items()]
        shares[words] = [(n, 100 * p.links_share) for n, p in found.items() if n > 1]
        pays = 1
        for n in found:
            if n > 1 and found[n // 2].step_s / found[n].step_s >= PAYS and pays == n // 2:
                pays = n
        cells = " | ".join(
            f"{1e3 * found[n].step_s:.2f} ms, {100 * found[n].links_share:.0f} %" if n in found else "-"
            for n in (1, 2, 4, 8, 16, 32)
        )
        lines.append(f"| {name} | {machine} | {batch} | {words} | {cells} | {pays} |")
    return "\n".join(lines), times, shares


def tensor_tables(batches: Sequence[int]) -> tuple[str, dict[str, str]]:
    head = (
        "| shape | devices | batch | width | 1 rank | 2 | 4 | 8 | 16 | 32 | pays up to |\n"
        + "|---" * 11
        + "|\n"
    )
    rows, figures = [], {}
    for name in ("dense-70b", "dense-405b"):
        panels: dict[str, Series] = {}
        for machine in ("h100x8", "mi300x8"):
            for batch in batches:
                text, times, shares = tensor_study(name, machine, batch)
                rows.append(text)
                if batch == batches[0]:
                    panels[f"{machine}: ms a token, batch {batch}"] = times
                    panels[f"{machine}: links, % of it"] = shares
        figures[name] = figure(
            f"{name}: tensor parallelism by ranks (model, not measured)",
            panels,
            tuple(ENCODINGS.values()),
            "ranks",
            "",
        )
    return head + "\n".join(rows) + "\n", figures


def copies_of(model: Model, name: str, hosts: int, load: Load) -> tuple[int, Prediction] | None:
    """The most tokens a second on so many hosts: independent copies of the model, each with its share of the batch, on equal
    parts of the devices. (copies, the plan of one)."""
    best: tuple[float, int, Prediction] | None = None
    total = 8 * hosts
    copies = max(1, total // MOST_DEVICES)
    while copies <= min(total, load.batch):
        count = total // copies
        own = replace(load, batch=load.batch // copies)
        found = search(
            Predictor(model, fabric_of(name, max(1, count // 8)), own), most_devices=count
        ).predictions
        if found and (best is None or found[0].tokens_per_s * copies > best[0] * 1.001):
            best = found[0].tokens_per_s * copies, copies, found[0]
        copies *= 2
    return None if best is None else (best[1], best[2])


def experts(batch: int) -> str:
    """The table of experts dealt out over more and more devices, a replica on each, one stage; memory is not looked at."""
    counts = (8, 16, 32, 64, 128, 256)
    lines = ["| shape | width | batch | " + " | ".join(f"{n} devices" for n in counts) + " |"]
    lines.append("|---" * (3 + len(counts)) + "|")
    for name in ("moe-30b-a3b", "moe-671b"):
        for encoding, words in ENCODINGS.items():
            model = shape(name, encoding)
            predictor = Predictor(model, fabric_of("h100x8", 32), Load(batch=batch, context=CONTEXT))
            cells = []
            for n in counts:
                if model.facts.experts % n:
                    cells.append("-")
                    continue
                stage = Stage(tuple((i,) for i in range(n)), 0, model.facts.layers)
                found = predictor.predict(Plan(Layout(1, 1, n, "whole"), (stage,)))
                cells.append(f"{found.tokens_per_s / n:,.0f}, {100 * found.links_share:.0f} %")
            lines.append(f"| {name} | {words} | {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plans(names: Sequence[str], loads: Sequence[tuple[int, int]]) -> str:
    """The table of the best divisions on H100s. loads: (hosts, batch)."""
    lines = [
        "| shape | width | devices | batch | copies | each | tokens/s | ms a token | links | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        for encoding, words in ENCODINGS.items():
            model = shape(name, encoding)
            for count, batch in loads:
                found = copies_of(model, "h100x8", count, Load(batch=batch, context=CONTEXT, prompt=512))
                start = f"| {name} | {words} | {8 * count} | {batch} | "
                if found is None:
                    lines.append(start + "none fits | | | | | |")
                    continue
                copies, one = found
                lines.append(
                    start
                    + f"{copies} | {one.plan.layout.name} | {copies * one.tokens_per_s:,.0f} | {1e3 * one.step_s:.2f} | "
                    f"{100 * one.links_share:.0f} % | {max(one.memory) / 1e9:.1f} GB |"
                )
                print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def figure(title: str, panels: dict[str, Series], names: Sequence[str], x_label: str, y_label: str) -> str:
    """An SVG file of panels side by side, both axes logarithmic but for shares."""
    width = PANEL * len(panels)
    parts = [f'<rect width="{width:.0f}" height="{HEIGHT:.0f}" fill="#ffffff"/>', style(names)]
    parts.append(label(LEFT, 22, title, style="title"))
    at = LEFT
    for i, name in enumerate(names):
        parts.append(circle(at + 5, 40, 4, f"f{i}"))
        parts.append(label(at + 14, 44, name, style="name"))
        at += 34 + 6.6 * len(name)
    for number, (words, series) in enumerate(panels.items()):
        parts.append(
            f'<g transform="translate({number * PANEL:.0f} 0)">{panel(words, series, names, x_label, y_label)}</g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{title}" viewBox="0 0 {width:.0f} {HEIGHT:.0f}">'
        f"{''.join(parts)}</svg>\n"
    )


def panel(words: str, series: Series, names: Sequence[str], x_label: str, y_label: str) -> str:
    points = [p for line in series.values() for p in line]
    x = fit([p[0] for p in points], LEFT, PANEL - RIGHT, log=True)
    y = fit([p[1] for p in points], HEIGHT - BOTTOM, TOP, log="%" not in words, zero="%" in words)
    parts = [axes(x, y, f"{x_label}; {words}", y_label)]
    for i, name in enumerate(names):
        line = [(x(a), y(b)) for a, b in series.get(name, [])]
        parts.append(path(line, f"l{i}"))
        parts += [circle(a, b, 3, f"f{i}") for a, b in line]
    return "".join(parts)


def style(names: Sequence[str]) -> str:
    rules = ".grid{stroke:#e4e4e4;stroke-width:1}text{font:12px sans-serif;fill:#333}.title{font-size:15px;font-weight:600}"
    for i, _ in enumerate(names):
        rules += f".f{i}{{fill:{COLOURS[i]}}}.l{i}{{fill:none;stroke:{COLOURS[i]};stroke-width:2}}"
    return f"<style>{rules}</style>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--quick", action="store_true", help="one host and one batch only")
    options = parser.parse_args()
    sizes = [1 << n for n in range(12, 29, 4)]
    reduce_table, reduce_figure = reduces(sizes)
    tensor_table, figures = tensor_tables((1,) if options.quick else (1, 32))
    loads = ((1, 32),) if options.quick else ((1, 1), (1, 64), (8, 64), (8, 2048), (64, 2048))
    expert_table = experts(2048)
    names = ("dense-70b", "dense-405b", "moe-30b-a3b", "moe-671b")
    plan_table = plans(names, loads)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "placement-reduces.svg").write_text(reduce_figure)
    for name, text in figures.items():
        (options.out / f"placement-{name}.svg").write_text(text)
    tables = (reduce_table, tensor_table, expert_table, plan_table)
    (options.out / "placement-tables.md").write_text(page(tables))


def page(tables: Sequence[str]) -> str:
    """The page of all tables."""
    heads = (
        "All-reduces", "Hosts of 8 H100 (`h100x8`), one 400 Gb/s adapter for each device.",
        "Tensor parallelism", ("Time of a token for every sequence, and the share spent on links; hosts of 8, joined "
        f"as above; context {CONTEXT}; memory is not looked at. Doubling ranks pays while it gives {PAYS} times."),
        "Experts", ("Tokens a second of each device, and the share of links, where experts are dealt out over the devices "
        f"and every device has its sequences; context {CONTEXT}; memory is not looked at."),
        "The best divisions", (f"Hosts of 8 H100, context {CONTEXT}. Independent copies of the model (each on "
        f"{MOST_DEVICES} devices at most) share the batch; each is divided as stated, within its memory. Of all numbers of "
        "copies, that with most tokens a second."),
    )  # fmt: skip
    parts = [
        "# Placement at scale: a model's output\n",
        "Written by `benchmarks/scale_study.py`. Predicted, not measured: [placement.md](placement.md) says from what.\n",
    ]
    for head, text, table in zip(heads[::2], heads[1::2], tables, strict=True):
        parts += [f"## {head}\n", f"{text}\n", table]
    return "\n".join(parts)


if __name__ == "__main__":
    main()
