"""GGUF files give back the model they were written from."""

import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.ggml import _gguf_parse_value

from nstf.errors import CorruptError, UnsupportedError
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.checkpoint.gguf_arch import Metadata, llama3_rope
from nstf_convert.checkpoint.gguf_check import read_header
from nstf_convert.checkpoint.gguf_reader import header_for_transformers
from tests.nstf_convert.checkpoint.conftest import tiny
from tests.nstf_convert.checkpoint.gguf_files import ggml_tensors, metadata_of, state, write

LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 2.0, "beta_slow": 0.01,
}  # fmt: skip
YARN_KEYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 2.0, "rope.scaling.yarn_beta_slow": 0.01,
}  # fmt: skip
PHI3 = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}, {}),
    "llama-tied": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}, {"rope.dimension_count": 8}),
    "llama-biased": ("llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, {}),
    "mixtral": (
        "llama",
        "MixtralForCausalLM",
        {"num_local_experts": 4},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}, {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"head_dim": 16}, {"attention.key_length": 16}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "head_dim": 16, "norm_topk_prob": True},
        {**EXPERT_KEYS, "attention.key_length": 16},
    ),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "shared_expert_intermediate_size": 40},
        {**EXPERT_KEYS, "expert_shared_feed_forward_length": 40},
    ),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
        {
            "attention.key_length": 16,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 7},
        {"attention.key_length": 16, "attention.sliding_window": 8},
    ),
    "phi3": ("phi3", "Phi3ForCausalLM", PHI3, {"attention.sliding_window": 0}),
    "phi3-sliding": (
        "phi3",
        "Phi3ForCausalLM",
        PHI3 | {"sliding_window": 8},
        {"attention.sliding_window": 8},
    ),
    "linear": ("llama", "LlamaForCausalLM", LINEAR, {"rope.scaling.factor": 4.0}),
    "linear-of-2023": ("llama", "LlamaForCausalLM", LINEAR, {"rope.scale_linear": 4.0}),
    "yarn": ("qwen2", "Qwen2ForCausalLM", {"rope_parameters": YARN}, YARN_KEYS),
    "qwen3-biased": (
        "qwen3",
        "Qwen3ForCausalLM",
        {"head_dim": 16, "attention_bias": True},
        {"attention.key_length": 16},
    ),
}


def randomised(class_name: str, settings: dict[str, Any]) -> Any:
    """A tiny model whose norms are not all ones either."""
    model = tiny(class_name, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("case", MODELS)
def test_tensors_and_logits_are_those_of_the_original(tmp_path: Path, case: str) -> None:
    arch, class_name, settings, keys = MODELS[case]
    model = randomised(class_name, settings)
    path = write(tmp_path / "m.gguf", arch, ggml_tensors(model, arch), {**metadata_of(model), **keys})
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.kind, checkpoint.architecture) == ("gguf", class_name), checkpoint.notes
        expected = state(model)
        assert set(checkpoint.names()) | set(checkpoint.ties) == set(expected)
        for name in expected:
            # Gemma's norms went through 1 + w in float32.
            torch.testing.assert_close(checkpoint.get(name), expected[name], rtol=0, atol=2e-7)
        assert checkpoint.config is not None
        rebuilt = getattr(transformers, class_name)(
            type(model.config).from_dict(dict(checkpoint.config))
        ).eval()
        rebuilt.load_state_dict({name: checkpoint.get(name) for name in expected})
    ids = torch.arange(24)[None] % 96
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_biases_that_the_class_does_not_add_leave_a_file_without_a_model(tmp_path: Path) -> None:
    model = randomised("LlamaForCausalLM", {"attention_bias": True})
    tensors = {n: t for n, t in ggml_tensors(model, "llama").items() if "output.bias" not in n}
    with open_checkpoint(write(tmp_path / "m.gguf", "llama", tensors, metadata_of(model))) as checkpoint:
        assert checkpoint.architecture is None and "blk.0.attn_q.bias" in checkpoint.names()
        assert "proj.bias' has no place in LlamaForCausalLM" in checkpoint.notes[0]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_blocks_come_as_float32_rounded_to_bfloat16(tmp_path: Path, kind: str) -> None:
    model = randomised("LlamaForCausalLM", {"intermediate_size": 64})
    quantised = gguf.GGMLQuantizationType[kind]
    tensors = ggml_tensors(model, "llama")
    path = write(tmp_path / "m.gguf", "llama", tensors, metadata_of(model), quantised)
    with open_checkpoint(path) as checkpoint:
        parameters = sum(t.numel() for t in state(model).values())
        assert checkpoint.total_bytes == 2 * parameters
        for name in checkpoint.names():
            info, value = checkpoint.info(name), checkpoint.get(name)
            assert (info.dtype, value.dtype, info.size_bytes) == (
                "bfloat16",
                torch.float32,
                2 * value.numel(),
            )
            assert torch.equal(value, value.bfloat16().float())
        stored = gguf.dequantize(gguf.quantize(tensors["blk.1.ffn_up.weight"], quantised), quantised)
        expected = torch.from_numpy(stored).bfloat16().float()
        assert torch.equal(checkpoint.get("model.layers.1.mlp.up_proj.weight"), expected)


