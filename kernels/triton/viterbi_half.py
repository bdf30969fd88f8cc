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


@dataclass(frozen=True, eq=False)
class Room:
    """What a search of some tiles at a time writes on its way: two searches side by side need one each."""

    launch: Launch
    history: Tensor  # int32 [tiles at a time, kept M of each, words]
    seams: Tensor
    ends: Tensor
    states: Tensor


def room_for(
    tiles: int,
    quarter_bits: int,
    device: torch.device,
    largest: int | None = None,
    launch: Launch | None = None,
) -> Room:
    """Room to search so many tiles, of at most `largest` bytes (None: 2 GiB) and a sixteenth of the device's memory."""
    processors, shared = _sizes(_index(device))
    launch = launch or launch_for(tiles, quarter_bits, processors)
    if _shared_bytes(quarter_bits, launch.tiles) > shared:
        launch = Launch(1, launch.every)
    words = 1 << (STATE_BITS - 1 - quarter_bits // 4)
    history = _history(
        tiles, (TILE // launch.every, words), processors * launch.tiles, largest or HISTORY_BYTES, device
    )
    wave = len(history)
    seams, ends = (torch.empty(wave, dtype=torch.int32, device=device) for _ in range(2))
    return Room(launch, history, seams, ends, torch.empty(wave, TILE, dtype=torch.int32, device=device))


def viterbi(targets: Tensor, quarter_bits: int, codebook: Tensor, launch: Launch | None = None) -> Tensor:
    """Codes of a tail-biting path close to each tile: targets [tiles, 256] -> uint8 [tiles, 8 quarter_bits].

    The codebook is rounded to float16 in the first half of the search, so its numbers should be far below 200 and far above
    1e-3, as those of unit variance are. Raises ValueError as kernels.torch.viterbi.check does.
    """
    check(targets, quarter_bits, codebook)
    tiles, device = targets.shape[0], targets.device
    codes = torch.empty(tiles, 8 * quarter_bits, dtype=torch.uint8, device=device)
    if tiles:
        room = room_for(tiles, quarter_bits, device, launch=launch)
        search(
            targets.contiguous(), quarter_bits, codebook.contiguous(), room, codes, torch.empty_like(targets)
        )
    return codes


def warm_up(quarter_bits: int, codebook: Tensor) -> None:
    """Compiles the search of a rate, for few tiles and for many, by a search of one."""
    device = codebook.device
    processors, _ = _sizes(_index(device))
    for launch in {launch_for(tiles, quarter_bits, processors) for tiles in (1, processors + 1)}:
        viterbi(torch.zeros(1, TILE, device=device), quarter_bits, codebook, launch)


def search(
    targets: Tensor, quarter_bits: int, codebook: Tensor, room: Room, codes: Tensor, values: Tensor
) -> None:
    """`viterbi` into `codes` uint8 [tiles, 8 quarter_bits], and what they stand for into `values` [tiles, 256].

    All are contiguous. Nothing waits for the device and nothing is allocated, so that it can be captured in a graph.
    """
    from nstf.kernels.triton.viterbi_forward import WARPS, forward

    tiles, launch, wave = targets.shape[0], room.launch, len(room.history)
    processors, _ = _sizes(_index(targets.device))
    constants = {"Q": quarter_bits, "SEAM": SEAM, "TILE": TILE, "EVERY": launch.every}
    with torch.cuda.device(targets.device):
        for first in range(0, tiles, wave):
            own = slice(first, first + wave)
            part = targets[own]
            programs = min(processors, -(-len(part) // launch.tiles))
            for whole in (False, True):
                forward[(programs,)](
                    part,
                    codebook,
                    room.seams,
                    room.ends,
                    room.history,
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
                    room.seams,
                    room.ends,
                    room.history.view(torch.float16),
                    room.states,
                    codes[own],
                    WHOLE=whole,
                    **constants,
                    BITS=STATE_BITS,
                    num_warps=1,
                )
            path = room.states[: len(part)].view(-1)
            torch.index_select(codebook, 0, path, out=values[own].view(-1))


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


def _history(tiles: int, shape: tuple[int, int], at_once: int, largest: int, device: torch.device) -> Tensor:
    """Room for the kept M of some tiles, int32 [tiles, *shape]: a multiple of those that run at once, unless of all.

    Asking how much memory is free takes longer than searching a hundred tiles: so half as much is tried where it is not.
    """
    share = int(HISTORY_SHARE * torch.cuda.get_device_properties(device).total_memory)
    room = min(largest, share) // (4 * shape[0] * shape[1])
    wave = tiles if room >= tiles else room // at_once * at_once or max(room, 1)
    while True:
        try:
            return torch.empty(wave, *shape, dtype=torch.int32, device=device)
        except torch.OutOfMemoryError:
            if wave == 1:
                raise
            wave = -(-wave // 2)
