"""The tokenizer from an artifact, and text streamed from a model."""

import errno
import json
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BartConfig, LlamaConfig, PretrainedConfig, XLNetConfig

import nstf.runtime
from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
from nstf.runtime.generate import _warn_beyond_context


def tokenizer_files(chat: bool = False) -> dict[str, bytes]:
    """A byte-free word-level tokenizer of 100 words, as `save_pretrained` writes it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 100)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    if chat:
        fast.chat_template = "{% for m in messages %}{{ m['content'] }} w9 {% endfor %}"
    with tempfile.TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


@pytest.fixture
def loaded(tiny: ModuleType, tmp_path: Path) -> tuple[Any, Any]:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), tokenizer_files())
    return nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)


def test_the_tokenizer_comes_out_as_it_went_in_and_leaves_no_files(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), tokenizer_files())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    tokenizer = nstf.runtime.load_tokenizer(path)
    assert tokenizer("w5 w7")["input_ids"] == [5, 7] and tokenizer.decode([5, 7]) == "w5 w7"
    assert list(scratch.iterdir()) == []


def test_tokenizer_files_that_cannot_be_read_are_refused(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), {"tokenizer.json": b"{]"})
    with pytest.raises(CorruptError, match=r"its tokenizer\.json is not JSON that can be read"):
        nstf.runtime.load_tokenizer(path)
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), {"tokenizer.json": b"{}"})
    with pytest.raises(UnsupportedError, match=r"cannot build a tokenizer of tokenizer\.json"):
        nstf.runtime.load_tokenizer(path)


@pytest.mark.parametrize("message", [None, "Input/output error (os error 5)"])
def test_a_fault_of_the_disk_is_no_unreadable_tokenizer(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str | None
) -> None:
    def broken(*_: object, **__: object) -> None:
        try:
            raise OSError(errno.EIO, "Input/output error") if message is None else Exception(message)
        except Exception as error:
            raise OSError("Can't load the tokenizer") from error

    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), tokenizer_files())
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", broken)
    with pytest.raises(NstfError, match=r"cannot be read \(Input/output error\)") as error:
        nstf.runtime.load_tokenizer(path)
    assert error.value.exit_code == 1


def test_a_default_device_of_the_process_is_not_the_prompts(loaded: tuple[Any, Any]) -> None:
    wanted = list(nstf.runtime.stream(*loaded, "w5 w7", 5))
    with torch.device("meta"):
        assert list(nstf.runtime.stream(*loaded, "w5 w7", 5)) == wanted
        ids = torch.tensor([[5, 7]], device="cpu")
        assert loaded[0].generate(ids, max_new_tokens=2).device.type == "cpu"


def test_the_pieces_are_the_text_that_generate_gives(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    ids = tokenizer("w5 w7", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 2:]
    pieces = list(nstf.runtime.stream(model, tokenizer, "w5 w7", max_new_tokens=8))
    assert "".join(pieces) == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_text_beyond_the_positions_is_announced(
    loaded: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = loaded
    positions = model.config.max_position_embeddings
    next(nstf.runtime.stream(model, tokenizer, "w5 w7", max_new_tokens=positions - 2))
    assert not caplog.records
    next(nstf.runtime.stream(model, tokenizer, "w5 w7", max_new_tokens=positions - 1))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert f"the model's {positions} positions" in caplog.text


def test_a_stop_string_ends_the_generation_before_it(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    whole = "".join(nstf.runtime.stream(model, tokenizer, "w5 w7", max_new_tokens=20, temperature=5.0))
    words = whole.split()
    stop = max(words[:-1], key=words.index)
    steps: list[int] = []
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *a, **k: steps.append(1) or forward(*a, **k))
    monkeypatch.setattr(model, "generate", type(model).generate.__get__(model))
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 5.0, "stops": [stop]}
    assert (
        "".join(nstf.runtime.stream(model, tokenizer, "w5 w7", **options)) == whole[: whole.index(f"{stop} ")]
    )
    assert 0 < len(steps) < 25


@pytest.mark.parametrize(("divided", "steps"), [(False, range(1, 40)), (True, range(40, 41))])
def test_a_caller_who_leaves_ends_the_generation_of_an_undivided_model_only(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, divided: bool, steps: range
) -> None:
    model, tokenizer = loaded
    made: list[int] = []

    def generate(*_: object, streamer: Any, **__: object) -> None:
        streamer.put(torch.tensor([[5]]))
        for _step in range(40):
            made.append(1)
            time.sleep(0.01)
            streamer.put(torch.tensor([7]))
        streamer.end()

    monkeypatch.setattr(model, "generate", generate)
    if divided:
        model.nstf_ranks = object()
    pieces = nstf.runtime.stream(model, tokenizer, "w5", max_new_tokens=40)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert len(made) in steps


def test_sampling_is_reproducible_by_seed_and_leaves_the_global_state(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    before = torch.random.get_rng_state()
    texts = {
        seed: "".join(
            nstf.runtime.stream(model, tokenizer, "w5", max_new_tokens=12, temperature=2.0, seed=seed)
        )
        for seed in (1, 2)
    }
    again = "".join(nstf.runtime.stream(model, tokenizer, "w5", max_new_tokens=12, temperature=2.0, seed=1))
    assert again == texts[1] != texts[2]
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_chat_prompt_goes_through_the_template(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), tokenizer_files(chat=True))
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)
    plain = list(nstf.runtime.stream(model, tokenizer, "w5 w9", max_new_tokens=6))
    assert list(nstf.runtime.stream(model, tokenizer, "w5", max_new_tokens=6, chat=True)) == plain


def test_an_error_inside_the_model_reaches_the_caller(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(model.model, "forward", fail)
    monkeypatch.setattr(model, "generate", type(model).generate.__get__(model))
    with pytest.raises(MemoryError, match="no room"):
        list(nstf.runtime.stream(model, tokenizer, "w5"))


def test_wrong_requests_are_refused(loaded: tuple[Any, Any], tiny: ModuleType) -> None:
    model, tokenizer = loaded
    for prompt, options, message in (
        ("", {}, "no tokens"),
        ("w5", {"max_new_tokens": 0}, "at least 1"),
        ("w5", {"temperature": -1.0}, "at least 1 and 0"),
        ("w5", {"chat": True}, "no chat template"),
        ("w5", {"stops": ["w", ""]}, "a stop string is empty"),
        ("w5", {"seed": 1 << 64}, "64 bits"),
    ):
        with pytest.raises(UsageError, match=message):
            list(nstf.runtime.stream(model, tokenizer, prompt, **options))
    with pytest.raises(UnsupportedError, match="BertModel does not generate"):
        list(nstf.runtime.stream(tiny.new_model("BertModel"), tokenizer, "w5"))


SIDES = {
    f"{side}_{key}": n
    for side in ("encoder", "decoder")
    for key, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
}
# Models whose `generate` begins with something else than a text, or writes something else.
NO_TEXT: dict[str, tuple[str, dict[str, Any], str]] = {
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {"d_model": 32, "max_source_positions": 50, "begin_suppress_tokens": None, **SIDES},
        "does not continue a text: it reads input_features",
    ),
    "Speech2TextForConditionalGeneration": (
        "Speech2TextConfig", {"d_model": 32, **SIDES}, "does not continue a text: it reads input_features",
    ),
    "BlipForConditionalGeneration": (
        "BlipConfig",
        {side: {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, **more}
         for side, more in (("text_config", {"vocab_size": 100, "encoder_hidden_size": 32}),
                            ("vision_config", {"image_size": 32, "patch_size": 8}))},
        "does not continue a text: it reads pixel_values",
    ),
    "MusicgenForCausalLM": (
        "MusicgenDecoderConfig",
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32, "num_codebooks": 2},
        "each step writes several codes",
    ),
    "SpeechT5ForTextToSpeech": (
        "SpeechT5Config",
        {"hidden_size": 32, "speech_decoder_postnet_units": 32, "speech_decoder_prenet_units": 32, **SIDES},
        "does not generate text: it writes spectrograms",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_model_that_writes_no_text_after_a_text_is_refused(
    loaded: tuple[Any, Any], tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config, stated, message = NO_TEXT[name]
    sizes = (
        {} if "Blip" in name else {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    )
    monkeypatch.setitem(tiny.MODELS, name, (config, {**stated, **sizes}))
    with pytest.raises(UnsupportedError, match=f"{name} .*{message}"):
        list(nstf.runtime.stream(tiny.new_model(name), loaded[1], "w5 w7", 3))


def test_what_a_model_prints_is_not_on_stdout(
    loaded: tuple[Any, Any],
    tiny: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Reformer warns of arguments there, for each token."""
    name = "ReformerModelWithLMHead"
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16}
    axes = {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 8], "max_position_embeddings": 32}
    more = {"feed_forward_size": 32, "attn_layers": ["local"], "num_hidden_layers": 1, "is_decoder": True}
    monkeypatch.setitem(tiny.MODELS, name, ("ReformerConfig", {**sizes, **axes, **more, "eos_token_id": 2}))
    model = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model(name), tokenizer_files()))
    assert "".join(nstf.runtime.stream(model, loaded[1], "w5 w7", 3))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("too many indices for tensor of dimension 2", UnsupportedError),
        ("index out of range in self", IndexError),
    ],
)
def test_an_index_error_is_the_tokenizers_only_where_a_token_has_no_row(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception]
) -> None:
    model, tokenizer = loaded

    def fail(*args: object, **kwargs: object) -> None:
        raise IndexError(said)

    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(kind, match=said):
        list(nstf.runtime.stream(model, tokenizer, "w5"))


def test_a_temperature_next_to_zero_is_zero(loaded: tuple[Any, Any]) -> None:
    """Logits that are divided by it would be infinities, of which no token can be drawn."""
    texts = ["".join(nstf.runtime.stream(*loaded, "w5 w7", 5, temperature=t)) for t in (0.0, 1e-40)]
    assert texts[0] == texts[1]


def test_config_of_the_tokenizer_is_not_code(tiny: ModuleType, tmp_path: Path) -> None:
    files = tokenizer_files()
    settings = json.loads(files["tokenizer_config.json"])
    settings["auto_map"] = {"AutoTokenizer": ["evil.Evil", None]}
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"), files)
    assert nstf.runtime.load_tokenizer(path)("w5")["input_ids"] == [5]


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        (LlamaConfig(max_position_embeddings=16), True),
        (XLNetConfig(), False),  # states -1
        (BartConfig(max_position_embeddings=16), False),  # prompt and answer are counted apart
    ],
)
def test_positions_are_warned_of_where_the_model_has_a_limit(
    config: PretrainedConfig, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_beyond_context(SimpleNamespace(config=config), 10, 8)
    assert ("more than the model's 16 positions" in caplog.text) is warned
