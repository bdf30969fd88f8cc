"""What the HTTP server answers: whole, in a stream, drawn, by a schema, with and without a template."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.serve.conftest import CHAT, HELLO, Served


def events(data: bytes) -> list[Any]:
    lines = [e.removeprefix("data: ") for e in data.decode().split("\n\n") if e]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_is_answered_whole_and_in_a_stream(server: Served) -> None:
    status, found = server.json(CHAT, HELLO)
    assert status == 200
    choice = found["choices"][0]
    assert (found["object"], found["model"], choice["message"]["role"]) == (
        "chat.completion",
        "tiny",
        "assistant",
    )
    assert choice["finish_reason"] in ("stop", "length")
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] <= 8
    status, headers, data = server.call(
        CHAT, HELLO | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    chunks = events(data)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == choice["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == choice["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
    # The second time all but the last token was there already.
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert len({c["id"] for c in chunks}) == 1


def test_a_text_is_what_the_engine_alone_generates(server: Served, artifact: Path) -> None:
    from nstf.runtime.engine import Engine

    prompts = server.service.prompts
    tokens = Engine.open(artifact).generate(prompts.text("The house"), 20, prompts.ends)
    expected = prompts.fast.decode(list(tokens))
    _, found = server.json("/v1/completions", {"prompt": "The house", "max_tokens": 20, "temperature": 0})
    assert found["choices"][0]["text"] == expected
    ids = prompts.text("The house")
    for prompt in (ids, [ids], ["The house"]):
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
        assert server.json("/v1/completions", body)[1]["choices"] == found["choices"]
    _, _, data = server.call("/v1/completions", body | {"stream": True})
    assert "".join(c["choices"][0]["text"] for c in events(data)) == found["choices"][0]["text"]


def test_a_seed_repeats_a_draw_and_a_stop_string_ends_it(server: Served) -> None:
    body = {
        "prompt": "The house",
        "max_tokens": 40,
        "temperature": 1.0,
        "seed": 7,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.01,
    }

    def text(**changes: Any) -> str:
        found = server.json("/v1/completions", body | changes)[1]["choices"][0]
        return str(found["text"])

    full = text()
    assert text() == full
    assert len({text(seed=s) for s in range(5)}) > 1
    stop = full[len(full) // 2 : len(full) // 2 + 3]
    _, found = server.json("/v1/completions", body | {"stop": [stop, "never this"]})
    assert found["choices"][0]["text"] == full[: full.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert text(repetition_penalty=1.5) != full


def test_logprobs_are_those_of_the_engine(server: Served, artifact: Path) -> None:
    from nstf.runtime.engine import Engine

    _, found = server.json(CHAT, HELLO | {"logprobs": True, "top_logprobs": 3, "max_tokens": 1})
    own = found["choices"][0]["logprobs"]["content"][0]
    engine = Engine.open(artifact)
    expected = engine.forward(server.service.prompts.chat(HELLO["messages"], 512)).log_softmax(0)
    assert [t["logprob"] for t in own["top_logprobs"]] == pytest.approx(
        expected.topk(3).values.tolist(), abs=1e-3
    )
    assert own["logprob"] == own["top_logprobs"][0]["logprob"]
    _, found = server.json(
        "/v1/completions", {"prompt": "A", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    )
    scores = found["choices"][0]["logprobs"]
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["top_logprobs"])
    lengths = [len(token) for token in scores["tokens"]]
    assert scores["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]


def test_an_answer_follows_a_json_schema(server: Served) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(4):
        body = HELLO | {"response_format": shape, "max_tokens": 60, "temperature": 1.0, "seed": seed}
        status, found = server.json(CHAT, body)
        assert status == 200, found
        answer = json.loads(found["choices"][0]["message"]["content"])
        assert answer["colour"] in ("red", "green") and 0 <= answer["count"] <= 99
        assert found["choices"][0]["finish_reason"] == "stop"
    for wrong in ({"type": "nonsense"}, {"$ref": "#"}):
        shape["json_schema"] = {"name": "x", "schema": wrong}
        status, found = server.json(CHAT, HELLO | {"response_format": shape})
        assert (status, found["error"]["param"]) == (400, "response_format"), found


def test_a_schema_that_is_too_complex_in_the_middle_is_the_requests_fault(server: Served) -> None:
    pytest.importorskip("llguidance")
    names = {"type": "object", "properties": {str(i): {"type": "string"} for i in range(1300)}}
    # The text is certain up to the choice between a and b: so far it is looked at before the answer begins.
    first = {"enum": ["a", "b"]}
    schema = {"type": "object", "properties": {"first": first, "x": names}, "required": ["first", "x"]}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = HELLO | {"response_format": shape, "max_tokens": 40}
    status, found = server.json(CHAT, body)
    assert (status, found["error"]["param"]) == (400, "response_format"), found
    assert "too complex" in found["error"]["message"]
    status, _, text = server.call(CHAT, body | {"stream": True})
    assert status == 200 and b"too complex" in text and b"invalid_request_error" in text


def test_a_missing_llguidance_is_named(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    status, found = server.json(CHAT, HELLO | {"response_format": {"type": "json_object"}})
    assert status == 501 and "llguidance" in found["error"]["message"]


def test_a_model_without_a_template_says_so(serve: Callable[..., Served], tmp_path: Path) -> None:
    from tests.integrations.serve.conftest import TEMPLATE, write_sample

    path = write_sample(tmp_path / "plain.nstf", template=None)
    plain = serve(path=path)
    status, found = plain.json(CHAT, HELLO)
    assert status == 400 and "no chat template" in found["error"]["message"]
    given = serve(path=path, template=TEMPLATE)
    assert given.json(CHAT, HELLO)[0] == 200
    assert [s.json("/v1/models")[1]["data"][0]["chat"] for s in (plain, given)] == [False, True]
    broken = serve(path=path, template="{{ raise_exception('no system here') }}")
    status, found = broken.json(CHAT, HELLO)
    assert status == 400 and "no system here" in found["error"]["message"]


def test_a_large_prompt_does_not_stop_others_from_being_tokenised(server: Served) -> None:
    prompts = server.service.prompts
    assert prompts._direct
    fast, gate, entered = prompts.fast, threading.Event(), threading.Event()

    class Slow:
        """The tokenizer, for which one text takes as long as the test wants."""

        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            if texts[0].startswith("large"):
                entered.set()
                assert gate.wait(60)
            return fast.encode_batch(texts, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(fast, name)

    prompts.fast = Slow()
    try:
        found: list[int] = []
        asking = threading.Thread(target=lambda: found.extend(prompts.text("large text")))
        asking.start()
        assert entered.wait(60)
        assert prompts.text("small text") == fast.encode("small text").ids and not found
    finally:
        gate.set()
        asking.join(60)
        prompts.fast = fast
    assert found == list(prompts.own("large text")["input_ids"])


def test_a_tokenizer_that_does_more_is_asked_through_transformers(artifact: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from nstf.integrations.serve.prompts import Prompts, _own_way
    from nstf.runtime.artifact import open_artifact

    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        def __call__(self, *texts: Any, **options: Any) -> Any:
            return super().__call__(*texts, **options)

    with open_artifact(artifact) as opened:
        prompts = Prompts(opened)
    assert not _own_way(prompts.own)
    direct = prompts.text("What news?")
    prompts.own.__class__ = Own
    assert _own_way(prompts.own)
    prompts._direct = False
    assert prompts.text("What news?") == direct
