"""Sums by memory between two GPUs, and who gets none; the kernel itself is in tests/kernels/test_peers.py."""

import logging
import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nstf.kernels.formats import EncodedTensor, Node, array_specs
from nstf.kernels.formats.tree import format_of
from nstf.kernels.linear import linear
from nstf.runtime import peer_sums
from nstf.runtime.ranks import Ranks


def graph_of(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The step, captured after it ran once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def rows_of_prompts(ranks: Ranks, device: torch.device) -> list[str]:
    """Many sums in turn, with a graph, with work of unlike lengths between them: neither rank may overtake the other."""
    from nstf.kernels.triton.peer_rows import met_norm

    twins = ranks.twins(device)
    if twins is None:
        return ["no sums of rows"]
    rows, size = 512, 4096
    gain, h = torch.ones(size, device=device), torch.zeros(rows, size, device=device)
    y = torch.empty(rows, size, dtype=torch.bfloat16, device=device)
    busy, count = torch.randn(2048, 2048, device=device), torch.zeros(1, device=device)

    def step() -> None:
        for i in range(6):
            if (i + ranks.rank) % 3 == 0:
                busy.matmul(busy)
            count.add_(1)
            y.copy_((count * (ranks.rank + 1)).remainder(101).expand_as(y))
            twins.place(i % 2, rows, size, y.dtype).copy_(y)
            met_norm(h, y, gain, 1e-6, twins, i % 2, "sm_90")
            h.remainder_(1009)

    graph = graph_of(step)
    h.zero_()
    count.zero_()
    torch.cuda.synchronize()
    value = at = 0
    for turn in range(200):
        graph.replay()
        for _ in range(6):
            at += 1
            value = (value + at % 101 + 2 * at % 101) % 1009
        if not bool((h == value).all()):
            return [f"rows, replay {turn}"]
    return []


def on_two_cards(rank: int, port: int, results: Path) -> None:
    """What a rank finds wrong, one line each."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    ranks, wrong = Ranks(rank, 2), []
    peer_sums.make(ranks, device)
    if peer_sums.made(2, device) is None:
        wrong.append("no sums by memory")
    random = torch.Generator(device).manual_seed(rank)
    for size in (1, 255, 8192, 1 << 17, (1 << 17) + 1):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(size, generator=random, device=device).to(dtype)
            gathered = [torch.empty_like(values) for _ in range(2)]
            torch.distributed.all_gather(gathered, values)
            expected = (gathered[0].float() + gathered[1].float()).to(dtype)
            if not torch.equal(ranks.sum(values), expected):
                wrong.append(f"{size} of {dtype}")
    for shape, width, total in (
        ((5,), 3, 5),
        ((1, 1), 64128, 128256),
        ((2, 3), 7, 13),
        ((16, 1), 64128, 128256),
    ):
        own = min(width, total - rank * width)
        part = torch.randn(*shape[:-1], own, generator=random, device=device).to(torch.bfloat16)
        both = part.new_zeros(2, *shape[:-1], width)
        torch.distributed.all_gather(list(both), torch.nn.functional.pad(part, (0, width - own)).contiguous())
        expected = torch.cat(list(both), dim=-1)[..., :total]
        if not torch.equal(ranks.joined(part, width, total), expected):
            wrong.append(f"joined {shape} of {total}")
    with ranks.alone():
        ranks.sum(torch.ones(300, device=device))
        ranks.joined(torch.ones(3, device=device), 3, 5)
    wrong += rows_of_prompts(ranks, device)
    # Inside of a graph, with work of unlike lengths between sums: neither rank may overtake the other.
    x = torch.zeros(5000, device=device)
    busy = torch.randn(1024, 1024, device=device)

    def step() -> None:
        for i in range(8):
            if (i + rank) % 2:
                busy.matmul(busy)
            x.add_(rank + 1)
            ranks.sum(x)
            x.remainder_(1009)

    graph = graph_of(step)
    x.zero_()
    torch.cuda.synchronize()
    value = 0
    for turn in range(300):
        graph.replay()
        for _ in range(8):
            value = (2 * value + 3) % 1009
        if not bool((x == value).all()):
            wrong.append(f"replay {turn}")
            break
    results.write_text("\n".join(wrong))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_cards_sum_right_in_graphs_and_outside(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=on_two_cards, args=(r, port, tmp_path / str(r))) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(180)
        if process.is_alive():
            process.kill()
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == ["", ""]


def test_a_cpu_has_none() -> None:
    peer_sums.make(Ranks(0, 2), torch.device("cpu"))
    assert peer_sums.made(2, torch.device("cpu")) is None and Ranks(0, 2).peers(torch.device("cpu")) is None


def test_sums_belong_to_a_process_group_and_to_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        pass

    world = SimpleNamespace(WORLD=Group())
    monkeypatch.setattr(
        peer_sums,
        "dist",
        SimpleNamespace(is_initialized=lambda: True, get_backend=lambda: "nccl", group=world),
    )
    asked: list[torch.device] = []
    monkeypatch.setattr(peer_sums, "_agreed", lambda ranks, device: asked.append(device) or "sums")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for _ in range(2):
        peer_sums.make(Ranks(1, 2), torch.device("cuda"))
    assert asked == [torch.device("cuda", 1)]
    assert peer_sums.made(2, torch.device("cuda")) == peer_sums.made(2, torch.device("cuda", 1)) == "sums"
    assert peer_sums.made(2, torch.device("cuda", 0)) is peer_sums.made(3, torch.device("cuda", 1)) is None
    world.WORLD = Group()  # the old group was destroyed
    assert peer_sums.made(2, torch.device("cuda", 1)) is None


@pytest.mark.parametrize(
    ("said", "near"),
    [
        ([b"host 0", b"host 1"], True),
        ([b"host 0", b"other 1"], False),
        ([b"host 0", b"host 0"], False),
        ([b"host 0", b"-"], False),
    ],
)
def test_ranks_need_a_gpu_each_on_one_host(
    said: list[bytes], near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one cannot, none makes memory that the others would wait for."""
    answers: list[bytes] = []

    def tell(word: bytes) -> list[bytes]:
        answers.append(word)
        return said if len(answers) == 1 else [word, word]

    made: list[Any] = []
    monkeypatch.setattr(peer_sums, "unsuitable", lambda index: "")
    monkeypatch.setattr(peer_sums, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(peer_sums, "_host", lambda: "host")
    monkeypatch.setattr(peer_sums.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        peer_sums, "_with_room", lambda *given: made.append(1) or SimpleNamespace(peers=None, twins=None)
    )
    monkeypatch.setattr(peer_sums, "_adds_right", lambda *given: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    ranks: Any = SimpleNamespace(rank=0, size=2, tell=tell)
    found = peer_sums._agreed(ranks, torch.device("cuda", 0))
    assert (found is not None) == near == bool(made)
    assert answers[:2] == [b"host 0", b"yes" if near else b"no"]


def test_memory_that_cannot_be_shared_leaves_sums_to_nccl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("no\nsymmetric memory")

    answers: list[bytes] = []

    def tell(word: bytes) -> list[bytes]:
        answers.append(word)
        return [b"host 0", b"host 1"] if len(answers) == 1 else [word, word]

    monkeypatch.setattr(peer_sums, "unsuitable", lambda index: "")
    monkeypatch.setattr(peer_sums, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(peer_sums.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(peer_sums, "_with_room", fails)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    ranks: Any = SimpleNamespace(rank=0, size=2, tell=tell)
    with caplog.at_level(logging.INFO, "nstf"):
        assert peer_sums._agreed(ranks, torch.device("cuda", 0)) is None
    assert answers[1:] == [b"yes", b"no"] and "NCCL makes all sums: no symmetric memory" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int", "trellis"])
def test_a_product_meets_the_others_on_its_way_to_the_norm(kind: str) -> None:
    """One GPU in the place of both: what the other rank writes and says is there before."""
    from nstf.kernels.torch.decode_step import add_norm
    from nstf.kernels.triton.peer_rows import MOST_ROWS, MOST_VALUES, Twins
    from nstf.runtime.decoder_glue import Given, Glue
    from nstf.runtime.stacking import Matrix

    rows, shape, device, dtype = 512, (8192, 4096), torch.device("cuda"), torch.bfloat16
    params = {"bits": 4, "group": 128} if kind == "int" else {"quarter_bits": (12,)}
    encoded = random_matrix(kind, params, shape, device)
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, shape[1], generator=random, device=device).to(dtype)
    h, gain = (
        torch.randn(rows, shape[0], generator=random, device=device),
        torch.ones(shape[0], device=device),
    )
    glue = Glue(device, 1e-5, dtype)
    for turn in (0, 1):
        counts = [torch.zeros(n, MOST_ROWS, dtype=torch.int32, device=device) for n in (2, 2, 1)]
        places = torch.zeros(4, MOST_VALUES, dtype=torch.int16, device=device)
        twins = Twins((places[0], places[1]), (places[2], places[3]), counts[0], counts[1], counts[2][0])
        other = torch.randn(rows, shape[0], generator=random, device=device).to(dtype)
        places[turn, : other.numel()] = other.flatten().view(torch.int16)
        counts[0][turn] = 1
        matrix = Matrix(encoded, None, twins=lambda *_, t=twins: t)
        stream, ours = h.clone(), h.clone()
        found = glue.onto(ours, matrix, Given(x), None, gain, (), turn)
        own = linear(x, encoded)
        expected = add_norm(stream, (own.float() + other.float()).to(dtype), gain, 1e-5, dtype)
        assert torch.equal(ours, stream) and found.squares is None
        torch.testing.assert_close(found.values, expected, atol=1e-2, rtol=1e-2)
        assert torch.equal(twins.place(turn, rows, shape[0], dtype), own)
        assert bool((counts[1][turn, :rows] == 1).all()) and not bool(counts[1][turn, rows:].any())


def random_matrix(
    kind: str, params: dict[str, Any], shape: tuple[int, int], device: torch.device
) -> EncodedTensor:
    """Random codes, and scales near one."""
    tree = Node(kind, format_of(kind).Params(**params))
    generator = torch.Generator().manual_seed(1)
    arrays = {
        path: torch.randint(256, spec.shape, generator=generator, dtype=torch.uint8)
        if spec.dtype == torch.uint8
        else (torch.rand(spec.shape, generator=generator) + 0.5).to(spec.dtype)
        for path, spec in array_specs(tree, shape).items()
    }
    return EncodedTensor(tree, shape, {name: array.to(device) for name, array in arrays.items()})
