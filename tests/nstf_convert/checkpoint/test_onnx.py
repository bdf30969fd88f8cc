"""ONNX initialisers are read in place, and external data never leads out of the folder."""

import os
import random
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
from nstf_convert.checkpoint import onnx as onnx_reader
from nstf_convert.checkpoint import open_checkpoint

ARRAYS: dict[str, np.ndarray] = {
    "f32": np.arange(12, dtype=np.float32).reshape(3, 4),
    "f16": np.arange(6, dtype=np.float16).reshape(2, 3),
    "f64": np.arange(4, dtype=np.float64),
    "i64": np.array([-1, 5, 1 << 40], dtype=np.int64),
    "i32": np.array([-7, 7], dtype=np.int32),
    "i8": np.array([-7, 7], dtype=np.int8),
    "u8": np.array([200, 7], dtype=np.uint8),
    "bool": np.array([True, False]),
    "scalar": np.array(2.5, dtype=np.float32),
    "empty": np.zeros((0, 3), dtype=np.float32),
}


def model_of(tensors: list[TensorProto]) -> Any:
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [], [], initializer=tensors)
    return helper.make_model(graph)


def save(path: Path, tensors: list[TensorProto]) -> Path:
    path.write_bytes(model_of(tensors).SerializeToString())
    return path


def external(name: str = "w", dims: tuple[int, ...] = (4,), **entries: object) -> TensorProto:
    """A float32 tensor whose values are said to be in another file."""
    tensor = TensorProto(
        name=name, dims=dims, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": "data.bin", **entries}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    return tensor


def test_raw_values_come_as_they_were_saved(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [numpy_helper.from_array(a, n) for n, a in ARRAYS.items()])
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.kind, checkpoint.config, checkpoint.architecture) == ("onnx", None, None)
        assert checkpoint.names() == sorted(ARRAYS)
        for name, array in ARRAYS.items():
            value = checkpoint.get(name)
            assert torch.equal(value, torch.from_numpy(np.array(array))), name
            assert checkpoint.info(name).shape == array.shape
            assert checkpoint.info(name).dtype == str(value.dtype).removeprefix("torch.")
            assert checkpoint.info(name).size_bytes == array.nbytes


@pytest.mark.parametrize("content", [b"\x3a\x00" * 3, b"\x08\x01"])
def test_a_file_has_one_graph(tmp_path: Path, content: bytes) -> None:
    """Of ten million empty ones, in 20 MB, each was kept: 1.6 GB."""
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(CorruptError, match=r"(several graphs|no graph), expected one"):
        open_checkpoint(tmp_path / "m.onnx")


@pytest.mark.parametrize("name", sorted(set(ARRAYS) - {"empty"}))
def test_typed_values_come_as_they_were_saved(tmp_path: Path, name: str) -> None:
    array = ARRAYS[name]
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = helper.make_tensor(name, kind, array.shape, array.flatten().tolist())
    assert not tensor.raw_data
    with open_checkpoint(save(tmp_path / "m.onnx", [tensor])) as checkpoint:
        assert torch.equal(checkpoint.get(name), torch.from_numpy(np.array(array)))


def test_bfloat16_values_come_as_they_were_saved(tmp_path: Path) -> None:
    tensor = helper.make_tensor("w", TensorProto.BFLOAT16, [3], [1.0, -2.5, 3.0])
    with open_checkpoint(save(tmp_path / "m.onnx", [tensor])) as checkpoint:
        assert torch.equal(checkpoint.get("w"), torch.tensor([1.0, -2.5, 3.0], dtype=torch.bfloat16))


def test_external_data_comes_as_it_was_saved(tmp_path: Path) -> None:
    arrays = {
        f"w{i}": np.random.default_rng(i).standard_normal((32, 16)).astype(np.float32) for i in range(3)
    }
    model = model_of([numpy_helper.from_array(a, n) for n, a in arrays.items()])
    onnx.save_model(
        model, str(tmp_path / "m.onnx"), save_as_external_data=True, location="m.data", size_threshold=0
    )
    with open_checkpoint(tmp_path / "m.onnx") as checkpoint:
        for name, array in arrays.items():
            assert torch.equal(checkpoint.get(name), torch.from_numpy(array))
        assert checkpoint.total_bytes == sum(a.nbytes for a in arrays.values())
        assert len(checkpoint.fingerprint()) == 64


def test_a_folder_with_one_onnx_file_opens_it(tmp_path: Path) -> None:
    save(tmp_path / "m.onnx", [numpy_helper.from_array(ARRAYS["f32"], "w")])
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == ["w"]