@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "float16"), (np.float32, "float32")])
def test_plain_files_keep_their_dtypes(tmp_path: Path, dtype: Any, name: str) -> None:
    model = tiny("LlamaForCausalLM")
    tensors = {k: v.astype(dtype) if v.ndim > 1 else v for k, v in ggml_tensors(model, "llama").items()}
    path = write(tmp_path / "m.gguf", "llama", tensors, metadata_of(model))
    with open_checkpoint(path) as checkpoint:
        matrix, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
        assert checkpoint.info(matrix).dtype == name
        assert checkpoint.get(matrix).dtype == getattr(torch, name)
        assert checkpoint.info(norm).dtype == "float32"


def test_a_big_table_is_dequantised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf_convert.checkpoint import gguf as reader

    model = randomised("LlamaForCausalLM", {"vocab_size": 1000, "intermediate_size": 64})
    path = write(
        tmp_path / "m.gguf",
        "llama",
        ggml_tensors(model, "llama"),
        metadata_of(model),
        gguf.GGMLQuantizationType.Q8_0,
    )
    with open_checkpoint(path) as checkpoint:
        whole = checkpoint.get("model.embed_tokens.weight")
    sizes: list[int] = []
    dequantize = gguf.dequantize

    def watched(data: Any, kind: Any) -> Any:
        sizes.append(len(data))
        return dequantize(data, kind)

    monkeypatch.setattr(gguf, "dequantize", watched)
    monkeypatch.setattr(reader, "PIECE_VALUES", 32 * 64)
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint.get("model.embed_tokens.weight"), whole)
    assert sizes == [64] * 15 + [40]


def test_transformers_reads_the_same_of_a_checked_header_as_of_the_file(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "\u0120b", "<s>"],
        "tokenizer.ggml.scores": [0.5, -1.25, 3.0], "a.numbers": [1, -2, 3], "a.yes": True, "a.third": 1 / 3,
    }  # fmt: skip
    tensors = {
        "output.weight": np.ones((4, 32), np.float32),
        "token_embd.weight": np.ones((2, 32), np.float32),
    }
    path = write(tmp_path / "m.gguf", "llama", tensors, keys)
    own = gguf.GGUFReader(path)
    with header_for_transformers(read_header(path)):
        given = gguf.GGUFReader(path)
    assert type(gguf.GGUFReader(path)) is type(own)
    assert [t.name for t in given.tensors] == [t.name for t in own.tensors]
    for name, field in own.fields.items():
        if not name.startswith("GGUF."):
            found = given.fields[name]
            values = [[_gguf_parse_value(f.parts[i], f.types) for i in f.data] for f in (field, found)]
            assert values[0] == values[1], name
            assert field.parts[0] == found.parts[0]


