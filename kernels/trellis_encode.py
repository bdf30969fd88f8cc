"""The Viterbi search of the trellis format on the device that the targets are on.

They differ in how they round costs and, on a CPU above 3 bits, in which states they look at: on Gaussian tiles their errors
are the same within a few thousandths.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from nstf.kernels import triton
from nstf.kernels.cpu import ext
from nstf.kernels.formats import trellis as form
from nstf.kernels.torch import viterbi

_THREADS: ContextVar[int | None] = ContextVar("search_threads", default=None)


@contextmanager
def search_threads(count: int) -> Iterator[None]:
    """In this thread, searches on the CPU take so many threads instead of torch's number; the codes are the same."""
    token = _THREADS.set(count)
    try:
        yield
    finally:
        _THREADS.reset(token)


def warm_up(
    device: torch.device, codebook: Callable[[int], Tensor], rates: Iterable[int], workers: int
) -> None:
    """Compiles the searches of some rates (quarter bits) for a GPU, `workers` at a time: each takes a second.

    codebook: quarter bits -> float32 [65536]. Triton keeps what it compiled on disk for the next time.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def one(quarter_bits: int) -> None:
        book = codebook(quarter_bits).to(device)
        if side_by_side_pays(device, quarter_bits):
            from nstf.kernels.triton import viterbi_half

            viterbi_half.warm_up(quarter_bits, book)
        else:
            for tiles in (1, processors + 1):
                encode_tiles(torch.zeros(tiles, viterbi.TILE, device=device), quarter_bits, book)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, rates))


def encode_tiles(targets: Tensor, quarter_bits: int, codebook: Tensor) -> Tensor:
    """The nearest trellis codes: targets [tiles, 256] float32 -> uint8 [tiles, 8 quarter_bits].

    codebook: float32 [65536], on the same device. kernels/torch/viterbi.py defines the search. GPUs use Triton, those from
    NVIDIA in float16, the CPU the compiled extension with torch's number of threads; without them torch does it, hundreds of
    times slower. Raises ValueError for other shapes, dtypes and rates. Targets must be finite.
    """
    viterbi.check(targets, quarter_bits, codebook)
    if targets.is_cuda and triton.AVAILABLE:
        from nstf.kernels.triton import viterbi as on_gpu
        from nstf.kernels.triton import viterbi_half as on_nvidia

        if on_nvidia.suits(targets.device, quarter_bits):
            return on_nvidia.viterbi(targets, quarter_bits, codebook)
        return on_gpu.viterbi(targets, quarter_bits, codebook)
    if targets.device.type == "cpu" and hasattr(ext, "trellis_viterbi"):
        codes = torch.empty(targets.shape[0], 8 * quarter_bits, dtype=torch.uint8)
        ext.trellis_viterbi(
            targets.contiguous(),
            quarter_bits,
            codebook.contiguous(),
            codes,
            _THREADS.get() or torch.get_num_threads(),
        )
        return codes
    return viterbi.viterbi(targets, quarter_bits, codebook)


def side_by_side_pays(device: torch.device, quarter_bits: int) -> bool:
    """Whether searches of parts of the tiles gain from running at a time: on NVIDIA GPUs, whose search has two halves."""
    if device.type != "cuda" or not triton.AVAILABLE:
        return False
    from nstf.kernels.triton import viterbi_half

    return viterbi_half.suits(device, quarter_bits)


class TileSearch:
    """The search of one rate for equally many tiles again and again; several may run side by side.

    What an NVIDIA GPU writes on its way has its place from the start: such a search `allocates_nothing` beside its results
    and can be captured. Other GPUs' searches ask for memory with every call.
    """

    def __init__(self, tiles: int, quarter_bits: int, device: torch.device, room: int) -> None:
        """room: bytes that the search may take beside its results."""
        self.quarter_bits = quarter_bits
        self._codebook = form.codebook(quarter_bits, device)
        self._room = None
        if side_by_side_pays(device, quarter_bits):
            from nstf.kernels.triton import viterbi_half

            self._room = viterbi_half.room_for(tiles, quarter_bits, device, room)

    @property
    def allocates_nothing(self) -> bool:
        return self._room is not None

    def __call__(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """targets [tiles, 256] -> (codes uint8 [tiles, 8 quarter_bits], what they stand for, like the targets)."""
        if self._room is None:
            codes = encode_tiles(targets, self.quarter_bits, self._codebook)
            return codes, form.tile_values(codes, self.quarter_bits)
        from nstf.kernels.triton import viterbi_half

        viterbi.check(targets, self.quarter_bits, self._codebook)
        codes = targets.new_empty(len(targets), 8 * self.quarter_bits, dtype=torch.uint8)
        values = torch.empty_like(targets)
        viterbi_half.search(targets, self.quarter_bits, self._codebook, self._room, codes, values)
        return codes, values
