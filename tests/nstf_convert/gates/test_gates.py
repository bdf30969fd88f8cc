import json
import math
import shutil
import xml.etree.ElementTree as ET

import pytest
import torch
import transformers

from nstf.errors import UsageError
from nstf_convert.cli import run
from nstf_convert.gates.evaluate import (
    Check,
    Gates,
    check,
    evaluate_encoder,
    pooled,
    synthetic_batches,
    text_batches,
)
from nstf_convert.gates.junit import junit_xml
from nstf_convert.gates.measuring import measure
from nstf_convert.gates.sides import open_side
from nstf_convert.measure import Similarity, compare, summarise

WINDOWS = ("--windows", "4", "--seq-len", "64")


@pytest.fixture
def evaluate(capsys):
    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["eval", *[str(w) for w in words]])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_an_exact_artifact_passes_every_gate(evaluate, tiny):
    code, out, err = evaluate(
        tiny.same, "-r", tiny.folder, "--dataset", tiny.text, *WINDOWS, "--max-kl", "1e-6", "--min-top1", "1",
        "--max-ppl-ratio", "1.0001", "--max-p99-kl", "1e-5",
    )  # fmt: skip
    assert code == 0, err
    assert out.count("pass  ") == 4 and "mean KLD" in out and "perplexity" in out and "±" in out


def test_a_reference_of_another_kind_is_wrong_use(evaluate, tiny):
    """It was an AttributeError of the reference's class, which takes images."""
    code, _, err = evaluate(tiny.same, "-r", "examples/tiny_conv/model", "--dataset", tiny.text, *WINDOWS)
    assert code == 2 and "(ResNetForImageClassification) and" in err
    assert err.endswith("are different models: they do not take the same inputs\n")


def test_a_failed_gate_exits_4_and_writes_junit_all_the_same(evaluate, tiny, tmp_path):
    junit = tmp_path / "gates.xml"
    code, out, err = evaluate(
        tiny.coarse, "-r", tiny.folder, "--dataset", tiny.text, *WINDOWS, "--max-kl", "1e-6", "--min-top1", "0",
        "--junit", junit,
    )  # fmt: skip
    assert code == 4
    assert "error: 1 of 2 gates failed: mean KLD in nats" in err and "is above 1e-06 (--max-kl)" in err
    assert "FAIL  mean KLD" in out and "pass  top-1 agreement" in out
    suite = ET.parse(junit).getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    assert (
        "is above" in cases["max-kl"].find("failure").get("message")
        and cases["min-top1"].find("failure") is None
    )
    figures = {p.get("name"): p.get("value") for p in suite.find("properties")}
    assert float(figures["mean_kl"]) > 1e-6 and figures["windows"] == "4"


def test_json_has_figures_protocol_and_verdict(evaluate, tiny):
    code, out, _ = evaluate(
        tiny.coarse, "-r", tiny.folder, "--dataset", tiny.text, *WINDOWS, "--max-kl", 1e-6, "--json"
    )
    data = json.loads(out)
    assert code == 4 and data["passed"] is False
    assert data["protocol"]["scored_per_window"] == 31 and data["measured"]["tokens"] == 4 * 31
    assert data["gates"][0]["gate"] == "max-kl" and data["gates"][0]["value"] == data["measured"]["mean_kl"]
    assert data["measured"]["ppl"] != data["measured"]["ppl_reference"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-kl", "-1"), "--max-kl -1: give a number of at least 0"),
        (("--max-kl", "nan"), "--max-kl nan: give a number"),
        (("--min-top1", "1.5"), "--min-top1 1.5: give a number from 0 to 1"),
        (("--max-ppl-ratio", "inf"), "--max-ppl-ratio inf"),
        (("--max-kl", "x"), "nvalid value for '--max-kl'"),
        (("--min-cosine", "0.9"), "--min-cosine does not apply to a language model"),
        (("--seq-len", "4096"), "the dataset is too short"),
        (("--junit", "missing/out.xml"), "the folder missing does not exist"),
        (("--junit", "/dev"), "/dev is a folder, a device or a pipe"),
    ],
)
def test_wrong_gates_exit_2(evaluate, tiny, words, message):
    code, _, err = evaluate(tiny.same, "-r", tiny.folder, "--dataset", tiny.text, *words)
    assert code == 2 and message in err and err.splitlines()[-1].startswith("error: ")


