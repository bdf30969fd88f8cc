"""Fits the tables of the `shuffle` format (kernels/formats/shuffle_tables.py) to N(0, 1): about a minute a rate on one core.

    python benchmarks/shuffle_tables.py 12 [--starts 40] [--seed 21]

Lloyd's iterations from random starts: the Viterbi search finds the symbols of fresh samples, and least squares the
entries that are best for them, A and B together. The best starts go on with more samples; then entries are rounded to
levels of a size that is searched, so that sums are 0 to 63 around 31.5, and fitted again with rounding. Prints
entries in hexadecimal, the size of a level and the mean squared error on other samples.
"""

import argparse
import math

import torch
from torch import Tensor

from nstf.kernels.cpu import ext
from nstf.kernels.formats import shuffle
from nstf.quantizers.shuffle import MSE

COLS = 16
# Integer costs of a squared error of 1 (kernels/torch/shuffle_search.py).
COST = 6400.0
LEVELS = 63


def search(x: Tensor, tables: Tensor, q: int) -> tuple[Tensor, Tensor]:
    """(values, codes) of the nearest paths to x [rows, 16]; tables: float32 [phases, 2, 16]."""
    rows = len(x)
    values, ones = torch.empty(rows, COLS), torch.ones(rows)
    codes = torch.empty(rows // shuffle.GROUP, 2 * q, COLS // 2, dtype=torch.uint8)
    threads = torch.get_num_threads()
    feedback = torch.zeros(COLS, COLS)
    ext.shuffle_round(x, x, ones, ones * COST, feedback, q, tables.contiguous(), values, codes, threads)
    return values, codes


def places(codes: Tensor, q: int) -> tuple[Tensor, Tensor]:
    """Which entries of A and of B each weight has: int64 [rows, 16] twice."""
    steps = torch.stack([codes & 15, codes >> 4], -1).flatten(2).flatten(0, 1).long()  # [groups * 2 q, 16]
    number = torch.arange(len(steps)) % (shuffle.SEGMENT // shuffle.GROUP * 2 * q)

    def back(by: int) -> Tensor:
        return torch.where((number >= by)[:, None], steps.roll(by, 0), 0)

    end, second = (torch.tensor(part) for part in shuffle.ends(q))
    at = (torch.arange(len(codes))[:, None] * 2 * q + end).flatten()
    a, b, c = steps[at], back(1)[at], back(2)[at]
    twice = second.repeat(len(codes))[:, None]
    return torch.where(twice, a ^ b, a ^ c), torch.where(twice, a ^ c, b)


def fitted(x: Tensor, codes: Tensor, tables: Tensor, q: int) -> Tensor:
    """The entries that are best for these codes, by least squares; a little towards those there are."""
    first, second = places(codes, q)
    out = tables.double().clone()
    for p in range(len(tables)):
        mine = torch.arange(len(x)) % len(tables) == p
        u, v, wanted = first[mine].flatten(), second[mine].flatten(), x[mine].flatten().double()
        both = torch.bincount(u * 16 + v, minlength=256).view(16, 16).double()
        normal = torch.zeros(32, 32, dtype=torch.float64)
        normal[:16, :16], normal[16:, 16:] = torch.diag(both.sum(1)), torch.diag(both.sum(0))
        normal[:16, 16:], normal[16:, :16] = both, both.T
        right = torch.cat([torch.bincount(i, wanted, 16) for i in (u, v)])
        normal += 0.5 * torch.eye(32)
        right += 0.5 * out[p].flatten()
        out[p] = torch.linalg.solve(normal, right).view(2, 16)
    return out.float()


def error(x: Tensor, tables: Tensor, q: int) -> float:
    return float((x - search(x, tables, q)[0]).square().mean())


def rounded(tables: Tensor, step: float) -> Tensor:
    """Entries as integers of at least 0 whose sums are at most 63 and stand for their distance from 31.5."""
    least = tables[:, 1].amin(1, keepdim=True)
    second = ((tables[:, 1] - least) / step).round()
    first = ((tables[:, 0] + least) / step + shuffle.CENTRE).round()
    return torch.stack([first.clamp_min(0).minimum(LEVELS - second.amax(1, keepdim=True)), second], 1)


def values_of(levels: Tensor, step: float) -> Tensor:
    return (levels - torch.tensor([shuffle.CENTRE, 0.0])[:, None]) * step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("quarter_bits", type=int)
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=21)
    given = parser.parse_args()
    q, phases = given.quarter_bits, 16 // math.gcd(given.quarter_bits, 16)
    generator = torch.Generator().manual_seed(given.seed)

    def sample(rows: int) -> Tensor:
        return torch.randn(rows, COLS, generator=generator)

    test = torch.randn(8192, COLS, generator=torch.Generator().manual_seed(99))
    quantiles = torch.distributions.Normal(0, 1).icdf((torch.arange(16) + 0.5) / 16)
    starts = []
    for _ in range(given.starts):
        share = 0.45 + 0.5 * float(torch.rand(1, generator=generator))
        tables = torch.stack(
            [
                quantiles[torch.randperm(16, generator=generator)] * math.sqrt(s)
                for _ in range(phases)
                for s in (share, 1 - share)
            ]
        ).view(phases, 2, 16)
        for _ in range(20):
            x = sample(512 * min(4, 1 + phases // 4))
            tables = fitted(x, search(x, tables, q)[1], tables, q)
        starts.append((error(test[:2048], tables, q), tables))
    starts.sort(key=lambda s: s[0])
    best = (math.inf, torch.empty(0))
    for _, tables in starts[:3]:
        for _ in range(25):
            x = sample(4096)
            tables = fitted(x, search(x, tables, q)[1], tables, q)
        best = min(best, (error(test, tables, q), tables), key=lambda b: b[0])
    trials = [(step, rounded(best[1], step)) for step in (0.07 * 1.03**i for i in range(28))]
    scored = [(error(test, values_of(levels, step), q), step, levels) for step, levels in trials]
    lost, step, levels = min(scored, key=lambda s: s[0])
    for _ in range(6):
        x = sample(8192)
        again = fitted(x, search(x, values_of(levels, step), q)[1], values_of(levels, step), q)
        for other in (0.98 * step, step, 1.02 * step):
            found = rounded(again, other)
            trial = error(test, values_of(found, other), q)
            if trial < lost:
                lost, step, levels = trial, other, found
    final = error(
        torch.randn(1 << 15, COLS, generator=torch.Generator().manual_seed(5)), values_of(levels, step), q
    )
    gap = 0.5 * math.log2(final) + q / 4
    print(
        f"{q} quarter bits: level {step:.5f}, error {final:.4g} ({gap:.3f} bit from the bound; stored tables {MSE[q]:.4g})"
    )
    print(bytes(levels.flatten().to(torch.uint8).tolist()).hex())


if __name__ == "__main__":
    main()
