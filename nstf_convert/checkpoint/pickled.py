"""What the pickle of a .bin checkpoint would make, read from its instructions before torch makes it.

`torch.load(weights_only=True)` runs no code of the file's choice, but it makes what a few hundred bytes ask for: a bytearray
of any size, a tensor of memory that nobody wrote, a tuple whose hash takes for ever. A state dict needs none of these.
"""

import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nstf.errors import CorruptError, UnsupportedError
from nstf_convert.checkpoint.paths import open_regular, pread_all
from nstf_convert.checkpoint.zip_entries import ZipError, read_entries

# What `torch.save(model.state_dict())` names, in any torch since 1.6, and with parameters in place of tensors.
NAMES = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "Size"),
}
# Those that are called; a storage is named in ids alone.
CALLED = NAMES - {("torch.storage", "UntypedStorage")}
# A storage names its type: torch FloatStorage, HalfStorage ...; with untyped ones, torch float32 ...
_STORAGE = "Storage"
# Of a pickle: 2^18 tensors take 30 MB.
MOST_BYTES = 256 << 20
# Objects inside an object, those that are there twice counted twice: hashing a tuple goes through them all.
MOST_NESTED = 1 << 16
# Objects that wait for what takes them together: torch.save hands on a thousand at a time.
MOST_STACKED = 1 << 20
# Objects that may come again; a tensor has some ten.
MOST_KEPT = 1 << 22

_ONES = {
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_LIST",
}  # fmt: skip
# What may have grown by the time that it is used: lists and dictionaries, and tuples with one inside.
_GROWS = object()
# An empty tuple, one of numbers, and one with such a tuple alone: what an OrderedDict and a torch.Size are called with. They
# would copy anything else, a tensor of one byte and 2^60 elements, too.
_EMPTY, _NUMBERS, _OF_NUMBERS = object(), object(), object()
_GIVEN = {("collections", "OrderedDict"): _EMPTY, ("torch", "Size"): _OF_NUMBERS}
_GROWING = {"EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT"}
# The word `storage`, its type, its record, a device and its elements.
_ID_PARTS = 5
_POPS = {"POP": 1, "APPEND": 1, "SETITEM": 2, "BUILD": 1}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}


def check_pickle(path: Path) -> None:
    """Raises UnsupportedError where a torch file's pickle makes anything but a state dict, CorruptError for what is none."""
    for name, data, records in _pickles(path):
        try:
            _check(data, records)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{path} holds Python objects besides dense tensors ({error}), which are never loaded; convert it to "
                "safetensors where you trust it"
            ) from error
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise CorruptError(
                f"{path} cannot be read as PyTorch weights ({name}); download it again"
            ) from error


def _pickles(path: Path) -> list[tuple[str, bytes, dict[str, int]]]:
    """The file's one pickle, by its name, and the bytes of each storage's record. Raises CorruptError for an archive in
    which readers could find different ones."""
    try:
        entries = read_entries(path)
        found = [e for e in entries if e.name.lower().rpartition(b"/")[2] == b"data.pkl"]
    except ZipError as error:
        raise CorruptError(
            f"{path} cannot be read as PyTorch weights ({str(error)[:160]}); download it again"
        ) from error
    if len(found) != 1 or found[0].size > MOST_BYTES:
        raise CorruptError(
            f"{path} cannot be read as PyTorch weights ({len(found)} pickles"
            + (f", of {found[0].size} bytes" if found else "")
            + "); download it again"
        )
    with open_regular(path) as file:
        data = pread_all(file, found[0].start, found[0].size, str(path))
    place = found[0].name[: -len(b"data.pkl")] + b"data/"
    records = {e.name[len(place) :].decode("latin-1"): e.size for e in entries if e.name.startswith(place)}
    return [(found[0].name.decode("utf-8", "backslashreplace"), data, records)]


