"""Measured seconds, kept in the user's cache folder: one file for a processor, instruction set, number of threads and build
of the kernels.

    ~/.cache/nstf/speed-0123456789ab.json    {"version", "identity": {...}, "seconds": {"<pool> <batch> <leaf>": s}}

and likewise by "<pool> token <model>". A file that is damaged, or that another machine left, counts as none: what it would
have said is measured again. So the same machine gives a second conversion the same prices, and with them the same file.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nstf.errors import NstfError
from nstf.kernels.cpu import ext
from nstf.runtime.artifact.atomic_file import write_whole

log = logging.getLogger("nstf")

VERSION = 6
# Characters of a file that is worth reading; the largest seen have a tenth of them.
_LONGEST = 1 << 24
# Seconds that a measurement of nothing counts as.
SHORTEST = 1e-9


def folder() -> Path | None:
    """The user's cache folder for nstf, or None where there is no home."""
    stated = os.environ.get("XDG_CACHE_HOME", "")
    if stated and Path(stated).is_absolute():
        return Path(stated) / "nstf"
    try:
        return Path.home() / ".cache" / "nstf"
    except RuntimeError:
        return None


def identity(isa: str, threads: int) -> dict[str, Any]:
    """What measured seconds hold for."""
    return {"processor": _processor(), "isa": isa, "threads": threads, "kernels": _kernels()}


def digest(of: Mapping[str, Any]) -> str:
    """The SHA-256 of what an identity says, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()


class SpeedCache:
    """The file of one identity. `seconds`: by key, as read and as added to."""

    def __init__(self, of: Mapping[str, Any], where: Path | None) -> None:
        """where: the folder; None keeps nothing."""
        self._identity = dict(of)
        self.path = None if where is None else where / f"speed-{digest(of)[:12]}.json"
        self.seconds = self._read()

    def add(self, found: Mapping[str, float]) -> None:
        """Keeps further measurements, beside what other processes have kept meanwhile. What these have measured of the same
        is taken: the next conversion reads it, and plans alike."""
        # Three digits: what is read back is what this conversion planned with. A coarse clock may say none at all.
        new = {key: max(float(f"{value:.3g}"), SHORTEST) for key, value in found.items()}
        kept = self._read()
        self.seconds |= {key: kept.get(key, value) for key, value in new.items()}
        if self.path is None:
            return
        content = {
            "version": VERSION,
            "identity": self._identity,
            "seconds": {**kept, **self.seconds},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Removes what a kill of an earlier one has left.
            write_whole(self.path, json.dumps(content, sort_keys=True, indent=0).encode())
        except (OSError, NstfError) as error:
            log.debug("%s: measured speeds are not kept: %s", self.path, error)

    def _read(self) -> dict[str, float]:
        """The file's measurements; none where it is not there, damaged, or of another identity."""
        if self.path is None:
            return {}
        try:
            if self.path.stat().st_size > _LONGEST:
                raise ValueError("it is too long")
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["version"] != VERSION or found["identity"] != self._identity:
                raise ValueError("it is of another machine or build")
            return {str(k): _seconds(v) for k, v in found["seconds"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s is not used (%s): speeds are measured again", self.path, str(error)[:80])
            return {}


def _seconds(value: Any) -> float:
    if not isinstance(value, float) or not 0.0 < value < 1e6:
        raise ValueError(f"{str(value)[:20]} are no seconds")
    return value


def _processor() -> str:
    """The processor's name with family, model and stepping where the system tells them: names alone are shared by
    generations."""
    try:
        lines = (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        )
    except OSError:
        lines = []
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    names = ("model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part")
    known = [facts[name] for name in names if name in facts]
    return " ".join(known) or platform.processor() or platform.machine()


@cache
def _kernels() -> str:
    """A digest of the compiled kernels: other code takes other times."""
    from nstf.kernels.cpu import engine_matrix

    parts = [getattr(ext, "__file__", None), engine_matrix.__file__]
    found = hashlib.sha256()
    for name in parts:
        if name is not None:
            found.update(Path(name).read_bytes())
    return found.hexdigest()[:16]
