"""Opening a model reaches for no hub."""

import socket
from typing import Any

import pytest

from nstf.runtime.offline import without_hub


def test_nothing_is_looked_up_by_the_name_of_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers resolves a repository's revision before it looks for the first file, local files only or not."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    asked: list[Any] = []

    def refuse(*args: Any, **_: Any) -> None:
        asked.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for make in (AutoConfig, AutoTokenizer, AutoProcessor):
        with without_hub(), pytest.raises((OSError, ValueError)):
            make.from_pretrained("nobody/no-such-model")
    assert asked == []
