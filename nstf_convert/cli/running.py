"""Runs one command: arguments to a call, what it raises to one line and an exit code."""

from __future__ import annotations

import _thread
import atexit
import gc
import io
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress

from nstf.errors import NstfError, shortened
from nstf_convert.cli import SUMMARIES, application, quick
from nstf_convert.cli.messages import explain, interrupted
from nstf_convert.cli.output import setup_logging

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from typing_extensions import Buffer


# What must not be interrupted while it is imported.
LIBRARIES = frozenset("numpy onnx pyarrow safetensors scipy tokenizers torch transformers triton".split())


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code. Errors are one line on stderr, the last on the screen."""
    words, flags = _common_flags(arguments)
    debug = "debug" in flags
    # Read when transformers is imported, much later: its advice on loading is noise beside our results.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if debug else "error")
    setup_logging("quiet" in flags, "verbose" in flags, debug)
    try:
        named = words[:1] if words and words[0] in SUMMARIES else SUMMARIES
        with _interrupts() as pressed, _visible_names():
            try:
                code = None if flags else quick.generate(words)
                if pressed.is_set():  # taken by a library, and the full command would begin
                    raise KeyboardInterrupt
                if code is None:
                    from nstf.runtime.memory_limit import watch_limit

                    watch_limit()
                    code = application(named)(words, prog_name="nstf", standalone_mode=False)
                code = _flushed(code)
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
        code, message = explain(error, words)
        # What a user typed may be longer than what a file can make a message say.
        sys.stderr.write(f"error: {shortened(message)}\n")
        return code
    if code == 130:  # typer turns Ctrl-C into this code
        sys.stderr.write(f"error: {interrupted(words)}\n")
    return code if isinstance(code, int) else 0


def _flushed(code: int) -> int:
    """The exit code, with what was printed on its way: a disk that is full is said while it can be."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on: no error, as in typer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


@contextmanager
def _visible_names() -> Iterator[None]:
    """Names of files that are no text are printed with their bytes made visible, in a caller's own stream too."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream.errors != "strict":
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        if not stream.closed:
            stream.reconfigure(errors="strict")


def _imports(frame: FrameType | None) -> bool:
    """Whether the command is loading one of LIBRARIES where a frame is."""
    while frame is not None and frame.f_code is not run.__code__:
        code = frame.f_code
        if code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen importlib"):
            if str(frame.f_locals.get("name")).partition(".")[0] in LIBRARIES:
                return True
        frame = frame.f_back
    return False


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Set once Ctrl-C was pressed. A library may catch the KeyboardInterrupt and raise something else: torch takes one that
    comes while it makes a tensor of a storage for a wrong type. One that comes in a finaliser, out of which nothing is
    raised, is pressed again: Python would print it and go on. So is one that comes in an import: extensions end the process
    there (torch's), or take it for a module that is missing (transformers' lazy ones)."""
    pressed = threading.Event()
    said = sys.unraisablehook

    waiting: list[threading.Timer] = []

    def again() -> None:
        # Not here: nothing is raised out of this, either.
        later = threading.Timer(0.01, _thread.interrupt_main)
        later.daemon = True
        waiting[:] = [later]
        later.start()

    def unraised(found: sys.UnraisableHookArgs) -> None:
        if issubclass(found.exc_type, KeyboardInterrupt):
            again()
        else:
            said(found)

    def handle(number: int, frame: FrameType | None) -> None:
        pressed.set()
        if _imports(frame):
            again()
        else:
            signal.default_int_handler(number, frame)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    signal.signal(signal.SIGINT, handle)
    sys.unraisablehook = unraised
    try:
        yield pressed
    finally:
        for timer in waiting:
            timer.cancel()
        sys.unraisablehook = said
        signal.signal(signal.SIGINT, signal.default_int_handler)


FLAGS = {"--debug": "debug", "--quiet": "quiet", "-q": "quiet", "--verbose": "verbose", "-v": "verbose"}


def _common_flags(arguments: Sequence[str]) -> tuple[list[str], set[str]]:
    """(arguments without them, the flags among debug, quiet, verbose): accepted anywhere before a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head = list(arguments[:end])
    found = {FLAGS[a] for a in head if a in FLAGS}
    return [a for a in head if a not in FLAGS] + list(arguments[end:]), found


def open_streams() -> None:
    """Makes the process's streams ones that no message fails on: what is closed leads nowhere (else the next file that is
    opened would get its number, and what a library prints), and messages that a full disk does not take are left out."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            else:
                os.set_inheritable(number, True)  # a child's next file would get its number
            stream = os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
    # What is no text there is refused by who reads it, in every locale.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    # Names of files that are no text, and letters that the terminal's encoding has not: made visible, as in messages.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_Messages(2, "w", closefd=False)),
        encoding=sys.stderr.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _Messages(io.FileIO):
    """stderr: hours of work do not end because the disk of their log is full, and an exit code stays what it is."""

    def write(self, data: Buffer) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def leave(code: int) -> None:
    """After the last word. Ctrl-C just ends the process from here on: Python has no place for it while it ends. What is
    left goes with it: looking for garbage among torch's and transformers' objects takes 0.7 s. Who started it with Ctrl-C
    ignored, as a shell does in its background, has it ignored to the end.

    An interrupted process ends here: after a Ctrl-C in text that a library ran as code (a dataclass's methods, say),
    `python -m` would end by the signal, though it was caught.
    """
    ours = threading.current_thread() is threading.main_thread()
    if ours and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()
    if code == 130:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