def test_long_arrays_of_numbers_are_no_transformers_business(tmp_path: Path) -> None:
    """It makes lists of all that it is shown; of numbers it needs one for each token."""
    keys = {
        "tokenizer.ggml.tokens": ["a"] * 5000,
        "tokenizer.ggml.scores": [1.0] * 5000,
        "a.numbers": [1] * 5001,
    }
    path = write(tmp_path / "m.gguf", "llama", {"output.weight": np.ones((4, 32), np.float32)}, keys)
    with header_for_transformers(read_header(path)):
        fields = gguf.GGUFReader(path).fields
    assert "llama.a.numbers" not in fields and len(fields["tokenizer.ggml.scores"].data) == 5000


def test_one_number_for_every_layer_counts_as_one() -> None:
    for values, found in ((array("I", [4] * 99), 4), ([4, 4], 4), (array("I", [4, 5] * 99), None)):
        meta = Metadata({"general.architecture": "llama", "llama.x": values}, {}, "m.gguf")
        if found:
            assert meta.integer("x") == found
        else:
            with pytest.raises(
                UnsupportedError, match=r"llama\.x is \S*\[4, 5, 4, .*expected one number for all layers"
            ):
                meta.integer("x")


def test_a_header_for_one_thread_is_no_other_threads(tmp_path: Path) -> None:
    """One that put back what another had set would have left its header to every file."""
    matrix = {"output.weight": np.ones((4, 32), np.float32)}
    first, second = (write(tmp_path / f"{n}.gguf", "llama", matrix, {"number": n}) for n in (1, 2))
    own, entered = gguf.GGUFReader, threading.Event()

    def number(reader: Any) -> int:
        return int(reader.fields["llama.number"].parts[-1][0])

    def other() -> int:
        with header_for_transformers(read_header(second)):
            entered.set()
            return number(gguf.GGUFReader(first))

    with ThreadPoolExecutor(2) as pool:
        with header_for_transformers(read_header(first)):
            waiting = pool.submit(other)
            assert pool.submit(lambda: number(gguf.GGUFReader(second))).result(30) == 2
            assert number(gguf.GGUFReader(second)) == 1 and not entered.wait(0.2)
        assert waiting.result(30) == 2
    assert gguf.GGUFReader is own


def test_an_unknown_architecture_keeps_the_names_of_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf", "novel", {"blk.0.thing.weight": np.ones((4, 32), np.float32)}, {"block_count": 1}
    )
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.config, checkpoint.names()) == (None, ["blk.0.thing.weight"])
        assert "GGUF architecture 'novel' is unknown" in " ".join(checkpoint.notes)
        assert checkpoint.get("blk.0.thing.weight").sum() == 128
        assert checkpoint.files() == {}


def test_a_tensor_without_a_place_keeps_the_names_of_the_file(tmp_path: Path) -> None:
    model = tiny("LlamaForCausalLM")
    tensors = {**ggml_tensors(model, "llama"), "blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = write(tmp_path / "m.gguf", "llama", tensors, metadata_of(model))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config is None
        assert "'blk.0.attn_sinks.weight' has no place in LlamaForCausalLM" in " ".join(checkpoint.notes)
        assert "token_embd.weight" in checkpoint.names()


@pytest.mark.parametrize(
    "change",
    [
        {"attention.head_count": 5},
        {"attention.head_count": 0},
        {"rope.freq_base": -1.0},
        {"block_count": 3},
        {"feed_forward_length": 47},
        {"block_count": 1 << 31},
    ],
)
def test_metadata_that_contradicts_the_tensors_is_corrupt(tmp_path: Path, change: dict[str, Any]) -> None:
    model = tiny("LlamaForCausalLM")
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), {**metadata_of(model), **change})
    with pytest.raises(CorruptError, match=r"m\.gguf"):
        open_checkpoint(path)


