"""Opening a model asks no hub for anything, whatever its config names.

transformers looks for a one-word `backbone` among the hub's repositories and reads that one's config; constructors (RWKV,
YOSO, MRA) fetch CUDA code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

_OPENING: ContextVar[bool] = ContextVar("nstf_opening", default=False)
_REPLACED = "nstf_without_hub"


@contextmanager
def without_hub() -> Iterator[None]:
    """Inside, transformers finds no repository and no kernel on the hub, called by this thread; others are left alone."""
    from transformers.integrations import hub_kernels
    from transformers.utils import hub

    _replace(hub, "cached_files", _only_here)
    _replace(hub, "hf_api", lambda *_, **__: _EmptyHub())
    _replace(hub_kernels, "get_kernel", _no_kernel)
    with suppress(ImportError):  # a version that has it elsewhere
        from transformers import backbone_utils

        _replace(backbone_utils, "hf_api", lambda *_, **__: _EmptyHub())
        _replace(backbone_utils, "repo_exists", lambda *_, **__: False)
    before = _OPENING.set(True)
    try:
        yield
    finally:
        _OPENING.reset(before)


def _replace(module: Any, name: str, instead: Callable[..., Any]) -> None:
    """Once for the process: what it does there depends on who calls. Versions differ in what a module has."""
    original = getattr(module, name, None)
    if original is None or hasattr(original, _REPLACED):
        return

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs) if _OPENING.get() else original(*args, **kwargs)

    setattr(call, _REPLACED, True)
    setattr(module, name, call)


class _EmptyHub:
    """The hub's interface as far as configs use it."""

    def repo_exists(self, *_: Any, **__: Any) -> bool:
        return False


def _only_here(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    path = args[0] if args else kwargs.get("path_or_repo_id")
    if path is None or not Path(path).is_dir():
        raise OSError(f"{path} is not fetched from the hub: opening a model needs no network")
    return original(*args, **kwargs)


def _no_kernel(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    name = args[0] if args else kwargs.get("kernel_name")
    raise ImportError(f"{name} is not fetched from the hub: opening a model needs no network")
