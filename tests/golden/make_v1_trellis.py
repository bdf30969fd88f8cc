"""Made `v1_trellis.nstf` and `v1_trellis_decoded.safetensors`: the trellis at every kind of rate, and rotated.

Added to version 1 before its first release; as with `make_v1.py`, the files must load for ever.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from nstf.kernels.formats import EncodedTensor, array_specs, bitpack, decode, node_from_json
from nstf.runtime.artifact import write_artifact

HERE = Path(__file__).parent


def main() -> None:
    generator = torch.Generator().manual_seed(20251121)
    leaves = {
        **{
            f"trellis.{q}": ({"kind": "trellis", "quarter_bits": [q], "scale_bits": 16}, (20, 17))
            for q in (4, 7, 12, 13, 22)
        },
        "trellis.sections": ({"kind": "trellis", "quarter_bits": [18, 9, 5], "rows": [3, 20, 7]}, (30, 32)),
    }
    child = leaves["trellis.sections"][0]
    rotated = {"kind": "rotated", "block_in": 32, "seed": 5, "children": {"x": child}}
    trees = {**leaves, "rotated": (rotated, (30, 32))}
    tensors, decoded = {}, {}
    for name, (tree, shape) in trees.items():
        node = node_from_json(tree)
        arrays = {}
        for path, spec in array_specs(node, shape).items():
            if spec.dtype == torch.uint8:
                arrays[path] = torch.randint(0, 256, spec.shape, generator=generator).to(spec.dtype)
            else:
                arrays[path] = torch.rand(spec.shape, generator=generator).to(spec.dtype)
            if path.endswith("section"):
                numbers = torch.tensor([0] * 3 + [1] * 20 + [2] * 7)[torch.randperm(30, generator=generator)]
                arrays[path] = bitpack.pack(numbers.to(torch.uint8)[None], 2)[0]
        tensors[name] = EncodedTensor(node, shape, arrays)
        decoded[name] = decode(tensors[name]).contiguous()
    write_artifact(HERE / "v1_trellis.nstf", tensors, {}, {})
    save_file(decoded, HERE / "v1_trellis_decoded.safetensors")


if __name__ == "__main__":
    main()