def test_a_language_model_needs_text(evaluate, tiny, tmp_path):
    code, _, err = evaluate(tiny.same, "-r", tiny.folder)
    assert code == 2 and "--dataset is missing" in err
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    code, _, err = evaluate(tiny.same, "-r", tiny.folder, "--dataset", empty)
    assert code == 2
    code, _, err = evaluate(tiny.same, "-r", tmp_path / "no", "--dataset", empty)
    assert code == 2 and "no such file or folder" in err
    for missing in ("no/held.txt", tmp_path / "no"):
        code, _, err = evaluate(tiny.same, "-r", tiny.folder, "--dataset", missing)
        assert code == 2 and "--dataset: no such file" in err


def test_the_top_token_of_nan_is_none():
    scores = compare(torch.randn(3, 5), torch.full((3, 5), math.nan), torch.tensor([0, 1, 2]))
    found = summarise([scores])
    checks = check(Gates(min_top1=0.0), found)
    assert math.isnan(found.top1) and [c.passed for c in checks] == [False]


def test_a_figure_that_is_not_a_number_never_passes():
    checks = check(Gates(min_cosine=0.5), Similarity(math.nan, math.nan, math.nan, 3))
    assert [c.passed for c in checks] == [False]
    assert "not a number" in checks[0].message()
    with pytest.raises(UsageError, match="`max_kl` does not apply to an encoder"):
        check(Gates(max_kl=1.0), Similarity(1.0, 1.0, 0.0, 3))


