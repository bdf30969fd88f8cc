"""The tiny models of tests/runtime."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    path = Path(__file__).parent.parent.parent / "runtime" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
