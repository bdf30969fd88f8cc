"""The C++ engine against the module path: logits, windows, caches, greedy tokens, and what it leaves to transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nstf.runtime
from nstf.errors import UnsupportedError, UsageError
from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import available
from nstf.runtime.artifact import open_artifact, write_artifact
from nstf.runtime.engine import Engine
from nstf.runtime.engine_config import read_config

pytestmark = pytest.mark.skipif(not available(), reason="the extension was not built")

GROUPED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True}),
    "llama, linear rope": ("LlamaForCausalLM", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "qwen 2": ("Qwen2ForCausalLM", {}),
    "qwen 3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral, sliding": ("MistralForCausalLM", {"sliding_window": 20}),
    "gemma 3": ("Gemma3ForCausalLM", {"head_dim": 8, "sliding_window": 24, "query_pre_attn_scalar": 16}),
}


def build(name: str, **own: Any) -> Any:
    import transformers

    architecture, changes = MODELS[name]
    config_class = {"Gemma3ForCausalLM": "Gemma3TextConfig"}.get(
        architecture, architecture.replace("ForCausalLM", "Config")
    )
    config = getattr(transformers, config_class)(**{**GROUPED, **changes, **own})
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases that are not all ones and zeros
            parameter.data += torch.randn_like(parameter) * 0.1
    return model


@pytest.fixture(params=sorted(MODELS))
def written(request: pytest.FixtureRequest, tiny: ModuleType, tmp_path: Path) -> tuple[Path, Any]:
    """The artifact, and the model with its decoded values."""
    model = build(request.param)
    return tiny.write(tmp_path, model), model


def ids_of(count: int) -> torch.Tensor:
    return torch.randint(3, 100, (count,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=ext.isas() if available() else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this processor in turn."""
    ext.use_isa(request.param)
    yield request.param
    ext.use_isa("")


def test_logits_are_those_of_the_modules(written: tuple[Path, Any], isa: str) -> None:
    path, model = written
    ids = ids_of(150)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    engine = Engine.open(path, exact=True)
    # Keys and values are kept in float16, which the modules do not do.
    size = float(expected.std())
    assert float((engine.forward(ids, all_logits=True) - expected).abs().max()) < 0.01 * size
    engine.reset()
    engine.forward(ids[:70])
    torch.testing.assert_close(engine.forward(ids[70:140]), expected[139], atol=0.01 * size, rtol=0)
    for i in range(140, 150):
        torch.testing.assert_close(engine.forward([int(ids[i])]), expected[i], atol=0.01 * size, rtol=0)
    fast = Engine.open(path)
    assert float((fast.forward(ids, all_logits=True) - expected).square().mean().sqrt()) < 0.03 * size


def decomposed(tiny: ModuleType, model: Any) -> dict[str, Any]:
    """Every matrix of the model as CP, Tucker or tensor train with int8 factors; the model gets the decoded values."""
    from nstf.kernels.formats import decode
    from nstf.quantizers.stats import Stats
    from nstf_convert.pipeline.propose import recipe as recipes

    factor = recipes.Recipe("int_grid", {"bits": 8, "group": 0, "symmetric": True})
    how: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {
        (100, 32): ("tensor_train", {"ranks": [8, 30], "view": [10, 10, 32]}),
        (32, 32): ("tucker", {"ranks": [4, 7, 30], "view": [4, 8, 32]}),
        (16, 32): ("cp", {"rank": 14, "view": [16, 32]}),
        (48, 32): ("tensor_train", {"ranks": [5, 30, 7], "view": [6, 8, 4, 8]}),
        (32, 48): ("cp", {"rank": 20, "view": [4, 8, 6, 8]}),
    }
    tensors = tiny.encode_model(model)
    for name, encoded in tensors.items():
        if len(encoded.shape) != 2:
            continue
        method, params = how[encoded.shape]
        parts = {"factor": factor}
        stored = recipes.encode(recipes.Recipe(method, params, parts), decode(encoded), Stats(None), 1)
        tensors[name] = stored
        model.get_parameter(name).data.copy_(decode(stored))
    return tensors


