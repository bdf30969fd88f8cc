"""Side files of an artifact that say what nothing can use, or lead elsewhere: one line, at once, from every way in."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from small_llama import LLAMA, tensors

from nstf.errors import CorruptError, NstfError, UnsupportedError
from nstf.runtime import load, load_tokenizer
from nstf.runtime import stream as stream_of_modules
from nstf.runtime.artifact import open_artifact, write_artifact
from nstf.runtime.artifact.config import parse_object
from nstf.runtime.engine_text import stream

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_llama" / "model" / "tokenizer.json"
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast"}


def file_with(path: Path, **files: Any) -> Path:
    """An artifact with the tokenizer of the example, and these files besides: bytes, or what becomes JSON."""
    stated = {"generation_config": {"eos_token_id": 2}, "tokenizer_config": SETTINGS, **files}
    content = {f"{k}.json": v if isinstance(v, bytes) else json.dumps(v).encode() for k, v in stated.items()}
    own = {"config.json": json.dumps(LLAMA).encode(), "tokenizer.json": EXAMPLE.read_bytes()}
    write_artifact(path, tensors(), own | content)
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", 10**4000), ("temperature", -1), ("top_p", 10**4000), ("top_p", -1), ("min_p", 1e308), ("min_p", -1),
     ("repetition_penalty", 10**4000), ("repetition_penalty", -1.5), ("encoder_repetition_penalty", -1),
     ("num_beams", 10**9), ("num_return_sequences", 10**6), ("bad_words_ids", "x"), ("bad_words_ids", [[]]),
     ("suppress_tokens", "x"), ("begin_suppress_tokens", "x"), ("forced_eos_token_id", 64), ("forced_bos_token_id", 10**9),
     ("sequence_bias", {"a": 1}), ("sequence_bias", 5), ("exponential_decay_length_penalty", 5), ("stop_strings", 5),
     ("bad_words_ids", [[64]]), ("bad_words_ids", [[-1]]), ("sequence_bias", [[[64], 1.0]]),
     ("sequence_bias", [[[-1], 1.0]]), ("length_penalty", 1e300), ("length_penalty", -26), ("max_matching_ngram_size", "x"),
     ("exponential_decay_length_penalty", [0, 1e200]),
     ("exponential_decay_length_penalty", ["a", "b"]), ("top_h", 5), ("top_h", "x"), ("typical_p", -1),
     ("forced_eos_token_id", [-1]), ("sequence_bias", [[[1], 1e300]]), ("repetition_penalty", 1e-300),
     ("encoder_repetition_penalty", 1e300), ("guidance_scale", 1e300), ("encoder_no_repeat_ngram_size", 1 << 40),
     ("no_repeat_ngram_size", 10_000)],
)  # fmt: skip
def test_generation_settings_that_cannot_be_used_are_refused_at_load(
    made: Callable[..., Path], key: str, value: Any
) -> None:
    # transformers raises errors of its own for them, at the first token; num_beams of 10^9 ends the process.
    path = made(LLAMA, generation_config=json.dumps({key: value}).encode())
    with pytest.raises(CorruptError, match=f"generation_config.json says {key} is .*, expected"):
        load(path)


@pytest.mark.parametrize(
    "stated",
    [{"temperature": 0}, {"temperature": 0, "do_sample": True}, {"top_p": 0}, {"typical_p": 0}, {"repetition_penalty": 0},
     {"num_beams": 0}, {"num_return_sequences": -1}, {"bad_words_ids": []}, {"suppress_tokens": []},
     {"prefill_chunk_size": 0}, {"prefill_chunk_size": -1}, {"dola_layers": "low"}, {"penalty_alpha": 0.5},
     {"num_beam_groups": 2, "num_beams": 2, "diversity_penalty": 0.5}, {"exponential_decay_length_penalty": [1, 1.1]},
     {"exponential_decay_length_penalty": []}, {"exponential_decay_length_penalty": [1, 1.1], "eos_token_id": 99},
     {"exponential_decay_length_penalty": [1, 1.1], "eos_token_id": 2}, {"bad_words_ids": [[63]]},
     {"temperature": 0, "num_return_sequences": 3}, {"stop_strings": ""}, {"stop_strings": []},
     {"max_matching_ngram_size": 0, "prompt_lookup_num_tokens": 3}, {"prompt_lookup_num_tokens": 0},
     {"length_penalty": 25, "num_beams": 2}, {"length_penalty": -25, "num_beams": 2},
     {"force_words_ids": [[1]]}, {"is_assistant": "x"}, {"sequence_bias": [[[1], 1.5]]}, {"suppress_tokens": [10**6]},
     {"do_sample": True, "temperature": 2}, {"do_sample": True, "temperature": 1e-300}, {"repetition_penalty": 2},
     {"encoder_repetition_penalty": 2}, {"sequence_bias": [[[1], 5]]}, {"forced_eos_token_id": -1}, {"token_healing": True},
     {"stop_strings": ["x"]}, {"cache_implementation": "offloaded"}, {"cache_implementation": "quantized"},
     {"cache_implementation": "static", "max_cache_len": 10**12}, {"max_cache_len": "x"},
     {"use_mtp": True}, {"assistant_early_exit": 1}, {"num_beams": 2, "low_memory": True},
     {"watermarking_config": {"hashing_key": "x"}}, {"assistant_model": "evil/x"}, {"custom_generate": "evil/x"},
     {"compile_config": {"backend": "inductor"}, "trust_remote_code": True}],
)  # fmt: skip
def test_generation_settings_that_say_off_or_need_foreign_code_leave_a_model_that_generates(
    made: Callable[..., Path], stated: dict[str, Any]
) -> None:
    model: Any = load(made(LLAMA, generation_config=json.dumps(stated).encode()))
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2).shape[1] > 3


@pytest.mark.parametrize("stated", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
                                    {"do_sample": True, "num_return_sequences": 2}])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_settings_of_several_texts_leave_a_text_that_is_streamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stated: dict[str, Any], temperature: float
) -> None:
    """transformers has no beams for a streamer: `nstf generate` ended with its ValueError."""
    path = file_with(tmp_path / "m.nstf", generation_config=stated)
    with caplog.at_level("WARNING", "nstf"):
        assert isinstance(
            "".join(stream_of_modules(load(path), load_tokenizer(path), "!", 2, temperature)), str
        )
    assert "a text in pieces is decoded without" in caplog.text


@pytest.mark.parametrize(
    "stated",
    [{"repetition_penalty": 500.0}, {"repetition_penalty": 1e6}, {"top_k": 1 << 33}, {"top_p": 1.5}],
    ids=str,
)
def test_settings_that_a_file_may_have_are_the_engines_too(tmp_path: Path, stated: dict[str, Any]) -> None:
    """They were called a wrong use of `nstf generate`, which had not been given them."""
    path = file_with(tmp_path / "m.nstf", generation_config={"do_sample": True, **stated})
    sampling = {"temperature": 0.8, "seed": 0}
    assert isinstance("".join(stream(path, "!", 2, sampling=sampling)), str)
    assert isinstance("".join(stream_of_modules(load(path), load_tokenizer(path), "!", 2, 0.8)), str)


def test_settings_that_transformers_only_warns_of_are_saved(tmp_path: Path) -> None:
    """It refuses to write a temperature without `do_sample`, which models of the hub have: an export ended there."""
    from nstf_convert.cli import run

    stated = {"temperature": 0.7, "top_k": 5, "eos_token_id": 2}
    path = file_with(tmp_path / "m.nstf", generation_config=stated)
    assert run(["export", str(path), "--to", "transformers", "-o", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "generation_config.json").read_bytes())
    assert stated.items() <= found.items()
    import transformers

    import nstf.integrations.transformers  # noqa: F401

    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert (
        loaded.generation_config.temperature == 0.7
        and type(loaded.generation_config).__qualname__ == "GenerationConfig"
    )


def test_settings_that_forbid_every_token_are_refused(made: Callable[..., Path]) -> None:
    path = made(LLAMA, generation_config=json.dumps({"suppress_tokens": list(range(64))}).encode())
    with pytest.raises(CorruptError, match="forbids every token"):
        load(path)


def test_a_temperature_of_0_takes_the_likeliest_token(made: Callable[..., Path]) -> None:
    model: Any = load(made(LLAMA, generation_config=b'{"do_sample": true, "temperature": 0}'))
    assert model.generation_config.do_sample is False


@pytest.mark.parametrize(
    ("stated", "named"),
    [({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
     ({"dola_layers": "low", "constraints": [1]}, "constraints, dola_layers"),
     ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "diversity_penalty, num_beam_groups"),
     ({"exponential_decay_length_penalty": [1, 1.1]}, "exponential_decay_length_penalty"),
     ({"temperature": 0, "num_return_sequences": 3}, "num_return_sequences"),
     ({"stop_strings": "x", "token_healing": True}, "stop_strings, token_healing"),
     ({"watermarking_config": {"bias": 2.0}, "use_mtp": True}, "watermarking_config"),
     ({"cache_implementation": "offloaded"}, "cache_implementation"),
     ({"custom_generate": "evil/x", "assistant_model": "evil/x"}, "custom_generate"),
     # What transformers wrote for settings that are off.
     ({"num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": None, "constraints": None}, ""),
     ({"temperature": 0, "num_beams": 3, "num_return_sequences": 3}, ""), ({"is_assistant": False}, "")],
)  # fmt: skip
def test_generation_settings_that_are_left_out_are_named(
    made: Callable[..., Path], caplog: pytest.LogCaptureFixture, stated: dict[str, Any], named: str
) -> None:
    path = made(LLAMA, generation_config=json.dumps(stated).encode())
    with caplog.at_level("WARNING", "nstf"):
        load(path)
    said = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(said) == bool(named) and (not named or f"says {named}" in said[0])


def test_settings_that_transformers_writes_are_accepted(made: Callable[..., Path]) -> None:
    from transformers import GenerationConfig

    stated = GenerationConfig(
        eos_token_id=2, bad_words_ids=[[63]], num_beams=2, length_penalty=0.8, max_length=9
    )
    for full in (stated.to_json_string(use_diff=False), stated.to_json_string()):
        model: Any = load(made(LLAMA, generation_config=full.encode()))
        assert (
            model.generation_config.bad_words_ids == [[63]] and model.generation_config.length_penalty == 0.8
        )


def test_tokens_beside_the_vocabulary_may_be_forbidden() -> None:
    # Idefics has scores for 2 tokens beside its vocab_size, and its own settings forbid them.
    from nstf.runtime.loading import _vocabulary

    def of(**stated: int) -> int | None:
        return _vocabulary(SimpleNamespace(config=SimpleNamespace(**stated)))

    assert of(vocab_size=64, additional_vocab_size=2) == of(vocab_size=32, decoder_vocab_size=66) == 66
    assert of() is None


def test_no_memory_is_not_the_files_fault(made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GenerationConfig

    original = GenerationConfig.from_dict

    def full(stated: dict[str, Any], **others: Any) -> Any:
        if "max_time" in stated:  # these, and not those that the model has from its config
            raise MemoryError
        return original(stated, **others)

    path = made(LLAMA, generation_config=b'{"eos_token_id": 2, "max_time": 9}')
    monkeypatch.setattr(GenerationConfig, "from_dict", full)
    with pytest.raises(NstfError, match="not enough memory"):
        load(path)


@pytest.mark.parametrize("decoder", [[1], {"0": "x"}, {"0": None}, {"9" * 5000: {"content": "x"}}, 5])
def test_added_tokens_of_wrong_types_are_one_line(tmp_path: Path, decoder: Any) -> None:
    path = file_with(tmp_path / "m.nstf", tokenizer_config={**SETTINGS, "added_tokens_decoder": decoder})
    for way in (lambda: list(stream(path, "hello", 2)), lambda: load_tokenizer(path)):
        with pytest.raises(NstfError):
            way()


@pytest.mark.parametrize("raw", [b"[]", b"5", b'{"a":' * 3000 + b"1" + b"}" * 3000, b"{", b"\xff"])
def test_a_server_of_generation_settings_that_are_none_is_refused(tmp_path: Path, raw: bytes) -> None:
    from nstf.integrations.serve.service import ServeOptions, Service

    with pytest.raises(CorruptError):
        Service(file_with(tmp_path / "m.nstf", generation_config=raw), ServeOptions("m"))


def test_json_in_utf_16_does_not_hide_its_brackets() -> None:
    # Of U+0122, a letter with a comma below, one byte is a quotation mark: what follows was taken for a text.
    text = '{"x":"\u0122","a":' + "[" * 500 + "]" * 500 + "}"
    for encoding in ("utf-16-le", "utf-16", "utf-32"):
        with pytest.raises(CorruptError, match="JSON"):
            parse_object(text.encode(encoding), "m.nstf", "config.json")
    assert parse_object('\ufeff{"a": "\u0122"}'.encode(), "m.nstf", "config.json") == {"a": "\u0122"}


_FILES = {"vocab_file": "secret.json", "merges_file": "secret.txt"}
_TEXTS = {"vocab": "secret.json", "merges": "secret.txt"}
_PLACES = {"init_inputs": ["secret.json", "secret.txt"]}


def other_files(folder: Path, kind: str, name: str, stated: dict[str, Any]) -> Path:
    """An artifact whose tokenizer's file `name` states other files, which lie in `folder`."""
    (folder / "secret.json").write_text('{"S3CR3T": 0, "a": 1, "b": 2, "ab": 3}')
    (folder / "secret.txt").write_text("#version: 0.2\na b\n")
    files = {"tokenizer_config": {"tokenizer_class": kind}}
    files[name] = {**files.get(name, {}), **stated}
    content = {f"{k}.json": json.dumps(v).encode() for k, v in files.items()}
    content["dict.txt"] = b""  # without one that may hold its words there is no tokenizer at all
    write_artifact(folder / "m.nstf", tensors(), {"config.json": json.dumps(LLAMA).encode(), **content})
    return folder / "m.nstf"


