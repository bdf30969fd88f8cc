"""How the heads of one planned layer are sorted into calls: by where their keys are stored, and by pattern."""

from dataclasses import dataclass, replace

from nstf.runtime.attention_plan import HeadPlan, LayerPlan
from nstf.runtime.ring_cache import Segment


@dataclass(frozen=True)
class Bucket:
    """Query heads of one layer that run in one call; `band` is (sink, window, min_length), None is dense.

    plans: of the heads, where they are run by the rules of quantised pages or predicted blocks; else empty.
    """

    heads: tuple[int, ...]
    segment: int
    slots: tuple[int, ...]
    band: tuple[int, int, int] | None
    plans: tuple[HeadPlan, ...] = ()

    def whole_groups(self, per_group: int) -> tuple[int, ...] | None:
        """The KV slots when the heads are whole KV groups in order, else None."""
        slots = self.slots[::per_group]
        return slots if self.slots == tuple(s for s in slots for _ in range(per_group)) else None


@dataclass(frozen=True)
class CompiledLayer:
    """Where the keys of a layer are, and its calls; `inverse` puts the heads of all buckets back in order.

    window: positions that the model's layer sees, 0 for all.
    """

    segments: tuple[Segment, ...]
    buckets: tuple[Bucket, ...]
    per_group: int
    inverse: tuple[int, ...]
    window: int = 0


def compile_layer(plan: LayerPlan, window: int = 0) -> CompiledLayer:
    """Sort the heads of a layer by where their keys are and by pattern. window: of the model's layer."""
    per_group = len(plan.heads) // len(plan.groups)
    alike: dict[Segment, list[int]] = {}
    for index, group in enumerate(plan.groups):
        form = (group.sink, group.recent, group.min_length) if group.evict else (0, 0, 0)
        if group.keys.bits < 16 or group.values.bits < 16:
            # Read back page by page; what is forgotten is masked.
            form = (0, 0, 0)
        alike.setdefault(Segment((), *form, group.keys, group.values), []).append(index)
    segments = tuple(
        replace(segment, kv_heads=tuple(heads))
        for segment, heads in sorted(alike.items(), key=lambda pair: pair[1])
    )
    buckets = []
    for index, segment in enumerate(segments):
        by_band: dict[tuple[int, int, int] | None, list[tuple[int, int]]] = {}
        ruled: list[tuple[int, int]] = []
        for slot, kv_head in enumerate(segment.kv_heads):
            for head in range(kv_head * per_group, (kv_head + 1) * per_group):
                if segment.quantised or plan.heads[head].block_sparse is not None:
                    ruled.append((head, slot))
                else:
                    by_band.setdefault(plan.heads[head].streaming, []).append((head, slot))
        for band, pairs in by_band.items():
            buckets.append(Bucket(tuple(h for h, _ in pairs), index, tuple(s for _, s in pairs), band))
        if ruled:
            heads_of = tuple(h for h, _ in ruled)
            plans = tuple(plan.heads[h] for h in heads_of)
            buckets.append(Bucket(heads_of, index, tuple(s for _, s in ruled), None, plans))
    done = [head for bucket in buckets for head in bucket.heads]
    inverse = tuple(sorted(range(len(done)), key=done.__getitem__))
    return CompiledLayer(segments, tuple(buckets), per_group, inverse, window)


def dense_layer(heads: int, kv_heads: int) -> CompiledLayer:
    """For modules without a plan (another model built on the same config object): everything dense."""
    per_group = heads // kv_heads
    segment = Segment(tuple(range(kv_heads)))
    slots = tuple(head // per_group for head in range(heads))
    everything = tuple(range(heads))
    return CompiledLayer((segment,), (Bucket(everything, 0, slots, None),), per_group, everything)
