"""The Viterbi search of the trellis format in plain torch: slow, on any device, and what the faster searches must give.

A tile is 256 weights and a circular stream of 64 q bits (q = `quarter_bits`: four times the bits per weight, 4 to 24),
least significant bit first. Step t shifts k_t = e_t - e_{t-1} bits in, e_t = floor((t + 1) q / 4); its state s_t is the
16 bits before e_t, so s_t = (s_{t-1} >> k_t) | (b_t << (16 - k_t)), and its value is codebook[s_t]. The stream is
circular: the state before step 0 is s_255 ("tail-biting"). A bitshift trellis after QTIP (Tseng et al. 2024).

Between two steps only M_t[j] = min over the k_t oldest bits a of the cost of state (j << k_t | a) is kept, j < 2^(16 - k_t);
the cost of s at step t is fma(d, d, M_t[s mod 2^(16 - k_t)]), d = x_t - codebook[s], and ties go to the lowest a. The
compiled search (kernels/cpu/trellis_search.cpp) rounds costs to 16 bits, and its codes are worse by up to half a percent;
above 3 bits, where values are in order, it looks at those near the target only (kernels/cpu/trellis_window.h).
"""

import torch
from torch import Tensor

TILE = 256
STATE_BITS = 16
# Steps on either side of the seam that the first pass looks at. A state forgets its past after 16 / rate steps.
SEAM = 48
MIN_QUARTER_BITS, MAX_QUARTER_BITS = 4, 24

# Back-pointers of one tile take up to 8 MiB.
_TILES_AT_ONCE = 8


def check(targets: Tensor, quarter_bits: int, codebook: Tensor) -> None:
    """ValueError unless the arguments are what every search takes."""
    if targets.dim() != 2 or targets.shape[1] != TILE or targets.dtype != torch.float32:
        raise ValueError(f"targets are {targets.dtype} {tuple(targets.shape)}, want float32 [tiles, {TILE}]")
    if codebook.shape != (1 << STATE_BITS,) or codebook.dtype != torch.float32:
        raise ValueError(f"the codebook is {codebook.dtype} {tuple(codebook.shape)}, want float32 [65536]")
    if codebook.device != targets.device:
        raise ValueError(f"the codebook is on {codebook.device}, the targets are on {targets.device}")
    if not MIN_QUARTER_BITS <= quarter_bits <= MAX_QUARTER_BITS:
        raise ValueError(f"quarter_bits is {quarter_bits}, want {MIN_QUARTER_BITS} to {MAX_QUARTER_BITS}")


def step_bits(position: int, quarter_bits: int) -> int:
    """k_t: the bits that the step at a position (any integer; a tile is circular) shifts in."""
    at = position % 4
    return (at + 1) * quarter_bits // 4 - at * quarter_bits // 4


def viterbi(targets: Tensor, quarter_bits: int, codebook: Tensor) -> Tensor:
    """Codes of the tail-biting path nearest to each tile: targets [tiles, 256] -> uint8 [tiles, 8 q].

    Nearest in sum_t (x_t - codebook[s_t])^2, among the paths through the seam state that a first pass over the steps
    around the seam prefers. Raises ValueError as `check` does.
    """
    check(targets, quarter_bits, codebook)
    if len(targets) == 0:
        return torch.empty(0, 8 * quarter_bits, dtype=torch.uint8, device=targets.device)
    parts = [
        codes_of_states(_states(part, quarter_bits, codebook), quarter_bits)
        for part in torch.split(targets, _TILES_AT_ONCE)
    ]
    return torch.cat(parts)


def codes_of_states(states: Tensor, quarter_bits: int) -> Tensor:
    """The bit stream of a tail-biting path: int64 [tiles, 256] -> uint8 [tiles, 8 q]."""
    byte = torch.arange(8 * quarter_bits, device=states.device)
    # Byte n lies in the state of the first step that ends at or after bit 8 n + 8.
    step = -(-32 * (byte + 1) // quarter_bits) - 1
    end = (step + 1) * quarter_bits // 4
    return (states[:, step] >> (8 * byte + STATE_BITS - end)).to(torch.uint8)


def states_of_codes(codes: Tensor, quarter_bits: int) -> Tensor:
    """The states along each path: uint8 [tiles, 8 q] -> int64 [tiles, 256]."""
    ring = codes.to(torch.int64)
    end = (torch.arange(TILE, device=codes.device) + 1) * quarter_bits // 4
    start = (end - STATE_BITS) % (64 * quarter_bits)
    word = torch.zeros(codes.shape[0], TILE, dtype=torch.int64, device=codes.device)
    for i in range(3):
        word |= ring[:, (start // 8 + i) % (8 * quarter_bits)] << (8 * i)
    return (word >> (start % 8)) & ((1 << STATE_BITS) - 1)


def _states(x: Tensor, quarter_bits: int, codebook: Tensor) -> Tensor:
    first = step_bits(0, quarter_bits)
    width = 1 << (STATE_BITS - first)
    least, back = _forward(x, range(-SEAM, SEAM), x.new_zeros(x.shape[0], width), quarter_bits, codebook)
    group = least.argmin(1, keepdim=True)
    seam = (group << first) | back[2 * SEAM - 1].gather(1, group)
    for t in range(SEAM - 1, -1, -1):
        seam = _previous(seam, t, back[t + SEAM - 1], quarter_bits)
    start = torch.full_like(least, float("inf")).scatter_(1, seam >> first, 0.0)
    _, back = _forward(x, range(TILE - 1), start, quarter_bits, codebook)
    states = [seam]
    for t in range(TILE - 1, 0, -1):
        states.append(_previous(states[-1], t, back[t - 1], quarter_bits))
    return torch.cat(states[::-1], 1)


def _forward(
    x: Tensor, steps: range, least: Tensor, quarter_bits: int, codebook: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """M after the steps, and for each the best oldest bits of the state before the next: uint8 [tiles, 2^(16-k)]."""
    back = []
    for t in steps:
        k, next_k = step_bits(t, quarter_bits), step_bits(t + 1, quarter_bits)
        distance = (x[:, t % TILE, None] - codebook).view(len(x), 1 << k, -1)
        cost = _squared_plus(distance, least[:, None, :])
        least, oldest = cost.view(len(x), -1, 1 << next_k).min(-1)
        back.append(oldest.to(torch.uint8))
    return least, back


def _previous(state: Tensor, t: int, oldest: Tensor, quarter_bits: int) -> Tensor:
    """s_{t-1} from s_t: int64 [tiles, 1]."""
    k = step_bits(t, quarter_bits)
    group = state & ((1 << (STATE_BITS - k)) - 1)
    return (group << k) | oldest.gather(1, group)


def _squared_plus(d: Tensor, m: Tensor) -> Tensor:
    """fma(d, d, m) in float32, rounded once; m >= 0.

    In float64 the square is exact and the sum is rounded to 53 bits. Rounding that to 24 bits goes wrong only where it
    lies halfway between two float32 numbers and was itself rounded: those sums move off the middle, towards the exact one.
    """
    square, m = d.double().square(), m.double()
    total = square + m
    halfway = (total.view(torch.int64) & 0x1FFFFFFF) == 0x10000000
    if bool(halfway.any()):
        part = total - square
        error = (square - (total - part)) + (m - part)
        nudge = torch.where(halfway, error.sign().nan_to_num(), 0.0).to(torch.int64)
        total = (total.view(torch.int64) + nudge).view(torch.float64)
    return total.float()
