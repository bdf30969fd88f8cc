"""Seconds of a token and of a prompt under a plan, and the memory of every device.

A layer is its products (products.py), attention and the small kernels beside them, and its collectives (fabric.py):

    tensor parallel       an all-reduce of [rows, hidden] after attention and one after the feed-forward part
    experts, one replica  the same: every rank computes what its experts make of all rows, and the sum has all
    experts, replicas     an all-to-all that sends rows to their experts and one that brings results back
    pipeline              a stage hands [rows, hidden] on to the next

Which experts rows are sent to is taken as uniform: of E experts, B rows with k each touch E (1 - (1 - k / E)^B), and the
device with the most of them decides. Stages work side by side on microbatches; their idle time is part of the prediction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from nstf_convert.place.costs import Matrix, Model
from nstf_convert.place.fabric import Fabric
from nstf_convert.place.machine import Device
from nstf_convert.place.plans import Group, Layout, Plan
from nstf_convert.place.products import Products
from nstf_convert.place.split import step_seconds

# Small kernels of a layer beside its products (norms, rotation and append, attention, activation), and beside the layers. So
# many explain the decoding steps of an 8B model on an H200, docs/gpu_speed.md, in int4 and in bfloat16 within 3 %.
_LAUNCHES = 4
# What attention and norms add on a CPU, as in nstf_convert/speed/token.py.
_CPU_SHARE = 0.08
# Tokens of a prompt that are computed at a time.
CHUNK = 2048


@dataclass(frozen=True)
class Load:
    """What is asked: sequences at a time, tokens that are in the cache, tokens of a prompt. overlap: the share of
    collectives that runs while the next product decodes its weights."""

    batch: int = 1
    context: int = 2048
    prompt: int = 512
    overlap: float = 0.0


@dataclass(frozen=True)
class Parts:
    """Seconds of a stage (or a layer): products, what is beside them, and collectives that are waited for."""

    products: float = 0.0
    beside: float = 0.0
    links: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.beside + self.links

    def times(self, count: int) -> Parts:
        """So many of them."""
        return Parts(count * self.products, count * self.beside, count * self.links)

    def __add__(self, other: Parts) -> Parts:
        return Parts(self.products + other.products, self.beside + other.beside, self.links + other.links)


@dataclass(frozen=True)
class Prediction:
    """step_s: a token for every sequence; prompt_s: all prompts. memory: bytes by device of the plan, in its order.

    links_share: of the step, what is spent on links; idle_share: of the devices' time, what they wait for other stages.
    """

    plan: Plan
    step_s: float
    prompt_s: float
    tokens_per_s: float
    memory: tuple[float, ...]
    links_share: float
    idle_share: float
    cost_per_token: float


class Predictor:
    """Predictions for one model on one machine under one load."""

    def __init__(self, model: Model, fabric: Fabric, load: Load, products: Products | None = None) -> None:
        self.model, self.fabric, self.load = model, fabric, load
        self.products = products or Products()
        self._layers: dict[tuple[object, ...], Parts] = {}
        self._bytes: dict[tuple[object, ...], float] = {}

    def devices(self, group: Group) -> list[Device]:
        return [self.fabric.machine.devices[i] for i in group]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """By layer, the first one that costs the same."""
        first: dict[tuple[object, ...], int] = {}
        pairs = zip(self.model.facts.windows, self.model.layers, strict=True)
        return tuple(
            first.setdefault((window, *(m.key for m in layer)), i) for i, (window, layer) in enumerate(pairs)
        )

    def sequences(self, layout: Layout, microbatches: int) -> int:
        """Sequences of a replica in a microbatch."""
        return max(1, math.ceil(self.load.batch / (layout.replicas * microbatches)))

    @cached_property
    def widest(self) -> int:
        """The most rows of a matrix."""
        return max(
            (m.shape[-2] for layer in self.model.layers for m in layer if m.kind == "product"), default=0
        )

    def each_layer(
        self, groups: Sequence[Group], layout: Layout, rows: int, prompt: bool = False
    ) -> list[float]:
        """Seconds of every layer on a stage."""
        found = {kind: self.layer(kind, groups, layout, rows, prompt).seconds for kind in set(self.kinds)}
        return [found[kind] for kind in self.kinds]

    def layer(self, index: int, groups: Sequence[Group], layout: Layout, rows: int, prompt: bool) -> Parts:
        """One layer on a stage. rows: of activations in a replica; prompt: rows are of a prompt and not one a sequence."""
        key = (self.kinds[index], tuple(groups), layout.experts, rows, prompt)
        if key not in self._layers:
            self._layers[key] = self._layer(index, groups, layout, rows, prompt)
        return self._layers[key]

    def _layer(self, index: int, groups: Sequence[Group], layout: Layout, rows: int, prompt: bool) -> Parts:
        matrices = self.model.layers[index]
        plain = [m for m in matrices if m.kind == "product"]
        stacks = [m for m in matrices if m.kind == "experts"]
        everyone = [d for group in groups for d in self.devices(group)]
        work = beside = 0.0
        for device in _unlike(everyone):
            shared = sum(d.host == device.host for d in everyone) > 1
            own = self._plain(device, plain, layout.ranks, rows, shared) if plain else 0.0
            own += self._experts(device, stacks, layout, rows, shared)
            work = max(work, own)
            slow = device.together if shared else 1.0
            beside = max(beside, self._beside(device, own, index, layout, rows, prompt, slow))
        size = rows * self.model.facts.hidden * self.model.facts.activation_bytes
        spread = bool(stacks) and layout.replicas > 1
        reduces = sum(self._is_cut(m, layout) for m in self._enders(matrices)) if layout.ranks > 1 else 0
        links = (min(reduces, 1) if spread else reduces) * max(
            self.fabric.all_reduce(group, size) for group in groups
        )
        if spread:
            links += self._dispatch(groups, layout, size)
        hidden = self.load.overlap * min(links, work)
        return Parts(work, beside, links - hidden)

    @staticmethod
    def _enders(matrices: Sequence[Matrix]) -> list[Matrix]:
        """The matrix after which attention's result is summed, and that of the feed-forward part: cut by columns, or experts
        wherever they are."""
        attention = [m for m in matrices if m.kind == "product" and m.axis == 1 and "attn" in m.name]
        forward = [m for m in matrices if m not in attention and (m.axis == 1 or m.kind == "experts")]
        return attention[:1] + forward[:1]

    @staticmethod
    def _is_cut(matrix: Matrix, layout: Layout) -> bool:
        return matrix.axis is not None or (matrix.kind == "experts" and layout.experts != "none")

    def _plain(
        self, device: Device, matrices: Sequence[Matrix], ranks: int, rows: int, shared: bool
    ) -> float:
        seconds = self.products.seconds(device, matrices, ranks, rows)
        return self.products.beside_others(device, seconds, matrices, ranks) if shared else seconds

    def _experts(
        self, device: Device, stacks: Sequence[Matrix], layout: Layout, rows: int, shared: bool
    ) -> float:
        if not stacks:
            return 0.0
        count, active = stacks[0].shape[0], self.model.facts.active
        if layout.experts == "whole":
            ranks = layout.ranks * layout.replicas
            everyone = rows * layout.replicas
            used = busiest(count, ranks, active, everyone) / (count / ranks)
            each = max(1.0, everyone * active / touched(count, active, everyone))
        else:
            ranks = layout.ranks
            used = touched(count, active, rows) / count
            each = max(1.0, rows * active / (used * count))
        cut = _cut(stacks)
        seconds = self.products.seconds(device, cut, ranks, rows, used, each)
        return self.products.beside_others(device, seconds, cut, ranks, used) if shared else seconds

    def _beside(
        self,
        device: Device,
        products: float,
        index: int,
        layout: Layout,
        rows: int,
        prompt: bool,
        slow: float,
    ) -> float:
        """Attention, at the share `slow` of the memory's bandwidth, and small kernels."""
        facts = self.model.facts
        window = facts.windows[index]
        # On average half of a prompt's tokens are before one of them.
        length = max(1.0, self.load.prompt / 2) if prompt else float(self.load.context)
        length = min(length, window) if window else length
        pairs = rows * length
        ranks = min(layout.ranks, facts.heads)
        flops = pairs * facts.pair_flops[0 if prompt else 1] / ranks
        keys = facts.kv_bytes * (self.load.prompt if prompt else pairs) / min(ranks, facts.kv_ranks)
        attention = max(
            keys / (device.read_rate * slow),
            flops / device.matrix_rate("float32" if device.is_cpu else "bfloat16"),
        )
        other = _CPU_SHARE * products if device.is_cpu else _LAUNCHES * device.launch_s
        return attention + other

    def _dispatch(self, groups: Sequence[Group], layout: Layout, size: float) -> float:
        """Rows to the devices that have their experts, and results back; each rank of a group sends its part of the rows."""
        everyone = tuple(i for group in groups for i in group)
        count, active = len(everyone), self.model.facts.active
        # Of k experts several may be on one device: so many devices on average get a row.
        reached = count * (1 - (1 - 1 / count) ** active)
        sent = size / layout.ranks * reached
        back = max(self.fabric.all_gather(group, size) for group in groups)
        return 2 * self.fabric.all_to_all(everyone, sent) + back

    def ends(self, groups: Sequence[Group], layout: Layout, sequences: int, rows: int) -> tuple[Parts, Parts]:
        """(looking rows up in the table, the head for the last token of every sequence)."""
        facts, group = self.model.facts, groups[0]
        size = rows * facts.hidden * facts.activation_bytes
        table = Parts()
        if layout.ranks > 1 and self.model.table is not None and self.model.table.axis is not None:
            table = Parts(links=self.fabric.all_reduce(group, size))
        if self.model.head is None:
            return table, Parts()
        everyone = [d for g in groups for d in self.devices(g)]
        work = max(
            self._plain(
                d, [self.model.head], layout.ranks, sequences, sum(o.host == d.host for o in everyone) > 1
            )
            for d in _unlike(everyone)
        )
        gathered = self.fabric.all_gather(group, sequences * facts.vocab * facts.activation_bytes)
        return table, Parts(
            work, 0.0, gathered if layout.ranks > 1 and self.model.head.axis is not None else 0.0
        )

    def layer_bytes(self, index: int, layout: Layout) -> float:
        """Bytes of a layer on each device: its weights, and the keys and values of its sequences."""
        key = (self.kinds[index], layout.ranks, layout.replicas, layout.experts)
        if key not in self._bytes:
            facts, total = self.model.facts, 0.0
            for matrix in self.model.layers[index]:
                parts = layout.ranks if matrix.axis is not None else 1
                if matrix.kind == "experts":
                    parts = layout.ranks * (layout.replicas if layout.experts == "whole" else 1)
                total += matrix.size_bytes / parts
            window = facts.windows[index]
            # What has been read and what a prompt needs at least.
            length = max(self.load.context, self.load.prompt)
            length = min(length, window) if window else length
            sequences = math.ceil(self.load.batch / layout.replicas)
            total += sequences * length * facts.kv_bytes / min(layout.ranks, facts.kv_ranks)
            self._bytes[key] = total
        return self._bytes[key]

    def fixed_bytes(self, stage: int, layout: Layout) -> float:
        """Bytes of a device of a stage beside its layers: table, head, small tensors, activations of a chunk, logits."""
        facts, total = self.model.facts, float(self.model.kept_bytes)
        first, last = stage == 0, stage == layout.stages - 1
        if first and self.model.table is not None:
            total += self.model.table.size_bytes / (layout.ranks if self.model.table.axis is not None else 1)
        if last and self.model.head is not None and not (self.model.tied and first):
            total += self.model.head.size_bytes / (layout.ranks if self.model.head.axis is not None else 1)
        rows = min(CHUNK, self.load.prompt * math.ceil(self.load.batch / layout.replicas))
        total += rows * (6 * facts.hidden + 2 * self.widest / layout.ranks) * facts.activation_bytes
        if last:
            total += 4.0 * math.ceil(self.load.batch / layout.replicas) * facts.vocab
        return total

    def stage_parts(self, plan: Plan, rows: int, sequences: int, prompt: bool) -> list[Parts]:
        """What each stage takes for one microbatch."""
        found = []
        for stage in plan.stages:
            total = Parts()
            for kind, count in Counter(self.kinds[stage.first : stage.stop]).items():
                total += self.layer(kind, stage.groups, plan.layout, rows, prompt).times(count)
            found.append(total)
        first, last = plan.stages[0], plan.stages[-1]
        found[0] += self.ends(first.groups, plan.layout, sequences, rows)[0]
        found[-1] += self.ends(last.groups, plan.layout, sequences, rows)[1]
        return found

    def handing_on(self, stages: Sequence[Sequence[Group]], rows: int) -> list[float]:
        """Seconds from each stage to the next; the slowest replica."""
        size = rows * self.model.facts.hidden * self.model.facts.activation_bytes
        return [
            max(self.fabric.handed_on(a, b, size) for a, b in zip(one, other, strict=True))
            for one, other in pairwise(stages)
        ]

    def predict(self, plan: Plan) -> Prediction:
        """All figures of a plan."""
        layout = plan.layout
        sequences = self.sequences(layout, plan.microbatches)
        parts = self.stage_parts(plan, sequences, sequences, prompt=False)
        between = self.handing_on([s.groups for s in plan.stages], sequences)
        step = step_seconds([p.seconds for p in parts], between, plan.microbatches)
        busy = sum(p.seconds for p in parts)
        links = sum(p.links for p in parts) + sum(between)
        memory = []
        for number, stage in enumerate(plan.stages):
            own = self.fixed_bytes(number, layout) + sum(
                self.layer_bytes(i, layout) for i in range(stage.first, stage.stop)
            )
            memory += [own] * len(stage.devices)
        price = sum(self.fabric.machine.devices[i].cost_per_hour for i in plan.devices) / 3600
        return Prediction(
            plan, step, self.prompt_seconds(plan), self.load.batch / step, tuple(memory),
            links / (busy + sum(between)), max(0.0, 1 - plan.microbatches * busy / (layout.stages * step)),
            price * step / self.load.batch,
        )  # fmt: skip

    def prompt_seconds(self, plan: Plan) -> float:
        """Seconds until all prompts are read and have their first token; chunks of prompts go through the stages."""
        total = self.load.prompt * math.ceil(self.load.batch / plan.layout.replicas)
        rows = min(CHUNK, total)
        if plan.layout.stages > 1:  # shorter chunks keep more stages busy
            rows = max(min(total, 256), min(rows, math.ceil(total / (2 * plan.layout.stages))))
        chunks = math.ceil(total / rows)
        parts = self.stage_parts(plan, rows, max(1, rows // max(1, self.load.prompt)), prompt=True)
        between = self.handing_on([s.groups for s in plan.stages], rows)
        one = [p.seconds + (between[i] if i < len(between) else 0.0) for i, p in enumerate(parts)]
        return sum(one) + (chunks - 1) * max(one)


def touched(experts: int, active: int, rows: int) -> float:
    """How many of a layer's experts so many rows are expected to be sent to."""
    return experts * (1 - (1 - active / experts) ** rows)


def busiest(experts: int, ranks: int, active: int, rows: int) -> float:
    """The expected number of touched experts on the device that has most of them, of `experts / ranks` each: the largest of
    `ranks` binomial numbers taken as independent. At least what an even division of the touched ones gives."""
    held = experts // ranks
    chance = 1 - (1 - active / experts) ** rows
    even = min(float(held), touched(experts, active, rows) / ranks)
    if not 0 < chance < 1:
        return even
    # Farther from the mean than twelve times the spread the numbers of even a million devices do not lie.
    spread = 12 * (1 + math.sqrt(held * chance * (1 - chance)))
    first, end = max(0, int(held * chance - spread)), min(held, int(held * chance + spread) + 1)
    below, found = 0.0, float(first)
    for count in range(first, end):
        ways = math.lgamma(held + 1) - math.lgamma(count + 1) - math.lgamma(held - count + 1)
        below += math.exp(ways + count * math.log(chance) + (held - count) * math.log1p(-chance))
        found += 1 - min(1.0, below) ** ranks
    return max(found, even)


def _cut(stacks: Sequence[Matrix]) -> list[Matrix]:
    """Experts are divided in every layout, whatever the plan of the architecture says."""
    return [m if m.axis is not None else Matrix(m.name, m.tree, m.shape, m.kind, 0, m.group) for m in stacks]


def _unlike(devices: Sequence[Device]) -> list[Device]:
    """One device of each kind."""
    return list({d.like: d for d in devices}.values())
