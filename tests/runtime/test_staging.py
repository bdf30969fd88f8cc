"""Arrays read from the file beside its mapping (runtime/staging.py): on a CPU without pinned memory, on a GPU with it."""

import os
from pathlib import Path

import pytest
import torch

from nstf.errors import NstfError
from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.formats.tree import format_of
from nstf.runtime import staging
from nstf.runtime.artifact import Artifact, open_artifact, write_artifact
from nstf.runtime.staging import Staging

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a matrix of 120,000 bytes and one of 200, of which pieces of 4096 bytes are read."""
    monkeypatch.setattr(staging, "PIECE", 4096)
    monkeypatch.setattr(staging, "SLOTS", 3)
    monkeypatch.setattr(staging, "SMALLEST", 1000)
    tree = Node("dense", format_of("dense").Params(dtype="float16"))
    made = {
        name: EncodedTensor(tree, shape, {"values": torch.randn(shape).half()})
        for name, shape in (("large", (100, 600)), ("small", (10, 10)))
    }
    found = tmp_path / "m.nstf"
    write_artifact(found, made, {})
    return found


def values(artifact: Artifact, name: str = "large") -> torch.Tensor:
    return artifact.encoded(name).arrays["values"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_whole_arrays_and_parts_are_read_as_they_are_stored(path: Path, device: str) -> None:
    with open_artifact(path) as artifact, Staging(artifact, torch.device(device)) as files:
        stored = values(artifact)
        for part in (stored, stored[37:61], stored[99:], stored.reshape(-1).view(torch.uint8)[5:100_001]):
            copied = files.copy(part)
            assert (
                torch.equal(copied.cpu(), part) and copied.dtype == part.dtype and copied.shape == part.shape
            )
            assert copied.data_ptr() != part.data_ptr()


def test_what_is_no_piece_of_the_file_is_copied_from_memory(path: Path) -> None:
    with open_artifact(path) as artifact, Staging(artifact, CPU) as files:
        stored = values(artifact)
        assert artifact.place_of(stored) is not None
        for other in (stored[:, :7], stored.clone(), values(artifact, "small")):
            assert torch.equal(files.copy(other), other)
        assert artifact.place_of(stored[:, :7]) is None and artifact.place_of(stored.clone()) is None


def test_a_file_that_was_replaced_or_read_whole_is_not_read_again(path: Path) -> None:
    with open_artifact(path) as artifact:
        stored = values(artifact).clone()
        other = path.with_name("other.nstf")
        other.write_bytes(bytes(path.stat().st_size))
        other.replace(path)
        with Staging(artifact, CPU) as files:
            assert torch.equal(files.copy(values(artifact)), stored)
        path.unlink()
        with Staging(artifact, CPU) as files:
            assert torch.equal(files.copy(values(artifact)), stored)


def test_a_file_read_into_memory_is_copied_from_there(path: Path) -> None:
    with open_artifact(path, mapped=False) as artifact:
        assert artifact.reopened() is None and artifact.place_of(values(artifact)) is None
        with Staging(artifact, CPU) as files:
            assert torch.equal(files.copy(values(artifact)), values(artifact))


def test_a_file_that_becomes_shorter_is_said_in_one_line(path: Path) -> None:
    with open_artifact(path) as artifact, Staging(artifact, CPU) as files:
        array = values(artifact)
        os.truncate(path, path.stat().st_size - 50_000)
        with pytest.raises(NstfError, match="became shorter while it was read"):
            files.copy(array)


def test_a_disk_that_fails_is_said_with_the_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with open_artifact(path) as artifact, Staging(artifact, CPU) as files:
        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(NstfError, match=r"m\.nstf: cannot be read \(Input/output error\)"):
            files.copy(values(artifact))


def test_its_threads_use_the_gpu_that_they_read_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each rank but the first would have a context on the first GPU as well."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    second = torch.device("cuda", 1)
    with open_artifact(path) as artifact, Staging(artifact, CPU) as files:
        assert files._ready() and files._pool is not None
        files._on_gpu, files._device = True, second
        files._pool.submit(int).result()
        assert used == [second]


def test_what_is_copied_after_the_end_comes_from_the_mapping(path: Path) -> None:
    with open_artifact(path) as artifact:
        stored = values(artifact)
        with Staging(artifact, CPU) as files:
            files.copy(stored)
        assert torch.equal(files.copy(stored), stored)


def test_memory_that_is_not_pinned_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def refuses(*sizes: int, **options: object) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return plain(*sizes, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", refuses)
    assert staging._pinned().shape == (staging.SLOTS, staging.PIECE)
