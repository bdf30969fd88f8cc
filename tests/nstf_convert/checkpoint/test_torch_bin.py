"""PyTorch .bin files: tensors only, never code."""

import errno
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nstf.errors import CorruptError, NstfError, UnsupportedError
from nstf_convert.checkpoint import open_checkpoint, torch_bin
from nstf_convert.checkpoint import pickled as pickled_reader

Make = Callable[..., Path]


@pytest.fixture
def bin_folder(make_folder: Make) -> Path:
    """A tiny tied Llama as pytorch_model.bin, the head in the file as the same storage."""
    folder = make_folder("LlamaForCausalLM", tie_word_embeddings=True)
    stored: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    torch.save(stored, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_tensors_come_as_they_were_saved(bin_folder: Path) -> None:
    stored = torch.load(bin_folder / "pytorch_model.bin", weights_only=True)
    with open_checkpoint(bin_folder) as checkpoint:
        assert checkpoint.kind == "bin"
        assert checkpoint.architecture == "LlamaForCausalLM"
        assert checkpoint.ties == {"lm_head.weight": "model.embed_tokens.weight"}
        assert all(torch.equal(checkpoint.get(name), stored[name]) for name in checkpoint.names())


def test_what_the_disk_does_not_give_is_named(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(NstfError, match=r"pytorch_model\.bin: cannot be read \(Input/output error\)"):
        open_checkpoint(bin_folder / "pytorch_model.bin")


def test_pickles_can_be_forbidden(bin_folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="holds pickled weights, which were not allowed"):
        open_checkpoint(bin_folder, allow_pickle=False)
    with pytest.raises(UnsupportedError, match="holds pickled weights"):
        open_checkpoint(bin_folder / "pytorch_model.bin", allow_pickle=False)


def test_shared_storage_without_a_config_is_a_tie(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    torch.save({"b": weight, "a": weight, "c": weight.t(), "d": weight[:32]}, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.ties == {"b": "a"}
        assert torch.equal(checkpoint.get("c"), weight.t())
        assert checkpoint.get("c").is_contiguous()


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-2.bin")
    index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == ["a", "b"]
    (tmp_path / "pytorch_model-2.bin").unlink()
    with pytest.raises(CorruptError, match=r"pytorch_model-2.bin is missing although"):
        open_checkpoint(tmp_path)


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    """transformers reads the file, and nstf read the shards."""
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}))
    with pytest.raises(UnsupportedError, match="holds two models"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert not checkpoint.get("a").any()


def test_an_index_cannot_name_a_path(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(CorruptError, match="only plain file names"):
        open_checkpoint(tmp_path)


class Canary:
    """An object whose unpickling writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (Path(self.path), "run"))


@pytest.mark.parametrize("how", ["torch", "legacy", "pickle"])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, how: str) -> None:
    canary, path = tmp_path / "canary", tmp_path / "pytorch_model.bin"
    data = {"a": torch.ones(2), "evil": Canary(str(canary))}
    if how == "pickle":
        path.write_bytes(pickle.dumps(data))
    else:
        torch.save(data, path, _use_new_zipfile_serialization=how == "torch")
    message = (
        "Python objects besides dense tensors"
        if how == "torch"
        else "plain pickle or was saved by torch before 1.6"
    )
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize("data", [[1], {"a": 1}, {1: torch.ones(1)}, {}, {"a": torch.ones(2).to_sparse()}])
def test_anything_but_a_state_dict_is_unsupported(tmp_path: Path, data: Any) -> None:
    torch.save(data, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"state dict|not a dense tensor|besides dense tensors"):
        open_checkpoint(tmp_path)


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors that `weights_only` lets through and that are no values in memory."""
    whole = torch.zeros(4, 4)
    conjugate = torch.zeros(4, dtype=torch.complex64).conj()
    return {
        "quantised": torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8),
        "meta": torch.zeros(4, device="meta"),
        "conjugate": conjugate,
        "negative": conjugate.imag,
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "repeated": torch.zeros(1).expand(1 << 45),
        "repeated rows": torch.zeros(1, 8).expand(1 << 22, 8),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", odd_tensors())
def test_tensors_that_are_no_values_in_memory_are_unsupported(tmp_path: Path, name: str) -> None:
    # Reading a quantised one ended the process (SIGSEGV); one of strides 0 became any size.
    torch.save({"w": odd_tensors()[name]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        UnsupportedError, match=r"'w' (is not a dense tensor|and others repeat)|besides dense tensors"
    ):
        open_checkpoint(tmp_path)


def test_small_expanded_buffers_are_read(tmp_path: Path) -> None:
    tensors = {
        "mask": torch.ones(1, 1, 4, 4).tril().expand(2, 1, 4, 4),
        "scalar": torch.tensor(1.5).expand(4),
        "weight": torch.arange(6.0).reshape(2, 3),
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.get(name), tensor)
        checkpoint.fingerprint()


def test_expanded_buffers_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf_convert.checkpoint import torch_bin

    torch.save({str(i): torch.tensor(1.0).expand(10_000) for i in range(8)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch_bin, "MOST_REPEATED", 8 * 39_996)
    open_checkpoint(tmp_path).close()
    monkeypatch.setattr(torch_bin, "MOST_REPEATED", 8 * 39_996 - 1)
    with pytest.raises(
        UnsupportedError, match=r"'7' and others repeat values, 319968 bytes more than are stored"
    ):
        open_checkpoint(tmp_path)


def test_views_that_overlap_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was smaller than its storage: 8 MiB became 4,000."""
    from nstf_convert.checkpoint import torch_bin

    stored = torch.arange(1000.0)
    views = {str(i): stored[i : i + 500] for i in range(4)}
    torch.save(
        {**views, "tied": stored[:500], "apart": torch.ones(9000)[:10]}, tmp_path / "pytorch_model.bin"
    )
    monkeypatch.setattr(torch_bin, "MOST_REPEATED", 4000)
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.get("3"), stored[3:503])
    monkeypatch.setattr(torch_bin, "MOST_REPEATED", 3999)
    with pytest.raises(UnsupportedError, match=r"'3' and others repeat values, 4000 bytes more"):
        open_checkpoint(tmp_path)


def test_repeats_of_all_shards_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They counted in each shard alone: 114 KB made 3.6 GiB."""
    from nstf_convert.checkpoint import torch_bin

    shards = {str(i): f"pytorch_model-{i}.bin" for i in range(8)}
    for name, shard in shards.items():
        torch.save({name: torch.tensor(1.0).expand(10_000)}, tmp_path / shard)
    (tmp_path / torch_bin.INDEX).write_text(json.dumps({"weight_map": shards}))
    monkeypatch.setattr(torch_bin, "MOST_REPEATED", 8 * 39_996)
    open_checkpoint(tmp_path).close()
    monkeypatch.setattr(torch_bin, "MOST_REPEATED", 8 * 39_996 - 1)
    with pytest.raises(UnsupportedError, match=r"model-7.bin: '7' and others repeat values, 319968 bytes"):
        open_checkpoint(tmp_path)


def test_a_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"'w' has the type complex128, which is not supported"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 50, 500, -1, -100])
def test_a_truncated_file_is_corrupt(bin_folder: Path, length: int) -> None:
    path = bin_folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptError, match=r"pytorch_model\.bin"):
        open_checkpoint(bin_folder)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    torch.save({"a": torch.tensor([1.0, float("nan")])}, tmp_path / "pytorch_model.bin")
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(CorruptError, match="tensor 'a' has 1 NaN or infinite"),
    ):
        checkpoint.get("a")


def pickled(*instructions: bytes) -> bytes:
    """A pickle that makes {key: value}, or with one argument what it says."""
    return b"\x80\x02}" + b"".join(instructions) + b"s."


KEY, BILLION = b"X\x01\x00\x00\x00a", b"\x8a\x05" + (10**9).to_bytes(5, "little")
# A tuple of 2^14 others, in a hundred bytes.
NESTED = b")q\x00" + b"h\x00h\x00\x86q\x00" * 13
ORDERED = b"ccollections\nOrderedDict\n"
HOSTILE = {
    "a dictionary that is copied": pickled(KEY, b"(", ORDERED, b")Rq\x01", ORDERED, b"h\x01\x85Rl"),
    "a size of a dictionary": pickled(KEY, b"(", ORDERED, b")Rq\x01", b"ctorch\nSize\nh\x01\x85Rl"),
    "a size of a tensor": pickled(KEY, b"ctorch\nSize\n", b"ctorch._utils\n_rebuild_tensor_v2\n)R\x85R"),
    "a dictionary of pairs": pickled(KEY, ORDERED, b"(K\x01K\x02\x86t\x85R"),
    "many dictionaries of one state": pickled(
        KEY,
        b"}q\x01(",
        b"".join(b"K\x01" + b"N" for _ in range(30_000)),
        b"u0(",
        b")N\x85" * 0,
        (ORDERED + b")Rh\x01b") * 200,
        b"l",
    ),
    "a storage of codes": pickled(
        KEY, b"(X\x07\x00\x00\x00storagectorch\nQUInt8Storage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x00tQ"
    ),
    "a storage that is called": pickled(KEY, b"ctorch.storage\nUntypedStorage\n", BILLION, b"\x85R"),
    "a size of a list that may grow": pickled(KEY, b"ctorch\nSize\n](K\x01K\x02e\x85R"),
    "many sizes of one tuple": pickled(KEY, b"(", NESTED, b"ctorch\nSize\nh\x00\x85R" * 20, b"l"),
    "many keys of one tuple": pickled(KEY, NESTED, b"0}(", b"h\x00N" * 20, b"u"),
    "many single keys of one tuple": pickled(KEY, NESTED, b"0}", b"h\x00Ns" * 20),
    "memory": pickled(KEY, b"cbuiltins\nbytearray\n", BILLION, b"\x85R"),
    "a tensor that nobody wrote": pickled(KEY, b"ctorch\nTensor\n", BILLION, b"\x85R"),
    "a key whose hash takes for ever": pickled(b")q\x00", b"h\x00h\x00\x86q\x00" * 60, KEY),
    "a set": pickled(KEY, b"cbuiltins\nset\n", b")R"),
    "a type that is none": pickled(KEY, b"ctorch\nload\n", b")R"),
}


@pytest.mark.parametrize("repeated", [b"N", b"(", b"\x94", b"2"])
def test_objects_of_a_pickle_have_a_limit(
    repeated: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits, and what may come again: 20 MB took 1.6 GB."""
    monkeypatch.setattr(pickled_reader, "MOST_STACKED", 1000)
    monkeypatch.setattr(pickled_reader, "MOST_KEPT", 1000)
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}" + repeated * 2000 + b".")
    with pytest.raises(UnsupportedError, match="more objects than a state dict has"):
        pickled_reader.check_pickle(tmp_path / "x.bin")


def test_names_in_a_pickle_import_nothing(tmp_path: Path) -> None:
    """torch imports its compiler where somebody asks for `torch._dynamo`."""
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickled(KEY, b"ctorch\n_dynamo\n"))
    code = (
        "import sys, torch; from pathlib import Path; from nstf.errors import NstfError\n"
        "from nstf_convert.checkpoint.pickled import check_pickle; before = set(sys.modules)\n"
        "try: check_pickle(Path(sys.argv[1])); sys.exit('it was taken')\n"
        "except NstfError: pass\n"
        "sys.exit(' '.join(m for m in set(sys.modules) - before if m.startswith('torch')) or 0)\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "x.bin")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_that_makes_more_than_a_state_dict_is_not_run(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as archive:
        archive.writestr("archive/data.pkl", HOSTILE[name])
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    with pytest.raises(UnsupportedError, match="besides dense tensors"):
        open_checkpoint(tmp_path / "a.bin")


@pytest.mark.parametrize("method", ["get", "items", "keys", "__iter__"])
def test_a_dictionary_that_hides_its_methods_is_looked_through(tmp_path: Path, method: str) -> None:
    """An attribute called `items` kept its values from being looked at: a quantised tensor among them ended the process."""
    state = OrderedDict(a=torch.ones(2), b="no tensor")
    vars(state)[method] = torch.Size  # as a pickle's instruction BUILD does
    with pytest.raises(UnsupportedError, match="'b' is not a dense tensor"):
        torch_bin._tensors(state, tmp_path)
    dict.pop(state, "b")
    assert torch_bin._tensors(state, tmp_path)["a"].tolist() == [1, 1]


@pytest.mark.parametrize("cut", [0, 1, 2, 40])
def test_a_pickle_that_is_none_is_corrupt(tmp_path: Path, cut: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as archive:
        archive.writestr("archive/data.pkl", HOSTILE["memory"][:cut] if cut < 40 else b"\x80\x02(t0" * 9)
    with pytest.raises((CorruptError, UnsupportedError), match=r"cannot be read|besides"):
        open_checkpoint(tmp_path / "a.bin")


@pytest.mark.parametrize("protocol", [2, 3])  # others torch does not read by itself
def test_state_dicts_of_modules_and_parameters_are_read(tmp_path: Path, protocol: int) -> None:
    module = torch.nn.Linear(3, 2).to(torch.bfloat16)
    torch.save(module.state_dict(), tmp_path / "a.bin", pickle_protocol=protocol)
    torch.save(dict(module.named_parameters()), tmp_path / "b.bin", pickle_protocol=protocol)
    for name in ("a.bin", "b.bin"):
        checkpoint = open_checkpoint(tmp_path / name)
        assert torch.equal(checkpoint.get("weight"), module.weight)


@pytest.mark.parametrize("where", ["archive", "torch"])
def test_a_disk_that_fails_later_is_no_damage(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It was called a damaged file, to be downloaded again."""

    def fails(*_: Any, **__: Any) -> None:
        if where == "archive":
            raise OSError(errno.EIO, "Input/output error")
        raise RuntimeError("unable to open file <x> in read-only mode: Too many open files (24)")

    if where == "archive":
        monkeypatch.setattr(pickled_reader, "read_entries", fails)
    else:
        monkeypatch.setattr(torch, "load", fails)
    with pytest.raises(NstfError, match=r"Input/output error|Too many open files") as caught:
        open_checkpoint(bin_folder / "pytorch_model.bin")
    assert type(caught.value) is NstfError
