"""The search in float16: its layouts as numbers, the way back interpreted on a CPU, both halves compiled and run on a GPU.

Gluon has no interpreter, so the forward half is imitated here in torch.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
half = pytest.importorskip("nstf.kernels.triton.viterbi_half")
if not half._has_gluon():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)

from nstf.kernels.formats import trellis as form  # noqa: E402
from nstf.kernels.torch import viterbi as reference  # noqa: E402
from nstf.kernels.trellis_encode import TileSearch  # noqa: E402
from nstf.kernels.triton import aot, viterbi_forward  # noqa: E402
from nstf.kernels.triton import viterbi as exact  # noqa: E402
from nstf.kernels.triton.architecture import ARCHITECTURES  # noqa: E402
from nstf.kernels.triton.spec import KernelSpec  # noqa: E402

# What `forward` does, a tile at a time: M in float16, less its minimum every 8 steps, and kept every EVERY-th.
INTERPRETED = """
import torch
from nstf.kernels.formats import trellis as form
from nstf.kernels.torch import viterbi as reference
from nstf.kernels.triton.viterbi_back import back
from nstf.kernels.triton.viterbi_half import launch_for

q, SEAM = {q}, 16
EVERY = launch_for(1, q, 132).every
codebook = form.codebook(q)
x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
bits = lambda t: reference.step_bits(t, q)

