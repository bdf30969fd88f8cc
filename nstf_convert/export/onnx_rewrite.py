"""`--to onnx --source FILE`: the .onnx that was converted, its weights replaced by what the artifact stores.

An integer matrix becomes 4- or 8-bit codes behind `DequantizeLinear` (by blocks or rows; opset 21), and where a `Gemm`
reads it transposed, `MatMulNBits` of ONNX Runtime. Everything else in the graph stays as it is, and what has neither
form is decoded.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError, out_of_memory
from nstf.kernels.formats import EncodedTensor, stored_bytes
from nstf.kernels.formats.scales import matrix_shape, per_column, read_scales
from nstf.runtime.artifact import Artifact
from nstf.runtime.artifact.atomic_file import raise_disk_fault
from nstf.runtime.memory_limit import has_room
from nstf_convert.checkpoint.onnx import check_whole, open_file
from nstf_convert.checkpoint.paths import check_name
from nstf_convert.export import integers
from nstf_convert.export import onnx_weights as weights
from nstf_convert.export.plan import ExportPlan, Item, decoded
from nstf_convert.export.raise_opset import NO_MEMORY
from nstf_convert.export.writing import Files, listed
from nstf_convert.pipeline.propose.recipe import describe

MICROSOFT = "com.microsoft"
# 4-bit integers and blocks came with this version of ONNX's operators.
OPSET = 21
# Seconds for that: functions of a graph that call each other take the converter time by a power of two.
LONGEST = 300
# A protobuf ends at 2 GiB.
LARGEST_INLINE = 3 << 29


def plan(artifact: Artifact, dtype: str | None, source: Path) -> ExportPlan:
    """What the rewritten model holds. Raises UsageError for a source without the artifact's tensors."""
    if dtype is not None:
        raise UsageError("`source` decides the types: leave `dtype` out")
    model = _load(source)
    found = {t.name: t for t in model.graph.initializer}
    names = {unquote(n): n for n in artifact.names() if unquote(n) in found}
    if len(names) != len(artifact.names()):
        missing = next(n for n in artifact.names() if unquote(n) not in found)
        raise UsageError(
            f"{source} has no weight {missing!r} of {artifact.path}: give the file that was converted"
        )
    items = []
    readers = _readers(model)
    for name, own in names.items():
        encoded = artifact.encoded(own)
        if tuple(found[name].dims) != tuple(encoded.shape):
            raise UsageError(
                f"{source}: {name!r} has another shape than in {artifact.path}: give the file that was converted"
            )
        there, kind, size = _form(encoded, _dtype(found[name]), _is_gemm(readers.get(name, []), name))
        here = stored_bytes(encoded.tree, encoded.shape)
        items.append(Item(name, (own,), describe(encoded.tree), there, kind, here, size))
    return ExportPlan("onnx", tuple(items), 1 << 20, extra={"source": source})


def write(artifact: Artifact, plan: ExportPlan, folder: Path, stem: str) -> Files:
    """Writes `<stem>.onnx`, with a side file when it is larger than a protobuf may be."""
    import onnx

    model = _load(plan.extra["source"])
    if any("bit" in item.there and not item.there.startswith("MatMul") for item in plan.items):
        model = _raised(model, plan.extra["source"])
    found = {t.name: t for t in model.graph.initializer}
    readers = _readers(model)
    nodes: list[Any] = []
    for item in plan.items:
        encoded, tensor = artifact.encoded(item.sources[0]), found[item.name]
        if item.there.startswith("MatMulNBits"):
            _matmul(model, item.name, encoded, readers[item.name])
            model.graph.initializer.remove(tensor)
        elif "bit" in item.there:
            nodes += _dequantised(model, item.name, encoded, _dtype(tensor))
            model.graph.initializer.remove(tensor)
        else:
            value = decoded(encoded, getattr(torch, _dtype(tensor)), item.name)
            tensor.CopyFrom(_constant(item.name, value))
    replaced = {item.name for item in plan.items if "bit" in item.there}
    for value in [v for v in model.graph.input if v.name in replaced]:
        model.graph.input.remove(value)  # older files list initialisers as inputs, too
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    path = folder / f"{stem}.onnx"
    if model.ByteSize() > LARGEST_INLINE:
        onnx.save_model(model, str(path), save_as_external_data=True, location=f"{stem}.onnx.data")
    else:
        path.write_bytes(model.SerializeToString())
    return listed(folder)


