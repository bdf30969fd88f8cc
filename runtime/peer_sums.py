"""Sums of a few numbers over the GPUs of one host, each reading the others' memory: torch's symmetric memory.

A sum of a token's activations is over sooner than NCCL has started its own: inside a graph the difference is most of what
decoding on several GPUs loses (docs/scale.md). Where it is not to be had, NCCL sums everything.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Of a sum: above, reading everything from everyone takes longer than NCCL's rings.
MOST_BYTES = 1 << 20
_TYPES = (torch.float32, torch.bfloat16)
# What torch's kernel reads at once.
_STEP = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")

# What a rank says, at most 255 bytes -> what all say.
Tell = Callable[[bytes], list[bytes]]


class PeerSums:
    """Memory of this GPU that the others read. One sum at a time: a stream's."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        """All ranks must make theirs together. Raises RuntimeError where the GPUs do not reach each other's memory."""
        import torch.distributed._symmetric_memory as symmetric

        # Multicast needs rights on the fabric that a container may not have, and is not used here.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._room: Tensor = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        world: Any = dist.group.WORLD
        self._group: str = world.group_name
        symmetric.rendezvous(self._room, world)
        self._check(device, ranks)

    def takes(self, values: Tensor) -> bool:
        """Whether to sum these here: the same on all ranks, since their sizes and types are."""
        return values.dtype in _TYPES and 0 < values.nbytes <= MOST_BYTES and values.nbytes % _STEP == 0

    def sum(self, values: Tensor) -> None:
        """Puts the sum over all ranks into the place of contiguous `values`: the same bits everywhere, added by rank."""
        flat = values.view(-1)
        mine = flat if flat.data_ptr() % _STEP == 0 else flat.clone()
        room = self._room[: flat.nbytes].view(flat.dtype)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(room, mine, "sum", self._group, mine)
        if mine is not flat:
            flat.copy_(mine)

    def __deepcopy__(self, memo: object) -> PeerSums:
        """Itself: what the others read is this memory."""
        return self

    def _check(self, device: torch.device, ranks: int) -> None:
        """Raises RuntimeError for a wrong sum: drivers have said that devices reach one another while reads gave zeros."""
        for dtype in _TYPES:
            for turn in range(3):
                # Small whole numbers, which both types add exactly.
                base = (torch.arange(4096, device=device) + turn) % 13
                values = (base + dist.get_rank()).to(dtype)
                self.sum(values)
                if not torch.equal(values, (ranks * base + ranks * (ranks - 1) // 2).to(dtype)):
                    raise RuntimeError("a sum over the GPUs' memory is wrong")


def peer_sums(device: torch.device, ranks: int, tell: Tell) -> PeerSums | None:
    """Sums by memory among these ranks, or None on all of them where one of them cannot have them. All must call it.

    tell: how ranks tell each other a word.
    """
    own = f"{_host()} {device.index or 0}".encode() if _known(device) else b"-"
    said = tell(own)
    if not _near(own, said, device):
        return _agreed(None, tell)
    try:
        made = PeerSums(device, ranks)
    except Exception:  # what this torch, driver or container lacks has errors of many classes
        made = None
    return _agreed(made, tell)


def _known(device: torch.device) -> bool:
    """Whether this torch has such sums for a device."""
    return device.type == "cuda" and hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out")


def _near(own: bytes, said: list[bytes], device: torch.device) -> bool:
    """Whether all ranks have GPUs of their own on this host, which this one reaches."""
    hosts, numbers = zip(*(word.partition(b" ")[::2] for word in said), strict=True)
    if b"-" in said or set(hosts) != {own.partition(b" ")[0]} or len(set(numbers)) < len(said):
        return False
    here, others = device.index or 0, [int(n) for n in numbers]
    count = torch.cuda.device_count()
    return all(n < count and (n == here or torch.cuda.can_device_access_peer(here, n)) for n in others)


def _agreed(made: PeerSums | None, tell: Tell) -> PeerSums | None:
    return made if all(word == b"yes" for word in tell(b"no" if made is None else b"yes")) else None


def _host() -> str:
    """The same for the processes of one running system, and for no others."""
    boot = _BOOT.read_text().strip() if _BOOT.is_file() else ""
    return f"{socket.gethostname()}/{boot}"
