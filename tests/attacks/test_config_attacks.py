"""A small file whose config asks for a large model: one line, at once; and side files of the wrong types."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from small_llama import LLAMA, tensors

from nstf.errors import CorruptError, NstfError, UnsupportedError
from nstf.runtime import load, load_tokenizer
from nstf.runtime.artifact import write_artifact
from nstf.runtime.engine import Engine
from nstf_convert.cli import run

HUGE = (10**6, 2**31, 2**40, 2**64, -(2**40), 10**300)
# A hang is minutes; this only keeps the run from waiting for it.
PATIENCE_S = 30


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def expired(*_: object) -> None:
        raise AssertionError(f"not done after {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(path: Path) -> str:
    """The message, which must be one of ours from every way in, on one line."""
    messages = []
    for way in (lambda: load(path, engine="off"), lambda: Engine.open(path)):
        with pytest.raises(NstfError) as caught:
            way()
        messages.append(str(caught.value))
        assert messages[-1].isprintable() and len(messages[-1]) < 1000
    return messages[0]


def test_the_config_that_is_changed_here_is_good(made: Callable[..., Path]) -> None:
    path = made(LLAMA, generation_config=b'{"eos_token_id": [1, 2], "temperature": 0.7}')
    model: Any = load(path)
    ids = torch.tensor([[1, 2, 3]])
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= 6
    Engine.open(path)


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_labels", "num_classes", "vocab_size", "hidden_size", "intermediate_size",
            "num_attention_heads", "head_dim", "num_key_value_heads"],
)  # fmt: skip
def test_a_number_that_the_tensors_do_not_bear_out_is_refused(
    made: Callable[..., Path], key: str, value: int
) -> None:
    path = made({**LLAMA, key: value})
    with pytest.raises(
        CorruptError,
        match=f"config.json says .?{key}.? is .*(, and its tensors allow [0-9]+ at most|-[0-9]+; fetch)",
    ):
        load(path)
    if key not in ("num_labels", "num_classes"):
        refused(path)


# Numbers that nothing in LLAMA bounds by itself, in models that make something of them before the tensors are looked at.
OTHERS: dict[str, dict[str, Any]] = {
    "layers by another name": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 10**6},
    "positions, whose mask is their square": {
        "architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", "hidden_size": 32, "num_layers": 1,
        "num_heads": 2, "attention_types": [[["global"], 1]], "max_position_embeddings": 2**20,
    },
    "positions of angles": {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 32, "n_layer": 1, "n_head": 2,
        "rotary_dim": 16, "n_positions": 2**30,
    },
    "experts": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 1,
        "num_local_experts": 10**6,
    },
    "depths in a list": {
        "architectures": ["ResNetForImageClassification"], "model_type": "resnet", "depths": [10**7, 1, 1, 1],
    },
    "layers in a nested config": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 10**6},
    },
    "a thousand layers that are not there": {**LLAMA, "num_hidden_layers": 1000},
    "points, each in a list": {"architectures": ["DFineModel"], "model_type": "d_fine", "decoder_n_points": [2**30] * 3},
    "levels": {"architectures": ["Deimv2Model"], "model_type": "deimv2", "num_feature_levels": 2**31},
    "quantisers": {"architectures": ["MimiModel"], "model_type": "mimi", "num_quantizers": 65_536},
    "layers under a word that is not known": {
        "architectures": ["Cohere2MoeForCausalLM"], "model_type": "cohere2_moe", "num_hidden_layers": 1,
        "first_k_dense_replace": 2**30,
    },
    "cycles": {"architectures": ["HrmTextForCausalLM"], "model_type": "hrm_text", "H_cycles": 2**28},
    "a patch of no size, halved until it is odd": {
        "architectures": ["InklingVisionModel"], "model_type": "inkling_vision", "patch_size": 0,
    },
    "rows of nothing": {
        "architectures": ["VideoMAEModel"], "model_type": "videomae", "hidden_size": 0, "image_size": 7000,
        "patch_size": 1, "num_frames": 2, "tubelet_size": 2,
    },
    "labels as a list": {**LLAMA, "id2label": [1] * 100},
    "layers by the letters of a text": {**LLAMA, "hybrid_override_pattern": "M" * 100_000},
    "labels by the hundred thousand": {**LLAMA, "id2label": {str(i): str(i) for i in range(100_000)}},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_beyond_its_tensors_is_refused(made: Callable[..., Path], name: str) -> None:
    with pytest.raises(NstfError) as caught:
        load(made({**OTHERS[name], "architectures": OTHERS[name]["architectures"]}))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


@pytest.mark.parametrize("key", ["depths", "stage_num_blocks", "num_block_repeats", "numb_of_layers"])
def test_counts_of_a_list_are_bounded_together(made: Callable[..., Path], key: str) -> None:
    """Each of 90,000 depths was allowed, and a constructor made a table of their sum."""
    config = {
        "architectures": ["BitModel"],
        "model_type": "bit",
        "embedding_size": 8,
        "hidden_sizes": [16] * 4,
    }
    with pytest.raises(
        CorruptError, match=f"says '{key}' is 4194304 in all, and its tensors allow 1024 at most"
    ):
        load(made({**config, key: [1024] * 4096}))


def test_lists_are_no_longer_than_there_are_layers(made: Callable[..., Path]) -> None:
    """A class went through 20,000 ratios for each of a number of layers, another through all stages for each: minutes."""
    ratios = {"upsampling_ratios": [1] * 20_000, "num_residual_layers": 1000}
    with pytest.raises(CorruptError, match="by a list of 20000 values, and its tensors allow 4096 at most"):
        load(made({**LLAMA, **ratios}))
    load(made({**LLAMA, "label_names": ["x"] * 5000, "suppress_tokens": [1] * 5000, "ratios": [1] * 4096}))


@pytest.mark.parametrize(
    "stated", [{"id2label": {"0": "a" * 70_000}}, {"a" * 70_000: 1}, {"x": {"b" * 70_000: []}}]
)
def test_labels_and_keys_are_no_longer_than_other_texts(made: Callable[..., Path], stated: Any) -> None:
    with pytest.raises(CorruptError, match="by a text of 70000 letters, at most 65536"):
        load(made({**LLAMA, **stated}))


def test_layers_that_a_list_names_are_not_counted(made: Callable[..., Path]) -> None:
    load(made({**LLAMA, "moe_layers": list(range(100)), "num_attention_heads_per_layer": [64] * 100}))


@pytest.mark.parametrize(
    "key", ["seed", "created", "max_steps", "total_flos", "rope_theta", "model_max_length"]
)
def test_large_numbers_of_words_that_make_nothing_are_taken(made: Callable[..., Path], key: str) -> None:
    load(made({**LLAMA, key: 2_000_000_000}))


@pytest.mark.parametrize(
    "key", ["train_num_points", "head_out_channels"]
)  # Mask2Former's, and of PP-OCR's recognisers
def test_numbers_of_default_configs_that_count_nothing_are_taken(made: Callable[..., Path], key: str) -> None:
    load(made({**LLAMA, key: 12_544}))


RAW = {
    "nested deeply": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "nested 1,000 deep": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "lists nested 1,000 deep": b'{"architectures":' + b"[" * 1000 + b"]" * 1000 + b"}",
    "not JSON": b"{",
    "not UTF-8": b'{"a": "\xff"}',
    "a list": b"[]",
    "an integer of 5,000 digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "another object": b'{"architectures": 5, "model_type": []}',
    "numbers for names": b'{"architectures": [5], "model_type": 5}',
    "empty": b"",
}


@pytest.mark.parametrize("name", RAW)
def test_a_config_that_is_none_is_refused_everywhere(made: Callable[..., Path], name: str) -> None:
    from nstf_convert.cli import run

    path = made(RAW[name])
    refused(path)
    for words in (["inspect", str(path)], ["generate", str(path), "hello"]):
        assert run(words) in (0, 5, 6), words


@pytest.mark.parametrize(
    ("key", "value"),
    [("eos_token_id", "x"), ("eos_token_id", ["x"]), ("eos_token_id", []),
     ("eos_token_id", 2**70), ("pad_token_id", 1.5), ("temperature", "x"),
     ("temperature", [1]), ("top_k", 1.5), ("top_k", True), ("top_p", {}), ("do_sample", "yes"), ("max_length", -5),
     ("max_new_tokens", "x"), ("num_beams", 10**400), ("repetition_penalty", "x"), ("use_cache", 3)],
)  # fmt: skip
def test_a_generation_config_of_wrong_types_is_refused_at_load(
    made: Callable[..., Path], key: str, value: Any
) -> None:
    path = made(LLAMA, generation_config=json.dumps({key: value}).encode())
    with pytest.raises(CorruptError, match=f"generation_config.json says {key} is .*, expected"):
        load(path)


# Llama's class declares none of these: transformers would stumble over them at the first token.
@pytest.mark.parametrize(
    ("key", "value"),
    [("sliding_window", [1]), ("sliding_window", "4096"), ("sliding_window", 2**64), ("attention_chunk_size", 0.5),
     ("is_causal", 1), ("output_hidden_states", "yes"), ("kv_sharing_modes", 3)],
)  # fmt: skip
def test_a_config_of_wrong_types_is_refused_at_load(made: Callable[..., Path], key: str, value: Any) -> None:
    with pytest.raises(CorruptError, match=f"config.json says {key} is .*, expected"):
        load(made({**LLAMA, key: value}))


@pytest.mark.parametrize("value", [10**30, 2**32 + 1, -5, 2.5, "2", [2, 10**30], [[2]]], ids=str)
@pytest.mark.parametrize("key", ["eos_token_id", "pad_token_id", "decoder_start_token_id", "image_token_ids"])
def test_what_is_no_token_is_refused_from_every_way_in(
    made: Callable[..., Path], key: str, value: Any
) -> None:
    """transformers met it in the middle of a text, or each JSON schema was refused for it."""
    assert f"config.json says {key} is" in refused(made({**LLAMA, key: value}))


def test_tokens_that_are_none_are_no_reason_to_refuse(made: Callable[..., Path]) -> None:
    load(
        made(
            {**LLAMA, "pad_token_id": -1, "eos_token_id": [1, 2], "bos_token_id": None, "image_token_ids": []}
        )
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", -1), ("eos_token_id", []), ("attention_chunk_size", -1), ("sliding_window", -2)],
)
def test_a_config_of_fewer_than_none_is_refused_at_load(
    made: Callable[..., Path], key: str, value: Any
) -> None:
    with pytest.raises(CorruptError, match=key):
        load(made({**LLAMA, key: value}))


def test_what_calls_give_back_is_not_for_a_file_to_say(made: Callable[..., Path]) -> None:
    model: Any = load(made({**LLAMA, "return_dict": False}))
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 64)


def test_control_characters_of_a_file_do_not_reach_a_message(made: Callable[..., Path]) -> None:
    path = made({**LLAMA, "architectures": ["a\x1b[31m\nb"]})
    with pytest.raises(NstfError) as caught:
        load(path)
    assert str(caught.value).isprintable() and "x1b[31m" in str(caught.value)


def test_settings_that_say_off_or_are_whole_are_taken(made: Callable[..., Path]) -> None:
    path = made(LLAMA, generation_config=b'{"eos_token_id": 2, "top_k": -1, "max_new_tokens": 8.0}')
    model: Any = load(path)
    assert model.generation_config.max_new_tokens == 8 and model.generation_config.top_k != -1
    Engine.open(path)


def test_a_table_over_more_positions_than_the_file_holds_is_not_filled() -> None:
    # It would be filled by a loop in Python: minutes, and gigabytes.
    from nstf.runtime.artifact.config import Limits
    from nstf.runtime.skeleton import build_skeleton

    config = {
        "model_type": "distilbert", "architectures": ["DistilBertModel"], "dim": 8, "n_heads": 2, "n_layers": 1,
        "hidden_dim": 16, "vocab_size": 30, "max_position_embeddings": 10**7, "sinusoidal_pos_embds": True,
    }  # fmt: skip
    with pytest.raises(NstfError, match="beyond the file's tensors"):
        build_skeleton(config, limits=Limits(20, 64, 100_000))


@pytest.mark.parametrize("kind", ["M2M100", "Speech2Text", "XGLM"])
def test_a_product_of_positions_and_frequencies_is_within_the_limit(kind: str) -> None:
    # Each has one factor of 2^22 and one of 32 elements: no single call fills more than the limit of 2^24.
    from nstf.runtime.artifact.config import Limits
    from nstf.runtime.skeleton import build_skeleton

    positions = {"M2M100": "max_position_embeddings", "Speech2Text": "max_source_positions"}
    config = {
        "model_type": {"M2M100": "m2m_100", "Speech2Text": "speech_to_text"}.get(kind, "xglm"),
        "architectures": [f"{kind}Model"], "d_model": 64, "vocab_size": 30, "encoder_layers": 1, "decoder_layers": 1,
        "num_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "attention_heads": 2,
        "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "ffn_dim": 8, positions.get(kind, "max_position_embeddings"): 2**22,
    }  # fmt: skip
    with pytest.raises(NstfError, match=r"it makes a tensor of 134217[0-9]+ elements"):
        build_skeleton(config, limits=Limits(20, 64, 100_000))


def test_a_constructor_fetches_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a machine with a GPU, ninja and the package kernels, RWKV's asks the hub for code.
    from transformers.integrations import hub_kernels
    from transformers.models.rwkv import modeling_rwkv

    from nstf.runtime.skeleton import build_skeleton

    asked: list[str] = []
    for name in ("is_ninja_available", "is_torch_cuda_available", "is_kernels_available"):
        monkeypatch.setattr(modeling_rwkv, name, lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: asked.append(name))
    sizes = {"hidden_size": 8, "attention_hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 2}
    build_skeleton({"model_type": "rwkv", "architectures": ["RwkvModel"], **sizes})
    assert asked == []


# transformers takes a backbone's name for a repository, whose config it reads.
BACKBONES: dict[str, dict[str, Any]] = {
    "UperNetForSemanticSegmentation": {"model_type": "upernet"},
    "DPTForDepthEstimation": {"model_type": "dpt", "is_hybrid": False},
    "DetrForObjectDetection": {"model_type": "detr", "backbone_kwargs": {"out_indices": [1]}},
    "DepthAnythingForDepthEstimation": {"model_type": "depth_anything"},
}


@pytest.mark.parametrize("kind", BACKBONES)
def test_no_repository_of_a_backbones_name_is_looked_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    import huggingface_hub.constants

    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **_: asked.append(where) or [])
    config = {"architectures": [kind], "backbone": "gpt2", **BACKBONES[kind]}
    path = tokenizer(tmp_path / "m.nstf", config, {})
    nested = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": config,
    }
    inside = tokenizer(tmp_path / "n.nstf", nested, {})
    for opened in (load, load_tokenizer):
        for file in (path, inside):
            with suppress(NstfError):
                opened(file)
    assert asked == []


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("inside", [False, True])
def test_exports_hand_on_no_name_that_is_asked_for_on_the_hub(
    kind: str, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    config = {"architectures": [kind], "backbone": "gpt2", **BACKBONES[kind]}
    if inside:
        llava = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
        config = {**llava, "vision_config": config}
    path = tokenizer(tmp_path / "m.nstf", config, {})
    assert run(["export", str(path), "-o", str(tmp_path / "out")]) == 0
    asked = asked_of_the_hub(monkeypatch)
    found = AutoConfig.from_pretrained(tmp_path / "out")
    assert asked == []
    own = found.vision_config if inside else found
    # The name stays where nothing is asked for by it.
    assert own.backbone_config.model_type == "timm_backbone" and own.backbone_config.backbone == "gpt2"


def asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of backbones that transformers asks the hub for from now on."""
    import huggingface_hub.constants
    from transformers import backbone_utils

    asked: list[str] = []

    class Hub:
        def repo_exists(self, name: str, **_: Any) -> bool:
            asked.append(name)
            return False

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(backbone_utils, "hf_api", Hub, raising=False)
    monkeypatch.setattr(backbone_utils, "repo_exists", lambda name, **_: asked.append(name), raising=False)
    return asked


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "timm_backbone", "architectures": ["UperNetForSemanticSegmentation"], "backbone": "gpt2"},
        {"model_type": "sam3", "architectures": ["Sam3Model"],
         "vision_config": {"model_type": "timm_backbone", "backbone": "gpt2"}},
    ],
)  # fmt: skip
def test_that_a_config_is_timms_is_not_its_own_word(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class that an export names for it, and sam3's own, made another config of it, and asked the hub for the name."""
    import transformers

    path = tokenizer(tmp_path / "m.nstf", config, {})
    assert run(["export", str(path), "-o", str(tmp_path / "out")]) == 0
    asked = asked_of_the_hub(monkeypatch)
    named: Any = getattr(transformers, config["architectures"][0])
    for kind in (named.config_class, transformers.AutoConfig):
        kind.from_pretrained(tmp_path / "out")
    assert asked == []
    own = {**config, "architectures": ["TimmBackbone"], "model_type": "timm_backbone", "backbone": "gpt2"}
    path = tokenizer(tmp_path / "own.nstf", own, {})
    assert run(["export", str(path), "-o", str(tmp_path / "own")]) == 0
    assert json.loads((tmp_path / "own" / "config.json").read_text())["backbone"] == "gpt2"


def tokenizer(path: Path, config: dict[str, Any], settings: dict[str, Any]) -> Path:
    """An artifact with the tokenizer of the example, and this tokenizer_config.json."""
    content = Path(__file__).parents[2] / "examples" / "tiny_llama" / "model" / "tokenizer.json"
    files = {"config.json": json.dumps(config).encode(), "tokenizer.json": content.read_bytes()}
    write_artifact(path, tensors(), {**files, "tokenizer_config.json": json.dumps(settings).encode()})
    return path


def test_a_tokenizer_is_not_built_beside_a_config_that_the_tensors_do_not_bear_out(tmp_path: Path) -> None:
    # transformers makes the config of the model for the class of its tokenizer: minutes and gigabytes of labels.
    path = tokenizer(tmp_path / "m.nstf", {**LLAMA, "num_labels": 10**7}, {})
    with pytest.raises(CorruptError, match="10000000, and its tensors allow"):
        load_tokenizer(path)


def test_keys_that_lead_to_code_or_to_files_do_not_reach_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    seen: dict[str, Any] = {}

    def look(folder: str, **_: Any) -> None:
        seen.update({f.name: json.loads(f.read_text()) for f in Path(folder).iterdir()})

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", look)
    code = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "_name_or_path": "evil/model"}
    settings = {
        **code,
        "vocab_file": "/etc/passwd",
        "sp_model_kwargs": {"model_file": "/etc/passwd"},
        "pad_token": "/",
    }
    load_tokenizer(tokenizer(tmp_path / "m.nstf", {**LLAMA, **code, "quantization_config": {}}, settings))
    assert seen["config.json"] == LLAMA
    assert seen["tokenizer_config.json"] == {"sp_model_kwargs": {}, "pad_token": "/"}


