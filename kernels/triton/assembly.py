"""What the loop of a compiled kernel does: instructions counted by kind in AMD's assembly, NVIDIA's SASS or PTX."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    mnemonic: str
    operands: str


@dataclass(frozen=True)
class Counts:
    """Instructions of a wave in the loop (of the whole kernel when it has none), by what they keep busy.

    loads: bytes for each lane of a load from memory -> how many; local_reads: the same from local memory. vector: the
    vector ALU, an RDNA pair (v_dual_...) counted once: it is one issue. full_waits: waits for all loads in flight.
    """

    instructions: int = 0
    vector: int = 0
    scalar: int = 0
    matrix: int = 0
    matrix_kinds: tuple[str, ...] = ()
    loads: Mapping[int, int] = field(default_factory=dict)
    local_reads: Mapping[int, int] = field(default_factory=dict)
    full_waits: int = 0
    barriers: int = 0
    scratch: int = 0
    is_loop: bool = False
    streams: tuple[
        Mapping[int, int], ...
    ] = ()  # `loads` by array, where AMD's buffer descriptors tell arrays apart

    @property
    def load_bytes(self) -> int:
        """Bytes that a lane loads."""
        return sum(width * count for width, count in self.loads.items())

    @property
    def wide_share(self) -> float:
        """Share of the loaded bytes that come in loads of 16 bytes or more; 0 when nothing is loaded."""
        wide = sum(width * count for width, count in self.loads.items() if width >= 16)
        return wide / self.load_bytes if self.load_bytes else 0.0


_AMD_LABEL = re.compile(r"^(\.?[A-Za-z_$][\w.$]*):")
_AMD_LINE = re.compile(r"^\t([a-z]\w*)(?:\s+(.*?))?\s*$")
_SASS_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_SASS_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_PTX_LABEL = re.compile(r"^\s*(\$[\w$]+):")
_PTX_LINE = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+([^;]*);")
_AMD_LOAD = re.compile(
    r"^(?:global|buffer|flat)_load_(?:lds_)?(?:(?:d16_|tfe_)*)"
    r"(dwordx4|dwordx3|dwordx2|dword|b128|b96|b64|b32|short|ushort|ubyte|sbyte|[bui]16|[bui]8)"
)
_DESCRIPTOR = re.compile(r"s\[\d+:\d+\]")
_AMD_WIDTHS = {
    "dwordx4": 16,
    "b128": 16,
    "dwordx3": 12,
    "b96": 12,
    "dwordx2": 8,
    "b64": 8,
    "dword": 4,
    "b32": 4,
}
_AMD_WIDTHS |= {"short": 2, "ushort": 2, "b16": 2, "u16": 2, "i16": 2}
_AMD_MATRIX = ("v_mfma", "v_smfmac", "v_wmma", "v_swmmac")
_AMD_CONTROL = (
    "s_wait",
    "s_barrier",
    "s_nop",
    "s_delay",
    "s_clause",
    "s_setprio",
    "s_sched",
    "s_endpgm",
    "s_sleep",
)
_SASS_MATRIX = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA")
_SASS_MEMORY = ("LD", "ST", "ATOM", "RED", "UBLKCP", "UTMA", "CCTL", "MEMBAR", "ERRBAR", "ULDC")
_SASS_CONTROL = (
    "BRA",
    "EXIT",
    "BS",
    "BAR",
    "NOP",
    "WARP",
    "DEPBAR",
    "CALL",
    "RET",
    "YIELD",
    "SYNCS",
    "ARRIVES",
    "BMOV",
)


def main_loop(text: str) -> Counts:
    """Counts of the loop that does the work in AMD assembly, an NVIDIA disassembly or PTX.

    The innermost loop with the most matrix instructions, or else the one that loads the most; the whole kernel
    when there is no loop.
    """
    body, loops = _parse(text)
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    counted = [_count(body[a : b + 1], True) for a, b in inner]
    counted = [c for c in counted if not _only_waits(c)]
    if not counted:
        return _count(body, False)
    return max(counted, key=lambda c: (c.matrix, c.load_bytes, c.instructions))


def _only_waits(loop: Counts) -> bool:
    """Whether a loop is the one in which a program looks at a counter until others have raised it."""
    loaded = sum(loop.loads.values())
    return loop.matrix == 0 and loop.instructions <= 24 and loaded <= 1 and max(loop.loads, default=0) <= 8


def whole(text: str) -> Counts:
    """Counts of the whole kernel."""
    return _count(_parse(text)[0], False)


def _parse(text: str) -> tuple[list[Instruction], list[tuple[int, int]]]:
    """(instructions, loops as (first, last) instruction): a branch to an earlier label closes a loop."""
    branches: tuple[str, ...]
    if ".amdgcn_target" in text or ".amdhsa" in text:
        label, line, branches = _AMD_LABEL, _AMD_LINE, ("s_cbranch", "s_branch")
    elif ".visible .entry" in text:
        label, line, branches = _PTX_LABEL, _PTX_LINE, ("bra",)
    else:
        label, line, branches = _SASS_LABEL, _SASS_LINE, ("BRA",)
    body: list[Instruction] = []
    places: dict[str, int] = {}
    loops = set()
    for row in text.splitlines():
        if found := label.match(row):
            places[found.group(1)] = len(body)
            continue
        found = line.match(row.split(" ;", 1)[0] if label is _AMD_LABEL else row)
        if not found:
            continue
        mnemonic, operands = found.group(1), found.group(2) or ""
        body.append(Instruction(mnemonic, operands))
        if mnemonic.startswith(branches):
            target = operands.strip().strip("`()").split(")")[0].split()
            start = places.get(target[-1].strip("`()")) if target else None
            if start is not None and start < len(body) - 1:
                loops.add((start, len(body) - 1))
    return body, sorted(loops)


def _count(body: list[Instruction], is_loop: bool) -> Counts:
    kinds: Counter[str] = Counter()
    loads: Counter[int] = Counter()
    local: Counter[int] = Counter()
    matrix: Counter[str] = Counter()
    streams: dict[str, Counter[int]] = {}
    for instruction in body:
        kind, width = _classify(instruction)
        kinds[kind] += 1
        if kind == "load":
            loads[width] += 1
            if instruction.mnemonic.startswith("buffer_") and (
                base := _DESCRIPTOR.search(instruction.operands)
            ):
                streams.setdefault(base.group(0), Counter())[width] += 1
        elif kind == "local":
            local[width] += 1
        elif kind == "matrix":
            matrix[instruction.mnemonic] += 1
    return Counts(
        instructions=len(body),
        vector=kinds["vector"],
        scalar=kinds["scalar"],
        matrix=kinds["matrix"],
        matrix_kinds=tuple(sorted(matrix)),
        loads=dict(sorted(loads.items())),
        local_reads=dict(sorted(local.items())),
        full_waits=kinds["full wait"],
        barriers=kinds["barrier"],
        scratch=kinds["scratch"],
        is_loop=is_loop,
        streams=tuple(dict(sorted(found.items())) for _, found in sorted(streams.items())),
    )


def _classify(instruction: Instruction) -> tuple[str, int]:
    """(what an instruction keeps busy, bytes for each lane when it loads)."""
    name = instruction.mnemonic
    if name[0].isupper():
        return _classify_sass(name)
    if "." in name or name in ("ret", "bra"):
        return _classify_ptx(instruction)
    return _classify_amd(instruction)


def _classify_amd(instruction: Instruction) -> tuple[str, int]:
    name, operands = instruction.mnemonic, instruction.operands
    if name.startswith(_AMD_MATRIX):
        return "matrix", 0
    if found := _AMD_LOAD.match(name):
        return "load", _AMD_WIDTHS.get(found.group(1), 1)
    if name.startswith("scratch_"):
        return "scratch", 0
    if name.startswith(("ds_read", "ds_load")):
        bits = re.search(r"[bui](\d+)", name)
        pair = 2 if "read2" in name or "2addr" in name else 1
        return "local", pair * (int(bits.group(1)) // 8 if bits else 4)
    if name.startswith("s_barrier"):
        return "barrier", 0
    if (name == "s_waitcnt" and "vmcnt(0)" in operands) or (
        name == "s_wait_loadcnt" and operands.strip() == "0x0"
    ):
        return "full wait", 0
    if name.startswith(_AMD_CONTROL):
        return "control", 0
    if name.startswith("v_"):
        return ("control" if name == "v_nop" else "vector"), 0
    return ("scalar" if name.startswith("s_") else "other"), 0


def _classify_sass(name: str) -> tuple[str, int]:
    if name.startswith(_SASS_MATRIX):
        return "matrix", 0
    if name.startswith(("LDG.", "LDGSTS.", "LD.")):
        return "load", _sass_width(name)
    if name.startswith(("LDL", "STL")):
        return "scratch", 0
    if name.startswith("LDSM"):
        return "local", 4 * int(name.rsplit(".", 1)[-1]) if name.rsplit(".", 1)[-1].isdigit() else 4
    if name == "LDS" or name.startswith("LDS."):
        return "local", _sass_width(name)
    if name.startswith("BAR"):
        return "barrier", 0
    if name.startswith(_SASS_MEMORY):
        return "other", 0
    if name.startswith(_SASS_CONTROL) or name == "LDGDEPBAR":
        return "control", 0
    # The uniform data path beside the vector one.
    scalar = name.startswith("U") and not name.startswith("UNPACK")
    return ("scalar" if scalar or name in ("S2UR", "R2UR", "CS2R", "S2R") else "vector"), 0


def _sass_width(name: str) -> int:
    parts = name.split(".")
    for word, width in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
        if word in parts:
            return width
    return 4


def _classify_ptx(instruction: Instruction) -> tuple[str, int]:
    name, operands = instruction.mnemonic, instruction.operands
    if name.startswith(("mma.", "wgmma.mma_async")):
        return "matrix", 0
    if name.startswith("cp.async.c"):
        size = re.search(r",\s*(?:0x)?(\d+)", operands.rsplit("]", 1)[-1])
        return "load", int(size.group(1), 16 if "0x" in operands.rsplit("]", 1)[-1] else 10) if size else 4
    if name.startswith(("ld.global", "ld.shared")):
        vector = re.search(r"\.v(\d)", name)
        bits = re.search(r"\.[bufs](\d+)$", name)
        width = (int(vector.group(1)) if vector else 1) * (int(bits.group(1)) // 8 if bits else 4)
        return ("load" if name.startswith("ld.global") else "local"), width
    if name.startswith("ldmatrix"):
        return "local", 16 if ".x4" in name else 8 if ".x2" in name else 4
    if name.startswith(("ld.local", "st.local")):
        return "scratch", 0
    if name.startswith("bar."):
        return "barrier", 0
    if name.startswith(
        ("st.", "ld.", "cp.", "atom.", "red.", "fence", "membar", "mbarrier", "wgmma", "prefetch")
    ):
        return "other", 0
    return ("control" if name.startswith(("bra", "ret", "setp")) else "vector"), 0


@cache
def _nvdisasm() -> Path | None:
    try:
        import triton.backends.nvidia as nvidia
    except ImportError:
        return None
    for folder in nvidia.__path__:
        tool = Path(folder, "bin", "nvdisasm")
        if tool.exists():
            return tool
    return None


def disassemble(cubin: bytes) -> str | None:
    """The machine code of a cubin as text, or None where there is no nvdisasm that reads it."""
    tool = _nvdisasm()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run(
                [tool, "-c", file.name], capture_output=True, text=True, timeout=120, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
    return done.stdout if done.returncode == 0 and "/*0000*/" in done.stdout else None
