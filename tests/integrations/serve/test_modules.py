"""Models that the CPU engine does not run: transformers' modules, one request at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.errors import UnsupportedError, UsageError
from nstf.integrations.serve.output import Piece
from nstf.integrations.serve.protocol import parse
from nstf.integrations.serve.service import ServeOptions, Service
from tests.integrations.serve.conftest import MODEL, Served, until, write_sample


@pytest.fixture
def gpt2(tiny: ModuleType, tmp_path: Path) -> Path:
    model = tiny.new_model(
        "GPT2LMHeadModel", vocab_size=1000, n_positions=256, eos_token_id=0, bos_token_id=0
    )
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    found: Path = tiny.write(tmp_path, model, {n: (MODEL / n).read_bytes() for n in names})
    return found


def test_another_architecture_is_served_and_named(serve: Callable[..., Served], gpt2: Path) -> None:
    import nstf.runtime

    server = serve(path=gpt2)
    assert "GPT2" in str(server.service.note) or "gpt2" in str(server.service.note)
    assert "one request at a time" in server.json("/health")[1]["engine"]
    ids = server.service.prompts.text("The house")
    model = nstf.runtime.load(gpt2)
    with torch.no_grad():
        made = model.generate(
            torch.tensor([ids]), max_new_tokens=9, do_sample=False, eos_token_id=0, pad_token_id=0
        )
    body = {"prompt": "The house", "max_tokens": 9, "temperature": 0}
    status, found = server.json("/v1/completions", body)
    new = [t for t in made[0, len(ids) :].tolist() if t != 0]
    assert status == 200 and found["choices"][0]["text"] == server.service.prompts.fast.decode(new)
    _, _, data = server.call("/v1/completions", body | {"stream": True})
    chunks = [json.loads(e[6:]) for e in data.decode().split("\n\n") if e and e != "data: [DONE]"]
    assert "".join(c["choices"][0]["text"] for c in chunks) == found["choices"][0]["text"]
    drawn = body | {
        "temperature": 1.0,
        "seed": 3,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "top_k": 20,
    }
    assert (
        server.json("/v1/completions", drawn)[1]["choices"]
        == server.json("/v1/completions", drawn)[1]["choices"]
    )
    stop = found["choices"][0]["text"][3:5]
    assert stop not in server.json("/v1/completions", body | {"stop": stop})[1]["choices"][0]["text"]


def test_what_it_does_not_do_is_refused_and_a_client_may_leave(
    serve: Callable[..., Served], gpt2: Path
) -> None:
    server = serve(path=gpt2, queue=1)
    for changes in ({"logprobs": 2}, {"response_format": {"type": "json_object"}}):
        status, found = server.json("/v1/completions", {"prompt": "A", **changes})
        assert status in (400, 501), found
    from tests.integrations.serve.test_server import begin

    left = begin(server, {"prompt": "The house", "max_tokens": 240, "temperature": 0, "stream": True})
    until(lambda: server.metric("generated_tokens_total") > 1)
    left.close()
    assert server.json("/v1/completions", {"prompt": "A", "max_tokens": 2})[0] == 200


def test_reproducible_needs_the_engine(gpt2: Path) -> None:
    options: dict[str, Any] = {"name": "x", "reproducible": True}
    with pytest.raises(UsageError, match="`reproducible` is for models that the CPU engine runs"):
        Service(gpt2, ServeOptions(**options))


SIDES = {
    f"{side}_{key}": n
    for side in ("encoder", "decoder")
    for key, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
}
TOKENS = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 0}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BartForConditionalGeneration": (
        "BartConfig",
        {"d_model": 32, "max_position_embeddings": 32, "decoder_start_token_id": 7, "forced_eos_token_id": None, **SIDES,
         **TOKENS},
    ),
    "LEDForConditionalGeneration": (
        "LEDConfig",
        {"d_model": 32, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 16,
         "attention_window": 8, "decoder_start_token_id": 7, **SIDES, **TOKENS},
    ),
    "MptForCausalLM": ("MptConfig", {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 16, **TOKENS}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0,
         "vocab_size": 1000},
    ),
    "MusicgenForCausalLM": (
        "MusicgenDecoderConfig",
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32, "num_codebooks": 2, **TOKENS},
    ),
    "SpeechT5ForTextToSpeech": (
        "SpeechT5Config",
        {"hidden_size": 32, "speech_decoder_postnet_units": 32, "speech_decoder_prenet_units": 32, **SIDES, **TOKENS},
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {"d_model": 32, "max_source_positions": 50, "begin_suppress_tokens": None, "decoder_start_token_id": 7, **SIDES,
         **TOKENS},
    ),
    "XLNetLMHeadModel": ("XLNetConfig", {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32, **TOKENS}),
}  # fmt: skip


@pytest.fixture
def other(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """An artifact of a model of OTHERS, with the sample's tokenizer."""

    def make(name: str) -> Path:
        monkeypatch.setitem(tiny.MODELS, name, OTHERS[name])
        model = tiny.new_model(name)
        files = {n: (MODEL / n).read_bytes() for n in ("tokenizer.json", "tokenizer_config.json")}
        settings = model.generation_config.to_json_string(use_diff=True).encode()
        found: Path = tiny.write(tmp_path, model, files | {"generation_config.json": settings})
        return found

    return make


