"""Writing, opening, the exact size, and what other readers see."""

import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from nstf.errors import CorruptError, UsageError
from nstf.kernels.formats import EncodedTensor, FormatError, Node, decode
from nstf.kernels.formats.dense import Params as Dense
from nstf.runtime.artifact import (
    Shared,
    Source,
    artifact_size,
    open_artifact,
    parse_header,
    verify,
    write_artifact,
    writer,
)

Make = Callable[[int], EncodedTensor]


def dense(tensor: torch.Tensor) -> EncodedTensor:
    name = str(tensor.dtype).removeprefix("torch.")
    return EncodedTensor(Node("dense", Dense(name)), tuple(tensor.shape), {"values": tensor})


def same(a: EncodedTensor, b: EncodedTensor) -> bool:
    return (
        (a.tree, a.shape) == (b.tree, b.shape)
        and a.arrays.keys() == b.arrays.keys()
        and all(
            torch.equal(a.arrays[k], b.arrays[k]) and a.arrays[k].dtype == b.arrays[k].dtype for k in a.arrays
        )
    )


def test_every_kind_of_tree_comes_back_bit_equal(tmp_path: Path, random_tensor: Make) -> None:
    tensors = {f"t.{seed}": random_tensor(seed) for seed in range(200)}
    kinds: set[str] = set()

    def walk(node: Node) -> None:
        kinds.add(node.kind)
        for child in node.children.values():
            walk(child)

    for encoded in tensors.values():
        walk(encoded.tree)
    assert kinds >= {
        "dense",
        "int",
        "grid",
        "fp8",
        "mxfp4",
        "low_rank",
        "add",
        "permute",
        "cp",
        "tucker",
        "tensor_train",
    }
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors)
    with open_artifact(path, verify=True) as artifact:
        assert artifact.names() == sorted(tensors)
        assert all(same(artifact.encoded(name), encoded) for name, encoded in tensors.items())


def test_shared_names_files_and_meta_come_back(tmp_path: Path, sample: dict[str, Any]) -> None:
    path = tmp_path / "m.nstf"
    write_artifact(path, **sample, dtypes={"model.layers.1.weight": "bfloat16"})
    with open_artifact(path) as artifact:
        assert same(artifact.encoded("lm_head.weight"), sample["tensors"]["model.layers.0.weight"])
        assert artifact.stored_name("lm_head.weight") == "model.layers.0.weight"
        assert artifact.record("model.layers.1.weight").dtype == "bfloat16"
        assert {name: artifact.file(name) for name in artifact.file_names()} == sample["files"]
        assert {n: f.encoding for n, f in artifact.manifest.files.items()} == {
            "config.json": "zlib",
            "merges.txt": "zlib",
            "tokenizer.model": "raw",
        }
        assert artifact.manifest.plan == {"budget_bytes": 1000}
        assert artifact.manifest.report == sample["meta"]["report"]
        assert artifact.manifest.attention == {}
        with pytest.raises(UsageError, match="no file 'x' inside; there are config"):
            artifact.file("x")
        with pytest.raises(UsageError, match="no tensor 'x'; `nstf inspect` lists the names"):
            artifact.encoded("x")


def test_safetensors_reads_it_and_finds_one_metadata_key(tmp_path: Path, sample: dict[str, Any]) -> None:
    path = tmp_path / "m.nstf"
    write_artifact(path, **sample)
    entries, metadata = parse_header(path)
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == list(metadata) == ["nstf"]
        assert sorted(file.keys()) == sorted(entries)
        with open_artifact(path) as artifact:
            for name in artifact.names():
                stored = artifact.stored_name(name)
                for key, array in artifact.encoded(name).arrays.items():
                    assert torch.equal(file.get_tensor(f"{stored}:{key}").view(array.dtype), array)


def test_data_starts_at_64_bytes_and_every_array_is_aligned(tmp_path: Path, sample: dict[str, Any]) -> None:
    path = tmp_path / "m.nstf"
    write_artifact(path, **sample)
    with open_artifact(path) as artifact:
        assert min(entry.start for entry in artifact.entries.values()) % 64 == 0
        for name in artifact.names():
            assert all(a.data_ptr() % a.element_size() == 0 for a in artifact.encoded(name).arrays.values())


