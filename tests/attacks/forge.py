"""How attacks on an artifact are written down: a change of its taken-apart form, or of the text of its header."""

from collections.abc import Callable
from typing import Any

# An attack: the good file taken apart -> the bytes of the bad one.
Attack = Callable[[Any], bytes]


def prefix(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little")


def entry(good: Any, name: str = "int:codes") -> Any:
    return good.header[name]


def header_text(change: Callable[[bytes], bytes]) -> Attack:
    """An attack on the text of the header."""

    def attack(good: Any) -> bytes:
        text = change(good.text())
        return prefix(text) + text + good.data

    return attack


def changed(change: Callable[[Any], Any]) -> Attack:
    """An attack on the parsed header or manifest; the header's own digest is made right again."""

    def attack(good: Any) -> bytes:
        change(good)
        return bytes(good.raw())

    return attack


def put(target: Any, key: Any, value: Any) -> None:
    target[key] = value


def tree(good: Any, name: str = "int") -> Any:
    return good.manifest["tensors"][name]["tree"]


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda text: text.replace(old, new, 1)


def shift(good: Any, by: int) -> None:
    good.header["int:codes"]["data_offsets"] = [v + by for v in good.header["int:codes"]["data_offsets"]]


def recut(good: Any, content: bytes, size: int) -> None:
    """Makes `config.json`, the file inside, the last array with this stored content and stated size."""
    place = good.header["nstf.file/config.json"]["data_offsets"]
    length, delta = place[1] - place[0], len(content) - (place[1] - place[0])
    good.data = good.data[: place[0]] + content + good.data[place[1] :]
    for value in good.header.values():
        if value["data_offsets"][0] >= place[1]:
            value["data_offsets"] = [v + delta for v in value["data_offsets"]]
    place[1] = place[0] + len(content)
    good.header["nstf.file/config.json"]["shape"] = [len(content)]
    good.manifest["files"]["config.json"]["size"] = size
    assert length > 0


def deep(levels: int) -> dict[str, Any]:
    node: dict[str, Any] = {"kind": "dense", "dtype": "int8"}
    for _ in range(levels):
        node = {"kind": "permute", "dims": [0, 1], "children": {"x": node}}
    return node
