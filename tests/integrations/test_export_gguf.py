"""`nstf export --to gguf`, read by llama.cpp's Python package: the same tokens, the same greedy text."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from export_models import TEXTS, sample

import nstf.runtime
from nstf_convert.cli import run

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: make integrations")


def loaded(path: Path) -> Any:
    return llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, verbose=False, logits_all=True)


def int_grid(bits: int, group: int = 32, symmetric: bool = True) -> dict[str, Any]:
    return {"kind": "int_grid", "bits": bits, "group": group, "symmetric": symmetric}


Q6_K = int_grid(6, 16) | {"scale_bits": 8, "steps": 128}


@pytest.mark.parametrize(
    ("table", "layers"),
    [
        (int_grid(8), (int_grid(4), int_grid(5), int_grid(8), {"kind": "mxfp4"})),
        (int_grid(6, 64), (int_grid(5, 64), int_grid(4, 32, False), int_grid(8, 0))),
        (Q6_K, (Q6_K, int_grid(5))),
        ({"kind": "dense"}, ({"kind": "dense"},)),
    ],
    ids=["blocks", "widened", "blocks of 256", "dense"],
)
def test_llama_cpp_writes_the_same_greedy_tokens(
    tmp_path: Path, table: dict[str, Any], layers: tuple[dict[str, Any], ...]
) -> None:
    artifact = sample(tmp_path / "m.nstf", table, *layers)
    assert run(["export", str(artifact), "--to", "gguf", "-o", str(tmp_path / "m.gguf")]) == 0
    ours: Any = nstf.runtime.load(artifact)
    tokenizer: Any = nstf.runtime.load_tokenizer(artifact)
    theirs = loaded(tmp_path / "m.gguf")
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert theirs.tokenize(text.encode(), add_bos=True) == ids
        expected = ours.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[0].tolist()
        theirs.reset()
        found = []
        for token in theirs.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            found.append(token)
            if len(found) == len(expected) - len(ids):
                break
        assert ids + found == expected


ARCHITECTURES = [
    ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("LlamaForCausalLM", {"tie_word_embeddings": False, "hidden_size": 64, "intermediate_size": 96}),
    ("Qwen3ForCausalLM", {"hidden_size": 64}),
    ("Gemma3ForCausalLM", {"num_hidden_layers": 6, "query_pre_attn_scalar": 8}),
]


@pytest.mark.parametrize(
    ("architecture", "changes"), ARCHITECTURES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_every_written_architecture_gives_our_logits(
    tiny: ModuleType, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    artifact = tiny.write(tmp_path, tiny.new_model(architecture, **changes))
    words = ["export", str(artifact), "--to", "gguf", "-o", str(tmp_path / "m.gguf"), "--dtype", "float32"]
    assert run(words) == 0
    ids = tiny.inputs_of(architecture)["input_ids"][0]
    with torch.no_grad():
        expected = nstf.runtime.load(artifact, engine="off")(ids[None]).logits[0].float()
    theirs = loaded(tmp_path / "m.gguf")
    theirs.eval(ids.tolist())
    found = torch.tensor(theirs.scores[: len(ids)])
    # llama.cpp rounds activations to 8 bits before a product with a block type.
    close = torch.nn.functional.cosine_similarity(found - found.mean(), expected - expected.mean(), dim=1)
    assert float(close.min()) > 0.999
