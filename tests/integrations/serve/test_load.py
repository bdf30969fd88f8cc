"""The load generator of benchmarks/serve.py against a small server."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.serve.conftest import Served

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_tokens_and_times_are_counted(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmarks_serve", BENCHMARKS / "serve.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmarks_serve", module)
    spec.loader.exec_module(module)
    server = serve(parallel=2)
    texts = module.texts(12)
    assert len({t[:20] for t in texts[:50]}) > 40
    found = module.load("nstf", os.getpid(), server.port, 2, 0.5, texts, 8)
    assert found.answers == len(found.first_token_s) >= 2
    assert found.tokens == server.metric("generated_tokens_total")
    assert 0 < min(found.first_token_s) < found.seconds and found.processor_s > 0
    assert (
        module.load("nstf", os.getpid(), server.port, 2, 60, texts[:3], 4).answers == 3
    )  # ends with the texts, too
