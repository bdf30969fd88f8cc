"""Importing large libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is looked for inside: the objects that a library makes when it is imported stay.

    torch and a language model's class of transformers make 640,000; of the 3.7 s that importing them takes, 0.5 go into
    looking through them again and again.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
