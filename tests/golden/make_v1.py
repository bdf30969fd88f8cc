"""Made `v1.nstf` and `v1_decoded.safetensors`: one tensor per format of version 1, and what each decodes to.

Kept as the record of how; not run by the tests. Never write over the files of a released version: whatever
changes, they must load for ever. A new version gets files of its own.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nstf.kernels.formats import ArraySpec, EncodedTensor, array_specs, decode, node_from_json
from nstf.runtime.artifact import Shared, write_artifact

HERE = Path(__file__).parent
F16 = {"kind": "dense", "dtype": "float16"}
INT4 = {"kind": "int", "bits": 4, "group": 8, "symmetric": True, "scale_bits": 16}
CP = {f"factor{i}": F16 for i in range(3)}
TRAIN = {f"core{i}": F16 for i in range(3)}
TREES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "dense.bfloat16": ({"kind": "dense", "dtype": "bfloat16"}, (5,)),
    "dense.scalar": ({"kind": "dense", "dtype": "float64"}, ()),
    "dense.bool": ({"kind": "dense", "dtype": "bool"}, (3,)),
    "int.2.row": ({"kind": "int", "bits": 2, "group": 0, "symmetric": False}, (3, 13)),
    "int.3.scale8": ({"kind": "int", "bits": 3, "group": 8, "symmetric": False, "scale_bits": 8}, (3, 20)),
    "int.4": ({"kind": "int", "bits": 4, "group": 32}, (3, 40)),
    "int.5": ({"kind": "int", "bits": 5, "group": 16}, (2, 19)),
    "int.6.stack": ({"kind": "int", "bits": 6, "group": 8, "lead": 2}, (2, 3, 9)),
    "int.7": ({"kind": "int", "bits": 7, "group": 8}, (2, 9)),
    "int.8": ({"kind": "int", "bits": 8, "group": 0}, (2, 9)),
    "grid": ({"kind": "grid", "group": 16}, (3, 21)),
    "grid.scale8": ({"kind": "grid", "group": 8, "scale_bits": 8}, (3, 21)),
    "fp8.e4m3fn": ({"kind": "fp8", "variant": "e4m3fn", "group": 16}, (2, 20)),
    "fp8.e4m3fnuz": ({"kind": "fp8", "variant": "e4m3fnuz", "group": 0, "scale_bits": 32}, (2, 20)),
    "mxfp4": ({"kind": "mxfp4"}, (2, 40)),
    "low_rank": ({"kind": "low_rank", "rank": 2, "children": {"a": F16, "b": INT4}}, (4, 16)),
    "add": ({"kind": "add", "children": {"x": INT4, "y": F16}}, (2, 8)),
    "permute": ({"kind": "permute", "dims": [1, 0], "children": {"x": INT4}}, (8, 3)),
    "cp": ({"kind": "cp", "rank": 2, "view": [2, 3, 4], "children": CP}, (6, 4)),
    "tucker": (
        {"kind": "tucker", "ranks": [2, 4], "view": [3, 4], "children": {"core": F16, "factor0": F16}},
        (3, 4),
    ),
    "tensor_train": ({"kind": "tensor_train", "ranks": [2, 2], "view": [2, 3, 4], "children": TRAIN}, (6, 4)),
}


def values(generator: torch.Generator, name: str, path: str, spec: ArraySpec) -> torch.Tensor:
    """Random values that decode to finite numbers."""
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator, dtype=torch.float64).to(spec.dtype)
    low, high = 0, 256
    if spec.dtype == torch.bool:
        high = 2
    elif name.startswith("fp8"):
        high = 120
    elif path == "scale":  # mxfp4: powers of two
        low, high = 110, 140
    return torch.randint(low, high, spec.shape, generator=generator).to(spec.dtype)


def main() -> None:
    generator = torch.Generator().manual_seed(20251121)
    tensors: dict[str, EncodedTensor | Shared] = {"shared": Shared("int.4")}
    decoded = {}
    for name, (tree, shape) in TREES.items():
        node = node_from_json(tree)
        arrays = {
            path: values(generator, name, path, spec) for path, spec in array_specs(node, shape).items()
        }
        tensors[name] = encoded = EncodedTensor(node, shape, arrays)
        decoded[name] = decode(encoded).contiguous()
    files = {
        "config.json": b'{"architectures":["Golden"],"model_type":"golden"}\n' * 4,
        "raw.bin": bytes(range(64)),
    }
    meta = {"plan": {"budget_bytes": 4096}, "provenance": {"tool": "nstf"}, "report": {"kld": 0.0625}}
    write_artifact(HERE / "v1.nstf", tensors, files, meta)
    save_file(decoded, HERE / "v1_decoded.safetensors")


if __name__ == "__main__":
    main()
