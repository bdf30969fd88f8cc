"""`--to gguf`: one file for llama.cpp and what is built on it."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from nstf.errors import NstfError, UnsupportedError
from nstf.kernels.formats import EncodedTensor, stored_bytes
from nstf.runtime.artifact import Artifact
from nstf.runtime.handed_on import files_for_others
from nstf.runtime.tokenizer_files import tokenizer_names
from nstf.runtime.tokenizer_growth import check_growth
from nstf_convert.checkpoint.gguf_check import read_header
from nstf_convert.export import gguf_blocks as blocks
from nstf_convert.export import gguf_names as names
from nstf_convert.export import gguf_vocab
from nstf_convert.export.plan import ExportPlan, Item, as_stated, without_attention_plan
from nstf_convert.export.writing import Files, listed
from nstf_convert.pipeline.propose.recipe import describe


def plan(artifact: Artifact, dtype: str | None) -> ExportPlan:
    """What a GGUF of `artifact` holds. dtype: of what no type holds exactly, None for float16. Raises UnsupportedError."""
    config, _, placed = _layout(artifact)
    with as_stated(artifact, "gguf"):
        vocab_size = int(config["vocab_size"])
    items = []
    for place in placed:
        encoded = artifact.encoded(place.source)
        there, kind = blocks.type_of(encoded, dtype or "float16")
        items.append(
            Item(
                place.name,
                (place.source,),
                describe(encoded.tree),
                there,
                kind,
                stored_bytes(encoded.tree, encoded.shape),
                blocks.size_of(there, encoded.shape),
            )
        )
    # Tokens are stored as text, with a merge each: about 40 bytes a token.
    other = 65536 + 40 * vocab_size
    return ExportPlan("gguf", tuple(items), other, without_attention_plan(artifact, "llama.cpp"))


def write(artifact: Artifact, plan: ExportPlan, folder: Path, stem: str) -> Files:
    """Writes `<stem>.gguf` into `folder`, one tensor in memory at a time."""
    import gguf

    config, name, placed = _layout(artifact)
    writer = gguf.GGUFWriter(str(folder / f"{stem}.gguf"), name)
    writer.add_name(stem)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(_file_type(plan))
    with as_stated(artifact, "gguf"):
        factors = names.write_metadata(writer, name, config)
    with tempfile.TemporaryDirectory(prefix="nstf-", ignore_cleanup_errors=True) as side:
        tokenizer_names(artifact)  # before any of them is unpacked
        for file, content in files_for_others(artifact):
            if file == "tokenizer.json":
                check_growth(content, artifact.where)
            (Path(side) / file).write_bytes(content)
        with as_stated(artifact, "gguf"):
            gguf_vocab.write_vocabulary(writer, Path(side), int(config["vocab_size"]))
    types = {item.name: item.there for item in plan.items}
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for place in placed:
        _announce(writer, place, artifact.record(place.source).shape, types[place.name])
    writer.write_header_to_file()
    with as_stated(artifact, "gguf"):  # numbers beyond their type are noticed here
        writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for place in placed:
        writer.write_tensor_data(_data(artifact.encoded(place.source), place, types[place.name]))
    writer.close()
    try:  # numpy, which writes the tensors, says nothing when the last of them did not fit
        read_header(folder / f"{stem}.gguf")
    except NstfError as error:
        raise NstfError(f"{folder}: cannot be written whole; is the disk full?") from error
    return listed(folder)


def _layout(artifact: Artifact) -> tuple[dict[str, Any], str, list[names.Placed]]:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise NstfError("target 'gguf' needs the package gguf; run `pip install gguf`") from error
    if "config.json" not in artifact.file_names():
        raise UnsupportedError(f"{artifact.path} has no config.json: target 'gguf' holds language models")
    from nstf.runtime.engine_config import completed

    with as_stated(artifact, "gguf"):
        stated = artifact.config()
        name, architecture = names.architecture_of(stated)
        config = dict(completed(stated))  # older files say rope_scaling and rope_theta
    # A tied head is left out: llama.cpp takes the table, as transformers does.
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    stored = artifact.names()
    if {table, head} <= set(stored) and artifact.stored_name(table) == artifact.stored_name(head):
        stored = [name for name in stored if name != head]
    with as_stated(artifact, "gguf"):
        names.check(name, config)
        placed = names.placed(name, architecture, config, stored)
    for place in placed:
        shape = artifact.record(place.source).shape
        if not shape or place.heads < 0 or (place.heads and shape[0] % (2 * place.heads)):
            raise UnsupportedError(
                f"{artifact.path}: tensor {place.source!r} of shape {list(shape)} does not fit the heads that its "
                "config.json states; fetch or convert it again"
            )
    return config, name, placed


def _announce(writer: Any, place: names.Placed, shape: tuple[int, ...], kind: str) -> None:
    import gguf

    size = blocks.size_of(kind, shape)
    raw = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        dtype = np.dtype(np.float32 if kind == "F32" else np.float16)
        writer.add_tensor_info(place.name, shape, dtype, size, raw)
        return
    rows = int(np.prod(shape[:-1]))
    writer.add_tensor_info(place.name, (*shape[:-1], size // rows), np.dtype(np.uint8), size, raw)


def _data(encoded: EncodedTensor, place: names.Placed, kind: str) -> np.ndarray[Any, Any]:
    rows = blocks.pack(encoded, kind, place.source)
    if place.heads:
        rows = names.interleaved(rows.reshape(encoded.shape[0], -1), place.heads)
    if place.offset:
        rows = rows + np.float32(place.offset)
    if len(encoded.shape) == 1:
        rows = rows.reshape(-1)
    return np.ascontiguousarray(rows)


def _file_type(plan: ExportPlan) -> int:
    """llama.cpp's word for the type of most bytes; it is shown, and read by nothing."""
    import gguf

    most = next(iter(plan.types()), "F16")
    word = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}.get(most, f"MOSTLY_{most}")
    known = gguf.LlamaFileType.__members__
    return int(known.get(word, gguf.LlamaFileType.GUESSED))
