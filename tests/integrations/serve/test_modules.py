"""Models that the CPU engine does not run: transformers' modules, one request at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.integrations.serve.conftest import MODEL, Served, until


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
    from nstf.errors import UsageError
    from nstf.integrations.serve.service import ServeOptions, Service

    options: dict[str, Any] = {"name": "x", "reproducible": True}
    with pytest.raises(UsageError, match="`reproducible` is for models that the CPU engine runs"):
        Service(gpt2, ServeOptions(**options))