@pytest.mark.parametrize("gates", [(), ("--max-kl", "5")])
def test_a_reference_that_computes_nan_is_refused(evaluate, tiny, tmp_path, gates):
    folder = shutil.copytree(tiny.folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": -100.0}))
    code, _, err = evaluate(tiny.same, "-r", folder, "--dataset", tiny.text, *WINDOWS, *gates)
    assert code == 6 and "what is compared with computes NaN" in err


def test_junit_stays_well_formed_with_hostile_names():
    document = junit_xml('a<b>&"\x00\x1b.nstf', [Check("k", "max_kl", 2.0, 1.0, False)], {"n<": "\x07"}, 1.5)
    root = ET.fromstring(document)
    assert root.find("testsuite").get("name").startswith('a<b>&"') and root.get("failures") == "1"
    assert ET.fromstring(junit_xml("a", [], {}, 0.0)).find("testsuite/testcase").get("name") == "measured"


class Doubling:
    def __init__(self, noise: float) -> None:
        self.noise = noise

    def outputs(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values.flatten(2).transpose(1, 2) * 2 + self.noise


def test_encoders_are_compared_by_pooled_outputs():
    batches = synthetic_batches({"image_size": 4, "num_channels": 3}, 5, seed=0)
    assert batches[0]["pixel_values"].shape == (5, 3, 4, 4)
    same = evaluate_encoder(Doubling(0), Doubling(0), batches)
    assert same.mean_cosine == pytest.approx(1.0) and same.outputs == 5
    assert evaluate_encoder(Doubling(0), Doubling(0.5), batches).relative_l2 > 0.1


def test_pooling_ignores_padding():
    output = torch.tensor([[[1.0], [3.0], [100.0]]])
    assert pooled(output, torch.tensor([[1, 1, 0]])).item() == 2.0
    assert pooled(output[0], None).shape == (3, 1)


def test_inputs_of_sound_models_follow_the_config():
    config = {
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 3,
    }
    (inputs,) = synthetic_batches(config, 2, seed=0)
    assert inputs["input_features"].shape == (2, 8, 20) and inputs["decoder_input_ids"].tolist() == [[3], [3]]
    with pytest.raises(UsageError, match="cannot make inputs"):
        synthetic_batches({}, 1, seed=0)


def test_an_empty_text_gives_no_batches():
    with pytest.raises(UsageError, match="the dataset is empty"):
        text_batches(None, " \n ", 8, 4)


@pytest.mark.parametrize(
    "config",
    [
        {"image_size": 4000},
        {"image_size": [4, 10**9]},
        {"image_size": -1},
        {"image_size": [4, 4, 4]},
        {"num_mel_bins": 10**6},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_does_not_say_how_much_memory_is_taken(config):
    """An image of 4,000 pixels a side was asked for with a batch of them: 16 GB in the first layer."""
    with pytest.raises(UsageError, match="cannot be made up: correct the config"):
        synthetic_batches(config, 16, seed=0)


@pytest.mark.parametrize(
    "wrong", [{"max_source_positions": "x"}, {"max_source_positions": None}, {"decoder_start_token_id": "x"}]
)
def test_numbers_of_a_config_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    config = {"num_mel_bins": 8, "is_encoder_decoder": True, "decoder_start_token_id": 1}
    with pytest.raises(UsageError, match=r"cannot be made up|a token is needed"):
        synthetic_batches({**config, **wrong}, 1, seed=0)


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}


def measured(tiny, folder, kind: str, with_text: bool = True, **settings):
    """The figures and the protocol of a model of that class against itself, with windows of 512 tokens."""
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    cls(cls.config_class(vocab_size=100, **settings)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json") * (kind != "ViTModel"):
        shutil.copy(tiny.folder / name, folder)
    with open_side(str(folder)) as test, open_side(str(folder)) as reference:
        return measure(reference, test, tiny.text if with_text else None, 2, 512)


def test_an_encoder_of_text_is_asked_for_one(tiny, tmp_path):
    """It was said to have no tokenizer, which lay beside it."""
    with pytest.raises(UsageError, match="`dataset` is missing"):
        measured(tiny, tmp_path, "BertModel", with_text=False, **SMALL)


def test_windows_are_as_long_as_the_model_can_read(tiny, tmp_path, caplog):
    """By default they ended in an IndexError where a model has fewer positions, which was laid to its tokenizer."""
    found, protocol = measured(
        tiny, tmp_path, "GPT2LMHeadModel", n_positions=64, n_embd=16, n_layer=1, n_head=2
    )
    assert (found.windows, protocol["seq_len"], protocol["scored_per_window"]) == (2, 64, 31)
    assert "the model has positions for 64 tokens: windows of so many, not of 512" in caplog.text


def test_inputs_of_an_encoder_are_as_long_as_it_can_read(tiny, tmp_path):
    _, protocol = measured(tiny, tmp_path, "BertModel", max_position_embeddings=32, **SMALL)
    assert protocol["inputs"] == "text" and protocol["dataset"] == str(tiny.text)


def test_a_text_that_nobody_reads_is_not_called_the_dataset(tiny, tmp_path, caplog):
    _, protocol = measured(tiny, tmp_path, "ViTModel", image_size=16, patch_size=8, **SMALL)
    assert protocol["inputs"] == "seeded noise" and protocol["dataset"] is None
    assert "holds no tokenizer: measured on seeded noise, not on" in caplog.text


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("VideoMAEForVideoClassification", {"image_size": 16, "patch_size": 8, "num_frames": 2}),
        ("TimesformerForVideoClassification", {"image_size": 16, "patch_size": 8, "num_frames": 2}),
        ("ASTForAudioClassification", {"num_mel_bins": 16, "max_length": 32, "patch_size": 8}),
    ],
)
def test_films_and_spectrograms_by_time_are_made_up(tiny, tmp_path, kind, settings):
    """Models of films were given images, and AST a spectrogram under Whisper's name."""
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    cls(cls.config_class(**SMALL, **settings)).save_pretrained(tmp_path)
    with open_side(str(tmp_path)) as test, open_side(str(tmp_path)) as reference:
        found, protocol = measure(reference, test, None, 2, 512)
    assert found.outputs == 2 and protocol["inputs"] == "seeded noise"


def test_a_model_that_reads_more_than_a_text_is_said_to(tiny, tmp_path):
    """It was an AttributeError of transformers."""
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    with pytest.raises(UsageError, match="CLIPModel does not run on input_ids, attention_mask alone"):
        measured(tiny, tmp_path, "CLIPModel", text_config={**SMALL, "vocab_size": 100}, vision_config=vision)