def test_size_is_predicted_to_the_byte(tmp_path: Path, random_tensor: Make) -> None:
    rng = random.Random(1)
    for trial in range(100):
        tensors: dict[str, Any] = {f"w{i}": random_tensor(1000 * trial + i) for i in range(rng.randrange(6))}
        stored = dict(tensors)
        if tensors:
            tensors["tied"] = Shared("w0")
        files = {
            f"f{i}": rng.randbytes(rng.randrange(200)) + b"x" * rng.randrange(200)
            for i in range(rng.randrange(3))
        }
        meta = {"plan": {"text": "é" * rng.randrange(50), "x": rng.random()}}
        predicted = artifact_size(
            {name: (e.tree, e.shape, "float32") for name, e in stored.items()},
            {"tied": "w0"} if stored else {},
            files,
            meta,
        )
        path = tmp_path / "m.nstf"
        dtypes = dict.fromkeys(stored, "float32")
        assert write_artifact(path, tensors, files, meta, dtypes) == path.stat().st_size == predicted


@pytest.mark.parametrize(("ahead", "most_alive"), [(0, 1), (1300, 3), (1 << 30, 20)])
def test_sources_are_made_few_at_a_time_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, most_alive: int
) -> None:
    import weakref

    monkeypatch.setattr(writer, "AHEAD_BYTES", ahead)
    alive: weakref.WeakSet[EncodedTensor] = weakref.WeakSet()
    most, lock = 0, threading.Lock()

    class Watched(EncodedTensor):
        __slots__ = ()
        __hash__ = object.__hash__

    def load(value: float) -> EncodedTensor:
        nonlocal most
        made = dense(torch.full((100,), value))
        watched = Watched(made.tree, made.shape, made.arrays)
        with lock:
            alive.add(watched)
            most = max(most, len(alive))
        return watched

    tree = Node("dense", Dense("float32"))
    sources = {f"t{i}": Source(tree, (100,), "float16", lambda i=i: load(float(i))) for i in range(20)}
    write_artifact(tmp_path / "m.nstf", sources)
    assert most <= most_alive and (most > 1) == (ahead > 0) and not alive
    with open_artifact(tmp_path / "m.nstf") as artifact:
        assert decode(artifact.encoded("t7"))[0] == 7
        assert artifact.record("t7").dtype == "float16"


def test_source_that_makes_another_tree_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    wrong = Source(Node("dense", Dense("float16")), (3,), "float32", lambda: dense(torch.zeros(3)))
    with pytest.raises(
        ValueError, match="tensor 't': the encoded tensor has another tree or shape than announced"
    ):
        write_artifact(tmp_path / "m.nstf", {"t": wrong})
    broken = EncodedTensor(Node("dense", Dense("float32")), (3,), {"values": torch.zeros(4)})
    with pytest.raises(FormatError, match=r"tensor 't': array 'values' is torch.float32 \[4\], expected"):
        write_artifact(tmp_path / "m.nstf", {"t": broken})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "meta", "message"),
    [
        ({"../x": 0}, {}, "tensor name '../x' is a path"),
        ({"/x": 0}, {}, "tensor name '/x' is a path"),
        ({"a\\b": 0}, {}, r"tensor name 'a\\\\b' is a path"),
        ({"a:b": 0}, {}, "tensor name 'a:b' has ':' or '%' that is not percent-encoded"),
        ({"a%2": 0}, {}, "tensor name 'a%2' has ':' or '%' that is not percent-encoded"),
        ({"a\nb": 0}, {}, r"tensor name 'a\\nb' has control characters"),
        ({"": 0}, {}, "tensor name '' is empty or longer than 512 characters"),
        ({"t": Shared("u")}, {}, "tensor 't' shares 'u', which does not exist"),
        ({"t": 0, "u": Shared("t"), "v": Shared("u")}, {}, "tensor 'v' shares 'u', which is itself shared"),
        ({"t": Shared("t")}, {}, "tensor 't' shares 't', which is itself shared"),
        ({}, {"plan": {"x": float("nan")}}, "Out of range float values"),
        ({}, {"plan": {"x": {1}}}, "not a JSON value"),
        ({}, {"plan": {1: "a", "1": "b"}}, "not a JSON value"),
        ({}, {"x": {}}, "meta has the key 'x'; known are attention, plan, provenance, report"),
    ],
)
def test_what_a_reader_would_refuse_is_not_written(
    tmp_path: Path, tensors: dict[str, Any], meta: dict[str, Any], message: str
) -> None:
    made = {
        name: value if isinstance(value, Shared) else dense(torch.zeros(2)) for name, value in tensors.items()
    }
    with pytest.raises(ValueError, match=message):
        write_artifact(tmp_path / "m.nstf", made, {}, meta)
    assert list(tmp_path.iterdir()) == []


def test_file_names_that_are_paths_are_not_written(tmp_path: Path) -> None:
    for name in ("../x", "a/b", "a\\b", ".hidden", "", "a\0", "x" * 300, "c:d"):
        with pytest.raises(ValueError, match="is not a bare file name"):
            write_artifact(tmp_path / "m.nstf", {}, {name: b"x"})


