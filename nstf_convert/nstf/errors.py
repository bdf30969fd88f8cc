"""What a user can do wrong, one class per exit code.

A message has three parts: what is wrong with the actual value, where (file, tensor, option), what to do.
Low-level functions raise `ValueError` with shapes and values; the layer that knows the file or the tensor
re-raises one of these with `from error`. The command line prints the message in one line and exits with
`exit_code`; the traceback is shown with `--debug` only.
"""

import errno

# Characters of a message; of a longer one the middle goes.
MOST_CHARACTERS = 4000


class NstfError(Exception):
    """Failed at run time (exit code 1): disk full, out of memory, a model that cannot be run.

    The message is one printable line of at most MOST_CHARACTERS, whatever a stranger's file made it quote.
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(_printable(str(message))))


def shortened(text: str) -> str:
    """`text` of at most MOST_CHARACTERS. What is wrong is said first, what to do last: the middle goes."""
    end = MOST_CHARACTERS // 4
    return text if len(text) <= MOST_CHARACTERS else f"{text[: 2 * end]} ... {text[-end:]}"


def _printable(text: str) -> str:
    """`text` without line ends, and with control characters (terminal escapes in a file's names) made visible."""
    if text.isprintable():
        return text
    joined = " ".join(text.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ended, in whichever class a library says so: torch raises a RuntimeError, mappings an OSError."""
    # The last is what oneDNN says, of a product that it finds no room for among other things.
    said = ("allocate memory", "could not create a primitive")
    found = isinstance(error, MemoryError) or any(words in str(error) for words in said)
    return found or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def no_row(error: BaseException) -> bool:
    """Whether it is what torch says on the CPU of a token beyond an embedding."""
    return isinstance(error, IndexError) and str(error) == "index out of range in self"


# A path at which nothing can lie: too long a name, a file for a folder, links in a circle.
_NO_PLACE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP)


def no_place(error: OSError) -> bool:
    """Whether it says that nothing can lie at a path: the mistake of whoever named it, not a failure of the disk."""
    return error.errno in _NO_PLACE


class UsageError(NstfError):
    """Wrong usage (exit code 2): a malformed option, a dataset that is empty, a work directory of another job."""

    exit_code = 2


class BudgetError(NstfError):
    """The budget cannot be met (exit code 3); `smallest_bytes` is the smallest file that can be written."""

    exit_code = 3

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class GateFailed(NstfError):
    """An accuracy gate failed (exit code 4)."""

    exit_code = 4


class CorruptError(NstfError):
    """An artifact or a checkpoint is corrupt (exit code 5)."""

    exit_code = 5


class UnsupportedError(NstfError):
    """A model or file of a kind that is not supported (exit code 6)."""

    exit_code = 6
