"""From an artifact to a running model, and back to tensors."""

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nstf.runtime
from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
from nstf.kernels.cpu import ext
from nstf.kernels.formats import decode
from nstf.runtime.artifact import Shared, parse_header, write_artifact
from nstf.runtime.tokenizer_files import tokenizer_from_files

ARCHITECTURES = (
    "LlamaForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "Qwen3MoeForCausalLM",
    "BertModel", "BertForMaskedLM", "GPT2LMHeadModel", "ViTForImageClassification",
    "ResNetForImageClassification", "WhisperForConditionalGeneration",
)  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_those_of_the_dense_model(tiny: ModuleType, architecture: str, tmp_path: Path) -> None:
    dense = tiny.new_model(architecture)
    path = tiny.write(tmp_path, dense)
    model = nstf.runtime.load(path, engine="exact")
    inputs = tiny.inputs_of(architecture)
    with torch.no_grad():
        expected, found = dense(**inputs)[0], model(**inputs)[0]
    assert torch.allclose(found, expected, atol=2e-4, rtol=1e-4)
    assert not any(p.device.type == "meta" for p in [*model.parameters(), *model.buffers()])
    if model.can_generate() and "input_ids" in inputs:
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(**inputs, **options), dense.generate(**inputs, **options))


@pytest.mark.parametrize("architecture", ["ResNetForImageClassification", "WhisperForConditionalGeneration"])
def test_convolutions_have_int8_activations_unless_exact_ones_are_asked_for(
    tiny: ModuleType, architecture: str, tmp_path: Path
) -> None:
    path = tiny.write(tmp_path, tiny.new_model(architecture))
    inputs = tiny.inputs_of(architecture)
    with torch.no_grad():
        exact = nstf.runtime.load(path, engine="exact")(**inputs)[0]
        found = nstf.runtime.load(path)(**inputs)[0]
    assert float((found - exact).norm() / exact.norm()) < 0.03
    assert torch.equal(found, exact) == (ext is None or not ext.engine_int8())


def test_the_model_holds_what_the_artifact_holds_and_nothing_dense(tiny: ModuleType, tmp_path: Path) -> None:
    dense = tiny.new_model("LlamaForCausalLM")
    tensors = tiny.encode_model(dense)
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(dense)).encode()})
    model = nstf.runtime.load(path)
    model(**tiny.inputs_of("LlamaForCausalLM"))
    rotary = sum(b.numel() * b.element_size() for b in dense.buffers())
    assert tiny.held_bytes(model) == sum(e.size_bytes for e in tensors.values()) + rotary
    assert tiny.held_bytes(model) < 0.3 * tiny.held_bytes(dense)


def test_the_tied_head_uses_the_embeddings_arrays(tiny: ModuleType, tmp_path: Path) -> None:
    model = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    assert model.lm_head.weight_encoded is model.model.embed_tokens.weight_encoded


def test_a_shared_tensor_in_the_artifact_is_one_in_the_model(tiny: ModuleType, tmp_path: Path) -> None:
    dense = tiny.new_model("LlamaForCausalLM", tie_word_embeddings=False)
    tensors = {**tiny.encode_model(dense), "lm_head.weight": Shared("model.embed_tokens.weight")}
    dense.lm_head.weight.data.copy_(dense.model.embed_tokens.weight)
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(dense)).encode()})
    model = nstf.runtime.load(path)
    inputs = tiny.inputs_of("LlamaForCausalLM")
    assert model.lm_head.weight_encoded is model.model.embed_tokens.weight_encoded
    assert torch.allclose(model(**inputs)[0], dense(**inputs)[0], atol=2e-4)