def test_equal_initialisers_are_stored_once(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    path = save(tmp_path / "m.onnx", [numpy_helper.from_array(array, n) for n in ("b", "a")])
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.ties == {"b": "a"}


@pytest.mark.parametrize(
    "location",
    [
        "../secret.bin",
        "/etc/passwd",
        "sub/../../secret.bin",
        "sub/data.bin",
        "..",
        ".",
        "",
        "a\\b",
        "C:x",
        "file:///x",
    ],
)
def test_external_data_cannot_leave_the_folder(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret.bin").write_bytes(b"\0" * 16)
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "data.bin").write_bytes(b"\0" * 16)
    path = save(folder / "m.onnx", [external(location=location)])
    with pytest.raises(CorruptError, match=r"initialiser 'w' names the file .*only plain file names"):
        open_checkpoint(path)


def test_external_data_without_a_location_is_corrupt(tmp_path: Path) -> None:
    tensor = external()
    del tensor.external_data[:]
    with pytest.raises(CorruptError, match="only plain file names"):
        open_checkpoint(save(tmp_path / "m.onnx", [tensor]))


def test_external_data_cannot_be_a_link_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(b"\0" * 16)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "data.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(CorruptError, match="link that leaves"):
        open_checkpoint(save(folder / "m.onnx", [external()]))


def test_external_data_cannot_be_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.bin")
    with pytest.raises((UnsupportedError, UsageError), match="not a regular file"):
        open_checkpoint(save(tmp_path / "m.onnx", [external()]))


def test_missing_external_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"data\.bin is missing"):
        open_checkpoint(save(tmp_path / "m.onnx", [external()]))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": 4}, "ends at byte 20 of .*, which has 16"),
        ({"offset": 1 << 50}, "ends at byte"),
        ({"offset": -4}, "not an offset"),
        ({"offset": "1e3"}, "not an offset"),
        ({"offset": "9" * 30}, "not an offset"),
        ({"length": 17}, "takes 16 bytes but its external data has 17"),
        ({"length": 8}, "takes 16 bytes but its external data has 8"),
        ({"length": "x"}, "not an offset or a length"),
    ],
)
def test_external_data_must_lie_within_its_file(
    tmp_path: Path, entries: dict[str, object], message: str
) -> None:
    (tmp_path / "data.bin").write_bytes(b"\0" * 16)
    with pytest.raises(CorruptError, match=message):
        open_checkpoint(save(tmp_path / "m.onnx", [external(**entries)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dims": [3, 5]}, "has 48 bytes of data, expected 60"),
        ({"dims": [1 << 62, 4]}, "has the shape"),
        ({"dims": [-1]}, "has the shape"),
        ({"raw_data": b""}, "has 0 kinds of data"),
        ({"raw_data": b"123"}, "has 3 bytes of data"),
        ({"float_data": [1.0]}, "has 2 kinds of data"),
        ({"name": ""}, "without a name"),
    ],
)
def test_shapes_and_data_must_agree(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensor = numpy_helper.from_array(ARRAYS["f32"], "w")
    for field, value in change.items():
        if isinstance(value, list):
            del getattr(tensor, field)[:]
            getattr(tensor, field).extend(value)
        else:
            setattr(tensor, field, value)
    with pytest.raises(CorruptError, match=message):
        open_checkpoint(save(tmp_path / "m.onnx", [tensor]))


def test_too_few_packed_values_are_corrupt(tmp_path: Path) -> None:
    few = helper.make_tensor("w", TensorProto.INT64, [3], [1, 2, 3])
    few.dims[0] = 4
    with pytest.raises(CorruptError, match="too little data"):
        open_checkpoint(save(tmp_path / "m.onnx", [few]))
    wide = helper.make_tensor("w", TensorProto.INT64, [2], [1 << 40, 1 << 40])
    wide.dims[0] = 3
    with open_checkpoint(save(tmp_path / "n.onnx", [wide])) as checkpoint:
        with pytest.raises(CorruptError, match="has 2 values for its shape"):
            checkpoint.get("w")


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(ARRAYS["f32"], "w")
    with pytest.raises(CorruptError, match="twice there: 'w'"):
        open_checkpoint(save(tmp_path / "m.onnx", [tensor, tensor]))


def test_text_tensors_are_unsupported(tmp_path: Path) -> None:
    tensor = helper.make_tensor("w", TensorProto.STRING, [1], [b"a"])
    with pytest.raises(UnsupportedError, match="ONNX type 8"):
        open_checkpoint(save(tmp_path / "m.onnx", [tensor]))


def test_a_model_without_initialisers_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no tensors"):
        open_checkpoint(save(tmp_path / "m.onnx", []))


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [numpy_helper.from_array(np.array([1, np.inf], np.float32), "w")])
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(CorruptError, match="tensor 'w' has 1 NaN or infinite"),
    ):
        checkpoint.get("w")