def _form(encoded: EncodedTensor, dtype: str, gemm: bool) -> tuple[str, str, int]:
    """(word, kind of the plan, bytes) of a weight."""
    tree, count = encoded.tree, int(np.prod(encoded.shape))
    size = count * getattr(torch, dtype).itemsize
    if tree.kind == "dense":
        stored = str(tree.params.dtype)
        # A narrower float of ours is written in the source's type.
        narrow = getattr(torch, stored).itemsize < getattr(torch, dtype).itemsize
        return dtype, "exact" if stored == dtype else "widened" if narrow else "lossy", size
    if dtype != "float32":
        return dtype, "lossy", size
    if gemm and weights.block_of(encoded) is not None:
        word, kind = weights.kind_of(encoded)
        return f"MatMulNBits, {word}", kind, weights.size_of(encoded)
    if not _is_plain(encoded):
        return dtype, "widened", size
    bits = 4 if tree.params.bits <= 4 else 8
    rows, cols = matrix_shape(encoded.shape, 1)
    groups = cols // (tree.params.group or cols)
    kind = "exact" if bits == tree.params.bits else "widened"
    zeros = 0 if tree.params.symmetric else rows * groups * bits // 8
    return f"{bits}-bit DequantizeLinear", kind, count * bits // 8 + rows * groups * 4 + zeros


def _is_plain(encoded: EncodedTensor) -> bool:
    """An integer leaf whose first axis makes the rows, in whole groups."""
    tree = encoded.tree
    if tree.kind != "int" or tree.params.lead != 1 or len(encoded.shape) < 2:
        return False
    _, cols = matrix_shape(encoded.shape, 1)
    group = int(tree.params.group)
    return group == 0 or cols % group == 0


def _dequantised(model: Any, name: str, encoded: EncodedTensor, dtype: str) -> list[Any]:
    """The nodes that make the weight `name`; their constants are added to the model."""
    from onnx import TensorProto, helper

    params = encoded.tree.params
    rows, cols = matrix_shape(encoded.shape, 1)
    bits = 4 if params.bits <= 4 else 8
    whole = params.group == 0
    scale = read_scales(dict(encoded.arrays), params.scale_bits).reshape((rows,) if whole else (rows, -1))
    parts = integers.read(encoded)
    if params.symmetric:
        codes, kind = parts.units, TensorProto.INT4 if bits == 4 else TensorProto.INT8
    else:
        zeros = integers.zeros(encoded)
        wide = per_column(zeros, params.group, cols).to(torch.int16)
        codes, kind = parts.units + wide, TensorProto.UINT4 if bits == 4 else TensorProto.UINT8
        zeros = zeros.reshape(scale.shape)
        model.graph.initializer.append(_packed(f"{name}.nstf_zeros", zeros.to(torch.int16), kind))
    model.graph.initializer.append(_packed(f"{name}.nstf_codes", codes, kind))
    model.graph.initializer.append(_constant(f"{name}.nstf_scale", scale.float()))
    inputs = [f"{name}.nstf_codes", f"{name}.nstf_scale"]
    if not params.symmetric:
        inputs.append(f"{name}.nstf_zeros")
    matrix = len(encoded.shape) == 2
    out = name if matrix else f"{name}.nstf_matrix"
    settings = {"axis": 0} if whole else {"axis": 1, "block_size": params.group}
    nodes = [helper.make_node("DequantizeLinear", inputs, [out], name=f"{name}.nstf", **settings)]
    if not matrix:
        model.graph.initializer.append(_constant(f"{name}.nstf_shape", torch.tensor(encoded.shape)))
        nodes.append(
            helper.make_node("Reshape", [out, f"{name}.nstf_shape"], [name], name=f"{name}.nstf_view")
        )
    return nodes


