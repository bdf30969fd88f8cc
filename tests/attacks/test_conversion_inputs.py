"""Checkpoints, data sets and other files that a conversion or a gate is given, and cannot use: one line, at once."""

import errno
import json
import os
import subprocess
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
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.cli import run

WORDS: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "unk_token": "w0", "vocab": {f"w{i}": i for i in range(64)}},
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def folder(path: Path, change: Callable[[Tensors], Tensors] = dict, **config: Any) -> Path:
    """A model's folder with the tensors of small_llama, changed."""
    path.mkdir(exist_ok=True)
    save_file(change({n: t.arrays["values"] for n, t in tensors().items()}), path / "model.safetensors")
    stated = {"config": {**LLAMA, **config}, "tokenizer": WORDS}
    stated["tokenizer_config"] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, value in stated.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def converted(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, what is said last) of a conversion."""
    text = path.parent / "text.txt"
    text.write_text(" ".join(f"w{7 * i % 64}" for i in range(3000)))
    words = [
        "convert",
        str(path),
        "-o",
        str(path.parent / "o.nstf"),
        "--target-size",
        "200000",
        "--effort",
        "fast",
    ]
    words += [
        "--prefer",
        "size",
        "--dataset",
        str(text),
        "--samples",
        "2",
        "--seq-len",
        "16",
        "--force",
        "--restart",
    ]
    code = run(words)
    return code, capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_tensor_of_a_type_that_no_artifact_holds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    path = folder(tmp_path / "m", lambda found: {**found, name: found[name].to(dtype)})
    code, said = converted(path, capsys)
    assert code == 6 and f"tensor '{name}' has the type {str(dtype)[6:]}, which is not supported" in said


def test_a_config_of_other_tensors_leaves_them_without_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path / "m", lambda found: {f"other.{n}": t for n, t in found.items()})
    code, said = converted(path, capsys)
    assert code == 0 and "its config.json does not describe its tensors" in said


@pytest.mark.parametrize("command", ["convert", "plan", "calibrate"])
@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj", "norm", "embed_tokens"])
def test_a_parameter_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    """But for matrices it was an error of safetensors, and exit code 1."""
    path = folder(
        tmp_path / "m", lambda found: {n: t for n, t in found.items() if n != f"model.{name}.weight"}
    )
    words = [command, str(path), *(() if command == "calibrate" else ("--budget", "0.9", "--effort", "fast"))]
    code = run(
        [
            *words,
            *(() if command == "plan" else ("-o", str(tmp_path / "o"))),
            "--work-dir",
            str(tmp_path / "w"),
        ]
    )
    told = capsys.readouterr().err.splitlines()[-1]
    assert code == 6 and "has no parameter '" in told and f"{name}.weight'" in told
    assert not (tmp_path / "w").exists()


def test_a_name_of_half_characters_is_refused(tmp_path: Path) -> None:
    torch.save({"a\ud800": torch.zeros(2, 2)}, tmp_path / "m.bin")
    with pytest.raises(CorruptError, match=r"'a\\ud800' is no name of a tensor"):
        open_checkpoint(str(tmp_path / "m.bin"))


def test_a_class_that_transformers_lists_and_lacks_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def lacks(*_: Any) -> None:
        raise ValueError("Could not find X neither in this nor in that")

    path = folder(tmp_path / "m", architectures=[])
    monkeypatch.setattr(transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.__class__, "get", lacks)
    with open_checkpoint(str(path)) as opened:
        assert opened.architecture is None


def test_a_package_that_a_model_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def lacks(*_: Any) -> None:
        raise ImportError("\nX requires the Y library\n")

    path = folder(tmp_path / "m")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", lacks)
    with pytest.raises(NstfError, match="a package that is missing: X requires the Y library"):
        open_checkpoint(str(path))


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")
    words = [
        sys.executable,
        "-m",
        "nstf_convert",
        "convert",
        str(path),
        "--budget",
        "0.5",
        "-o",
        str(tmp_path / "o.nstf"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 6 and "config.json is not a regular file" in done.stderr


EMPTY_OBJECTS = '"x": [' + "{}," * 400_000 + "{}]}"


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer_config.json", "added_tokens.json", "generation_config.json",
     "model.safetensors.index.json"],
)  # fmt: skip
def test_side_files_of_more_values_than_text_are_refused(tmp_path: Path, name: str) -> None:
    """Empty objects take 55 times their text: 100 MiB of tokenizer_config.json took 5 GiB."""
    path = folder(tmp_path / "m")
    (path / name).write_text('{"a": 1, ' + EMPTY_OBJECTS)
    with (
        pytest.raises(CorruptError, match=rf"{name} holds more than \d+ values, too many for its length"),
        open_checkpoint(str(path)) as opened,
    ):
        opened.files()


@pytest.mark.parametrize("reader", ["tasks", "machine"])
def test_files_of_more_values_than_text_are_refused(tmp_path: Path, reader: str) -> None:
    (tmp_path / "x.json").write_text("{" + EMPTY_OBJECTS)
    with pytest.raises(UsageError, match=r"x\.json.*it holds more than \d+ values"):
        _file_readers()[reader](tmp_path / "x.json")


def test_settings_of_many_tokens_are_read_and_larger_ones_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    tokens = {str(i): {"content": f"<{i}>", **flags} for i in range(120_000)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": tokens}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, separators=(",", ":")))
    (path / "added_tokens.json").write_text(json.dumps({f"<{i}>": i for i in range(250_000)}))
    with open_checkpoint(str(path)) as opened:
        assert json.loads(opened.files()["tokenizer_config.json"]) == settings
    os.truncate(path / "tokenizer_config.json", (32 << 20) + 1)
    with open_checkpoint(str(path)) as opened, pytest.raises(CorruptError, match="more than the 33554432"):
        opened.files()


def _file_readers() -> dict[str, Callable[[Path], Any]]:
    from nstf.kernels.triton import side_file
    from nstf_convert.gates.tasks import read_tasks
    from nstf_convert.place.machine import read_machine

    return {"tasks": read_tasks, "machine": lambda p: read_machine(str(p)), "kernels": side_file.read}


@pytest.mark.parametrize("reader", ["tasks", "machine", "kernels"])
def test_a_file_that_is_none_is_one_line(tmp_path: Path, reader: str) -> None:
    read = _file_readers()[reader]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").touch()
    os.truncate(tmp_path / "big", (1 << 30) + 1)
    for name in ("pipe", "big", "none", ".", "a" * 300, "a\0b", "\ud800"):
        with pytest.raises(UsageError):
            read(tmp_path / name)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("reader", ["tasks", "machine", "kernels", "template"])
def test_a_file_that_the_machine_does_not_give_is_no_wrong_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, number: int
) -> None:
    from nstf_convert.cli.serve import read_text

    path = tmp_path / "x.json"
    path.write_bytes(b"{}")
    readers = {**_file_readers(), "template": lambda p: read_text(p, "--chat-template")}

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fails)
    monkeypatch.setattr(Path, "open", fails)
    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(NstfError, match=rf"x\.json.*{os.strerror(number)}") as error:
        readers[reader](path)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("header", ['{"__metadata__":null}', "{}", '{"__metadata__":{"nstf":"null"}}'])
def test_compiled_kernels_without_metadata_are_refused(header: str) -> None:
    from nstf.kernels.triton import side_file

    with pytest.raises(CorruptError, match="not a file of compiled kernels"):
        side_file.parse(len(header).to_bytes(8, "little") + header.encode(), "x")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_code_objects_that_are_no_bytes_are_refused(dtype: torch.dtype) -> None:
    from safetensors.torch import save

    from nstf.kernels.triton import side_file

    header = {"version": 1, "triton": "3", "target": "sm_90", "batches": [1], "dtype": "float16"}
    header["kernels"] = {"k": {"sha256": "", "metadata": {"name": "k", "shared": 0}}}
    data = save({"k": torch.zeros(8, dtype=dtype)}, {"nstf_kernels": json.dumps(header)})
    with pytest.raises(CorruptError, match="the code object of kernel k is no bytes"):
        side_file.parse(data, "m.nstfk")


DEVICE = {
    "name": "g",
    "count": 4096,
    "kind": "x",
    "memory_bytes": 1,
    "bandwidth": 1,
    "rates": {"bfloat16": 1},
}
LINK = {"mesh": "*", "bandwidth": 1, "latency_s": 0}


@pytest.mark.parametrize(
    ("change", "said"),
    [({"devices": [DEVICE], "links": [LINK]}, r"links\[0\]: more than 262144 links"),
     ({"devices": [{**DEVICE, "count": 512}], "links": [LINK] * 3}, r"links\[2\]: more than 262144 links"),
     ({"devices": [{**DEVICE, "name": f"g{i}"} for i in range(10**4)]}, r"devices\[1\]: more than 4096 devices")],
)  # fmt: skip
def test_a_machine_of_millions_of_parts_is_refused_at_once(change: dict[str, Any], said: str) -> None:
    """300 bytes made 8 million links: minutes, and gigabytes."""
    from nstf_convert.place.machine import from_json

    with pytest.raises(UsageError, match=said):
        from_json({"nstf_machine": 1, **change})


def test_numbers_of_a_gguf_that_are_no_float32_are_refused() -> None:
    from nstf_convert.checkpoint.gguf_arch import Metadata

    meta = Metadata({"general.architecture": "llama", "llama.x": 1e300}, {}, "m.gguf")
    with pytest.raises(CorruptError, match=r"llama\.x is 1e\+300"):
        meta.number("x")


def test_unsupported_types_can_still_be_compared(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", lambda found: {n: t.to(torch.float8_e5m2) for n, t in found.items()})
    with open_checkpoint(str(path)) as opened:
        assert opened.get(opened.names()[0]).dtype == torch.float8_e5m2
    with pytest.raises(UnsupportedError):
        _ = opened.info("none")


VALUES: list[Any] = [
    None, True, 0, -1, 5, 10**300, 10**5000, -(10**5000), (10**5000,),
    0.5, float("nan"), "", "x", "a\nb", [], {}, (), b"x", object(), [1], ["x"],
]  # fmt: skip


def test_arguments_of_a_conversion_are_taken_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another type they were TypeErrors and ValueErrors, or were taken and fell over much later."""
    import nstf
    from nstf_convert import pipeline
    from nstf_convert.keywords import ConvertKeywords

    monkeypatch.setattr(pipeline, "convert", lambda options: options)
    names = [
        *ConvertKeywords.__annotations__,
        "budget",
        "target_size",
        "max_kl",
        "dataset",
        "output",
        "model",
        "none",
    ]
    for name in names:
        for value in VALUES:
            given: dict[str, Any] = {"model": "m", "output": "o.nstf", "dataset": "t.txt", name: value}
            if name not in ("budget", "max_kl"):
                given.setdefault("target_size", 1000)
            try:
                nstf.convert(given.pop("model"), **given)
            except NstfError as error:
                assert isinstance(error, UsageError) and str(error).isprintable(), (name, value)


