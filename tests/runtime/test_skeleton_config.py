"""A config from a stranger's artifact cannot lead transformers to code or to the network."""

import json
import socket

import pytest

from nstf.runtime.skeleton import build_skeleton, harmless

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
HOSTILE = [
    {"_attn_implementation_internal": "evil/kernel"},
    {"_attn_implementation": "evil/kernel"},
    {"attn_implementation": "evil/kernel"},
    {"experts_implementation": "evil/kernel"},
    {
        "auto_map": {
            "AutoConfig": "evil/repo--configuration.C",
            "AutoModelForCausalLM": "evil/repo--modeling.M",
        }
    },
    {"trust_remote_code": True, "auto_map": {"AutoModelForCausalLM": "modeling.M"}},
    {"nested": {"trust_remote_code": True, "_attn_implementation_internal": "evil/kernel"}},
    {"backbone": "evil/backbone", "use_pretrained_backbone": True},
    {"quantization_config": {"quant_method": "evil", "modules_to_not_convert": None}},
    {"name_or_path": "evil/repo", "_name_or_path": "evil/repo", "_commit_hash": "0"},
    {"hidden_act": "evil/act"},
    {
        "model_args": {"checkpoint_path": "evil.pth", "pretrained": "evil"}
    },  # of timm, which reads a pickle there
]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("extra", HOSTILE, ids=lambda e: next(iter(e)))
def test_hostile_fields_do_not_reach_transformers(extra: dict, no_network: None) -> None:
    assert "evil" not in json.dumps(harmless({**TINY, **extra}))
    model = build_skeleton({**TINY, **extra})
    assert type(model).__module__.startswith("transformers.models.llama")
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_what_a_model_needs_is_kept() -> None:
    config = {
        **TINY,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "id2label": {"0": "either/or"},
        "layer_types": ["full_attention"],
        "eos_token_id": [1, 2],
        "pad_token_id": None,
        "_remove_final_layer_norm": True,
    }
    assert harmless(config) == config
    assert "_remove_final_layer_norm" not in harmless({"_remove_final_layer_norm": "evil"})


def test_a_config_nested_without_end_is_cut() -> None:
    deep: dict = {}
    for _ in range(100):
        deep = {"x": deep}
    assert len(json.dumps(harmless(deep))) < 200


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "router_dtype"])
def test_a_dtype_is_no_module_of_torch(key: str) -> None:
    """`getattr(torch, "_inductor")` imports 1,672 modules."""
    kept = {key: "torch.bfloat16", "vision_config": {key: {"": "float32"}}}
    assert harmless(kept) == kept
    assert harmless({key: "_inductor", "vision_config": {key: {"": "torch.onnx"}}}) == {"vision_config": {}}