def _matmul(model: Any, name: str, encoded: EncodedTensor, gemms: list[Any]) -> None:
    """Every `Gemm` that reads the weight becomes `MatMulNBits`, and `Add` for its bias."""
    from onnx import helper

    parts = weights.blocks(encoded)
    rows, cols = encoded.shape
    arrays = {"codes": parts.data, "scale": parts.scale} | (
        {} if parts.zeros is None else {"zeros": parts.zeros}
    )
    for word, array in arrays.items():
        model.graph.initializer.append(_constant(f"{name}.nstf_{word}", torch.from_numpy(array)))
    own = [f"{name}.nstf_{word}" for word in arrays]
    settings = {"K": cols, "N": rows, "bits": parts.bits, "block_size": parts.block}
    for node in gemms:
        at = list(model.graph.node).index(node)
        output = node.output[0]
        bias = node.input[2] if len(node.input) > 2 and node.input[2] else ""
        product = f"{output}.nstf_product" if bias else output
        made = [
            helper.make_node("MatMulNBits", [node.input[0], *own], [product], domain=MICROSOFT, **settings)
        ]
        if bias:
            made.append(helper.make_node("Add", [product, bias], [output]))
        model.graph.node.remove(node)
        for new in reversed(made):
            model.graph.node.insert(at, new)
    if not any(entry.domain == MICROSOFT for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))


def _readers(model: Any) -> dict[str, list[Any]]:
    """Nodes of the main graph by what they read; a weight that a sub-graph reads has None among its readers."""
    found: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            found.setdefault(name, []).append(node)
        for attribute in node.attribute:
            for inner in attribute.g.node:
                for name in inner.input:
                    found.setdefault(name, []).append(None)
    return found


def _is_gemm(readers: list[Any], name: str) -> bool:
    """Whether a weight is only ever read as the transposed matrix of plain `Gemm` nodes."""
    return bool(readers) and all(node is not None and _is_plain_gemm(node, name) for node in readers)


def _is_plain_gemm(node: Any, name: str) -> bool:
    values = {a.name: (a.f if a.name in ("alpha", "beta") else a.i) for a in node.attribute}
    plain = values.get("alpha", 1.0) == 1.0 and values.get("beta", 1.0) == 1.0 and not values.get("transA")
    return node.op_type == "Gemm" and plain and values.get("transB") == 1 and list(node.input[1:2]) == [name]


def _packed(name: str, values: torch.Tensor, kind: int) -> Any:
    """An initialiser of 4- or 8-bit integers from int16 values."""
    from onnx import TensorProto, helper

    raw = (
        values.to(torch.uint8)
        if kind in (TensorProto.UINT4, TensorProto.UINT8)
        else values.to(torch.int8).view(torch.uint8)
    )
    flat = raw.reshape(-1)
    if kind in (TensorProto.INT4, TensorProto.UINT4):
        flat = torch.nn.functional.pad(flat & 15, (0, flat.numel() % 2))
        flat = flat[::2] | (flat[1::2] << 4)
    return helper.make_tensor(name, kind, list(values.shape), flat.numpy().tobytes(), raw=True)


def _constant(name: str, value: torch.Tensor) -> Any:
    from onnx import TensorProto, helper

    kinds = {
        torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16,
        torch.float64: TensorProto.DOUBLE, torch.int64: TensorProto.INT64, torch.int32: TensorProto.INT32,
        torch.uint8: TensorProto.UINT8, torch.int8: TensorProto.INT8, torch.bool: TensorProto.BOOL,
        torch.int16: TensorProto.INT16, torch.uint16: TensorProto.UINT16, torch.uint32: TensorProto.UINT32,
        torch.uint64: TensorProto.UINT64,
    }  # fmt: skip
    if value.dtype not in kinds:
        raise UnsupportedError(
            f"tensor {name!r} is of {value.dtype}, for which target 'onnx' has no form: export to 'hf'"
        )
    flat: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return helper.make_tensor(name, kinds[value.dtype], list(value.shape), flat.tobytes(), raw=True)


def _dtype(tensor: Any) -> str:
    from nstf_convert.checkpoint.onnx import DTYPES

    return DTYPES.get(tensor.data_type, "float32")


