"""A folder that keeps the encoded form: written by save_pretrained, loaded by plain from_pretrained."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import nstf.integrations.transformers
import nstf.runtime
from nstf.errors import CorruptError, UnsupportedError

CASES = [
    ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    ("Qwen3ForCausalLM", {}),
    ("GPT2LMHeadModel", {}),
    ("MixtralForCausalLM", {}),
    ("Gemma3ForCausalLM", {}),
]


@pytest.mark.parametrize(
    ("architecture", "changes"), CASES, ids=lambda v: str(v) if isinstance(v, str) else ""
)
def test_a_folder_loads_encoded_and_gives_the_same_logits(
    tiny: ModuleType, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    path = tiny.write(tmp_path, tiny.new_model(architecture, **changes))
    model: Any = nstf.runtime.load(path)
    inputs = tiny.inputs_of(architecture)
    with torch.no_grad():
        expected = model(**inputs).logits
        model.save_pretrained(tmp_path / "folder")
        assert (
            json.loads((tmp_path / "folder" / "config.json").read_text())["quantization_config"][
                "quant_method"
            ]
            == "nstf"
        )
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
        assert torch.equal(found(**inputs).logits, expected)
        assert tiny.held_bytes(found) == tiny.held_bytes(model)
        # And once more, from what was loaded.
        found.save_pretrained(tmp_path / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(again(**inputs).logits, expected)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("folder", "again")]
    assert files[0] == files[1]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(found.generate(**inputs, **options), model.generate(**inputs, **options))
    # The model it was written from is as it was.
    assert not hasattr(model.config, "quantization_config") and torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "ModernBertForMaskedLM"])
def test_a_bias_beside_a_tied_head_is_tied_too(tiny: ModuleType, tmp_path: Path, architecture: str) -> None:
    """BERT's stayed on the meta device, and ModernBERT initialises its head by itself: neither could be run."""
    sizes = {**tiny.TEXT, "tie_word_embeddings": True}
    config = getattr(transformers, architecture.replace("ForMaskedLM", "Config"))(**sizes, pad_token_id=0)
    dense = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        dense.get_output_embeddings().bias.normal_()
    model: Any = nstf.runtime.load(tiny.write(tmp_path, dense))
    model.save_pretrained(tmp_path / "folder")
    found = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "folder")
    inputs = tiny.inputs_of(architecture)
    with torch.no_grad():
        assert torch.equal(found(**inputs).logits, model(**inputs).logits)
    assert tiny.held_bytes(found) == tiny.held_bytes(model)


