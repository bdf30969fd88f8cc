"""The processes that run one model together, and what they tell each other: torch.distributed, started by torchrun.

NCCL between GPUs, gloo between CPUs. Sums and joined vocabularies are the same numbers on every rank, bit for bit: what
one rank decides by them, all do.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nstf.errors import NstfError, UnsupportedError, UsageError
from nstf.runtime import peer_sums
from nstf.runtime.messages import direct

if dist.is_available():
    # transformers imports it with the first model. Its functions keep the group that there is by then as a default, which
    # ending the group no longer frees: gloo's threads would run while Python ends, and have ended the process (SIGABRT).
    import torch.distributed.nn.functional

if TYPE_CHECKING:
    from nstf.kernels.triton.peer_rows import Twins
    from nstf.kernels.triton.peers import Peers

Result = TypeVar("Result")
_ALONE: ContextVar[bool] = ContextVar("nstf_alone", default=False)
# What torchrun states as numbers, and the largest that can be.
_NUMBERS = {"RANK": 1 << 20, "WORLD_SIZE": 1 << 20, "MASTER_PORT": 65535}
_STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class OtherFailed(NstfError):
    """Another rank failed; its own message says why."""


class _Done:
    """A sum that needs no waiting for."""

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class Ranks:
    """This process among those of torch.distributed's default group."""

    rank: int
    size: int
    group: Any = None  # of the first `size` processes, where there are more

    def sum(self, values: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """The sum over all ranks, in the place of `values`. meanwhile: work that needs no sum, done while it is under way.

        On a GPU the sum runs on a stream of NCCL's own and the current one waits for it at the end, so that what
        `meanwhile` launches runs beside it; on a CPU gloo has threads of its own. Small sums take less time than starting
        that, and `meanwhile` runs after them (runtime/peer_sums.py, runtime/messages.py).
        """
        values = values.contiguous()
        if _ALONE.get():
            return values
        sums = peer_sums.made(self.size, values.device)
        box = sums if sums is not None and sums.takes(values) else direct(self, values, 0)
        if box is not None:
            box.sum(values)
            if meanwhile is not None:
                meanwhile()
            return values
        if meanwhile is None:
            dist.all_reduce(values, group=self.group)
            return values
        under_way = self.start_sum(values)
        meanwhile()
        under_way.wait()
        return values

    def start_sum(self, values: Tensor) -> Any:
        """Starts the sum over all ranks in the place of contiguous `values`, which its `wait()` completes."""
        if _ALONE.get():
            return _Done()
        return dist.all_reduce(values, group=self.group, async_op=True)

    def peers(self, device: torch.device) -> Peers | None:
        """What a kernel needs to sum over all ranks; None where GPUs do not write into each other's memory."""
        sums = peer_sums.made(self.size, device)
        if sums is None:
            return None
        return sums.alone if _ALONE.get() else sums.peers

    def twins(self, device: torch.device) -> Twins | None:
        """What a kernel needs to add rows of a prompt over two ranks; None for more ranks, and where `peers` gives
        None."""
        sums = peer_sums.made(self.size, device)
        if sums is None:
            return None
        return sums.twins_alone if _ALONE.get() else sums.twins

    def joined(self, part: Tensor, width: int, total: int) -> Tensor:
        """The ranks' parts side by side: [..., up to width] of each -> [..., total]. Only the last ones may be narrower.

        Few values on GPUs are the sum of all parts, each among zeros in its place: NCCL takes longer.
        """
        before, count = self.rank * width, part.shape[:-1].numel() * total
        sums = None if _ALONE.get() else peer_sums.made(self.size, part.device)
        # Not where a part lies beyond the end.
        if sums is not None and width * (self.size - 1) < total and sums.takes_as_many(count, part):
            whole = torch.nn.functional.pad(part, (before, total - before - part.shape[-1])).contiguous()
            sums.sum(whole)
            return whole
        missing = width - part.shape[-1]
        if missing:
            part = torch.nn.functional.pad(part, (0, missing))
        flat = part.reshape(-1, width).contiguous()
        if not _ALONE.get() and (box := direct(self, flat, 1)) is not None:
            parts = box.exchange(flat)
        else:
            parts = flat.new_zeros(self.size, *flat.shape)
            if not _ALONE.get():
                dist.all_gather(list(parts), flat, group=self.group)
        side_by_side = parts.transpose(0, 1).reshape(*part.shape[:-1], self.size * width)
        return side_by_side[..., :total]

    def read_together(
        self, arrays: Mapping[str, Tensor], copy: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Arrays of a mapped file, of each of which every rank reads an equal piece and is sent the others' by them. copy:
        takes a piece to the device on which they are exchanged.

        Raises OtherFailed where a rank failed since the last exchange: inside of `agree`.
        """
        ready = {name: self._piece(array, copy) for name, array in arrays.items()}
        self._all_well()  # what may fail is done: nobody waits in vain
        for own, pieces in ready.values():
            dist.all_gather(list(pieces), own, group=self.group)
        return {
            name: ready[name][1].view(-1)[: array.nbytes].view(array.dtype).view(array.shape)
            for name, array in arrays.items()
        }

    def _piece(self, array: Tensor, copy: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(the bytes that this rank reads of an array, room for those of all)."""
        stored = array.reshape(-1).view(torch.uint8)
        each = -(-len(stored) // self.size)
        own = copy(stored[self.rank * each : (self.rank + 1) * each])
        own = torch.nn.functional.pad(own, (0, each - len(own))) if len(own) < each else own
        return own, own.new_empty(self.size, each)

    def agree(self, work: Callable[[], Result], same: Callable[[Result], str]) -> Result:
        """What `work` gives, once it went well on every rank. same: the hexadecimal digest of what all must have alike.

        Raises what `work` raises, and OtherFailed where it failed on another rank, so that none waits for one that is gone.
        """
        try:
            result = work()
        except OtherFailed:
            raise  # told by the rank that failed, to all at once
        except Exception:
            self.tell(b"")
            raise
        own = bytes.fromhex(same(result))
        for rank, other in enumerate(self._all_well(own)):
            if other != own:
                raise UsageError(f"rank {rank} reads another file than rank {self.rank}: give all the same")
        return result

    def all_can(self, ready: bool) -> bool:
        """Whether all ranks are ready: what none may do alone, all do or none does."""
        return all(word == b"yes" for word in self.tell(b"yes" if ready else b"no"))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Sums and joined vocabularies are made without the others, and are wrong: to try what may fail on this rank."""
        before = _ALONE.set(True)
        try:
            yield
        finally:
            _ALONE.reset(before)

    def _all_well(self, word: bytes = b"well") -> list[bytes]:
        """What all ranks say who are in `agree`. Raises OtherFailed where the work of one failed."""
        said = self.tell(word)
        if b"" in said:
            raise OtherFailed(f"rank {said.index(b'')} could not load its part; its own message says why")
        return said

    def tell(self, word: bytes) -> list[bytes]:
        """What every rank says, at most 255 bytes each. Not by pickles, as torch's own exchange of objects."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        own = torch.tensor([len(word), *word, *[0] * (255 - len(word))], dtype=torch.uint8, device=device)
        said = own.new_empty(self.size, len(own))
        dist.all_gather(list(said), own, group=self.group)
        return [bytes(row[1 : 1 + row[0]]) for row in said.tolist()]


def join(count: int, device: torch.device) -> Ranks:
    """This process as one of `count`, with a connection to the others.

    Raises UsageError outside torchrun and where it started another number, UnsupportedError for a torch without the means.
    """
    if not dist.is_available():
        raise UnsupportedError("this torch is built without torch.distributed: load without tensor_parallel")
    if dist.is_initialized():
        found = dist.get_world_size()
    else:
        if any(name not in os.environ for name in _STARTED):
            raise UsageError(
                f"tensor_parallel={count} needs {count} processes: start the program with "
                f"`torchrun --nproc-per-node {count} program.py`"
            )
        rank, found, _ = (_number(name, most) for name, most in _NUMBERS.items())
        if rank >= found:
            raise UsageError(f"RANK is {rank}, but WORLD_SIZE {found}: start the program with torchrun")
    if found != count:
        raise UsageError(f"tensor_parallel={count}, but there are {found} processes: give one number to both")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        try:
            backend = "nccl" if on_gpu else "gloo"
            dist.init_process_group(
                backend,
                store=_store(rank, count),
                rank=rank,
                world_size=count,
                device_id=device if on_gpu else None,
            )
            if not on_gpu:
                atexit.register(_leave)
        # A port that is taken, say, or the others' absence.
        except (RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise NstfError(f"the {count} processes of tensor_parallel do not meet: {reason}") from error
    return Ranks(dist.get_rank(), count)


def _store(rank: int, count: int) -> Any:
    """Where ranks of one host meet: torch's own store takes connections at all addresses of the machine. None for torch's:
    of several hosts, or under torchrun, which has made one."""
    address, port = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
    if address != "127.0.0.1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    made: Any = getattr(dist, "TCPStore")  # noqa: B009  (torch's stubs leave it out)
    wait = dist.constants.default_pg_timeout  # as torch's own, for slow starts
    if rank:
        return made(address, int(port), count, False, wait)
    with socket.create_server((address, int(port))) as server:
        return made(address, int(port), count, True, wait, master_listen_fd=server.detach())


def _leave() -> None:
    """Ends gloo's threads before Python ends. NCCL has none that call Python, and would wait for captured graphs."""
    if dist.is_initialized():
        gc.collect()  # what waits for a sum may lie in a cycle, such as the traceback of an error
        dist.destroy_process_group()


def _number(name: str, most: int) -> int:
    """A number that torchrun leaves in the environment. Raises UsageError."""
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= most):
        raise UsageError(f"{name} is {text[:40]!r} in the environment: start the program with torchrun")
    return int(text)


def use_own_cores(rank: int, ranks: int) -> None:
    """Leaves this process its share of the cores that it may use, where there is one for each of the host's `ranks`.

    Threads of two processes that wake each other on one core wait for a turn, several milliseconds. Hyperthreads of a core,
    and cores of a socket, stay together where shares allow it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0), key=place_of)
    each = len(cores) // ranks
    if each:
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])


def place_of(processor: int) -> tuple[int, int, int]:
    """(socket, core, number) of a processor of Linux; those of one core differ in the last alone."""
    topology = Path(f"/sys/devices/system/cpu/cpu{processor}/topology")
    try:
        socket, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, processor, processor
    return socket, core, processor


def local_device(device: str | torch.device) -> str | torch.device:
    """`cuda` without a number is the GPU of this process's place on its host."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if str(device) == "cuda" else device
