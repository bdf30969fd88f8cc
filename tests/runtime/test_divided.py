"""Models that two processes run together (gloo): logits, tokens and memory against one process; what is refused, and how."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nstf.runtime
from nstf import quantizers
from nstf.errors import UsageError
from nstf.kernels.torch import reference
from nstf.runtime import ahead, divided_modules
from nstf.runtime.ahead import decoded_ahead
from nstf.runtime.artifact import write_artifact
from nstf.runtime.ranks import Ranks
from nstf.runtime.skeleton import build_skeleton

sys.path.insert(0, str(Path(__file__).parent))
import code_cases
import rank_cases
from rank_cases import BY_ENGINE, CASES


def environment(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write_refused(folder: Path) -> None:
    """A file whose groups cannot be halved, and one of an architecture without a plan."""
    method: Any = quantizers.method("int_grid")
    llama = {**rank_cases.BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    gpt2 = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
    }
    for name, config in (
        ("uncut", llama | {"hidden_size": 24, "head_dim": 6}),
        ("gpt2", gpt2 | {"vocab_size": 100}),
    ):
        weights = {n: torch.ones(p.shape) for n, p in build_skeleton(config).named_parameters()}
        weights.pop("lm_head.weight", None)
        tensors: dict[str, Any] = {
            n: method.encode(w, method.Params(4, 24))
            if w.dim() == 2 and name == "uncut"
            else rank_cases.dense(w)
            for n, w in weights.items()
        }
        if name == "uncut":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        write_artifact(folder / f"{name}.nstf", tensors, {"config.json": json.dumps(config).encode()})


decoded: list[bool] = []


def counted(*arguments: Any) -> torch.Tensor | None:
    found = decoded_ahead(*arguments)
    decoded.append(found is not None)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What one process computes, and each of two; this one is the first of them."""
    folder = tmp_path_factory.mktemp("ranks")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two processes share what there is
    for name in CASES:
        rank_cases.write(folder, name)
    write_refused(folder)
    rank_cases.write_wide(folder)
    port = free_port()
    program = [sys.executable, rank_cases.__file__, str(folder)]
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("wb") as log:
        other = subprocess.Popen(program, env={**os.environ, **environment(1, port)}, stderr=log)
        try:
            alone = {name: rank_cases.outcome(rank_cases.path_of(folder, name), 1) for name in CASES}
            whole = {name: rank_cases.by_engine(rank_cases.path_of(folder, name), 1) for name in BY_ENGINE}
            patch.setattr(divided_modules, "decoded_ahead", counted)
            for key, value in environment(0, port).items():
                patch.setenv(key, value)
            first = rank_cases.both_sides(folder)
            assert other.wait(300) == 0
        finally:
            other.kill()
            other.wait()
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.set_num_threads(threads)
            sys.stderr.write((folder / "log").read_text())
    yield {
        "alone": alone,
        "whole": whole,
        "first": first,
        "second": torch.load(folder / "rank1.pt"),
        "folder": folder,
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_of_two_ranks_are_those_of_one(results: dict[str, Any], name: str) -> None:
    alone, first, second = (results[key][name] for key in ("alone", "first", "second"))
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-3)):
        whole, found = alone[str(dtype)].double(), first[str(dtype)].double()
        assert found.shape == whole.shape
        assert float((found - whole).norm() / whole.norm()) < bound
        assert torch.equal(first[str(dtype)], second[str(dtype)])  # so that they choose alike
        pieces = first[f"{dtype} in pieces"]
        assert float((pieces.double() - whole).norm() / whole.norm()) < bound
        assert torch.equal(pieces, second[f"{dtype} in pieces"])
    assert torch.equal(first["tokens"], alone["tokens"]) and torch.equal(second["tokens"], alone["tokens"])
    if "captured" in alone:
        assert first["captured"] == second["captured"] == alone["captured"]
        assert all(found["captured again"] == found["captured"] for found in (first, second, alone))


