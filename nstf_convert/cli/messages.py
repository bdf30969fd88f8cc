"""What a command says of an exception: one line, and the exit code."""

from __future__ import annotations

import errno
import re

from nstf.errors import NstfError, UnsupportedError, UsageError, no_place, no_row
from nstf_convert.cli import SUMMARIES
from nstf_convert.cli.output import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

RESUMABLE = ("calibrate", "plan", "convert")
# Commands whose tokens are a tokenizer's.
OF_TEXT = ("generate", "chat", "serve", "eval", "diff", "calibrate", "plan", "convert")
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


def explain(error: BaseException, words: Sequence[str]) -> tuple[int, str]:
    """(exit code, one line) for an exception."""
    scarce = _scarce(error)
    if isinstance(error, NstfError) and (scarce is None or not isinstance(error, UnsupportedError)):
        from nstf_convert.cli.schema import with_flags

        return error.exit_code, with_flags(clean(error))
    if type(error).__name__ == "OutOfMemoryError":
        return 1, f"the GPU has too little memory: {_gpu_memory_hint(words)}"
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":  # typer's
        return 130, interrupted(words)
    if hasattr(error, "format_message") and isinstance(getattr(error, "exit_code", None), int):
        return getattr(error, "exit_code", 2), _usage(error, words)
    if scarce is not None and not isinstance(error, KeyboardInterrupt):
        reason = clean(scarce) or "an allocation failed"
        return 1, f"out of memory: {reason}; {_memory_hint(reason, words)}"
    if isinstance(error, FileNotFoundError) and error.filename is None and _folder_is_gone():
        return UsageError.exit_code, "the current folder was removed: change to one that is there"
    if isinstance(error, OSError):
        return (UsageError.exit_code if no_place(error) else 1), _os_error(error)
    if no_row(error) and any(w in OF_TEXT for w in words[:1]):
        return UnsupportedError.exit_code, (
            f"{clean(error)}: perhaps the tokenizer makes tokens beyond the model's vocabulary; fetch both again"
        )
    if isinstance(error, RuntimeError) and str(error).startswith(
        "Symlink loop"
    ):  # pathlib's, before Python 3.13
        return 2, f"{clean(error)}: give a path that leads somewhere"
    if type(error).__name__ == "PanicException":  # of tokenizers, safetensors: Rust's, and no Exception
        return UnsupportedError.exit_code, f"a library gives up on a file of the model: {clean(error)}"
    return 1, f"{type(error).__name__}: {clean(error)}; run again with --debug for the traceback"


def _folder_is_gone() -> bool:
    """Whether the current folder was removed: relative paths lead nowhere then."""
    from pathlib import Path

    try:
        Path.cwd()
    except OSError:
        return True
    return False


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


def interrupted(words: Sequence[str]) -> str:
    if any(w in RESUMABLE for w in words[:1]):
        return "interrupted; run the same command again and it goes on where it stopped"
    return "interrupted"
