"""Other tools' compressed files of the same model, made from the same calibration text.

One file per peer, with three names: FAMILY (what the plot calls it), TYPES (what it can write, best first) and
`make(type, work) -> Made`. A peer that cannot be had on this machine raises Unavailable, with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("llama_cpp", "hqq", "gptq", "autoround", "exl3")


class Unavailable(Exception):
    """Why a peer, or one of its types, cannot be had."""


@dataclass(frozen=True)
class Work:
    """What every peer starts from.

    model: the original; text: the calibration text; calibration: the file `nstf calibrate` made of both; cache: a
    folder for downloads, builds and the peers' files; threads: for the peers' own programs.
    """

    model: Path
    text: Path
    calibration: Path
    cache: Path
    windows: int
    threads: int
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """A peer's file. size_bytes: all of it, with tables, scales, config and tokenizer.

    expand: writes its weights in float32 into a folder and gives back what `open_checkpoint` can open.
    """

    name: str
    size_bytes: int
    expand: Callable[[Path], Path]


def peer(name: str) -> Any:
    """The module of a peer. Raises Unavailable for a name that is not listed."""
    import importlib

    if name not in NAMES:
        raise Unavailable(f"no such peer; known are {', '.join(NAMES)}")
    return importlib.import_module(f"peers.{name}")