@pytest.mark.parametrize(
    ("kind", "name", "stated", "loads"),
    [("CTRLTokenizer", "special_tokens_map", _FILES, False), ("EsmTokenizer", "special_tokens_map", _FILES, False),
     ("BertTokenizer", "special_tokens_map", _FILES, True), ("GPT2Tokenizer", "special_tokens_map", _FILES, True),
     ("BertTokenizer", "special_tokens_map", {"vocab": "secret.json"}, True),
     ("BertTokenizer", "tokenizer_config", _TEXTS, True), ("GPT2Tokenizer", "tokenizer_config", _TEXTS, True),
     ("GPT2Tokenizer", "tokenizer_config", _PLACES, True)],
)  # fmt: skip
def test_a_tokenizer_is_made_of_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, stated: dict[str, Any], loads: bool
) -> None:
    # Each of them is made of secret.json where transformers reads these settings as they are.
    monkeypatch.chdir(tmp_path)
    path = other_files(tmp_path, kind, name, stated)
    if loads:
        assert not any("S3CR3T" in word for word in load_tokenizer(path).get_vocab())
    else:
        with pytest.raises(NstfError, match="cannot build a tokenizer"):
            load_tokenizer(path)


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map"])
def test_settings_of_a_tokenizer_that_are_not_read_here_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # They went to transformers as they were, which reads lists within lists of any depth.
    monkeypatch.chdir(tmp_path)
    deep: Any = 1
    for _ in range(65):
        deep = [deep]
    path = other_files(tmp_path, "BertTokenizer", name, {**_FILES, **_TEXTS, "x": deep})
    with pytest.raises(CorruptError, match=f"its {name}.json is not JSON that can be read"):
        load_tokenizer(path)
    many = b'{"x": [' + b"{}," * 700_000 + b"{}]}"
    for raw in (b"{", b"\xff", b"", many):
        with pytest.raises(CorruptError, match=f"its {name}.json"):
            load_tokenizer(file_with(tmp_path / "m.nstf", **{name: raw}))


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "AutoModelForCausalLM",
        "GenerationConfig",
        "pipeline",
        "LlamaConfig",
        "__version__",
        "ProcessorMixin",
        "__dict__",
    ],
)
def test_a_tokenizer_is_made_by_no_other_class(tmp_path: Path, name: str) -> None:
    # transformers made a model of the files, or whatever else of its own has the name, and that was the tokenizer.
    for files in (
        {"tokenizer_config": {"tokenizer_class": name}},
        {"config": {**LLAMA, "tokenizer_class": name}, "tokenizer_config": {}},
    ):
        with pytest.raises(NstfError, match=f"names '{name}', which is no class of a tokenizer or a"):
            load_tokenizer(file_with(tmp_path / "m.nstf", **files))


