"""The command: what it says, refuses, and leaves behind."""

import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.errors import UsageError
from nstf.runtime.artifact import Shared, open_artifact, write_artifact
from nstf_convert import export as exports
from nstf_convert.cli import run
from nstf_convert.export import writing
from nstf_convert.export.card import card


@pytest.fixture
def artifact(tiny: ModuleType, tmp_path: Path) -> Path:
    """A Llama with int4 matrices and one column count that no block divides."""
    (tmp_path / "in").mkdir()
    return tiny.write(tmp_path / "in", tiny.new_model("LlamaForCausalLM", intermediate_size=64))


@pytest.fixture
def lossy(tiny: ModuleType, tmp_path: Path) -> Path:
    """The down projections' 48 columns fill no block of 32."""
    (tmp_path / "lossy").mkdir()
    return tiny.write(tmp_path / "lossy", tiny.new_model("LlamaForCausalLM"))


def test_it_says_the_bytes_before_and_writes_a_card_beside(
    artifact: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(["export", str(artifact), "--to", "gguf", "-o", str(tmp_path / "m.gguf")]) == 0
    said = capsys.readouterr().out
    assert "20 tensors" in said and said.index("exact") < said.index("wrote")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "m.README.md", "m.gguf"]
    text = (tmp_path / "m.README.md").read_text()
    assert "| Q4_0 |" in text and 'Llama("m.gguf")' in text and "--to gguf" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_what_appears_at_the_output_meanwhile_stays(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """Another export's folder, or the user's, was taken for none."""
    output, real = tmp_path / f"x.{to}", exports._card

    def card(*given: Any) -> str:
        (output if to == "gguf" else output / "notes").parent.mkdir(exist_ok=True)
        (output if to == "gguf" else output / "notes").write_text("mine")
        return real(*given)

    monkeypatch.setattr(exports, "_card", card)
    assert run(["export", str(artifact), "--to", to, "-o", str(output)]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", output.name]
    assert (output if to == "gguf" else output / "notes").read_text() == "mine"


def test_an_output_that_is_a_link_gets_the_files_where_it_leads(artifact: Path, tmp_path: Path) -> None:
    """They had the link's name there, and the file that it leads to stayed the old one."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real.gguf").write_bytes(b"old")
    (tmp_path / "m.gguf").symlink_to("disk/real.gguf")
    words = ["export", str(artifact), "--to", "gguf", "-o", str(tmp_path / "m.gguf"), "--overwrite"]
    assert run(words) == 0
    assert sorted(p.name for p in (tmp_path / "disk").iterdir()) == ["real.README.md", "real.gguf"]
    assert (tmp_path / "m.gguf").is_symlink() and (tmp_path / "m.gguf").read_bytes()[:4] == b"GGUF"


def test_the_card_names_files_and_not_where_they_lie(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "secret client"
    folder.mkdir()
    moved = artifact.rename(folder / "my model.nstf")
    asked: list[exports.Request] = []

    def export(path: Path, request: exports.Request, announce: object) -> None:
        asked.append(request)
        raise UsageError("enough")

    monkeypatch.setattr(exports, "export", export)
    words = ["--to", "onnx", "--source", str(folder / "model;1.onnx"), "--allow-loss"]
    assert run(["export", str(moved), *words, "-o", str(tmp_path / "x")]) == 2
    assert asked[0].command == "nstf export 'my model.nstf' --to onnx --source 'model;1.onnx' --allow-loss"


def test_json_counts_the_tensors_and_their_bytes(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["export", str(artifact), "--to", "gguf", "-o", str(tmp_path / "x"), "--json"]
    assert run([*words, "--license", "mit", "--base-model", "someone/tiny"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tensors"].keys() == {"exact"} and data["tensors"]["exact"]["tensors"] == 20
    assert set(data["files"]) == {"x.gguf", "README.md"}
    assert "base_model: someone/tiny\n" in (tmp_path / "x" / "README.md").read_text()
    assert "license: mit\n" in (tmp_path / "x" / "README.md").read_text()


def test_files_follow_the_umask(artifact: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert run(["export", str(artifact), "--to", "transformers", "-o", str(tmp_path / "x")]) == 0
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "x").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {0o640}


@pytest.mark.parametrize("target", ["gguf", "compressed-tensors"])
def test_loss_is_refused_until_it_is_allowed(lossy: Path, tmp_path: Path, capsys: Any, target: str) -> None:
    words = ["export", str(lossy), "--to", target, "-o", str(tmp_path / "x")]
    assert run(words) == 6
    error = capsys.readouterr().err
    assert "no exact form of" in error and "--allow-loss" in error and "--dtype float32" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lossy"]
    assert run([*words, "--dtype", "float32"]) == 0
    assert run([*words, "--allow-loss", "--overwrite"]) == 0
    assert "lossy" in (tmp_path / "x" / "README.md").read_text()


@pytest.mark.parametrize("target", ["hf", "gguf", "compressed-tensors"])
def test_values_beyond_a_type_are_no_loss_that_is_allowed(
    lossy: Path, tmp_path: Path, capsys: Any, target: str
) -> None:
    """They became infinities without a word, of which the model computes NaN."""
    from nstf.kernels.formats import decode
    from nstf.quantizers import int_grid
    from nstf.runtime.artifact import open_artifact, write_artifact

    name, output = "model.layers.0.mlp.down_proj.weight", tmp_path / "x"
    with open_artifact(lossy) as opened:
        tensors = {n: opened.encoded(n) for n in opened.names()}
        value = decode(tensors[name]) * (1e5 / decode(tensors[name]).abs().max())
        tensors[name] = int_grid.encode(value, int_grid.Params(bits=4, group=32))
        files = {n: opened.file(n) for n in opened.file_names()}
        write_artifact(tmp_path / "large.nstf", tensors, files)
    words = ["export", str(tmp_path / "large.nstf"), "--to", target, "-o", str(output), "--allow-loss"]
    assert run([*words, "--dtype", "bfloat16"]) == 0
    before = {p.name: p.read_bytes() for p in output.iterdir()}
    assert run([*words, "--dtype", "float16", "--overwrite"]) == 6
    error = capsys.readouterr().err
    assert name in error and "which float16 does not hold" in error and "--dtype" in error
    assert {p.name: p.read_bytes() for p in output.iterdir()} == before


def test_an_older_export_is_replaced_only_when_asked(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["export", str(artifact), "-o", str(tmp_path / "x")]
    assert run(words) == 0 and run(words) == 2
    assert "or --overwrite" in capsys.readouterr().err
    older = tmp_path / "x" / "model-00001-of-00002.safetensors"
    older.write_text("")
    assert run([*words, "--overwrite"]) == 0
    assert not older.exists()
    # A folder that is no export is not removed, whatever was said.
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("")
    assert run(["export", str(artifact), "-o", str(tmp_path / "photos"), "--overwrite"]) == 2
    assert (tmp_path / "photos" / "a.jpg").exists()


@pytest.mark.parametrize("name", [".git", "notes.txt", "adapter_model.safetensors", "tokenizer.json"])
def test_what_somebody_keeps_in_an_older_export_is_not_removed(
    artifact: Path, tmp_path: Path, capsys: Any, name: str
) -> None:
    """Exports replace whole folders: a repository lost its .git."""
    words = ["export", str(artifact), "-o", str(tmp_path / "x"), "--overwrite"]
    assert run(words) == 0
    kept = tmp_path / "x" / name
    if is_folder := name in (".git", "tokenizer.json"):
        kept.unlink(missing_ok=True)
        kept.mkdir()
    mine = kept / "mine" if is_folder else kept
    mine.write_text("mine")
    before = sorted(p.name for p in tmp_path.iterdir())
    assert run(words) == 2
    assert f"holds {name}, which no export writes" in capsys.readouterr().err
    assert mine.read_text() == "mine" and sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("target", list(exports.TARGETS))
def test_a_failure_leaves_the_older_export_and_nothing_else(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    words = ["export", str(artifact), "--to", target, "-o", str(tmp_path / "x"), "--overwrite"]
    extra = ["--dtype", "float32"] if target == "compressed-tensors" else []
    assert run([*words, *extra]) == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "x").iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exports, "_card", full)
    assert run([*words, *extra]) == 1
    assert {p.name: p.read_bytes() for p in (tmp_path / "x").iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "x"]


def test_a_full_disk_is_known_before(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Full:
        f_bavail, f_frsize = 1, 100

    monkeypatch.setattr(writing.os, "statvfs", lambda _: Full)
    assert run(["export", str(artifact), "-o", str(tmp_path / "x")]) == 1
    assert "100 free on the disk" in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "tflite"), "choose one of hf, transformers, compressed-tensors, gguf, onnx"),
        (("--to", "transformers", "--dtype", "float16"), "leave it out with --to transformers"),
        (
            ("--to", "onnx", "--dtype", "float16"),
            "target 'onnx' decodes to float32: leave --dtype float16 out",
        ),
        (("--to", "gguf", "--source", "a.onnx"), "--source is for --to onnx"),
        (("--to", "onnx", "--source", "missing.onnx"), "no such file: missing.onnx"),
    ],
)
def test_wrong_words_are_refused(
    artifact: Path, tmp_path: Path, capsys: Any, words: tuple[str, ...], message: str
) -> None:
    assert run(["export", str(artifact), "-o", str(tmp_path / "x"), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "architecture", "message"),
    [
        ("gguf", "GPT2LMHeadModel", "target 'gguf' takes models of type llama, qwen2, qwen3"),
        ("onnx", "MixtralForCausalLM", "target 'onnx' has graphs of models of type"),
    ],
)
def test_models_without_a_place_are_refused(
    tiny: ModuleType, tmp_path: Path, capsys: Any, target: str, architecture: str, message: str
) -> None:
    path = tiny.write(tmp_path, tiny.new_model(architecture))
    assert run(["export", str(path), "--to", target, "-o", str(tmp_path / "x")]) == 6
    assert message in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize("target", ["gguf", "onnx"])
def test_a_classifier_becomes_no_language_model(tmp_path: Path, tiny: ModuleType, target: str) -> None:
    """Its head was left out of the .onnx, and the logits were made of the embedding table."""
    import transformers

    from nstf.errors import UnsupportedError

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 64}
    config = transformers.LlamaConfig(vocab_size=100, max_position_embeddings=64, num_labels=3, **sizes)
    path = tiny.write(tmp_path, transformers.LlamaForSequenceClassification(config).eval())
    with pytest.raises(UnsupportedError, match=r"'score\.weight' has no place in"):
        exports.export(path, exports.Request(target, tmp_path / f"out.{target}", allow_loss=True))
    assert {p.name for p in tmp_path.iterdir()} == {"model.nstf"}


SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
LOCAL_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("target", "kind", "changes", "message"),
    [
        ("gguf", "Qwen2", SLIDING, "slide over 8 positions, and there they would see all"),
        ("onnx", "Qwen2", SLIDING, "slide over 8 positions, and there they would see all"),
        ("gguf", "Qwen3", SLIDING, "slide over 8 positions, and there they would see all"),
        ("gguf", "Qwen3", {"attention_bias": True}, r"proj\.bias' has no place in GGUF's qwen3"),
        ("gguf", "Gemma3", {"attention_bias": True}, r"proj\.bias' has no place in GGUF's gemma3"),
        (
            "gguf",
            "Gemma3",
            {"use_bidirectional_attention": True},
            "attention is not that of llama.cpp's gemma3",
        ),
        ("gguf", "Gemma3", {"rope_parameters": LOCAL_ROPE}, "attention is not that of llama.cpp's gemma3"),
    ],
)
def test_what_the_engines_graph_does_not_compute_is_refused(
    tiny: ModuleType, tmp_path: Path, target: str, kind: str, changes: dict[str, Any], message: str
) -> None:
    import transformers

    from nstf.errors import UnsupportedError

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 64}
    scale = {"query_pre_attn_scalar": 32} if kind == "Gemma3" else {}
    config = getattr(transformers, f"{kind}{'Text' * bool(scale)}Config")(**sizes, **scale, **changes)
    path = tiny.write(tmp_path, getattr(transformers, f"{kind}ForCausalLM")(config).eval())
    with pytest.raises(UnsupportedError, match=message):
        exports.export(path, exports.Request(target, tmp_path / f"out.{target}", allow_loss=True))
    assert {p.name for p in tmp_path.iterdir()} == {"model.nstf"}


def test_the_card_says_what_was_measured(tiny: ModuleType, tmp_path: Path) -> None:
    from nstf.runtime.artifact import open_artifact

    accuracy = {"accuracy": {"final": {"mean_kl": 0.0125, "windows": 8}}}
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), report=accuracy)
    with open_artifact(path) as opened:
        plan = exports.plan(opened, exports.Request("hf", tmp_path / "x", dtype="bfloat16"))
        text = card(opened, plan, {"model_type": "llama"}, "x", "nstf export m.nstf")
    assert "| mean_kl | 0.0125 |" in text and "rounded here were not when it was measured" in text


def test_a_conversion_for_an_engine_exports_without_loss(tmp_path: Path, capsys: Any) -> None:
    from nstf.errors import UsageError
    from nstf_convert.budget import Budget
    from nstf_convert.options import ConvertOptions

    def options(**changes: Any) -> ConvertOptions:
        return ConvertOptions("m", tmp_path / "m.nstf", Budget("ratio", 0.5), **changes)

    assert options(engine="compressed-tensors").fuse and not options(engine="gguf").fuse
    assert options().prefer == "balance" and options(engine="gguf").prefer == "size"
    assert options(engine="gguf", target=("avx2",)).prefer == "balance"
    assert options(engine="gguf", prefer="speed").prefer == "speed"
    with pytest.raises(UsageError, match="choose one of gguf, compressed-tensors, onnx"):
        options(engine="tensorrt")
    with pytest.raises(UsageError, match="leave `formats` out"):
        options(engine="gguf", formats=("int",))


@pytest.mark.parametrize("engine", ["gguf", "compressed-tensors", "onnx"])
def test_every_recipe_for_an_engine_is_exact_there(tiny: ModuleType, tmp_path: Path, engine: str) -> None:
    from nstf.quantizers.stats import Stats
    from nstf.runtime.artifact import open_artifact, write_artifact
    from nstf_convert.export import engines
    from nstf_convert.pipeline.propose.recipe import encode as carry_out

    model = tiny.new_model(
        "LlamaForCausalLM", hidden_size=256, intermediate_size=256, tie_word_embeddings=False
    )
    tensors = tiny.encode_model(model)
    wanted = engines.recipes(engine, 256)
    for number, recipe in enumerate(wanted):
        weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(number))
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = carry_out(recipe, weight, Stats(), 1)
        (tmp_path / "m.nstf").unlink(missing_ok=True)
        files = {"config.json": json.dumps(tiny.config_json(model)).encode()}
        write_artifact(tmp_path / "m.nstf", tensors, files, {})
        with open_artifact(tmp_path / "m.nstf") as opened:
            plan = exports.plan(opened, exports.Request(engine, tmp_path / "x"))
        assert [i.kind for i in plan.items if i.sources == (name,)] == ["exact"], recipe
    assert len(wanted) >= 4


def test_neither_the_artifact_nor_another_model_is_replaced(
    artifact: Path, tmp_path: Path, capsys: Any
) -> None:
    for output in (artifact, artifact.parent):
        assert run(["export", str(artifact), "-o", str(output), "--overwrite"]) == 2
        assert artifact.is_file()
    # The original, say: it has a config.json, and no card of ours.
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert run(["export", str(artifact), "-o", str(tmp_path / "model"), "--overwrite"]) == 2
    assert "no export of nstf" in capsys.readouterr().err
    # What lies beside a single file is not replaced unasked, and nothing of another name is written.
    (tmp_path / "m.README.md").write_text("mine")
    words = ["export", str(artifact), "--to", "onnx", "-o", str(tmp_path / "m.onnx")]
    assert run(words) == 2 and (tmp_path / "m.README.md").read_text() == "mine"
    (tmp_path / "config.json").write_text("mine")
    assert run([*words, "--overwrite"]) == 0
    assert (tmp_path / "config.json").read_text() == "mine"
    names = {p.name for p in tmp_path.iterdir() if p.is_file()}
    assert names == {"config.json", "m.README.md", "m.onnx", "m.onnx.data"}


@pytest.mark.parametrize("target", exports.TARGETS)
def test_a_tied_table_is_exported_alike_under_either_name(
    artifact: Path, tmp_path: Path, target: str
) -> None:
    """A checkpoint may hold it as the head alone. It was written twice, and to ONNX not at all."""
    from nstf.kernels.formats import EncodedTensor
    from nstf.runtime.artifact import Shared, open_artifact, write_artifact

    table, head = "model.embed_tokens.weight", "lm_head.weight"
    with open_artifact(artifact) as opened:
        tensors: dict[str, EncodedTensor | Shared] = {
            name: opened.encoded(name) for name in opened.names() if name not in (table, head)
        }
        files = {name: opened.file(name) for name in opened.file_names()}
        kept = opened.encoded(table)
        for stored, alias in ((table, head), (head, table)):
            (tmp_path / stored).mkdir()
            both = tensors | {stored: kept, alias: Shared(stored)}
            write_artifact(tmp_path / stored / "m.nstf", both, files)
    found = []
    for stored in (table, head):
        request = exports.Request(target, tmp_path / stored / "out", allow_loss=True)
        _, written = exports.export(tmp_path / stored / "m.nstf", request)
        found.append({n: (request.output / n).read_bytes() for n, _ in written})
    assert found[0] == found[1]


def test_the_spelling_of_older_configs_is_read(artifact: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from nstf.runtime.artifact import open_artifact, write_artifact

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    with open_artifact(artifact) as opened:
        config = opened.config()
        config = {k: v for k, v in config.items() if k != "rope_parameters"}
        files = {n: opened.file(n) for n in opened.file_names()}
        tensors = {n: opened.encoded(n) for n in opened.names()}
        for name, stated in (("llama3", scaling), ("yarn", {"rope_type": "yarn", "factor": 2.0})):
            files["config.json"] = json.dumps(
                {**config, "rope_theta": 500.0, "rope_scaling": stated}
            ).encode()
            write_artifact(tmp_path / f"{name}.nstf", tensors, files)
    words = ["export", str(tmp_path / "llama3.nstf"), "--to", "gguf", "-o", str(tmp_path / "m.gguf")]
    assert run(words) == 0
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert "rope_freqs.weight" in {t.name for t in reader.tensors}
    assert float(reader.fields["llama.rope.freq_base"].contents()) == 500.0
    for target in ("gguf", "onnx"):
        assert run(["export", str(tmp_path / "yarn.nstf"), "--to", target, "-o", str(tmp_path / "y")]) == 6


def test_an_export_is_the_same_whatever_device_the_process_makes_tensors_on(
    artifact: Path, tmp_path: Path
) -> None:
    """On meta it was a TypeError, on a GPU that is not there other weights."""
    exports.export(artifact, exports.Request(target="transformers", output=tmp_path / "plain"))
    with torch.device("meta"):
        exports.export(artifact, exports.Request(target="transformers", output=tmp_path / "odd"))
    plain, odd = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("plain", "odd"))
    assert plain == odd


@pytest.mark.parametrize("target", ["hf", "compressed-tensors", "transformers"])
def test_what_leads_to_code_is_not_handed_on(artifact: Path, tmp_path: Path, target: str) -> None:
    """Whoever made the artifact wrote it, and our card says to load the folder by `from_pretrained`."""
    with open_artifact(artifact) as given:
        files = {name: given.file(name) for name in given.file_names()}
        tensors = {n: given.encoded(n) for n in given.names() if given.stored_name(n) == n}
        shared = {n: Shared(given.stored_name(n)) for n in given.names() if given.stored_name(n) != n}
    evil = {
        "auto_map": {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", None]},
        "trust_remote_code": True,
    }
    for name, more in (
        (
            "config.json",
            evil | {"_attn_implementation_internal": "evil/kernel", "transformers_weights": "evil.bin"},
        ),
        ("generation_config.json", evil | {"custom_generate": "evil/repository"}),
        ("tokenizer_config.json", evil),
    ):
        files[name] = json.dumps(json.loads(files.get(name, b"{}")) | more).encode()
    path = tmp_path / "evil.nstf"
    write_artifact(path, tensors | shared, files)
    assert run(["export", str(path), "--to", target, "-o", str(tmp_path / "x"), "--allow-loss"]) == 0
    said = "".join(p.read_text() for p in (tmp_path / "x").glob("*.json"))
    assert not re.search("evil|auto_map|custom_generate|trust_remote_code", said)
