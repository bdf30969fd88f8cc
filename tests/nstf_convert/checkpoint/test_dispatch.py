"""What is opened by which reader, and what is said about everything else."""

import json
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf_convert.checkpoint import open_checkpoint, side_files


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing/here/at/all does not exist; give a model folder"):
        open_checkpoint(tmp_path / "nothing/here/at/all")


@pytest.mark.parametrize("text", ["", "a\0b"])
def test_an_empty_path(text: str) -> None:
    with pytest.raises(UsageError, match="path is empty"):
        open_checkpoint(text)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("hello")
    with pytest.raises(UsageError, match=r"holds no weights .*readme\.md"):
        open_checkpoint(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no weights .*nothing"):
        open_checkpoint(tmp_path)


def test_an_artifact_is_not_a_model(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.nstf")
    with pytest.raises(UsageError, match="is an nstf artifact, not a model to convert"):
        open_checkpoint(tmp_path / "model.nstf")


def test_a_file_of_an_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "model.xyz").write_bytes(b"whatever it is")
    with pytest.raises(UnsupportedError, match=r"model\.xyz is of an unknown kind"):
        open_checkpoint(tmp_path / "model.xyz")


def test_an_empty_file(tmp_path: Path) -> None:
    for name, kind in (("a.safetensors", CorruptError), ("a.gguf", CorruptError), ("a.onnx", CorruptError)):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(kind, match=name):
            open_checkpoint(tmp_path / name)


def test_a_fifo_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="not a regular file"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_a_folder_of_one_file_opens_that_file(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "weights.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == ["w"]


def test_a_folder_of_several_files_asks_for_one(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        UsageError, match=r"2 \.safetensors files \(a\.safetensors, b\.safetensors\); give one"
    ):
        open_checkpoint(tmp_path)


def test_safetensors_are_preferred_over_pickles(make_folder: Callable[..., Path]) -> None:
    folder = make_folder("LlamaForCausalLM")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.kind == "safetensors"


def test_the_words_of_every_usual_tokenizer_are_kept_and_downloaded(llama_folder: Path) -> None:
    """DeBERTa's, as it is on the hub, are in spm.model alone; Marian's in two files of SentencePiece."""
    from fnmatch import fnmatch

    from nstf_convert.checkpoint import hub

    # Of transformers' classes, some of which need packages that are not here.
    names = {
        "spm.model",
        "sentencepiece.model",
        "source.spm",
        "target.spm",
        "target_vocab.json",
        "spm_char.model",
    }
    names |= {
        "video_preprocessor_config.json",
        "bpe.codes",
        "vocab-src.json",
        "vocab-tgt.json",
        "prophetnet.tokenizer",
        "entity_vocab.json",
        "dict.txt",
        "byte_maps.json",
        "emoji.json",
        "normalizer.json",
    }
    for name in names:
        (llama_folder / name).write_bytes(b"{}")
    with open_checkpoint(llama_folder) as checkpoint:
        assert names <= set(checkpoint.files())
    assert not [n for n in names if not any(fnmatch(n, pattern) for pattern in hub.PATTERNS)]


def test_a_tokenizer_of_several_vocabularies_reads_as_in_the_folder(llama_folder: Path) -> None:
    """RoCBert's shapes and pronunciations were left behind, and without them it has no tokenizer."""
    from transformers import RoCBertTokenizer

    from nstf.runtime.tokenizer_files import tokenizer_from_files

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "你", "好"]
    for file in llama_folder.glob("*token*"):
        file.unlink()
    (llama_folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tables = [llama_folder / "word_shape.json", llama_folder / "word_pronunciation.json"]
    for table in tables:
        table.write_text(json.dumps({word: number for number, word in enumerate(words)}))
    tokenizer = RoCBertTokenizer(str(llama_folder / "vocab.txt"), *map(str, tables))
    tokenizer.save_pretrained(llama_folder)
    with open_checkpoint(llama_folder) as checkpoint:
        read = tokenizer_from_files(checkpoint.files(), "here")
    assert dict(read("你好")) == dict(tokenizer("你好"))


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="it is there")
def test_a_missing_sentencepiece_is_named(make_folder: Callable[..., Path]) -> None:
    """transformers asks for tiktoken, with which such a file is not read either."""
    from nstf.runtime.tokenizer_files import tokenizer_from_files

    folder = make_folder("LlamaForCausalLM")
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(UnsupportedError, match="needs the package sentencepiece"),
    ):
        tokenizer_from_files(checkpoint.files(), "here")