YOUTU = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FUNNEL = {"vocab_size": 100, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1]}


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [("FunnelModel", FUNNEL), ("YoutuModel", {**YOUTU, "num_key_value_heads": 4, "pad_token_id": 0})],
)
def test_a_model_that_initialises_a_row_of_padding_leaves_an_encoded_one(
    tiny: ModuleType, tmp_path: Path, architecture: str, sizes: dict[str, Any]
) -> None:
    """The folder was written and could not be loaded: an encoded weight cannot be written to."""
    sizes = sizes if architecture == "FunnelModel" else {**tiny.TEXT, **sizes}
    config = getattr(transformers, architecture.replace("Model", "Config"))(**sizes)
    dense = getattr(transformers, architecture)(config).eval()
    model: Any = nstf.runtime.load(tiny.write(tmp_path, dense))
    model.save_pretrained(tmp_path / "folder")
    found = transformers.AutoModel.from_pretrained(tmp_path / "folder")
    inputs = tiny.inputs_of(architecture)
    with torch.no_grad():
        assert torch.equal(found(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


def test_the_reader_of_ranks_takes_the_whole_folder(tiny: ModuleType, tmp_path: Path) -> None:
    from nstf.runtime.rank_folder import RankFolder

    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    model.save_pretrained(tmp_path / "folder")
    stated = json.loads((tmp_path / "folder" / "config.json").read_text())["quantization_config"]["tensors"]
    folder = RankFolder(tmp_path / "folder", stated)
    assert all(list(folder.part(name, None).shape) for name in stated)
    dense = dict(folder.dense())
    assert torch.equal(dense["model.norm.weight"].float(), model.model.norm.weight.float())


def test_the_reader_of_ranks_takes_no_other_file_of_the_folder(tiny: ModuleType, tmp_path: Path) -> None:
    """One whose name came later replaced arrays without a word: an older export's shard, say."""
    from nstf.runtime.rank_folder import RankFolder

    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    folder = tmp_path / "folder"
    model.save_pretrained(folder, max_shard_size=10_000)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]["tensors"]
    expected = dict(RankFolder(folder, stated).dense())
    other = {name: torch.zeros_like(value) for name, value in expected.items()}
    safetensors.torch.save_file(other, folder / "zz.safetensors")
    found = dict(RankFolder(folder, stated).dense())
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
    index = folder / "model.safetensors.index.json"
    for text in (
        "",
        "[]",
        '{"weight_map": {"a": "../a.safetensors"}}',
        '{"weight_map": 5}',
        "[" * 5000,
        '{"weight_map": {"a": "\\ud800"}}',
    ):
        index.write_text(text)
        with pytest.raises(CorruptError, match="is no index of weights"):
            RankFolder(folder, stated)
    index.write_text('{"weight_map": {}, "a": [' + "[]," * (1 << 20) + "[]]}")
    with pytest.raises(CorruptError, match=r"more than 720\d+ values, too many for its length"):
        RankFolder(folder, stated)


def test_another_dtype_keeps_the_stored_arrays(tiny: ModuleType, tmp_path: Path) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    model.save_pretrained(tmp_path / "folder")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.bfloat16)
    stored = found.model.layers[0].mlp.up_proj.weight_encoded
    assert stored.scale.dtype == torch.float16 and stored.dtype == torch.bfloat16
    ids = tiny.inputs_of("LlamaForCausalLM")
    logits, exact = found(**ids).logits, model(**ids).logits
    assert logits.dtype == torch.bfloat16 and float((logits.float() - exact).norm() / exact.norm()) < 0.1


def test_a_config_that_does_not_fit_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    model.save_pretrained(tmp_path / "folder")
    stated = json.loads((tmp_path / "folder" / "config.json").read_text())
    tensors = stated["quantization_config"]["tensors"]
    name = "model.layers.0.mlp.up_proj.weight"

    def load_with(**changes: Any) -> None:
        changed = {**stated, "quantization_config": {**stated["quantization_config"], **changes}}
        (tmp_path / "folder" / "config.json").write_text(json.dumps(changed))
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")

    with pytest.raises(CorruptError, match=f"entry for '{name}' does not fit"):
        load_with(tensors={**tensors, name: {**tensors[name], "shape": [47, 32]}})
    with pytest.raises(CorruptError, match=r"entry for 'model\.none\.weight' does not fit"):
        load_with(tensors={**tensors, "model.none.weight": tensors[name]})
    with pytest.raises(UnsupportedError, match="version 2, this nstf knows 1"):
        load_with(version=2)
    with pytest.raises(CorruptError, match="names no encoded tensors"):
        load_with(tensors=None)


