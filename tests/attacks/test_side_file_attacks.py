"""Side files of an artifact that say what nothing can use, or lead elsewhere: one line, at once, from every way in."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from small_llama import LLAMA, tensors

from nstf.errors import CorruptError, NstfError
from nstf.runtime import load, load_tokenizer
from nstf.runtime.artifact import write_artifact
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
     ("exponential_decay_length_penalty", ["a", "b"]), ("top_h", 5), ("top_h", "x"), ("typical_p", -1)],
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
     {"force_words_ids": [[1]]}, {"is_assistant": "x"}, {"sequence_bias": [[[1], 1.5]]}, {"suppress_tokens": [10**6]}],
)  # fmt: skip
def test_generation_settings_that_say_off_or_need_foreign_code_leave_a_model_that_generates(
    made: Callable[..., Path], stated: dict[str, Any]
) -> None:
    model: Any = load(made(LLAMA, generation_config=json.dumps(stated).encode()))
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2).shape[1] > 3


def test_a_temperature_of_0_takes_the_likeliest_token(made: Callable[..., Path]) -> None:
    model: Any = load(made(LLAMA, generation_config=b'{"do_sample": true, "temperature": 0}'))
    assert model.generation_config.do_sample is False


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


@pytest.mark.parametrize(
    ("name", "stated"),
    [("special_tokens_map", {"vocab_file": "secret.json", "merges_file": "secret.txt"}),
     ("special_tokens_map", {"source_spm": "secret.json", "vocab": "secret.json"}),
     ("tokenizer_config", {"vocab": "secret.json", "merges": "secret.txt"}),
     ("tokenizer_config", {"init_inputs": ["secret.json", "secret.txt"]})],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["CTRLTokenizer", "BertTokenizer", "EsmTokenizer", "GPT2Tokenizer"])
def test_a_tokenizer_is_made_of_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, stated: dict[str, Any]
) -> None:
    (tmp_path / "secret.json").write_text('{"S3CR3T": 0, "a": 1, "b": 2, "ab": 3}')
    (tmp_path / "secret.txt").write_text("#version: 0.2\na b\n")
    monkeypatch.chdir(tmp_path)
    files = {"tokenizer_config": {"tokenizer_class": kind}}
    files[name] = {**files.get(name, {}), **stated}
    content = {f"{k}.json": json.dumps(v).encode() for k, v in files.items()}
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors(), {"config.json": json.dumps(LLAMA).encode(), **content})
    try:
        known = load_tokenizer(path).get_vocab()
    except NstfError:
        return
    assert not any("S3CR3T" in word for word in known)


def test_special_tokens_stay(tmp_path: Path) -> None:
    marks = {"pad_token": {"content": "<p>", "lstrip": False}, "additional_special_tokens": ["<x>"]}
    tokenizer = load_tokenizer(file_with(tmp_path / "m.nstf", special_tokens_map=marks))
    assert tokenizer.pad_token == "<p>" and "<x>" in tokenizer.get_added_vocab()


def test_many_files_of_a_tokenizer_do_not_unpack_to_any_size(tmp_path: Path) -> None:
    # 256 MiB of zeros are 256 KiB in the file: hundreds of them would fill memory and the folder for temporary files.
    path = file_with(tmp_path / "m.nstf")
    from nstf.runtime import loading

    stored = loading.MAX_TOKENIZER_BYTES
    loading.MAX_TOKENIZER_BYTES = 1 << 20
    try:
        load_tokenizer(path)
        big = file_with(tmp_path / "b.nstf", vocab=b" " * (1 << 19), merges=b" " * (1 << 19))
        with pytest.raises(CorruptError, match="its tokenizer's files unpack to"):
            load_tokenizer(big)
    finally:
        loading.MAX_TOKENIZER_BYTES = stored
