"""Sums of a few numbers over the GPUs of one host, which write into each other's memory (kernels/triton/peers.py).

NCCL takes ten microseconds to start and end a sum inside of a graph, whatever its size; a token on two GPUs waits for two of
them a layer (docs/scale.md). The memory comes from torch's symmetric memory. Where there is none, NCCL sums everything.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from nstf.kernels.triton.linear import arch_of, unsuitable

if TYPE_CHECKING:
    from nstf.kernels.triton.peers import Peers

# Of a sum, in the words of 8 bytes that all other ranks are sent: above, NCCL is as fast.
MOST_WORDS = 1 << 17
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Told(Protocol):
    """Ranks that tell each other a word (runtime/ranks.py)."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def tell(self, word: bytes) -> list[bytes]:
        """What every rank says, at most 255 bytes each."""


@dataclass(frozen=True)
class PeerSums:
    """Memory of this GPU that the others write into. One sum at a time: a stream's.

    peers: for sums with the others; alone: this rank stands for all of them, in memory that no other knows.
    """

    peers: Peers
    alone: Peers
    arch: str
    memory: tuple[Tensor, Tensor]

    def takes(self, values: Tensor) -> bool:
        """Whether to sum these here: the same on all ranks, since their sizes and types are."""
        words = values.numel() * (self.peers.ranks - 1)
        return values.dtype in _TYPES and values.device.type == "cuda" and 0 < words <= MOST_WORDS

    def sum(self, values: Tensor) -> None:
        """Puts the sum over all ranks into the place of contiguous `values`: the same bits everywhere, added by rank in
        float32 and rounded once."""
        from nstf.kernels.triton.peers import peer_sum

        with torch.cuda.device(values.device):
            peer_sum(values, self.peers, self.arch)


# Of a group of processes, while there is one, by the number of ranks and the device.
_MADE: WeakKeyDictionary[Any, dict[tuple[int, int], PeerSums | None]] = WeakKeyDictionary()


def made(size: int, device: torch.device) -> PeerSums | None:
    """What `make` has made for so many ranks on this device, if it could."""
    if device.type != "cuda" or not dist.is_initialized():
        return None
    return _MADE.get(dist.group.WORLD, {}).get((size, device.index or 0))


def make(ranks: Told, device: torch.device) -> None:
    """Makes sums by memory among these ranks, or none on all of them where one cannot have them. All must call it."""
    if device.type != "cuda" or ranks.size < 2 or dist.get_backend() != "nccl":
        return
    found = _MADE.setdefault(dist.group.WORLD, {})
    if (ranks.size, device.index or 0) not in found:
        found[ranks.size, device.index or 0] = _agreed(ranks, device)


def _agreed(ranks: Told, device: torch.device) -> PeerSums | None:
    """On all ranks, or on none."""
    number = device.index or 0
    able = (
        not unsuitable(number) and arch_of(device).startswith("sm_") and ranks.size == dist.get_world_size()
    )
    said = ranks.tell(f"{_host()} {number}".encode() if able else b"-")
    # Whether each has a GPU of its own on one host, and this one reaches them.
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
    except Exception:  # what this torch, driver or container lacks has errors of many classes
        sums = None
    if b"no" in ranks.tell(b"yes" if sums else b"no"):  # all rooms are zero, and there
        return None
    assert sums is not None
    right = _adds_right(sums, device)
    return None if b"no" in ranks.tell(b"yes" if right else b"no") else sums


def _with_room(ranks: Told, device: torch.device) -> PeerSums:
    """Memory that all ranks reach. Raises errors of many classes where there is none."""
    import torch.distributed._symmetric_memory as symmetric

    from nstf.kernels.triton.peers import BLOCK, MOST_VALUES, Peers

    words = 2 * ranks.size * MOST_VALUES
    room: Tensor = symmetric.empty(words, dtype=torch.int64, device=device)
    world: Any = dist.group.WORLD
    handle = symmetric.rendezvous(room, world)
    own: Tensor = torch.zeros(words, dtype=torch.int64, device=device)
    room.zero_()
    # Alone, what is written for another rank arrives where that rank would have written.
    part = MOST_VALUES * own.element_size()
    mirrored = [own.data_ptr() + (other - ranks.rank) * part for other in range(ranks.size)]

    def peers(rooms: list[int]) -> Peers:
        calls = torch.zeros(MOST_VALUES // BLOCK, dtype=torch.int32, device=device)
        return Peers(torch.tensor(rooms, dtype=torch.int64, device=device), calls, ranks.rank, ranks.size)

    made = PeerSums(peers(list(handle.buffer_ptrs)), peers(mirrored), arch_of(device), (room, own))
    torch.cuda.synchronize(device)
    return made


def _adds_right(sums: PeerSums, device: torch.device) -> bool:
    """Whether sums are right: drivers have said that devices reach one another while what was written never came."""
    right, ranks = True, sums.peers.ranks
    for dtype in _TYPES:
        for turn in range(3):
            # Small whole numbers, which all types add exactly.
            base = (torch.arange(4096, device=device) + turn) % 13
            values = (base + sums.peers.rank).to(dtype)
            sums.sum(values)
            right &= torch.equal(values, (ranks * base + ranks * (ranks - 1) // 2).to(dtype))
    return right


def _host() -> str:
    """A name of this host since it was started."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
