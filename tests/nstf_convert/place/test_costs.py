"""Costs of a model from an artifact's header and from a config, and what products are predicted to take."""

import json
from pathlib import Path

import pytest

from nstf.errors import UnsupportedError, UsageError
from nstf.kernels.formats import EncodedTensor
from nstf.runtime.artifact import Shared, open_artifact, write_artifact
from nstf_convert.place.costs import Matrix, of_artifact, of_config, tree_of
from nstf_convert.place.fabric import Fabric
from nstf_convert.place.machine import read_machine
from nstf_convert.place.plans import Layout, Plan, Stage
from nstf_convert.place.predict import Load, Predictor
from nstf_convert.place.products import Products
from tests.nstf_convert.place.stored import LLAMA, artifact_of

SHAPES = Path(__file__).parents[3] / "examples" / "shapes"


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_and_its_config_cost_the_same(tmp_path: Path, tied: bool) -> None:
    config = LLAMA | {"tie_word_embeddings": tied}
    with open_artifact(artifact_of(tmp_path / "m.nstf", config)) as artifact:
        stored = of_artifact(artifact)
        planned = of_config("m", config, "int4")
        assert stored.size_bytes == planned.size_bytes
        assert stored.size_bytes == sum(
            e.end - e.start for n, e in artifact.entries.items() if not n.startswith("nstf.file/")
        )
        assert stored.facts == planned.facts and stored.facts.kv_bytes == 2 * 2 * 16 * 2
        for one, other in zip(stored.layers, planned.layers, strict=True):
            assert sorted(m.key for m in one) == sorted(m.key for m in other)
        assert stored.tied is tied and stored.head is not None and stored.head.kind == "head"
        # As `nstf inspect --tp` says: 256 columns in groups of 128 are two parts and not four.
        assert stored.problem(2) is None and planned.problem(2) is None
        assert "down_proj" in str(stored.problem(4)) and "down_proj" in str(planned.problem(4))


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("dense-8b", 8.03e9, 4096), ("dense-70b", 70.6e9, 4096), ("dense-405b", 405.9e9, 4096),
        ("moe-30b-a3b", 30.5e9, 2048), ("moe-671b", 671e9, 1152),
    ],
)  # fmt: skip
def test_the_shapes_are_those_of_the_models_they_are_named_after(
    name: str, parameters: float, kv_bytes: int
) -> None:
    found = of_config(name, json.loads((SHAPES / f"{name}.json").read_text()), "bf16")
    assert found.size_bytes / 2 == pytest.approx(parameters, rel=0.003)
    assert found.facts.kv_bytes == kv_bytes


# By family, parameters that are stored (a tied head once), and those of the layers, in millions.
FAMILIES = {
    "gpt2": (124.4, 85.1), "bloom": (559.2, 302.3), "falcon": (6922, 6626), "gptj": (6051, 5638), "gpt_neo": (1316, 1209),
    "mpt": (1311, 1208), "gpt_bigcode": (111.4, 72.0), "codegen": (6051, 5638), "bert": (110, 85.1), "roberta": (125, 85.1),
    "gpt_neox": (20555, 19934), "opt": (125.2, 85.1), "xlm": (667, 605),
}  # fmt: skip


