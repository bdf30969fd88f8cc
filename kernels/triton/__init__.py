"""Kernels in Triton, one source for NVIDIA and AMD GPUs. Absent without triton; every caller has a torch path."""

from importlib.util import find_spec

AVAILABLE = find_spec("triton") is not None


def launch_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """What a launch raises: RuntimeError, Triton's own where a kernel does not compile or fit the card, and `others`."""
    if not AVAILABLE:
        return (RuntimeError, *others)
    from triton.errors import TritonError

    return (RuntimeError, TritonError, *others)
