"""The meta skeleton against the same model constructed as usual."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nstf.errors import UnsupportedError
from nstf.runtime.skeleton import build_skeleton, exported, parameter_names, tied_aliases

ARCHITECTURES = (
    "LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM", "BertModel",
    "BertForMaskedLM", "GPT2LMHeadModel", "ViTForImageClassification", "ResNetForImageClassification",
    "WhisperForConditionalGeneration",
)  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_on_meta_and_buffers_have_their_values(tiny: ModuleType, architecture: str) -> None:
    usual = tiny.new_model(architecture)
    skeleton = build_skeleton(tiny.config_json(usual))
    assert type(skeleton) is type(usual) and not skeleton.training
    found = {n: (p.shape, p.dtype) for n, p in skeleton.named_parameters(remove_duplicate=False)}
    expected = {n: (p.shape, p.dtype) for n, p in usual.named_parameters(remove_duplicate=False)}
    assert found == expected
    assert all(p.device.type == "meta" for p in skeleton.parameters())
    buffers = dict(skeleton.named_buffers())
    assert buffers.keys() == dict(usual.named_buffers()).keys()
    for name, buffer in usual.named_buffers():
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name


def test_building_a_large_model_takes_no_memory(tiny: ModuleType) -> None:
    import resource

    config = tiny.config_json(tiny.new_model("LlamaForCausalLM"))
    config |= {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "vocab_size": 128256,
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    skeleton = build_skeleton(config)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(p.numel() for p in skeleton.parameters()) > 800_000_000
    assert (after - before) * 1024 < 200e6


def test_modules_built_afterwards_have_real_parameters(tiny: ModuleType) -> None:
    build_skeleton(tiny.config_json(tiny.new_model("LlamaForCausalLM")))
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
    assert torch.get_default_dtype() == torch.float32


def test_tied_names_point_at_the_stored_one(tiny: ModuleType) -> None:
    tied = build_skeleton(tiny.config_json(tiny.new_model("LlamaForCausalLM")))
    assert tied_aliases(tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in parameter_names(tied)
    config = {**tiny.config_json(tiny.new_model("LlamaForCausalLM")), "tie_word_embeddings": False}
    assert tied_aliases(build_skeleton(config)) == {}


def test_without_an_architecture_the_model_type_decides(tiny: ModuleType) -> None:
    config = tiny.config_json(tiny.new_model("LlamaForCausalLM"))
    del config["architectures"]
    assert type(build_skeleton(config)).__name__ == "LlamaForCausalLM"
    assert type(build_skeleton(config, "LlamaModel")).__name__ == "LlamaModel"


def test_the_default_dtype_is_that_asked_for(tiny: ModuleType) -> None:
    config = tiny.config_json(tiny.new_model("LlamaForCausalLM"))
    model = build_skeleton(config, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}  # rotary frequencies stay exact


@pytest.mark.parametrize(
    "name",
    ["NoSuchModelForCausalLM", "AutoModel", "PreTrainedModel", "LlamaPreTrainedModel", "os", 7, "a" * 200],
)
def test_an_unknown_architecture_is_refused_with_what_to_do(name: object) -> None:
    with pytest.raises(UnsupportedError, match="load_tensors"):
        build_skeleton({"model_type": "llama", "architectures": [name]})


def test_an_unknown_model_type_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'nosuch' is not known"):
        build_skeleton({"model_type": "nosuch"})


def test_a_config_that_makes_no_sense_is_refused_in_one_line(tiny: ModuleType) -> None:
    config = {**tiny.config_json(tiny.new_model("LlamaForCausalLM")), "num_attention_heads": "many"}
    with pytest.raises(UnsupportedError, match="cannot build LlamaForCausalLM from this config") as caught:
        build_skeleton(config)
    assert "\n" not in str(caught.value)


def test_code_named_in_the_config_is_never_imported(tiny: ModuleType, tmp_path: Path) -> None:
    config = tiny.config_json(tiny.new_model("LlamaForCausalLM"))
    config |= {
        "auto_map": {"AutoModelForCausalLM": "evil--evil.Evil"},
        "quantization_config": {"quant_method": "x"},
    }
    assert type(build_skeleton(config)).__name__ == "LlamaForCausalLM"


def test_names_in_a_file_import_nothing_but_models_and_their_inputs() -> None:
    """transformers imports the module of any name that it is asked for."""
    code = (
        "import json, sys; from nstf.errors import UnsupportedError\n"
        "from nstf.runtime.skeleton import build_skeleton\n"
        "from nstf.runtime.tokenizer_files import tokenizer_from_files\n"
        "from transformers import AutoTokenizer; before = set(sys.modules)\n"
        "for name in sys.argv[1:]:\n"
        "    settings = {'tokenizer_config.json': json.dumps({'tokenizer_class': name}).encode()}\n"
        "    for call in (lambda: build_skeleton({'model_type': 'llama', 'architectures': [name]}),\n"
        "                 lambda: tokenizer_from_files(settings, 'x')):\n"
        "        try: call(); sys.exit(name + ' was taken')\n"
        "        except UnsupportedError: pass\n"
        "new = set(sys.modules) - before\n"
        "sys.exit(' '.join(sorted(m for m in new if m.startswith(('transformers.trainer', 'transformers.pipelines',\n"
        "    'transformers.training_args', 'transformers.integrations.integration_utils',\n"
        "    'transformers.models.rag', 'transformers.models.diffusion_gemma')))) or 0)\n"
    )
    names = [
        *("Trainer", "TextGenerationPipeline", "pipelines", "trainer", "TrainingArguments"),
        *("RagRetriever", "EntropyBoundSampler", "get_values"),  # beside models, and none
    ]
    words = [sys.executable, "-c", code, *names]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_transformers_has_for_models_is_found() -> None:
    for name in ("LlamaForCausalLM", "LlamaConfig", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "ProcessorMixin",
                 "WhisperFeatureExtractor", "CLIPImageProcessor", "BaseImageProcessor", "PreTrainedModel"):  # fmt: skip
        assert isinstance(exported(name), type), name


@pytest.mark.parametrize("stated", ["float32", "bfloat16"])
def test_models_inside_of_others_are_built_in_the_wanted_type(stated: str) -> None:
    """MiniMax' classifier had its decays in the type of its config, and could not be run in another."""
    config = {
        "model_type": "minimax", "architectures": ["MiniMaxForSequenceClassification"], "dtype": stated, "vocab_size": 50,
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "pad_token_id": 0,
    }  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        buffers = dict(build_skeleton(config, dtype=dtype).named_buffers())
        decays = [value.dtype for name, value in buffers.items() if "decay" in name or "slope" in name]
        assert decays == [dtype] * 4