def test_weights_stored_in_the_dtype_that_is_computed_in_stay_as_they_are(
    tiny: ModuleType, tmp_path: Path
) -> None:
    dense = tiny.new_model("LlamaForCausalLM").to(torch.bfloat16)
    tensors = {name: tiny.dense(p) for name, p in dense.named_parameters()}
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(dense)).encode()})
    inputs = tiny.inputs_of("LlamaForCausalLM")
    same = nstf.runtime.load(path, dtype="bfloat16")
    assert type(same.model.layers[0].mlp.up_proj) is torch.nn.Linear
    # Not equal: `.to(bfloat16)` has rounded the dense model's rotary frequencies, which load keeps exact.
    assert torch.allclose(same(**inputs)[0], dense(**inputs)[0], atol=0.02)
    wider = nstf.runtime.load(path)
    assert tiny.held_bytes(wider) < 1.1 * tiny.held_bytes(dense)
    assert wider.model.layers[0].mlp.up_proj.weight_encoded.values.dtype == torch.bfloat16
    assert torch.allclose(wider(**inputs)[0], dense.float()(**inputs)[0], atol=5e-3)


def test_other_dtypes_compute_close_to_float32(tiny: ModuleType, tmp_path: Path) -> None:
    dense = tiny.new_model("MixtralForCausalLM")
    path = tiny.write(tmp_path, dense)
    inputs = tiny.inputs_of("MixtralForCausalLM")
    model = nstf.runtime.load(path, dtype=torch.bfloat16)
    with torch.no_grad():
        logits, exact = model(**inputs)[0], dense(**inputs)[0]
    assert logits.dtype == torch.bfloat16 and model.dtype == torch.bfloat16
    assert float((logits.float() - exact).norm() / exact.norm()) < 0.1


def test_names_may_lack_the_base_models_prefix(tiny: ModuleType, tmp_path: Path) -> None:
    dense = tiny.new_model("BertForMaskedLM")
    tensors = {name.removeprefix("bert."): e for name, e in tiny.encode_model(dense).items()}
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(dense)).encode()})
    inputs = tiny.inputs_of("BertForMaskedLM")
    assert torch.allclose(nstf.runtime.load(path)(**inputs)[0], dense(**inputs)[0], atol=2e-4)


def test_a_model_that_was_loaded_in_inference_mode_generates(tiny: ModuleType, tmp_path: Path) -> None:
    """Its tensors had no versions, by which it is told whether they were changed: torch's RuntimeError at each answer."""
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    ids = torch.tensor([[1, 2, 3]])
    wanted = nstf.runtime.load(path).generate(ids, max_new_tokens=4)
    with torch.inference_mode():
        assert torch.equal(nstf.runtime.load(path).generate(ids, max_new_tokens=4), wanted)
        assert torch.is_inference_mode_enabled()


def test_a_model_that_would_write_into_its_weights_runs(tiny: ModuleType, tmp_path: Path) -> None:
    """RWKV halves some before its first pass, against overflow in float16."""
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=3, rescale_every=1, context_length=32
    )
    model = RwkvForCausalLM(config).eval()
    found = nstf.runtime.load(tiny.write(tmp_path, model))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        assert (found(input_ids=ids).logits - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert found.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > 8


def test_models_load_in_several_threads(tiny: ModuleType, tmp_path: Path) -> None:
    """Each put back PyTorch's register_parameter as it had found it: after a few rounds every module was on meta."""
    dense = tiny.new_model("LlamaForCausalLM")
    path, register = tiny.write(tmp_path, dense), torch.nn.Module.register_parameter
    inputs = tiny.inputs_of("LlamaForCausalLM")
    with torch.no_grad():
        expected = nstf.runtime.load(path)(**inputs)[0]

        def loaded(_: int) -> torch.Tensor:
            logits: torch.Tensor = nstf.runtime.load(path)(**inputs)[0]
            return logits

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(loaded, range(12)))
    assert all(torch.equal(logits, expected) for logits in found)
    assert torch.nn.Module.register_parameter is register


def test_generation_settings_come_from_the_stored_file(tiny: ModuleType, tmp_path: Path) -> None:
    settings = json.dumps({"max_new_tokens": 3, "eos_token_id": 77}).encode()
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), {"generation_config.json": settings})
    config = nstf.runtime.load(path).generation_config
    assert (config.max_new_tokens, config.eos_token_id) == (3, 77)