QWEN2_VL = {
    "model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
    "num_hidden_layers": 28, "num_key_value_heads": 2, "vocab_size": 151936, "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536},
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_the_text_of_a_model_that_reads_images_is_divided(tied: bool) -> None:
    """transformers has no class of Qwen2-VL's text with a head, and its config could not be placed."""
    found = of_config("x", QWEN2_VL | {"tie_word_embeddings": tied}, "bf16")
    assert found.size_bytes / 2 == pytest.approx(1.544e9 if tied else 1.777e9, rel=0.001)
    assert found.tied is tied and found.head is not None and found.head.shape == (151936, 1536)
    assert len(found.layers) == 28 and found.problem(2) is None


NEO = {"gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16}}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_tables_are_found_by_whatever_name_a_family_has_for_them(family: str) -> None:
    """They were small tensors of every rank where the list of layers is not called `layers`, and layers cost nothing."""
    sizes = {"hidden_size": 1024, "n_layer": 24, "n_head": 16} if family == "bloom" else {}
    found = of_config(family, {"model_type": family} | sizes, "bf16")
    total, layers = FAMILIES[family]
    in_layers = sum(m.size_bytes for layer in found.layers for m in layer)
    assert found.size_bytes / 2e6 == pytest.approx(total, rel=0.005)
    assert in_layers / 2e6 == pytest.approx(layers, rel=0.005)
    assert all(layer for layer in found.layers) and found.kept_bytes < 0.03 * found.size_bytes
    assert found.table is not None and found.head is not None
    assert found.tied is (found.table.name == found.head.name)


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"model_type": "falcon"}, 1), ({"model_type": "falcon", "multi_query": False}, 71),
        ({"model_type": "falcon", "new_decoder_architecture": True, "num_attention_heads": 64, "hidden_size": 4096,
          "num_kv_heads": 8}, 8),
        ({"model_type": "gpt_bigcode"}, 1), ({"model_type": "gpt2"}, 12),
    ],
)  # fmt: skip
def test_keys_and_values_are_those_of_the_heads_that_are_stored(
    config: dict[str, object], heads: int
) -> None:
    """Falcon 7B has one, and 71 were counted."""
    facts = of_config("m", config | {"num_hidden_layers": 2}, "bf16").facts
    assert facts.kv_ranks == heads and facts.kv_bytes == 2 * heads * 64 * 2


def test_a_tied_table_costs_the_same_under_the_heads_name(tmp_path: Path) -> None:
    """As safetensors leaves it where it drops one of two names. The first of two stages had no table, so no bytes."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    with open_artifact(artifact_of(tmp_path / "a.nstf", LLAMA)) as artifact:
        stored: dict[str, EncodedTensor | Shared] = {
            n: artifact.encoded(n) for n in artifact.names() if n not in names
        }
        stored |= {names[0]: artifact.encoded(names[1]), names[1]: Shared(names[0])}
        write_artifact(tmp_path / "b.nstf", stored, {"config.json": artifact.file("config.json")})
        usual = of_artifact(artifact)
    with open_artifact(tmp_path / "b.nstf") as artifact:
        turned = of_artifact(artifact)
    assert turned.tied and (turned.table, turned.head) == (usual.table, usual.head)
    assert turned.size_bytes == usual.size_bytes
    plan = Plan(Layout(2), (Stage(((0,),), 0, 1), Stage(((1,),), 1, 2)))
    one, other = (
        Predictor(model, Fabric(read_machine("h200x2")), Load()).predict(plan) for model in (usual, turned)
    )
    assert one.memory == other.memory and one.step_s == other.step_s


@pytest.mark.parametrize("family", ["biogpt", "trocr", "bert", "roberta", "gpt_neo"])
def test_weights_and_cache_are_those_that_transformers_makes(family: str) -> None:
    """BioGPT's head is an output_projection, BERT's bias has two names, and GPT-Neo's local layers keep all positions."""
    import torch
    import transformers

    names = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(family, vocab_size=128, **names, **NEO.get(family, {}))
    found = of_config("x", config.to_dict(), "bf16")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert found.size_bytes == 2 * sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        cache = model(torch.arange(100)[None], use_cache=True).past_key_values
    if cache is not None:  # BERT's and RoBERTa's is for decoders alone
        kept = sum(2 * (x.keys.numel() + x.values.numel()) for x in cache.layers)
        assert kept == sum(found.facts.kv_bytes * min(100, w or 100) for w in found.facts.windows)


