"""What a conversion may use: devices, threads, and bytes of memory, decided before anything starts."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nstf.errors import UsageError

# Share of what is free that is taken without a bound from the user.
DEFAULT_SHARE = 0.75
# Shares of the bound: weights that stay where they are used, activations that wait, scratch of one step of encoding.
WEIGHTS_SHARE = 0.05  # on a GPU, of one model; two run side by side. A CPU reads the mapped file
ACTIVATIONS_SHARE = {"cpu": 0.3, "cuda": 0.3}
# Scratch of encoding: a share of a GPU; on a CPU each thread has its own.
SCRATCH_SHARE = 0.15
CPU_SCRATCH = 1 << 28
# What waits and what is encoded at a time decide about a file's bytes. So that these do not depend on what happens to be
# free, a conversion without a stated bound takes these amounts, on a CPU (64 windows of 512 tokens need 0.8 GB for a
# 135 M model) and on a GPU (7.5 GB for 8 B); less only where not even these are free.
STANDARD_ACTIVATIONS = {"cpu": 2 << 30, "cuda": 8 << 30}
STANDARD_SCRATCH = 4 << 30
# What compiling one more kernel beside the others takes of the host's memory.
COMPILE_BYTES = 300 << 20
# What Python, torch and transformers take before a model is touched.
BASE_BYTES = 600 << 20
# The same with CUDA's context and the compiled kernels.
GPU_BASE_BYTES = 1800 << 20
SMALLEST_BYTES = 1 << 30
# Tokens of one forward call: a GPU wants more work for each launch.
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 8192}
_NAMED = re.compile(r"cuda(?::(\d+(?:,\d+)*))?")

log = logging.getLogger("nstf")


@dataclass(frozen=True)
class Machine:
    """devices: where work is done, the first one leads; host_bytes, gpu_bytes: memory to stay within (each GPU's);
    threads: of the CPU; stated: whether the bound on the memory of the device that computes is the user's."""

    devices: tuple[torch.device, ...]
    threads: int
    host_bytes: int
    gpu_bytes: int
    stated: bool = False

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def memory_bytes(self) -> int:
        """The bound on the memory of the device that computes."""
        return self.gpu_bytes if self.on_gpu else self.host_bytes

    @property
    def resident_bytes(self) -> int:
        """Weights that may stay on a GPU between two uses."""
        return int(WEIGHTS_SHARE * self.gpu_bytes) if self.on_gpu else 0

    @property
    def activation_bytes(self) -> int:
        """Activations of all batches that wait before a layer: a share of a stated bound, else a standard amount, or
        what there is where memory is short."""
        return self._at_most(ACTIVATIONS_SHARE[self.device.type], STANDARD_ACTIVATIONS[self.device.type])

    @property
    def short(self) -> bool:
        """Whether less is free than a conversion without a stated bound takes: other bytes may come out then."""
        return not self.stated and self.activation_bytes < STANDARD_ACTIVATIONS[self.device.type]

    @property
    def scratch_bytes(self) -> int:
        """What encoding matrices side by side may take beyond the matrices."""
        return self._at_most(SCRATCH_SHARE, STANDARD_SCRATCH) if self.on_gpu else CPU_SCRATCH

    @property
    def tokens_per_batch(self) -> int:
        return TOKENS_PER_BATCH[self.device.type]

    @property
    def compilers(self) -> int:
        """Kernels that another process may compile side by side; 0 where the memory does not suffice for one."""
        room = (self.host_bytes - 2 * GPU_BASE_BYTES) // COMPILE_BYTES
        return max(0, min((self.threads + 1) // 2, room))

    @property
    def core_each(self) -> bool:
        """Whether what runs side by side takes a core each, where memory leaves room for one alone as well: torch adds up in
        another order with several threads, and how much memory is free changes no bytes."""
        return not self.on_gpu and self.threads > 1

    def workers(self, bytes_each: int) -> int:
        """Threads that may work at a time when each needs so much memory; at least one. A GPU is driven by one."""
        return 1 if self.on_gpu else self.workers_on_host(bytes_each)

    def workers_on_host(self, bytes_each: int) -> int:
        """The same of threads whose work stays on the processor."""
        room = int((1 - ACTIVATIONS_SHARE["cpu"]) * max(0, self.host_bytes - self._base_bytes))
        return max(1, min(self.threads, room // max(1, bytes_each)))

    @contextmanager
    def one_core_each(self) -> Iterator[Callable[..., Iterable[Any]]]:
        """A `map` whose calls run side by side on a CPU, a core each, without gradients; on a GPU one after the other."""
        if self.on_gpu:
            yield map
            return
        with torch_threads(1), each_of(self.threads) as each:
            yield lambda work, *items: each(torch.no_grad()(work), *items)

    def _at_most(self, share: float, standard: int) -> int:
        room = int(share * self._spendable())
        return room if self.stated else min(room, standard)

    def _spendable(self) -> int:
        return self.gpu_bytes if self.on_gpu else max(0, self.host_bytes - self._base_bytes)

    @property
    def _base_bytes(self) -> int:
        return GPU_BASE_BYTES if self.on_gpu else BASE_BYTES


@contextmanager
def each_of(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` with so many threads; one is the caller's own: torch takes milliseconds to set a new one up."""
    if workers == 1:
        yield map
        return
    with ThreadPoolExecutor(workers) as pool:
        yield pool.map


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """An operation of torch takes so many threads inside; threads that have run some before keep what they had."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine(device: str, memory: int | None, gpu_memory: int | None, threads: int | None) -> Machine:
    """The machine as the options ask for it. Raises UsageError for a device that is not there or a bound too small."""
    # Sizes vary from layer to layer: without it a part of the bound is lost between them. Read at the first use of a GPU.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # What cuBLAS needs to give the same bits every time (see `repeatable`); of the size that it takes by itself.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Activations in pages of 2 MB where the system offers them: a twentieth less processor time, and fewer holes in the heap
    # (docs/conversion.md). Read at the first tensor.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    devices = _devices(device)
    for what, size in (("memory", memory), ("GPU memory", gpu_memory)):
        if size is not None and size < SMALLEST_BYTES:
            raise UsageError(f"a bound of {size} bytes of {what} is too small: give at least 1GiB")
    host = memory or int(DEFAULT_SHARE * free_host_bytes())
    gpu = 0
    if devices[0].type == "cuda":
        free = min(torch.cuda.mem_get_info(d)[0] for d in devices)
        totals = [torch.cuda.get_device_properties(d).total_memory for d in devices]
        gpu = min(gpu_memory, *totals) if gpu_memory else int(DEFAULT_SHARE * free)
        keep_within(gpu, devices)
    elif gpu_memory is not None and device != "auto":
        raise UsageError("a bound on GPU memory needs a GPU: leave it out, or choose another device")
    stated = (gpu_memory if gpu else memory) is not None
    return Machine(devices, _usable_threads(threads or _cores()), host, gpu, stated)


def _usable_threads(wanted: int) -> int:
    """One in a process forked from one that has converted: OpenMP, by which torch uses several, waits there without end for
    the threads that it had before the fork."""
    if _first_process() == os.getpid() or wanted == 1:
        return wanted
    log.warning("one thread instead of %d: this process was forked from one that has converted", wanted)
    return 1


@cache
def _first_process() -> int:
    """The process that asked first. A forked one remembers its parent's answer."""
    return os.getpid()


def keep_within(gpu_bytes: int, devices: Sequence[torch.device]) -> None:
    """Beyond the bound an allocation fails instead of taking what others need."""
    for device in devices:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_bytes / total), device)


def _devices(name: str) -> tuple[torch.device, ...]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return (torch.device("cuda", 0),) if count else (torch.device("cpu"),)
    if name == "cpu":
        return (torch.device("cpu"),)
    match = _NAMED.fullmatch(name)
    if match is None:
        raise UsageError(f"the device {name[:40]!r} is not known: choose auto, cpu, cuda, cuda:1 or cuda:0,1")
    numbers = [int(n) for n in match.group(1).split(",")] if match.group(1) else [0]
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"the device {name[:40]!r} names a GPU twice")
    missing = [n for n in numbers if n >= count]
    if missing:
        raise UsageError(
            f"the device {name[:40]!r}: this machine has {count} GPUs that torch can use: choose auto or cpu, or a "
            "smaller number"
        )
    return tuple(torch.device("cuda", n) for n in numbers)


def free_host_bytes() -> int:
    """Memory this process could still take: what the system says is available, less where a control group says so."""
    available = _meminfo("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        # Cached files count as used and are given up when memory is wanted.
        stat = Path("/sys/fs/cgroup/memory.stat").read_text()
        used -= sum(int(n) for n in re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE))
        return max(SMALLEST_BYTES, min(available, limit - used))
    except (OSError, ValueError):
        return max(SMALLEST_BYTES, available)


def _cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _meminfo(name: str) -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None