def test_truncations_and_random_changes_give_an_error_or_tensors(tmp_path: Path) -> None:
    tensors = [numpy_helper.from_array(ARRAYS[n], n) for n in ("f32", "i64")]
    tensors.append(helper.make_tensor("typed", TensorProto.INT64, [3], [1, 2, 3]))
    raw = save(tmp_path / "m.onnx", tensors).read_bytes()
    generator, refused = random.Random(0), 0
    changed = [raw[:length] for length in range(len(raw))]
    for _ in range(1000):
        copy = bytearray(raw)
        for _ in range(generator.randint(1, 3)):
            copy[generator.randrange(len(copy))] = generator.choice((0, 0x7F, 0xFF, generator.randrange(256)))
        changed.append(bytes(copy))
    for data in changed:
        (tmp_path / "m.onnx").write_bytes(data)
        try:
            with open_checkpoint(tmp_path / "m.onnx") as checkpoint:
                for name in checkpoint.names():
                    checkpoint.get(name)
        except NstfError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > len(raw)


def message(number: int, content: bytes) -> bytes:
    """A field of bytes, as protobuf writes it."""
    length, at = b"", len(content)
    while at > 127:
        length, at = length + bytes([at & 127 | 128]), at >> 7
    return bytes([number << 3 | 2]) + length + bytes([at]) + content


def handmade(*tensors: bytes) -> bytes:
    return message(7, b"".join(message(5, tensor) for tensor in tensors))


HEAD = bytes([1 << 3, 4, 2 << 3, 2]) + message(8, b"w")  # four values of uint8


def test_data_in_empty_pieces_takes_no_memory(tmp_path: Path) -> None:
    # Each took a hundred bytes, and two of the file.
    path = tmp_path / "m.onnx"
    path.write_bytes(handmade(HEAD + message(9, b"abcd") + message(9, b"") * 200_000))
    tracemalloc.start()
    with open_checkpoint(path) as checkpoint:
        peak = tracemalloc.get_traced_memory()[1]
        assert checkpoint.get("w").tolist() == list(b"abcd")
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("what", ["pieces", "pieces of several", "dimensions", "initialisers"])
def test_parts_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    from nstf_convert.checkpoint import onnx_wire

    monkeypatch.setattr(onnx_wire, "MAX_TENSORS", 100)
    named = [HEAD.replace(b"w", bytes([i])) for i in range(1, 103)]
    content = {
        "pieces": handmade(HEAD + message(9, b"a") * 101),
        "pieces of several": handmade(*(tensor + message(9, b"a") * 4 for tensor in named[:26])),
        "dimensions": handmade(HEAD + message(1, b"\1" * 100_000)),
        "initialisers": handmade(*(tensor + message(9, b"abcd") for tensor in named[:101])),
    }
    (tmp_path / "m.onnx").write_bytes(content[what])
    monkeypatch.setattr(onnx_wire, "MAX_PIECES", 10_000 if what == "initialisers" else 100)
    with pytest.raises(CorruptError, match=what.partition(" ")[0]):
        open_checkpoint(tmp_path / "m.onnx")


def test_values_that_are_asked_for_in_pieces_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf_convert.checkpoint import onnx, source

    decoded, before = [], onnx._decoded
    monkeypatch.setattr(source, "BLOCK_BYTES", 64)
    monkeypatch.setattr(onnx, "_decoded", lambda *words: decoded.append(1) or before(*words))
    values = helper.make_tensor("w", TensorProto.INT32, [1000], list(range(1000)))
    with open_checkpoint(save(tmp_path / "m.onnx", [values])) as checkpoint:
        checkpoint.fingerprint()
        assert checkpoint.get("w").tolist() == list(range(1000))
    assert len(decoded) == 1


@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.FLOAT16])
def test_names_that_begin_alike_have_values_of_their_own(tmp_path: Path, kind: int) -> None:
    begin = "/model/encoder/" + "layers.0/" * 10
    values = {f"{begin}query/weight": [1, 2, 3, 4], f"{begin}key/weight": [5, 6, 7, 8]}
    tensors = [helper.make_tensor(name, kind, [4], numbers) for name, numbers in values.items()]
    assert len(begin) > 80 and all(t.int64_data or t.int32_data for t in tensors)
    with open_checkpoint(save(tmp_path / "m.onnx", tensors)) as checkpoint:
        for name in [*values, *values]:
            assert checkpoint.get(name).tolist() == values[name]