def test_every_template_of_a_tokenizer_is_kept(make_folder: Callable[..., Path]) -> None:
    """transformers 5 writes all but the default one into a folder, where nobody looked."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from nstf.runtime.tokenizer_files import tokenizer_from_files

    folder = make_folder("LlamaForCausalLM")
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    made.chat_template = {"default": "{{ messages }}", "tool_use": "tools: {{ messages }}"}
    made.save_pretrained(folder)
    with open_checkpoint(folder) as checkpoint:
        assert tokenizer_from_files(checkpoint.files(), "here").chat_template == made.chat_template
    file = folder / "additional_chat_templates" / "tool_use.jinja"
    file.write_bytes(b"tools:\r\n{{ messages }}")  # saved on Windows
    with open_checkpoint(folder) as checkpoint:
        read = tokenizer_from_files(checkpoint.files(), "here").chat_template
    assert read["tool_use"] == "tools:\n{{ messages }}"
    file.unlink()
    file.symlink_to(Path(__file__))
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CorruptError, match="leaves the checkpoint's folder"),
    ):
        checkpoint.files()


def test_files_beside_the_weights_have_a_limit_together(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links inside the folder may give one file many names: 120 of 33 MB took 11 GB."""
    folder = make_folder("LlamaForCausalLM")
    (folder / "vocab.txt").write_text("a" * 3000)
    (folder / "merges.txt").symlink_to("vocab.txt")
    with open_checkpoint(folder) as checkpoint:
        assert len(checkpoint.files()["merges.txt"]) == 3000
    monkeypatch.setattr(side_files, "MOST_BYTES", 5999)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CorruptError, match="more than 5999 bytes together"),
    ):
        checkpoint.files()
    monkeypatch.undo()
    (folder / side_files.TEMPLATES).mkdir()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / side_files.TEMPLATES / "a.jinja").write_text("x" * 1000)
    (folder / side_files.TEMPLATES / "b.jinja").symlink_to("a.jinja")
    with open_checkpoint(folder) as checkpoint:
        assert b'"b"' in checkpoint.files()["tokenizer_config.json"]
    monkeypatch.setattr(side_files, "MAX_SETTINGS_BYTES", 1999)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CorruptError, match="its templates have more than 1999 bytes together"),
    ):
        checkpoint.files()


def test_templates_that_a_processor_leaves_no_place_for_are_named(
    make_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """They were left out without a word."""
    folder = make_folder("LlamaForCausalLM")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ messages }}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("tokenizer_config.json", "processor_config.json"):
        (folder / name).write_text("{}")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.files()["chat_template.jinja"] == b"{{ messages }}"
    assert "the default chat template alone is kept, not ['tool_use.jinja']" in caplog.text


def test_a_hub_name_without_network_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="'org/model' is no local path, and the hub cannot be reached"):
        open_checkpoint("org/model")


def test_a_hub_name_opens_the_downloaded_folder(
    monkeypatch: pytest.MonkeyPatch, make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    import huggingface_hub

    folder, asked = make_folder("LlamaForCausalLM"), []

    def snapshot(name: str, repo_type: str, allow_patterns: list[str]) -> str:
        asked.append((name, repo_type))
        assert not any("bin" in p or ".py" in p for p in allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    with open_checkpoint("org/model") as checkpoint:
        assert checkpoint.architecture == "LlamaForCausalLM"
    assert asked == [("org/model", "model")]


def test_importing_the_package_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, nstf_convert.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_local_folder_wins_over_a_hub_name(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(make_folder("LlamaForCausalLM"), tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    with open_checkpoint("org/model") as checkpoint:
        assert checkpoint.architecture == "LlamaForCausalLM"


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    # Its matrices were converted as if they were all there is, since they are the folder's one file.
    save_file({"base_model.model.q.lora_A.weight": torch.ones(4, 8)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("[" * 10_000)
    with pytest.raises(UnsupportedError, match=r"is an adapter of PEFT, not a model: merge it"):
        open_checkpoint(tmp_path)


def test_an_adapter_beside_a_model_is_said_to_be_left_out(make_folder: Callable[..., Path]) -> None:
    folder = make_folder("LlamaForCausalLM")
    (folder / "adapter_config.json").write_text("{}")
    with open_checkpoint(folder) as checkpoint:
        assert any("the adapter beside the model is not part" in note for note in checkpoint.notes)


def test_nor_is_an_adapters_file_alone(tmp_path: Path) -> None:
    """It was converted as a model, with a note that the adapter beside it is not part of what is converted."""
    lora, other = tmp_path / "lora", tmp_path / "ia3"
    for folder in (lora, other):
        folder.mkdir()
    names = ("q.lora_A.weight", "q.lora_B.weight", "score.weight")
    tensors = {f"base_model.model.{name}": torch.ones(4, 8) for name in names}
    save_file(tensors, lora / "mine.safetensors")
    torch.save(tensors, lora / "mine.bin")
    save_file({"base_model.model.q.ia3_l": torch.ones(4, 1)}, other / "adapter_model.safetensors")
    (other / "adapter_config.json").write_text("{}")
    for path in (lora / "mine.safetensors", lora / "mine.bin", other / "adapter_model.safetensors"):
        with pytest.raises(UnsupportedError, match=r"is an adapter of PEFT, not a model: merge it"):
            open_checkpoint(path)


def test_a_model_may_have_matrices_of_lora(tmp_path: Path) -> None:
    names = ("model.q.base_layer.weight", "model.q.lora_A.speech.weight")
    save_file({name: torch.ones(4, 8) for name in names}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint.names() == sorted(names)
