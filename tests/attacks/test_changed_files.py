"""A file that is changed while it is in use, numbers inside that contradict the tree, and models that compute NaN."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from small_llama import LLAMA, tensors

from nstf.errors import CorruptError, NstfError
from nstf.kernels.formats import EncodedTensor, Node, array_specs, bitpack, dense, trellis
from nstf.runtime import load, load_tensors
from nstf.runtime.artifact import open_artifact, write_artifact
from nstf.runtime.engine import Engine
from nstf.runtime.engine_batch import Batch, Part
from nstf_convert.export import Request, export
from nstf_convert.gates.sides import open_side
from nstf_convert.streamed import StreamedModel

IDS = torch.tensor([[1, 2, 3]])


def tokens(model: Any) -> list[int]:
    found: list[int] = model.generate(IDS, max_new_tokens=4, do_sample=False)[0].tolist()
    return found


def test_what_is_read_into_memory_outlives_its_file(made: Callable[..., Path]) -> None:
    path = made(LLAMA, generation_config=b"{}")
    model: Any = load(path, mapped=False)
    held = load_tensors(path, mapped=False)
    before, name = tokens(model), next(iter(held))
    values = held[name].clone()
    os.truncate(path, 100)
    assert tokens(model) == before and torch.equal(held[name], values)


@pytest.mark.parametrize("change", ["truncated", "longer", "written into"])
def test_a_mapped_file_that_was_changed_is_noticed_before_it_is_used(
    made: Callable[..., Path],
    change: str,
) -> None:
    path = made(LLAMA, generation_config=b"{}")
    engine, held = Engine.open(path), load_tensors(path)
    batch = Batch(Engine.open(path), 1)
    list(engine.generate([1, 2], 2))
    batch.step([Part(0, 0, [1, 2], prompt=True)])
    with path.open("r+b") as file:
        if change == "written into":
            file.seek(-4, os.SEEK_END)
            file.write(b"abcd")
        else:
            file.truncate(path.stat().st_size + (4096 if change == "longer" else -1))
    os.utime(path, ns=(1, 1))
    with pytest.raises(NstfError, match="changed since it was opened"):
        list(engine.generate([1, 2], 2))
    # As the server does, which goes on from what it knows of a prompt.
    for part in (Part(0, 0, [1, 2]), Part(0, 1, [2], prompt=True)):
        with pytest.raises(NstfError, match="changed since it was opened"):
            batch.step([part])
    with pytest.raises(NstfError, match="changed since it was opened"):
        held[next(iter(held))]


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_that_was_replaced_or_removed_goes_on_as_it_was(
    made: Callable[..., Path],
    how: str,
) -> None:
    path = made(LLAMA, generation_config=b"{}")
    engine = Engine.open(path)
    before = list(engine.generate([1, 2], 4))
    if how == "replaced":
        path.with_name("new").write_bytes(b"x")
        path.with_name("new").replace(path)
    else:
        path.unlink()
    assert list(engine.generate([1, 2], 4)) == before


def test_a_mapped_file_that_is_truncated_ends_the_process_and_one_in_memory_does_not(
    made: Callable[..., Path],
) -> None:
    """What SECURITY.md says of mappings, and why `mapped=False` exists."""
    path = made(LLAMA)
    ends = {}
    for mapped in (True, False):
        content = path.read_bytes()
        child = os.fork()
        if child == 0:
            try:
                artifact = open_artifact(path, mapped=mapped)
                last = max(artifact.entries.items(), key=lambda item: item[1].end)[0]
                os.truncate(path, 1)
                bytes(artifact.stored_bytes(last))
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        ends[mapped] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        path.write_bytes(content)
    assert ends == {True: signal.SIGBUS, False: 0}


def test_sections_that_contradict_the_tree_are_refused_at_load(tmp_path: Path) -> None:
    stored = tensors()
    name = "model.layers.0.mlp.up_proj.weight"
    tree = Node("trellis", trellis.Params(quarter_bits=(8, 10), rows=(16, 32)))
    arrays = {k: torch.zeros(s.shape, dtype=s.dtype) for k, s in array_specs(tree, (48, 32)).items()}
    arrays["section"] = bitpack.pack(torch.ones(1, 48, dtype=torch.uint8), 1)[0]
    stored[name] = EncodedTensor(tree, (48, 32), arrays)
    path = tmp_path / "m.nstf"
    write_artifact(path, stored, {"config.json": json.dumps(LLAMA).encode()})
    with pytest.raises(
        CorruptError, match=r"up_proj.*sections have \[0, 48\] rows, the tree says \[16, 32\]"
    ):
        load(path)
    with pytest.raises(CorruptError, match="sections have"):
        load_tensors(path)[name]
    with pytest.raises(CorruptError, match="sections"):
        Engine.open(path)
    with open_artifact(path) as artifact, pytest.raises(CorruptError, match=r"up_proj.*sections have"):
        streamed = StreamedModel.from_artifact(artifact)
        streamed.logits(streamed.hidden(IDS))
    with open_side(str(path)) as side, pytest.raises(CorruptError, match=r"up_proj.*sections have"):
        side.get(name)
    for target in ("hf", "transformers", "gguf", "onnx"):
        with pytest.raises(CorruptError, match="sections have"):
            export(path, Request(target, tmp_path / target, allow_loss=True))


def test_a_buffer_of_another_shape_is_refused(tmp_path: Path) -> None:
    """A tensor under the name of what the model computes itself: a RuntimeError of torch's."""
    stored = tensors()
    values = torch.zeros(3)
    stored["model.rotary_emb.inv_freq"] = EncodedTensor(
        Node("dense", dense.Params("float32")), (3,), {"values": values}
    )
    path = tmp_path / "m.nstf"
    write_artifact(path, stored, {"config.json": json.dumps(LLAMA).encode()})
    with pytest.raises(CorruptError, match=r"buffer 'model.rotary_emb.inv_freq' has shape \[3\]"):
        load(path)