def test_settings_that_no_config_can_state_leave_the_tensors_readable(tmp_path: Path) -> None:
    model = tiny("LlamaForCausalLM")
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    }
    changes = (
        {"rope.scaling.type": "novel"},
        {"attention.head_count": [4, 2]},
        # The config had these in a word that the class does not read, or left them out: another model.
        {"rope.dimension_count": model.config.head_dim // 2},
        yarn | {"rope.scaling.attn_factor": 0.5},
        yarn | {"rope.scaling.yarn_attn_factor": 0.5},
        yarn | {"rope.scaling.yarn_log_multiplier": 0.1},
    )
    for number, change in enumerate(changes):
        path = write(
            tmp_path / f"{number}.gguf",
            "llama",
            ggml_tensors(model, "llama"),
            {**metadata_of(model), **change},
        )
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config is None
            assert checkpoint.notes


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_stated(tmp_path: Path, kind: str) -> None:
    model = tiny("LlamaForCausalLM")
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), {**metadata_of(model), **keys})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config is not None
        rope = checkpoint.config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == (kind, 4.0)
    assert rope.get("original_max_position_embeddings") == (16 if kind == "yarn" else None)


def test_llama_3_rope_factors_become_their_config(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 8192
    model = tiny("LlamaForCausalLM", head_dim=64, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 1 / 5e5 ** (torch.arange(0, 64, 2) / 64)
    tensors = ggml_tensors(model, "llama")
    keys = {**metadata_of(model), "attention.key_length": 64}
    path = write(
        tmp_path / "a.gguf", "llama", {**tensors, "rope_freqs.weight": (plain / scaled).numpy()}, keys
    )
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config is not None
        assert checkpoint.config["rope_parameters"] == rope
    strange = np.linspace(1, 9, 32, dtype=np.float32)
    path = write(tmp_path / "b.gguf", "llama", {**tensors, "rope_freqs.weight": strange}, keys)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config is None
        assert "follow no rope scaling" in " ".join(checkpoint.notes)
    # Read whole, numbers of a MB took 220 times the file.
    ones = np.ones(1000, dtype=np.float32)
    path = write(tmp_path / "c.gguf", "llama", {**tensors, "rope_freqs.weight": ones}, keys)
    with open_checkpoint(path) as checkpoint:
        assert "are 1000 numbers, a head has 32 pairs" in " ".join(checkpoint.notes)


def test_factors_of_frequencies_where_layers_have_rules_of_their_own_are_no_scaling() -> None:
    rope = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    assert llama3_rope(rope, 16, [8.0] * 8) is None


def test_one_part_of_a_split_file_is_unsupported(tmp_path: Path) -> None:
    model = tiny("LlamaForCausalLM")
    keys = {**metadata_of(model), "split.count": 3}
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), keys)
    with pytest.raises(UnsupportedError, match="one part of a split GGUF; join the parts"):
        open_checkpoint(path)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = tiny("LlamaForCausalLM")
    tensors = ggml_tensors(model, "llama")
    tensors["output_norm.weight"][3] = np.nan
    path = write(tmp_path / "m.gguf", "llama", tensors, metadata_of(model))
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(CorruptError, match=r"m.gguf: tensor 'model.norm.weight' has 1 NaN"),
    ):
        checkpoint.get("model.norm.weight")


def test_a_tied_model_names_its_head(tmp_path: Path) -> None:
    model = tiny("LlamaForCausalLM", tie_word_embeddings=True)
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), metadata_of(model))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.ties == {"lm_head.weight": "model.embed_tokens.weight"}


def test_without_the_gguf_package_the_message_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from nstf.errors import NstfError

    path = write(tmp_path / "m.gguf", "novel", {"a": np.ones((1, 32), np.float32)}, {})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(NstfError, match=r"needs the package gguf; run `pip install gguf`"):
        open_checkpoint(path)
