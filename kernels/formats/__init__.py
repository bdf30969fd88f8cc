"""What every encoding means: one file per node kind, each with its parameters, its arrays and its `decode`.

An encoded tensor is a tree (`Node`) plus named arrays. Leaves are stored arrays (`int`, `fp8`, `mxfp4`, `grid`,
`trellis`, `dense`); inner nodes say how their children combine (`low_rank`, `cp`, `tucker`, `tensor_train`, `add`,
`permute`, `rotated`). `decode` in plain torch is the definition of every kind; kernels are faster ways to the same result.

This package is all a reader of artifacts needs: it imports torch and nothing of the conversion side.
"""

from nstf.kernels.formats.tree import (
    ArraySpec,
    EncodedTensor,
    FormatError,
    Node,
    array_specs,
    check,
    check_values,
    child_encoded,
    decode,
    join,
    kinds,
    leaf_code_bits,
    node_from_json,
    node_to_json,
    stored_bytes,
)

__all__ = [
    "ArraySpec",
    "EncodedTensor",
    "FormatError",
    "Node",
    "array_specs",
    "check",
    "check_values",
    "child_encoded",
    "decode",
    "join",
    "kinds",
    "leaf_code_bits",
    "node_from_json",
    "node_to_json",
    "stored_bytes",
]
