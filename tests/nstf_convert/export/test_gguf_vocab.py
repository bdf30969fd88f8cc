"""Vocabularies, rules of splitting and chat templates in an exported GGUF."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nstf.errors import UnsupportedError
from nstf_convert.cli import run
from nstf_convert.export import gguf_vocab
from nstf_convert.export.gguf_vocab import splitting


def test_a_tokenizer_with_unknown_rules_is_refused() -> None:
    from nstf.errors import UnsupportedError

    digits = {"type": "Digits", "individual_digits": True}
    level = {"type": "ByteLevel", "use_regex": True}
    assert splitting(level) == "gpt-2"
    assert splitting({"type": "Sequence", "pretokenizers": [digits, level]}) == "smollm"
    with pytest.raises(UnsupportedError, match="none of the rules known here"):
        splitting({"type": "Metaspace"})


@pytest.mark.parametrize(
    ("step", "prepends"),
    [
        ({"type": "Prepend", "prepend": "_"}, True),
        ({"type": "Metaspace", "prepend_scheme": "never"}, False),
        ({"type": "Metaspace", "add_prefix_space": True}, True),
        ({"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "Metaspace"}]}, True),
        (None, False),
    ],
)
def test_a_blank_before_a_text_is_seen(step: Any, prepends: bool) -> None:
    assert any(map(gguf_vocab._prepends, gguf_vocab._steps(step))) == prepends


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_an_older_vocabulary_is_written_as_its_tokenizer_json_would_be(
    tiny: ModuleType, tmp_path: Path, kind: str
) -> None:
    """It was `no_vocab` without a word where the checkpoint has vocab.json and merges.txt alone."""
    gguf = pytest.importorskip("gguf")
    from tokenizers.pre_tokenizers import ByteLevel

    from nstf.runtime.artifact import open_artifact, write_artifact
    from nstf.runtime.tokenizer_files import load_tokenizer

    words = ["<|endoftext|>", *sorted(ByteLevel.alphabet()), "ab", "\u0120a", "\u0120ab"]
    several = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool use", "template": "tools"}]
    config = {
        "tokenizer_class": kind,
        "chat_template": several if kind == "Qwen2Tokenizer" else "{{ messages }}",
    }
    older = {
        "vocab.json": json.dumps({word: i for i, word in enumerate(words)}).encode(),
        "merges.txt": "#version: 0.2\na b\n\u0120 a\n\u0120a b\n".encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    model = tiny.new_model("LlamaForCausalLM", intermediate_size=64, vocab_size=288)
    with open_artifact(tiny.write(tmp_path, model)) as opened:
        files = {"config.json": opened.file("config.json")}
        tensors = {n: opened.encoded(n) for n in opened.names()}
        write_artifact(tmp_path / "older.nstf", tensors, files | older)
        tokenizer = load_tokenizer(tmp_path / "older.nstf")
        newer = {"tokenizer.json": tokenizer.backend_tokenizer.to_str().encode()}
        stated = {"bos_token": tokenizer.bos_token, "eos_token": "<|endoftext|>"}
        newer["tokenizer_config.json"] = json.dumps(config | stated).encode()
        write_artifact(tmp_path / "newer.nstf", tensors, files | newer)
    fields = []
    for name in ("older", "newer"):
        file = tmp_path / f"{name}.gguf"
        assert run(["export", str(tmp_path / f"{name}.nstf"), "--to", "gguf", "-o", str(file)]) == 0
        reader = gguf.GGUFReader(file)
        fields.append({k: f.contents() for k, f in reader.fields.items() if k.startswith("tokenizer.")})
    found, expected = fields
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == ("gpt-2" if kind == "GPT2Tokenizer" else "qwen2")
    assert found["tokenizer.ggml.tokens"][: len(words)] == words
    assert found["tokenizer.ggml.merges"] == ["a b", "\u0120 a", "\u0120a b"]
    assert found["tokenizer.ggml.eos_token_id"] == 0
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    if kind == "Qwen2Tokenizer":
        assert found["tokenizer.chat_template.tool_use"] == "tools"
        assert found["tokenizer.chat_templates"] == ["tool_use"]
    unstated = ("tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id")
    assert {k: v for k, v in found.items() if k not in unstated} == expected


def test_a_vocabulary_that_transformers_cannot_read_is_refused(
    tiny: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    from nstf.runtime.artifact import open_artifact, write_artifact

    model = tiny.new_model("LlamaForCausalLM", intermediate_size=64)
    with open_artifact(tiny.write(tmp_path, model)) as opened:
        files = {"config.json": opened.file("config.json"), "tokenizer.model": b"no model"}
        write_artifact(tmp_path / "a.nstf", {n: opened.encoded(n) for n in opened.names()}, files)
    assert run(["export", str(tmp_path / "a.nstf"), "--to", "gguf", "-o", str(tmp_path / "a.gguf")]) == 6
    assert "cannot build a tokenizer of tokenizer.model" in capsys.readouterr().err
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize("number", [-1, 3])
def test_a_token_without_a_row_of_the_table_is_refused(number: int) -> None:
    """Counted from the end, a negative number took another token's place."""
    data = {"model": {"vocab": {"a": 0, "b": number}}}
    with pytest.raises(UnsupportedError, match=f"token 'b' has id {number}, the table 3 rows"):
        gguf_vocab._write_tokens(None, data, 3, None)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", b'{"x": [' + b"[]," * (1 << 22) + b"[]]}", "values, and 4194304 at most are read"),
        ("tokenizer_config.json", b'{"x": [' + b"[]," * (1 << 21) + b"[]]}", "too many for its length"),
        ("tokenizer.json", b"{", "not JSON that can be read"),
        ("tokenizer.json", b"[]", "is no object"),
        ("tokenizer_config.json", b"{", "not JSON that can be read"),
    ],
)
def test_tokenizers_are_read_within_the_limits_of_loading(
    tiny: ModuleType, tmp_path: Path, capsys: Any, name: str, content: bytes, said: str
) -> None:
    """A tokenizer.json of unused values, in an artifact of 734 KB, took 9.8 GB and became a GGUF file."""
    from nstf.runtime.artifact import open_artifact, write_artifact

    model = tiny.new_model("LlamaForCausalLM", intermediate_size=64)
    with open_artifact(tiny.write(tmp_path, model)) as opened:
        files = {"config.json": opened.file("config.json"), "tokenizer_config.json": b"{}", name: content}
        write_artifact(tmp_path / "a.nstf", {n: opened.encoded(n) for n in opened.names()}, files)
    assert run(["export", str(tmp_path / "a.nstf"), "--to", "gguf", "-o", str(tmp_path / "a.gguf")]) == 5
    assert said in capsys.readouterr().err
    assert not (tmp_path / "a.gguf").exists()


def test_files_of_a_tokenizer_do_not_unpack_to_any_size_for_an_export(
    tiny: ModuleType, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve files of 100 MB of zeros, in 1.2 MB, took 1.7 GB and two minutes."""
    from nstf.runtime import tokenizer_files
    from nstf.runtime.artifact import open_artifact, write_artifact

    monkeypatch.setattr(tokenizer_files, "MAX_TOKENIZER_BYTES", 1 << 10)
    model = tiny.new_model("LlamaForCausalLM", intermediate_size=64)
    with open_artifact(tiny.write(tmp_path, model)) as opened:
        files = {"config.json": opened.file("config.json")} | dict.fromkeys(
            ("dict.txt", "vocab.txt"), b"a" * 600
        )
        write_artifact(tmp_path / "a.nstf", {n: opened.encoded(n) for n in opened.names()}, files)
    assert run(["export", str(tmp_path / "a.nstf"), "--to", "gguf", "-o", str(tmp_path / "a.gguf")]) == 5
    assert "its tokenizer's files unpack to 1200 bytes, above 1024" in capsys.readouterr().err
    assert not (tmp_path / "a.gguf").exists()
