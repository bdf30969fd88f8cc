"""torch, imported when something of it is first used.

Reading a file's structure and running it on the CPU engine need none of it, and importing it takes longer than both.
Modules on that way say `from nstf.kernels.lazy import torch`, and name `Tensor` in annotations only.
"""

from __future__ import annotations

__all__ = ["torch"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch
else:

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            import importlib

            found = getattr(importlib.import_module(self._name), name)
            setattr(self, name, found)
            return found

    torch = _Lazy("torch")
