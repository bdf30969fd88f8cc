"""Tokenizers of GGUF files: what they say of them, how texts are divided, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nstf.errors import NstfError, UnsupportedError
from nstf_convert.checkpoint import gguf_check, gguf_tokenizer, open_checkpoint
from tests.nstf_convert.checkpoint.conftest import tiny
from tests.nstf_convert.checkpoint.gguf_files import ggml_tensors, metadata_of, write


def with_tokenizer(path: Path) -> Path:
    """A small Llama's file with its tokenizer inside."""
    model = tiny("LlamaForCausalLM")
    return write(path, "llama", ggml_tensors(model, "llama"), metadata_of(model), tokenizer=True)


def test_the_tokenizer_is_rebuilt_with_its_template(tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        files = checkpoint.files()
        assert checkpoint.config is not None
        assert (checkpoint.config["bos_token_id"], checkpoint.config["eos_token_id"]) == (1, 2)
    folder = tmp_path / "out"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    original = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    rebuilt = AutoTokenizer.from_pretrained(folder)
    for text in ("hello world", "def f(x):\n    return x + 1\n", "</s> hello"):
        assert rebuilt.encode(text) == original.encode(text)
    assert rebuilt.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("pre", "stated", "begins"),
    [("smollm", None, False), ("llama-bpe", None, True), ("tekken", None, True), ("llama-bpe", False, False)],
)
def test_a_text_begins_as_llama_cpp_begins_it(
    tmp_path: Path, pre: str, stated: bool | None, begins: bool
) -> None:
    """Files of Llama 3 from its first months do not say that they begin with a token: llama.cpp knows it by their rules."""
    model = tiny("LlamaForCausalLM")
    keys = {} if stated is None else {"tokenizer.ggml.add_bos_token": stated}
    path = write(
        tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), metadata_of(model) | keys, None, True, pre
    )
    (tmp_path / "out").mkdir()
    with open_checkpoint(path) as checkpoint:
        for name, data in checkpoint.files().items():
            (tmp_path / "out" / name).write_bytes(data)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")("hello")["input_ids"]
    assert (tokens[0] == 1) is begins and len(tokens) == 1 + begins


def test_text_is_split_as_the_file_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every rule that transformers does not know was GPT-2's without a word: \"12\" came as one piece."""
    from nstf.runtime.tokenizer_files import tokenizer_from_files

    model = tiny("LlamaForCausalLM")
    for pre, pieces in (("smollm", ["a", "Ġ", "1", "2"]), ("deepseek-llm", ["a", "Ġ12"])):
        path = write(
            tmp_path / f"{pre}.gguf",
            "llama",
            ggml_tensors(model, "llama"),
            metadata_of(model),
            None,
            True,
            pre,
        )
        with open_checkpoint(path) as checkpoint:
            split = tokenizer_from_files(checkpoint.files(), "here").backend_tokenizer.pre_tokenizer
        assert [piece for piece, _ in split.pre_tokenize_str("a 12")] == pieces
        assert ("by the rule deepseek-llm, which is not known" in caplog.text) is (pre == "deepseek-llm")


def test_files_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with open_checkpoint(with_tokenizer(tmp_path / name / "m.gguf")) as checkpoint:
            found.append((checkpoint.files(), checkpoint.fingerprint()))
    assert found[0] == found[1]


def test_tokenizer_files_beside_a_gguf_are_not_read(tmp_path: Path) -> None:
    """Another model's took the place of the GGUF's own, in silence, and settings with code were seen by transformers."""
    path = with_tokenizer(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        own = checkpoint.files()
    other = json.loads(own["tokenizer.json"])
    other["model"]["vocab"] = {
        token: len(other["model"]["vocab"]) - 1 - n for token, n in other["model"]["vocab"].items()
    }
    settings = {"auto_map": {"AutoTokenizer": ["x.Foo", None]}, "tokenizer_class": "BertTokenizer"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": "bert"}))
    (tmp_path / "link.gguf").symlink_to(path)
    for name in ("m.gguf", "link.gguf"):
        with open_checkpoint(tmp_path / name) as checkpoint:
            assert checkpoint.files() == own


def test_a_tokenizer_nobody_knows_is_unsupported(tmp_path: Path) -> None:
    model = tiny("LlamaForCausalLM")
    keys = {"tokenizer.ggml.model": "never_heard_of", "tokenizer.ggml.tokens": ["a", "b"]}
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), {**metadata_of(model), **keys})
    with open_checkpoint(path) as checkpoint:
        checkpoint.get("model.norm.weight")
        with pytest.raises(UnsupportedError, match="tokenizer cannot be rebuilt"):
            checkpoint.files()


