"""Importing large libraries."""

import gc
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

# What transformers imports where it is installed, and no language model needs: images for the losses of
# object detection, statistics for generation with a draft.
NOT_FOR_TEXT = ("PIL", "torchvision", "sklearn")


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


def leave_out(names: Iterable[str]) -> None:
    """These libraries are not there for the rest of this process, but where they were imported before. For a command, not a
    library: others in the process may want them."""
    for name in names:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as Python's import system has it


def left_out() -> list[str]:
    """Those of `NOT_FOR_TEXT` that are."""
    return [name for name in NOT_FOR_TEXT if name in sys.modules and sys.modules[name] is None]


def distributions_ahead() -> None:
    """transformers asks, while it is imported, which distribution each installed package belongs to: a second of looking for
    files. A thread finds it out while torch's libraries are loaded. For a command, not a library: it changes what the whole
    process is answered."""
    from importlib import metadata  # pathlib and typing among it: `quick` starts without them

    find = metadata.packages_distributions
    found: list[Mapping[str, list[str]]] = []
    thread = threading.Thread(target=lambda: found.append(find()), daemon=True)
    thread.start()

    def known() -> Mapping[str, list[str]]:
        thread.join()
        return found[0] if found else find()

    metadata.packages_distributions = known
