"""Tied weights are found and stored once."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nstf_convert.checkpoint import open_checkpoint

Make = Callable[..., Path]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_a_head_the_file_leaves_out_is_tied_to_the_embedding(make_folder: Make) -> None:
    folder = make_folder("LlamaForCausalLM", tie_word_embeddings=True)
    assert HEAD not in load_file(folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.ties == {HEAD: EMBEDDING}
        assert HEAD not in checkpoint.names()
        assert torch.equal(checkpoint.get(HEAD), checkpoint.get(EMBEDDING))


def test_a_head_that_is_stored_twice_counts_once(make_folder: Make) -> None:
    folder = make_folder("LlamaForCausalLM", tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        before = checkpoint.total_bytes
    save_file({**stored, HEAD: stored[EMBEDDING].clone()}, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.ties == {HEAD: EMBEDDING}
        assert checkpoint.total_bytes == before


def test_only_the_head_is_stored(make_folder: Make) -> None:
    folder = make_folder("LlamaForCausalLM", tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    stored[HEAD] = stored.pop(EMBEDDING)
    save_file(stored, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.ties == {EMBEDDING: HEAD}
        assert checkpoint.missing == ()


def test_a_head_that_differs_is_kept_and_the_config_says_untied(make_folder: Make) -> None:
    folder = make_folder("LlamaForCausalLM", tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, HEAD: stored[EMBEDDING] + 1}, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.ties == {}
        assert {HEAD, EMBEDDING} <= set(checkpoint.names())
        assert checkpoint.config is not None
        assert checkpoint.config["tie_word_embeddings"] is False
        assert "lm_head.weight differs from model.embed_tokens.weight" in " ".join(checkpoint.notes)


def test_equal_matrices_are_stored_once_though_nothing_declares_it(make_folder: Make) -> None:
    folder = make_folder("LlamaForCausalLM", tie_word_embeddings=False)
    stored = load_file(folder / "model.safetensors")
    for part in ("q_proj", "k_proj"):
        stored[f"model.layers.1.self_attn.{part}.weight"] = stored[
            f"model.layers.0.self_attn.{part}.weight"
        ].clone()
    save_file(stored, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        # k_proj has 512 elements: too small to be worth a tie.
        assert checkpoint.ties == {
            "model.layers.1.self_attn.q_proj.weight": "model.layers.0.self_attn.q_proj.weight"
        }


def test_matrices_that_differ_in_one_byte_between_the_samples_are_not_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    big = torch.randn(512, 512)
    other = big.clone()
    other[200, 17] += 1e-3
    save_file({"a": big, "b": other, "c": big.clone()}, tmp_path / "x.safetensors")
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.ties == {"c": "a"}


def test_norms_of_ones_are_not_tied(make_folder: Make) -> None:
    with open_checkpoint(make_folder("LlamaForCausalLM", tie_word_embeddings=False)) as checkpoint:
        assert checkpoint.ties == {}


def test_equal_bytes_of_another_dtype_are_not_tied(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(64, 64), "b": torch.zeros(64, 64, dtype=torch.int32)}, tmp_path / "x.safetensors"
    )
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.ties == {}
