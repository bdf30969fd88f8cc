"""`--to onnx`: a language model that ONNX Runtime runs: `<name>.onnx`, its side file of weights, tokenizer and config."""

from pathlib import Path

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
from nstf.kernels.formats import EncodedTensor, stored_bytes
from nstf.runtime.artifact import Artifact
from nstf.runtime.artifact.config import limits_of
from nstf_convert.export import onnx_graph
from nstf_convert.export import onnx_weights as weights
from nstf_convert.export.hf import copy_files, files_bytes
from nstf_convert.export.plan import ExportPlan, Item, as_stated, without_attention_plan
from nstf_convert.export.writing import Files, listed
from nstf_convert.pipeline.propose.recipe import describe


def plan(artifact: Artifact, dtype: str | None) -> ExportPlan:
    """What the model holds: everything exactly, what has no blocks of 2, 4 or 8 bits in float32. Raises UnsupportedError."""
    if dtype not in (None, "float32"):
        raise UsageError(f"target 'onnx' decodes to float32: leave `dtype` {dtype} out")
    config = _config(artifact)
    with as_stated(artifact, "onnx"):
        onnx_graph.check(config)
        rotary_bytes = onnx_graph.rotary_bytes(config)
        most = 8 * limits_of(artifact.manifest).buffer_elements  # two tables of float32
        if rotary_bytes > most:
            raise CorruptError(
                f"{artifact.path}: the angles of the {config['max_position_embeddings']} max_position_embeddings of its "
                f"config.json take {rotary_bytes} bytes, and its tensors allow {most} at most; use a smaller context"
            )
    onnx_graph.check_names(_names(artifact))
    items = []
    for name in _names(artifact):
        encoded = artifact.encoded(name)
        there, kind = weights.kind_of(encoded)
        size = weights.size_of(encoded)
        if name == "model.embed_tokens.weight" and there.startswith("2 bits"):
            there, kind, size = "float32", "widened", 4 * encoded.shape[0] * encoded.shape[1]
        here = stored_bytes(encoded.tree, encoded.shape)
        items.append(Item(name, (name,), describe(encoded.tree), there, kind, here, size))
    notes = without_attention_plan(artifact, "ONNX Runtime")
    # Beside the tokenizer: the graph, about a megabyte, and the rotary tables.
    other = files_bytes(artifact) + (1 << 20) + rotary_bytes
    return ExportPlan("onnx", tuple(items), other, notes)


def write(artifact: Artifact, plan: ExportPlan, folder: Path, stem: str) -> Files:
    """Writes graph, side file, tokenizer and config."""
    config = _config(artifact)
    copy_files(artifact, folder, {})
    side = weights.SideFile(folder / f"{stem}.onnx.data")

    names = set(_names(artifact))

    def get(name: str) -> EncodedTensor:
        if name not in names:
            raise UnsupportedError(
                f"{artifact.path} has no {name!r}, which its config.json asks for; fetch or convert it again"
            )
        encoded = artifact.encoded(name)
        if len(encoded.shape) != (1 if name.endswith((".bias", "norm.weight")) else 2):
            raise UnsupportedError(
                f"{artifact.path}: {name!r} has the shape {list(encoded.shape)}, which is not that of its place; fetch or "
                "convert it again"
            )
        return encoded

    try:
        with as_stated(artifact, "onnx"):
            graph = onnx_graph.Graph(config, side, get, names)
        model = graph.build()
    finally:
        side.close()
    (folder / f"{stem}.onnx").write_bytes(model.SerializeToString())
    return listed(folder)


def _config(artifact: Artifact) -> dict[str, object]:
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise NstfError("target 'onnx' needs the package onnx; run `pip install onnx`") from error
    if "config.json" not in artifact.file_names():
        raise UnsupportedError(
            f"{artifact.path} has no config.json: give the .onnx it was converted from as `source`"
        )
    from nstf.runtime.engine_config import completed

    with as_stated(artifact, "onnx"):
        stated = artifact.config()
        # Older files say rope_scaling and rope_theta. Types that are not written are refused by `check`.
        return dict(completed(stated) if stated.get("model_type") in onnx_graph.MODEL_TYPES else stated)


def _names(artifact: Artifact) -> list[str]:
    """Stored tensors; a head that shares the table is the table, under whichever name it is stored."""
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    names = [n for n in artifact.names() if artifact.stored_name(n) == n]
    turned = table in artifact.names() and artifact.stored_name(table) == head
    return [table if turned and n == head else n for n in names]