@pytest.mark.parametrize(
    "name", ["BartForConditionalGeneration", "T5ForConditionalGeneration", "XLNetLMHeadModel"]
)
def test_an_answer_begins_as_the_model_says(
    serve: Callable[..., Served], other: Callable[[str], Path], name: str
) -> None:
    """Encoder-decoders begin with a token of their own, and XLNet says that it has no context's end."""
    import nstf.runtime

    path = other(name)
    model, tokenizer = nstf.runtime.load(path), nstf.runtime.load_tokenizer(path)
    expected = "".join(nstf.runtime.stream(model, tokenizer, "The house of the lord", 6))
    body = {"prompt": "The house of the lord", "max_tokens": 6, "temperature": 0}
    status, found = serve(path=path).json("/v1/completions", body)
    assert status == 200 and found["choices"][0]["text"] == expected


@pytest.mark.parametrize(("asked", "most"), [({}, 4096), ({"max_tokens": 9000}, 9000)])
def test_an_answer_without_a_context_has_a_bound(
    other: Callable[[str], Path], asked: dict[str, int], most: int
) -> None:
    """T5 states none: an answer that did not end by itself kept all others waiting for ever."""
    service = Service(other("T5ForConditionalGeneration"), ServeOptions(name="x"))
    try:
        request = parse(json.dumps({"prompt": "The house", **asked}).encode(), False, "x")
        answer = service.begin(request, lambda piece: None)
        service.backend.cancel(answer)
        assert answer.most == most
    finally:
        service.close()


def test_a_prompt_beyond_a_context_of_another_name_is_refused(
    serve: Callable[..., Served], other: Callable[[str], Path]
) -> None:
    server = serve(path=other("MptForCausalLM"))
    assert server.json("/v1/models")[1]["data"][0]["context_length"] == 16
    status, found = server.json("/v1/completions", {"prompt": "house " * 500, "max_tokens": 1})
    assert status == 400 and "longer than this server's context of 16" in found["error"]["message"]


def test_an_answer_ends_with_the_models_positions(
    serve: Callable[..., Served], other: Callable[[str], Path]
) -> None:
    """LED has fewer for answers than for prompts."""
    server = serve(path=other("LEDForConditionalGeneration"))
    body = {"prompt": "The house", "max_tokens": 40, "temperature": 0}
    status, found = server.json("/v1/completions", body)
    assert status == 200 and found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 16


WORDINGS: dict[str, Callable[[list[int]], Any]] = {
    "suppress_tokens": lambda text: text[:1],
    "begin_suppress_tokens": lambda text: text[:1],
    "bad_words_ids": lambda text: [text[:2]],
    "sequence_bias": lambda text: [[text[1:3], -100.0]],
    "no_repeat_ngram_size": lambda text: 1,
}


@pytest.mark.parametrize("setting", WORDINGS)
def test_what_a_file_lets_no_text_contain_holds_by_the_engine_and_by_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    from nstf.runtime.engine import Engine

    def no_engine(*_: object, **__: object) -> None:
        raise UnsupportedError("not this one")

    body = {"prompt": "Good morrow, my lord", "max_tokens": 8, "temperature": 0}

    def made(path: Path) -> list[int]:
        service = Service(path, ServeOptions(name="x", exact=True))
        pieces: Queue[Piece] = Queue()
        try:
            answer = service.begin(parse(json.dumps(body).encode(), False, "x"), pieces.put)
            while (piece := pieces.get(timeout=60)).reason is None:
                pass
            assert piece.reason != "error"
        finally:
            service.close()
        return answer.tokens

    usual = made(write_sample(tmp_path / "usual.nstf"))
    path = write_sample(tmp_path / "own.nstf", generation={setting: WORDINGS[setting](usual)})
    by_engine = made(path)
    assert by_engine != usual
    monkeypatch.setattr(Engine, "open", no_engine)
    monkeypatch.setattr("nstf.runtime.graph_batch.GraphBatch.__init__", no_engine)
    assert made(path) == by_engine


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WhisperForConditionalGeneration", "does not continue a text: it reads input_features"),
        ("MusicgenForCausalLM", "each step writes several codes of a sound"),
        ("SpeechT5ForTextToSpeech", "does not generate text: it writes spectrograms"),
    ],
)
def test_a_model_that_writes_no_text_is_not_served(
    other: Callable[[str], Path], name: str, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} .*{message}"):
        Service(other(name), ServeOptions(name="x"))


def test_a_model_that_cannot_begin_an_answer_is_not_served(
    other: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A T5 without a first token is built all the same; that is found out before anybody asks."""
    name = "T5ForConditionalGeneration"
    config, stated = OTHERS[name]
    monkeypatch.setitem(OTHERS, name, (config, stated | {"decoder_start_token_id": None}))
    with pytest.raises(UnsupportedError, match="`decoder_start_token_id` or `bos_token_id` has to be"):
        Service(other(name), ServeOptions(name="x"))
