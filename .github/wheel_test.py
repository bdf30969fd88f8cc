"""What a wheel must do on every Python it is for: import, compile nothing, encode, multiply, write and read a file."""

import sys
import tempfile
from pathlib import Path

import torch

import nstf
from nstf.kernels.cpu import AVAILABLE
from nstf.kernels.formats import decode
from nstf.kernels.linear import linear
from nstf.quantizers import int_grid, trellis
from nstf.runtime.artifact import write_artifact

assert AVAILABLE, "the wheel holds no compiled kernels"
weight, x = torch.randn(64, 64), torch.randn(1, 64)
encoded = {"int": int_grid.encode(weight, int_grid.Params(bits=4, group=32))}
encoded["trellis"] = trellis.encode(weight, trellis.Params(quarter_bits=12))
for name, tensor in encoded.items():
    assert torch.allclose(linear(x, tensor), x @ decode(tensor).T, atol=0.2), name
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "a.nstf"
    write_artifact(path, encoded, {}, {})
    with nstf.open(path, verify=True) as file:
        assert {name: tensor.shape for name, tensor in file.tensors.items()} == dict.fromkeys(
            encoded, (64, 64)
        )
        for name in encoded:
            assert torch.equal(file.decode(name), decode(encoded[name]))
print(f"nstf {nstf.__version__} works on Python {sys.version.split()[0]}, torch {torch.__version__}")