def test_buffers_that_are_made_like_parameters_take_the_files_values(tmp_path: Path) -> None:
    """I-BERT's whole weights stand in for zeros that take no memory, and cannot be written to."""
    from transformers import IBertConfig, IBertModel

    config = IBertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, architectures=["IBertModel"],
    )  # fmt: skip
    model = IBertModel(config)
    state = {n: v.float() for n, v in model.state_dict().items() if v.numel()}
    whole = next(n for n in state if n.endswith("query.weight_integer"))
    state[whole] = torch.arange(state[whole].numel(), dtype=torch.float32).reshape(state[whole].shape)
    tree = Node("dense", dense.Params("float32"))
    path = tmp_path / "m.nstf"
    write_artifact(
        path,
        {n: EncodedTensor(tree, tuple(v.shape), {"values": v}) for n, v in state.items()},
        {"config.json": json.dumps(config.to_dict()).encode()},
    )
    assert torch.equal(dict(load(path).named_buffers())[whole], state[whole])


# The likeliest token without the engine is chosen by transformers, which does not look.
@pytest.mark.parametrize(("engine", "temperature"), [("auto", 0.0), ("auto", 0.7), ("off", 0.7)])
def test_a_model_that_computes_no_numbers_says_so(tmp_path: Path, engine: str, temperature: float) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from nstf.runtime import stream

    stored = tensors()
    tree = Node("dense", dense.Params("float32"))
    stored["model.norm.weight"] = EncodedTensor(tree, (32,), {"values": torch.full((32,), torch.nan)})
    path = tmp_path / "m.nstf"
    write_artifact(path, stored, {"config.json": json.dumps(LLAMA).encode(), "generation_config.json": b"{}"})
    plain = Tokenizer(models.WordLevel({"a": 1, "<unk>": 0}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")
    with pytest.raises(NstfError, match="no numbers"):
        list(stream(load(path, engine=engine), tokenizer, "a a", 4, temperature))


def test_a_change_before_the_first_token_is_no_reason_to_go_on_without_the_engine(
    made: Callable[..., Path],
) -> None:
    """What was written into the mapped file was no config: the engine could not be made, and modules gave other tokens."""
    path = made(LLAMA, generation_config=b"{}")
    model: Any = load(path, verify=False)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(os.urandom(path.stat().st_size - file.tell()))
    os.utime(path, ns=(1, 1))
    for _ in range(2):
        with pytest.raises(NstfError, match="changed since it was opened"):
            model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False)


def test_a_change_is_noticed_from_another_folder(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name was looked up from wherever the process was by then, and what was not there was taken for removed.
    path = made(LLAMA, generation_config=b"{}")
    monkeypatch.chdir(path.parent)
    engine, held = Engine.open(path.name), load_tensors(path.name)
    monkeypatch.chdir("/")
    list(engine.generate([1, 2], 2))
    os.utime(path, ns=(1, 1))
    with pytest.raises(NstfError, match="changed since it was opened"):
        list(engine.generate([1, 2], 2))
    with pytest.raises(NstfError, match="changed since it was opened"):
        held[next(iter(held))]


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_that_takes_the_place_of_one_that_is_being_opened_is_refused(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    """The header that was checked, and the arrays of another file of the same size: of a second conversion."""
    from nstf.runtime.artifact import reader

    path = made(LLAMA)
    other, before = bytearray(path.read_bytes()), reader.parse_structure
    other[40] ^= 1

    def replaced(*words: Any) -> Any:
        path.with_name("new").write_bytes(other)
        path.with_name("new").replace(path)
        return before(*words)

    monkeypatch.setattr(reader, "parse_structure", replaced)
    with pytest.raises(CorruptError, match="changed while it was opened"):
        open_artifact(path, mapped=mapped)
