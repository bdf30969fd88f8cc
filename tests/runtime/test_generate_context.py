"""Prompts that are longer than a model's context: refused where they must be, and run where the model runs them."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    EncoderDecoderConfig,
    LEDConfig,
    MptConfig,
    MptForCausalLM,
    MusicgenConfig,
    PretrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import nstf.runtime
from nstf.errors import UnsupportedError, UsageError
from nstf.runtime.generate import _warn_beyond_context, stated_context
from nstf_convert.cli import run

sys.path.insert(0, str(Path(__file__).parent))
from test_generate import tokenizer_files

CONTEXT = 16
SIDE = {
    f"{side}_{key}": n
    for side in ("encoder", "decoder")
    for key, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
}
BART = BartConfig(
    vocab_size=100, d_model=32, max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=2, forced_eos_token_id=None, **SIDE,
)  # fmt: skip
MPT = MptConfig(vocab_size=100, d_model=32, n_heads=2, n_layers=1, max_seq_len=CONTEXT, expansion_ratio=1)


def of(name: str, tiny: ModuleType) -> Any:
    torch.manual_seed(0)
    if name == "bart":
        return BartForConditionalGeneration(BART)
    return MptForCausalLM(MPT) if name == "mpt" else tiny.new_model("GPT2LMHeadModel", n_positions=CONTEXT)


@pytest.fixture(params=["bart", "mpt", "gpt2"])
def path(request: pytest.FixtureRequest, tiny: ModuleType, tmp_path: Path) -> Path:
    found: Path = tiny.write(tmp_path, of(request.param, tiny).eval(), tokenizer_files())
    return found


def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_tokenised(path: Path) -> None:
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)
    with pytest.raises(UsageError, match="2999 characters, and the model's 16 tokens"):
        next(nstf.runtime.stream(model, tokenizer, "w5 " * 999 + "w5"))


def test_a_prompt_that_the_model_cannot_run_is_wrong_use(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was the file's fault, or nobody's."""
    expected = "the prompt has 17 tokens, and the model's context is 16"
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)
    with pytest.raises(UsageError, match=expected):
        list(nstf.runtime.stream(model, tokenizer, "w5 " * 17, 2))
    assert run(["generate", str(path), "w5 " * 17, "--max-new-tokens", "2"]) == 2
    assert expected in capsys.readouterr().err


def test_a_text_that_outgrows_the_context_is_wrong_use(path: Path) -> None:
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)
    model.generation_config.eos_token_id = None
    with pytest.raises(UsageError, match="text has 17 tokens, and the model's context is 16"):
        list(nstf.runtime.stream(model, tokenizer, "w5 w7", 40))


# LED's answers have fewer positions than its prompts, ProphetNet's begin after that of its padding, XLM adds a token.
SMALL = {"max_position_embeddings": CONTEXT, "pad_token_id": 1}
LED = {
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": CONTEXT,
    "attention_window": 8,
}
STARTS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
PROPHET = {
    key: n
    for side in ("encoder", "decoder")
    for key, n in ((f"num_{side}_layers", 1), (f"num_{side}_attention_heads", 2), (f"{side}_ffn_dim", 32))
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LEDForConditionalGeneration": ("LEDConfig", {"d_model": 32, **LED, **STARTS, **SIDE}),
    "ProphetNetForConditionalGeneration": (
        "ProphetNetConfig",
        {"hidden_size": 32, **PROPHET, **SMALL, **STARTS},
    ),
    "XLMWithLMHeadModel": ("XLMConfig", {"emb_dim": 32, "n_layers": 1, "n_heads": 2, **SMALL}),
}


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        (
            "LEDForConditionalGeneration",
            2,
            "text has 17 tokens, and the model's context is 16: ask for fewer",
        ),
        ("ProphetNetForConditionalGeneration", 2, "text has 15 tokens, and the model's context is 16"),
        ("XLMWithLMHeadModel", 2, "text has 16 tokens, and the model's context is 16"),
    ],
)
def test_positions_that_are_no_tokens_are_counted_to_the_context(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: int, message: str
) -> None:
    config, stated = OTHERS[name]
    monkeypatch.setitem(tiny.MODELS, name, (config, {"vocab_size": 100, **stated}))
    path = tiny.write(tmp_path, tiny.new_model(name), tokenizer_files())
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)
    model.generation_config.eos_token_id = None
    with pytest.raises(UsageError, match=message):
        list(nstf.runtime.stream(model, tokenizer, "w5 " * words, 40))


def test_a_model_that_runs_a_longer_prompt_runs_it(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(
        tmp_path, tiny.new_model("Qwen3ForCausalLM", max_position_embeddings=CONTEXT), tokenizer_files()
    )
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)
    model.generation_config.eos_token_id = None
    assert "".join(nstf.runtime.stream(model, tokenizer, "w5 " * 17, 3))


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("can't allocate memory")])
def test_another_failure_keeps_its_class(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(type(error)):
        list(nstf.runtime.stream(model, tokenizer, "w5 " * 17))


def test_a_failure_inside_the_context_is_not_blamed_on_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("another")

    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(UnsupportedError, match="RuntimeError: another") as found:
        list(nstf.runtime.stream(model, tokenizer, "w5", 40))
    assert isinstance(found.value.__cause__, RuntimeError)


def test_an_answer_that_has_no_first_token_is_one_line(
    tiny: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As T5Config is by itself; transformers looks for the token when a text is asked for.
    config = T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    path = tiny.write(tmp_path, T5ForConditionalGeneration(config).eval(), tokenizer_files())
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)
    with pytest.raises(UnsupportedError, match="`decoder_start_token_id` or `bos_token_id` has to be"):
        list(nstf.runtime.stream(model, tokenizer, "w5 w6", 3))
    assert run(["generate", str(path), "w5 w6", "--max-new-tokens", "3"]) == 6
    said = capsys.readouterr().err
    assert said.startswith("error: T5ForConditionalGeneration cannot run") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BART, 16),
        (MPT, 16),
        (LEDConfig(max_encoder_position_embeddings=64, max_decoder_position_embeddings=16), 64),
        (
            EncoderDecoderConfig.from_encoder_decoder_configs(
                BertConfig(max_position_embeddings=64), BertConfig(max_position_embeddings=16)
            ),
            64,
        ),
        (T5Config(), None),
        (MusicgenConfig(text_encoder={"model_type": "t5"}, audio_encoder={"model_type": "encodec"}, decoder={}), None),
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_the_context_of_a_prompt(config: PretrainedConfig, expected: int | None) -> None:
    assert stated_context(SimpleNamespace(config=config)) == expected


def test_prompt_and_answer_of_an_encoder_decoder_are_not_summed(caplog: pytest.LogCaptureFixture) -> None:
    _warn_beyond_context(SimpleNamespace(config=BART), 10, 8)
    assert not caplog.records
