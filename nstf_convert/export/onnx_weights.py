"""Our leaves as ONNX initialisers: blocks of 2, 4 or 8 bits as `MatMulNBits` of ONNX Runtime reads them, or float32.

`MatMulNBits` and `GatherBlockQuantized` store code and zero point as we do, little-endian, in blocks of 16 to 256 columns
with a float32 scale each: 8-bit scales are exact there. 3 bits become 4, and 5 to 7 become 8 (ONNX Runtime has no others).
All arrays go to one side file; a tied table and head point at the same bytes of it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nstf.kernels.formats import EncodedTensor, bitpack, decode
from nstf.kernels.formats.scales import per_column, read_scales
from nstf_convert.export import integers

BITS = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
BLOCKS = (256, 128, 64, 32, 16)
ALIGNMENT = 64
# Shape inference looks at axes and shapes, and wants them inside the graph.
INLINE_BYTES = 1024


@dataclass(frozen=True)
class Blocks:
    """A matrix [rows, cols] in blocks. data: uint8 [rows, blocks, block * bits / 8]; scale: float32 [rows, blocks];
    zeros: uint8 [rows, packed bytes], None where the middle code is zero."""

    bits: int
    block: int
    data: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any]
    zeros: np.ndarray[Any, Any] | None


def block_of(encoded: EncodedTensor) -> int | None:
    """The block size in which a matrix fits, None when it does not."""
    tree, shape = encoded.tree, encoded.shape
    if tree.kind != "int" or len(shape) != 2 or tree.params.lead != 1:
        return None
    group = tree.params.group or shape[1]
    return next((b for b in BLOCKS if shape[1] % b == 0 and group % b == 0), None)


def kind_of(encoded: EncodedTensor) -> tuple[str, str]:
    """(word, kind of the plan) of a matrix's or vector's form."""
    if block_of(encoded) is None:
        dense = encoded.tree.kind == "dense" and str(encoded.tree.params.dtype) == "float32"
        return "float32", "exact" if dense else "widened"
    bits = encoded.tree.params.bits
    return f"{BITS[bits]} bits in blocks of {block_of(encoded)}", "exact" if BITS[bits] == bits else "widened"


def size_of(encoded: EncodedTensor) -> int:
    """Bytes of the arrays."""
    block, count = block_of(encoded), int(np.prod(encoded.shape))
    if block is None:
        return 4 * count
    bits, rows = BITS[encoded.tree.params.bits], encoded.shape[0]
    zeros = (
        0 if encoded.tree.params.symmetric else rows * bitpack.packed_bytes(encoded.shape[1] // block, bits)
    )
    return count * bits // 8 + 4 * count // block + zeros


def blocks(encoded: EncodedTensor) -> Blocks:
    """The arrays of a matrix for which `block_of` gives a size."""
    block, params, (rows, cols) = block_of(encoded), encoded.tree.params, encoded.shape
    if block is None:
        raise ValueError(f"a {encoded.tree.kind} of shape {list(encoded.shape)} has no blocks")
    bits, count = BITS[params.bits], cols // block
    codes = bitpack.unpack(encoded.arrays["codes"], params.bits, cols)
    if params.symmetric:
        codes = codes + ((1 << (bits - 1)) - (1 << (params.bits - 1)))
    data = bitpack.pack(codes, bits).reshape(rows, count, block * bits // 8)
    every = slice(0, None, block)
    scale = per_column(read_scales(dict(encoded.arrays), params.scale_bits), params.group, cols)[:, every]
    zeros = None
    if not params.symmetric:
        wide = per_column(integers.zeros(encoded), params.group, cols)[:, every]
        zeros = bitpack.pack(wide.contiguous(), bits).numpy()
    return Blocks(bits, block, data.numpy(), scale.contiguous().float().numpy(), zeros)


class SideFile:
    """The file of external data beside an .onnx: arrays are appended, and named from the graph."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._out = path.open("wb")
        self.initialisers: list[Any] = []

    def add(
        self, name: str, array: np.ndarray[Any, Any], shape: tuple[int, ...] | None = None
    ) -> tuple[int, int]:
        """Appends an array and makes its initialiser; returns its place for `again`."""
        if array.nbytes <= INLINE_BYTES and array.dtype == np.int64:
            import onnx

            self.initialisers.append(onnx.numpy_helper.from_array(array, name))
            return 0, 0
        place = (-(-self._out.tell() // ALIGNMENT) * ALIGNMENT, array.nbytes)
        self._out.seek(place[0])
        self._out.write(np.ascontiguousarray(array).data)
        self.again(name, array.dtype, shape or array.shape, place)
        return place

    def again(self, name: str, dtype: Any, shape: tuple[int, ...], place: tuple[int, int]) -> None:
        """Another initialiser on the same bytes."""
        import onnx

        tensor = onnx.TensorProto()
        tensor.name = name
        tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        tensor.dims.extend(int(n) for n in shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", self.path.name), ("offset", place[0]), ("length", place[1])):
            tensor.external_data.add(key=key, value=str(value))
        self.initialisers.append(tensor)

    def close(self) -> None:
        self._out.close()


def dense(encoded: EncodedTensor) -> np.ndarray[Any, Any]:
    """The decoded values, float32."""
    return decode(encoded, torch.float32).contiguous().numpy()
