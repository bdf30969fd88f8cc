"""Data sets of arrays: what does not fit the model ends in one line before anything is calibrated."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import Tensor

from nstf_convert.cli import run
from nstf_convert.pipeline.calibrate import text

IMAGES, WORDS = "examples/tiny_conv/model", "examples/tiny_llama/model"
LABELS = torch.tensor([0, 0, 0, 0, 0, 99, 0, 0])
WRONG: dict[str, tuple[str, dict[str, Tensor], str]] = {
    "channels": (IMAGES, {"pixel_values": torch.randn(8, 5, 32, 32)}, "not what the model takes"),
    "dimensions": (IMAGES, {"pixel_values": torch.randn(8, 3)}, "not what the model takes"),
    "whole numbers": (IMAGES, {"pixel_values": torch.zeros(8, 3, 32, 32, dtype=torch.uint8)}, "holds whole numbers"),
    "a name": (IMAGES, {"foo": torch.randn(8, 3, 32, 32)}, "not what the model takes"),
    "no pixels": (IMAGES, {"pixel_values": torch.zeros(8, 3, 0, 32)}, "finite numbers"),
    "NaN": (IMAGES, {"pixel_values": torch.full((8, 3, 32, 32), float("nan"))}, "finite numbers"),
    "complex": (IMAGES, {"pixel_values": torch.zeros(8, 3, 32, 32, dtype=torch.complex64)}, "finite numbers"),
    "outputs": (IMAGES, {"pixel_values": torch.full((8, 3, 32, 32), 3e38)}, "outputs"),
    "images for words": (WORDS, {"pixel_values": torch.randn(8, 3, 32, 32)}, "not what the model takes"),
    "a flag": (IMAGES, {"pixel_values": torch.randn(8, 3, 32, 32), "output_hidden_states": torch.ones(8)}, "not what"),
    "a label of one": (IMAGES, {"pixel_values": torch.randn(8, 3, 32, 32), "labels": LABELS}, "not what the model takes"),
    "tokens beyond int64": (
        WORDS, {"input_ids": torch.full((8, 16), -5).view(torch.uint64)}, "tokens outside"
    ),
    "tokens": (WORDS, {"input_ids": torch.full((8, 16), 10**6)}, "tokens outside"),
    "four bits": (
        WORDS, {"input_ids": torch.zeros(8, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, "its types (float4"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_do_not_fit_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, arrays, expected = WRONG[name]
    save_file(arrays, tmp_path / "a.safetensors")
    words = ["calibrate", model, "-o", str(tmp_path / "c.cal"), "--dataset", str(tmp_path / "a.safetensors")]
    assert run([*words, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: the dataset ") and expected in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors"]


@pytest.mark.parametrize("number", [7, 30, 40, 47])
def test_one_image_of_many_that_gives_no_numbers_is_the_datasets_fault(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first image and the darkest and brightest are looked at before; this one is neither. The last ones are only
    measured on: the calibration had NaN in it, and a conversion ended with a ValueError, or with figures of NaN."""
    images = torch.rand(48, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images[number] = 3e38
    save_file({"pixel_values": images}, tmp_path / "a.safetensors")
    words = ["calibrate", IMAGES, "-o", str(tmp_path / "c.cal"), "--dataset", str(tmp_path / "a.safetensors")]
    assert run([*words, "--quiet"]) == 2
    assert "of some samples of a.safetensors the model's" in capsys.readouterr().err


def test_arrays_of_half_precision_are_taken(tmp_path: Path) -> None:
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    save_file({"pixel_values": images.half()}, tmp_path / "a.safetensors")
    words = ["calibrate", IMAGES, "-o", str(tmp_path / "c.cal"), "--dataset", str(tmp_path / "a.safetensors")]
    assert run([*words, "--quiet"]) == 0


def test_the_first_of_too_many_samples_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is a batch of Python's: 2 MB of bytes took 3.3 GB."""
    monkeypatch.setattr(text, "MOST_SAMPLES", 8)
    images = torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images[8:] = float("nan")
    save_file({"pixel_values": images}, tmp_path / "a.safetensors")
    words = ["calibrate", IMAGES, "-o", str(tmp_path / "c.cal"), "--dataset", str(tmp_path / "a.safetensors")]
    assert run(words) == 0
    assert "of 20 samples in" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_tokens_of_any_whole_type_are_taken(dtype: torch.dtype, tmp_path: Path) -> None:
    """numpy's users store tokens as uint16; those ended in torch's own error, smaller types were refused."""
    tokens = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": tokens.to(dtype)}, tmp_path / "a.safetensors")
    words = ["calibrate", WORDS, "-o", str(tmp_path / "c.cal"), "--dataset", str(tmp_path / "a.safetensors")]
    assert run([*words, "--quiet"]) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_images_that_no_processor_has_read_are_refused(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ViT takes whole numbers and makes floats of them, to which no gradient flows."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(tmp_path / "vit")
    save_file({"pixel_values": torch.ones(8, 3, 16, 16, dtype=dtype)}, tmp_path / "a.safetensors")
    words = ["calibrate", str(tmp_path / "vit"), "-o", str(tmp_path / "c.cal"), "--quiet"]
    capsys.readouterr()
    assert run([*words, "--dataset", str(tmp_path / "a.safetensors")]) == 2
    assert "pixel_values holds whole numbers" in capsys.readouterr().err


def test_arrays_in_a_home_folder_are_read_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts were; of arrays the file called `~` was looked for."""
    import nstf_convert

    monkeypatch.setenv("HOME", str(tmp_path))
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    save_file({"pixel_values": images}, tmp_path / "a.safetensors")
    output = tmp_path / "m.nstf"
    nstf_convert.convert(IMAGES, budget=0.5, output=output, dataset="~/a.safetensors", effort="fast")
    assert output.is_file()


def test_images_smaller_than_a_patch_are_refused_before_the_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import ViTConfig, ViTModel

    from nstf_convert.pipeline.calibrate import make

    monkeypatch.setattr(make, "make", lambda *_: pytest.fail("it was calibrated"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(tmp_path / "vit")
    capsys.readouterr()
    words = ["convert", str(tmp_path / "vit"), "-o", str(tmp_path / "o.nstf"), "--budget", "0.5"]
    assert run([*words, "--image-size", "7", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error == "error: images of 7 x 7 are too small: this model reads 8 x 8 at a time\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["vit"]


def test_a_header_is_checked_before_the_library_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """31 MiB of 600,000 empty arrays took 827 MiB and 21 s."""
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % i for i in range(600_000)) + "}").encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    words = ["calibrate", IMAGES, "-o", str(tmp_path / "c.cal"), "--dataset", str(tmp_path / "a.safetensors")]
    assert run([*words, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "more than" in error and "values" in error


@pytest.mark.parametrize("way", ["header", "library"])
def test_a_disk_that_fails_is_no_fault_of_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    """It was called no safetensors file, which is not there."""

    def fails(*_: object) -> None:
        if way == "header":
            raise OSError(5, "Input/output error")
        raise RuntimeError("unable to open file <a> in read-only mode: Input/output error (5)")

    save_file({"pixel_values": torch.randn(8, 3, 32, 32)}, tmp_path / "a.safetensors")
    where = (text, "parse_header") if way == "header" else (safetensors.torch, "load_file")
    monkeypatch.setattr(*where, fails)
    words = ["calibrate", IMAGES, "-o", str(tmp_path / "c.cal"), "--dataset", str(tmp_path / "a.safetensors")]
    assert run([*words, "--quiet"]) == 1
    assert "Input/output error" in capsys.readouterr().err
