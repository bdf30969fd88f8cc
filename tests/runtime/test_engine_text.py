"""Text without torch and transformers: the same as with them, or left to them."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nstf.runtime
from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf.kernels.cpu.engine_matrix import available
from nstf.runtime import engine_text
from nstf.runtime.artifact import digests, open_artifact, write_artifact
from nstf.runtime.engine import Engine

pytestmark = pytest.mark.skipif(not available(), reason="the CPU engine was not built")

PROMPTS = ("Once upon a time", "naïve — 一二三", "  two  spaces", "<|end|>special")


def byte_level_files() -> dict[str, bytes]:
    """A byte-level tokenizer of 300 tokens, as `save_pretrained` writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["once upon a time there was a naïve tokenizer of a few words"] * 9, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", unk_token="<|end|>")
    with tempfile.TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


def written(tiny: ModuleType, folder: Path, settings: dict[str, Any] | None = None, **extra: bytes) -> Path:
    model = tiny.new_model("LlamaForCausalLM", vocab_size=300, eos_token_id=0, max_position_embeddings=64)
    files = byte_level_files()
    stated = json.loads(files["tokenizer_config.json"]) | (settings or {})
    files["tokenizer_config.json"] = json.dumps(stated).encode()
    files["generation_config.json"] = b'{"eos_token_id": 0, "temperature": 0.6, "do_sample": true}'
    path: Path = tiny.write(folder, model, files | {k + ".json": v for k, v in extra.items()})
    return path


def test_the_text_is_that_of_the_modules(tiny: ModuleType, tmp_path: Path) -> None:
    path = written(tiny, tmp_path)
    model, tokenizer = nstf.runtime.load(path, engine="off"), nstf.runtime.load_tokenizer(path)
    for prompt in PROMPTS:
        expected = "".join(nstf.runtime.stream(model, tokenizer, prompt, 20))
        assert "".join(engine_text.stream(path, prompt, 20, exact=True)) == expected, prompt


def test_a_file_without_settings_of_its_own_ends_where_its_config_says(
    tiny: ModuleType, tmp_path: Path
) -> None:
    """As transformers reads it; and a clean-up that is off is none."""
    model = tiny.new_model("LlamaForCausalLM", vocab_size=300, eos_token_id=0, max_position_embeddings=64)
    files = byte_level_files()
    stated = json.loads(files["tokenizer_config.json"]) | {"clean_up_tokenization_spaces": False}
    files["tokenizer_config.json"] = json.dumps(stated).encode()
    path = tiny.write(tmp_path, model, files)
    loaded, tokenizer = nstf.runtime.load(path, engine="off"), nstf.runtime.load_tokenizer(path)
    for prompt in PROMPTS:
        expected = "".join(nstf.runtime.stream(loaded, tokenizer, prompt, 20))
        assert "".join(engine_text.stream(path, prompt, 20, exact=True)) == expected, prompt
    with open_artifact(path) as artifact:
        assert engine_text._generation(artifact)[0] == {0}
    stated = {k: v for k, v in tiny.config_json(model).items() if k != "eos_token_id"}
    write_artifact(path, tiny.encode_model(model), files | {"config.json": json.dumps(stated).encode()}, {})
    with pytest.raises(UnsupportedError, match="no end of text"):  # transformers' class has one
        next(engine_text.stream(path, "a time", 3))


def test_neither_torch_nor_transformers_is_imported(tiny: ModuleType, tmp_path: Path) -> None:
    path = written(tiny, tmp_path)
    for code in (
        f"from nstf.runtime.engine_text import stream; list(stream({str(path)!r}, 'a time', 3))",
        f"from nstf_convert.cli import run; assert run(['generate', {str(path)!r}, 'a time', '--max-new-tokens', '5']) == 0",
    ):
        check = "import sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("[]\n"), done.stdout


@pytest.mark.parametrize(
    ("settings", "extra", "message"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, {}, "class 'LlamaTokenizer'"),
        ({"add_bos_token": True}, {}, "setting 'add_bos_token'"),
        ({"clean_up_tokenization_spaces": True}, {}, "setting 'clean_up_tokenization_spaces'"),
        ({"pad_token": "<pad>"}, {}, "special tokens"),
        ({}, {"generation_config": b'{"no_repeat_ngram_size": 2}'}, "no_repeat_ngram_size"),
        ({}, {"tokenizer": b"{}"}, r"tokenizer\.json"),
    ],
)
def test_what_transformers_would_do_differently_is_left_to_it(
    tiny: ModuleType, tmp_path: Path, settings: dict[str, Any], extra: dict[str, bytes], message: str
) -> None:
    path = written(tiny, tmp_path, settings, **extra)
    with pytest.raises(UnsupportedError, match=message):
        next(engine_text.stream(path, "a time", 3))


