"""Calls into the tokenizer of a stranger's file: what its libraries raise becomes an error of ours.

`tokenizers` raises plain Exceptions (a word without an unknown token to stand for it), and panics of Rust, which are no
Exceptions at all (`pyo3_runtime.PanicException`), for a tokenizer.json that it has read without complaint; templates raise
whatever their expressions do (a division by zero).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from nstf.errors import NstfError, UnsupportedError, UsageError, out_of_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of a library written in Rust."""
    return type(error).__name__ == "PanicException"


@contextmanager
def foreign_errors(what: str) -> Iterator[None]:
    """Raises UnsupportedError, which begins with `what`, for any exception of the libraries inside, NstfError where memory
    ends; ours, and those that end the process, pass."""
    try:
        yield
    except NstfError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if out_of_memory(error):
            raise NstfError(f"{what}: not enough memory; free some, or raise its limit") from error
        from nstf.runtime.artifact.atomic_file import raise_disk_fault

        raise_disk_fault(error, f"go on ({what})")
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnsupportedError(f"{what}: {reason}") from error


def check_length(text: str, context: int, vocab: Callable[[], Iterable[str]]) -> None:
    """Raises UsageError for a text that must have more tokens than a context: transformers would run it nonetheless, in time
    and memory by the square of its length. vocab: gives the tokenizer's words, and is asked for a long text alone."""
    if len(text) <= context:
        return
    most = context * max(map(len, vocab()), default=1)
    if len(text) > most:
        raise UsageError(
            f"the prompt has {len(text)} characters, and the model's {context} tokens stand for {most} at most: shorten it"
        )


def encode(tokenizer: Any, text: Any, **options: Any) -> Any:
    """What a tokenizer of transformers makes of a text, or of texts. Raises UnsupportedError, NstfError."""
    with foreign_errors("the model's tokenizer cannot encode this text"):
        return tokenizer(text, **options)


def apply_template(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """A conversation as text, up to where the answer begins. Raises UnsupportedError, NstfError."""
    with foreign_errors("the model's chat template refuses these messages"):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


class Decoder:
    """A tokenizer of transformers that only decodes, for its streamer; raises UnsupportedError, NstfError."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, tokens: Any, **options: Any) -> str:
        """The text of tokens."""
        with foreign_errors("the model's tokenizer cannot decode its tokens"):
            return str(self._tokenizer.decode(tokens, **options))
