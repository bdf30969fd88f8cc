"""How the heads of a planned layer are sorted for the kernels: by how their keys and values are stored, and by pattern."""

from dataclasses import dataclass

from nstf.errors import UnsupportedError
from nstf.runtime.attention_plan import AttentionPlan, GroupPlan, LayerPlan
from nstf.runtime.kv_formats import PAGE

SIZES = (64, 128, 256)


@dataclass(frozen=True)
class Segment:
    """KV heads of a layer that are stored alike, and their query heads by pattern: (head, place of its KV head)."""

    group: GroupPlan
    members: tuple[int, ...]
    dense: tuple[tuple[int, int], ...]
    banded: tuple[tuple[int, int], ...]
    sparse: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # by stride
    masked: bool  # whether a decoding query may see less than everything
    widest: int = 0  # positions of the sinks and the window of the banded heads, at most
    # What `ranges` says of programs that take several heads.
    together: tuple[tuple[tuple[tuple[int, int], ...], bool, int], ...] = ()

    @property
    def places(self) -> tuple[int, int]:
        """Pages of the sinks and of the ring behind them; a query sees no other pages."""
        group = self.group
        sinks = -(-group.sink // PAGE)
        # The window touches one page more than it fills; before min_length everything is kept.
        return sinks, max(-(-group.recent // PAGE) + 1, -(-group.min_length // PAGE) - sinks, 1) + 1

    def ranges(self, together: bool) -> list[tuple[tuple[tuple[int, int], ...], bool, int]]:
        """Launches of a prompt's heads that attend to ranges of keys: (heads, whether they have bands, how many neighbours
        see the same keys). together: whether a program may take several of these."""
        alone = ((self.dense, False, 1), (self.banded, True, 1))
        return [launch for launch in (self.together if together else alone) if launch[0]]


@dataclass(frozen=True)
class PlannedHeads:
    """A layer of a plan, sorted by how it is stored and run."""

    layer: LayerPlan
    size: int
    segments: tuple[Segment, ...]

    @property
    def heads(self) -> int:
        return len(self.layer.heads)

    @property
    def kv_heads(self) -> int:
        return len(self.layer.groups)


def _together(
    layer: LayerPlan, dense: list[tuple[int, int]], banded: list[tuple[int, int]]
) -> tuple[tuple[tuple[tuple[int, int], ...], bool, int], ...]:
    """Of the heads of one KV head and rule as many fours as there are, of banded ones then twos, and those that remain."""
    launches = []
    for heads, bands in ((dense, False), (banded, True)):
        alike: dict[object, list[tuple[int, int]]] = {}
        for head, place in heads:
            alike.setdefault((place, layer.heads[head].streaming), []).append((head, place))
        found: dict[int, list[tuple[int, int]]] = {4: [], 2: [], 1: []} if bands else {4: [], 1: []}
        for pairs in alike.values():
            rest = pairs
            for number, taken in found.items():
                end = len(rest) // number * number
                taken += rest[:end]
                rest = rest[end:]
        launches += [(tuple(taken), bands, number) for number, taken in found.items() if taken]
    return tuple(launches)


def compiled(layer: LayerPlan, size: int) -> PlannedHeads:
    """Raises UnsupportedError for heads that the kernels are not made for."""
    if size not in SIZES:
        raise UnsupportedError(f"planned attention on a GPU takes heads of {SIZES} channels, not {size}")
    alike: dict[GroupPlan, list[int]] = {}
    for index, group in enumerate(layer.groups):
        # Of groups that keep everything, what a ring would have is of no meaning.
        form = group if group.evict else GroupPlan(0, 0, 0, group.keys, group.values)
        alike.setdefault(form, []).append(index)
    per_group = len(layer.heads) // len(layer.groups)
    segments = []
    for group, members in alike.items():
        dense, banded = [], []
        sparse: dict[int, list[tuple[int, int]]] = {}
        for place, kv_head in enumerate(members):
            for head in range(kv_head * per_group, (kv_head + 1) * per_group):
                plan = layer.heads[head]
                if plan.streaming is not None:
                    banded.append((head, place))
                elif plan.block_sparse is not None:
                    sparse.setdefault(plan.block_sparse[1], []).append((head, place))
                else:
                    dense.append((head, place))
        by_stride = tuple((stride, tuple(pairs)) for stride, pairs in sorted(sparse.items()))
        rules = (layer.heads[head].streaming for head, _ in banded)
        widest = max((rule[0] + rule[1] for rule in rules if rule is not None), default=0)
        segments.append(
            Segment(
                group,
                tuple(members),
                tuple(dense),
                tuple(banded),
                by_stride,
                bool(banded),
                widest,
                _together(layer, dense, banded),
            )
        )
    return PlannedHeads(layer, size, tuple(segments))


def compiled_plan(plan: AttentionPlan) -> list[PlannedHeads]:
    """As `compiled`, of every layer."""
    return [compiled(layer, plan.head_dim) for layer in plan.layers]
