"""Matrices that meet the same activations as one."""

from types import ModuleType

import torch

from nstf.kernels.formats import decode
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