def _check(data: bytes, records: Mapping[str, int]) -> None:
    """Goes through the instructions with the count of what each object holds in place of the object, and the values of those
    of which the ids of storages are made. records: bytes of each storage's record."""
    stack: list[tuple[int, Any]] = []
    marks: list[int] = []
    memo: dict[Any, tuple[int, Any]] = {}
    words: list[str] = []  # the last two strings: STACK_GLOBAL takes its names from there
    # Objects that calls copy and that keys are hashed by, all together: one that is there once can be used again and again.
    used, most, entries = 0, MOST_NESTED + len(data), 0

    def use(count: int) -> None:
        nonlocal used
        used += count
        if used > most:
            raise UnsupportedError("one object in too many others")

    def pop(count: int) -> tuple[int, list[Any]]:
        if count > len(stack) - (marks[-1] if marks else 0):
            raise ValueError("too little on the stack")
        taken = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return sum(held for held, _ in taken), [value for _, value in taken]

    def push(count: int, value: Any = None) -> None:
        if count > MOST_NESTED:
            raise UnsupportedError("an object of too many parts")
        stack.append((count, value))

    def to_mark() -> tuple[int, list[Any]]:
        return pop(len(stack) - marks[-1])

    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if len(stack) + len(marks) > MOST_STACKED or len(memo) > MOST_KEPT:
            raise UnsupportedError("more objects than a state dict has")
        if "UNICODE" in name:
            words = [*words[-1:], str(argument)]
        if name in _ONES:
            push(1, _GROWS if name in _GROWING else _EMPTY if name == "EMPTY_TUPLE" else argument)
        elif name == "GLOBAL":
            _check_name(*_pair(argument))
            push(1, _pair(argument))
        elif name == "STACK_GLOBAL":
            if len(words) != 2:
                raise ValueError("a global without names")
            _check_name(words[0], words[1])
            pop(2)
            push(1, (words[0], words[1]))
        elif name in _PUTS:
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _GETS:
            push(*memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("TUPLE", "LIST", "DICT"):
            held, values = to_mark()
            marks.pop()
            if name != "TUPLE":
                use(held if name == "DICT" else 0)
                entries += len(values) // 2
                push(1, _GROWS)
            else:
                push(1 + held, _tuple_of(values))
        elif name in ("APPENDS", "SETITEMS", "POP_MARK"):
            held, values = to_mark()
            marks.pop()
            use(held if name == "SETITEMS" else 0)
            entries += len(values) // 2 if name == "SETITEMS" else 0
        elif name in _TUPLES:
            held, values = pop(_TUPLES[name])
            push(1 + held, _tuple_of(values))
        elif name == "REDUCE":
            held, (called, given) = pop(2)
            if not isinstance(called, tuple) or called not in CALLED or given is _GROWS:
                raise UnsupportedError("a call that makes no tensor")
            if called in _GIVEN and given is not _GIVEN[called]:
                raise UnsupportedError("a copy of something")
            use(held)
            push(1)
        elif name == "BINPERSID":
            _check_storage(pop(1)[1][0], records)
            push(1)
        elif name in _POPS:
            held = pop(_POPS[name])[0]
            entries += name == "SETITEM"
            # BUILD copies a dictionary, which may have all entries so far.
            use(held if name == "SETITEM" else entries if name == "BUILD" else 0)
        elif name == "DUP":
            push(*stack[-1])
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise UnsupportedError(f"made by {name}")


def _tuple_of(values: list[Any]) -> Any:
    """What is known of a tuple: its values where it may be the id of a storage."""
    if any(value is _GROWS for value in values):
        return _GROWS
    if all(type(value) is int for value in values):
        return _NUMBERS if values else _EMPTY
    if len(values) == 1 and (values[0] is _NUMBERS or values[0] is _EMPTY):
        return _OF_NUMBERS
    return values if len(values) == _ID_PARTS else None


def _check_storage(parts: Any, records: Mapping[str, int]) -> None:
    """Raises UnsupportedError for an id that names no storage, ValueError for a storage longer than its record: a mapped one
    would reach over the next ones."""
    kind, key, count = (parts[1], parts[2], parts[4]) if isinstance(parts, list) else (None, None, None)
    if not (isinstance(kind, tuple) and isinstance(key, str) and isinstance(count, int)):
        raise UnsupportedError("an id of no storage")
    # torch takes a negative count from the end of the file.
    if not 0 <= count * _item_bytes(kind[1]) <= records[key]:
        raise ValueError("a storage longer than its record")


def _item_bytes(name: str) -> int:
    """Of a class of storages, or a type. Raises UnsupportedError for one that torch has not."""
    import torch

    kind = vars(torch).get(name)  # `getattr` would import a module of that name
    dtype = (
        torch.uint8 if name == "UntypedStorage" else getattr(kind, "_dtype", kind)
    )  # `dtype` warns of its class
    if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
        raise UnsupportedError(f"a storage of {name[:40]}")
    return dtype.itemsize


def _pair(argument: Any) -> tuple[str, str]:
    module, _, name = str(argument).partition(" ")
    return module, name


def _check_name(module: str, name: str) -> None:
    known = (module, name) in NAMES or (module == "torch" and name.isidentifier() and _is_type(name))
    if not known:
        raise UnsupportedError(f"{module[:40]}.{name[:40]}")


def _is_type(name: str) -> bool:
    import torch

    return name.endswith(_STORAGE) or isinstance(vars(torch).get(name), torch.dtype)
