"""The kernels of attention by a file's plan, known without a card: what decoding and prompts launch over pages."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from nstf.errors import UnsupportedError
from nstf.runtime.artifact import Artifact
from nstf.runtime.attention_plan import parse_plan
from nstf.runtime.engine_config import EngineConfig
from nstf.runtime.planned_heads import PlannedHeads, Segment, compiled_plan

if TYPE_CHECKING:
    from nstf.kernels.triton.architecture import Architecture
    from nstf.kernels.triton.attention_pages import Pages
    from nstf.kernels.triton.spec import KernelSpec


def planned_specs(
    artifact: Artifact, config: EngineConfig, batches: Iterable[int], dtype: torch.dtype, row: "Architecture"
) -> "Iterator[KernelSpec]":
    """Every launch of planned attention for these numbers of sequences; nothing for a file without a plan, and where the
    kernels do not run it (nstf.runtime.planned_heads).

    Kernels whose constants depend on a prompt (a chunk of one token) are left to be compiled at their first use.
    """
    if not artifact.manifest.attention or dtype not in (torch.float16, torch.bfloat16):
        return
    try:
        layers = compiled_plan(parse_plan(dict(artifact.manifest.attention)))
    except (UnsupportedError, ValueError):
        return
    for batch in batches:
        done = set()
        for layer in layers:
            for segment in layer.segments:
                if (what := _launched(segment)) not in done:
                    done.add(what)
                    yield from _segment(layer, segment, config, batch, dtype, row.target)


def _launched(segment: Segment) -> tuple[object, ...]:
    """What of a segment decides about its kernels."""
    group = segment.group
    pairs = len(segment.dense), len(segment.banded), tuple((stride, len(p)) for stride, p in segment.sparse)
    size = segment.places, len(segment.members), segment.widest
    return group.keys, group.values, group.evict, size, pairs, segment.masked


def _segment(
    layer: PlannedHeads, segment: Segment, config: EngineConfig, batch: int, dtype: torch.dtype, target: str
) -> "Iterator[KernelSpec]":
    from nstf.kernels.triton.attention_append import append_spec
    from nstf.kernels.triton.attention_decode import decode_specs
    from nstf.kernels.triton.attention_pages import fetch_spec, store_spec
    from nstf.kernels.triton.attention_predict import sums_spec
    from nstf.kernels.triton.attention_prefill import NARROW, prefill_spec, shares

    pages = _hollow(layer, segment, dtype)
    shape = layer.heads, layer.kv_heads
    yield append_spec(pages, batch, *shape, config.family.qk_norm, bool(config.biases), target)
    yield from decode_specs(pages, batch, *shape, segment.masked, target, config.shape["context"])
    for values in (False, True):
        yield store_spec(pages, values, batch, 1)
        yield fetch_spec(pages, values, batch, 1)
    # Without codes a prompt's keys are read from one place.
    same = not pages.forms.near
    narrow = segment.widest <= NARROW
    for pairs, bands, together in segment.ranges(shares(layer.size, target)):
        # Short prompts have a head in each program.
        for number in sorted({1, together}):
            yield prefill_spec(
                dtype,
                layer.size,
                batch,
                len(pairs),
                1,
                False,
                bands,
                same,
                target,
                None,
                bands and narrow,
                number,
            )
    for stride, pairs in segment.sparse:
        yield sums_spec(dtype, layer.size, stride, len(pairs), 1, 1, target)
        yield prefill_spec(dtype, layer.size, 1, len(pairs), 1, True, False, same, target)


def _hollow(layer: PlannedHeads, segment: Segment, dtype: torch.dtype) -> "Pages":
    """The segment's pages without their bytes."""
    from nstf.kernels.triton.attention_pages import ALL, NEAR, Form, Forms, Pages

    def empty(*shape: int, kind: torch.dtype = dtype) -> Any:
        return torch.empty(shape, dtype=kind, device="meta")

    keys, values = segment.group.keys, segment.group.values
    forms = Forms(
        Form(keys.bits, keys.by == "channel", keys.rotate),
        Form(values.bits, values.by == "channel", values.rotate),
        layer.size,
    )
    near = 1, len(segment.members), NEAR, layer.size
    sinks, ring = segment.places if segment.group.evict else (ALL, 1)
    return Pages(
        forms, empty(1024, kind=torch.int32), empty(1, 1, kind=torch.int64), 0, empty(*near), empty(*near),
        empty(len(segment.members), kind=torch.int32), sinks, ring,
    )  # fmt: skip