def test_an_artifact_of_gpt2_costs_what_its_config_does(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 512, "n_embd": 128, "n_layer": 2,
        "n_head": 2, "n_positions": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    shared = ("lm_head.weight", "transformer.wte.weight")
    with open_artifact(artifact_of(tmp_path / "m.nstf", config, shared=shared)) as artifact:
        stored, planned = of_artifact(artifact), of_config("m", config, "int4")
    assert stored.size_bytes == planned.size_bytes and stored.tied and planned.tied
    assert [sorted(m.key for m in x) for x in stored.layers] == [
        sorted(m.key for m in x) for x in planned.layers
    ]
    assert len(stored.layers[1]) == 4


def test_a_whole_gpt2_is_read_for_a_token() -> None:
    config = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}
    model = of_config("xl", config, "bf16")
    predictor = Predictor(model, Fabric(read_machine("h100x8")), Load(batch=1, context=512))
    found = predictor.predict(Plan(Layout(), (Stage(((0,),), 0, 48),)))
    assert found.step_s > model.size_bytes / 3.35e12 and found.prompt_s > model.size_bytes / 3.35e12


def test_a_table_that_is_not_cut_is_whole_on_every_rank() -> None:
    """transformers' plan of GPT-NeoX says nothing of its table, so `load(tensor_parallel=2)` does not cut it."""
    config = {"model_type": "gpt_neox", "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8}
    model = of_config("neox", config, "bf16")
    assert model.table is not None and model.table.axis is None
    predictor = Predictor(model, Fabric(read_machine("h100x8")), Load())
    assert predictor.fixed_bytes(0, Layout(2, 2)) > model.table.size_bytes


@pytest.mark.parametrize("family", ["whisper", "bart", "t5", "vision-encoder-decoder"])
def test_an_encoder_with_a_decoder_is_refused(family: str) -> None:
    """Of some the decoder alone was counted."""
    config: dict[str, object] = {"model_type": family, "is_encoder_decoder": True}
    if family == "vision-encoder-decoder":
        config |= {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2"}}
    with pytest.raises(UnsupportedError, match=f"type '{family}' has an encoder and a decoder"):
        of_config("x", config, "int4")


def test_layers_that_are_not_found_are_refused() -> None:
    """HRM goes through its layers many times for a token: its config counts the times."""
    with pytest.raises(UnsupportedError, match="no list of 128 layers is among the tensors"):
        of_config("x", {"model_type": "hrm_text"}, "int4")


def test_a_member_of_the_list_can_be_two_layers() -> None:
    """LongCat: what each reads is at every second layer, so that stages divide it evenly."""
    found = of_config("x", {"model_type": "longcat_flash"}, "int4")
    assert [bool(layer) for layer in found.layers] == [True, False] * 28


def test_a_window_without_kinds_of_layers_is_that_of_all() -> None:
    config = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32}
    assert of_config("m", config, "int4").facts.windows == (32, 32)
    assert of_config("m", config | {"sliding_window": None}, "int4").facts.windows == (0, 0)
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}
    assert of_config("m", qwen, "int4").facts.windows == (0, 0)


def test_encodings_have_their_bits() -> None:
    for word, bits in (
        ("bf16", 16),
        ("int4", 4.125),
        ("int8", 8.125),
        ("trellis3", 3),
        ("trellis2.25", 2.25),
    ):
        matrix = Matrix("x", tree_of(word, "x.weight", (1024, 1024)), (1024, 1024), "product", 0)
        assert 8 * matrix.size_bytes / 2**20 == pytest.approx(bits, rel=0.01)
    assert tree_of("int4", "a.norm.weight", (64,)).kind == "dense"
    assert tree_of("int4", "mlp.gate.weight", (64, 128)).kind == "dense"
    for wrong in ("int9", "trellis7", "4", "trellis2.1"):
        with pytest.raises(UsageError, match="write bf16"):
            tree_of(wrong, "x", (64, 128))


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not read the config of this model of type 'nonsense'"):
        of_config("x", {"model_type": "nonsense"}, "int4")
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    with pytest.raises(UnsupportedError, match="layers of type 'linear_attention' are not known"):
        of_config(
            "x",
            {"model_type": "qwen3_next", "num_hidden_layers": 2, "num_experts": 4, "hidden_size": 64} | kinds,
            "int4",
        )


def test_layers_with_other_heads_each_are_refused() -> None:
    """Gemma 4: its full layers have heads of another size, which transformers does not give for the whole model."""
    from transformers import Gemma4TextConfig

    with pytest.raises(
        UnsupportedError, match="the layers of models of type 'gemma4_text' differ in head_dim"
    ):
        of_config("x", Gemma4TextConfig().to_dict(), "int4")


