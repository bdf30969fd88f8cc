"""The tiny models of tests/runtime for the tests with other libraries; no test here may reach a network."""

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# export_models, which several tests here share: tests are no packages.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    path = Path(__file__).parent.parent / "runtime" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a connection fails at once."""
    import socket

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a connection to {args[1:]} was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def browser(no_network: None) -> Iterator[Any]:
    """A headless Chromium that reaches nothing but this machine."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make integrations")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here: apt install chromium")
    quiet = ("no-sandbox", "disable-gpu", "disable-background-networking", "disable-component-update")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=[f"--{name}" for name in quiet])
        yield made
        made.close()
