"""Names are those of transformers' module tree, values are what transformers itself would load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nstf.errors import CorruptError
from nstf_convert.checkpoint import open_checkpoint

Make = Callable[..., Path]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("MixtralForCausalLM", {"num_local_experts": 4}),
    ("Qwen2MoeForCausalLM", {**EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
    ("Qwen3MoeForCausalLM", {**EXPERTS, "moe_intermediate_size": 24}),
    ("OlmoeForCausalLM", {**EXPERTS, "eos_token_id": 1}),
    ("BertModel", {}),
    ("BertForMaskedLM", {}),
    ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}),
    ("ViTModel", {"image_size": 16, "patch_size": 8}),
    # Its tables of positions are in no file.
    (
        "MarianMTModel",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "pad_token_id": 95,
        },
    ),
]


@pytest.mark.parametrize(("class_name", "settings"), MODELS, ids=[name for name, _ in MODELS])
def test_parameters_equal_what_transformers_loads(
    make_folder: Make, class_name: str, settings: dict[str, Any]
) -> None:
    folder = make_folder(class_name, **settings)
    expected = getattr(transformers, class_name).from_pretrained(folder).state_dict()
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.names()) | set(checkpoint.ties) == set(expected)
        for name in checkpoint.names():
            value = checkpoint.get(name)
            assert torch.equal(value, expected[name]), name
            info = checkpoint.info(name)
            assert (info.shape, info.size_bytes) == (tuple(value.shape), value.numel() * value.element_size())
        for alias, name in checkpoint.ties.items():
            assert torch.equal(expected[alias], expected[name])
        assert checkpoint.missing == ()


def test_a_table_beyond_the_files_tensors_is_not_computed(make_folder: Make) -> None:
    settings = MODELS[-1][1] | {"max_position_embeddings": 64}
    folder = make_folder("MarianMTModel", **settings)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 16
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        assert "model.encoder.embed_positions.weight" in checkpoint.missing


def test_experts_are_stacked_although_the_file_has_them_apart(make_folder: Make) -> None:
    folder = make_folder("MixtralForCausalLM", num_local_experts=4)
    stored = load_file(folder / "model.safetensors")
    assert any("experts.3.w1" in name for name in stored)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.info("model.layers.1.mlp.experts.gate_up_proj").shape == (4, 96, 32)
        prefix = "model.layers.1.block_sparse_moe.experts.2"
        stack = checkpoint.get("model.layers.1.mlp.experts.gate_up_proj")[2]
        assert torch.equal(stack, torch.cat([stored[f"{prefix}.w1.weight"], stored[f"{prefix}.w3.weight"]]))
        assert checkpoint.total_bytes == sum(t.numel() * 4 for t in stored.values())


def test_more_than_ten_experts_stay_in_order(make_folder: Make) -> None:
    folder = make_folder("MixtralForCausalLM", num_local_experts=12, num_hidden_layers=1)
    stored = load_file(folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        stack = checkpoint.get("model.layers.0.mlp.experts.down_proj")
    for expert in range(12):
        assert torch.equal(
            stack[expert], stored[f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight"]
        )


def test_a_missing_expert_is_corrupt(make_folder: Make) -> None:
    folder = make_folder("MixtralForCausalLM", num_local_experts=4)
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CorruptError, match="gate_up_proj"):
        open_checkpoint(folder)


def test_an_expert_of_another_shape_is_corrupt(make_folder: Make) -> None:
    folder = make_folder("MixtralForCausalLM", num_local_experts=4)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.block_sparse_moe.experts.2.w1.weight"] = torch.ones(5, 32)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CorruptError, match="do not fit together"):
        open_checkpoint(folder)


def rename_all(folder: Path, change: Callable[[str], str]) -> None:
    stored = {change(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors")


def set_config(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_a_base_model_saved_with_a_prefix_loads_without_it(make_folder: Make) -> None:
    folder = make_folder("BertModel")
    rename_all(folder, lambda name: f"bert.{name}")
    with open_checkpoint(folder) as checkpoint:
        assert "embeddings.word_embeddings.weight" in checkpoint.names()
        assert checkpoint.missing == ()


def test_a_base_model_under_the_config_of_a_head_model_becomes_a_base_model(make_folder: Make) -> None:
    folder = make_folder("BertModel")
    set_config(folder, architectures=["BertForMaskedLM"])
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.architecture == "BertModel"
        assert checkpoint.config is not None
        assert checkpoint.config["architectures"] == ["BertModel"]


def test_old_layer_norm_names_are_renamed(make_folder: Make) -> None:
    folder = make_folder("BertModel")
    rename_all(
        folder,
        lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ),
    )
    with open_checkpoint(folder) as checkpoint:
        assert "embeddings.LayerNorm.weight" in checkpoint.names()


def test_two_stored_tensors_for_one_parameter_are_corrupt(make_folder: Make) -> None:
    folder = make_folder("BertModel")
    stored = load_file(folder / "model.safetensors")
    stored["bert.embeddings.LayerNorm.weight"] = stored["embeddings.LayerNorm.weight"].clone()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CorruptError, match=r"are both 'embeddings.LayerNorm.weight'"):
        open_checkpoint(folder)


def test_a_config_without_architectures_gives_the_language_model(llama_folder: Path) -> None:
    set_config(llama_folder, architectures=None)
    with open_checkpoint(llama_folder) as checkpoint:
        assert checkpoint.architecture == "LlamaForCausalLM"


def test_an_unknown_model_type_keeps_the_names_of_the_file(llama_folder: Path) -> None:
    set_config(llama_folder, model_type="never_heard_of", architectures=["NeverForCausalLM"])
    with open_checkpoint(llama_folder) as checkpoint:
        assert checkpoint.architecture is None
        assert checkpoint.config is not None
        assert checkpoint.config["model_type"] == "never_heard_of"
        assert checkpoint.names() == sorted(load_file(llama_folder / "model.safetensors"))
        assert "'never_heard_of' is unknown to transformers" in " ".join(checkpoint.notes)
        checkpoint.get("lm_head.weight")


@pytest.mark.parametrize("name", ["AutoModel", "PreTrainedModel", "Trainer", "os", "evil.C", "", "no such"])
def test_only_model_classes_count_as_architecture(llama_folder: Path, name: str) -> None:
    set_config(llama_folder, architectures=[name])
    with open_checkpoint(llama_folder) as checkpoint:
        assert checkpoint.architecture == "LlamaForCausalLM"


def test_a_config_of_another_model_leaves_the_names_alone(make_folder: Make) -> None:
    folder = make_folder("BertModel")
    other = make_folder("GPT2LMHeadModel", "other", n_embd=32, n_layer=2, n_head=4)
    (folder / "config.json").write_bytes((other / "config.json").read_bytes())
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.architecture is None
        assert "does not describe these tensors" in " ".join(checkpoint.notes)


def test_tensors_the_model_has_no_place_for_are_left_out_and_said(llama_folder: Path) -> None:
    stored = load_file(llama_folder / "model.safetensors")
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(stored, llama_folder / "model.safetensors")
    with open_checkpoint(llama_folder) as checkpoint:
        assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in checkpoint.names()
        assert "1 tensors have no place in LlamaForCausalLM" in " ".join(checkpoint.notes)


def test_a_layer_without_one_weight_is_corrupt(llama_folder: Path) -> None:
    stored = load_file(llama_folder / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, llama_folder / "model.safetensors")
    with pytest.raises(
        CorruptError, match=r"'model.layers.1.mlp.up_proj.weight' is missing although other layers"
    ):
        open_checkpoint(llama_folder)


def test_a_model_without_its_pooler_is_read_and_said(make_folder: Make) -> None:
    folder = make_folder("BertModel")
    stored = {n: t for n, t in load_file(folder / "model.safetensors").items() if "pooler" not in n}
    save_file(stored, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.missing == ("pooler.dense.weight", "pooler.dense.bias")
        assert "are not in the file: pooler.dense.weight" in " ".join(checkpoint.notes)