@pytest.mark.parametrize("way", ["steps", ""])
def test_a_decomposed_model_gives_the_logits_of_the_modules(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    import json
    from functools import partial

    from nstf.runtime import engine
    from nstf.runtime.artifact import write_artifact

    # So small a model's matrices cost less decoded.
    monkeypatch.setattr(engine, "compile_matrix", partial(engine.compile_matrix, way=way))
    model = build("llama")
    files = {"config.json": json.dumps(tiny.config_json(model)).encode()}
    path = tmp_path / "model.nstf"
    write_artifact(path, decomposed(tiny, model), files, {})
    ids = ids_of(60)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    size = float(expected.std())
    found = Engine.open(path, exact=True)
    kinds = {kernel.partition("(")[0] for kernel in found.kernels.values()}
    assert kinds == ({"cp", "tucker", "tensor_train"} if way else {"dense"})
    assert float((found.forward(ids[:50], all_logits=True) - expected[:50]).abs().max()) < 0.01 * size
    for i in range(50, 60):
        torch.testing.assert_close(found.forward([int(ids[i])]), expected[i], atol=0.01 * size, rtol=0)
    fast = Engine.open(path)
    assert float((fast.forward(ids, all_logits=True) - expected).square().mean().sqrt()) < 0.06 * size


def test_greedy_tokens_are_those_of_the_modules(written: tuple[Path, Any]) -> None:
    path, _ = written
    plain = nstf.runtime.load(path, engine="off")
    exact = nstf.runtime.load(path, engine="exact")
    same = 0
    for start in range(5):
        ids = ids_of(60)[None, start * 10 : start * 10 + 9]
        arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        expected = plain.generate(ids, **arguments)
        found = exact.generate(ids, **arguments)
        same += bool(torch.equal(expected, found))
    assert exact.nstf_engine.engine.position > 0
    # A random model's best two tokens can be as close as float16 keys are coarse: once in a while one may differ.
    assert same >= 4


def test_panels_give_nearly_the_same_logits(tiny: ModuleType, tmp_path: Path, isa: str) -> None:
    artifact = open_artifact(tiny.write(tmp_path, build("llama")))
    ids = ids_of(40)
    stored, repacked, usual = (Engine(artifact, panels=p) for p in (False, True, None))
    assert not any(kernel.startswith("panels") for kernel in stored.kernels.values())
    assert any(kernel.startswith("panels") for kernel in repacked.kernels.values()) == isa.startswith("avx")
    assert usual.kernels == repacked.kernels
    expected = stored.forward(ids, all_logits=True)
    size = float(expected.std())
    found = repacked.forward(ids, all_logits=True)
    assert float((found - expected).square().mean().sqrt()) < 0.03 * size
    stored.reset()
    repacked.reset()
    for i in ids[:20]:
        one, other = stored.forward([int(i)]), repacked.forward([int(i)])
        assert float((one - other).square().mean().sqrt()) < 0.01 * size


def test_the_cache_grows_without_forgetting(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, build("llama"))
    ids = ids_of(400)
    whole, parts = Engine.open(path, exact=True), Engine.open(path, exact=True)
    expected = whole.forward(ids)
    for start in range(0, 400, 50):
        found = parts.forward(ids[start : start + 50])
    before = Engine.open(path)
    before.forward(ids[:10])
    assert before.cache_bytes < parts.cache_bytes
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_an_int8_cache_gives_nearly_the_same_logits(written: tuple[Path, Any]) -> None:
    path, _ = written
    ids = ids_of(150)
    expected = Engine.open(path, exact=True).forward(ids, all_logits=True)
    size = float(expected.std())
    prompt, parts = (Engine.open(path, exact=True, kv_cache="int8") for _ in range(2))
    found = prompt.forward(ids, all_logits=True)
    lost = float((found - expected).square().mean().sqrt())
    assert 0 < lost < 0.02 * size
    # One token at a time goes another way through the same bytes.
    parts.forward(ids[:100])
    for i in range(100, 150):
        torch.testing.assert_close(parts.forward([int(ids[i])]), found[i], atol=0.005 * size, rtol=0)


def test_an_int8_cache_grows_and_takes_half_the_memory(tiny: ModuleType, tmp_path: Path) -> None:
    changed = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = build("llama", **changed)
    path = tiny.write(tmp_path, model)
    ids = ids_of(400)
    engines = [Engine.open(path, exact=True, kv_cache=kind) for kind in ("float16", "int8", "int8")]
    expected = [engine.forward(ids) for engine in engines]
    engines[2].reset()
    for start in range(0, 400, 50):
        found = engines[2].forward(ids[start : start + 50])
    torch.testing.assert_close(found, expected[1], atol=1e-4, rtol=1e-4)
    # A page: 64 positions of 16 numbers of 2 bytes, or of 16 bytes, a minimum and a scale.
    assert engines[2].cache_bytes * 2048 == engines[0].cache_bytes * 1280


@pytest.mark.parametrize("size", [2, 6, 16, 30, 80, 256, 512])
def test_an_int8_cache_for_heads_of_any_even_size(tiny: ModuleType, tmp_path: Path, size: int) -> None:
    model = build("llama", head_dim=size, num_hidden_layers=1)
    path = tiny.write(tmp_path, model)
    ids = ids_of(70)
    plain, engine = Engine.open(path, exact=True), Engine.open(path, exact=True, kv_cache="int8")
    expected = plain.forward(ids, all_logits=True)
    assert float((engine.forward(ids[:50], all_logits=True) - expected[:50]).abs().max()) < 0.05 * float(
        expected.std()
    )
    for i in range(50, 70):
        found = engine.forward([int(ids[i])])
        torch.testing.assert_close(found, expected[i], atol=0.05 * float(expected.std()), rtol=0)


def test_a_loaded_model_generates_with_an_int8_cache(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, build("llama"))
    model: Any = nstf.runtime.load(path, engine="exact", kv_cache="int8")
    ids = ids_of(9)[None]
    found = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1)
    engine = model.nstf_engine.engine
    assert engine.kv_cache == "int8" and found.shape == (1, 21)
    assert found[0, 9:].tolist() == list(Engine.open(path, exact=True, kv_cache="int8").generate(ids[0], 12))
    for refused in (
        lambda: nstf.runtime.load(path, kv_cache="int4"),
        lambda: Engine.open(path, kv_cache="int4"),
    ):
        with pytest.raises(UsageError, match=r"'int4' is not one of float16, int8"):
            refused()


