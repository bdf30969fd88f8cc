"""All-reduces over the GPUs of one host, which write into each other's memory: small ones (kernels/triton/peers.py), and of
two GPUs the rows of a prompt (peer_rows.py).

NCCL takes about ten microseconds for a sum inside of a graph, even a small one, and a token on two GPUs waits for two sums a
layer (docs/scale.md). The memory is torch's symmetric memory. Where there is none, NCCL makes all sums.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from nstf.kernels.triton.linear import arch_of, unsuitable
from nstf.runtime.messages import Told

if TYPE_CHECKING:
    from nstf.kernels.triton.peer_rows import Twins
    from nstf.kernels.triton.peers import Peers

# Words of 8 bytes that a rank sends to all others for one sum. NCCL makes larger ones.
MOST_WORDS = 1 << 17
_log = logging.getLogger("nstf")
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class PeerSums:
    """What this GPU needs for sums by memory. One sum at a time: two streams must not sum at once.

    peers: for sums with the others. alone: this rank takes the place of all others, in memory of its own, for `Ranks.alone`;
    the sum is then `ranks` times the values. twins, twins_alone: the same for rows of prompts, of two ranks. memory: what
    must live as long as the addresses in these.
    """

    peers: Peers
    alone: Peers
    twins: Twins | None
    twins_alone: Twins | None
    arch: str
    memory: tuple[Any, ...]

    def takes(self, values: Tensor) -> bool:
        """Whether to sum these by memory. All ranks answer alike: it depends on number and type alone."""
        return self.takes_as_many(values.numel(), values)

    def takes_as_many(self, count: int, values: Tensor) -> bool:
        """The same for so many values of this type and device."""
        words = count * (self.peers.ranks - 1)
        return values.dtype in _TYPES and values.device.type == "cuda" and 0 < words <= MOST_WORDS

    def sum(self, values: Tensor) -> None:
        """Replaces contiguous `values` by their sum over all ranks: added in float32 in the order of ranks and rounded once,
        so the same bits everywhere."""
        from nstf.kernels.triton.peers import peer_sum

        with torch.cuda.device(values.device):
            peer_sum(values, self.peers, self.arch)


# By process group, while it lives, then by the number of ranks and the device's index. None: they cannot.
_MADE: WeakKeyDictionary[Any, dict[tuple[int, int], PeerSums | None]] = WeakKeyDictionary()


def made(size: int, device: torch.device) -> PeerSums | None:
    """What `make` made for `size` ranks and this device; None where it could not, or was not called."""
    if device.type != "cuda" or not dist.is_initialized():
        return None
    return _MADE.get(dist.group.WORLD, {}).get((size, _index(device)))


def make(ranks: Told, device: torch.device) -> None:
    """Sets up sums by memory among these ranks, on all of them or on none. All ranks must call it.

    Raises RuntimeError where the GPU fails; what one rank merely lacks leaves all sums to NCCL.
    """
    if device.type != "cuda" or ranks.size < 2 or dist.get_backend() != "nccl":
        return
    found, key = _MADE.setdefault(dist.group.WORLD, {}), (ranks.size, _index(device))
    if key not in found:
        found[key] = _agreed(ranks, torch.device("cuda", key[1]))


def _index(device: torch.device) -> int:
    """The number of a GPU; of `cuda` alone the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def _agreed(ranks: Told, device: torch.device) -> PeerSums | None:
    """The same answer on all ranks: sums, or None. device: with its index."""
    number = device.index or 0
    able = (
        not unsuitable(number) and arch_of(device).startswith("sm_") and ranks.size == dist.get_world_size()
    )
    said = ranks.tell(f"{_host()} {number}".encode() if able else b"-")
    # Each needs a GPU of its own on one host, and this GPU must reach the others.
    near = b"-" not in said and len({word.split()[0] for word in said}) == 1 and len(set(said)) == len(said)
    if near:
        others = [int(word.split()[1]) for word in said if int(word.split()[1]) != number]
        count = torch.cuda.device_count()
        near = all(n < count and torch.cuda.can_device_access_peer(device, n) for n in others)
    if b"no" in ranks.tell(b"yes" if near else b"no"):
        return None
    sums: PeerSums | None
    try:
        sums = _with_room(ranks, device)
    except Exception as error:  # what this torch, driver or container lacks has errors of many classes
        _log.info("NCCL makes all sums: %s", " ".join(str(error).split())[:300])
        sums = None
    # From here on all buffers exist and are zero, and every rank has compiled the kernels: none waits long for another.
    if b"no" in ranks.tell(b"yes" if sums else b"no"):
        return None
    assert sums is not None
    right = _adds_right(sums.peers, ranks.size * (ranks.size - 1) // 2, device)
    right = (sums.twins is None or _rows_right(sums.twins, ranks.rank, 1 - ranks.rank, device)) and right
    return None if b"no" in ranks.tell(b"yes" if right else b"no") else sums


def _with_room(ranks: Told, device: torch.device) -> PeerSums:
    """Memory that all ranks reach, tried without them. Raises errors of many classes where there is none, or where the
    kernels do not compile or add wrongly."""
    import torch.distributed._symmetric_memory as symmetric

    from nstf.kernels.triton.peers import BLOCK, MOST_VALUES, Peers

    words = 2 * ranks.size * MOST_VALUES
    room: Tensor = symmetric.empty(words, dtype=torch.int64, device=device)
    world: Any = dist.group.WORLD
    handle = symmetric.rendezvous(room, world)
    own: Tensor = torch.zeros(words, dtype=torch.int64, device=device)
    room.zero_()
    # Alone, a word for another rank must arrive where that rank would write its own.
    part = MOST_VALUES * own.element_size()
    mirrored = [own.data_ptr() + (other - ranks.rank) * part for other in range(ranks.size)]

    def peers(rooms: list[int]) -> Peers:
        calls = torch.zeros(MOST_VALUES // BLOCK, dtype=torch.int32, device=device)
        return Peers(torch.tensor(rooms, dtype=torch.int64, device=device), calls, ranks.rank, ranks.size)

    twins, twins_alone, kept = _twins(ranks, device) if ranks.size == 2 else (None, None, ())
    made = PeerSums(
        peers(list(handle.buffer_ptrs)), peers(mirrored), twins, twins_alone, arch_of(device),
        (room, handle, own, *kept),
    )  # fmt: skip
    right = _adds_right(made.alone, ranks.size * ranks.rank, device)
    if not right or (twins_alone and not _rows_right(twins_alone, ranks.rank, ranks.rank, device)):
        raise RuntimeError("sums by memory are wrong on this GPU alone")
    torch.cuda.synchronize(device)
    return made


def _twins(ranks: Told, device: torch.device) -> tuple[Twins, Twins, tuple[Any, ...]]:
    """(rows of prompts with the other rank, without it, what must live as long)."""
    import torch.distributed._symmetric_memory as symmetric

    from nstf.kernels.triton.peer_rows import MOST_ROWS, MOST_VALUES, Twins

    places, words = 2 * MOST_VALUES * 2, 2 * MOST_ROWS * 4
    room: Tensor = symmetric.empty(places + words, dtype=torch.uint8, device=device)
    world: Any = dist.group.WORLD
    handle: Any = symmetric.rendezvous(room, world)
    room.zero_()
    there: Tensor = handle.get_buffer(1 - ranks.rank, (places + words,), torch.uint8)

    def parts(memory: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        first, second = memory[:places].view(torch.int16).chunk(2)
        return (first, second), memory[places:].view(torch.int32).view(2, MOST_ROWS)

    def counts(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    (own, words_here), (theirs, words_there) = parts(room), parts(there)
    said = counts(2, MOST_ROWS)
    twins = Twins(own, theirs, words_here, words_there, counts(MOST_ROWS))
    return twins, Twins(own, own, said, said, counts(MOST_ROWS)), (room, there, handle)


def _rows_right(twins: Twins, rank: int, other: int, device: torch.device) -> bool:
    """Whether sums of rows are right, as `_adds_right` asks of small ones. rank: this one's number; other: that of the one
    who answers."""
    from nstf.kernels.triton.peer_rows import met_norm

    right, rows, width = True, 96, 512
    gain = torch.ones(width, device=device)
    for turn in (0, 1, 0, 1):
        base = (torch.arange(rows * width, device=device).view(rows, width) + turn) % 13
        y = (base + rank).to(torch.bfloat16)
        twins.place(turn, rows, width, y.dtype).copy_(y)
        h = torch.zeros(rows, width, device=device)
        with torch.cuda.device(device):
            met_norm(h, y, gain, 1e-6, twins, turn, arch_of(device))
        right &= torch.equal(h, (2 * base + rank + other).float())
    return right


def _adds_right(peers: Peers, others: int, device: torch.device) -> bool:
    """Whether sums with `peers` are right: drivers have reported peer access and then lost what was written. others: the sum
    of all ranks' numbers, as `peers` has them."""
    from nstf.kernels.triton.peers import peer_sum

    right = True
    for dtype in _TYPES:
        for turn in range(3):
            # Small whole numbers, which all types add exactly.
            base = (torch.arange(4096, device=device) + turn) % 13
            values = (base + peers.rank).to(dtype)
            with torch.cuda.device(device):
                peer_sum(values, peers, arch_of(device))
            right &= torch.equal(values, (peers.ranks * base + others).to(dtype))
    return right


def _host() -> str:
    """A name of this host that no other has: Linux gives it a new one at every start."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