@pytest.mark.parametrize("tokens", [7, 1.5, True, "abc", [1, 2], [0.5]])
def test_a_list_of_tokens_that_is_none_is_unsupported(tmp_path: Path, tokens: Any) -> None:
    model = tiny("LlamaForCausalLM")
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), metadata_of(model) | keys)
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(UnsupportedError, match=r"tokens is no list of texts"),
    ):
        checkpoint.files()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["a" * 5000], "a token of more than 4096 letters"),
        ([f"{i:04d}" * 1000 for i in range(1100)], "tokens of 4400000"),
    ],
)
def test_words_of_a_tokenizer_have_limits(tmp_path: Path, tokens: list[str], said: str) -> None:
    """What looks for the likeliest division took 7.4 GB for 23 MB of them."""
    model = tiny("LlamaForCausalLM")
    keys = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": tokens}
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), metadata_of(model) | keys)
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedError, match=said):
        checkpoint.files()


def test_merges_that_are_made_of_all_divisions_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is written down as a text: 0.7 MB of tokens that begin each other took 4 GB."""
    model = tiny("LlamaForCausalLM")
    tokens = ["<unk>", "<s>", "</s>", *("a" * i for i in range(1, 90))]
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens} | {
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 89,
    }
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), metadata_of(model) | keys)
    with open_checkpoint(path) as checkpoint:
        assert "tokenizer.json" in checkpoint.files()
    monkeypatch.setattr(gguf_tokenizer, "MOST_LETTERS_MERGED", sum(len(t) ** 2 for t in tokens) - 1)
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedError, match="tokens whose divisions"):
        checkpoint.files()


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_numbers_beside_tokens_are_as_many(tmp_path: Path, key: str) -> None:
    """Tokens without a score were divided otherwise, without a word."""
    model = tiny("LlamaForCausalLM")
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
    beside = {"scores": [-float(i) for i in range(6)], "token_type": [2, 3, 3, 1, 1, 1]}
    beside[key] = beside[key][:5]
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    keys |= {f"tokenizer.ggml.{name}": values for name, values in beside.items()}
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), metadata_of(model) | keys)
    said = f"{key} is no list of one for each of 6 tokens"
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedError, match=said):
        checkpoint.files()


def test_a_tokenizer_of_words_alone_is_refused_in_words(tmp_path: Path) -> None:
    model = tiny("LlamaForCausalLM")
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), metadata_of(model) | keys)
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(UnsupportedError, match="neither merges nor scores"),
    ):
        checkpoint.files()


def test_numbers_that_nobody_reads_have_a_limit_beside_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers made lists of them: 84 MB took 3.3 GB."""
    model = tiny("LlamaForCausalLM")
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "x.a": [1] * 30}
    keys |= {"tokenizer.ggml.scores": [0.0] * 6, "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1]}
    path = write(tmp_path / "m.gguf", "llama", ggml_tensors(model, "llama"), metadata_of(model) | keys)
    monkeypatch.setattr(gguf_tokenizer, "MOST_NUMBERS", 18)
    with open_checkpoint(path) as checkpoint:
        assert "tokenizer.json" in checkpoint.files()
    monkeypatch.setattr(gguf_tokenizer, "MOST_NUMBERS", 17)
    said = "42 numbers in arrays beside 6 tokens, more than 17"
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedError, match=said):
        checkpoint.files()


def test_a_merge_is_of_two_tokens(tmp_path: Path) -> None:
    """transformers divides it at every space: one of ten million pieces took 35 times the file."""
    path = with_tokenizer(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        header = checkpoint.files() and gguf_check.read_header(path)
    header.metadata["tokenizer.ggml.merges"] = ["a " * 5000]
    with pytest.raises(UnsupportedError, match="a merge of more letters than two tokens"):
        gguf_tokenizer.tokenizer_files(path, header)


def test_a_disk_that_fails_under_the_tokenizer_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full folder for temporary files was called a tokenizer that cannot be rebuilt."""
    path = with_tokenizer(tmp_path / "m.gguf")

    def full(*_: Any, **__: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    with open_checkpoint(path) as checkpoint, pytest.raises(NstfError, match="No space left") as caught:
        checkpoint.files()
    assert type(caught.value) is NstfError
