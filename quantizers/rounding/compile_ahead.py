"""Compiles the kernels that a conversion needs on a GPU, in a process of its own, whose results Triton keeps on disk.

    python -P -m nstf.quantizers.rounding.compile_ahead DEVICE WORKERS

Compiling is Python in large part. In threads of the conversion it took the interpreter from opening the model, which is
Python too and waited for it after every file that it read: 19 s instead of 8.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from nstf.kernels.formats import trellis as form
from nstf.kernels.torch.viterbi import MAX_QUARTER_BITS, MIN_QUARTER_BITS
from nstf.kernels.trellis_encode import warm_up
from nstf.quantizers import shuffle
from nstf.quantizers.rounding.factor import factor
from nstf.quantizers.rounding.ldlq import ldlq
from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.sweep import sweep, sweep_with_errors

# Columns of the trial matrices: of a whole row, more than the kernel for narrow groups takes.
COLS = 512
UNIFORM, TABLE = Levels(4, scale="u8"), Levels(4, table=(-1.0, -0.5, 0.0, 0.5, 1.0), scale="u8")
# Around these rates most files have most of their codes.
MIDDLE = 12
# Of `shuffle`: with and without steps at which two rows end.
SHUFFLED = (12, 16)


def rounding(device: torch.device) -> Iterator[Callable[[], object]]:
    """What launches each kernel of scalar formats and of `shuffle` once, those of estimates first."""
    weight, importance = torch.ones(4, COLS, device=device), torch.ones(COLS, device=device)
    for levels in (UNIFORM, TABLE):
        for group in (32, 0):
            yield partial(sweep_with_errors, weight, levels, group, importance)
    fed = factor(torch.eye(COLS, device=device))
    for levels in (UNIFORM, TABLE):
        yield partial(sweep, weight, levels, 32, importance, fed)
    for group in (32, 16, 8):  # 16, 32 and 64 of them: what the refit of scales is compiled for
        yield partial(ldlq, weight, UNIFORM, group, fed)
    for quarter_bits in SHUFFLED:
        yield partial(shuffle.encode, weight, shuffle.Params(quarter_bits))


def main(device: torch.device, workers: int) -> None:
    """Compiles everything, side by side."""

    def quietly(work: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):  # whoever uses that kernel will say what is wrong
            work()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(quietly, rounding(device)))
    if device.type == "cuda":
        rates = sorted(range(MIN_QUARTER_BITS, MAX_QUARTER_BITS + 1), key=lambda q: abs(q - MIDDLE))
        warm_up(device, form.codebook, rates, workers)


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), int(sys.argv[2]))
