"""The `nstf` command: arguments to dataclasses, errors to exit codes.

One file per sub-command, imported when it is the one that runs. Nothing here or there imports torch or transformers at
the top: `nstf --help` must answer at once, and importing torch alone takes seconds. This file imports nothing that Python
has not loaded to start: Ctrl-C while the rest is imported is one line, too.
"""

from __future__ import annotations

import sys

# Whether this process is a command's alone, which may then change what the rest of it finds.
OWN_PROCESS = False

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import typer

EPILOG = (
    "Every command takes --quiet (no progress), --verbose (a line for every stage) and --debug (full traceback); all but "
    "chat and serve take --json (results as JSON)."
)
SUMMARIES = {
    "convert": "Convert a model under a byte budget.",
    "calibrate": "Measure a model on text, once for many budgets.",
    "plan": "Show what convert would do.",
    "inspect": "Show what an artifact holds.",
    "verify": "Check every byte of an artifact.",
    "eval": "Measure the accuracy and apply gates.",
    "diff": "Compare two artifacts, or one with its original.",
    "generate": "Generate text with an artifact.",
    "chat": "Chat with an artifact in the terminal.",
    "serve": "Serve an artifact by OpenAI's API.",
    "bench": "Measure tokens per second on this CPU or GPU.",
    "compile": "Compile GPU kernels ahead of time.",
    "profile": "Show where the time of a model goes.",
    "place": "Find the best division of a model over several devices.",
    "export": "Write the model for other engines: transformers, vLLM, llama.cpp, ONNX.",
}


def application(names: Iterable[str] = SUMMARIES) -> typer.Typer:
    """The command with these sub-commands: only the one that is about to run has to be imported."""
    from nstf_convert.cli import commands

    return commands.application(names)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits with its code (docs/guide.md has the table)."""
    global OWN_PROCESS
    OWN_PROCESS = arguments is None
    try:
        from nstf_convert.cli import running

        if arguments is None:
            running.open_streams()
        code = running.run(sys.argv[1:] if arguments is None else arguments)
        if arguments is None:
            running.leave(code)
    except KeyboardInterrupt:  # before `run` looks for it, or while it says that there was one
        sys.stderr.write("error: interrupted\n")
        code = 130
    except (OSError, MemoryError) as error:  # too few open files, too little memory for Python's own modules
        sys.stderr.write(f"error: {error}\n")
        code = 1
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code. Errors are one line on stderr, the last on the screen."""
    from nstf_convert.cli import running

    return running.run(arguments)