def test_sampling_follows_torchs_seed_and_the_settings(tiny: ModuleType, tmp_path: Path) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, build("llama")), engine="exact")
    ids = ids_of(5)[None]
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, max_new_tokens=12, do_sample=True, temperature=3.0, eos_token_id=-1))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    greedy = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1)
    top = model.generate(ids, max_new_tokens=12, do_sample=True, temperature=3.0, top_k=1, eos_token_id=-1)
    assert torch.equal(greedy, top) and greedy.shape == (1, 17)
    assert model.nstf_engine.engine.position > 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.5, "do_sample": False},
        {"min_p": 0.2, "do_sample": True, "temperature": 0.7},
        {"repetition_penalty": 1.2, "min_p": 0.1, "top_p": 0.9, "top_k": 30, "do_sample": True},
    ],
)
def test_penalty_and_min_p_give_the_tokens_of_transformers(
    tiny: ModuleType, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    path = tiny.write(tmp_path, build("llama"))
    found = []
    for engine in ("exact", "off"):
        model: Any = nstf.runtime.load(path, engine=engine)
        torch.manual_seed(0)
        found.append(model.generate(ids_of(5)[None], max_new_tokens=12, eos_token_id=-1, **arguments))
        if engine == "exact":
            assert model.nstf_engine.engine.position > 0
    assert torch.equal(*found)


def test_generation_stops_at_the_end_token(tiny: ModuleType, tmp_path: Path) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, build("llama")))
    ids = ids_of(5)[None]
    whole = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=-1)[0, 5:].tolist()
    stop = whole[4]
    cut = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=stop)[0, 5:].tolist()
    assert cut == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 3},
        {"return_dict_in_generate": True},
        {"num_return_sequences": 2, "do_sample": True},
    ],
)
def test_what_the_engine_does_not_do_is_left_to_transformers(
    tiny: ModuleType, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    path = tiny.write(tmp_path, build("llama"))
    model: Any = nstf.runtime.load(path)
    plain: Any = nstf.runtime.load(path, engine="off")
    ids = ids_of(5)[None]
    torch.manual_seed(0)
    found = model.generate(ids, max_new_tokens=4, pad_token_id=0, **arguments)
    torch.manual_seed(0)
    expected = plain.generate(ids, max_new_tokens=4, pad_token_id=0, **arguments)
    found, expected = (r if isinstance(r, torch.Tensor) else r.sequences for r in (found, expected))
    assert torch.equal(found, expected) and model.nstf_engine.engine is None


def test_batches_and_masks_are_left_to_transformers(tiny: ModuleType, tmp_path: Path) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, build("llama")))
    ids = ids_of(10).view(2, 5)
    assert model.generate(ids, max_new_tokens=3, pad_token_id=0, eos_token_id=-1).shape == (2, 8)
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    model.generate(ids[:1], attention_mask=mask, max_new_tokens=3, pad_token_id=0)
    assert model.nstf_engine.engine is None


