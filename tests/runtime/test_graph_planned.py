"""Decoding by a plan in captured graphs: against the torch path, on a GPU; what is refused, anywhere."""

import copy
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.errors import UnsupportedError
from nstf.runtime.attention import apply_plan, new_cache
from nstf.runtime.attention_plan import AttentionPlan, GroupPlan, HeadPlan, LayerPlan, PlanKLD
from nstf.runtime.graph_bench import measure
from nstf.runtime.graph_planned import PlannedDecoder
from nstf.runtime.kv_formats import PLAIN, KVFormat
from nstf.runtime.planned_heads import compiled
from nstf.runtime.ring_cache import PlannedCache

sys.path.insert(0, str(Path(__file__).parent))

FOUR = KVFormat(4, "channel", False), KVFormat(4, "token", True)
EIGHT = KVFormat(8, "token", True), KVFormat(8, "channel", False)


def plan_of(layers: int, size: int) -> AttentionPlan:
    """Four heads on two KV heads: a ring and predicted blocks, of 4 and 8 bits, and layers of 16 bits."""
    full = HeadPlan("full", {}, 0, 0.0, 1.0)
    band = HeadPlan("streaming", {"sink": 10, "window": 100}, 128, 0.0, 1.0)
    sparse = HeadPlan("block_sparse", {"threshold": 0.7, "stride": 16}, 200, 0.0, 1.0)
    groups = GroupPlan(10, 100, 128, *FOUR), GroupPlan(0, 0, 0, *EIGHT)
    odd = LayerPlan((band, band, sparse, full), groups)
    even = LayerPlan((full,) * 4, (GroupPlan(0, 0, 0, PLAIN, PLAIN),) * 2)
    kld = PlanKLD(None, None, None)
    return AttentionPlan(2, 512, None, size, kld, tuple((odd, even)[i % 2] for i in range(layers)))


def model_of(dtype: torch.dtype = torch.float32, size: int = 64) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=size, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)


def test_a_layer_is_sorted_by_storage_and_pattern() -> None:
    layer = compiled(plan_of(1, 64).layers[0], 64)
    ring, rest = layer.segments
    assert ring.members == (0,) and ring.banded == ((0, 0), (1, 0)) and ring.places == (1, 4)
    assert rest.members == (1,) and rest.dense == ((3, 0),) and rest.sparse == ((16, ((2, 0),)),)
    assert ring.masked and not rest.masked and (ring.widest, rest.widest) == (110, 0)
    with pytest.raises(UnsupportedError, match="takes heads of"):
        compiled(plan_of(1, 48).layers[0], 48)


def test_heads_of_one_kv_head_and_rule_share_programs_by_fours_and_twos() -> None:
    full = HeadPlan("full", {}, 0, 0.0, 1.0)
    one, two = (HeadPlan("streaming", {"sink": 4, "window": w}, 0, 0.0, 1.0) for w in (64, 100))
    heads = (one,) * 7 + (full,) + (one, two, one, two, two, full, one, two)
    ranges = compiled(LayerPlan(heads, (GroupPlan(0, 0, 0, PLAIN, PLAIN),) * 2), 128).segments[0].ranges(True)
    assert ranges == [
        (((7, 0), (13, 1)), False, 1),
        (((0, 0), (1, 0), (2, 0), (3, 0), (9, 1), (11, 1), (12, 1), (15, 1)), True, 4),
        (((4, 0), (5, 0), (8, 1), (10, 1)), True, 2),
        (((6, 0), (14, 1)), True, 1),
    ]
    assert [number for _, _, number in compiled(plan_of(1, 64).layers[0], 64).segments[0].ranges(False)] == [
        1
    ]


def test_planned_decoding_says_what_it_does_not_run() -> None:
    model, plan = model_of(), plan_of(2, 64)
    with pytest.raises(UnsupportedError, match="in 16 bits, not in"):
        PlannedDecoder(model, plan)


def test_on_a_cpu_a_plan_of_codes_gives_the_same_logits_in_one_go_and_in_steps() -> None:
    model = model_of()
    apply_plan(model, plan_of(2, 64))
    ids = torch.randint(0, 100, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache: Any = new_cache(model)
        assert isinstance(cache, PlannedCache)
        parts = [
            model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 256), (256, 299), (299, 300))
        ]
        whole = model(ids).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
def test_graphs_follow_the_torch_path(batch: int) -> None:
    plan = plan_of(2, 64)
    slow = model_of(torch.float16).cuda()
    fast = copy.deepcopy(slow)
    apply_plan(slow, plan)
    apply_plan(fast, plan)
    ids = torch.randint(0, 100, (batch, 400), generator=torch.Generator().manual_seed(0)).cuda()
    decoder = PlannedDecoder(fast, plan)
    with torch.no_grad():
        decoder.prepare(batch, 400, None)
        decoder._start(ids[:, :256], None)
        state = decoder._paged()
        cache = new_cache(slow, batch, padded=True)
        wanted = slow(ids[:, :256], past_key_values=cache).logits[:, -1]
        for at in range(256, 400):
            state.tokens.copy_(ids[:, at])
            state.pages.pool.reserve(at + 1)
            found = decoder.logits(state)
            state.position.add_(1)
            wanted = slow(ids[:, at : at + 1], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(found.float(), wanted.float(), atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
def test_a_planned_model_generates_on_a_gpu_as_its_steps_do() -> None:
    plan = plan_of(2, 64)
    model = model_of(torch.float16).cuda()
    apply_plan(model, plan)
    ids = torch.randint(0, 100, (1, 130), generator=torch.Generator().manual_seed(0)).cuda()
    direct = PlannedDecoder(model, plan, lambda step: step)
    with torch.no_grad():
        wanted = list(direct.generate(ids, 200))
        graph = PlannedDecoder(model, plan)
        assert list(graph.generate(ids, 200)) == wanted and graph.capacity >= 330


@pytest.mark.gpu
def test_a_planned_file_is_measured_on_a_gpu(tiny: ModuleType, tmp_path: Path) -> None:
    stored = json.loads(plan_of(2, 64).to_json())
    model = model_of(torch.float16)
    model.config.dtype = torch.float16
    path = tiny.write(tmp_path, model, attention=stored)
    dense, planned = (measure(path, "cuda", 300, 8, 1, attention=kind) for kind in ("full", "planned"))
    assert planned.decode_rate > 0 and planned.bytes_per_token < dense.bytes_per_token
