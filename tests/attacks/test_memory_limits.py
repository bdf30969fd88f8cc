"""Limits on the address space of whole commands: each ends well or with one line and an exit code, never by a signal.

A child is forked from a process that has imported everything and allowed some more bytes than it has in use. As a program:
prints what came of every command at every size, as JSON.
"""

import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from recorded import make_inputs

MIB = 1 << 20
CONVERT = [
    "convert", "model", "--budget", "0.5", "-o", "new.nstf", "--work-dir", "work", "--force", "--prefer", "size",
    "--dataset", "text.txt", "--samples", "2", "--seq-len", "16", "--threads", "1", "--quiet", "--no-attention-plan",
    "--formats", "int_grid", "--no-search", "--no-prefix",
]  # fmt: skip
COMMANDS = {
    "convert": CONVERT,
    "generate": ["generate", "in.nstf", "kab kad", "--max-new-tokens", "3", "--threads", "1", "--quiet"],
    "eval": ["eval", "in.nstf", "--dataset", "text.txt", "--samples", "2", "--seq-len", "16", "--threads", "1", "--quiet"],
    "serve": ["serve", "in.nstf", "--threads", "1"],
    "verify": ["verify", "in.nstf"],
    "export": ["export", "in.nstf", "-o", "hf", "--quiet", "--overwrite"],
}  # fmt: skip
# The most room each is given, where it must succeed.
ENOUGH = {"convert": 512 * MIB, "generate": 64 * MIB, "eval": 256 * MIB}


def outcome(words: list[str], room: int | None) -> str:
    """`done`, the line that a command says, or what else became of it, with `room` bytes more than are in use now."""
    from nstf_convert.cli import run

    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            code = 99
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(said.fileno(), 2)
                if room is not None:
                    pages = int(Path("/proc/self/statm").read_text().split()[0])
                    limit = pages * os.sysconf("SC_PAGE_SIZE") + room
                    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                code = run(words)
                sys.stderr.flush()
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}: {lines[-3:]}"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "done"
    errors = [line for line in lines if line.startswith("error: ")]
    if code == 1 and errors == lines[-1:] and "--debug" not in errors[0]:
        return errors[0]
    return f"code {code}: {lines[-3:]}"


def outcomes(count: int) -> dict[str, list[str]]:
    """In a folder of inputs: what comes of every command, from no room at all to what is surely enough."""
    import torch

    from nstf.integrations.serve import server

    torch.set_num_threads(1)
    # The server is made whole, and ends where it would wait for its first client.
    server.run = lambda app, host, port, ready: ready(1)
    found = {}
    for name, words in COMMANDS.items():
        if name == "generate" or not Path("in.nstf").exists():
            Path("new.nstf").rename("in.nstf") if Path("new.nstf").exists() else None
        found[name] = [warm(words)]
        enough = ENOUGH.get(name, 256 * MIB)
        found[name] += [
            outcome(words, room) for room in [-64 * MIB, *(enough * i // count for i in range(1, count + 1))]
        ]
    return found


def warm(words: list[str]) -> str:
    """Runs a command in this very process, so that all is imported, and gives back `done`."""
    from nstf_convert.cli import run

    with Path(os.devnull).open("w") as nowhere:
        kept, sys.stdout = sys.stdout, nowhere
        try:
            code = run(words)
        finally:
            sys.stdout = kept
    gc.collect()
    return "done" if code == 0 else f"code {code}"


@pytest.mark.fuzz
def test_whole_commands_under_20_limits_on_memory_end_well_or_in_one_line(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    run = subprocess.run([sys.executable, __file__, "19"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    wrong = {}
    for name, found in json.loads(run.stdout.splitlines()[-1]).items():
        print(
            f"{name}: {found.count('done') - 1} of {len(found) - 1} done, else {sorted(set(found) - {'done'})}"
        )
        assert found[0] == "done" and found[-1] == "done" and found[1] != "done", (name, found)
        wrong |= {
            f"{name} {i}": f for i, f in enumerate(found) if f != "done" and not f.startswith("error: ")
        }
    assert wrong == {}


if __name__ == "__main__":
    print(json.dumps(outcomes(int(sys.argv[1]))))
