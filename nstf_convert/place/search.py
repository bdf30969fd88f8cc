"""The best plans of a model on a machine: every layout, arrangement of devices and number of microbatches, pruned by bounds.

Left out early: numbers of ranks that the file cannot be cut into, arrangements that differ from others by names alone,
numbers of microbatches whose least possible time is beyond what is known, and devices whose memory does not hold the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nstf_convert.place.plans import Group, Layout, Plan, Stage, arrangements, layouts, microbatches
from nstf_convert.place.predict import Prediction, Predictor
from nstf_convert.place.split import split

Aim = Literal["time", "cost", "prompt"]


@dataclass(frozen=True)
class Found:
    """The best plan of each layout, the best first. refused: why layouts are not among them, in words by name; tried:
    plans that were predicted."""

    predictions: tuple[Prediction, ...]
    refused: dict[str, str]
    tried: int


def search(predictor: Predictor, aim: Aim = "time", most_devices: int | None = None) -> Found:
    """The best plans. most_devices: how many of the machine's a plan may use."""
    machine = predictor.fabric.machine
    count = min(most_devices or len(machine.devices), len(machine.devices))
    known, problems = layouts(predictor.model, count, predictor.load.batch)
    refused = {f"tensor {ranks}": why for ranks, why in problems.items()}
    best: dict[Layout, Prediction] = {}
    tried = 0
    for layout in known:
        fits = False
        for stages in arrangements(predictor.fabric, layout):
            for parts in microbatches(layout, predictor.load.batch):
                # However layers are divided, the slowest stage has a share of the whole at least.
                if layout in best and aim != "prompt":
                    price = sum(machine.devices[i].cost_per_hour for g in stages for one in g for i in one)
                    least = least_step(predictor, layout, stages, parts)
                    scale = price / 3600 / predictor.load.batch if aim == "cost" else 1.0
                    if scale * least > rank(best[layout], aim)[0] + 1e-12:
                        continue
                plan = divided(predictor, layout, stages, parts)
                if plan is None:
                    continue
                fits, tried = True, tried + 1
                found = predictor.predict(plan)
                if layout not in best or rank(found, aim) < rank(best[layout], aim):
                    best[layout] = found
        if not fits:
            refused[layout.name] = "it does not fit the memory"
    ordered = sorted(best.values(), key=lambda p: rank(p, aim))
    return Found(tuple(ordered), refused, tried)


def rank(found: Prediction, aim: Aim) -> tuple[float, ...]:
    """Less is better; of equal plans the one with fewer devices and microbatches."""
    first = {"time": found.step_s, "cost": found.cost_per_token, "prompt": found.prompt_s}[aim]
    return (round(first, 12), len(found.plan.devices), found.plan.microbatches, found.step_s)


def least_step(predictor: Predictor, layout: Layout, stages: Sequence[Sequence[Group]], parts: int) -> float:
    """Seconds that no division of the layers over these devices beats: all layers where each is fastest, evenly."""
    sequences = predictor.sequences(layout, parts)
    times = [predictor.each_layer(groups, layout, sequences) for groups in stages]
    total = float(sum(min(layer) for layer in zip(*times, strict=True)))
    return max(total, parts * total / layout.stages)


def divided(
    predictor: Predictor, layout: Layout, stages: Sequence[Sequence[Group]], parts: int
) -> Plan | None:
    """The plan with the best division of layers on these devices, or None where none fits the memory."""
    layers = predictor.model.facts.layers
    sequences = predictor.sequences(layout, parts)
    times, sizes, rooms = [], [], []
    size_of_layer = [predictor.layer_bytes(i, layout) for i in range(layers)]
    for number, groups in enumerate(stages):
        devices = [d for group in groups for d in predictor.devices(group)]
        room = min(d.memory_bytes - d.reserved_bytes for d in devices)
        rooms.append(room - predictor.fixed_bytes(number, layout))
        sizes.append(size_of_layer)
    if sum(max(0.0, r) for r in rooms) < sum(size_of_layer) or min(rooms) < 0:
        return None
    for groups in stages:
        times.append(predictor.each_layer(groups, layout, sequences))
    fixed = [0.0] * len(stages)
    fixed[0] += predictor.ends(stages[0], layout, sequences, sequences)[0].seconds
    fixed[-1] += predictor.ends(stages[-1], layout, sequences, sequences)[1].seconds
    for number, seconds in enumerate(predictor.handing_on(stages, sequences)):
        fixed[number] += seconds
    stops = split(times, fixed, sizes, rooms, parts)
    if stops is None:
        return None
    firsts = (0, *stops[:-1])
    made = tuple(
        Stage(tuple(groups), first, stop) for groups, first, stop in zip(stages, firsts, stops, strict=True)
    )
    return Plan(layout, made, parts)