def test_the_command_writes_such_a_folder_with_its_tokenizer(
    tiny: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    from nstf_convert.cli import run

    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), {"tokenizer_config.json": b"{}"})
    folder = tmp_path / "folder"
    assert run(["export", str(path), "--to", "transformers", "-o", str(folder), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= files.keys()
    assert files["model.safetensors"] < 2 * path.stat().st_size
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tiny.inputs_of("LlamaForCausalLM")
    with torch.no_grad():
        assert torch.equal(found(**ids).logits, nstf.runtime.load(path)(**ids).logits)
    assert (
        run(["export", str(path), "--to", "transformers", "--dtype", "float16", "-o", str(tmp_path / "x")])
        == 2
    )
    assert not (tmp_path / "x").exists()


def test_a_full_disk_is_not_the_models_fault(
    tiny: ModuleType, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors says it by an error of its own, which no OSError is."""
    from safetensors import SafetensorError

    from nstf_convert.cli import run

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("nstf.runtime.citizen.EncodedModel.save_pretrained", full)
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    assert run(["export", str(path), "--to", "transformers", "-o", str(tmp_path / "x")]) == 1
    assert "x: the disk is full" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("stated", [{"output_attentions": True}, {"save_pretrained": "x"}])
def test_a_config_that_transformers_does_not_save_is_one_line(
    stated: dict[str, Any], tiny: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    """It was an error that nobody foresaw; the model runs, and other targets take it."""
    from nstf_convert.cli import run

    model = tiny.new_model("LlamaForCausalLM")
    config = {**model.config.to_dict(), **stated}
    path = tiny.write(tmp_path, model, {"config.json": json.dumps(config, default=str).encode()})
    folder = tmp_path / "folder"
    assert run(["export", str(path), "--to", "transformers", "-o", str(folder)]) == 6
    assert "transformers does not save a model with this config" in capsys.readouterr().err
    assert not folder.exists() and run(["export", str(path), "-o", str(folder)]) == 0


def test_a_file_that_is_replaced_while_it_is_exported_is_not_mixed_with_the_new_one(
    tiny: ModuleType, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer was the older file's, the weights were the newer one's."""
    from nstf_convert.cli import run

    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), {"tokenizer_config.json": b"{}"})
    newer = path.rename(tmp_path / "newer")
    tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), {"tokenizer_config.json": b"{ }"})
    real = nstf.runtime.load

    def late(*given: Any, **more: Any) -> Any:
        newer.replace(path)
        return real(*given, **more)

    monkeypatch.setattr(nstf.runtime, "load", late)
    assert run(["export", str(path), "--to", "transformers", "-o", str(tmp_path / "folder")]) == 1
    assert "another file took its place" in capsys.readouterr().err and not (tmp_path / "folder").exists()


def test_the_folder_serves_device_maps_and_batches(tiny: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: make integrations")
    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    model.save_pretrained(tmp_path / "folder")
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"]
    with torch.no_grad():
        for device_map in ("auto", {"": "cpu"}):
            found = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "folder", device_map=device_map
            )
            assert torch.equal(found(ids.to(found.device)).logits.cpu(), model(ids).logits)
    check_batches(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder"), tiny)


def check_batches(model: Any, tiny: ModuleType) -> None:
    """transformers' continuous batching gives what each prompt gives alone."""
    settings = transformers.GenerationConfig(
        max_new_tokens=4, do_sample=False, eos_token_id=2, pad_token_id=0
    )
    # Without numbers it takes what memory is free, tens of gigabytes.
    room = ContinuousBatchingConfig(num_blocks=64, block_size=32, max_batch_tokens=128)
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"].to(model.device)
    rows = [row.tolist() for row in ids]
    batch = model.generate_batch(rows, generation_config=settings, continuous_batching_config=room)
    alone = [
        model.generate(row[None], max_new_tokens=4, do_sample=False, pad_token_id=0)[0, 7:] for row in ids
    ]
    assert [answer.generated_tokens for answer in batch.values()] == [row.tolist() for row in alone]


@pytest.mark.gpu
@pytest.mark.parametrize("device_map", ["auto", "cuda", {"": 0}], ids=str)
def test_the_folder_loads_encoded_on_a_gpu(tiny: ModuleType, tmp_path: Path, device_map: Any) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: make integrations")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
    dense = tiny.new_model("LlamaForCausalLM", **sizes)
    path = tiny.write(tmp_path, dense)
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"]
    nstf.runtime.load(path).save_pretrained(tmp_path / "folder")
    before = torch.cuda.memory_allocated()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", device_map=device_map)
    with torch.no_grad():
        logits = found(ids.cuda()).logits.cpu()
        expected = dense(ids).logits
    assert float((logits - expected).norm() / expected.norm()) < 2e-3
    assert found.device.type == "cuda"
    # 4.5 bits a weight, and torch's own workspace for products, which is no part of the model.
    held = sum(b.untyped_storage().nbytes() for b in found.buffers() if type(b) is torch.Tensor)
    words = [b.words for b in found.buffers() if hasattr(b, "words")]
    held += sum(w.numel() * w.element_size() for w in words)
    assert words and held < 0.2 * tiny.held_bytes(dense)
    assert torch.cuda.memory_allocated() - before < 64 << 20
    # What the kernels keep in an order of their own is written as it was read.
    found.save_pretrained(tmp_path / "again")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("folder", "again")]
    assert files[0] == files[1]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain: Any = nstf.runtime.load(path, "cuda", engine="off")
    assert torch.equal(found.generate(ids.cuda(), **options), plain.generate(ids.cuda(), **options))