@pytest.mark.parametrize(
    "name",
    ["Trainer", "trainer", "TextGenerationPipeline", "LlamaForCausalLM", "GenerationConfig", "AwqConfig"],
)
@pytest.mark.parametrize(
    ("of", "file", "key"),
    [
        ("WhisperProcessor", "preprocessor_config", "feature_extractor_type"),
        ("CLIPProcessor", "preprocessor_config", "image_processor_type"),
        ("Qwen2VLProcessor", "video_preprocessor_config", "video_processor_type"),
        ("Wav2Vec2Processor", "processor_config", "processor_class"),
    ],
)
def test_no_part_of_a_processor_is_another_class(
    tmp_path: Path, name: str, of: str, file: str, key: str
) -> None:
    """transformers imported the module that the class is in, and made a model of files that lay beside."""
    for settings in ({key: name}, {"feature_extractor": {key: [name]}}):
        files = {"tokenizer_config": {"tokenizer_class": of}, file: settings}
        with pytest.raises(UnsupportedError, match=f"its {file}.json names '{name}', which is no class of"):
            load_tokenizer(file_with(tmp_path / "m.nstf", **files))


def test_only_files_of_names_that_we_know_reach_transformers_and_exports(tmp_path: Path) -> None:
    """A config under another name was read by transformers as it was; pickles were handed on by exports."""
    from nstf_convert.cli import run

    names = {
        "config.4.0.0.json": json.dumps({**LLAMA, "num_labels": 10**9, "tokenizer_class": "Trainer"}).encode(),
        "pytorch_model.bin": b"a pickle", "tokenizer.4.0.0.json": b"{}", "modeling_llama.py": b"import os",
    }  # fmt: skip
    config = {**LLAMA, "configuration_files": ["config.4.0.0.json"]}
    path = tmp_path / "m.nstf"
    write_artifact(
        path,
        tensors(),
        {"config.json": json.dumps(config).encode(), "tokenizer.json": EXAMPLE.read_bytes(), **names},
    )
    with open_artifact(path) as artifact:
        assert (
            set(artifact.handed_on())
            == {"config.json", "tokenizer.json"}
            == set(artifact.file_names()) - set(names)
        )
    assert load_tokenizer(path) is not None
    assert run(["export", str(path), "--to", "hf", "-o", str(tmp_path / "out"), "--quiet"]) == 0
    assert not set(names) & {file.name for file in (tmp_path / "out").iterdir()}