@pytest.mark.parametrize("given", [(2.7, 4), (True, 2), 10**5000, (10**5000,), {2, 4}, "2,²"], ids=range(6))
def test_numbers_of_ranks_are_whole(given: Any) -> None:
    """2.7 ranks were taken for two."""
    import nstf

    with pytest.raises(UsageError, match=r"give numbers of ranks|expected|cannot be"):
        nstf.convert("m", output="o.nstf", budget=0.5, tp=given)


@pytest.mark.parametrize("device", [None, True, 0.5, 2**63, "privateuseone", "x", [], torch.float32])
def test_what_is_no_device_is_one_line(device: Any) -> None:
    from nstf.runtime.devices import stated_device

    with pytest.raises(UsageError, match="runs everywhere"):
        stated_device(device)


@pytest.mark.parametrize("reads", ["pread", "preadv"])
def test_a_disk_that_fails_in_the_middle_of_a_tensor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with open_checkpoint(str(folder(tmp_path / "m"))) as opened:
        monkeypatch.setattr(os, reads, fails)
        with pytest.raises(
            NstfError, match=r"m/model.safetensors: tensor .* cannot be read \(Input/output error\)"
        ):
            opened.fingerprint() if reads == "pread" else opened.get(opened.names()[0])


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"x": torch.full((64, 64), 3.4e38)}, "values up to 3.4e"),
        ({"x": torch.zeros(0, 64)}, "the shape"),
        ({"x": torch.zeros((1,) * 9)}, "the shape"),
        ({"..": torch.zeros(64)}, "is a path"),
        ({"x" * 600: torch.zeros(64)}, "longer than 512"),
        ({"a:b": torch.zeros(64)}, "percent"),
    ],
    ids=str,
)
def test_tensors_that_no_artifact_can_hold_are_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: Tensors, said: str
) -> None:
    """Their names were an error when the file was written, after the whole conversion, and exit code 1."""
    path = tmp_path / "x.safetensors"
    save_file({f"m{i}": torch.randn(64, 64) for i in range(3)} | extra, path)
    words = ["convert", str(path), "--budget", "0.9", "--effort", "fast", "-o", str(tmp_path / "o.nstf")]
    assert run(words) == 6
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]
