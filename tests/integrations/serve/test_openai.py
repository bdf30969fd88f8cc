"""The real `openai` client against the server."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nstf.errors import UnsupportedError
from tests.integrations.serve.conftest import Served

openai = pytest.importorskip("openai")
ASK: list[Any] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What news, my lord?"},
]


@pytest.fixture(
    params=["CPU engine", "decoder without graphs", pytest.param("captured decoder", marks=pytest.mark.gpu)]
)
def client(
    serve: Callable[..., Served], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    if request.param == "decoder without graphs":
        # What a GPU runs, with the steps in the place of their graphs.
        def refuse(*_: object, **__: object) -> None:
            raise UnsupportedError("not by the engine")

        monkeypatch.setattr("nstf.runtime.engine.Engine.open", refuse)
    server = serve(key="k-123", device="cuda" if request.param == "captured decoder" else "cpu")
    assert server.service.backend.name == request.param
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k-123", max_retries=0) as made:
        yield made


def test_chats_and_texts(client: Any) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    whole = client.chat.completions.create(
        model="tiny", messages=ASK, max_completion_tokens=12, temperature=0, logprobs=True
    )
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=ASK,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    text = client.completions.create(
        model="tiny", prompt="The king", max_tokens=5, seed=1, extra_body={"top_k": 5, "min_p": 0.1}
    )
    assert text.choices[0].text and text.usage.completion_tokens <= 5


def test_a_stream_that_is_closed_early_and_many_at_once(client: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=200, stream=True, temperature=0
    ) as stream:
        assert next(iter(stream)).choices

    def ask(i: int) -> str:
        found = client.completions.create(model="tiny", prompt=f"Scene {i % 3}", max_tokens=8, temperature=0)
        return str(found.choices[0].text)

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, range(12)))
    assert all(found)


def test_errors_are_the_clients_own_classes(client: Any) -> None:
    def create(**changes: Any) -> None:
        client.chat.completions.create(**{"model": "tiny", "messages": ASK, "max_tokens": 2, **changes})

    with pytest.raises(openai.BadRequestError, match="temperature"):
        create(temperature=9)
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="other")
    assert missing.value.code == "model_not_found"
    client.api_key = "wrong"
    with pytest.raises(openai.AuthenticationError):
        create()


def test_a_schema_by_pydantic(client: Any) -> None:
    pytest.importorskip("llguidance")
    pydantic = pytest.importorskip("pydantic")
    from typing import Literal

    Mood = pydantic.create_model("Mood", mood=(Literal["good", "bad"], ...))
    found = client.chat.completions.parse(
        model="tiny", messages=ASK, response_format=Mood, max_tokens=40, temperature=0
    )
    assert found.choices[0].message.parsed.mood in ("good", "bad")
