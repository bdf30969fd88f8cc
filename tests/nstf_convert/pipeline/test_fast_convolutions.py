"""Plans that bound time take chains of planted ranks, work out the ranks beside them, and say why others were not tried."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ResNetConfig, ResNetForImageClassification

from nstf.kernels.convolution import multiplications
from nstf.kernels.formats import node_from_json
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import Budget, plan
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.machine import machine
from nstf_convert.pipeline.outcome import Planned
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose import methods
from nstf_convert.pipeline.propose.candidates import Candidate, price
from nstf_convert.pipeline.propose.encoder import Encoder
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.table import Table
from nstf_convert.pipeline.propose.units import Statistics, Unit
from nstf_convert.pipeline.store.workdir import WorkDir
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
    # The next ranks that are tried are 86 and 103: what a shuffle costs beside it is timed.
    assert tree.kind == "low_rank" and RANK <= tree.params.rank < 100
    # Of the chain that a first plan took the next ranks on both sides were made; they join the candidates.
    (taken, found), *_ = [(given[3], made) for given, made in beside if given[1].name == name]
    smaller, larger = sorted(c.recipe.params["rank"] for c in found)
    assert smaller < taken.params["rank"] < larger and all(c.exact for c in found)
    # What has no chain says why, and codes that a kernel reads stand beside it.
    (stem,) = (t for t in stored.values() if t["shape"] == [16, 3, 7, 7])
    assert {n["method"]: n["reason"] for n in stem["not_tried"]}["low_rank"]
    shuffles = [r["encoding"] for t in stored.values() for r in t["rejected"] if "shuffle" in r["encoding"]]
    assert shuffles and not any("rotated" in e for e in shuffles)


@pytest.mark.parametrize(("price_of_a_byte", "grows"), [(1e-12, True), (0.0, False)])
def test_a_fast_plan_adapts_the_ranks_of_a_convolution_that_has_no_chain_too(
    price_of_a_byte: float, grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One over one axis, as of speech models."""
    given = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 20, generator=given) @ torch.randn(20, 192, generator=given)
    unit, allowed = Unit("c", (128, 64, 3), "float32", "conv"), methods.method_families(None, True)
    factor = {"factor": Recipe("int_grid", {"bits": 8, "group": 0, "symmetric": True})}
    taken = Recipe("svd", {"rank": 16}, factor)
    with WorkDir(tmp_path / "work", {}) as work:
        known = machine("cpu", None, None, 1)
        encoder = Encoder(
            work,
            lambda name: weight.reshape(128, 64, 3),
            Statistics(None),
            "x",
            None,
            known,
            False,
            True,
            3.0,
        )
        assert encoder.beside(unit, allowed, taken) == []
        stored = Candidate(taken, *price(unit, taken), encoder.encode(unit, taken).loss, True)
        session: Any = SimpleNamespace(
            units={"c": unit}, statistics=SimpleNamespace(has_hessian=lambda unit: True), encoder=encoder,
            stages=Stages(),
        )  # fmt: skip
        timing: Any = SimpleNamespace(bounds_time=True)
        meta: Any = None
        run = Run(session, meta, Table({"c": [stored]}), allowed, timing)
        monkeypatch.setattr(Run, "planned", lambda self, *given: planned)
        monkeypatch.setattr(Run, "_confirmed", lambda self, *given: planned)
        planned = Planned({"c": taken}, 0.0, 0, "mix", price_of_a_byte)
        run._with_ranks(planned, 1, None, True)
        assert (len(run.table.candidates["c"]) > 1) is grows