def test_lists_of_settings_by_layer_are_not_taken_for_layers(made: Callable[..., Path]) -> None:
    load(made({**LLAMA, "layer_rope_theta": [1e7, 5e5]}))


# Sizes whose key says nothing of one: a channel, the square of a reduction, a table that is looked up nowhere.
UNNAMED: dict[str, dict[str, Any]] = {
    "channels": {"architectures": ["VJEPA2Model"], "model_type": "vjepa2", "hidden_size": 32, "in_chans": 2**20},
    "reductions": {"architectures": ["GLPNModel"], "model_type": "glpn", "sr_ratios": [65536] * 4},
    "a grid": {
        "architectures": ["Sam2VideoModel"], "model_type": "sam2_video",
        "memory_attention_rope_feat_sizes": [65536, 65536],
    },
    "sinusoids by lists of Python": {
        "architectures": ["VideoMAEModel"], "model_type": "videomae", "image_size": 4096, "patch_size": 1, "hidden_size": 32,
        "num_attention_heads": 2, "num_hidden_layers": 1, "num_frames": 16, "tubelet_size": 2,
    },
    "sinusoids of a part": {
        "architectures": ["VisionEncoderDecoderModel"], "model_type": "vision-encoder-decoder",
        "encoder": {
            "model_type": "videomae", "image_size": 4096, "patch_size": 1, "hidden_size": 32, "num_attention_heads": 2,
            "num_hidden_layers": 1, "num_frames": 16, "tubelet_size": 2,
        },
        "decoder": {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1},
    },
    "sinusoids of XLM": {
        "architectures": ["XLMModel"], "model_type": "xlm", "emb_dim": 32, "n_heads": 2, "n_layers": 1,
        "max_position_embeddings": 2**16, "sinusoidal_embeddings": True,
    },
    "a Fourier transform's matrix": {
        "architectures": ["FNetModel"], "model_type": "fnet", "hidden_size": 32, "num_hidden_layers": 1,
        "use_tpu_fourier_optimizations": True, "tpu_short_seq_length": 65536,
    },
    "a stacked grid, which takes no memory before": {
        "architectures": ["Swinv2Model"], "model_type": "swinv2", "embed_dim": 16, "depths": [1], "num_heads": [2],
        "image_size": 65536, "patch_size": 1, "window_size": 65536,
    },
    "a grid of anchors": {
        "architectures": ["RTDetrForObjectDetection"], "model_type": "rt_detr", "d_model": 32, "encoder_hidden_dim": 32,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "num_queries": 4, "anchor_image_size": [65536, 65536], "feat_strides": [1, 1, 1],
        "encoder_in_channels": [16] * 3, "decoder_in_channels": [32] * 3,
        "backbone_config": {
            "model_type": "rt_detr_resnet", "depths": [1] * 4, "hidden_sizes": [16] * 4, "embedding_size": 8,
            "out_features": ["stage2", "stage3", "stage4"], "layer_type": "basic",
        },
    },
    "a table for each of many layers": {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "vocab_size": 64, "n_embd": 64, "n_layer": 60,
        "n_head": 4, "rotary_dim": 16, "n_positions": 2**20,
    },
    "masks of many layers": {
        "architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", "vocab_size": 64, "hidden_size": 32,
        "num_layers": 60, "num_heads": 2, "attention_types": [[["global", "local"], 30]], "intermediate_size": 64,
        "max_position_embeddings": 4096,
    },
    "positions": {
        "architectures": ["Qwen3_5MoeVisionModel"], "model_type": "qwen3_5_moe_vision", "num_position_embeddings": 2**31,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", UNNAMED)
def test_memory_that_no_tensor_of_the_file_takes_is_not_asked_for(
    made: Callable[..., Path], name: str
) -> None:
    """Such a file ended as if this machine had too little memory."""
    with pytest.raises(UnsupportedError, match="beyond the file's tensors"):
        load(made(UNNAMED[name]))


def test_a_default_device_of_the_process_is_not_the_models(made: Callable[..., Path]) -> None:
    path, ids = made(LLAMA), torch.tensor([[1, 2, 3]])
    wanted: Any = load(path)
    torch.set_default_device("meta")
    try:
        found: Any = load(path)
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, wanted(ids).logits)