def test_other_architectures_keep_their_generate(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.new_model("GPT2LMHeadModel"))
    model: Any = nstf.runtime.load(path)
    assert model.generate(ids_of(5)[None], max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] > 5
    assert model.nstf_engine.engine is None
    with pytest.raises(UnsupportedError, match="does not run architecture 'gpt2'"):
        Engine.open(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba'"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 3}, "layer types"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"head_dim": 1024}, "heads of 1024"),
        ({"num_attention_heads": 0, "head_dim": None}, "cannot read this config"),
        ({"hidden_size": None}, "cannot read this config"),
    ],
)
def test_configs_it_would_run_wrongly_are_refused(changes: dict[str, Any], message: str) -> None:
    config = build("llama").config.to_dict() | changes
    with pytest.raises(UnsupportedError, match=message):
        read_config(config)


def test_a_missing_or_an_unknown_tensor_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    model = build("llama")
    files = {"config.json": json.dumps(tiny.config_json(model)).encode()}
    tensors = tiny.encode_model(model)
    fewer = {k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}
    more = {**tensors, "model.layers.0.self_attn.sinks": tiny.dense(torch.zeros(4))}
    for number, broken in enumerate((fewer, more)):
        path = tmp_path / f"{number}.nstf"
        write_artifact(path, broken, files, {})
        with pytest.raises((UnsupportedError, UsageError), match=("up_proj", "sinks")[number]):
            Engine(open_artifact(path))