@pytest.mark.parametrize("name", BY_ENGINE)
def test_the_engines_of_two_ranks_give_what_one_gives(results: dict[str, Any], name: str) -> None:
    alone = results["whole"][name]
    first, second = (results[key][f"{name} by engine"] for key in ("first", "second"))
    # Of int8 activations each rank rounds its own part.
    for way, bound in (("exact", 1e-5), ("auto", 2e-2)):
        whole, found = alone[f"{way} logits"].double(), first[f"{way} logits"].double()
        assert float((found - whole).norm() / whole.norm()) < bound
        for what in ("tokens", "logits"):
            assert torch.equal(first[f"{way} {what}"], second[f"{way} {what}"])
    assert torch.equal(first["exact tokens"], alone["exact tokens"])


def test_no_rank_decodes_by_an_engine_alone(results: dict[str, Any]) -> None:
    whole = results["whole"][BY_ENGINE[0]]["exact tokens"]
    for rank in ("first", "second"):
        assert torch.equal(results[rank]["no engine"], whole)


@pytest.mark.parametrize("rank", ["first", "second"])
def test_a_hook_on_one_rank_sends_all_through_modules(results: dict[str, Any], rank: str) -> None:
    whole = results["whole"][BY_ENGINE[0]]["exact tokens"]
    assert [used for _, used, _ in results[rank]["one hook"]] == [0, 1, 0]
    # The one without a hook built an engine at each call.
    assert [built for *_, built in results[rank]["one hook"]] == ([0, 1, 1] if rank == "first" else [1, 1, 1])
    assert all(torch.equal(tokens, whole) for tokens, *_ in results[rank]["one hook"])


@pytest.mark.parametrize("rank", ["first", "second"])
def test_ranks_with_a_copy_of_the_file_each_exchange_what_they_read(
    results: dict[str, Any], rank: str
) -> None:
    found, same = results[rank]["own copy"], results[rank][BY_ENGINE[0]]
    for name in ("torch.float32", "tokens"):
        assert torch.equal(found[name], same[name])
    assert found["bytes"] == same["bytes"]


@pytest.mark.parametrize("engine", ["off", "auto"])
def test_ranks_stop_at_the_same_token_and_none_leaves_the_others_waiting(
    results: dict[str, Any], engine: str
) -> None:
    first, second = (results[rank][f"streamed, engine {engine}"] for rank in ("first", "second"))
    assert first == second and first["again"] == first["whole"]
    assert first["stopped"] == first["whole"][: first["whole"].index(first["stop"])] != ""


def test_a_rank_holds_about_half(results: dict[str, Any]) -> None:
    for name in CASES:
        whole = results["alone"][name]["bytes"]
        for rank in ("first", "second"):  # norms are everywhere, and KV heads fewer than the ranks
            assert 0.45 * whole < results[rank][name]["bytes"] < 0.6 * whole


@pytest.mark.parametrize("rank", ["first", "second"])
def test_a_rank_reads_little_more_of_the_file_than_it_holds(results: dict[str, Any], rank: str) -> None:
    before, after, held = results[rank]["read"]
    if before > 0.1 * held:
        pytest.skip("this file system does not let go of a file's pages")
    assert held < after < 1.05 * held + (1 << 18)  # the system reads on behind the header
    assert held < 0.51 * (results["folder"] / "wide0.nstf").stat().st_size


def test_the_next_weights_are_decoded_while_the_sum_is_under_way(results: dict[str, Any]) -> None:
    assert any(decoded)  # those of bfloat16, which the reference multiplies


@pytest.mark.parametrize(("number", "rank", "message"), [
    (0, "first", "tensor_parallel=3, but there are 2 processes: give one number to both"),
    (1, "first", "o_proj.weight cannot be divided among 2 ranks: parts of 12 positions are no multiple of 8"),
    (2, "second", "no tensor parallel plan for models of type 'gpt2'"),
    (3, "first", "rank 1 reads another file than rank 0: give all the same"),
    (4, "first", "rank 1 could not load its part; its own message says why"),
    (4, "second", "missing.nstf"),
    (5, "first", "rank 1 could not load its part; its own message says why"),
    (5, "second", "no such code"),
])  # fmt: skip
def test_what_cannot_be_loaded_is_said_on_every_rank(
    results: dict[str, Any], number: int, rank: str, message: str
) -> None:
    assert message in results[rank]["refusals"][number]