@pytest.mark.gpu
def test_batches_run_on_a_gpu(tiny: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: make integrations")
    nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))).save_pretrained(
        tmp_path / "folder"
    )
    check_batches(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", device_map=0), tiny)


@pytest.mark.gpu
def test_layers_in_host_memory_give_the_same_logits(tiny: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: make integrations")
    dense = tiny.new_model("LlamaForCausalLM", tie_word_embeddings=False)
    nstf.runtime.load(tiny.write(tmp_path, dense)).save_pretrained(tmp_path / "folder")
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    device_map = {**dict.fromkeys(parts, 0), "model.layers.1": "cpu"}
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", device_map=device_map)
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"]
    with torch.no_grad():
        logits, expected = found(ids.cuda()).logits.cpu(), dense(ids).logits
    assert float((logits - expected).norm() / expected.norm()) < 2e-3


def test_arrays_that_accelerate_moves_count_as_loaded(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: make integrations")
    from accelerate.big_modeling import attach_align_device_hook_on_blocks

    dense = tiny.new_model("LlamaForCausalLM", tie_word_embeddings=False)
    nstf.runtime.load(tiny.write(tmp_path, dense)).save_pretrained(tmp_path / "folder")

    def dispatch(model: Any, quantiser: Any, device_map: dict[str, Any], *args: Any) -> None:
        """As between a GPU and host memory: hooks, and buffers that are new tensors."""
        layer = "model.layers.1"
        attach_align_device_hook_on_blocks(
            model,
            execution_device=dict.fromkeys(device_map, "cpu"),
            offload={name: name == layer for name in device_map},
            weights_map=model.get_submodule(layer).state_dict(prefix=f"{layer}."),
        )
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.clone()

    monkeypatch.setattr(transformers.modeling_utils, "accelerate_dispatch", dispatch)
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    device_map = {**dict.fromkeys(parts, "cpu"), "model.layers.1": torch.device("cpu", 0)}
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", device_map=device_map)
    ids = tiny.inputs_of("LlamaForCausalLM")
    with torch.no_grad():
        assert torch.equal(found(**ids).logits, nstf.runtime.load(tmp_path / "model.nstf")(**ids).logits)


def test_offloading_to_disk_is_refused_with_what_works(tiny: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: make integrations")
    nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))).save_pretrained(
        tmp_path / "folder"
    )
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    device_map = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    with pytest.raises(UnsupportedError, match="not offloaded to disk"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "folder", device_map=device_map, offload_folder=str(tmp_path / "offload")
        )


def test_a_pipeline_generates_from_the_folder(tiny: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    model.save_pretrained(tmp_path / "folder")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0")
    tokenizer.save_pretrained(tmp_path / "folder")
    pipe: Any = transformers.pipeline("text-generation", model=str(tmp_path / "folder"))
    said = pipe("w5 w6 w7", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    # The pipeline puts the prompt's text and the new one together.
    assert said.replace(" ", "") == tokenizer.decode(expected[0], skip_special_tokens=True).replace(" ", "")


def test_a_folder_that_lacks_an_array_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "folder"
    nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))).save_pretrained(folder)
    arrays = load_file(folder / "model.safetensors")
    arrays.pop(next(name for name in sorted(arrays) if "encoded" in name))
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptError, match="missing from the folder"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
