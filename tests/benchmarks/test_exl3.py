"""benchmarks/peers/exl3.py without exllamav3: weights from its tensors, and what is counted."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def packed(codes: Tensor, suh: Tensor, svh: Tensor) -> dict[str, Tensor]:
    """What EXL3 stores of a matrix whose rotated weights are `codes` [in, out]; the trellis itself is only carried."""
    trellis = torch.zeros(codes.shape[0] // 16, codes.shape[1] // 16, 32, dtype=torch.int16)
    return {
        "trellis": trellis,
        "suh": suh.half(),
        "svh": svh.half(),
        "mul1": torch.tensor(1, dtype=torch.int32),
    }


def test_weights_are_the_rotated_codes_with_both_scales_and_the_padding_cut(tmp_path: Path) -> None:
    from peers import exl3
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    suh, svh = (
        torch.randn(n, generator=generator).sign() * 2.0 ** torch.randint(-2, 3, (n,)) for n in (256, 128)
    )
    weight = torch.randn(100, 256, generator=generator)
    padded = torch.cat([weight, torch.zeros(28, 256)]).T
    # The encoder's direction: scales out, then both rotations, which are their own inverses.
    codes = exl3.rotate((exl3.rotate(padded / svh.half()) / suh.half()[:, None]).T).T
    stored = {f"layer.up_proj.{n}": t for n, t in packed(codes, suh, svh).items()}
    stored |= {"norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    dense = exl3.expand(stored, lambda parts: codes)
    assert dense.keys() == {"layer.up_proj.weight", "norm.weight"}
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file(
        {"layer.up_proj.weight": weight.bfloat16(), "norm.weight": torch.ones(4)},
        source / "model.safetensors",
    )
    (source / "config.json").write_text("{}")
    exl3.save_expanded(source, out, dense)
    found = load_file(out / "model.safetensors")["layer.up_proj.weight"]
    assert found.shape == weight.shape
    torch.testing.assert_close(found, weight, atol=1e-4, rtol=1e-4)


def test_a_head_that_exl3_stores_beside_a_tied_table_unties_the_model(tmp_path: Path) -> None:
    from peers import exl3
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    source.mkdir()
    table = torch.randn(8, 4)
    save_file({"model.embed_tokens.weight": table}, source / "model.safetensors")
    (source / "config.json").write_text('{"tie_word_embeddings": true}')
    dense = {"model.embed_tokens.weight": table, "lm_head.weight": torch.ones(128, 128)}
    exl3.save_expanded(source, tmp_path / "out", dense)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].shape == (8, 4)
    with pytest.raises(SystemExit, match="other tensors"):
        exl3.save_expanded(source, tmp_path / "out", {"lm_head.weight": torch.ones(8, 4)})


def test_everything_in_the_folder_is_counted_and_told_apart(tmp_path: Path) -> None:
    from peers import exl3

    matrix = packed(torch.zeros(128, 128), torch.ones(128), torch.ones(128))
    stored = {f"model.layers.0.mlp.up_proj.{n}": t for n, t in matrix.items()}
    stored |= {f"lm_head.{n}": t for n, t in matrix.items()}
    stored |= {
        "model.embed_tokens.weight": torch.zeros(8, 4).half(),
        "model.norm.weight": torch.zeros(4).half(),
    }
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    size = 8 * 8 * 32 * 2 + 2 * 128 * 2 + 4
    assert exl3.count_bytes(tmp_path, stored) == {
        "size_bytes": 2000, "layers_bytes": size, "head_bytes": size, "table_bytes": 64, "other_bytes": 8,
    }  # fmt: skip


def test_without_a_gpu_the_peer_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from peers import Unavailable, Work, exl3

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    work = Work(tmp_path, tmp_path, tmp_path, tmp_path, 1, 1)
    with pytest.raises(Unavailable, match="CUDA GPU"):
        exl3.make("3bit", work)
