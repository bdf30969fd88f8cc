"""The Viterbi search of kernels/torch/viterbi.py on NVIDIA GPUs, in float16: several times as fast as viterbi.py.

Its codes are a path of the trellis, circular as the reference's, and the same from run to run, but not always the
reference's: where two paths are nearly as good, float16 may prefer the other. The squared error of many tiles is that of
the reference within a thousandth. Forward (viterbi_forward.py) and back (viterbi_back.py) are launched twice: for the steps
around the seam, which give the state that the tile starts from, and for the whole tile. Nothing waits for the device.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import triton
from torch import Tensor

from nstf.kernels.torch.viterbi import SEAM, STATE_BITS, TILE, check
from nstf.kernels.triton.viterbi_back import back

# Steps between two subtractions from M.
RENORM = 8
# Bytes of M that are kept at once, and the share of a device's memory: enough tiles that the way back of one is hidden
# behind those of others.
HISTORY_BYTES = 2 << 30
HISTORY_SHARE = 1 / 16
_REGISTERS = 128  # of a thread: all that a multiprocessor has for 512


@dataclass(frozen=True)
class Launch:
    """How the search is laid out on the device. The codes do not depend on it, but for `every`."""

    tiles: int  # that a program searches at a time
    every: int  # steps from one M that is kept to the next


def launch_for(tiles: int, quarter_bits: int, processors: int) -> Launch:
    """A launch for so many tiles on a device of so many multiprocessors, from sweeps on an H200.

    The ways back from one M to the next are 2^every-th of the bits of a step: up to 256 of them are tried by one warp.
    """
    every = 4 if quarter_bits <= 8 else 2 if quarter_bits <= 16 else 1
    # While one tile's M changes hands, the other's is computed: 5 to 10 percent, unless it takes registers away.
    return Launch(2 if tiles > processors and quarter_bits >= 12 else 1, every)


def suits(device: torch.device, quarter_bits: int) -> bool:
    """Whether this search runs there: on NVIDIA GPUs of compute capability 8.0 or above, given a Triton with Gluon.

    Two M have to fit into shared memory: below 2 bits a weight they take 128 KiB.
    """
    if device.type != "cuda" or torch.version.cuda is None or triton.knobs.runtime.interpret:
        return False
    if not _has_gluon() or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return _shared_bytes(quarter_bits, 1) <= _sizes(_index(device))[1]


def viterbi(targets: Tensor, quarter_bits: int, codebook: Tensor, launch: Launch | None = None) -> Tensor:
    """Codes of a tail-biting path close to each tile: targets [tiles, 256] -> uint8 [tiles, 8 quarter_bits].

    The codebook is rounded to float16 in the first half of the search, so its numbers should be far below 200 and far above
    1e-3, as those of unit variance are. Raises ValueError as kernels.torch.viterbi.check does.
    """
    from nstf.kernels.triton.viterbi_forward import WARPS, forward

    check(targets, quarter_bits, codebook)
    tiles, device = targets.shape[0], targets.device
    codes = torch.empty(tiles, 8 * quarter_bits, dtype=torch.uint8, device=device)
    if tiles == 0:
        return codes
    targets, codebook = targets.contiguous(), codebook.contiguous()
    processors, shared = _sizes(_index(device))
    launch = launch or launch_for(tiles, quarter_bits, processors)
    if _shared_bytes(quarter_bits, launch.tiles) > shared:
        launch = Launch(1, launch.every)
    words = 1 << (STATE_BITS - 1 - quarter_bits // 4)
    history = _history(tiles, (TILE // launch.every, words), processors * launch.tiles, device)
    wave = len(history)
    seams, ends = (torch.empty(wave, dtype=torch.int32, device=device) for _ in range(2))
    states = torch.empty(wave, TILE, dtype=torch.int32, device=device)
    constants = {"Q": quarter_bits, "SEAM": SEAM, "TILE": TILE, "EVERY": launch.every}
    with torch.cuda.device(device):
        for first in range(0, tiles, wave):
            part, found = targets[first : first + wave], codes[first : first + wave]
            programs = min(processors, -(-len(part) // launch.tiles))
            for whole in (False, True):
                forward[(programs,)](
                    part,
                    codebook,
                    seams,
                    ends,
                    history,
                    len(part),
                    int(whole),
                    **constants,
                    RENORM=RENORM,
                    T=launch.tiles,
                    num_warps=WARPS.value,
                    maxnreg=_REGISTERS,
                )
                back[(len(part),)](
                    part,
                    codebook,
                    seams,
                    ends,
                    history.view(torch.float16),
                    states,
                    found,
                    WHOLE=whole,
                    **constants,
                    BITS=STATE_BITS,
                    num_warps=1,
                )
    return codes


@cache
def _has_gluon() -> bool:
    try:
        return find_spec("triton.experimental.gluon.language") is not None
    except ModuleNotFoundError:
        return False


def _shared_bytes(quarter_bits: int, tiles: int) -> int:
    """The two M of each tile, and what reductions among warps take."""
    return tiles * 2 * (2 << (STATE_BITS - quarter_bits // 4)) + 128


@cache
def _sizes(index: int) -> tuple[int, int]:
    """Multiprocessors of a device, and the bytes of shared memory that a program may take."""
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _history(tiles: int, shape: tuple[int, int], at_once: int, device: torch.device) -> Tensor:
    """Room for the kept M of some tiles, int32 [tiles, *shape]: a multiple of those that run at once, unless of all.

    Asking how much memory is free takes longer than searching a hundred tiles: so half as much is tried where it is not.
    """
    share = int(HISTORY_SHARE * torch.cuda.get_device_properties(device).total_memory)
    room = min(HISTORY_BYTES, share) // (4 * shape[0] * shape[1])
    wave = min(tiles, max(room // at_once * at_once, 1))
    while True:
        try:
            return torch.empty(wave, *shape, dtype=torch.int32, device=device)
        except torch.OutOfMemoryError:
            if wave == 1:
                raise
            wave = -(-wave // 2)
