"""Parts of encoded tensors: put together they are the tensor, for every kind of node, nested, of odd sizes."""

import random
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from generated_trees import LEAVES, NODES, tree_of

from nstf.kernels.formats import EncodedTensor, FormatError, Node, array_specs, check, check_values, decode
from nstf.kernels.formats.shards import Span, grain, shard, spans
from nstf.kernels.formats.tree import Shape, format_of

# Their children decoded apart are multiplied in another order of sums than the whole.
PRODUCTS = {"low_rank", "cp", "tucker", "tensor_train", "rotated"}


def random_tensor(tree: Node, shape: Shape, seed: int) -> EncodedTensor:
    """A tensor of a tree with random codes and scales of ordinary size."""
    generator = torch.Generator().manual_seed(seed)
    arrays: dict[str, Tensor] = {}
    for name, spec in array_specs(tree, shape).items():
        if spec.dtype == torch.uint8:
            arrays[name] = torch.randint(0, 120, spec.shape, generator=generator).to(torch.uint8)
        else:
            arrays[name] = (torch.rand(spec.shape, generator=generator) + 0.5).to(spec.dtype)
    return EncodedTensor(tree, shape, arrays)


def kinds_of(tree: Node) -> set[str]:
    return {tree.kind}.union(*(kinds_of(child) for child in tree.children.values()))


def joined(parts: list[EncodedTensor], axis: int) -> Tensor:
    for part in parts:
        check(part)
        check_values(part)
    return torch.cat([decode(part) for part in parts], axis)


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*LEAVES, *NODES])
def test_parts_of_random_trees_make_the_tensor(kind: str, count: int) -> None:
    rng = random.Random(f"{kind} {count}")
    done = 0
    for number in range(count):
        ranks = rng.choice((2, 3))
        shape = rng.choice(
            [(96, 64), (512, 192), (64, 96), (4, 32, 64), (33, 48), (3, 20, 96), (64, 16, 3, 3)]
        )
        tree = tree_of(rng, shape, 2, kind)
        if tree.kind != kind:
            continue  # nothing of this kind fits
        whole = random_tensor(tree, shape, number)
        axis = rng.randrange(len(shape))
        step = grain(tree, shape, axis)
        if step is None:
            with pytest.raises(FormatError, match="cannot be cut"):
                shard(whole, Span(axis, 0, 1 if shape[axis] > 1 else 0))
            continue
        try:
            parts = [shard(whole, span) for span in spans(shape[axis], axis, ranks, step)]
        except FormatError as error:
            assert "pieces of" in str(error) or "ranks" in str(error) or "rank" in str(error)
            continue
        found, expected = joined(parts, axis), decode(whole)
        if kinds_of(tree) & PRODUCTS:
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4 * float(expected.abs().max()))
        else:
            assert torch.equal(found, expected)
        done += 1
    assert done >= max(1, count // 20)


@pytest.mark.parametrize("kind", sorted(LEAVES))
def test_a_stack_of_experts_is_cut_between_experts(kind: str) -> None:
    rng = random.Random(kind)
    shape = (6, 32, 64)
    trees = (Node(kind, format_of(kind).Params(**LEAVES[kind](rng, shape))) for _ in range(50))
    tree = next((t for t in trees if grain(t, shape, 0) == 1), None)
    if tree is None:
        with pytest.raises(FormatError):
            shard(random_tensor(Node(kind, format_of(kind).Params()), shape, 0), Span(0, 1, 3))
        return
    whole = random_tensor(tree, shape, 0)
    parts = [shard(whole, Span(0, *ends)) for ends in ((0, 1), (1, 4), (4, 6))]
    assert torch.equal(joined(parts, 0), decode(whole))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_rotation_is_cut_with_its_signs(axis: int) -> None:
    params = format_of("rotated").Params(block_in=32, block_out=32, seed=2**31 - 5)
    tree = Node("rotated", params, {"x": Node("dense", format_of("dense").Params("float32"))})
    whole = random_tensor(tree, (128, 192), 0)
    parts = [shard(whole, span) for span in spans(whole.shape[axis], axis, 2, 32)]
    assert torch.equal(joined(parts, axis), decode(whole))


def trellis(sections: list[int], quarter_bits: tuple[int, ...]) -> EncodedTensor:
    """Random tiles; sections: the section of every row."""
    counts = tuple(sections.count(i) for i in range(len(quarter_bits)))
    params = format_of("trellis").Params(quarter_bits, counts)
    tree = Node("trellis", params)
    whole = random_tensor(tree, (len(sections), 48), 1)
    from nstf.kernels.formats import bitpack
    from nstf.kernels.formats import trellis as module

    numbers = bitpack.pack(torch.tensor([sections], dtype=torch.uint8), module.section_bits(params))[0]
    return EncodedTensor(tree, whole.shape, {**whole.arrays, "section": numbers})


def test_sections_of_rows_are_cut_where_each_has_whole_tiles() -> None:
    # In each half 16 rows of the first section and 32 of the second, mixed; the last third is of the third alone.
    half = [0, 1, 1] * 16
    whole = trellis([*half, *half, *([2] * 40)], (8, 12, 17))
    parts = [shard(whole, span) for span in (Span(0, 0, 48), Span(0, 48, 96), Span(0, 96, 136))]
    assert torch.equal(joined(parts, 0), decode(whole))
    assert parts[0].tree.params.rows == (16, 32) and parts[2].tree.params.quarter_bits == (17,)
    assert torch.equal(joined([shard(whole, s) for s in spans(48, 1, 3, 16)], 1), decode(whole))
    with pytest.raises(FormatError, match="tiles of 16 rows"):
        shard(whole, Span(0, 0, 24))


def test_parts_of_a_mapped_array_stay_views() -> None:
    tree = Node("int", format_of("int").Params(4, 32))
    whole = random_tensor(tree, (64, 128), 0)
    part = shard(whole, Span(0, 16, 32))
    assert part.arrays["codes"].data_ptr() == whole.arrays["codes"][16:].data_ptr()


def test_rows_of_one_trellis_section_stay_views() -> None:
    """Also the last ones, which fill no whole tile."""
    tree = Node("trellis", format_of("trellis").Params((12,)))
    whole = random_tensor(tree, (72, 48), 0)
    parts = [shard(whole, span) for span in (Span(0, 0, 32), Span(0, 32, 72))]
    assert torch.equal(joined(parts, 0), decode(whole))
    storage = whole.arrays["codes"].untyped_storage().data_ptr()
    assert all(p.arrays["codes"].untyped_storage().data_ptr() == storage for p in parts)


def test_what_cannot_be_cut_says_where_it_could() -> None:
    whole = random_tensor(Node("int", format_of("int").Params(4, 32)), (8, 128), 0)
    with pytest.raises(FormatError, match=r"along axis 1 at multiples of 32, not from 0 to 48"):
        shard(whole, Span(1, 0, 48))
    with pytest.raises(FormatError, match="pieces of 32"):
        spans(128, 1, 5, 32)
    with pytest.raises(FormatError, match="not in shape"):
        shard(whole, Span(0, 0, 9))
