"""Copies of codes in large pages (kernels/cpu/engine/large_pages.h): the same numbers, memory that comes back."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nstf.kernels.cpu.engine_matrix import available, compile_matrix, matmul
from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.formats.tree import format_of

pytestmark = pytest.mark.skipif(not available(), reason="the engine was not built")

TREES = {
    "int4": ("int", {"bits": 4, "group": 32, "scale_bits": 8}),
    "grid": ("grid", {"group": 32, "scale_bits": 8}),
    "trellis": ("trellis", {"quarter_bits": (8,)}),
    "trellis of two rates": ("trellis", {"quarter_bits": (8, 20), "rows": (96, 96)}),
    "shuffle": ("shuffle", {"quarter_bits": 16}),
}
STATUS = Path("/proc/self/status")


def encoded(samples: ModuleType, name: str, rows: int, cols: int) -> EncodedTensor:
    kind, params = TREES[name]
    made = samples.random_encoded(Node(kind, format_of(kind).Params(**params), {}), (rows, cols), 1)
    if "section" in made.arrays:  # a bit a row: the second rate in the second half
        numbers = made.arrays["section"].view(torch.uint8).reshape(-1)
        numbers.zero_()[len(numbers) // 2 :] = 255
    return made


def address_space() -> int:
    """Bytes of the process's address space."""
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith("VmSize"))
    return int(line.split()[1]) * 1024


def resident() -> int:
    """Bytes of the process in memory."""
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("name", TREES)
def test_a_copy_gives_the_same_numbers_and_needs_its_source_no_more(samples: ModuleType, name: str) -> None:
    stored = encoded(samples, name, 192, 512)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    wanted = matmul(x, compile_matrix(stored), 2)
    source = EncodedTensor(stored.tree, stored.shape, {k: a.clone() for k, a in stored.arrays.items()})
    copy = compile_matrix(stored, panels=2, panel_source=source)
    if not copy.kernel.startswith("panels") and name in ("int4", "grid"):
        pytest.skip("no panels for this instruction set: nothing is copied")
    once = matmul(x, copy, 2)
    for array in source.arrays.values():
        array.zero_()
    del source
    gc.collect()
    assert torch.equal(matmul(x, copy, 2), once)
    assert (once - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    if name not in ("int4", "grid"):
        assert torch.equal(once, wanted)


@pytest.mark.skipif(not STATUS.exists(), reason="no /proc here")
def test_memory_comes_back_when_the_last_matrix_of_a_chunk_goes(samples: ModuleType) -> None:
    """Chunks are of 32 MiB; each of these matrices is 1 MiB, so that 80 fill two at least."""
    stored = encoded(samples, "shuffle", 1024, 2048)
    # These fill the chunk in which matrices of earlier tests may still live: no other shares its chunk with those held.
    others = [compile_matrix(stored, panels=1) for _ in range(32)]
    held = [compile_matrix(stored, panels=1) for _ in range(80)]
    others.clear()
    x = torch.randn(1, 2048, generator=torch.Generator().manual_seed(0))
    matmul(x, held[0], 1)  # what the first product of a process maps is not measured
    full = address_space()
    kept = held[::40]
    held.clear()
    gc.collect()
    some = address_space()
    assert all(torch.equal(matmul(x, m, 1), matmul(x, kept[0], 1)) for m in kept)
    kept.clear()
    gc.collect()
    assert some < full - (30 << 20), "the chunk of which nothing is in use is still there"
    assert address_space() < some - (60 << 20)


@pytest.mark.skipif(not STATUS.exists(), reason="no /proc here")
def test_a_thousand_matrices_after_each_other_take_no_more_than_a_few(samples: ModuleType) -> None:
    stored = encoded(samples, "shuffle", 256, 512)
    compile_matrix(stored, panels=1)
    before = address_space()
    for _ in range(1000):
        compile_matrix(stored, panels=1)
    assert address_space() < before + (34 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_little_address_space_is_a_memory_error_and_nothing_worse() -> None:
    """Also where a chunk has no room but the block itself has."""
    script = (
        "import resource, torch\n"
        "from nstf.kernels.cpu import ext\n"
        "line = next(x for x in open('/proc/self/status') if x.startswith('VmSize'))\n"
        "now = int(line.split()[1]) * 1024\n"
        "codes = bytearray(8 << 20)\n"
        "def made():\n"
        "    scale = torch.zeros(4096, dtype=torch.uint8)\n"
        "    copies = ext.EngineCopies()\n"
        "    m = ext.engine_shuffle(4096, 4096, 16, codes, TABLES, 1.0, scale, torch.ones(1), False, copies)\n"
        "    copies.run(1)\n"
        "    return m\n"
        "from nstf.kernels.formats import shuffle\n"
        "TABLES = bytearray.fromhex(shuffle.TABLES[16])\n"
        "made()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (24 << 20),) * 2)\n"
        "one = made()\n"
        "try:\n"
        "    rest = [made() for _ in range(8)]\n"
        "except MemoryError:\n"
        "    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[-2000:]


@pytest.mark.skipif(not STATUS.exists(), reason="no /proc here")
def test_what_is_freed_among_living_blocks_goes_back_at_once(samples: ModuleType) -> None:
    """30 small matrices, each behind one of 4 MiB in the same chunks."""
    large, small = encoded(samples, "shuffle", 2048, 4096), encoded(samples, "shuffle", 256, 512)
    pairs = [(compile_matrix(large, panels=1), compile_matrix(small, panels=1)) for _ in range(30)]
    full = resident()
    living = [pair[1] for pair in pairs]
    pairs.clear()
    gc.collect()
    assert resident() < full - (90 << 20)
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(0))
    wanted = matmul(x, compile_matrix(small), 1)
    assert all(torch.equal(matmul(x, m, 1), wanted) for m in living)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_that_is_forked_while_another_thread_takes_memory_takes_its_own() -> None:
    """In a process of its own: a lock that the other thread held at the fork would make the child wait for ever."""
    script = (
        "import os, threading, torch\n"
        "from nstf.kernels.cpu import ext\n"
        "from nstf.kernels.formats import shuffle\n"
        "tables, codes = bytearray.fromhex(shuffle.TABLES[16]), bytearray(1 << 17)\n"
        "scale, top = torch.zeros(256, dtype=torch.uint8), torch.ones(1)\n"
        "def made():\n"
        "    copies = ext.EngineCopies()\n"
        "    m = ext.engine_shuffle(256, 1024, 16, codes, tables, 1.0, scale, top, False, copies)\n"
        "    copies.run(1)\n"
        "    return m\n"
        "stop = threading.Event()\n"
        "def work():\n"
        "    while not stop.is_set():\n"
        "        made()\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "for _ in range(60):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        made()\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "stop.set()\n"
        "thread.join()\n"
        "print('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
