"""Made `v1_shuffle.nstf` and `v1_shuffle_decoded.safetensors`: shuffle codes, over segments, and rotated.

Added to version 1 before its first release; as with `make_v1.py`, the files must load for ever.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from nstf.kernels.formats import EncodedTensor, array_specs, decode, node_from_json
from nstf.runtime.artifact import write_artifact

HERE = Path(__file__).parent


def main() -> None:
    generator = torch.Generator().manual_seed(20261122)
    trees = {
        f"shuffle.{q}": ({"kind": "shuffle", "quarter_bits": q, "scale_bits": 16 if q % 2 else 8}, (40, 70))
        for q in (8, 11, 16, 20)
    }
    trees["shuffle.segments"] = ({"kind": "shuffle", "quarter_bits": 9}, (300, 10))
    child = {"kind": "shuffle", "quarter_bits": 14}
    trees["rotated"] = (
        {"kind": "rotated", "block_in": 32, "block_out": 32, "seed": 5, "children": {"x": child}}, (32, 64),
    )  # fmt: skip
    tensors, decoded = {}, {}
    for name, (tree, shape) in trees.items():
        node = node_from_json(tree)
        arrays = {
            path: torch.randint(0, 256, spec.shape, generator=generator).to(spec.dtype)
            if spec.dtype == torch.uint8
            else torch.rand(spec.shape, generator=generator).to(spec.dtype)
            for path, spec in array_specs(node, shape).items()
        }
        tensors[name] = EncodedTensor(node, shape, arrays)
        decoded[name] = decode(tensors[name]).contiguous()
    write_artifact(HERE / "v1_shuffle.nstf", tensors, {}, {})
    save_file(decoded, HERE / "v1_shuffle_decoded.safetensors")


if __name__ == "__main__":
    main()
