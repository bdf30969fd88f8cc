"""Matrices that meet the same activations as one."""

from types import ModuleType

import torch

from nstf.kernels.formats import Node, decode
from nstf.kernels.formats.tree import format_of
from nstf.kernels.triton.spec import hollow
from nstf.runtime.stacking import agree, stack


def test_shuffle_codes_stack_where_segments_end_and_keep_their_values(tiny: ModuleType) -> None:
    leaf = tiny.leaf("shuffle", quarter_bits=14)
    parts = [tiny.random_encoded(leaf, (rows, 72)) for rows in (512, 256, 40)]
    for i, part in enumerate(parts):
        part.arrays["scale_super"].fill_(0.5 + i)
    joined = stack(parts)
    assert joined is not None
    whole, views = joined
    assert torch.equal(decode(whole), torch.cat([decode(part) for part in parts]))
    for view, part in zip(views, parts, strict=True):
        assert torch.equal(decode(view), decode(part))
        # Codes are not held twice.
        assert (
            view.arrays["codes"].untyped_storage().data_ptr()
            == whole.arrays["codes"].untyped_storage().data_ptr()
        )
    # A path of the second would go on where the first one's rows end.
    assert not agree([parts[2], parts[0]]) and stack([parts[2], parts[0]]) is None


def test_trellis_codes_stack_where_tiles_end_and_rotated_ones_in_their_basis(tiny: ModuleType) -> None:
    def rotated(leaf: Node, **params: int) -> Node:
        return Node("rotated", format_of("rotated").Params(**params), {"x": leaf})

    leaf = tiny.leaf("trellis", quarter_bits=(11,))
    for tree in (leaf, rotated(leaf, block_in=32), rotated(tiny.leaf("int", bits=4, group=32), block_in=64)):
        parts = [tiny.random_encoded(tree, (rows, 192), seed) for seed, rows in enumerate((64, 16, 40))]
        joined = stack(parts)
        assert joined is not None
        whole, views = joined
        assert torch.equal(decode(whole), torch.cat([decode(part) for part in parts]))
        for view, part in zip(views, parts, strict=True):
            assert view.tree == part.tree and view.arrays.keys() == part.arrays.keys()
            assert torch.equal(decode(view), decode(part))
    shapes = ((64, 192), (64, 192))
    for tree in (
        tiny.leaf("trellis", quarter_bits=(8, 12), rows=(32, 32)),
        rotated(leaf, block_in=32, block_out=32),
        rotated(tiny.leaf("int", bits=5, group=32), block_in=32),
    ):
        assert not agree([hollow(tree, shape) for shape in shapes])
    assert agree([hollow(leaf, shape) for shape in shapes])
    assert not agree([hollow(leaf, (40, 192)), hollow(leaf, (64, 192))])
    seeds = [hollow(rotated(leaf, block_in=32, seed=seed), shapes[0]) for seed in (0, 1)]
    assert not agree(seeds)