@pytest.mark.parametrize("rank", ["first", "second"])
def test_no_rank_falls_back_to_transformers_alone(results: dict[str, Any], rank: str) -> None:
    tokens, used = results[rank]["fallback"]["all"]
    assert used == 1 and torch.equal(tokens, results["alone"]["llama, tied, biases"]["tokens"])
    tokens, used = results[rank]["fallback"]["one"]
    assert used == 0 and torch.equal(tokens, results["alone"]["llama, tied, biases"]["tokens"])


@pytest.mark.parametrize("rank", ["first", "second"])
def test_tokens_outside_of_the_vocabulary_are_refused(results: dict[str, Any], rank: str) -> None:
    assert results[rank]["outside"] == "a token id is outside of the 100 of the vocabulary"


def test_what_is_decoded_ahead_of_one_sum_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    method: Any = quantizers.method("int_grid")
    encoded = [method.encode(torch.ones(32, 64), method.Params(4, 32)) for _ in range(3)]
    following = tuple(SimpleNamespace(encoded=e) for e in encoded)
    monkeypatch.setattr(ahead, "choose", lambda *_: reference)
    monkeypatch.setattr(divided_modules, "MOST_BYTES", 2 * 32 * 64 * 2 + 1)
    x = torch.zeros(300, 64, dtype=torch.bfloat16)
    divided_modules.decode_following(following, x)
    assert [getattr(p, "ahead", None) is not None for p in following] == [True, True, False]


def test_alone_a_rank_waits_for_nobody() -> None:
    with Ranks(0, 2).alone():  # there is no group here
        assert Ranks(0, 2).sum(torch.ones(4)).tolist() == [1.0] * 4
        assert Ranks(0, 2).joined(torch.ones(1, 3), 4, 7).shape == (1, 7)
        Ranks(0, 2).start_sum(torch.ones(4)).wait()


def test_a_part_of_a_model_is_not_saved(results: dict[str, Any]) -> None:
    assert "loaded without tensor_parallel" in results["first"]["gemma 3"]["refused to save"]


def test_options_and_surroundings_that_do_not_fit_are_refused(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = results["folder"] / "0.nstf"
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        UsageError, match=r"needs 2 processes: start the program with `torchrun --nproc-per-node 2"
    ):
        nstf.runtime.load(path, tensor_parallel=2)
    with pytest.raises(UsageError, match="tensor_parallel is 0"):
        nstf.runtime.load(path, tensor_parallel=0)
    with pytest.raises(UsageError, match="attention plan does not run divided"):
        nstf.runtime.load(path, attention="planned", tensor_parallel=2)
    with pytest.raises(UsageError, match="kv_cache"):
        nstf.runtime.load(path, kv_cache="int8", tensor_parallel=2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_what_one_gives_by_graphs_with_the_sums_inside(tmp_path: Path) -> None:
    rank_cases.write_model(tmp_path / "larger.nstf", rank_cases.LARGER, 32)
    code_cases.write(tmp_path / "codes.nstf", "trellis")
    port = free_port()
    # Multicast needs rights on the fabric that a container may not have.
    settings = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    program = [sys.executable, rank_cases.__file__, str(tmp_path), "gpus"]
    ranks = [
        subprocess.Popen(program, env={**settings, **environment(rank, port), "LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    alone = rank_cases.on_gpus(tmp_path / "larger.nstf", 1)
    first, second = (torch.load(tmp_path / f"gpu{rank}.pt") for rank in (0, 1))
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-3)):
        whole, found = alone[str(dtype)].double(), first[str(dtype)].double()
        assert float((found - whole).norm() / whole.norm()) < bound
        assert torch.equal(first[str(dtype)], second[str(dtype)])
        assert torch.equal(first[f"tokens in {dtype}"], second[f"tokens in {dtype}"])
    assert torch.equal(first["tokens in torch.float32"], alone["tokens in torch.float32"])
    # Prompts of trellis codes, in bfloat16: their logits move by 1 % where some numbers round otherwise.
    one = rank_cases.prompts_on_gpus(tmp_path / "codes.nstf", 1)
    assert one["graphs"] == first["codes"]["graphs"] == second["codes"]["graphs"] == 1
    for whole, ours, theirs in zip(
        one["prompts"], first["codes"]["prompts"], second["codes"]["prompts"], strict=True
    ):
        assert torch.equal(ours, theirs)
        assert float((ours.double() - whole.double()).norm() / whole.double().norm()) < 2e-2
