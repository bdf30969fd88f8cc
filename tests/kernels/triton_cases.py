"""Matrices, batches and kernels of the Triton tests; as a program, the errors of a part as JSON.

Triton reads TRITON_INTERPRET when it is imported, so the interpreted kernels run in a process of their own: all of them in
one, since importing torch and triton takes longer than most cases.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from conftest import leaf, node, random_encoded

from nstf.kernels.formats import EncodedTensor, bitpack, decode

DENSE = leaf("dense", dtype="float16")
FLOAT = leaf("dense", dtype="float32")
INT8 = leaf("int", bits=8, group=0)
# Rows and columns of the decomposed matrices: odd ones.
VIEW = (5, 9, 7, 18)
TREES = {
    **{f"int{bits}": leaf("int", bits=bits, group=32) for bits in range(2, 9)},
    **{f"int{bits}_row": leaf("int", bits=bits, group=0) for bits in (2, 4, 8)},
    "int4_group_8": leaf("int", bits=4, group=8),
    "int4_group_24": leaf("int", bits=4, group=24, symmetric=False),
    "int4_group_96": leaf("int", bits=4, group=96),
    "int4_group_128": leaf("int", bits=4, group=128),
    "int3_asymmetric": leaf("int", bits=3, group=32, symmetric=False, scale_bits=8),
    "int6_asymmetric": leaf("int", bits=6, group=64, symmetric=False),
    "int8_asymmetric": leaf("int", bits=8, group=64, symmetric=False),
    "int2_asymmetric_row": leaf("int", bits=2, group=0, symmetric=False, scale_bits=8),
    "grid": leaf("grid", group=32),
    "grid_row": leaf("grid", group=0, scale_bits=8),
    "fp8": leaf("fp8"),
    "fp8_fnuz": leaf("fp8", variant="e4m3fnuz", group=32, scale_bits=32),
    "mxfp4": leaf("mxfp4"),
    **{f"trellis{q}": leaf("trellis", quarter_bits=(q,)) for q in (4, 7, 8, 10, 12, 13, 16, 24)},
    "trellis_sections": leaf("trellis", quarter_bits=(6, 9), rows=(7, 33)),
    "rotated_trellis": node("rotated", {"x": leaf("trellis", quarter_bits=(8,))}, block_in=32, seed=5),
    "rotated_sections": node(
        "rotated", {"x": leaf("trellis", quarter_bits=(6, 9), rows=(7, 33))}, block_in=64, seed=5
    ),
    **{f"shuffle{q}": leaf("shuffle", quarter_bits=q) for q in (8, 12, 15, 16, 20)},
    "rotated_shuffle": node("rotated", {"x": leaf("shuffle", quarter_bits=14)}, block_in=32, seed=5),
    "rotated_both": node(
        "rotated", {"x": leaf("int", bits=4, group=64)}, block_in=64, block_out=32, seed=3
    ),
    "low_rank": node("low_rank", {"a": DENSE, "b": DENSE}, rank=5),
    "add": node(
        "add",
        {"x": leaf("int", bits=2, group=32), "y": node("low_rank", {"a": FLOAT, "b": FLOAT}, rank=3)},
    ),
    "corrected_int4": node(
        "add", {"x": leaf("int", bits=4, group=128), "y": node("low_rank", {"a": DENSE, "b": DENSE}, rank=20)}
    ),
    "corrected_int6": node(
        "add",
        {
            "x": leaf("int", bits=6, group=24, symmetric=False),
            "y": node("low_rank", {"a": INT8, "b": INT8}, rank=7),
        },
    ),
    "corrected_int8": node(
        "add", {"x": leaf("int", bits=8, group=32), "y": node("low_rank", {"a": DENSE, "b": INT8}, rank=33)}
    ),
    "corrected_grid": node(
        "add", {"x": leaf("grid", group=64), "y": node("low_rank", {"a": INT8, "b": DENSE}, rank=32)}
    ),
    "too_wide_a_correction": node(
        "add", {"x": leaf("mxfp4"), "y": node("low_rank", {"a": FLOAT, "b": FLOAT}, rank=130)}
    ),
    "dense": DENSE,
    "low_rank_packed": node("low_rank", {"a": leaf("int", bits=8, group=8), "b": leaf("int", bits=4, group=32)}, rank=9),
    "cp": node("cp", {f"factor{i}": DENSE for i in range(4)}, rank=20, view=VIEW),
    "tensor_train": node("tensor_train", {f"core{i}": DENSE for i in range(4)}, ranks=(5, 20, 7), view=VIEW),
    "tensor_train_packed": node(
        "tensor_train", {"core0": FLOAT, "core1": INT8, "core2": INT8, "core3": FLOAT}, ranks=(4, 17, 9), view=VIEW
    ),
    "tucker": node(
        "tucker", {"core": INT8, "factor0": DENSE, "factor1": INT8, "factor3": FLOAT}, ranks=(4, 5, 7, 9), view=VIEW
    ),
    "tucker_right": node(
        "tucker", {"core": FLOAT, "factor1": DENSE, "factor2": DENSE, "factor3": DENSE}, ranks=(5, 6, 3, 8), view=VIEW
    ),
    "tucker_wide": node("tucker", {"core": DENSE, "factor1": DENSE}, ranks=(5, 8, 7, 18), view=VIEW),
}  # fmt: skip


class Case(NamedTuple):
    """x [batch, in] of `dtype` times a matrix of `shape`; `rows`: rows by index instead; `nan`: one in the last row of x.

    `processors`: as on a card with so few of them that programs take several blocks of rows.
    """

    tree: str
    shape: tuple[int, int]
    batch: int
    dtype: str = "float32"
    rows: bool = False
    nan: bool = False
    processors: int = 0
    arch: str = ""  # whose kernels the interpreter runs, where not NVIDIA's

    @property
    def name(self) -> str:
        kind = "rows" if self.rows else self.dtype
        kind += "-nan" if self.nan else ""
        kind += f"-{self.processors} processor" if self.processors else ""
        kind += f"-{self.arch}" if self.arch else ""
        return f"{self.tree}-{self.shape[0]}x{self.shape[1]}-{self.batch}-{kind}"

    @property
    def limit(self) -> float:
        """The error allowed, relative to the sum of absolute products (rows: to the largest weight)."""
        if self.rows:
            return 1e-6
        if self.dtype != "float32":
            return {"float16": 3e-3, "bfloat16": 1.2e-2}[self.dtype]
        if self.tree in ("trellis13", "trellis16", "trellis24"):
            return 3e-4  # a polynomial instead of levels rounded to float16
        # A code beside a one, in a sum of float32.
        return 1e-4 if self.batch == 1 or "trellis" in self.tree or "shuffle" in self.tree else 4e-6


def cases() -> Iterator[Case]:
    packed = [name for name in TREES if name.startswith(("int", "grid", "fp8", "mxfp4"))]
    for name in packed:
        yield Case(name, (5, 200), 1)
        yield Case(name, (5, 200), 3)
    for name in ("int4_group_128", "int8_row", "int6", "mxfp4"):
        yield Case(name, (40, 1024), 1, "float16")
        yield Case(name, (40, 1024), 20, "float16")
    for (
        name
    ) in packed:  # skinny.py: every format, more columns than one program takes, a column short of a chunk
        yield Case(name, (20, 1032), 1 if name.endswith("row") else 3, "float16")
    yield Case("int4", (5, 200), 3, "bfloat16")
    yield Case("int8_asymmetric", (24, 264), 9, "bfloat16")
    for name in ("int3_asymmetric", "int6", "grid", "fp8", "mxfp4"):
        yield Case(name, (20, 264), 1, "bfloat16")
        yield Case(name, (20, 264), 18, "bfloat16")
    yield Case("grid", (20, 264), 9, "bfloat16")
    yield Case("trellis8", (40, 72), 3, "bfloat16")
    yield Case("rotated_both", (64, 128), 18, "bfloat16")
    yield Case("low_rank", (64, 128), 3, "bfloat16")
    for name in ("int3", "int4_group_24", "int6_asymmetric", "grid_row", "fp8", "mxfp4"):
        yield Case(name, (5, 200), 300)
        yield Case(name, (5, 200), 0, rows=True)
    for name in TREES:
        if name.startswith("trellis"):
            yield Case(name, (40, 72), 1)
            yield Case(name, (40, 72), 0, rows=True)
            yield Case(name, (40, 72), 3 if name != "trellis8" else 11, "float16")
        if name.startswith("shuffle"):  # rows beyond a segment, columns that are no whole chunk
            yield Case(name, (290 if name == "shuffle12" else 40, 72), 1)
            yield Case(name, (290, 72), 0, rows=True)
            yield Case(name, (40, 72), 3, "float16")
    for name in ("rotated_trellis", "rotated_sections", "rotated_shuffle"):
        yield Case(name, (40, 320), 0, rows=True)
    yield Case("shuffle12", (40, 72), 1, "bfloat16")
    yield Case("shuffle16", (40, 264), 4, "float16", nan=True)
    yield Case("shuffle16", (40, 72), 12)
    # shuffle_mma.py: parts of the columns, all numbers of tiles of activations; 130 rows of them take two products.
    yield Case("shuffle8", (40, 1100), 2, "bfloat16")
    yield Case("shuffle15", (40, 72), 20, "bfloat16")
    yield Case("shuffle12", (40, 72), 60, "float16")
    yield Case("shuffle16", (40, 72), 70, "bfloat16")
    yield Case("shuffle16", (40, 72), 6)
    yield Case("shuffle12", (40, 72), 1, "bfloat16", arch="gfx942")
    yield Case("shuffle16", (24, 72), 2, arch="gfx942")
    yield Case("rotated_shuffle", (64, 128), 2)
    yield Case("rotated_shuffle", (64, 128), 9, "float16")
    for name in (
        "trellis8",
        "trellis_sections",
        "rotated_trellis",
        "rotated_both",
        "low_rank",
        "add",
        "dense",
    ):
        shape = (40, 72) if name.startswith("trellis") else (64, 128)
        yield Case(name, shape, 1, "float16")
        yield Case(name, shape, 3)
    yield Case("trellis_sections", (40, 72), 12)
    yield Case("low_rank", (64, 128), 6, "float16")
    yield Case("add", (64, 128), 6, "float16")
    yield Case("trellis8", (40, 72), 35, "float16")
    yield Case("rotated_trellis", (64, 128), 33, "float16")
    yield Case("grid", (20, 264), 18, "float16")
    yield Case("rotated_trellis", (64, 128), 12)
    # trellis_bytes.py: all digits and both of trellis_gemm.py's paths, columns that are all a program's and that are not.
    yield Case("trellis10", (40, 1024), 2, "bfloat16")
    yield Case("trellis12", (24, 1032), 1, "float16")
    yield Case("trellis8", (40, 1024), 4, "bfloat16")
    yield Case("trellis7", (24, 1032), 5, "bfloat16")
    yield Case("trellis8", (40, 72), 2, "bfloat16", nan=True)
    yield Case("trellis12", (40, 72), 4, "float16", nan=True)
    for name in ("tensor_train", "tensor_train_packed", "tucker", "tucker_right", "tucker_wide", "cp"):
        for batch, dtype in ((1, "float16"), (3, "float32"), (8, "bfloat16"), (17, "float32")):
            yield Case(name, (45, 126), batch, dtype)
    for name in ("corrected_int4", "corrected_int6", "corrected_int8", "corrected_grid"):
        for batch, dtype in (
            (1, "float32"),
            (1, "bfloat16"),
            (3, "float16"),
            (8, "bfloat16"),
            (8, "float32"),
        ):
            yield Case(name, (37, 200), batch, dtype)
        yield Case(name, (37, 200), 17, "float16")
    # Several programs for the columns, and more rows than programs take at once.
    yield Case("corrected_int4", (45, 2176), 5, "float16")
    yield Case("corrected_grid", (70, 1088), 1, "float16", processors=1)
    yield Case("too_wide_a_correction", (133, 160), 2, "float16")
    yield Case("low_rank_packed", (37, 72), 1, "bfloat16")
    yield Case("low_rank_packed", (37, 72), 3)
    yield Case("low_rank_packed", (37, 72), 17)


def launches_of(case: Case) -> list[Any]:
    """The specs of a product."""
    from nstf.kernels.triton.spec import specs_for

    with card(case):
        arch = case.arch or "sm_90"
        return specs_for(TREES[case.tree], case.shape, case.batch, getattr(torch, case.dtype), arch)


@contextmanager
def card(case: Case) -> Iterator[None]:
    """Specs made from now on are for a card with the processors of the case."""
    from nstf.kernels.triton import corrected, linear

    few = patch.object(corrected, "processors_of", lambda arch: case.processors)
    # What was made for a whole card is remembered.
    anew = patch.object(corrected, "corrected_specs", corrected.corrected_specs.__wrapped__)  # type: ignore[attr-defined]
    other = patch.object(linear, "arch_of", lambda device: case.arch)
    with ExitStack() as stack:
        for change in (few, anew) if case.processors else ():
            stack.enter_context(change)
        if case.arch:
            stack.enter_context(other)
        yield


def features(case: Case) -> set[object]:
    """What the case tries: its format, the kernel of its codes with that format, each kernel with its dtype and rows."""
    if case.rows:
        return {case.tree, ("rows", TREES[case.tree].kind)}
    kinds = [spec.kind for spec in launches_of(case)] or ["reference"]
    # Rates of path codes differ in numbers alone.
    name = case.tree.rstrip("0123456789") if case.tree.startswith(("shuffle", "trellis")) else case.tree
    few = "one" if case.batch == 1 else "few" if case.batch <= 8 else "many"
    found: set[object] = {case.tree, (kinds[0], name), ("nan", case.nan), ("processors", case.processors)}
    found.add(("arch", case.arch))
    return found | {(kind, what) for kind in kinds for what in (case.dtype, few)}


def parted() -> tuple[list[Case], list[Case]]:
    """(the cases that add a feature to those before them, the others): the default run takes the first."""
    first, others, seen = [], [], set[object]()
    for case in cases():
        new = features(case) - seen
        (first if new else others).append(case)
        seen |= new
    return first, others


# Of kernels that differ much, cheap ones: quick_interpreter.py changes no bit of them.
INTERPRETED_TWICE = (
    "int4-20x1032-3-float16",
    "int3_asymmetric-20x264-18-bfloat16",
    "fp8_fnuz-5x200-3-float32",
    "rotated_trellis-40x320-0-rows",
    "tucker-45x126-1-float16",
    "low_rank-64x128-3-bfloat16",
)


def encoded_of(case: Case) -> EncodedTensor:
    encoded = random_encoded(TREES[case.tree], case.shape)
    if case.tree.endswith("_sections"):  # random bits do not give sections the sizes that the tree states
        second = torch.zeros(1, 40, dtype=torch.uint8)
        second[0, torch.randperm(40, generator=torch.Generator().manual_seed(1))[:33]] = 1
        path = next(path for path in encoded.arrays if path.endswith("section"))
        return EncodedTensor(
            encoded.tree, encoded.shape, {**encoded.arrays, path: bitpack.pack(second, 1)[0]}
        )
    return encoded


def on(device: str, encoded: EncodedTensor) -> EncodedTensor:
    return EncodedTensor(
        encoded.tree, encoded.shape, {name: array.to(device) for name, array in encoded.arrays.items()}
    )


def error_of(case: Case, device: str) -> float:
    """What `Case.limit` bounds; infinite where an index out of range did not give NaN."""
    from nstf.kernels.triton import linear

    encoded = encoded_of(case)
    weight = decode(encoded)
    there = on(device, encoded)
    if case.rows:
        ids = torch.tensor([3, 0, case.shape[0] - 1, 3, case.shape[0], -1])
        arch = linear.arch_of(torch.device(device))
        found = linear.read_rows(there, ids.to(device), torch.float32, arch).cpu()
        if not bool(found[4:].isnan().all()):
            return float("inf")
        return float((found[:4] - weight[ids[:4]]).abs().max() / weight.abs().max())
    x = torch.randn(case.batch, case.shape[1], generator=torch.Generator().manual_seed(case.batch))
    x = x.to(getattr(torch, case.dtype))
    if case.nan:
        x[-1, 5] = float("nan")
    with card(case):
        y = linear.matmul(x.to(device), there).cpu()
    if case.nan:
        if not bool(y[-1].isnan().all()):
            return float("inf")
        x, y = x[:-1], y[:-1]
    return relative_error(y, x, weight)


def relative_error(y: Tensor, x: Tensor, weight: Tensor) -> float:
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    return float(((y.double() - exact).abs() / size.clamp_min(1e-30)).max())


def main(part: int) -> None:
    """Errors, and the names of the launches, of every case of a part of `parted`."""
    from nstf.kernels.triton import (
        corrected,
        gemm,
        gemv,
        int_groups,
        low_rank,
        rotate,
        shuffle,
        shuffle_decode,
        shuffle_mma,
        skinny,
        trellis,
        trellis_gemm,
    )
    from nstf.kernels.triton import decode as decode_module

    launched: list[str] = []
    single: list[str] = []
    plain = gemv.launch

    def launch(spec: Any, *arguments: object) -> None:
        launched.append(spec.name)
        if spec.kind == "skinny" and not spec.constants["PAIRS"]:
            single.append(spec.name)
        plain(spec, *arguments)

    patched = (
        *(
            corrected,
            decode_module,
            gemm,
            gemv,
            int_groups,
            low_rank,
            rotate,
            shuffle,
            shuffle_decode,
            shuffle_mma,
        ),
        *(skinny, trellis, trellis_gemm),
    )
    for module in patched:
        module.launch = launch  # type: ignore[attr-defined]
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    found = {}
    if part == 0:  # the others, of `make slow`, go through Triton's interpreter as it is
        import quick_interpreter

        plain_errors = {
            case.name: error_of(case, "cpu") for case in parted()[0] if case.name in INTERPRETED_TWICE
        }
        quick_interpreter.install()
    for case in parted()[part]:
        launched.clear()
        single.clear()
        error = error_of(case, "cpu")
        found[case.name] = {"error": error, "launched": list(launched), "single": list(single)}
        if part == 0 and case.name in plain_errors:
            found[case.name]["plain error"] = plain_errors[case.name]
        if any("corrected" in name for name in launched):
            # Once more with the same counters.
            found[case.name]["error"] = max(found[case.name]["error"], error_of(case, "cpu"))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
