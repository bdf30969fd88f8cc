"""tensorly on torch tensors, for the time of a `with` block and for this thread only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nstf.errors import UnsupportedError


@contextmanager
def torch_backend() -> Iterator[Any]:
    """Gives the `tensorly` module with its PyTorch backend; the caller's backend is restored afterwards.

    tensorly.backend_context restores the old backend for all threads, so it is not used here.
    """
    try:
        import tensorly
    except ImportError as error:
        raise UnsupportedError("CP decompositions need tensorly: pip install tensorly scipy") from error
    before = tensorly.get_backend()
    tensorly.set_backend("pytorch", local_threadsafe=True)
    try:
        yield tensorly
    finally:
        tensorly.set_backend(before, local_threadsafe=True)