def test_a_missing_tensor_is_named(tiny: ModuleType, tmp_path: Path) -> None:
    dense = tiny.new_model("LlamaForCausalLM")
    tensors = tiny.encode_model(dense)
    del tensors["model.norm.weight"]
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(dense)).encode()})
    with pytest.raises(UnsupportedError, match=r"needs 1 tensors that are not in it.*'model.norm.weight'"):
        nstf.runtime.load(path)


def test_a_tensor_of_another_shape_is_named(tiny: ModuleType, tmp_path: Path) -> None:
    dense = tiny.new_model("LlamaForCausalLM")
    tensors = {**tiny.encode_model(dense), "model.norm.weight": tiny.dense(torch.ones(31))}
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(dense)).encode()})
    with pytest.raises(CorruptError, match=r"'model.norm.weight' has shape \[31\].* asks for \[32\]"):
        nstf.runtime.load(path)


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, UnsupportedError, "no config.json inside"),
        ({"config.json": b"{"}, CorruptError, "is not JSON"),
        ({"config.json": b"[]"}, CorruptError, "is not an object"),
        (
            {"config.json": b'{"model_type": "x", "architectures": ["XModel"]}'},
            UnsupportedError,
            "'XModel' is not known",
        ),
    ],
)
def test_an_artifact_without_a_usable_config_still_gives_its_tensors(
    tiny: ModuleType, tmp_path: Path, files: dict[str, bytes], error: type[Exception], message: str
) -> None:
    encoded = tiny.random_encoded(tiny.leaf("int", bits=4, group=32), (8, 32))
    path = tmp_path / "m.nstf"
    write_artifact(path, {"w": encoded, "again": Shared("w")}, files, dtypes={"w": "bfloat16"})
    with pytest.raises(error, match=message):
        nstf.runtime.load(path)
    tensors = nstf.runtime.load_tensors(path)
    assert sorted(tensors) == ["again", "w"] and len(tensors) == 2
    assert torch.equal(tensors["w"], decode(encoded)) and torch.equal(tensors["again"], tensors["w"])
    assert nstf.runtime.load_tensors(path, dtype=None)["w"].dtype == torch.bfloat16
    assert "x" not in tensors


