"""Compiled CPU kernels. Absent when the extension was not built; every caller has a torch path."""

__all__ = ["AVAILABLE", "ext"]

try:
    from nstf.kernels.cpu import _ext as ext
except ImportError:
    ext = None  # type: ignore[assignment]

AVAILABLE = ext is not None
