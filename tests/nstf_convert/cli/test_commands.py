import json
import os
import resource
import subprocess
import sys

import pytest
import torch

from nstf.errors import UsageError
from nstf.runtime.engine_attention import int8_bytes
from nstf.runtime.kv_formats import dense_group_bytes
from nstf_convert.cli import run
from nstf_convert.cli.output import print_pairs
from nstf_convert.cli.schema import FIELDS

COMMANDS = tuple("convert calibrate plan inspect verify eval generate compile profile export".split())


def test_the_command_line_does_not_import_torch():
    heavy = "{'torch', 'transformers', 'numpy'}"
    code = f"import sys, nstf_convert.cli as c; c.run(['--help']); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["--help"], []])
def test_help_and_completion_come_at_once(words):
    """Half a second of the processor's time; about 0.1 and 0.2 are needed."""
    completion = {"_NSTF_COMPLETE": "complete_bash", "COMP_WORDS": "nstf con", "COMP_CWORD": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        "-c",
        "import nstf_convert.cli as c, sys; sys.argv[0] = 'nstf'; c.main()",
        *words,
    ]
    done = subprocess.run(
        command, env=os.environ | ({} if words else completion), capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and ("convert" in done.stdout), done
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(nstf, command):
    result = nstf(command, "--help")
    assert result.code == 0 and "Example: nstf " + command in result.out and "--json" in result.out


def test_every_option_is_in_the_help_under_its_group(nstf):
    text = nstf("convert", "--help").out
    for field in FIELDS.values():
        flag = field.metadata["flag"] or "--" + field.name.replace("_", "-")
        assert flag.split("/")[0] in text, field.name
    for group in {f.metadata["group"] for f in FIELDS.values()} - {""}:
        assert f"{group}:" in text


def test_unknown_commands_and_options_are_wrong_usage(nstf):
    assert nstf("convrt").code == 2
    assert "convert" in nstf("convrt").err
    assert nstf("verify", "--what").code == 2


def test_version_is_printed(nstf):
    from nstf import __version__

    result = nstf("--version")
    assert (result.code, result.out) == (0, f"nstf {__version__}\n")


@pytest.mark.parametrize(
    "command",
    [
        ("inspect",),
        ("verify",),
        ("generate", "-"),
        ("eval", "--reference", "."),
        ("export", "-o", "x"),
        ("compile", "--target", "gfx942"),
    ],
)
def test_a_missing_artifact_is_named(nstf, tmp_path, command):
    name, *rest = command
    result = nstf(name, tmp_path / "no.nstf", *rest)
    assert (result.code, result.err) == (2, f"error: no such file: {tmp_path / 'no.nstf'}\n")
    assert "is a folder" in nstf(name, tmp_path, *rest).err
    assert "the file's name is empty" in nstf(name, "", *rest).err


def test_inspect_prints_the_plan(nstf, tiny):
    result = nstf("inspect", tiny.coarse, "--kernels")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split()[:5] == ["tensor", "role", "encoding", "shape", "kernel"]
    row = next(line for line in lines if line.startswith("model.layers.0.mlp.down_proj.weight"))
    assert "down" in row and "float32" in row and "32x48" in row and "0.25" in row
    row = next(line for line in lines if line.startswith("model.layers.1.self_attn.q_proj.weight"))
    assert "int3 g32" in row
    assert "LlamaForCausalLM (llama)" in result.out and "bits per weight" in result.out


def test_names_that_a_file_states_reach_no_terminal_as_they_are(capsys):
    """Their escapes and breaks did, as lines of our own; one of 200 letters ended the command."""
    print_pairs("", [("\x1b[2J all good\n  sha256 verified", "x"), ("a" * 200, "y" * 100), ("k", "z")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["\\x1b[2J", "all", "good", "sha256", "verified", "x"]
    assert lines[1].split() == ["a" * 200, "y" * 64] and lines[2].split() == ["y" * 36]
    assert lines[3].split() == ["k", "z"] and len(lines) == 4


def test_inspect_json_counts_every_byte_once(nstf, tiny):
    data = nstf("inspect", tiny.coarse, "--json").json
    rows = {row["tensor"]: row for row in data["tensors"]}
    shared = [row for row in rows.values() if row["shared_with"]]
    assert [r["tensor"] for r in shared] == ["lm_head.weight"] and shared[0]["size_bytes"] == 0
    assert (
        sum(row["size_bytes"] for row in rows.values())
        < data["summary"]["size_bytes"]
        == tiny.coarse.stat().st_size
    )
    q = rows["model.layers.1.self_attn.q_proj.weight"]
    assert q["nominal_bits"] == 3 and q["disk_bits"] == 3.5
    assert data["summary"]["budget"] == {"kind": "ratio", "value": 0.5}


def test_verify_accepts_a_good_file_and_exits_5_for_a_flipped_bit(nstf, tiny, tmp_path):
    assert nstf("verify", tiny.coarse, "--json").json["ok"] is True
    assert "every checksum matches" in nstf("verify", tiny.coarse).out
    broken = tmp_path / "broken.nstf"
    raw = bytearray(tiny.coarse.read_bytes())
    raw[-3] ^= 4
    broken.write_bytes(raw)
    result = nstf("verify", broken)
    assert result.code == 5 and "SHA-256" in result.err and result.err.count("\n") == 1


def test_eval_and_export_refuse_a_flipped_bit(nstf, tiny, tmp_path):
    content = bytearray(tiny.coarse.read_bytes())
    content[-1] ^= 1
    damaged = tmp_path / "damaged.nstf"
    damaged.write_bytes(content)
    for words in (("eval", damaged, "--reference", tiny.folder), ("export", damaged, "-o", tmp_path / "out")):
        result = nstf(*words)
        assert result.code == 5 and "differs from its SHA-256" in result.err, result.err
    assert not (tmp_path / "out").exists()


def test_generate_streams_text_and_repeats_itself(nstf, tiny):
    result = nstf("generate", tiny.same, "the cat", "--max-new-tokens", 5)
    assert result.code == 0, result.err
    data = nstf("generate", tiny.same, "the cat", "--max-new-tokens", 5, "--json").json
    assert data["text"].strip() == result.out.strip()
    warm = [
        nstf("generate", tiny.same, "the", "--temperature", 1, "--seed", 3, "--json").json["text"]
        for _ in range(2)
    ]
    assert warm[0] == warm[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((" ",), "the prompt is empty"),
        (("the", "--chat"), "no chat template"),
        (("the", "--attention", "sparse"), "choose one of full, planned"),
        (("the", "--attention", "planned"), "no attention plan inside"),
        (("the", "--max-new-tokens", "0"), "nvalid value for '--max-new-tokens'"),
        (("the", "--temperature", "-1"), "nvalid value for '--temperature'"),
        (("the", "--device", "abacus"), "--device abacus"),
    ],
)
def test_generate_refuses_what_cannot_be(nstf, tiny, words, message):
    result = nstf("generate", tiny.same, *words)
    assert result.code == 2 and message in result.err and result.err.count("\n") == 1


def test_export_gives_back_the_model(nstf, tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "exported"
    result = nstf("export", tiny.same, "-o", out, "--json")
    assert result.code == 0, result.err
    assert "model.safetensors" in result.json["files"] and "tokenizer.json" in result.json["files"]
    exported, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    original = AutoModelForCausalLM.from_pretrained(tiny.folder)
    ids = AutoTokenizer.from_pretrained(out)("the cat sat", return_tensors="pt")
    assert torch.equal(exported(**ids).logits, original(**ids).logits)
    assert [p.name for p in tmp_path.iterdir()] == ["exported"]


def test_export_in_shards_and_another_dtype_loads_too(nstf, tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "exported"
    result = nstf("export", tiny.coarse, "-o", out, "--dtype", "bfloat16", "--shard-size", "8kB")
    assert result.code == 0, result.err
    assert (
        len(list(out.glob("model-*-of-*.safetensors"))) > 2
        and (out / "model.safetensors.index.json").exists()
    )
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and model.dtype == torch.bfloat16


def test_export_refuses_a_folder_with_content_and_leaves_nothing_after_a_failure(
    nstf, tiny, tmp_path, monkeypatch
):
    assert "exists: give a new or empty folder" in nstf("export", tiny.same, "-o", tiny.folder).err
    assert nstf("export", tiny.same, "-o", tmp_path / "x", "--dtype", "int1").code == 2
    assert nstf("export", tiny.same, "-o", tmp_path / "no" / "x").code == 2
    from nstf_convert.export import shards

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr(shards, "write_shard", full)
    result = nstf("export", tiny.same, "-o", tmp_path / "y")
    assert result.code == 1 and "no space left on the disk" in result.err and list(tmp_path.iterdir()) == []


def test_profile_prints_both_phases_and_json(nstf, tiny):
    peak = ("--device-peak", "100,20", "--tokens", 8)
    result = nstf("profile", tiny.coarse, *peak)
    assert result.code == 0, result.err
    assert "prefill: 1 x 8 tokens" in result.out and "decode" in result.out and "MFU" in result.out
    data = nstf("profile", tiny.folder, *peak, "--json").json
    assert data["device"]["source"] == "given" and [p["name"] for p in data["phases"]] == [
        "prefill",
        "decode",
    ]
    names = {o["name"] for o in data["phases"][0]["operators"]}
    assert {"model.layers.0.mlp.up_proj", "lm_head", "model.embed_tokens"} <= names
    assert any("attention products" in name for name in names)


def test_profile_says_how_long_passes_take_that_are_long(nstf, tiny):
    """With a million sequences it ran for hours without a word."""
    result = nstf("profile", tiny.coarse, "--device-peak", "0.000001,20", "--tokens", 4, "--batch", 2)
    assert result.code == 0 and "a pass over 2 x 4 tokens takes" in result.err
    assert "a pass over" not in nstf("profile", tiny.coarse, "--device-peak", "100,20", "--tokens", 4).err


SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "settings", "phases"),
    [
        ("Mistral", {**SMALL, **HEADS, "sliding_window": 4}, ["prefill", "decode"]),
        ("Mamba", {**SMALL, "state_size": 4}, ["prefill"]),
        ("Jamba", {**SMALL, **HEADS, "use_mamba_kernels": False, "mamba_dt_rank": 4, "num_experts": 2,
                   "attn_layer_period": 2, "attn_layer_offset": 1}, ["prefill", "decode"]),
    ],
)  # fmt: skip
def test_profile_runs_models_that_take_no_token_back(nstf, tmp_path, name, settings, phases):
    """A window that is full keeps no older tokens, and a state none at all."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    result = nstf("profile", tmp_path, "--device-peak", "100,20", "--tokens", 8, "--json")
    assert result.code == 0, result.err
    assert [p["name"] for p in result.json["phases"]] == phases


SIDES = {
    f"{side}_{key}": size
    for side in ("encoder", "decoder")
    for key, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("T5ForConditionalGeneration", {"vocab_size": 50, "d_model": 32, "d_kv": 16, "num_layers": 1, "num_heads": 2}),
        ("BartForConditionalGeneration", {"vocab_size": 50, "d_model": 32, **SIDES}),
        ("FSMTForConditionalGeneration", {"langs": ["en", "de"], "src_vocab_size": 40, "tgt_vocab_size": 60,
                                          "d_model": 32, **SIDES}),
    ],
)  # fmt: skip
def test_profile_runs_prompt_and_answer_of_an_encoder_decoder(nstf, tmp_path, name, settings):
    import transformers

    model = getattr(transformers, name)
    model(model.config_class(**settings)).save_pretrained(tmp_path)
    result = nstf("profile", tmp_path, "--device-peak", "100,20", "--tokens", 8, "--top", 0, "--json")
    assert result.code == 0, result.err
    (phase,) = result.json["phases"]
    names = " ".join(operator["name"] for operator in phase["operators"])
    assert "encoder" in names and "decoder" in names


VISION = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"num_attention_heads": 2, "image_size": 16}
BLIP2 = {
    "vision_config": {**VISION, "patch_size": 8},
    "qformer_config": {**SMALL, "num_attention_heads": 2, "encoder_hidden_size": 32},
    "text_config": {
        **SMALL,
        "model_type": "opt",
        "ffn_dim": 32,
        "word_embed_proj_dim": 32,
        "num_attention_heads": 2,
    },
    "num_query_tokens": 2,
    "image_token_index": 49,
}

CLIP = {
    "text_config": {**SMALL, "num_attention_heads": 2, "max_position_embeddings": 256},
    "vision_config": {**VISION, "patch_size": 8},
}


@pytest.mark.parametrize(
    ("name", "settings", "code", "message"),
    [
        ("BeitForImageClassification", {**VISION, "patch_size": 8}, 0, ""),
        ("VideoMAEForVideoClassification", {**VISION, "patch_size": 8, "num_frames": 2}, 0, ""),
        # It was run on a text alone.
        ("Blip2ForConditionalGeneration", BLIP2, 2, "does not run on pixel_values of the size"),
        ("Wav2Vec2ForCTC", {**SMALL, "num_attention_heads": 2, "num_conv_pos_embedding_groups": 2}, 2,
         "nstf cannot make inputs for it"),
        # These read a text and more, or several texts.
        ("CLIPModel", CLIP, 2, "CLIPModel does not run on input_ids of the size"),
        ("BertForMultipleChoice", {**SMALL, "num_attention_heads": 2}, 2, "nstf profile makes no other inputs"),
    ],
)  # fmt: skip
def test_profile_gives_models_that_write_no_text_what_they_read(
    nstf, tmp_path, name, settings, code, message
):
    """They were given tokens where their config states a vocabulary, and the config was blamed."""
    import transformers

    model = getattr(transformers, name)
    model(model.config_class(**settings)).save_pretrained(tmp_path)
    result = nstf("profile", tmp_path, "--device-peak", "100,20", "--json")
    assert result.code == code and message in result.err, result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device-peak", "fast"), "--device-peak 'fast': give GFLOP/s and GB/s"),
        (("--device-peak", "-1,2"), "both numbers must be positive"),
        (("--tokens", "5000", "--device-peak", "1,1"), "handles at most 127"),
    ],
)
def test_profile_refuses_what_cannot_be(nstf, tiny, words, message):
    result = nstf("profile", tiny.same, *words)
    assert result.code == 2 and message in result.err


def test_bench_prints_rates_and_the_share_of_the_bandwidth(nstf, tiny):
    pytest.importorskip("nstf.kernels.cpu._ext")
    words = ("bench", tiny.coarse, "--prompt", 6, "--tokens", 3, "--repetitions", 1, "--threads", 1)
    data = nstf(*words, "--json").json
    assert data["prefill_rate"] > 0 and data["decode_rate"] > 0 and data["bandwidth"] > 1e8
    assert data["share_of_compute"] == data["compute_seconds"] * data["decode_rate"] > 0
    assert data["threads"] == 1 and data["prompt_tokens"] == 6 and data["new_tokens"] == 3
    # Every stored tensor is read once a token, the tied table as the head, and the cache in the middle of the tokens.
    stored = sum(r["size_bytes"] for r in nstf("inspect", tiny.coarse, "--json").json["tensors"])
    assert stored < data["bytes_per_token"] < stored + 10_000
    shown = nstf(*words)
    assert shown.code == 0 and "tokens a second" in shown.out and "GB/s" in shown.out
    # In 8 bits the cache is read by whole pages of 64 positions; this model's middle token is the seventh.
    narrow = nstf(*words, "--kv-cache", "int8", "--json").json
    config = json.loads((tiny.folder / "config.json").read_text())
    size = config["hidden_size"] // config["num_attention_heads"]
    groups = config["num_hidden_layers"] * config["num_key_value_heads"]
    more = groups * (int8_bytes(size, 7) - dense_group_bytes(size, 7))
    assert narrow["bytes_per_token"] == data["bytes_per_token"] + more


def test_generate_with_an_int8_cache(nstf, tiny):
    pytest.importorskip("nstf.kernels.cpu._ext")
    words = ("generate", tiny.same, "the cat", "--max-new-tokens", 5, "--exact", "--json")
    assert nstf(*words, "--kv-cache", "int8").json["text"]
    for command in (words, ("bench", tiny.coarse)):
        refused = nstf(*command, "--kv-cache", "int4")
        assert refused.code == 2 and "--kv-cache 'int4': choose one of float16, int8" in refused.err


def test_profile_refuses_more_than_any_machine_holds(nstf, tiny):
    for option in ("--batch", "--tokens"):
        found = nstf("profile", tiny.folder, option, "99999999999999999999")
        assert found.code == 2 and f"'{option}'" in found.err and found.err.count("\n") == 1


def test_bench_keeps_the_options_of_a_gpu_for_a_gpu(nstf, tiny):
    for words in (("--tune",), ("--batch", 2), ("--kernels", "x.nstfk")):
        result = nstf("bench", tiny.coarse, *words)
        assert result.code == 2 and "are for a GPU: add --device cuda" in result.err
    for command in (("bench", tiny.coarse), ("generate", tiny.coarse, "The")):
        result = nstf(*command, "--device", "cuda:99")
        assert result.code == 2 and result.err.startswith("error: --device cuda:99: ")


def test_bench_measures_a_plan_on_a_gpu_too(nstf, tiny, monkeypatch):
    from nstf.runtime import graph_bench
    from nstf_convert.cli import options

    def measured(path, device, prompt, tokens, repetitions, batch, kernels, attention):
        raise UsageError(f"{device}, {prompt} tokens, {attention}")

    monkeypatch.setattr(options, "check_device", lambda name: name)
    monkeypatch.setattr(graph_bench, "measure", measured)
    result = nstf("bench", tiny.coarse, "--device", "cuda", "--attention", "planned")
    assert result.code == 2 and "None tokens, planned" in result.err


def test_inspect_names_the_engines_kernels_and_what_they_cost(nstf, tiny):
    pytest.importorskip("nstf.kernels.cpu._ext")
    result = nstf("inspect", tiny.coarse, "--kernels")
    assert result.out.splitlines()[0].split()[5] == "engine" and "--exact turns them off" in result.out
    rows = {r["tensor"]: r for r in nstf("inspect", tiny.coarse, "--kernels", "--json").json["tensors"]}
    # A small file's codes lie in panels where the processor has them, and row by row elsewhere.
    assert rows["model.layers.1.self_attn.q_proj.weight"]["engine"].split()[0] in ("panels", "packed")


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "a.nstf", "-r", "model", "--dataset", ""),
        ("diff", "a.nstf", "b.nstf", "--dataset", ""),
        ("plan", "model", "--budget", "0.5", "--work-dir", ""),
        ("export", "a.nstf", "--to", "hf", "-o", ""),
        ("eval", "a.nstf", "-r", "model", "--junit="),
    ],
    ids=lambda words: words[0],
)
def test_a_path_of_a_variable_that_is_not_set_is_not_the_current_folder(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A gate passed on whatever texts lay there."""
    assert run(list(words)) == 2
    error = capsys.readouterr().err
    assert "a path is empty" in error and error.count("\n") == 1