def test_what_was_decoded_goes_with_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf_convert.checkpoint import onnx

    held = onnx.Held()
    monkeypatch.setattr(onnx, "Held", lambda: held)
    tensor = helper.make_tensor("w", TensorProto.INT64, [3], [1, 2, 3])
    with open_checkpoint(save(tmp_path / "m.onnx", [tensor])) as checkpoint:
        checkpoint.get("w")
        assert held.last is not None and held.last[0] == "w"
    assert held.last is None


def number(value: int) -> bytes:
    """A varint."""
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def unpacked(count: int) -> dict[str, tuple[bytes, list[float]]]:
    """Tensors whose values are a field each, which protobuf allows: (message, values)."""
    whole = [(-1) ** i * i * 1000 for i in range(count)]
    real = [i / 2 for i in range(count)]

    def head(kind: int, name: bytes) -> bytes:
        return bytes([1 << 3]) + number(count) + bytes([2 << 3, kind]) + message(8, name)

    return {
        "int32": (
            head(TensorProto.INT32, b"int32")
            + b"".join(bytes([5 << 3]) + number(v % (1 << 64)) for v in whole),
            [float(v) for v in whole],
        ),
        "float": (
            head(TensorProto.FLOAT, b"float")
            + b"".join(bytes([4 << 3 | 5]) + np.float32(v).tobytes() for v in real),
            real,
        ),
        "double": (
            head(TensorProto.DOUBLE, b"double")
            + b"".join(bytes([10 << 3 | 1]) + np.float64(v).tobytes() for v in real),
            real,
        ),
    }


def test_values_that_are_not_packed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf_convert.checkpoint import onnx_wire, source

    monkeypatch.setattr(onnx_wire, "MAX_PIECES", 10)
    monkeypatch.setattr(source, "BLOCK_BYTES", 64)
    tensors = unpacked(1000)
    (tmp_path / "m.onnx").write_bytes(handmade(*(content for content, _ in tensors.values())))
    with open_checkpoint(tmp_path / "m.onnx") as checkpoint:
        for name, (_, values) in tensors.items():
            assert checkpoint.get(name).tolist() == values
        checkpoint.fingerprint()


def test_values_that_are_not_packed_take_no_memory_before_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(handmade(unpacked(60_000)["int32"][0]))
    tracemalloc.start()
    with open_checkpoint(tmp_path / "m.onnx"):
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18


def test_values_between_other_fields_are_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf_convert.checkpoint import onnx_wire

    head = HEAD.replace(bytes([1 << 3, 4]), bytes([1 << 3, 101]))
    between = bytes([5 << 3, 7]) + message(12, b"a text")
    (tmp_path / "m.onnx").write_bytes(handmade(head + between * 101))
    with open_checkpoint(tmp_path / "m.onnx") as checkpoint:
        assert checkpoint.get("w").tolist() == [7] * 101
    monkeypatch.setattr(onnx_wire, "MAX_PIECES", 100)
    with pytest.raises(CorruptError, match="more than 100 pieces"):
        open_checkpoint(tmp_path / "m.onnx")


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_external_data_counts_once_under_many_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    """64 links to 64 MiB were taken for 4 GiB of files."""
    (tmp_path / "data.bin").write_bytes(bytes(16))
    (tmp_path / "other.bin").write_bytes(bytes(16))
    getattr(tmp_path / "again.bin", link)(tmp_path / "data.bin")
    monkeypatch.setattr(onnx_reader, "MOST_REPEATED", 0)
    for name, good in (("other.bin", True), ("again.bin", False)):
        path = save(tmp_path / f"{name}.onnx", [external(), external("v", location=name)])
        with (
            nullcontext()
            if good
            else pytest.raises(CorruptError, match="take 32 bytes of files that have 16")
        ):
            open_checkpoint(path).close()


def test_values_of_a_byte_take_no_more_while_they_are_decoded(tmp_path: Path) -> None:
    """As numbers of eight bytes they took eleven times the file."""
    count = 400_000
    head = bytes([1 << 3, *varint_of(count), 2 << 3, 2]) + message(8, b"w")
    (tmp_path / "m.onnx").write_bytes(handmade(head + message(5, b"\7" * count)))
    with open_checkpoint(tmp_path / "m.onnx") as checkpoint:
        tracemalloc.start()
        assert int(checkpoint.get("w").sum()) == 7 * count
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 * count
    (tmp_path / "m.onnx").write_bytes(handmade(head + message(5, b"\7" * (count + 3))))
    with (
        open_checkpoint(tmp_path / "m.onnx") as checkpoint,
        pytest.raises(CorruptError, match="has 400003 val"),
    ):
        checkpoint.get("w")


def varint_of(value: int) -> bytes:
    return bytes([value & 127 | 128, *varint_of(value >> 7)]) if value >> 7 else bytes([value])
