"""Safetensors folders: what is read, and one line for everything that can be wrong with them."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf_convert.checkpoint import Checkpoint, base, memory, open_checkpoint, paths

Make = Callable[..., Path]


def header_of(path: Path) -> dict[str, object]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return dict(json.loads(raw[8 : 8 + length]))


def rewrite(path: Path, header: str, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def test_tensors_come_as_they_were_saved(llama_folder: Path) -> None:
    saved = load_file(llama_folder / "model.safetensors")
    with open_checkpoint(llama_folder) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        assert checkpoint.kind == "safetensors"
        assert checkpoint.architecture == "LlamaForCausalLM"
        assert checkpoint.names() == sorted(saved)
        for name, tensor in saved.items():
            assert torch.equal(checkpoint.get(name), tensor)
            info = checkpoint.info(name)
            assert (info.shape, info.dtype) == (tuple(tensor.shape), "float32")
            assert info.size_bytes == tensor.numel() * 4
        assert checkpoint.total_bytes == sum(t.numel() * 4 for t in saved.values())


def test_a_tensor_that_was_got_belongs_to_the_caller(llama_folder: Path) -> None:
    with open_checkpoint(llama_folder) as checkpoint:
        checkpoint.get("model.norm.weight").fill_(7)
        assert checkpoint.get("model.norm.weight").max() == 1


def test_bfloat16_keeps_its_dtype(make_folder: Make) -> None:
    with open_checkpoint(make_folder("LlamaForCausalLM", dtype=torch.bfloat16)) as checkpoint:
        assert checkpoint.get("model.norm.weight").dtype == torch.bfloat16
        assert checkpoint.info("model.norm.weight").dtype == "bfloat16"


def test_shards_give_the_same_as_one_file(make_folder: Make) -> None:
    one, many = make_folder("LlamaForCausalLM", "one"), make_folder("LlamaForCausalLM", "many", shard="20KB")
    assert len(list(many.glob("*.safetensors"))) > 1
    with open_checkpoint(one) as a, open_checkpoint(many) as b:
        assert a.names() == b.names()
        assert all(torch.equal(a.get(n), b.get(n)) for n in a.names())
        assert a.fingerprint() == b.fingerprint()


def test_a_bare_file_uses_the_config_beside_it(llama_folder: Path) -> None:
    with open_checkpoint(llama_folder / "model.safetensors") as checkpoint:
        assert checkpoint.config is not None
        assert checkpoint.config["model_type"] == "llama"


def test_a_bare_file_without_config_keeps_its_names(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 3)}, tmp_path / "x.safetensors")
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert (checkpoint.config, checkpoint.architecture, checkpoint.names()) == (None, None, ["w"])
        assert checkpoint.files() == {}


def test_fingerprint_depends_on_content_and_not_on_the_folder(make_folder: Make) -> None:
    a, b, c = (
        make_folder("LlamaForCausalLM", "a"),
        make_folder("LlamaForCausalLM", "b"),
        make_folder("LlamaForCausalLM", "c", seed=1),
    )
    prints = []
    for folder in (a, b, c):
        with open_checkpoint(folder) as checkpoint:
            prints.append(checkpoint.fingerprint())
    assert prints[0] == prints[1] != prints[2]


def test_fingerprint_sees_a_changed_byte(llama_folder: Path) -> None:
    with open_checkpoint(llama_folder) as checkpoint:
        before = checkpoint.fingerprint()
    path = llama_folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with open_checkpoint(llama_folder) as checkpoint:
        assert checkpoint.fingerprint() != before


def test_an_unknown_parameter_is_a_key_error(llama_folder: Path) -> None:
    with open_checkpoint(llama_folder) as checkpoint, pytest.raises(KeyError, match="no parameter 'x'"):
        checkpoint.get("x")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(4, 8, dtype=dtype)
    weight[1, 2] = weight[3, 0] = value
    save_file({"good": torch.ones(3), "bad": weight}, tmp_path / "x.safetensors")
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        checkpoint.get("good")
        with pytest.raises(
            CorruptError, match=r"x\.safetensors: tensor 'bad' has 2 NaN or infinite values of 32"
        ):
            checkpoint.get("bad")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_weight_that_is_read_for_a_gpu_is_looked_through_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(base.PIECE_VALUES, "cuda", 10)
    weight = torch.ones(4, 8)
    weight[1, 2] = weight[3, 0] = float("nan")
    save_file({"good": torch.ones(3, 9).to(dtype), "bad": weight.to(dtype)}, tmp_path / "x.safetensors")
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint, memory.for_gpu(torch.device("cuda")):
        assert checkpoint.get("good").is_pinned()
        with pytest.raises(CorruptError, match="tensor 'bad' has 2 NaN or infinite values of 32"):
            checkpoint.get("bad")


def test_values_whose_sum_overflows_are_finite(tmp_path: Path) -> None:
    save_file({"w": torch.full((4,), 3e38)}, tmp_path / "x.safetensors")
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.get("w").shape == (4,)


def test_a_missing_shard_is_named(make_folder: Make) -> None:
    folder = make_folder("LlamaForCausalLM", shard="20KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CorruptError, match=rf"{shard.name} is missing although .*index.json names it"):
        open_checkpoint(folder)


def test_a_truncated_shard_is_named(make_folder: Make) -> None:
    folder = make_folder("LlamaForCausalLM", shard="20KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(CorruptError, match=rf"{shard.name}: .*damaged or incomplete"):
        open_checkpoint(folder)


@pytest.mark.parametrize("length", [0, 4, 8, 9, 40, 300])
def test_every_truncation_of_a_file_is_refused(llama_folder: Path, length: int) -> None:
    path = llama_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptError, match=r"model.safetensors"):
        open_checkpoint(llama_folder)


def test_a_file_that_shrinks_after_opening_is_corrupt(llama_folder: Path) -> None:
    with open_checkpoint(llama_folder) as checkpoint:
        os.truncate(llama_folder / "model.safetensors", 4000)
        with pytest.raises(CorruptError, match=r"ends .* bytes too early"):
            [checkpoint.get(name) for name in checkpoint.names()]


def test_a_corrupt_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for header in (
        "{not json",
        "[]",
        '{"a": 1}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    ):
        rewrite(path, header, b"\0" * 4)
        with pytest.raises(CorruptError, match=r"x\.safetensors"):
            open_checkpoint(path)


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    rewrite(tmp_path / "x.safetensors", f'{{"a": {entry}, "a": {entry}}}', b"\0" * 4)
    with pytest.raises(CorruptError, match="twice"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_a_tensor_in_two_shards_is_refused(make_folder: Make) -> None:
    folder = make_folder("LlamaForCausalLM", shard="20KB")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    with pytest.raises(CorruptError, match="is in two shards"):
        open_checkpoint(folder)


def test_two_models_in_one_folder_are_refused(make_folder: Make) -> None:
    """transformers reads the file, and nstf read the shards."""
    folder = make_folder("LlamaForCausalLM", shard="20KB")
    (folder / "model.safetensors").write_bytes(next(folder.glob("model-*.safetensors")).read_bytes())
    with pytest.raises(UnsupportedError, match="holds two models"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "value",
    [torch.tensor([1.0, -1e200], dtype=torch.float64), torch.tensor([1.0 + 2.0j])],
    ids=["wide", "complex"],
)
def test_what_float32_does_not_hold_is_refused(tmp_path: Path, value: torch.Tensor) -> None:
    save_file({"a": value, "b": torch.tensor([1e30], dtype=torch.float64)}, tmp_path / "x.safetensors")
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert float(checkpoint.get("b")) == 1e30
        with pytest.raises(UnsupportedError, match=r"'a' has (values up to 1e\+200|the type complex64)"):
            checkpoint.get("a")


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_values_that_float32_rounds_to_nothing_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A matrix of 1e-50 became zeros, and the reference with it."""
    small = torch.tensor([0.0, -1e-50, 1e-60, 1e-310], dtype=torch.float64).reshape(shape)
    kept = {"zeros": 0 * small, "some": small + torch.tensor([1.2e-38, 0, 0, 0]).double().reshape(shape)}
    # Those of float32 stay as they are.
    kept["float32"] = torch.full(shape, 1e-40)
    save_file({"a": small, **kept}, tmp_path / "x.safetensors")
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        for name, value in kept.items():
            assert torch.equal(checkpoint.get(name), value)
        with pytest.raises(
            UnsupportedError, match=r"'a' has no value beyond 1e-50, which float32 rounds to 0"
        ):
            checkpoint.get("a")


