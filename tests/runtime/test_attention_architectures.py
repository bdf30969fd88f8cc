"""Architectures other than Llama: a planned prefill and a planned cache."""

from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache

from nstf.runtime.attention import apply_plan, new_cache

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "eos_token_id": None}


def build(kind: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def everywhere_sparse(settings: dict[str, Any]) -> dict[str, Any]:
    """Every head streams with 2 sinks and 32 last positions, from 128 tokens on, and every group forgets."""
    plain = {"bits": 16, "by": "token", "rotate": False}
    group = {"sink": 2, "recent": 32, "min_length": 128, "keys": plain, "values": plain}
    head = {
        "pattern": "streaming",
        "params": {"sink": 2, "window": 32},
        "min_length": 128,
        "error": 0.0,
        "mass": 1.0,
    }
    groups = settings.get("num_key_value_heads", 4)
    return {
        "version": 2,
        "context": 512,
        "kv_budget": None,
        "head_dim": 8,
        "kld": {"allowed": None, "choose": None, "report": None},
        "layers": [{"heads": [head] * 4, "groups": [group] * groups}] * 2,
    }


@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen3", "mistral", "gpt_neox", "gpt2", "olmo2", "phi3", "granite"]
)
def test_a_plan_runs_with_a_planned_cache(kind: str) -> None:
    settings = dict(GPT2 if kind == "gpt2" else SMALL)
    if kind == "mistral":
        settings["sliding_window"] = None
    if kind == "gpt_neox":
        settings["num_key_value_heads"] = 4
    if kind == "qwen3":  # whose configuration says 128 by default
        settings["head_dim"] = 8
    model = build(kind, settings)
    ids = torch.randint(1, 40, (2, 200), generator=torch.Generator().manual_seed(0))
    plan = everywhere_sparse(settings)
    with torch.no_grad():
        dense = model(ids).logits
        apply_plan(model, plan)
        whole = model(ids, use_cache=False).logits
        torch.testing.assert_close(whole[:, :127], dense[:, :127], atol=1e-4, rtol=1e-4)
        assert (whole[:, 150:] - dense[:, 150:]).abs().max() > 1e-6
        cache = new_cache(model)
        parts = [model(part, past_key_values=cache).logits for part in ids.split([140, 1, 1, 58], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
        assert all(store.keys.shape[2] == 34 for layer in cache.layers for store in layer.stores)
        options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        plain = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
        assert torch.equal(model.generate(ids, **options), plain)
