"""Limits on the address space of whole commands: each ends well or with one line and an exit code, never by a signal.

A child is forked from a process that has imported everything and allowed some more bytes than it has in use. As a program:
prints what came of every command at every size, as JSON.
"""

import ctypes
import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from commands import outcome, warm, wrong
from recorded import make_inputs

LEAST, MIB = 1 << 14, 1 << 20
CONVERT = [
    "convert", "model", "--budget", "0.5", "-o", "new.nstf", "--work-dir", "work", "--force", "--prefer", "size",
    "--dataset", "text.txt", "--samples", "2", "--seq-len", "16", "--threads", "1", "--quiet", "--no-attention-plan",
    "--formats", "int_grid", "--no-search", "--no-prefix",
]  # fmt: skip
COMMANDS = {
    "convert": CONVERT,
    "generate": ["generate", "in.nstf", "kab kad", "--max-new-tokens", "3", "--threads", "1", "--quiet"],
    "eval": ["eval", "in.nstf", "-r", "model", "--dataset", "text.txt", "--windows", "2", "--seq-len", "16", "--threads",
             "1", "--quiet"],
    "serve": ["serve", "in.nstf", "--threads", "1"],
    "verify": ["verify", "in.nstf"],
    "export": ["export", "in.nstf", "-o", "hf", "--quiet", "--overwrite"],
}  # fmt: skip
# The most room each is given, where it must succeed.
ENOUGH = {"convert": 512 * MIB, "generate": 64 * MIB, "eval": 256 * MIB}


def room(size: int) -> None:
    """Allows `size` bytes of address space more than are in use now; what is free inside is given back before."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def outcomes(count: int) -> dict[str, list[str]]:
    """In a folder of inputs: what comes of every command, from no room at all to what is surely enough."""
    import torch

    from nstf.integrations.serve import server

    torch.set_num_threads(1)
    # The server is made whole, and ends where it would wait for its first client.
    server.run = lambda app, host, port, ready: ready(1)
    found = {}
    for name, words in COMMANDS.items():
        warm(words)
        if name == "convert":
            Path("new.nstf").rename("in.nstf")
        most = ENOUGH.get(name, 256 * MIB)
        # As fine where it is tight as where it is not: each a part more than the one before, from 16 KiB.
        step = (most / LEAST) ** (1 / (count - 1))
        sizes = [-64 * MIB, *(round(LEAST * step**i) for i in range(count))]
        found[name] = [outcome(words, partial(room, size)) for size in sizes]
    return found


@pytest.mark.fuzz
def test_whole_commands_under_20_limits_on_memory_end_well_or_in_one_line(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    run = subprocess.run([sys.executable, __file__, "19"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    for name, found in json.loads(run.stdout.splitlines()[-1]).items():
        said = sorted(set(found) - {"done"})
        print(f"{name}: {found.count('done')} of {len(found)} done, else {said}")
        assert wrong({f"{name} {i}": f for i, f in enumerate(found)}) == {}
        assert found[-1] == "done" and found[0] != "done", (name, found)


if __name__ == "__main__":
    print(json.dumps(outcomes(int(sys.argv[1]))))