def test_words_are_no_arguments() -> None:
    from nstf.runtime.tokenizer_files import _stripped

    words = {"x_path": 1, "vocab": "a", "init_inputs": 2}
    assert _stripped({"ids": words, "list": [words], "x_file": 1}) == {"ids": words, "list": [words]}
    for key in ("mecab_kwargs", "image_processor"):
        assert _stripped({key: words, "a": {key: {**words, "kept": 1}}}) == {key: {}, "a": {key: {"kept": 1}}}


def test_special_tokens_stay(tmp_path: Path) -> None:
    marks = {"pad_token": {"content": "<p>", "lstrip": False}, "additional_special_tokens": ["<x>"]}
    tokenizer = load_tokenizer(file_with(tmp_path / "m.nstf", special_tokens_map=marks))
    assert tokenizer.pad_token == "<p>" and "<x>" in tokenizer.get_added_vocab()


def test_many_files_of_a_tokenizer_do_not_unpack_to_any_size(tmp_path: Path) -> None:
    # 256 MiB of zeros are 256 KiB in the file: hundreds of them would fill memory and the folder for temporary files.
    path = file_with(tmp_path / "m.nstf")
    from nstf.runtime import tokenizer_files

    stored = tokenizer_files.MAX_TOKENIZER_BYTES
    tokenizer_files.MAX_TOKENIZER_BYTES = 1 << 20
    try:
        load_tokenizer(path)
        big = file_with(tmp_path / "b.nstf", vocab=b" " * (1 << 19), emoji=b" " * (1 << 19))
        with pytest.raises(CorruptError, match="its tokenizer's files unpack to"):
            load_tokenizer(big)
    finally:
        tokenizer_files.MAX_TOKENIZER_BYTES = stored
