"""Ctrl-C while a library is imported is taken when that is over."""

import subprocess
import sys
from pathlib import Path

# Runs a command whose first step is to import a module that is interrupted on the way.
COMMAND = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
from nstf_convert.cli import quick, running

def slow(words):
    import pyarrow
    print("imported", pyarrow.DONE, flush=True)
    time.sleep(20)

quick.generate = slow
sys.exit(running.run(["generate", "x.nstf", "y"]))
"""
MODULE = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.1)
DONE = True
"""


def test_an_import_ends_before_the_command_is_interrupted(tmp_path: Path) -> None:
    """Extensions ended the process there (SIGABRT), and transformers took a module for one that is missing (exit code 6)."""
    (tmp_path / "pyarrow.py").write_text(MODULE)  # found first, in the script's own folder
    (tmp_path / "command.py").write_text(COMMAND)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "command.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr == "error: interrupted\n" and done.stdout in ("", "imported True\n")
