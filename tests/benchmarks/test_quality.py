"""The parts of benchmarks/quality.py that need no other tool."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny_llama" / "model"


@pytest.fixture(autouse=True)
def benchmarks_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def point(family: str, name: str, size: int, kl: float) -> dict:
    accuracy = {"mean_kl": kl, "mean_kl_se": kl / 20, "top1": 0.9, "ppl_ratio": 1.01, "ppl_reference": 5.0}
    return {
        "family": family,
        "name": name,
        "size_bytes": size,
        "accuracy": {"prose": {**accuracy, "windows": 4, "tokens": 1020}},
    }


def test_an_exported_and_expanded_gguf_holds_the_weights_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from peers.gguf_files import expand, export

    from nstf_convert.checkpoint import open_checkpoint

    export(MODEL, tmp_path / "model.gguf")
    expand(tmp_path / "model.gguf", tmp_path / "float32.gguf")
    with open_checkpoint(str(MODEL)) as original, open_checkpoint(str(tmp_path / "float32.gguf")) as copy:
        assert copy.names() == original.names()
        for name in original.names():
            expected = original.get(name)
            expected = expected.to(torch.bfloat16) if expected.ndim > 1 else expected
            assert torch.equal(copy.get(name), expected.float()), name


def test_an_importance_matrix_is_the_diagonal_of_the_hessian_under_llama_cpps_names(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from peers.gguf_files import write_importance

    from nstf_convert.pipeline.store.tensorfile import write_tensors

    weight, layer = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj"
    moments = torch.diag(torch.arange(1.0, 9.0))
    hessians = {layer: {"tokens": 10, "weights": [weight]}, "head": {"tokens": 10, "weights": ["x"]}}
    write_tensors(
        tmp_path / "c.safetensors",
        {f"hessian:{layer}": moments, "hessian:head": moments},
        {"fit": 4, "hessians": hessians},
    )
    write_importance(tmp_path / "c.safetensors", MODEL, tmp_path / "importance.gguf")
    found = {t.name: t.data for t in gguf.GGUFReader(str(tmp_path / "importance.gguf")).tensors}
    assert sorted(found) == ["blk.1.ffn_down.weight.counts", "blk.1.ffn_down.weight.in_sum2"]
    sums = np.ravel(found["blk.1.ffn_down.weight.in_sum2"])
    assert np.allclose(sums / np.ravel(found["blk.1.ffn_down.weight.counts"]), range(1, 9))


def test_packed_codes_take_exactly_their_bits_and_foreign_weights_are_refused() -> None:
    from peers.worker import packed_layer

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 8, (6, 4, 16), generator=generator).float()
    scale, zero = torch.rand(6, 4, generator=generator) + 0.1, torch.full((6, 4), 3.0)
    weight = ((codes - zero[..., None]) * scale[..., None]).reshape(6, 64)
    packed = packed_layer("w", weight, scale, zero, bits=3, group=16)
    assert packed["w.codes"].numel() == 6 * 64 * 3 // 8
    assert packed["w.zero"].numel() == 6 * 4 * 3 // 8
    with pytest.raises(ValueError, match="not on their grid"):
        packed_layer("w", weight + 0.01, scale, zero, bits=3, group=16)


def test_the_table_has_a_row_for_every_file_and_the_plot_is_well_formed() -> None:
    from quality_plot import plot, table

    points = [
        {**point("nstf", "100", 99, 0.01), "target": "0.5"},
        point("peer <a>", "Q4", 100, 0.04),
        point("peer <a>", "Q2", 60, 0.4),
    ]
    lines = table(points, ["prose"], 200).splitlines()
    assert lines[2].startswith("| nstf at 0.5 | 99 | 0.4950 | 0.01000")
    assert lines[4].startswith("| peer <a> Q2 | 60 | 0.3000 | 0.40000")
    svg = ElementTree.fromstring(plot(points, ["prose"], "model & more"))
    assert len([e for e in svg.iter() if e.tag.endswith("circle")]) == 2 + 3


def test_a_domain_is_a_range_of_a_file(tmp_path: Path) -> None:
    import quality

    class Characters:
        bos_token_id = None

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
            return {"input_ids": [ord(c) for c in text]}

    path = tmp_path / "text.txt"
    path.write_text("a" * 600 + "b" * 1200)
    domain = quality.read_domain(f"bees={path}:600-1700", Characters(), 16)
    assert domain.name == "bees" and domain.windows.shape == (2, 512)
    assert set(domain.windows.flatten().tolist()) == {ord("b")}
    with pytest.raises(SystemExit, match="give NAME=PATH"):
        quality.read_domain("nothing.txt", Characters(), 16)