def test_a_tensor_the_index_promises_must_be_there(make_folder: Make) -> None:
    folder = make_folder("LlamaForCausalLM", shard="20KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["extra.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptError, match=r"does not hold tensor 'extra.weight'"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "evil",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/../../b",
        "..",
        "",
        "a\\b",
        "C:x",
        "x\u0000y",
        "\n",
        "x" * 300,
    ],
)
def test_an_index_cannot_name_a_path(llama_folder: Path, evil: str) -> None:
    save_file({"w": torch.ones(1)}, llama_folder.parent / "secret.safetensors")
    (llama_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": evil}}))
    with pytest.raises(CorruptError, match="only plain file names of the same folder"):
        open_checkpoint(llama_folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"a": 1, "a": 2}']
)
def test_a_broken_index_is_refused(llama_folder: Path, text: str) -> None:
    (llama_folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptError, match=r"index\.json"):
        open_checkpoint(llama_folder)


def test_a_deeply_nested_index_is_refused(llama_folder: Path) -> None:
    (llama_folder / "model.safetensors.index.json").write_text("[" * 200_000)
    with pytest.raises(CorruptError, match="not valid JSON"):
        open_checkpoint(llama_folder)


def test_a_link_that_leaves_the_folder_is_refused(llama_folder: Path) -> None:
    outside = llama_folder.parent / "outside.safetensors"
    (llama_folder / "model.safetensors").rename(outside)
    (llama_folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(CorruptError, match="link that leaves the checkpoint's folder"):
        open_checkpoint(llama_folder)


def test_a_dangling_link_is_missing(llama_folder: Path) -> None:
    (llama_folder / "model.safetensors").unlink()
    (llama_folder / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(CorruptError, match=r"missing \(a dangling link\)"):
        open_checkpoint(llama_folder)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
    ],
)
def test_a_dangling_link_beside_the_weights_is_missing(llama_folder: Path, name: str) -> None:
    """It was passed over: a model without its config.json is converted without calibration, with exit code 0."""
    if name.startswith("pytorch_model"):
        (llama_folder / "model.safetensors").unlink()
    (llama_folder / name).unlink(missing_ok=True)
    (llama_folder / name).symlink_to("nowhere")
    with pytest.raises(CorruptError, match=rf"{name} is missing \(a dangling link\)") as error:
        open_checkpoint(llama_folder).files()
    assert error.value.exit_code == 5