def forward(m, begin, end):
    history = torch.zeros(1, 256 // EVERY, 1 << (16 - q // 4), dtype=torch.float16)
    for t in range(begin, end):
        if t % 8 == 0:
            m = (m - m.min()).half()
        if t % EVERY == 0:
            history[:, (t - begin) // EVERY, : m.shape[1]] = m
        d = (x[:, t % 256, None].half() - codebook.half()).view(1, 1 << bits(t), -1)
        cost = (d.float().square() + m.float()[:, None]).half()
        m = cost.view(1, -1, 1 << bits(t + 1)).amin(2)
    return m, history

def go_back(history, ends, whole):
    constants = dict(WHOLE=whole, Q=q, SEAM=SEAM, EVERY=EVERY, BITS=16, TILE=256)
    back[(1,)](x, codebook, seams, ends, history, states, codes, **constants)

seams, states = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 256, dtype=torch.int32)
codes = torch.zeros(1, 8 * q, dtype=torch.uint8)
width = 1 << (16 - bits(0))
m, history = forward(torch.zeros(1, width).half(), -SEAM, SEAM)
go_back(history, m.float().argmin(1).int(), False)
start = torch.full((1, width), float("inf")).half()
start[0, int(seams) >> bits(0)] = 0
go_back(forward(start, 0, 256)[1], seams, True)

path = reference.states_of_codes(codes, q)
assert torch.equal(path, states.long()), "the codes are not those of the states"
assert int(path[0, 255]) == int(seams), "the path does not go through the seam's state"
error = lambda path: float((x - codebook[path]).square().sum())
reference.SEAM = SEAM
best = error(reference.states_of_codes(reference.viterbi(x, q, codebook), q))
assert abs(error(path) / best - 1) < {tolerance}, (error(path), best)
"""


def forward_spec(quarter_bits: int, tiles: int = 264) -> KernelSpec:
    launch = half.launch_for(tiles, quarter_bits, 132)
    types = {"targets": "*fp32", "codebook": "*fp32", "seams": "*i32", "ends": "*i32", "history": "*i32"}
    constants = {"Q": quarter_bits, "SEAM": 48, "TILE": 256, "EVERY": launch.every, "RENORM": half.RENORM}
    return KernelSpec(
        f"viterbi {quarter_bits}",
        viterbi_forward.forward,
        {**types, "tiles": "i32", "whole": "i32"},
        {**constants, "T": launch.tiles},
        divisible=tuple(types),
        num_warps=viterbi_forward.WARPS.value,
        num_stages=1,
        options={"maxnreg": half._REGISTERS},
    )


@pytest.mark.slow
@pytest.mark.parametrize("quarter_bits", [7, 10, 12, 24])
def test_the_interpreted_way_back_finds_a_path_as_good_as_the_best(quarter_bits: int) -> None:
    program = INTERPRETED.format(q=quarter_bits, tolerance=2e-3)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("largest", range(1, 7))
def test_every_state_has_one_place(largest: int) -> None:
    own, lane, warp = viterbi_forward.bits_of.fn(largest)
    assert sorted(own + lane + warp) == list(range(15))
    assert (len(own), len(lane), 1 << len(warp)) == (6, 5, viterbi_forward.WARPS.value)
    # The pairs of old bits are made in a thread, and minima over them need no other warp.
    assert {0, largest - 1} <= {*own}
    assert not {*range(largest)} & {*warp}


@pytest.mark.parametrize("quarter_bits", [8, 10, 12, 16, 24])
def test_the_forward_half_compiles_and_changes_hands_once_a_step(quarter_bits: int) -> None:
    spec = forward_spec(quarter_bits)
    report = aot.compile_spec(spec, ARCHITECTURES["sm_90"]).report("sm_90")
    assert report.vector_registers <= half._REGISTERS
    assert report.lds_bytes <= half._shared_bytes(quarter_bits, spec.constants["T"])
    if report.listing == "sass":
        assert report.loop.barriers == 4
        assert report.loop.scratch <= 10, "the codebook does not fit into registers"


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_the_forward_half_compiles_for_other_nvidia_gpus(target: str) -> None:
    row = replace(ARCHITECTURES["sm_90"], target=target)
    assert len(aot.compile_spec(forward_spec(12), row).binary) > 1000


def test_many_tiles_share_a_program_and_few_do_not() -> None:
    assert half.launch_for(36, 12, 132).tiles == 1
    assert half.launch_for(1000, 12, 132).tiles == 2
    assert half.launch_for(1000, 6, 132).tiles == 1, "the two M of a tile take 128 KiB"
    for quarter_bits in range(4, 25):
        assert 4 % half.launch_for(36, quarter_bits, 132).every == 0


def test_it_does_not_run_without_an_nvidia_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not half.suits(torch.device("cpu"), 12)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not half.suits(torch.device("cuda"), 12)


def errors(x: torch.Tensor, quarter_bits: int, codebook: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    path = reference.states_of_codes(codes, quarter_bits)
    return (x - codebook[path]).double().square().sum(1)


def on_gpu(quarter_bits: int, tiles: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(quarter_bits)
    x = scale * torch.randn(tiles, 256, generator=generator, device="cuda")
    return x, form.codebook(quarter_bits).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("quarter_bits", range(4, 25))
def test_the_error_is_that_of_the_exact_search_within_a_thousandth(quarter_bits: int) -> None:
    x, codebook = on_gpu(quarter_bits, 4000)
    codes = half.viterbi(x, quarter_bits, codebook)
    found = errors(x, quarter_bits, codebook, codes).sum()
    best = errors(x, quarter_bits, codebook, exact.viterbi(x, quarter_bits, codebook)).sum()
    assert abs(float(found / best) - 1) < 1e-3
    assert torch.equal(codes, half.viterbi(x, quarter_bits, codebook)), "not the same from run to run"


@pytest.mark.gpu
@pytest.mark.parametrize("quarter_bits", [8, 12, 16, 24])
def test_targets_far_outside_the_codebook_do_no_harm(quarter_bits: int) -> None:
    x, codebook = on_gpu(quarter_bits, 500, scale=6.0)
    x[3, 100] = 1e6
    codes = half.viterbi(x, quarter_bits, codebook)
    x[3, 100] = 0.0
    found = errors(x, quarter_bits, codebook, codes)
    best = errors(x, quarter_bits, codebook, exact.viterbi(x, quarter_bits, codebook))
    others = torch.arange(len(x), device="cuda") != 3
    assert abs(float(found[others].sum() / best[others].sum()) - 1) < 1e-3
    assert float(found[3] / best[3]) < 1.5


@pytest.mark.gpu
@pytest.mark.parametrize("quarter_bits", [10, 12, 20])
def test_codes_do_not_depend_on_the_launch(quarter_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, codebook = on_gpu(quarter_bits, 301)
    every = half.launch_for(1, quarter_bits, 132).every
    want = half.viterbi(x, quarter_bits, codebook)
    for launch in (half.Launch(1, every), half.Launch(2, every)):
        assert torch.equal(half.viterbi(x, quarter_bits, codebook, launch), want), launch
    monkeypatch.setattr(half, "HISTORY_BYTES", 1)
    assert torch.equal(half.viterbi(x, quarter_bits, codebook), want), "one tile after the other"


@pytest.mark.gpu
@pytest.mark.parametrize("room", [1, 64 << 20, 2 << 30])
@pytest.mark.parametrize("quarter_bits", [7, 12, 18])
def test_a_search_with_a_room_of_its_own_gives_the_same_codes_and_their_values(quarter_bits, room) -> None:
    x, codebook = on_gpu(quarter_bits, 301)
    search = TileSearch(301, quarter_bits, x.device, room)
    codes, values = search(x)
    assert torch.equal(codes, half.viterbi(x, quarter_bits, codebook))
    assert torch.equal(values, form.tile_values(codes, quarter_bits))
