"""Models that two processes run together (gloo): logits, tokens and memory against one process; what is refused, and how."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nstf.runtime
from nstf.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))
import rank_cases
from rank_cases import CASES

from nstf.runtime.divided_modules import SummedLinear


def environment(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write_refused(folder: Path) -> None:
    """A file whose groups cannot be halved, and one of an architecture without a plan."""
    import json

    from nstf.runtime.artifact import write_artifact

    config = {**rank_cases.BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 24}
    config |= {"head_dim": 6}
    from nstf import quantizers
    from nstf.runtime.skeleton import build_skeleton

    method: Any = quantizers.method("int_grid")
    tensors = {}
    for name, value in build_skeleton(config).named_parameters():
        weight = torch.ones(value.shape)
        coded = weight.dim() == 2
        tensors[name] = method.encode(weight, method.Params(4, 24)) if coded else rank_cases.dense(weight)
    write_artifact(folder / "uncut.nstf", tensors, {"config.json": json.dumps(config).encode()})
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_layer": 1, "n_head": 2}
    config |= {"vocab_size": 100, "n_positions": 8}
    tensors = {n: rank_cases.dense(torch.ones(p.shape)) for n, p in build_skeleton(config).named_parameters()}
    write_artifact(folder / "gpt2.nstf", tensors, {"config.json": json.dumps(config).encode()})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What one process computes, and each of two; this one is the first of them."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in CASES:
        rank_cases.write(folder, name)
    write_refused(folder)
    port = free_port()
    program = [sys.executable, rank_cases.__file__, str(folder)]
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("wb") as log:
        other = subprocess.Popen(program, env={**os.environ, **environment(1, port)}, stderr=log)
        try:
            alone = {name: rank_cases.outcome(rank_cases.path_of(folder, name), 1) for name in CASES}
            for key, value in environment(0, port).items():
                patch.setenv(key, value)
            first = rank_cases.both_sides(folder)
            assert other.wait(60) == 0
        finally:
            other.kill()
            other.wait()
            sys.stderr.write((folder / "log").read_text())
    yield {"alone": alone, "first": first, "second": torch.load(folder / "rank1.pt"), "folder": folder}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_of_two_ranks_are_those_of_one(results: dict[str, Any], name: str) -> None:
    alone, first, second = (results[key][name] for key in ("alone", "first", "second"))
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-3)):
        whole, found = alone[str(dtype)].double(), first[str(dtype)].double()
        assert found.shape == whole.shape
        assert float((found - whole).norm() / whole.norm()) < bound
        assert torch.equal(first[str(dtype)], second[str(dtype)])  # so that they choose alike
    assert torch.equal(first["tokens"], alone["tokens"]) and torch.equal(second["tokens"], alone["tokens"])
    if "captured" in alone:
        assert first["captured"] == second["captured"] == alone["captured"]
