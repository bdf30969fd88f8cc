"""The `nstf` command: arguments to dataclasses, errors to exit codes.

One file per sub-command, imported when it is the one that runs. Nothing here or there imports torch or transformers at
the top: `nstf --help` must answer at once, and importing torch alone takes seconds. Nor does this file import typer, which
takes longer than the first token of a small model (quick.py).
"""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
from contextlib import contextmanager

from nstf.errors import NstfError, UnsupportedError, UsageError, no_place
from nstf_convert.cli import quick
from nstf_convert.cli.output import clean, setup_logging

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Sequence
    from types import FrameType

    import typer

EPILOG = (
    "Every command takes --quiet (no progress), --verbose (a line for every stage) and --debug (full traceback); all but "
    "chat and serve take --json (results as JSON)."
)
RESUMABLE = ("calibrate", "plan", "convert")
# Commands whose tokens are a tokenizer's.
OF_TEXT = ("generate", "chat", "eval", "calibrate", "convert")
# What takes less memory in the other commands.
_LESS_MEMORY = {
    "eval": "a shorter --seq-len",
    "diff": "a shorter --seq-len",
    "generate": "fewer --max-new-tokens",
    "chat": "fewer --max-new-tokens",
    "serve": "fewer --parallel or a shorter --context",
    "bench": "fewer --prompt tokens",
    "profile": "fewer --tokens or a smaller --batch",
}
# What torch and Python say where memory ends, in errors of other classes.
_NO_MEMORY = r"can(no|')t allocate memory|can't start new thread|std::bad_alloc|failed to map segment"

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


# What torch says on the CPU of a token beyond an embedding.
_NO_ROW = "index out of range in self"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits with its code (docs/guide.md has the table)."""
    code = run(sys.argv[1:] if arguments is None else arguments)
    # What is left goes with the process: looking for garbage among torch's and transformers' objects takes 0.7 s.
    if arguments is None:
        gc.freeze()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code. Errors are one line on stderr, the last on the screen."""
    words, flags = _common_flags(arguments)
    debug = "debug" in flags
    # Read when transformers is imported, much later: its advice on loading is noise beside our results.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if debug else "error")
    setup_logging("quiet" in flags, "verbose" in flags, debug)
    try:
        named = words[:1] if words and words[0] in SUMMARIES else SUMMARIES
        if not flags and (written := quick.generate(words)) is not None:
            return written
        from nstf.runtime.memory_limit import watch_limit

        watch_limit()
        with _interrupts() as pressed:
            try:
                code = application(named)(words, prog_name="nstf", standalone_mode=False)
            except Exception as error:
                # An error of ours after that is one that was found, such as a budget that cannot be met.
                if pressed.is_set() and not isinstance(error, NstfError):
                    raise KeyboardInterrupt from error
                raise
    except SystemExit as error:  # also after a shell asked what may come next
        return error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        if debug:
            import traceback

            traceback.print_exc()
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stdout.write(error.format_message() + "\n")  # type: ignore[attr-defined]
            return 2
        code, message = _explain(error, words)
        sys.stderr.write(f"error: {message}\n")
        return code
    if code == 130:  # typer turns Ctrl-C into this code
        sys.stderr.write(f"error: {_interrupted(words)}\n")
    return code if isinstance(code, int) else 0


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Set once Ctrl-C was pressed. A library may catch the KeyboardInterrupt and raise something else: torch takes one that
    comes while it makes a tensor of a storage for a wrong type."""
    import signal
    import threading

    pressed = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.default_int_handler(number, frame)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


FLAGS = {"--debug": "debug", "--quiet": "quiet", "-q": "quiet", "--verbose": "verbose", "-v": "verbose"}


def _common_flags(arguments: Sequence[str]) -> tuple[list[str], set[str]]:
    """(arguments without them, the flags among debug, quiet, verbose): accepted anywhere before a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head = list(arguments[:end])
    found = {FLAGS[a] for a in head if a in FLAGS}
    return [a for a in head if a not in FLAGS] + list(arguments[end:]), found


