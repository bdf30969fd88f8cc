"""What holds for every test: one thread for each process of pytest-xdist; threads and loggers are put back."""

import gc
import logging
import os
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before the workers start: several processes with a pool of threads each would wait for one another's cores."""
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: looking through it for garbage again and again takes longer than
    many a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A conversion sets the number of threads of its process; the next test has that of the first again."""
    import torch

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


_LOGGERS = [logging.getLogger(name) for name in ("nstf", "nstf_convert")]
_AS_IMPORTED = [(x.handlers, x.level, x.propagate) for x in _LOGGERS]


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """The command line directs the package's log to stderr; every test finds it as it was, also where a fixture of its
    module ran a command."""
    _restore_loggers()
    yield
    _restore_loggers()


def _restore_loggers() -> None:
    logging.disable(logging.NOTSET)  # a benchmark that a test ran has silenced them all
    for logger, (handlers, level, propagate) in zip(_LOGGERS, _AS_IMPORTED, strict=True):
        logger.handlers, logger.propagate = list(handlers), propagate
        logger.setLevel(level)
