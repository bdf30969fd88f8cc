"""config.json: what may pass, and what never does, however it is nested."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nstf.errors import CorruptError, UnsupportedError
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.checkpoint.config import filter_config, strip_code

HOSTILE: list[tuple[str, Any]] = [
    ("_attn_implementation_internal", "evil/kernel"),
    ("_attn_implementation", "evil/kernel"),
    ("_name_or_path", "evil/model"),
    ("_anything", 1),
    ("attn_implementation", "evil/kernel"),
    ("experts_implementation", "evil/kernel"),
    ("auto_map", {"AutoConfig": "evil.Config"}),
    ("trust_remote_code", True),
    ("custom_pipelines", {"x": {"impl": "evil.P"}}),
    ("rng_state", [1, 2, 3]),
    ("task_specific_params", {"x": {"prefix": "y"}}),
    ("name_or_path", "evil/model"),
    ("base_model_name_or_path", "evil/model"),
    ("kernel_config", {"a": "evil/kernel"}),
    ("use_kernels", True),
    ("tokenizer_file", "/etc/passwd"),
    ("hidden_act", "evil/act"),
    ("hidden_act", "https://evil"),
    ("hidden_act", "a b"),
    ("hidden_act", "x" * 200),
    ("unheard_of", "some-name"),
    ("unheard_of", ["some-name"]),
    ("unheard_of", {"path": "some-name"}),
    ("bad key with blanks", 3),
    ("__class__", 3),
    ("rope_parameters", {"rope_type": "../../x"}),
    ("rope_parameters", {"_x": 3}),
    ("rope_parameters", {"helper": "some-name"}),
    ("layer_types", [{"module": "some-name"}]),
    ("rope_parameters", {"nested": {"auto_map": 1}}),
]


@pytest.mark.parametrize(("key", "value"), HOSTILE)
def test_hostile_fields_do_not_pass(key: str, value: Any) -> None:
    config, dropped = filter_config({"model_type": "llama", "vocab_size": 10, key: value}, "config.json")
    text = json.dumps(config)
    assert not any(word in text for word in ("evil", "some-name", "passwd", "..", "_x", "auto_map", "_any"))
    assert any(name.split(".")[0] == key for name in dropped)
    assert config["vocab_size"] == 10


@pytest.mark.parametrize(("key", "value"), HOSTILE)
def test_hostile_fields_do_not_pass_in_a_sub_config(key: str, value: Any) -> None:
    raw = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 10, key: value}}
    config, dropped = filter_config(raw, "config.json")
    text = json.dumps(config)
    assert not any(word in text for word in ("evil", "some-name", "passwd", "..", "_x", "auto_map", "_any"))
    assert any(name.startswith(f"text_config.{key}") for name in dropped)
    assert config["text_config"]["vocab_size"] == 10


def test_no_text_of_a_kind_of_model_that_transformers_lacks_passes() -> None:
    raw = {
        "model_type": "newnet",
        "helper": "some-name",
        "inner": {"model_type": "newer", "run": "some-name"},
        "width": 8,
    }
    config, dropped = filter_config(raw, "config.json")
    assert config == {"model_type": "newnet", "inner": {"model_type": "newer"}, "width": 8}
    assert dropped == ["helper", "inner.run"]


def test_everything_transformers_writes_for_a_plain_model_passes(make_folder: Callable[..., Path]) -> None:
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "BertModel", "MixtralForCausalLM"):
        folder = make_folder(name, name)
        raw = json.loads((folder / "config.json").read_text())
        config, dropped = filter_config(raw, "config.json")
        assert (config, dropped) == (raw, [])


def test_older_spellings_pass() -> None:
    raw = {
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
        "torch_dtype": "bfloat16",
        "unheard_of_number": 3,
        "unheard_of_list": [1, 2.5, None, True],
        "id2label": {"0": "a label / with anything"},
        "time_step_limit": [0.0, float("inf")],
    }
    config, dropped = filter_config(raw, "config.json")
    assert (config, dropped) == (raw, [])


def test_text_that_only_the_modeling_file_of_deberta_reads_passes(tmp_path: Path) -> None:
    """As microsoft/deberta-v3-base states it: without these two there is neither a norm nor attention by positions."""
    import torch
    import transformers

    stated = {"norm_rel_ebd": "layer_norm", "pos_att_type": "p2c|c2p", "conv_act": "gelu"}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.DebertaV2Config(
        vocab_size=100, relative_attention=True, position_buckets=16, share_att_key=True, **sizes, **stated
    )
    model = transformers.DebertaV2Model(config)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | stated  # saved as a list
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config is not None
        assert {key: checkpoint.config[key] for key in stated} == stated
        assert not [note for note in checkpoint.notes if "no place" in note]
        again = transformers.DebertaV2Model(transformers.DebertaV2Config.from_dict(checkpoint.config)).eval()
        again.load_state_dict({name: checkpoint.get(name) for name in checkpoint.names()})
    tokens = torch.arange(5, 35)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens)[0], model.eval()(tokens)[0])


@pytest.mark.parametrize(
    ("outer", "name", "inner"),
    [
        ("upernet", "backbone_config", {"model_type": "convnext", "out_features": ["stage1", "stage4"]}),
        ("speech-encoder-decoder", "encoder", {"model_type": "wav2vec2", "feat_extract_norm": "layer"}),
        ("dbrx", "ffn_config", {"ffn_act_fn": {"name": "silu"}}),
    ],
)
def test_text_of_a_sub_config_of_any_class_passes(outer: str, name: str, inner: dict[str, Any]) -> None:
    raw = {"model_type": outer, name: inner}
    assert filter_config(raw, "config.json") == (raw, [])
    timm = {"model_type": "timm_backbone", "backbone": "resnet50"}
    kept, dropped = filter_config({"model_type": outer, name: timm}, "config.json")
    assert kept[name] == {"model_type": "timm_backbone"} and dropped == [f"{name}.backbone"]


def test_the_kinds_of_nemotrons_layers_pass() -> None:
    """As NVIDIA states them; with 98 layers, a letter each. Left out, the layers were those of another model."""
    from transformers import NemotronHConfig

    pattern = "M-M-M*-" * 14
    raw = {"model_type": "nemotron_h", "num_hidden_layers": 98, "hybrid_override_pattern": pattern}
    config, dropped = filter_config(raw, "config.json")
    assert (config, dropped) == (raw, [])
    assert len(NemotronHConfig.from_dict(config).layer_types) == 98


def test_an_opt_without_its_last_norm_is_whole(make_folder: Callable[..., Path]) -> None:
    """The field is a private one: without it the norm was missing in the file."""
    sizes = {"ffn_dim": 32, "word_embed_proj_dim": 32, "_remove_final_layer_norm": True}
    with open_checkpoint(make_folder("OPTForCausalLM", **sizes)) as checkpoint:
        assert checkpoint.architecture == "OPTForCausalLM" and not checkpoint.notes
        assert checkpoint.config is not None and checkpoint.config["_remove_final_layer_norm"] is True


def test_no_module_of_the_folder_is_imported(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder, canary = make_folder("LlamaForCausalLM"), tmp_path / "canary"
    code = f"import pathlib; pathlib.Path({str(canary)!r}).write_text('run')\n"
    for name in ("evil", "modeling_evil", "configuration_evil"):
        (folder / f"{name}.py").write_text(code + "class C: pass\n")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {
        "auto_map": {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.C"},
        "trust_remote_code": True,
        "_attn_implementation_internal": "evil/kernel",
        "architectures": ["evil.C", "LlamaForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": "evil.C"}}))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.architecture == "LlamaForCausalLM"
        assert b"evil" not in checkpoint.files()["config.json"] + checkpoint.files()["tokenizer_config.json"]
        checkpoint.get("model.norm.weight")
    assert not canary.exists()


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_an_already_quantised_checkpoint_is_refused(key: str) -> None:
    raw = {"model_type": "llama", key: {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(UnsupportedError, match=r"already quantised \('gptq'\); give the original"):
        filter_config(raw, "config.json")
    with pytest.raises(UnsupportedError, match="already quantised"):
        filter_config({"model_type": "llava", "text_config": raw}, "config.json")


def test_an_export_of_ours_is_pointed_to_its_artifact() -> None:
    with pytest.raises(
        UnsupportedError, match=r"export of nstf: give the original model, or open the \.nstf"
    ):
        filter_config({"model_type": "llama", "quantization_config": {"quant_method": "nstf"}}, "config.json")


@pytest.mark.parametrize("value", [3, ["llama"], {"a": 1}, True])
def test_names_of_the_model_must_be_names(value: object) -> None:
    with pytest.raises(CorruptError, match=r"model_type is .*, expected a name"):
        filter_config({"model_type": value}, "config.json")
    if value != ["llama"]:
        with pytest.raises(CorruptError, match=r"architectures is .*, expected a list of names"):
            filter_config({"model_type": "llama", "architectures": value}, "config.json")


@pytest.mark.parametrize("raw", [[], "x", 3, None])
def test_a_config_that_is_no_object_is_refused(raw: object) -> None:
    with pytest.raises(CorruptError, match="not a JSON object"):
        filter_config(raw, "config.json")


def test_a_config_nested_too_deeply_is_refused() -> None:
    raw: dict[str, Any] = {}
    for _ in range(50):
        raw = {"a": raw}
    with pytest.raises(CorruptError, match="nested too deeply"):
        filter_config(raw, "config.json")


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 1 << 40},
        {"num_hidden_layers": 100_000},
        {"num_labels": 1 << 40},
        {"num_classes": 1 << 30},
        {"hidden_size": -1},
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"vocab_size": 1 << 62},
        {"vocab_size": 97},
        {"num_hidden_layers": 3},
    ],
)
def test_a_config_that_contradicts_the_tensors_is_corrupt(llama_folder: Path, change: dict[str, Any]) -> None:
    raw = json.loads((llama_folder / "config.json").read_text())
    (llama_folder / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(CorruptError, match=r"config.json|missing although"):
        open_checkpoint(llama_folder)


@pytest.mark.parametrize("text", ["", "{", "nothing", '{"a": 1, "a": 2}', "[" * 100_000, "\xff"])
def test_a_config_that_is_not_json_is_corrupt(llama_folder: Path, text: str) -> None:
    (llama_folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptError, match=r"config\.json"):
        open_checkpoint(llama_folder)


def test_labels_that_are_cut_are_reported() -> None:
    raw = {"model_type": "llama", "id2label": {"0": "x" * 300, "1": "y"}, "label2id": {"x" * 300: 0, "y": 1}}
    config, dropped = filter_config(raw, "c")
    assert config["id2label"] == {"0": "x" * 200, "1": "y"} and config["label2id"] == {"x" * 200: 0, "y": 1}
    assert dropped == ["id2label (the end of 1 long label)", "label2id (the end of 1 long label)"]
    raw["label2id"] = {"z": 0, "y": 1}
    assert filter_config(raw, "c")[1] == ["id2label (the end of 1 long label)"]


@pytest.mark.parametrize(
    ("key", "labels"),
    [("label2id", {"x" * 300: 0, "x" * 301: 1}), ("id2label", {"0": "x" * 300, "1": "x" * 301})],
)
def test_labels_that_would_become_one_are_refused(key: str, labels: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"two names in {key} are alike in their first 200 letters"):
        filter_config({"model_type": "llama", key: labels}, "c")


def test_labels_that_were_alike_before_are_kept() -> None:
    raw = {"model_type": "llama", "id2label": {"0": "x", "1": "x"}}
    assert filter_config(raw, "c")[0]["id2label"] == raw["id2label"]


def test_settings_keep_text_and_lose_code() -> None:
    raw = {
        "chat_template": "{{ a/b }}",
        "x": [{"auto_map": 1, "_y": 2, "z": "any text / at all"}],
        "trust_remote_code": True,
    }
    assert strip_code(raw) == {"chat_template": "{{ a/b }}", "x": [{"z": "any text / at all"}]}


def test_settings_keep_added_tokens_and_lose_what_leads_to_files() -> None:
    token = {"__type": "AddedToken", "content": "<s>", "lstrip": False}
    words = {"x_path": 1, "vocab": "a", "y_dir": "b"}
    kept = {"bos_token": token, "extra": [token], "words": words, "vocab_file": None, "init_inputs": []}
    lost = {"merges_file": "x", "font": "x.ttf", "init_inputs": ["x"], "vocab": "x", "__init__": 1}
    assert strip_code({**kept, **lost}) == {k: v for k, v in kept.items() if k != "init_inputs"}
    assert strip_code(kept) == kept
    assert strip_code({"mecab_kwargs": words, "x": [{"vocab_file": "x", "auto_map": 1, "a": words}]}) == {
        "mecab_kwargs": {},
        "x": [{"a": words}],
    }


def test_an_empty_list_of_end_tokens_is_read_as_none(llama_folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        file = llama_folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": []}))
    with open_checkpoint(llama_folder) as opened:
        assert opened.config is not None and opened.config["eos_token_id"] is None
        assert any("eos_token_id (an empty list)" in note for note in opened.notes)
        assert json.loads(opened.files()["generation_config.json"])["eos_token_id"] is None


@pytest.mark.parametrize(
    "settings",
    [{"eos_token_id": ["x"]}, {"temperature": "warm"}, [1], {"early_stopping": "x"}, {"max_new_tokens": 0}],
)
def test_generation_settings_that_no_load_takes_are_refused_before_a_conversion(
    llama_folder: Path, settings: Any
) -> None:
    (llama_folder / "generation_config.json").write_text(json.dumps(settings))
    with (
        open_checkpoint(llama_folder) as opened,
        pytest.raises(CorruptError, match=r"generation_config\.json"),
    ):
        opened.files()