def test_bad_tokens_are_one_clear_error(tiny: ModuleType, tmp_path: Path) -> None:
    engine = Engine.open(tiny.write(tmp_path, build("llama")))
    for ids, message in (
        ([], "no tokens"),
        ([100], "vocabulary"),
        ([-1], "vocabulary"),
        ([3] * 513, "context"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.forward(ids)
    assert engine.forward([3]).shape == (100,)


def rewritten(
    tiny: ModuleType, folder: Path, model: Any, changes: dict[str, Any], drop: tuple[str, ...]
) -> Path:
    """The model's artifact with another config.json."""
    config = {k: v for k, v in tiny.config_json(model).items() if k not in drop} | changes
    path = folder / "other.nstf"
    write_artifact(path, tiny.encode_model(model), {"config.json": json.dumps(config).encode()}, {})
    return path


@pytest.mark.parametrize(
    ("name", "changes", "drop"),
    [
        # As Gemma 3 was first published.
        ("gemma 3", {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
         ("layer_types", "rope_parameters")),
        ("gemma 3", {}, ("query_pre_attn_scalar",)),
        ("mistral, sliding", {"layer_types": ["full_attention"] * 3}, ()),
        ("llama", {"attention_bias": False, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 3}, ()),
        ("llama", {"rope_theta": 500.0}, ("rope_parameters",)),
    ],
)  # fmt: skip
def test_configs_mean_what_they_mean_to_transformers(
    tiny: ModuleType, tmp_path: Path, name: str, changes: dict[str, Any], drop: tuple[str, ...]
) -> None:
    path = rewritten(tiny, tmp_path, build(name), changes, drop)
    ids = ids_of(100)
    try:
        engine = Engine.open(path, exact=True)
    except UnsupportedError as error:
        assert "would ignore" in str(error)  # biases that the config does not ask for
        return
    plain: Any = nstf.runtime.load(path, engine="off")
    with torch.no_grad():
        expected = plain(ids[None]).logits[0]
    found = engine.forward(ids, all_logits=True)
    assert float((found - expected).abs().max()) < 0.01 * float(expected.std())


def test_a_changed_model_is_left_to_transformers(tiny: ModuleType, tmp_path: Path) -> None:
    import copy

    path = tiny.write(tmp_path, build("llama"))
    model: Any = nstf.runtime.load(path, engine="exact")
    arguments: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    ids = ids_of(5)[None]
    usual = model.generate(ids, **arguments)
    position = model.nstf_engine.engine.position
    copied = copy.deepcopy(model)
    assert torch.equal(copied.generate(ids, **arguments), usual) and copied.nstf_engine.engine is None
    handle = model.lm_head.register_forward_hook(lambda module, args, out: -out)
    assert not torch.equal(model.generate(ids, **arguments), usual)
    handle.remove()
    model.generate(ids[:, :3], **arguments)
    assert model.nstf_engine.engine.position == position - 2


def test_a_second_caller_does_not_disturb_the_first(tiny: ModuleType, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model: Any = nstf.runtime.load(tiny.write(tmp_path, build("llama")), engine="exact")
    prompts = [ids_of(40)[None, i * 5 : i * 5 + 5] for i in range(4)]

    def run(ids: torch.Tensor) -> torch.Tensor:
        return model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=-1)

    expected = [run(p) for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, prompts * 3))
    assert sum(torch.equal(f, e) for f, e in zip(found, expected * 3, strict=True)) >= 11


def test_beyond_the_context_transformers_goes_on(tiny: ModuleType, tmp_path: Path) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, build("llama")))
    out = model.generate(ids_of(500)[None], max_new_tokens=30, do_sample=False, eos_token_id=-1)
    assert out.shape == (1, 530)


def test_unstated_top_k_is_that_of_transformers(tiny: ModuleType, tmp_path: Path) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, build("llama")))
    torch.manual_seed(0)
    drawn = {
        int(model.generate(ids_of(3)[None], max_new_tokens=1, do_sample=True, temperature=1000.0)[0, -1])
        for _ in range(150)
    }
    assert model.nstf_engine.engine is not None and 30 < len(drawn) <= 50


def test_an_int8_cache_that_nobody_would_keep_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, build("llama"))
    for other in ({"engine": "off"}, {"attention": "planned"}, {"device": "cuda"}):
        with pytest.raises(UsageError, match="CPU engine"):
            nstf.runtime.load(path, kv_cache="int8", **other)
    model: Any = nstf.runtime.load(path, kv_cache="int8")
    model.generate(ids_of(3)[None], max_new_tokens=1)
    assert model.nstf_engine.engine.kv_cache == "int8"
