"""What a captured step of decoding launches is what `nstf compile` compiles: caught on a CPU before it is compiled.

The decoder runs its step on the CPU, with the Triton kernels in the place of torch's and a card that is not here: stacks of
q, k, v and of gate, up, the kernels between the matrices, rows of the table. Every launch must be one of `all_specs`.
"""

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))
sys.path.insert(0, str(Path(__file__).parent))
from launches import catching, compiled_facts, differing, forget, pretend
from test_engine import build

import nstf.runtime
from nstf.kernels.formats import EncodedTensor, Node, rotated
from nstf.kernels.formats.tree import format_of
from nstf.kernels.triton import decode_step, linear
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.packed import compact
from nstf.runtime import decoder_glue, graph_decoder, parameter, stacking
from nstf.runtime.artifact import open_artifact
from nstf.runtime.compiled import all_specs
from nstf.runtime.graph_decoder import Decoder
from nstf.runtime.parameter import EncodedParameter

BETWEEN = ("attend_kernel", "gate_kernel", "likeliest_kernel", "norm_kernel", "sum_kernel")
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "vocab_size": 112,
    "max_position_embeddings": 2048,
}
# Norms of heads and out of blocks, windows and the other gate; biases; neither; one format for all matrices; and rotated
# paths, with and without norms out of blocks.
MODELS = (
    *("gemma 3", "qwen 2", "llama, linear rope", "llama, linear rope in int4"),
    *("llama, linear rope in paths", "gemma 3 in paths"),
)


def node(kind: str, children: dict[str, Node], **params: Any) -> Node:
    return Node(kind, format_of(kind).Params(**params), children)


def tree_of(tiny: ModuleType, name: str, form: str, shape: tuple[int, ...]) -> Node:
    """A format for each place: what stacks, and what does not. form: `int4`, `paths`, or anything else."""
    leaf = tiny.leaf
    if form == "int4" or (form == "paths" and ("lm_head" in name or "embed" in name)):
        same: Node = leaf("int", bits=4, group=64)
        return same
    if form == "paths":
        shuffled = leaf("shuffle", quarter_bits=12)
        path = shuffled if "o_proj" in name or "down_proj" in name else leaf("trellis", quarter_bits=(12,))
        return node("rotated", {"x": path}, block_in=rotated.block_for(shape[1]))
    dense = leaf("dense", dtype="float16")
    correction = node("low_rank", {"a": dense, "b": dense}, rank=16)
    for part, tree in {
        "q_proj": leaf("int", bits=4, group=64, symmetric=False),
        "o_proj": leaf("trellis", quarter_bits=(10,)),
        "gate_proj": leaf("mxfp4"),
        "down_proj": node("add", {"x": leaf("int", bits=4, group=64), "y": correction}),
        "lm_head": leaf("grid", group=32),
        "embed": leaf("int", bits=8, group=0),
    }.items():
        # k and v as q, up as gate.
        name = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        if part in name:
            found: Node = tree
            return found
    raise ValueError(name)


