"""Text without torch and transformers: the same as with them, or left to them."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nstf.runtime
from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf.kernels.cpu.engine_matrix import available
from nstf.runtime import engine_text
from nstf.runtime.artifact import open_artifact

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
        ({"pad_token": "<pad>"}, {}, "special tokens"),
        ({}, {"generation_config": b'{"repetition_penalty": 1.5}'}, "repetition_penalty"),
        ({}, {"generation_config": b'{"eos_token_id": "x"}'}, "eos_token_id"),
        ({}, {"tokenizer": b"{]"}, r"tokenizer\.json"),
    ],
)
def test_what_transformers_would_do_differently_is_left_to_it(
    tiny: ModuleType, tmp_path: Path, settings: dict[str, Any], extra: dict[str, bytes], message: str
) -> None:
    path = written(tiny, tmp_path, settings, **extra)
    with pytest.raises(UnsupportedError, match=message):
        next(engine_text.stream(path, "a time", 3))


def test_a_prompt_beyond_the_context_is_left_to_transformers(tiny: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="context"):
        next(engine_text.stream(written(tiny, tmp_path), "a time", 64))
    with pytest.raises(UsageError, match="no tokens"):
        next(engine_text.stream(written(tiny, tmp_path), "", 3))


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
