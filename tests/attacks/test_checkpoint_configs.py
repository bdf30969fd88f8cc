"""Configs of a checkpoint, or alone, that make more of a model than its tensors can fill, or lead to code: told at once."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from small_llama import LLAMA, tensors

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
from nstf.runtime.artifact.config import check_config, limits_of_shapes, parse_object
from nstf.runtime.artifact.header import parse_header_bytes
from nstf_convert.checkpoint import open_checkpoint

ABSURD: dict[str, dict[str, Any]] = {
    # Each kept the reader busy for minutes, with memory to match.
    "labels": {**LLAMA, "num_labels": 10**6},
    "codebooks": {"model_type": "musicgen_decoder", "architectures": ["MusicgenForCausalLM"], "num_codebooks": 3 * 10**6},
    "stages": {"model_type": "swin", "depths": [512] * 2000, "num_heads": [1] * 2000},
    "convolutions": {"model_type": "wav2vec2", **dict.fromkeys(("conv_dim", "conv_stride", "conv_kernel"), [8] * 10**5)},
    "blocks": {"model_type": "funnel", "block_sizes": [10**6] * 3},
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """checkpoint(config): a folder with the tensors of small_llama."""
    save_file({n: t.arrays["values"] for n, t in tensors().items()}, tmp_path / "model.safetensors")

    def write(config: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.mark.parametrize("case", ABSURD)
def test_a_config_beyond_its_tensors_is_refused_at_once(
    checkpoint: Callable[[dict[str, Any]], Path], case: str
) -> None:
    with pytest.raises(CorruptError):
        open_checkpoint(str(checkpoint(ABSURD[case])))


@pytest.mark.parametrize("positions", [1 << 30])
def test_tables_over_positions_have_a_limit_wherever_a_model_is_built(tmp_path: Path, positions: int) -> None:
    # As `load` had it, but neither eval and diff, which build it of an artifact too, nor a conversion.
    from nstf.kernels.formats import EncodedTensor, Node, dense
    from nstf.runtime.artifact import open_artifact, write_artifact
    from nstf.runtime.skeleton import build_skeleton, parameter_names
    from nstf_convert.streamed import StreamedModel

    config = {"model_type": "gptj", "architectures": ["GPTJForCausalLM"], "n_embd": 16, "n_layer": 1, "n_head": 2,
              "vocab_size": 32, "rotary_dim": 8, "n_positions": 8}  # fmt: skip
    model = build_skeleton(config)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    values = {n: torch.zeros(shapes[n]) for n in parameter_names(model)}
    stated = json.dumps(config | {"n_positions": positions}).encode()
    tree = Node("dense", dense.Params("float32"))
    path = tmp_path / "m.nstf"
    write_artifact(
        path,
        {n: EncodedTensor(tree, shapes[n], {"values": v}) for n, v in values.items()},
        {"config.json": stated},
    )
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_bytes(stated)
    with open_artifact(path) as artifact, pytest.raises(UnsupportedError, match="makes a tensor of"):
        StreamedModel.from_artifact(artifact)
    with pytest.raises(CorruptError, match="makes a tensor of"):
        open_checkpoint(str(folder))


def test_a_table_of_numbers_has_a_limit_when_a_checkpoint_is_opened(tmp_path: Path) -> None:
    """FNet's matrix of the Fourier transform is scipy's: a folder of 40 KB took 44 s and 4.7 GB."""
    from transformers import FNetConfig, FNetModel

    FNetModel(
        FNetConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=1,
            intermediate_size=32,
            max_position_embeddings=32,
        )
    ).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_tpu_fourier_optimizations": True, "tpu_short_seq_length": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptError, match="makes a tensor of"):
        open_checkpoint(str(tmp_path))


def test_a_config_alone_leads_to_no_code_and_no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nstf place config.json` gave it to transformers as it was, which asks whether to run what `auto_map` names, and
    fetches the kernel that `attn_implementation` names."""
    from transformers import AutoModelForCausalLM

    from nstf_convert.place import costs

    seen: list[Any] = []
    build = AutoModelForCausalLM.from_config.__func__

    def from_config(cls: Any, config: Any, **options: Any) -> Any:
        seen.append((config, options))
        return build(cls, config, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", classmethod(from_config))
    code = {
        "auto_map": {"AutoModelForCausalLM": "x/y--z.Z"},
        "attn_implementation": "x/y",
        "name_or_path": "x/y",
    }
    costs.of_config("m", {**LLAMA, **code, "_attn_implementation_internal": "x/y"}, "int4")
    ((config, options),) = seen
    assert options == {"trust_remote_code": False} and not hasattr(config, "auto_map")
    assert config._attn_implementation in (None, "eager", "sdpa") and config.name_or_path == ""


@pytest.mark.parametrize(
    "change",
    [{"sliding_window": "x"}, {"sliding_window": [1]}, {"text_config": 5}, {"text_config": {}}, {"head_dim": "x"},
     {"num_hidden_layers": -(10**400)}, {"num_hidden_layers": 10**6}, {"num_labels": 10**18}, {"vocab_size": 10**12}],
)  # fmt: skip
def test_a_config_alone_that_describes_no_model_is_one_line(change: dict[str, Any]) -> None:
    from nstf_convert.place import costs

    with pytest.raises((UsageError, UnsupportedError)):
        costs.of_config("m", {**LLAMA, **change}, "int4")


@pytest.mark.parametrize("number", [10**400, -(10**400), float("nan"), True, "x"])
def test_numbers_of_a_machine_that_no_float_holds_are_one_line(number: Any) -> None:
    from nstf_convert.place.machine import EXAMPLES, from_json

    stated = json.loads((EXAMPLES / "h100x8.json").read_text())
    for part, key in (("devices", "launch_s"), ("links", "bandwidth"), ("devices", "count")):
        changed = {**stated, part: [{**stated[part][0], key: number}, *stated[part][1:]]}
        with pytest.raises(UsageError, match=f"'{key}' must be a number"):
            from_json(changed)


def test_a_machine_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    from nstf_convert.place.machine import read_machine

    (tmp_path / "m.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not JSON"):
        read_machine(str(tmp_path / "m.json"))


def test_a_path_that_no_file_can_have_is_one_line() -> None:
    from nstf.runtime import load, load_tensors, load_tokenizer
    from nstf_convert.dataset import load_text

    for path in ("a\0b", "a" * 5000):
        for way in (load, load_tensors, load_tokenizer, open_checkpoint, lambda p: list(load_text(p))):
            with pytest.raises(NstfError):
                way(path)


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    from nstf.runtime.rank_folder import RankFolder
    from nstf.runtime.tiles import _read
    from nstf_convert.pipeline.store.tensorfile import TensorFile

    for name in ("m.sm_90.tiles.json", "model.safetensors"):
        os.mkfifo(tmp_path / name)
    assert _read(tmp_path / "m.sm_90.tiles.json") is None
    with pytest.raises(UsageError, match="not a regular file"):
        RankFolder(tmp_path, {})
    with pytest.raises(CorruptError, match="no regular file"):
        TensorFile(tmp_path / "model.safetensors")


def test_tiles_of_any_size_are_not_read(tmp_path: Path) -> None:
    """They lie beside an artifact, which may be a stranger's."""
    from nstf.runtime import tiles

    with (tmp_path / "m.sm_90.tiles.json").open("wb") as file:
        file.truncate(tiles.MOST_BYTES + 1)
    assert tiles._read(tmp_path / "m.sm_90.tiles.json") is None


def _written(path: Path, header: Any, data: bytes = bytes(16)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [5, [], b"[" * 10**5, {"a": ENTRY, "b": ENTRY}, {"a": {**ENTRY, "data_offsets": [-8, 8]}},
     {"a": {**ENTRY, "shape": [10**6, 10**6], "data_offsets": [0, 0]}}, {"a": {**ENTRY, "dtype": "F4", "shape": [32]}}],
)  # fmt: skip
def test_the_folder_of_an_engine_is_read_as_strictly_as_a_checkpoint(tmp_path: Path, header: Any) -> None:
    from nstf.runtime.rank_folder import RankFolder

    _written(tmp_path / "model.safetensors", header)
    with pytest.raises((CorruptError, UnsupportedError)):
        RankFolder(tmp_path, {})


@pytest.mark.parametrize("entry", [5, None, "x"])
def test_an_entry_of_its_config_that_is_none_is_one_line(tmp_path: Path, entry: Any) -> None:
    from nstf.runtime.rank_folder import RankFolder

    with pytest.raises(CorruptError, match="describes no tensor under 'a'"):
        RankFolder(tmp_path, {"a": entry})


@pytest.mark.parametrize("stated", ["[" * 5000, "[]", '{"metadata": [], "digests": {}, "seal": ""}', "null"])
def test_metadata_of_a_calibration_that_is_none_is_one_line(tmp_path: Path, stated: str) -> None:
    from nstf_convert.pipeline.store.tensorfile import TensorFile

    _written(tmp_path / "c.safetensors", {"__metadata__": {"nstf": stated}}, b"")
    with pytest.raises(CorruptError, match="is not a file nstf wrote"):
        TensorFile(tmp_path / "c.safetensors")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_no_memory_is_not_the_fault_of_the_file(
    checkpoint: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """It was a damaged checkpoint (exit code 5) or an unknown kind of model (6)."""
    import torch
    import transformers

    from nstf.runtime import load
    from nstf.runtime.artifact import write_artifact
    from nstf_convert.checkpoint import torch_bin

    def full(*_: Any, **__: Any) -> Any:
        raise error

    folder, path = checkpoint(LLAMA), tmp_path / "m.nstf"
    write_artifact(path, tensors(), {"config.json": json.dumps(LLAMA).encode()})
    torch.save({"a": torch.zeros(2)}, tmp_path / "m.bin")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", full)
    monkeypatch.setattr(torch, "load", full)
    for way in (
        lambda: load(path),
        lambda: open_checkpoint(str(folder)),
        lambda: torch_bin.open_file(tmp_path / "m.bin"),
    ):
        with pytest.raises(NstfError, match="not enough memory") as raised:
            way()
        assert raised.value.exit_code == 1


def test_labels_beyond_those_of_an_artifact_are_refused(checkpoint: Callable[[dict[str, Any]], Path]) -> None:
    for labels in ({"num_labels": 65_537}, {"id2label": {str(n): "a" for n in range(65_537)}}):
        with pytest.raises(CorruptError, match=r"labels|num_labels"):
            open_checkpoint(checkpoint({**LLAMA, **labels}))


def test_objects_in_a_list_are_not_nested_to_any_depth(
    checkpoint: Callable[[dict[str, Any]], Path],
) -> None:
    """450 of them, in 3 KB, were a RecursionError; lists alone were left out."""
    nested: Any = 1
    for _ in range(450):
        nested = {"a": nested}
    opened = open_checkpoint(str(checkpoint(LLAMA | {"odd": [nested], "even": [{"a": [1]}]})))
    with opened:
        assert "odd" not in opened.config and opened.config["even"] == [{"a": [1]}]


def test_a_config_of_too_many_values_is_refused_before_they_are_made() -> None:
    """15 MB of empty lists, 63 KB in the artifact, took half a gigabyte."""
    with pytest.raises(CorruptError, match="too many for its length"):
        parse_object(b'{"x": [' + b"[]," * 2_000_000 + b"[]]}", "config.json", "m.nstf")


def test_elements_that_are_stored_nowhere_bear_nothing_out(tmp_path: Path) -> None:
    """A decomposition of a kilobyte states 2^40 elements: a buffer of as many was let through, and took 10 GB."""
    from nstf.kernels.formats import EncodedTensor, array_specs, node_from_json
    from nstf.runtime.artifact import open_artifact, write_artifact
    from nstf.runtime.artifact.config import limits_of

    shape = (32,) * 8
    dense = {"dtype": "float32", "kind": "dense"}
    tree = node_from_json(
        {"kind": "cp", "rank": 1, "view": list(shape), "children": {f"factor{k}": dense for k in range(8)}}
    )
    arrays = {k: torch.zeros(s.shape, dtype=s.dtype) for k, s in array_specs(tree, shape).items()}
    path = tmp_path / "m.nstf"
    write_artifact(
        path, tensors() | {"other.weight": EncodedTensor(tree, shape, arrays)}, {"config.json": b"{}"}
    )
    with open_artifact(path) as artifact:
        assert limits_of(artifact.manifest).elements < 1 << 20


def test_types_of_layers_that_repeat_each_other_are_counted() -> None:
    """Each of GPT-Neo's numbers was held against the tensors, and not their product with the lists: 47 KB took 6 GB."""
    limits = limits_of_shapes([(64, 32)] * 20)
    check_config({"attention_types": [[["global", "local"], 6]]}, limits, "m.nstf")
    for types, made in (([[["global"] * 12_000, 65_536]], 786_432_000), ([[[], 65_536]] * 1000, 65_536_000)):
        with pytest.raises(CorruptError, match=f"makes {made} layers of its attention_types"):
            check_config({"attention_types": types}, limits, "m.nstf")


def test_a_header_of_too_many_values_is_refused_before_they_are_made() -> None:
    """100 MB of lists took 4.8 GB."""
    with pytest.raises(CorruptError, match=r"the header holds more than .* values, too many for its length"):
        parse_header_bytes(b'{"__metadata__":{"a":[' + b"[]," * 2_000_000 + b"[]]}}", 1 << 30, "m.nstf")
