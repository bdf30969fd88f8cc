"""The measuring pass against the masked reference, over generated plans."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from nstf.errors import UnsupportedError
from nstf.runtime.attention_plan import GroupPlan, HeadPlan, LayerPlan
from nstf.runtime.kv_formats import PLAIN, KVFormat, reference_attention
from nstf_convert.pipeline.attention import simulate

FORMATS = [
    PLAIN,
    *(KVFormat(*form) for form in itertools.product((8, 4, 2), ("channel", "token"), (False, True))),
]
FULL = HeadPlan("full", {}, 0, 0.0, 1.0)


def tensors(seed: int, total: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, total, 16, generator=generator) for n in (4, 2, 2))  # type: ignore[return-value]


def generated(chance: random.Random) -> LayerPlan:
    """Two groups of two heads: rings or all positions, any format, any pattern."""
    heads: list[HeadPlan] = []
    groups = []
    for _ in range(2):
        formats = [chance.choice(FORMATS) for _ in range(2)]
        sink, window = chance.choice((0, 3, 64)), chance.choice((1, 40, 130, 600))
        band = HeadPlan(
            "streaming", {"sink": sink, "window": window}, chance.choice((0, sink + window)), 0.0, 1.0
        )
        if chance.random() < 0.4:
            groups.append(GroupPlan(sink, window, band.min_length, *formats))
            heads += [band, band]
            continue
        groups.append(GroupPlan(0, 0, 0, *formats))
        threshold, stride = chance.choice((0.3, 0.9)), chance.choice((8, 16))
        sparse = HeadPlan(
            "block_sparse", {"threshold": threshold, "stride": stride}, chance.choice((0, 300)), 0.0, 1.0
        )
        heads += chance.choices([FULL, band, sparse], k=2)
    return LayerPlan(tuple(heads), tuple(groups))


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_simulated_as_the_reference_says(seed: int) -> None:
    chance = random.Random(seed)
    query, key, value = tensors(seed, chance.choice((90, 512, 700)))
    layer = generated(chance)
    expected = reference_attention(query, key, value, layer)
    found = simulate.planned(query, key, value, layer, 16**-0.5)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


def test_a_plan_of_full_heads_in_16_bits_is_dense_attention() -> None:
    query, key, value = (t.half().float() for t in tensors(0, 200))
    layer = LayerPlan((FULL,) * 4, (GroupPlan(0, 0, 0, PLAIN, PLAIN),) * 2)
    found = simulate.planned(query, key, value, layer, 0.25)
    torch.testing.assert_close(found, simulate.dense(0, query, key, value, 0.25, 0))


def test_models_that_no_plan_fits_are_refused() -> None:
    with (
        pytest.raises(UnsupportedError, match="attention interface"),
        simulate.attending(torch.nn.Linear(2, 2), simulate.dense),
    ):
        pass
    import transformers

    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "head_dim": 8,
    }
    for kind, message in (("gemma2", "softcap"), ("qwen3", "layers of type linear_attention")):
        config = transformers.AutoConfig.for_model(kind, **sizes)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        if kind == "qwen3":
            model.config.layer_types = ["full_attention", "linear_attention"] * 2
        with pytest.raises(UnsupportedError, match=message), simulate.attending(model, simulate.dense):
            pass


def test_another_thread_attends_alike_and_blocks_nest() -> None:
    """On a GPU the way back computes checkpointed layers again in a thread of autograd's own."""
    import transformers

    sizes = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    seen = []

    def noted(*arguments: Any) -> Tensor:
        seen.append(threading.get_ident())
        return simulate.dense(*arguments)

    ids = torch.arange(20)[None]
    with ThreadPoolExecutor(1) as other, simulate.attending(model, noted):
        with simulate.attending(model, simulate.dense):
            expected = model(ids, use_cache=False).logits
        found = other.submit(lambda: model(ids, use_cache=False).logits).result()
    assert seen and threading.get_ident() not in seen
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [1, 70, 300])
def test_a_layer_that_slides_is_a_band_without_sinks(window: int) -> None:
    query, key, value = (t.half().float() for t in tensors(0, 260))
    band = HeadPlan("streaming", {"sink": 0, "window": window}, 0, 0.0, 1.0)
    layer = LayerPlan((band,) * 4, (GroupPlan(0, window, 0, PLAIN, PLAIN),) * 2)
    dense = simulate.dense(0, query, key, value, 0.25, window)
    distance = torch.arange(260)[:, None] - torch.arange(260)
    mask = (distance >= 0) & (distance < window)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 0), value.repeat_interleave(2, 0), attn_mask=mask, scale=0.25
    )
    torch.testing.assert_close(dense, expected)
    torch.testing.assert_close(simulate.planned(query, key, value, layer, 0.25), expected)
