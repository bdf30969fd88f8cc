"""Whole commands in children of a process that has imported everything: what became of them under a limit."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

# A command that takes longer waits for something that does not come: it is ended by a signal.
HANGS_S = 120


def outcome(words: list[str], limit: Callable[[], None] = lambda: None) -> str:
    """`done`; the one line that a command that ended with 1 says; or what else became of it. limit: called in the child."""
    from nstf_convert.cli import run

    out, into = os.pipe()  # no file, whose size may be limited
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(into, 2)
            # pytest has streams of its own, which are files.
            sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
            signal.alarm(HANGS_S)
            limit()
            code = run(words)
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(into)
    with os.fdopen(out, "rb") as said:
        lines = said.read().decode(errors="replace").splitlines()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}: {lines[-3:]}"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "done"
    errors = [line for line in lines if line.startswith("error: ")]
    if code == 1 and errors and errors == lines[-1:] and "--debug" not in errors[0]:
        return errors[0]
    return f"code {code}: {lines[-3:]}"


def warm(words: list[str]) -> None:
    """Runs a command in this very process, so that all it needs is imported."""
    from nstf_convert.cli import run

    with Path(os.devnull).open("w") as nowhere:
        kept, sys.stdout = sys.stdout, nowhere
        try:
            code = run(words)
        finally:
            sys.stdout = kept
    assert code == 0, (words, code)
    gc.collect()


def wrong(outcomes: dict[str, str]) -> dict[str, str]:
    """Those that neither ended well nor with one line."""
    return {
        name: found for name, found in outcomes.items() if found != "done" and not found.startswith("error: ")
    }