def test_onnx_like_names_are_kept(tmp_path: Path) -> None:
    name = "encoder/layer%3A0/MatMul%2F1"
    write_artifact(tmp_path / "m.nstf", {name: dense(torch.ones(2))})
    with open_artifact(tmp_path / "m.nstf") as artifact:
        assert torch.equal(decode(artifact.encoded(name)), torch.ones(2))


def test_empty_artifact_opens(tmp_path: Path) -> None:
    size = write_artifact(tmp_path / "m.nstf", {})
    with open_artifact(tmp_path / "m.nstf", verify=True) as artifact:
        assert (artifact.names(), artifact.size_bytes) == ([], size)


def test_tensors_outlive_close_and_writing_into_them_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.nstf"
    write_artifact(path, {"t": dense(torch.arange(4.0))})
    before = path.read_bytes()
    artifact = open_artifact(path)
    values = artifact.encoded("t").arrays["values"]
    artifact.close()
    with pytest.raises(ValueError, match="the artifact is closed"):
        artifact.encoded("t")
    del artifact
    values += 1
    assert values.tolist() == [1, 2, 3, 4]
    assert path.read_bytes() == before


def test_again_maps_the_same_file_or_none(tmp_path: Path) -> None:
    path, stored = tmp_path / "x.nstf", {"a": dense(torch.randn(30, 40))}
    write_artifact(path, stored)
    with open_artifact(path, mapped=False) as read:
        assert read.again() is None
    with open_artifact(path) as artifact:
        own = artifact.encoded("a").arrays["values"]
        own += 1  # what is written into one mapping is not in the other
        second = artifact.again()
        assert second is not None and same(second.encoded("a"), stored["a"])
        path.with_name("y").write_bytes(path.read_bytes())
        path.with_name("y").replace(path)
        assert artifact.again() is None


def test_opening_reads_the_header_only(tmp_path: Path) -> None:
    path = tmp_path / "m.nstf"
    write_artifact(path, {"t": dense(torch.zeros(4 << 20))})
    text = Path("/proc/self/smaps_rollup")
    if not text.exists():
        pytest.skip("needs /proc")

    def resident() -> int:
        return int(text.read_text().split("Rss:")[1].split()[0])

    with open_artifact(path) as artifact:
        before = resident()
        array = artifact.encoded("t").arrays["values"]
        assert resident() - before < 1024
        assert array.sum() == 0
        assert resident() - before > 8192


def test_300_loads_leave_no_descriptor_open(tmp_path: Path, sample: dict[str, Any]) -> None:
    path = tmp_path / "m.nstf"
    write_artifact(path, **sample)
    gc.collect()  # files of earlier tests close now, not in the middle
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(300):
        with open_artifact(path) as artifact:
            artifact.encoded("lm_head.weight")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_verify_counts_what_it_checked(tmp_path: Path, sample: dict[str, Any]) -> None:
    path = tmp_path / "m.nstf"
    size = write_artifact(path, **sample)
    found = verify(path)
    assert (found.tensors, found.shared_tensors, found.files, found.size_bytes) == (9, 1, 3, size)
    assert found.arrays == len(parse_header(path)[0])


def test_verify_names_the_array_that_differs(tmp_path: Path, sample: dict[str, Any]) -> None:
    path = tmp_path / "m.nstf"
    write_artifact(path, **sample)
    raw = bytearray(path.read_bytes())
    entry = parse_header(path)[0]["nstf.file/tokenizer.model"]
    raw[entry.start + 3] ^= 1
    path.write_bytes(raw)
    open_artifact(path).close()
    for check in (verify, lambda p: open_artifact(p, verify=True)):
        with pytest.raises(CorruptError) as caught:
            check(path)
        assert str(caught.value) == (
            f"{path}: array 'nstf.file/tokenizer.model' differs from its SHA-256; "
            "the file is damaged or incomplete, fetch or convert it again"
        )


def test_a_name_that_no_file_can_have_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no file can have"):
        open_artifact("\ud800")


def test_file_that_is_missing_a_folder_or_a_fifo_is_a_usage_error(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "fifo")
    for name, message in (
        ("none", "no such file"),
        (".", "not a regular file"),
        ("fifo", "not a regular file"),
    ):
        with pytest.raises(UsageError, match=message):
            open_artifact(tmp_path / name)
    with pytest.raises(UsageError, match="is a folder; give the path of a file"):
        write_artifact(tmp_path, {})
    with pytest.raises(UsageError, match=r"the folder .* does not exist; create it first"):
        write_artifact(tmp_path / "none" / "m.nstf", {})
