"""Roles by the names of the model families we meet."""

import pytest

from nstf.analyzers.roles import ROLES, layer_of, role_of

CASES = [
    ("llama", "model.layers.0.self_attn.q_proj.weight", (576, 576), "q"),
    ("llama", "model.layers.0.self_attn.k_proj.weight", (192, 576), "k"),
    ("llama", "model.layers.0.self_attn.v_proj.weight", (192, 576), "v"),
    ("llama", "model.layers.0.self_attn.o_proj.weight", (576, 576), "o"),
    ("llama", "model.layers.0.mlp.gate_proj.weight", (1536, 576), "gate"),
    ("llama", "model.layers.0.mlp.up_proj.weight", (1536, 576), "up"),
    ("llama", "model.layers.0.mlp.down_proj.weight", (576, 1536), "down"),
    ("llama", "model.layers.0.input_layernorm.weight", (576,), "norm"),
    ("llama", "model.norm.weight", (576,), "norm"),
    ("llama", "model.embed_tokens.weight", (49152, 576), "embedding"),
    ("llama", "lm_head.weight", (49152, 576), "head"),
    ("qwen", "model.layers.3.self_attn.q_norm.weight", (128,), "norm"),
    ("qwen", "model.layers.3.self_attn.q_proj.bias", (576,), "bias"),
    ("qwen-moe", "model.layers.0.mlp.gate.weight", (60, 2048), "router"),
    ("qwen-moe", "model.layers.0.mlp.shared_expert_gate.weight", (1, 2048), "router"),
    ("qwen-moe", "model.layers.0.mlp.shared_expert.gate_proj.weight", (512, 2048), "gate"),
    ("qwen-moe", "model.layers.0.mlp.experts.gate_up_proj", (60, 1024, 2048), "expert_stack"),
    ("qwen-moe", "model.layers.0.mlp.experts.down_proj", (60, 2048, 512), "expert_stack"),
    ("gemma", "model.layers.1.pre_feedforward_layernorm.weight", (2304,), "norm"),
    ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", (8, 4096), "router"),
    ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w1.weight", (14336, 4096), "gate"),
    ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight", (4096, 14336), "down"),
    ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w3.weight", (14336, 4096), "up"),
    ("gpt-oss", "model.layers.0.mlp.router.weight", (32, 2880), "router"),
    ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj_bias", (32, 5760), "bias"),
    ("phi", "model.layers.0.self_attn.dense.weight", (2560, 2560), "o"),
    ("phi", "model.layers.0.mlp.fc1.weight", (10240, 2560), "up"),
    ("phi", "model.layers.0.mlp.fc2.weight", (2560, 10240), "down"),
    ("phi3", "model.layers.0.self_attn.qkv_proj.weight", (9216, 3072), "qkv"),
    ("phi3", "model.layers.0.mlp.gate_up_proj.weight", (16384, 3072), "gate_up"),
    ("gpt2", "transformer.h.0.attn.c_attn.weight", (768, 2304), "qkv"),
    ("gpt2", "transformer.h.0.attn.c_proj.weight", (768, 768), "o"),
    ("gpt2", "transformer.h.0.mlp.c_fc.weight", (768, 3072), "up"),
    ("gpt2", "transformer.h.0.mlp.c_proj.weight", (3072, 768), "down"),
    ("gpt2", "transformer.h.0.ln_1.weight", (768,), "norm"),
    ("gpt2", "transformer.wte.weight", (50257, 768), "embedding"),
    ("gpt2", "transformer.wpe.weight", (1024, 768), "position"),
    ("neox", "gpt_neox.layers.0.attention.query_key_value.weight", (1536, 512), "qkv"),
    ("neox", "gpt_neox.layers.0.attention.dense.weight", (512, 512), "o"),
    ("neox", "gpt_neox.layers.0.mlp.dense_h_to_4h.weight", (2048, 512), "up"),
    ("neox", "gpt_neox.layers.0.mlp.dense_4h_to_h.weight", (512, 2048), "down"),
    ("neox", "gpt_neox.embed_in.weight", (50304, 512), "embedding"),
    ("neox", "embed_out.weight", (50304, 512), "head"),
    ("opt", "model.decoder.layers.0.self_attn.out_proj.weight", (768, 768), "o"),
    ("opt", "model.decoder.layers.0.fc1.weight", (3072, 768), "up"),
    ("opt", "model.decoder.embed_positions.weight", (2050, 768), "position"),
    ("opt", "model.decoder.layers.0.self_attn_layer_norm.weight", (768,), "norm"),
    ("bert", "bert.encoder.layer.0.attention.self.query.weight", (384, 384), "q"),
    ("bert", "bert.encoder.layer.0.attention.self.key.weight", (384, 384), "k"),
    ("bert", "bert.encoder.layer.0.attention.self.value.weight", (384, 384), "v"),
    ("bert", "bert.encoder.layer.0.attention.output.dense.weight", (384, 384), "o"),
    ("bert", "bert.encoder.layer.0.attention.output.LayerNorm.weight", (384,), "norm"),
    ("bert", "bert.encoder.layer.0.intermediate.dense.weight", (1536, 384), "up"),
    ("bert", "bert.encoder.layer.0.output.dense.weight", (384, 1536), "down"),
    ("bert", "bert.embeddings.word_embeddings.weight", (30522, 384), "embedding"),
    ("bert", "bert.embeddings.position_embeddings.weight", (512, 384), "position"),
    ("bert", "pooler.dense.weight", (384, 384), "other"),
    ("bert", "cls.predictions.decoder.weight", (30522, 384), "head"),
    ("vit", "vit.encoder.layer.0.attention.attention.query.weight", (192, 192), "q"),
    ("vit", "vit.encoder.layer.0.attention.output.dense.weight", (192, 192), "o"),
    ("vit", "vit.encoder.layer.0.layernorm_before.weight", (192,), "norm"),
    ("vit", "vit.embeddings.patch_embeddings.projection.weight", (192, 3, 16, 16), "conv"),
    ("vit", "vit.embeddings.position_embeddings", (1, 197, 192), "position"),
    ("vit", "classifier.weight", (1000, 192), "head"),
    ("whisper", "model.encoder.conv1.weight", (384, 80, 3), "conv"),
    ("whisper", "model.encoder.layers.0.self_attn.k_proj.weight", (384, 384), "k"),
    ("whisper", "model.decoder.layers.0.encoder_attn.out_proj.weight", (384, 384), "o"),
    ("whisper", "model.decoder.embed_positions.weight", (448, 384), "position"),
    ("whisper", "proj_out.weight", (51865, 384), "head"),
    ("t5", "encoder.block.0.layer.0.SelfAttention.q.weight", (512, 512), "q"),
    ("t5", "encoder.block.0.layer.0.SelfAttention.o.weight", (512, 512), "o"),
    ("t5", "encoder.block.0.layer.1.DenseReluDense.wi_0.weight", (1024, 512), "gate"),
    ("t5", "encoder.block.0.layer.1.DenseReluDense.wo.weight", (512, 1024), "down"),
    ("t5", "shared.weight", (32128, 512), "embedding"),
    ("unknown", "some.thing.weight", (10, 10), "other"),
    ("unknown", "alpha", (10,), "other"),
    ("unknown", "", (10, 10), "other"),
]


@pytest.mark.parametrize("family,name,shape,role", CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_role_follows_from_name_and_shape(family, name, shape, role) -> None:
    assert role in ROLES
    assert role_of(name, shape) == role


@pytest.mark.parametrize(
    "name,shape,module_type,role",
    [
        ("encoder.stem.weight", (64, 3, 7), "Conv1d", "conv"),
        ("h.0.attn.c_attn.weight", (768, 2304), "Conv1D", "qkv"),
        ("tokens.weight", (1000, 64), "Embedding", "embedding"),
        ("positions.position.weight", (1000, 64), "Embedding", "position"),
        ("final.weight", (64,), "LlamaRMSNorm", "norm"),
        ("lm_head.weight", (1000, 64), "Linear", "head"),
    ],
)
def test_the_module_type_decides_where_the_name_does_not(name, shape, module_type, role) -> None:
    assert role_of(name, shape, module_type) == role


def test_layer_is_the_first_number_of_the_name() -> None:
    assert layer_of("model.layers.12.mlp.experts.3.w1.weight") == 12
    assert layer_of("model.embed_tokens.weight") is None