@pytest.fixture(scope="module", params=MODELS)
def artifact(
    request: pytest.FixtureRequest, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        family, _, form = request.param.partition(" in ")
        patch.setattr(tiny, "matrix_tree", lambda model, name, shape: tree_of(tiny, name, form, shape))
        built = build(family, **SIZES)
        path: Path = tiny.write(tmp_path_factory.mktemp("model"), built)
    return path


def decoder_on(target: str, path: Path, dtype: torch.dtype, patch: pytest.MonkeyPatch) -> Decoder:
    """A decoder whose step launches kernels for `target`, its codes kept as on a GPU."""

    def resident(encoded: EncodedTensor) -> EncodedTensor:
        # As after a copy to a device: arrays of their own, and not parts of a file that lie where they lie.
        arrays = {path: array.clone() for path, array in encoded.arrays.items()}
        return compact(EncodedTensor(encoded.tree, encoded.shape, arrays))

    patch.setattr(parameter, "resident", resident)
    patch.setattr(decoder_glue, "arch_of", lambda device: target)

    def product(x: torch.Tensor, encoded: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = linear._matmul(x, encoded, target)
        return y if bias is None else y + bias

    patch.setattr(stacking, "linear", product)
    patch.setattr(
        graph_decoder, "rows_on_gpu", lambda encoded, ids, dtype: linear.decoder(encoded, target)(ids, dtype)
    )
    model: Any = nstf.runtime.load(path, "cpu", dtype=dtype, engine="off")
    for module in model.modules():
        if isinstance(module, EncodedParameter):
            module._encoded = None
    decoder = Decoder(model)
    decoder._glue.kernels = decode_step
    return decoder


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", ARCHITECTURES)
def test_every_launch_of_a_step_was_compiled_ahead(
    target: str,
    dtype: torch.dtype,
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    row = ARCHITECTURES[target]
    decoder = decoder_on(target, artifact, dtype, monkeypatch)
    layers = decoder._layers
    assert all(len(layer.qkv) == len(layer.gate_up) == 1 for layer in layers), "no stacks"
    model = request.node.name
    for batch, tokens, slots in ((1, 30, False), (4, 900, False), (2, 30, True)):
        with open_artifact(artifact) as opened:
            specs = list(all_specs(opened, (batch,), dtype, row).values())
        ahead = [compiled_facts(spec, row) for spec in specs]
        known = {facts["hash"]: facts for facts in ahead}
        with catching() as launched, torch.no_grad():
            pretend(row, specs)
            decoder._renew(batch, decoder._rounded(tokens))
            state: Any = decoder._state
            if slots:  # as runtime/graph_batch.py runs it
                state = dataclasses.replace(state, position=torch.zeros(batch, 2, dtype=torch.int64))
                decoder.logits(state)
            else:
                decoder._step(state, None)
            forget(specs)
        for launch in launched:
            same = [facts for facts in ahead if facts["kernel"] == launch["kernel"]]
            nearest = known.get(launch["hash"]) or min(
                same, key=lambda f: len(differing(launch, f)), default={}
            )
            assert differing(launch, nearest) == {}
        kernels = [launch["kernel"] for launch in launched]
        products = sum(name not in BETWEEN for name in kernels[1:])
        # The table's rows come first; of the six products of a layer two are stacks.
        assert kernels[0] == "decode_kernel" and products >= 4 * len(layers) + 1
        assert kernels.count("attend_kernel") == len(layers)
        assert kernels.count("likeliest_kernel") == (not slots)
        # A product that is one launch has the gate in it, and one of a plain bfloat16 model the norm that follows.
        nvidia = target.startswith("sm_")
        whole = nvidia and "llama, linear rope in" in model and dtype == torch.bfloat16
        # Of mixed formats, that of paths (`o_proj`) adds and norms; the sum with a correction (`down_proj`) does not.
        half = nvidia and dtype == torch.bfloat16 and "gemma" not in model and not whole
        assert kernels.count("gate_kernel") == (0 if nvidia else len(layers))
        assert kernels.count("norm_kernel") == 1 + (0 if whole else len(layers) if half else 2 * len(layers))
        if "in paths" in model and nvidia:
            assert kernels.count("rotate_kernel") == 4 * len(layers)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_launch_of_a_prompt_was_compiled_ahead(
    target: str, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, dtype, rows = ARCHITECTURES[target], torch.bfloat16, 64
    decoder = decoder_on(target, artifact, dtype, monkeypatch)
    with open_artifact(artifact) as opened:
        specs = list(all_specs(opened, (1, rows), dtype, row).values())
    ahead = [compiled_facts(spec, row) for spec in specs]
    known = {facts["hash"]: facts for facts in ahead}
    with catching() as launched, torch.no_grad():
        pretend(row, specs)
        decoder._renew(1, decoder._rounded(rows))
        decoder.prompt_logits(torch.zeros(1, rows, dtype=torch.int64), torch.tensor([rows - 1]))
        forget(specs)
    for launch in launched:
        same = [facts for facts in ahead if facts["kernel"] == launch["kernel"]]
        nearest = known.get(launch["hash"]) or min(same, key=lambda f: len(differing(launch, f)), default={})
        assert differing(launch, nearest) == {}
    kernels = [launch["kernel"] for launch in launched]
    assert kernels.count("place_kernel") == len(decoder._layers) and "gate_kernel" in kernels


def test_a_launch_that_differs_is_told(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees one constant, one attribute and one option."""
    with open_artifact(artifact) as opened:
        specs = list(all_specs(opened, (1,), torch.float16, ARCHITECTURES["gfx942"]).values())
    spec = next(spec for spec in specs if spec.kind == "norm")
    row = ARCHITECTURES["gfx942"]
    for change in (
        {"constants": {**spec.constants, "BLOCK": 4096}},
        {"divisible": spec.divisible[1:]},
        {"num_warps": 2},
    ):
        other = dataclasses.replace(spec, **change)
        assert differing(compiled_facts(spec, row), compiled_facts(other, row)) != {}
