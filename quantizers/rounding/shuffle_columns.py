"""LDLQ for shuffle codes, column by column: matrices under one another and side by side.

A path is 256 rows of one column, so that columns follow each other and rows do not. Stacks are matrices of one Hessian under
one another; what decides about their codes is in them. Stacks of one width and rate are searched under one another too,
others beside these.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from nstf.kernels.formats import shuffle as form
from nstf.kernels.shuffle_encode import BLOCK, round_columns
from nstf.kernels.streams import in_turn
from nstf.quantizers.rounding.block_ldlq import SPAN
from nstf.quantizers.rounding.products import products_of_errors

# Rows that matter more than this many times the mean of their path count as so many in the search, whose costs have 16 bits.
_MOST = 8.0
_BYTES = 20  # that a weight takes while it is searched
_LARGEST = 1 << 26  # weights that are searched at a time


class Matrix(Protocol):
    """A matrix that is searched. `matrix`: as given, [rows, cols]; `scale`, `row_weight`: [rows]; `feedback`: U of its
    Hessian, [cols padded to blocks] squared, or None."""

    matrix: Tensor
    scale: Tensor
    row_weight: Tensor
    quarter_bits: int
    feedback: Tensor | None

    def padded(self, some: slice) -> Tensor:
        """Some rows as they are rounded, as many as whole groups, of as many columns as whole blocks."""

    def take(self, codes: Tensor, values: Tensor, rounded: Tensor) -> None:
        """Is handed what was found for the next rows: the codes, what was to be rounded, and what it became."""


def search(alike: Sequence[Sequence[Matrix]], scratch: int, room: int) -> None:
    """Hands every matrix its codes. alike: by Hessian, width and rate; scratch: bytes that a stack may take, room: all that
    are searched at the same time."""
    stacks = [[_Stack(batch) for batch in _batches(same, scratch)] for same in alike]
    # Of one Hessian's stacks each waits for the one before: together they need not fit the memory.
    for turn in zip_longest(*stacks):
        for some in _fitting([stack for stack in turn if stack], room):
            searches = [Search(column) for column in _columns(some)]
            segments = sum(search.segments for search in searches)
            for search in searches:
                search.beside = segments - search.segments
            in_turn([search.steps() for search in searches], searches[0].values.device)
            for search in searches:
                search.finish()


def _batches(matrices: Sequence[Matrix], scratch: int) -> Iterator[list[tuple[Matrix, slice]]]:
    """What is stacked: of a large table some segments at a time; of matrices that fit `scratch` several, as long as their
    rows are whole segments, which share how much each of them counts."""
    batch: list[tuple[Matrix, slice]] = []
    taken = 0
    for matrix in matrices:
        rows, cols = matrix.matrix.shape
        step = max(1, max(_LARGEST, scratch // _BYTES) // (cols * form.SEGMENT)) * form.SEGMENT
        for start in range(0, rows, step):
            size = min(step, rows - start)
            if batch and (taken % form.SEGMENT or _BYTES * cols * (taken + size) > scratch):
                yield batch
                batch, taken = [], 0
            batch.append((matrix, slice(start, start + size)))
            taken += size
    yield batch


class _Stack:
    """Matrices of one Hessian and one rate, or some rows of them, under one another: what decides about their codes."""

    def __init__(self, parts: Sequence[tuple[Matrix, slice]]) -> None:
        first = parts[0][0]
        self.parts, self.feedback, self.quarter_bits = parts, first.feedback, first.quarter_bits
        self.cols = _up(first.matrix.shape[1], BLOCK)
        self.sizes = [_up(some.stop - some.start, form.GROUP) for _, some in parts]
        self.rows = sum(self.sizes)


def _fitting(stacks: Sequence[_Stack], room: int) -> Iterator[list[_Stack]]:
    """Stacks in parts that fit so many bytes, one at least."""
    part: list[_Stack] = []
    taken = 0
    for stack in stacks:
        size = _BYTES * stack.rows * stack.cols
        if part and taken + size > room:
            yield part
            part, taken = [], 0
        part.append(stack)
        taken += size
    if part:
        yield part


def _columns(stacks: Sequence[_Stack]) -> list[list[_Stack]]:
    """Stacks that are searched under one another: of one rate and width, all but the last of whole segments. The widest
    come first."""
    alike: dict[object, list[_Stack]] = {}
    for stack in stacks:
        key = stack.quarter_bits, stack.cols, stack.feedback is None
        alike.setdefault(key, []).append(stack)
    out = []
    for found in alike.values():
        whole = [stack for stack in found if stack.rows % form.SEGMENT == 0]
        ragged = [stack for stack in found if stack.rows % form.SEGMENT]
        out.append(whole + ragged[:1])
        out.extend([stack] for stack in ragged[1:])
    return sorted(out, key=lambda found: -found[0].cols)


class Search:
    """The search of some stacks: LDLQ column by column. What columns of spans before have lost is fed back in one product
    for each stack, whose shape does not depend on the others, and inside a block of 16 by the search itself. segments: of
    rows; beside: those of other searches at the same time."""

    def __init__(self, stacks: Sequence[_Stack]) -> None:
        self.stacks, self.quarter_bits, self.cols = stacks, stacks[0].quarter_bits, stacks[0].cols
        device = stacks[0].parts[0][0].matrix.device
        rows, q = sum(stack.rows for stack in stacks), self.quarter_bits
        self.segments, self.beside = -(-rows // form.SEGMENT), 0
        self.values = torch.empty(rows, self.cols, device=device)
        self.rounded = torch.empty_like(self.values)
        chunks = -(-self.cols // form.CHUNK)
        self.codes = torch.zeros(
            rows // form.GROUP, chunks, 2 * q, form.CHUNK // 2, dtype=torch.uint8, device=device
        )
        # Errors are kept transposed: the products then read them in order.
        self.errors = [torch.zeros(self.cols, stack.rows, device=device) for stack in stacks]
        self.rows, levels, importance, at = [], [], [], 0
        for stack in stacks:
            self.rows.append(slice(at, at + stack.rows))
            for (matrix, some), size in zip(stack.parts, stack.sizes, strict=True):
                self.values[at : at + size] = matrix.padded(some)
                at += size
            scale = torch.cat([matrix.scale[some] for matrix, some in stack.parts])
            row_weight = torch.cat([matrix.row_weight[some] for matrix, some in stack.parts])
            counts = [
                m / m.mean().clamp_min(1e-30) for m in torch.split(row_weight * scale.square(), form.SEGMENT)
            ]
            padding = (0, stack.rows - len(scale))
            levels.append(torch.nn.functional.pad(scale, padding) * form.STEPS[q])
            importance.append(torch.nn.functional.pad(torch.cat(counts).clamp_max(_MOST), padding))
        self.level, self.importance = torch.cat(levels), torch.cat(importance)
        self.feedback = [stack.feedback for stack in stacks if stack.feedback is not None]
        self.own, self.which = None, None
        if self.feedback:
            self.own = torch.stack([_diagonal_blocks(u) for u in self.feedback], 1)
        if len(self.feedback) > 1:
            segments = torch.tensor([-(-stack.rows // form.SEGMENT) for stack in stacks])
            self.which = torch.repeat_interleave(torch.arange(len(stacks)), segments).int().to(device)

    def steps(self) -> Iterator[None]:
        """The search, a block of columns a step."""
        for top in range(0, self.cols, SPAN):
            span = slice(top, min(top + SPAN, self.cols))
            base = self._fed(self.values[:, span], slice(0, top), span)
            for at in range(top, span.stop, BLOCK):
                part = slice(at, at + BLOCK)
                target = self._fed(base[:, at - top : at - top + BLOCK], slice(top, at), part)
                own = None if self.own is None else self.own[at // BLOCK]
                if own is not None and self.which is None:
                    own = own[0]
                values = self.values[:, part]
                given = (target, values, self.level, self.importance, own, self.quarter_bits)
                rounded, found = round_columns(*given, self.which, self.beside)
                self.rounded[:, part] = rounded
                lost = values - rounded
                for errors, rows in zip(self.errors, self.rows, strict=True):
                    errors[part] = lost[rows].T
                inside = slice(at % form.CHUNK // 2, (at % form.CHUNK + BLOCK) // 2)
                self.codes[:, at // form.CHUNK, :, inside] = found
                yield

    def _fed(self, base: Tensor, before: slice, columns: slice) -> Tensor:
        """Targets with what columns before have lost."""
        if not self.feedback or before.start == before.stop:
            return base
        with products_of_errors(base.device, self.cols):
            parts = [
                base[rows] + (u[before, columns].T @ errors[before]).T
                for u, errors, rows in zip(self.feedback, self.errors, self.rows, strict=True)
            ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def finish(self) -> None:
        """Hands the matrices what was found."""
        at = 0
        for stack in self.stacks:
            for (matrix, some), size in zip(stack.parts, stack.sizes, strict=True):
                groups = slice(at // form.GROUP, (at + size) // form.GROUP)
                rows = slice(at, at + some.stop - some.start)
                matrix.take(self.codes[groups], self.values[rows], self.rounded[rows])
                at += size


def _diagonal_blocks(feedback: Tensor) -> Tensor:
    """The blocks of 16 columns on the diagonal, [blocks, 16, 16]."""
    count = len(feedback) // BLOCK
    return feedback.view(count, BLOCK, count, BLOCK).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