def test_a_config_of_no_elements_is_one_line() -> None:
    """It was a traceback of the format that was to hold them."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 100}
    with pytest.raises(UsageError, match=r"make .*mlp.* a tensor without elements: \[0, 64\]"):
        of_config("x", {"model_type": "llama", "intermediate_size": 0} | sizes, "int4")


# Microseconds on an H200 by rows of activations, 28672 x 8192 (docs/gpu_speed.md). Trellis codes for few rows are priced by
# whole tokens, below: turned activations and launches between them are part of those.
MEASURED = {
    "int4": {1: 36.6, 8: 40.9, 16: 51.2, 64: 87.8, 128: 104.8, 256: 157.2, 1024: 625, 4096: 2764},
    "int3": {1: 34.0, 16: 78.6, 64: 92.7, 256: 179.4},
    "int8": {1: 60.6, 16: 78.0, 256: 185.1},
    "bf16": {1: 110.0, 256: 174.0},
    "trellis2": {64: 206.0, 256: 387.0},
    "trellis3": {64: 221.0, 256: 387.0},
}


@pytest.mark.parametrize("encoding", MEASURED)
def test_products_are_predicted_within_a_fifth_of_what_an_h200_took(encoding: str) -> None:
    device, shape = read_machine("h200x1").devices[0], (28672, 8192)
    matrix = Matrix("x", tree_of(encoding, "x.weight", shape), shape, "product", 0)
    for rows, microseconds in MEASURED[encoding].items():
        found = 1e6 * Products().seconds(device, [matrix], 1, rows)
        assert found == pytest.approx(microseconds, rel=0.2), (rows, found)


@pytest.mark.parametrize(
    ("encoding", "batch", "milliseconds", "within"),
    [
        ("int4", 1, 1.79, 0.05),
        ("int4", 4, 1.89, 0.05),
        ("int4", 8, 1.98, 0.05),
        ("bf16", 1, 4.41, 0.05),
        ("bf16", 4, 4.47, 0.05),
        ("bf16", 8, 4.53, 0.05),
        ("trellis3", 1, 2.59, 0.05),  # measured with the head in int4
        ("int3", 1, 1.61, 0.2),
        ("int2", 1, 1.38, 0.2),
    ],
)
def test_steps_of_a_whole_model_are_predicted_as_an_h200_took_them(
    encoding: str, batch: int, milliseconds: float, within: float
) -> None:
    """docs/gpu_speed.md, "Whole model": the shape of an 8B model, prompts of 128 tokens, 128 decoded."""
    model = of_config("8b", json.loads((SHAPES / "dense-8b.json").read_text()), encoding)
    predictor = Predictor(model, Fabric(read_machine("h200x1")), Load(batch=batch, context=192))
    found = predictor.predict(Plan(Layout(), (Stage(((0,),), 0, 32),)))
    assert 1e3 * found.step_s == pytest.approx(milliseconds, rel=within)
    assert found.links_share == found.idle_share == 0


def test_memory_is_shared_as_tensors_are() -> None:
    model = of_config("8b", json.loads((SHAPES / "dense-8b.json").read_text()), "int4")
    predictor = Predictor(model, Fabric(read_machine("h200x2")), Load(batch=1, context=4096, prompt=1))
    one = predictor.predict(Plan(Layout(), (Stage(((0,),), 0, 32),)))
    two = predictor.predict(Plan(Layout(1, 2), (Stage(((0, 1),), 0, 32),)))
    keys = 4096 * 32 * 4096
    assert one.memory[0] == pytest.approx(model.size_bytes + keys, rel=0.001)
    assert two.memory[0] == two.memory[1] == pytest.approx(one.memory[0] / 2, rel=0.001)
    # A pipeline's ends hold table and head.
    pipe = predictor.predict(Plan(Layout(2), (Stage(((0,),), 0, 16), Stage(((1,),), 16, 32))))
    assert sum(pipe.memory) == pytest.approx(one.memory[0], rel=0.001)
