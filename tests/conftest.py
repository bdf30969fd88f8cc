"""What holds for every test: one thread for each process of pytest-xdist; threads and loggers are put back."""

import logging
import os
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before the workers start: several processes with a pool of threads each would wait for one another's cores."""
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A conversion sets the number of threads of its process; the next test has that of the first again."""
    import torch

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """The command line directs the package's log to stderr; the next test finds it as it was."""
    loggers = [logging.getLogger(name) for name in ("nstf", "nstf_convert")]
    before = [(x.handlers, x.level, x.propagate) for x in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
