"""One case per way to attack a reader of weight files, each refused with its exact message."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from forge import put as replace
from forge import tree
from header_attacks import HEADER_ATTACKS
from manifest_attacks import FILE_ATTACKS, MANIFEST_ATTACKS

from nstf.errors import CorruptError, NstfError, UnsupportedError
from nstf.runtime.artifact import open_artifact, verify

HINT = "; the file is damaged or incomplete, fetch or convert it again"
OTHER_FILE = "; a model's own file becomes one by nstf convert"
FORMATS = (
    "this version reads add, cp, dense, fp8, grid, int, low_rank, mxfp4, permute, rotated, shuffle, tensor_train, "
    "trellis, tucker"
)


def expected(message: str, good: Any, size: int) -> str:
    """The message with the sizes of this file filled in."""
    at = 8 + len(good.text()) + json.loads(good.text())["int:codes"]["data_offsets"][0]
    for word, value in {
        "{size}": size, "{size+1}": size + 1, "{size-1}": size - 1, "{arrays}": len(good.header),
        "{end}": len(good.text().rstrip()),
        "{at}": at, "{at+1}": at + 1, "{at-1}": at - 1,
    }.items():  # fmt: skip
        message = message.replace(word, str(value))
    return message


@pytest.mark.parametrize("name", [*HEADER_ATTACKS, *MANIFEST_ATTACKS])
def test_attack_is_refused_at_open_with_its_message(
    name: str, good: Any, good_file: bytes, put: Callable[[bytes], Path]
) -> None:
    attack, message = {**HEADER_ATTACKS, **MANIFEST_ATTACKS}[name]
    wanted = expected(message, good, len(good_file))
    path = put(attack(good))
    with pytest.raises(CorruptError) as caught:
        open_artifact(path)
    hint = OTHER_FILE if wanted.startswith("not an .nstf artifact") else HINT
    assert str(caught.value) == f"{path}: {wanted}{hint}"
    with pytest.raises(CorruptError):
        verify(path)


@pytest.mark.parametrize("name", FILE_ATTACKS)
def test_attack_by_a_file_inside_is_refused_when_it_is_read(
    name: str, good: Any, put: Callable[[bytes], Path]
) -> None:
    attack, message = FILE_ATTACKS[name]
    path = put(attack(good))
    with open_artifact(path) as artifact, pytest.raises(CorruptError) as caught:
        artifact.file("config.json")
    assert str(caught.value) == f"{path}: {message}{HINT}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda g: g.manifest.update(version=2, new_section={}),
            "format version 2; this nstf reads version 1, update nstf",
        ),
        (
            lambda g: g.manifest.update(version=10**400),
            "format version an integer of 1329 bits; this nstf reads version 1, update nstf",
        ),
        (
            lambda g: replace(tree(g), "kind", "lattice"),
            f"tensor 'int': unknown encoding 'lattice'; {FORMATS}; update nstf",
        ),
        (
            lambda g: replace(tree(g), "kind", "os.system"),
            f"tensor 'int': unknown encoding 'os.system'; {FORMATS}; update nstf",
        ),
        (
            lambda g: replace(tree(g), "kind", None),
            f"tensor 'int': unknown encoding 'None'; {FORMATS}; update nstf",
        ),
    ],
)
def test_what_a_newer_version_wrote_is_unsupported_and_named(
    change: Callable[[Any], None], message: str, good: Any, put: Callable[[bytes], Path]
) -> None:
    change(good)
    path = put(good.raw())
    with pytest.raises(UnsupportedError) as caught:
        open_artifact(path)
    assert str(caught.value) == f"{path}: {message}"


def test_the_good_file_itself_opens_forged_or_not(
    good: Any, good_file: bytes, put: Callable[[bytes], Path]
) -> None:
    assert good.raw() == good_file
    verify(put(good_file))


def test_message_of_an_attack_is_one_line(good: Any, put: Callable[[bytes], Path]) -> None:
    put_in = {"a\nb\x1b[31m": good.header.pop("int:codes")}
    good.header |= put_in
    with pytest.raises(NstfError) as caught:
        open_artifact(put(good.raw()))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["x" * 100_000, "\U000e0001" * 100_000, "a\n" * 50_000])
def test_message_is_no_longer_than_a_screen_whatever_it_quotes(name: str) -> None:
    message = f"m.nstf: the entry for {name} does not fit: convert it again"
    for kind in (NstfError, CorruptError):
        said = str(kind(message))
        assert said.isprintable() and len(said) <= 4000
        assert said.startswith("m.nstf: the entry for ") and said.endswith("does not fit: convert it again")
    assert str(CorruptError("of " + "y" * 3000)) == "of " + "y" * 3000