def test_the_hub_cache_may_link_to_its_blobs(llama_folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "models--org--tiny"
    (root / "blobs").mkdir(parents=True)
    snapshot = root / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(llama_folder.iterdir())):
        file.rename(root / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    with open_checkpoint(snapshot) as checkpoint:
        assert "model.norm.weight" in checkpoint.names()


def test_a_fifo_is_refused_and_does_not_hang(llama_folder: Path) -> None:
    (llama_folder / "model.safetensors").unlink()
    os.mkfifo(llama_folder / "model.safetensors")
    with pytest.raises((UsageError, UnsupportedError), match="not a regular file"):
        open_checkpoint(llama_folder)


def test_a_dtype_torch_lacks_is_unsupported(tmp_path: Path) -> None:
    rewrite(tmp_path / "x.safetensors", '{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}', b"\0")
    with pytest.raises(UnsupportedError, match="dtype F4"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_side_files_lose_the_keys_that_lead_to_code(llama_folder: Path) -> None:
    settings = {
        "tokenizer_class": "X",
        "auto_map": {"AutoTokenizer": ["evil.T", None]},
        "_commit_hash": "x",
        "chat_template": "{{ x }}",
    }
    (llama_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (llama_folder / "tokenizer.json").write_text("{}")
    (llama_folder / "modeling_evil.py").write_text("raise SystemExit")
    with open_checkpoint(llama_folder) as checkpoint:
        files = checkpoint.files()
    assert sorted(files) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads(files["tokenizer_config.json"]) == {"tokenizer_class": "X", "chat_template": "{{ x }}"}
    assert files["tokenizer.json"] == b"{}"


def test_tokens_are_no_settings(llama_folder: Path) -> None:
    """Tokens that begin like private keys, or are called like a setting, went, and those after them had other numbers."""
    tokens = {"__en__": 990, "revision": 991, "auto_map": 992, "<ok>": 993}
    (llama_folder / "added_tokens.json").write_text(json.dumps(tokens))
    bos = {"__type": "AddedToken", "content": "<s>"}
    (llama_folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
    with open_checkpoint(llama_folder) as checkpoint:
        files = checkpoint.files()
    assert json.loads(files["added_tokens.json"]) == tokens
    assert json.loads(files["tokenizer_config.json"]) == {"bos_token": bos}


def test_a_table_of_tokens_that_is_none_loses_code(llama_folder: Path) -> None:
    (llama_folder / "added_tokens.json").write_text(
        '{"a": 1, "auto_map": {"b": "c"}, "x": [{"auto_map": 2}]}'
    )
    with open_checkpoint(llama_folder) as checkpoint:
        assert json.loads(checkpoint.files()["added_tokens.json"]) == {"a": 1, "x": [{}]}


def test_a_tokenizer_link_that_leaves_the_folder_is_refused(llama_folder: Path) -> None:
    (llama_folder / "tokenizer.json").symlink_to("/etc/hostname")
    with (
        open_checkpoint(llama_folder) as checkpoint,
        pytest.raises(CorruptError, match="leaves the checkpoint"),
    ):
        checkpoint.files()


def test_large_tensors_are_read_in_parts_and_a_short_file_is_still_noticed(tmp_path, monkeypatch) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(200)))
    monkeypatch.setattr(paths, "PART_BYTES", 16)
    with path.open("rb") as file:
        found = bytearray(150)
        paths.read_into(file, 20, memoryview(found), "numbers")
        assert bytes(found) == bytes(range(20, 170))
        with pytest.raises(CorruptError, match="ends 20 bytes too early"):
            paths.read_into(file, 20, memoryview(bytearray(200)), "numbers")


def test_an_index_that_is_a_link_out_of_the_folder_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        outside = tmp_path / "outside.json"
        outside.write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
        (llama_folder / f"{name}.index.json").symlink_to(outside)
        with pytest.raises(CorruptError, match="a link that leaves"):
            open_checkpoint(llama_folder)
        (llama_folder / f"{name}.index.json").unlink()
        (llama_folder / "model.safetensors").unlink(missing_ok=True)


def test_a_shard_with_a_name_too_long_for_a_file_is_corrupt(llama_folder: Path) -> None:
    index = {"weight_map": {"x": "\u00e9" * 200 + ".safetensors"}}  # 412 bytes
    (llama_folder / "model.safetensors").unlink()
    (llama_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptError, match="is missing"):
        open_checkpoint(llama_folder)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
)
def test_settings_with_half_a_pair_of_surrogates_are_corrupt(llama_folder: Path, name: str) -> None:
    (llama_folder / name).write_text('{"chat_template": "\\ud800"}')
    with open_checkpoint(llama_folder) as checkpoint, pytest.raises(CorruptError, match="not Unicode"):
        checkpoint.files()