def _raised(model: Any, source: Path) -> Any:
    """The model at an opset with blocked 4-bit `DequantizeLinear`. Raises UnsupportedError."""
    version = next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), None)
    if version is None:
        raise UnsupportedError(f"{source} does not say which opset its operators are of: export it anew")
    if version < OPSET:
        try:
            model = _converted(model)
        except ValueError as error:
            raise UnsupportedError(
                f"{source} is of opset {version} and cannot be raised to {OPSET}, which 4-bit weights need "
                f"({str(error)[:160]}): export it anew"
            ) from error
    model.ir_version = max(model.ir_version, 10)
    return model


def _converted(model: Any) -> Any:
    """The model at OPSET, made by a process of its own (raise_opset.py). Raises ValueError that says why not, and NstfError
    where the machine does not do it."""
    import onnx

    # -P: `onnx` is not this folder's onnx.py.
    command = [sys.executable, "-P", str(Path(__file__).with_name("raise_opset.py")), str(OPSET)]
    try:
        content = model.SerializeToString()
    except Exception as error:  # of protobuf's own class: above 2 GiB
        raise ValueError(f"it is no single protobuf: {' '.join(str(error).split())}") from error
    try:
        done = subprocess.run(command, input=content, capture_output=True, check=False, timeout=LONGEST)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"onnx's converter did not end in {LONGEST} seconds") from error
    except OSError as error:
        raise NstfError(f"no process could be started for onnx's converter: {error.strerror}") from error
    if done.returncode in (NO_MEMORY, -signal.SIGKILL):
        raise NstfError("onnx's converter found no memory for the source; free some")
    if done.returncode < 0:
        raise ValueError(f"onnx's converter ended by signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        raise ValueError(next((line for line in reversed(lines) if line.strip()), "for no stated reason"))
    return onnx.load_model_from_string(done.stdout)


def weight_files(source: Path) -> list[Path]:
    """The files beside a model that hold weights of it."""
    model = _load(source, weights=False)
    names = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    return sorted(source.parent / name for name in names)


def _load(source: Path, weights: bool = True) -> Any:
    try:
        import onnx
    except ImportError as error:
        raise NstfError("`source` needs the package onnx; run `pip install onnx`") from error
    if not source.is_file():
        raise UsageError(f"no such file: {source}")
    check_name(source)
    with closing(open_file(source)) as checked:  # as a conversion has read it: sizes, names of other files
        own = source.stat().st_size
        beside = max(0, checked.total_bytes - own) if weights else 0
    check_whole(source)
    if not has_room(2 * own + beside):  # protobuf ends the process where it finds none
        raise NstfError(f"{source}: not enough memory to load it; free some, or raise its limit")
    try:
        model = onnx.load(str(source), load_external_data=False)
        # A conversion has looked at these; onnx would also read those of constants and of graphs inside, from any file.
        if any(map(_is_outside, _others(model))):
            raise UnsupportedError(
                f"{source} keeps values of a constant or of a graph inside in another file: save it as one file"
            )
        for tensor in model.graph.initializer if weights else ():
            if _is_outside(tensor):
                onnx.external_data_helper.load_external_data_for_tensor(tensor, str(source.parent))
                tensor.data_location = onnx.TensorProto.DEFAULT  # older versions leave these
                del tensor.external_data[:]
        return model
    except NstfError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise NstfError(
                f"{source}: not enough memory to load it; free some, or raise its limit"
            ) from error
        raise_disk_fault(error, f"read {source}")
        # protobuf's DecodeError and onnx's own errors have no common class.
        raise CorruptError(
            f"{source} is not a readable .onnx file ({' '.join(str(error).split())[:120]})"
        ) from error


def _is_outside(message: Any) -> bool:
    """Whether it is a tensor whose values are in another file."""
    import onnx

    outside = onnx.TensorProto.EXTERNAL
    return isinstance(message, onnx.TensorProto) and message.data_location == outside


def _others(model: Any) -> Iterator[Any]:
    """All messages inside of a model but the initialisers of its graph."""
    for field, value in model.ListFields():
        if field.name != "graph":
            yield from _within(field, value)
            continue
        for inner, held in value.ListFields():
            if inner.name != "initializer":
                yield from _within(inner, held)


def _within(field: Any, value: Any) -> Iterator[Any]:
    """The messages in a field, and those in them."""
    if field.message_type is None:
        return
    for message in [value] if hasattr(value, "ListFields") else value:
        yield message
        for inner, held in message.ListFields():
            yield from _within(inner, held)
