"""Measured tiles beside an artifact: used where they match, left alone with one line where they do not."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import nstf.runtime
from nstf.errors import NstfError
from nstf.kernels.triton import linear, tuner
from nstf.kernels.triton.packed import layout_of
from nstf.runtime.artifact import open_artifact
from nstf.runtime.tiles import tiles_path, tune, use_tiles

LARGER = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    tuner._MEASURED.entries.clear()


def test_a_product_runs_with_the_tile_that_was_measured(tiny: ModuleType, tmp_path: Path) -> None:
    encoded = tiny.random_encoded(tiny.leaf("int", bits=4, group=32), (512, 512))
    layout, path = layout_of(encoded), tmp_path / "m.nstf"
    assert layout is not None
    own = linear.specs(encoded, 64, torch.float16, "gfx942")
    cache = tuner.TuningCache({tuner.key(layout, 64, "gfx942"): ("narrower", 1e-5)})
    tiles_path(path, "gfx942").write_text(cache.to_json())
    assert use_tiles(path, "gfx950") == 0 and linear.specs(encoded, 64, torch.float16, "gfx942") == own
    assert use_tiles(path, "gfx942") == 1
    found = linear.specs(encoded, 64, torch.float16, "gfx942")
    wanted = tuner.specs_with(layout, 64, torch.float16, "gfx942", "narrower")
    assert [s.name for s in found] == [s.name for s in wanted] and found != own
    assert linear.specs(encoded, 300, torch.float16, "gfx942")[0].kind == "decode"
    assert linear.specs(encoded, 64, torch.float16, "gfx950")[0].name != found[0].name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ('{"version": 9, "entries": {}}', "version 9; this nstf reads 2"),
        ('{"version": 2, "entries": {}}', "none is for gfx942"),
        ("tile", "is no tile of these kernels"),
        ("foreign", "none is for gfx942"),
    ],
)
def test_a_damaged_or_a_foreign_file_is_left_alone(
    text: str, message: str, tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = layout_of(tiny.random_encoded(tiny.leaf("int", bits=4, group=32), (512, 512)))
    assert layout is not None
    if text in ("tile", "foreign"):
        target = "gfx942" if text == "tile" else "gfx1100"
        name = "block_n 96" if text == "tile" else "narrower"
        cache = tuner.TuningCache({tuner.key(layout, 64, target): (name, 1e-5)})
        text = cache.to_json()
    path = tiles_path(tmp_path / "m.nstf", "gfx942")
    path.write_text(text)
    assert use_tiles(tmp_path / "m.nstf", "gfx942") == 0
    (line,) = [r.getMessage() for r in caplog.records if r.name == "nstf"]
    assert message in line and "its tiles are not used" in line and not tuner._MEASURED.entries


def test_without_a_gpu_nothing_is_measured(tiny: ModuleType, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with (
        open_artifact(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))) as opened,
        pytest.raises(NstfError, match="needs a GPU that the kernels run on: torch sees no GPU"),
    ):
        tune(opened, torch.float16)


@pytest.mark.gpu
def test_tiles_are_measured_on_a_gpu_and_used(
    tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the user's own are none of a test's
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM", **LARGER))
    with open_artifact(path) as opened:
        written = tune(opened, torch.bfloat16)
    before = dict(tuner._MEASURED.entries)
    tuner._MEASURED.entries.clear()
    with caplog.at_level(logging.WARNING, "nstf"):
        model: Any = nstf.runtime.load(path, "cuda", dtype=torch.bfloat16)
    assert written.exists() and tuner._MEASURED.entries == before
    ids = torch.randint(3, 100, (1, 60), device="cuda")
    exact: Any = nstf.runtime.load(path, "cpu", engine="off")
    found, wanted = model(ids).logits.cpu().float(), exact(ids.cpu()).logits
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