def test_wrong_options_are_refused(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    with pytest.raises(UsageError, match="attention 'some' is not one of full, planned"):
        nstf.runtime.load(path, attention="some")
    with pytest.raises(UsageError, match="dtype 'int8' is not one of"):
        nstf.runtime.load(path, dtype="int8")
    with pytest.raises(UsageError, match="no attention plan inside"):
        nstf.runtime.load(path, attention="planned")


@pytest.mark.parametrize("number", [True, False, "2", 2.0, None, [2], -1, 0, 10**30])
def test_a_number_of_processes_that_is_none_is_refused(tmp_path: Path, number: Any) -> None:
    with pytest.raises(UsageError, match=r"tensor_parallel|processes"):
        nstf.runtime.load(tmp_path / "none.nstf", tensor_parallel=number)


@pytest.mark.parametrize("name", ["attention", "engine", "kv_cache"])
@pytest.mark.parametrize("value", [None, 1, b"full", ["full"], {}, "x\n" * 9000])
def test_an_option_of_another_type_is_one_line(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} ") as error:
        nstf.runtime.load(tmp_path / "none.nstf", **{name: value})
    assert str(error.value).isprintable() and len(str(error.value)) <= 4000


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("WORLD_SIZE", "x", "WORLD_SIZE is 'x'"), ("RANK", "", "RANK is ''"), ("RANK", "2", "RANK is 2, but WORLD_SIZE"),
     ("RANK", "-1", "RANK is '-1'"), ("MASTER_PORT", "99999", "MASTER_PORT is '99999'"), ("MASTER_PORT", "²", "PORT")],
)  # fmt: skip
def test_an_environment_that_torchrun_does_not_make_is_one_line(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were ValueErrors, or a wait for ten minutes."""
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for each, text in (started | {name: value}).items():
        monkeypatch.setenv(each, text)
    with pytest.raises(UsageError, match=said):
        nstf.runtime.load("m.nstf", tensor_parallel=2)


def test_processes_that_do_not_meet_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for each, text in started.items():
            monkeypatch.setenv(each, text)
        with pytest.raises(NstfError, match=r"the 2 processes of tensor_parallel do not meet: .*in use"):
            nstf.runtime.load("m.nstf", tensor_parallel=2)


def test_an_artifact_without_tokenizer_says_so(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    with pytest.raises(UnsupportedError, match="no tokenizer inside"):
        nstf.runtime.load_tokenizer(path)


@pytest.mark.parametrize("kind", ["bert", "t5", "gpt2"])
@pytest.mark.parametrize("settings", [{}, {"tokenizer_config.json": b'{"model_max_length": 512}'}], ids=len)
def test_a_tokenizer_without_its_words_is_none(kind: str, settings: dict[str, bytes]) -> None:
    """transformers made one that knows no word, with which models were calibrated and measured."""
    files = {"config.json": json.dumps({"model_type": kind}).encode(), **settings}
    with pytest.raises(
        UnsupportedError, match=r"cannot build a tokenizer of .+: its vocabulary is missing \(\w"
    ):
        tokenizer_from_files(files, "./model")


def test_a_tokenizer_of_bytes_needs_no_file() -> None:
    files = {"tokenizer_config.json": b'{"tokenizer_class": "ByT5Tokenizer"}'}
    assert tokenizer_from_files(files, "./model")("a")["input_ids"] == [100, 1]


def test_loading_imports_nothing_of_the_conversion_side(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    code = (
        "import sys, nstf\n"
        "assert 'torch' not in sys.modules\n"
        f"model = nstf.runtime.load({str(path)!r})\n"
        "import torch; model(input_ids=torch.tensor([[1, 2]]))\n"
        "print([m for m in sys.modules if m.startswith(('nstf_convert', 'nstf.analyzers', "
        "'nstf.decomposers', 'nstf.quantizers'))])\n"
        "from nstf.runtime import load, load_tensors, load_tokenizer\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_stored_attention_plan_is_applied_when_asked_for(tiny: ModuleType, tmp_path: Path) -> None:
    head = {
        "pattern": "streaming",
        "params": {"sink": 1, "window": 2},
        "min_length": 0,
        "error": 0.0,
        "mass": 1.0,
    }
    group = {"evict": False, "sink": 0, "recent": 0, "min_length": 0}
    plan = {
        "version": 1,
        "profile_lengths": [64],
        "queries": 8,
        "error_bound": 1.0,
        "kld_budget": 1.0,
        "kld_measured": None,
        "kld_covers": ["streaming"],
        "head_dim": 8,
        "layers": [{"heads": [head] * 4, "groups": [group] * 2}] * 2,
    }
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), attention=plan)
    inputs = tiny.inputs_of("LlamaForCausalLM")
    full, planned = nstf.runtime.load(path), nstf.runtime.load(path, attention="planned")
    with torch.no_grad():
        a, b = full(**inputs)[0], planned(**inputs)[0]
    # Three keys are all there are up to the third token, and not afterwards.
    assert torch.allclose(a[:, :3], b[:, :3], atol=1e-4)
    assert not torch.allclose(a[:, -1], b[:, -1], atol=1e-4)


def test_a_flipped_byte_is_refused_unless_verification_is_switched_off(
    tiny: ModuleType, tmp_path: Path
) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    array = next(e for n, e in parse_header(path)[0].items() if n.startswith("model.layers.0.mlp.up_proj"))
    content = bytearray(path.read_bytes())
    content[array.start] ^= 1
    path.write_bytes(content)
    for load in (nstf.runtime.load, nstf.runtime.load_tensors):
        with pytest.raises(CorruptError, match="SHA-256"):
            load(path)
    assert nstf.runtime.load(path, verify=False) is not None


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "gpu"])
def test_a_device_that_is_not_there_is_one_clear_error(device: str, tiny: ModuleType, tmp_path: Path) -> None:
    if torch.cuda.is_available() and device == "cuda":
        pytest.skip("there is a GPU")
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    with pytest.raises(UsageError, match=f"device '{device}': .*; device='cpu' runs everywhere"):
        nstf.runtime.load(path, device)