def _explain(error: BaseException, words: Sequence[str]) -> tuple[int, str]:
    """(exit code, one line) for an exception."""
    scarce = _scarce(error)
    if isinstance(error, NstfError) and (scarce is None or not isinstance(error, UnsupportedError)):
        from nstf_convert.cli.schema import with_flags

        return error.exit_code, with_flags(clean(error))
    if type(error).__name__ == "OutOfMemoryError":
        return 1, f"the GPU has too little memory: {_gpu_memory_hint(words)}"
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":  # typer's
        return 130, _interrupted(words)
    if hasattr(error, "format_message") and isinstance(getattr(error, "exit_code", None), int):
        return getattr(error, "exit_code", 2), _usage(error, words)
    if scarce is not None and not isinstance(error, KeyboardInterrupt):
        reason = clean(scarce) or "an allocation failed"
        return 1, f"out of memory: {reason}; {_memory_hint(reason, words)}"
    if isinstance(error, OSError):
        return (UsageError.exit_code if no_place(error) else 1), _os_error(error)
    if isinstance(error, IndexError) and str(error) == _NO_ROW and any(w in OF_TEXT for w in words[:1]):
        return UnsupportedError.exit_code, (
            f"{clean(error)}: perhaps the tokenizer makes tokens beyond the model's vocabulary; fetch both again"
        )
    if type(error).__name__ == "PanicException":  # of tokenizers, safetensors: Rust's, and no Exception
        return UnsupportedError.exit_code, f"a library gives up on a file of the model: {clean(error)}"
    return 1, f"{type(error).__name__}: {clean(error)}; run again with --debug for the traceback"


def _scarce(error: BaseException) -> BaseException | None:
    """What says that memory ended, the error or one behind it: a library that found none looks like a model or a package
    that does not exist to those that wanted it."""
    from nstf.runtime.memory_limit import causes

    def says_so(found: BaseException) -> bool:
        return isinstance(found, MemoryError) or re.search(_NO_MEMORY, str(found), re.IGNORECASE) is not None

    return next(filter(says_so, causes(error)), None)


def _memory_hint(reason: str, words: Sequence[str]) -> str:
    if "can't start new thread" in reason:
        return "raise the limit on threads or memory"
    if any(w in RESUMABLE for w in words[:1]):
        # With a calibration at hand the text has been read.
        read = any(w.split("=")[0] == "--calibration" for w in words)
        return (
            "a smaller --memory plans for less"
            if read
            else "fewer --samples or a shorter --seq-len need less"
        )
    less = _LESS_MEMORY.get(next(iter(words), ""))
    return f"free some, raise its limit, or give {less}" if less else "free some, or raise its limit"


def _gpu_memory_hint(words: Sequence[str]) -> str:
    if any(w in RESUMABLE for w in words[:1]):
        return "raise --gpu-memory, give fewer --samples or a shorter --seq-len, or use --device cpu"
    less = _LESS_MEMORY.get(next(iter(words), ""))
    return f"free some, {f'give {less}, ' if less else ''}or use --device cpu"


def _usage(error: BaseException, words: Sequence[str]) -> str:
    message = clean(error.format_message())  # type: ignore[attr-defined]
    command = next((w for w in words if w in SUMMARIES), None)
    message = f"{message[:1].lower()}{message[1:]}".replace(". Did you mean", ": did you mean").rstrip(".?")
    return f"{message}; see nstf {command + ' ' if command else ''}--help"


def _os_error(error: OSError) -> str:
    where = f": {clean(error.filename)}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk{where}; free some space and run the same command again"
    if no_place(error):
        return f"nothing can lie at that path ({clean(error.strerror)}){where}; check it"
    return f"{clean(error.strerror or error)}{where}"


def _interrupted(words: Sequence[str]) -> str:
    if any(w in RESUMABLE for w in words[:1]):
        return "interrupted; run the same command again and it goes on where it stopped"
    return "interrupted"
