"""Plans that bound time take chains of planted ranks, work out the ranks beside them, and say why others were not tried."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ResNetConfig, ResNetForImageClassification

from nstf.kernels.convolution import multiplications
from nstf.kernels.formats import node_from_json
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import Budget, plan
from nstf_convert.pipeline.propose.encoder import Encoder
from nstf_convert.speed import cache, convolutions

RANK, SHAPE = 68, (192, 192, 3, 3)


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path, str]:
    """(a small ResNet whose last kernel has a rank of RANK, pictures, the kernel's name)."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=16, hidden_sizes=[192], depths=[1], layer_type="basic", num_labels=4)
    folder = tmp_path / "model"
    ResNetForImageClassification(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (name,) = (n for n, t in tensors.items() if tuple(t.shape) == SHAPE)
    weight = (torch.randn(192, RANK) @ torch.randn(RANK, 1728)).reshape(SHAPE)
    tensors[name] = (0.02 * (weight / weight.std() + 0.02 * torch.randn(SHAPE))).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    pictures = tmp_path / "pictures.safetensors"
    save_file({"pixel_values": torch.randn(16, 3, 32, 32)}, pictures)
    return folder, pictures, name


def test_a_fast_plan_works_out_the_ranks_beside_the_chain_that_it_took(
    planted: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pictures, name = planted
    torch.set_num_threads(1)
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "speeds")
    # By multiplications alone, so that no busy machine decides.
    monkeypatch.setattr(
        convolutions, "measure",
        lambda layer, trees, isa, threads, size: [1e-9 * multiplications(t, layer.shape) for t in trees],
    )  # fmt: skip
    beside = []
    own = Encoder.beside
    monkeypatch.setattr(
        Encoder, "beside", lambda *given: beside.append((given, own(*given))) or beside[-1][1]
    )
    report = plan(
        ConvertOptions(
            model=str(folder), budget=Budget("ratio", 0.5), output=tmp_path / "out.nstf", datasets=(str(pictures),),
            formats=("int_grid", "shuffle", "svd"), prefer="speed", threads=1, samples=16,
        )
    )  # fmt: skip
    stored = {t["name"]: t for t in report["tensors"]}
    tree = node_from_json(stored[name]["tree"])
    assert tree.kind == "low_rank" and RANK <= tree.params.rank < 80
    # Of the chain that a first plan took the next ranks on both sides were made; they join the candidates.
    (taken, found), *_ = [(given[3], made) for given, made in beside if given[1].name == name]
    smaller, larger = sorted(c.recipe.params["rank"] for c in found)
    assert smaller < taken.params["rank"] < larger and all(c.exact for c in found)
    # What has no chain says why, and codes that a kernel reads stand beside it.
    (stem,) = (t for t in stored.values() if t["shape"] == [16, 3, 7, 7])
    assert {n["method"]: n["reason"] for n in stem["not_tried"]}["low_rank"]
    shuffles = [r["encoding"] for t in stored.values() for r in t["rejected"] if "shuffle" in r["encoding"]]
    assert shuffles and not any("rotated" in e for e in shuffles)