def test_an_end_of_text_that_is_no_token_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    path = written(tiny, tmp_path, {}, generation_config=b'{"eos_token_id": "x"}')
    with pytest.raises(CorruptError, match="eos_token_id is 'x', expected a token"):
        next(engine_text.stream(path, "a time", 3))


def test_a_prompt_beyond_the_context_is_left_to_transformers(tiny: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="context"):
        next(engine_text.stream(written(tiny, tmp_path), "a time", 64))
    with pytest.raises(UsageError, match="no tokens"):
        next(engine_text.stream(written(tiny, tmp_path), "", 3))


@pytest.mark.parametrize("letters", [64 * 16, 1 << 24])
def test_a_prompt_far_beyond_the_context_is_not_tokenised(
    tiny: ModuleType, tmp_path: Path, letters: int
) -> None:
    """It was left to transformers, which takes time and memory by the square of its length."""
    path = written(tiny, tmp_path)
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)
    longest = max(map(len, tokenizer.get_vocab()))
    assert longest < 16
    for text in (
        engine_text.stream(path, "a" * letters, 3),
        nstf.runtime.stream(model, tokenizer, "a" * letters, 3),
    ):
        with pytest.raises(
            UsageError, match=rf"has {letters} characters, and the model's 64 tokens .*shorten"
        ):
            next(text)


def test_a_damaged_file_gives_no_text(tiny: ModuleType, tmp_path: Path) -> None:
    path = written(tiny, tmp_path)
    with open_artifact(path) as artifact:
        at = next(e.start for name, e in artifact.entries.items() if name.endswith(":codes"))
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError, match="SHA-256"):
        list(engine_text.stream(path, "a time", 3))
    content[at] ^= 1
    path.write_bytes(content)
    assert len(list(engine_text.stream(path, "a time", 3, verify=False))) > 0


def test_a_damaged_large_array_is_found_by_the_thread(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "LARGE_BYTES", 1)
    path = written(tiny, tmp_path)
    with open_artifact(path) as artifact:
        at = next(e.start for name, e in artifact.entries.items() if name.endswith(":codes"))
        with digests.Verifying(artifact) as check:
            check.wait()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    for read in (lambda: list(engine_text.stream(path, "a time", 3)), lambda: Engine.open(path)):
        with pytest.raises(CorruptError, match="SHA-256"):
            read()


def test_what_the_thread_raises_is_raised_where_somebody_waits(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "LARGE_BYTES", 1)

    def fail(self: object, names: list[str]) -> None:
        if names:
            raise MemoryError("none left")

    monkeypatch.setattr(digests.Verifying, "_check", fail)
    with open_artifact(written(tiny, tmp_path)) as artifact, digests.Verifying(artifact) as check:
        with pytest.raises(MemoryError):
            check.wait()


def test_leaving_a_file_to_transformers_says_nothing(tiny: ModuleType, tmp_path: Path) -> None:
    path = written(tiny, tmp_path, {"add_bos_token": None, "tokenizer_class": "LlamaTokenizer"})
    code = f"""
from nstf.runtime import engine_text
try:
    next(engine_text.stream({str(path)!r}, "a time", 3))
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("UnsupportedError\n", "")


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "metaspace"])
def test_the_pieces_are_those_of_the_streamer_of_transformers(kind: str) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast, TextStreamer

    words = ["▁hello", "▁wor", "ld", "▁", "!", "▁a", "b", "一", "二"]
    if kind == "byte level":
        vocabulary = json.loads(byte_level_files()["tokenizer.json"])["model"]["vocab"]
        inner = Tokenizer(models.BPE(vocabulary, []))
        inner.decoder = decoders.ByteLevel()
    else:
        vocabulary = {w: i for i, w in enumerate([f"<0x{i:02X}>" for i in range(256)] + words)}
        inner = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        inner.decoder = (
            decoders.Metaspace()
            if kind == "metaspace"
            else decoders.Sequence(
                [
                    decoders.Replace("▁", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            )
        )

    class Collected(TextStreamer):
        text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text

    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = torch.randint(0, len(vocabulary), (12,), generator=generator).tolist()
        if kind == "byte fallback":  # mostly whole words, and a broken byte sequence in between
            ids = [i if i > 255 or n % 3 == 0 else 256 + i % len(words) for n, i in enumerate(ids)]
        streamer = Collected(PreTrainedTokenizerFast(tokenizer_object=inner), skip_special_tokens=True)
        for token in ids:
            streamer.put(torch.tensor([token]))
        streamer.end()
        assert "".join(engine_text.pieces(inner, ids)) == streamer.text, ids


def test_scripts_without_spaces_are_printed_as_they_come() -> None:
    from tokenizers import Tokenizer, decoders, models

    inner = Tokenizer(models.WordLevel({"一": 0, "二": 1, "?": 2}, unk_token="?"))
    inner.decoder = decoders.Fuse()
    assert list(engine_text.pieces(inner, [0, 1, 0])) == ["一", "二", "一"]
