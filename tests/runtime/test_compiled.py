"""Compiled kernels beside an artifact: which matrices they are for, and loading them where they match or not."""

import json
import logging
from pathlib import Path

import pytest
import torch

from nstf.errors import CorruptError, UsageError
from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.formats.tree import format_of
from nstf.runtime.artifact import Shared, open_artifact, write_artifact
from nstf.runtime.compiled import matrices, side_path, use_compiled


def dense(*shape: int) -> EncodedTensor:
    node = Node("dense", format_of("dense").Params("float32"))
    return EncodedTensor(node, shape, {"values": torch.ones(shape)})


def artifact(path: Path, config: object, shared: bool = False) -> Path:
    tensors = {"embed": dense(6, 4), "layer": dense(4, 4), "experts": dense(3, 5, 4), "norm": dense(4)}
    if shared:
        tensors["head"] = Shared("embed")
    meta = {"plan": {"roles": {"embed": "embedding", "layer": "o"}}}
    write_artifact(path, tensors, {"config.json": json.dumps(config).encode()}, meta)
    return path


def shapes(path: Path) -> list[tuple[int, ...]]:
    with open_artifact(path) as opened:
        return sorted(tuple(encoded.shape) for encoded in matrices(opened))


def test_matrices_and_the_first_expert_are_multiplied_and_tables_looked_up(tmp_path: Path) -> None:
    untied = artifact(tmp_path / "a.nstf", {"tie_word_embeddings": False})
    assert shapes(untied) == [(4, 4), (5, 4)]


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}, []])
def test_a_table_that_may_be_the_output_layer_counts(tmp_path: Path, config: object) -> None:
    assert shapes(artifact(tmp_path / "a.nstf", config)) == [(4, 4), (5, 4), (6, 4)]


def test_a_shared_table_counts_once(tmp_path: Path) -> None:
    path = artifact(tmp_path / "a.nstf", {"tie_word_embeddings": False}, shared=True)
    assert shapes(path) == [(4, 4), (5, 4), (6, 4)]


def test_the_side_file_lies_beside_the_artifact() -> None:
    assert side_path("models/m.nstf", "gfx942") == Path("models/m.gfx942.nstfk")


def test_a_file_for_another_gpu_is_left_alone_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from nstf.kernels.triton import aot, side_file
    from nstf.kernels.triton.architecture import architecture

    monkeypatch.setattr(aot, "target_here", lambda: "gfx942")
    side = tmp_path / "a.gfx950.nstfk"
    side.write_bytes(side_file.pack([], architecture("gfx950"), [1], "float16"))
    with caplog.at_level(logging.INFO, "nstf"), open_artifact(artifact(tmp_path / "a.nstf", {})) as opened:
        use_compiled(opened, side)
        assert "compiled for gfx950, the GPU here is gfx942" in caplog.text
        caplog.clear()
        monkeypatch.setattr(aot, "target_here", lambda: "gfx950")
        use_compiled(opened, side)
        assert "0 compiled kernels, 0 left to compile" in caplog.text
        with pytest.raises(UsageError, match="cannot be read"):
            use_compiled(opened, tmp_path / "none.nstfk")
        side.write_bytes(b"no kernels")
        with pytest.raises(CorruptError, match="not a file of compiled kernels"):
            use_compiled(opened, side)
