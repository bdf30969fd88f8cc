"""Real limits on what can be written: file systems of ten sizes, and files of a largest size for every export.

The shim of test_io_faults.py sees the calls of the C library; these limits hold for every call there is.
"""

import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from commands import outcome, warm, wrong
from recorded import files_of, make_inputs

KIB = 1 << 10
CONVERT = [
    "convert", "model", "--budget", "0.5", "-o", "disk/out.nstf", "--work-dir", "disk/work", "--force", "--prefer", "size",
    "--dataset", "text.txt", "--samples", "2", "--seq-len", "16", "--threads", "1", "--quiet", "--no-attention-plan",
    "--formats", "int_grid", "--no-search", "--no-prefix",
]  # fmt: skip
EXPORTS = {
    "hf": ("model.nstf", []),
    "transformers": ("model.nstf", []),
    "compressed-tensors": ("model.nstf", ["--dtype", "float32"]),
    "gguf": ("plain.nstf", ["--allow-loss"]),
    "onnx": ("model.nstf", []),
}
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
RECURSIVE, PRIVATE, BIND = 1 << 14, 1 << 18, 1 << 12


def disk_of(size: int) -> None:
    """In a process of its own: a file system of `size` bytes in the folder `disk`. Raises OSError where none is allowed."""
    mounted("tmpfs", "disk", "tmpfs", 0, f"size={size}")


def mounted(source: str, target: str, kind: str = "", flags: int = BIND, data: str = "") -> None:
    """In a process of its own: a mount, of a folder that is there by default. Raises PermissionError where none is
    allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = NEW_MOUNTS if os.geteuid() == 0 else NEW_MOUNTS | NEW_USER
    # Private first: as root the new mounts would spread to the machine's own where / is shared.
    if (
        libc.unshare(own)
        or libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None)
        or libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
    ):
        raise PermissionError(ctypes.get_errno(), "no file system of our own")


def file_size(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The inputs, with a converted model; the current folder."""
    made, before = tmp_path_factory.mktemp("disks"), Path.cwd()
    make_inputs(made)
    os.chdir(made)
    try:
        (made / "disk").mkdir()
        warm(CONVERT)
        (made / "disk" / "out.nstf").rename(made / "model.nstf")
        yield made
    finally:
        os.chdir(before)


def both(small: int, wanted: bytes) -> None:
    """In a child: a conversion on a disk of `small` bytes, then again on a large one. Raises what is wrong."""
    disk_of(small)
    found = outcome(CONVERT)
    assert wrong({"": found}) == {}, found
    # Of what is there under its name nothing is half.
    assert found == "done" or ("disk/" in found and not Path("disk/out.nstf").exists()), found
    flags = 32  # MS_REMOUNT
    assert ctypes.CDLL(None).mount(b"tmpfs", b"disk", b"tmpfs", flags, b"size=64m") == 0
    assert outcome(CONVERT) == "done" and Path("disk/out.nstf").read_bytes() == wanted
    left = [name for name in files_of(Path("disk")) if Path(name).name.startswith(".")]
    assert left == []
    sys.stderr.write(f"{small} {found}\n")


def in_child(step: partial[None]) -> int:
    """The exit code of a step in a child: 0, 77 where the system does not allow it, else 1."""
    child = os.fork()
    if child == 0:
        try:
            step()
            os._exit(0)
        except PermissionError:
            os._exit(77)
        except BaseException as error:
            sys.stderr.write(f"{step.args[0]}: {error!r}\n")
            sys.stderr.flush()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.fuzz
def test_a_conversion_on_a_small_disk_says_so_and_goes_on_where_there_is_room(folder: Path) -> None:
    wanted = (folder / "model.nstf").read_bytes()
    sizes = [KIB * n for n in (4, 16, 64, 128, 192, 256, 384, 512, 1024, 4096)]
    codes = {size: in_child(partial(both, size, wanted)) for size in sizes}
    if set(codes.values()) == {77}:
        pytest.skip("no file system of our own is allowed here")
    assert set(codes.values()) == {0}, codes


@pytest.mark.fuzz
@pytest.mark.parametrize("target", EXPORTS)
def test_an_export_whose_files_grow_too_large_leaves_nothing_and_says_so(folder: Path, target: str) -> None:
    source, more = EXPORTS[target]
    words = ["export", source, "--to", target, *more, "--quiet", "--overwrite", "-o"]
    # A name of the same length: some files hold it.
    warm([*words, "whole"])
    whole = files_of(folder / "whole")
    shutil.rmtree(folder / "whole")
    before, largest = {p.name for p in folder.iterdir()}, max(len(content) for content in whole.values())
    for size in (1, 100, 1000, largest // 2, largest - 1):
        found = outcome([*words, "small"], partial(file_size, size))
        assert found.startswith("error: ") and "small" in found, (size, found)
        assert {p.name for p in folder.iterdir()} == before, size
    assert outcome([*words, "small"], partial(file_size, largest)) == "done"
    assert len(files_of(folder / "small")) == len(whole)
    shutil.rmtree(folder / "small")
