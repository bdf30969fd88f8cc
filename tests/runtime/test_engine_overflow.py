"""Keys and values that float16 does not hold: the engine's cache divides them by a power of two, and stays finite."""

import json
from ctypes import c_float
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nstf.runtime.artifact import write_artifact
from nstf.runtime.engine import Engine
from nstf.runtime.engine_batch import Batch, Part

IDS = torch.tensor([[5, 9, 3, 77, 12, 40, 8, 61, 2, 33, 71, 19, 28, 90, 4, 55, 66, 7, 11]])


@pytest.mark.parametrize("what", ["k", "v", "both"])
@pytest.mark.parametrize("size", [2e5, 1.9e6, 1e10])
def test_the_engine_is_as_finite_as_the_modules(
    tiny: ModuleType, tmp_path: Path, what: str, size: float
) -> None:
    model = tiny.new_model("LlamaForCausalLM")
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
            if what in ("k", "both"):
                # One channel is large, as in models that do this; the queries make up for it, or softmax takes one key only.
                row = attention.k_proj.weight[3]
                by = size / float((x @ row).abs().max())
                row *= by
                for head in range(2):
                    attention.q_proj.weight[head * 8 + 3] /= by
            if what in ("v", "both"):
                by = size / float((x @ attention.v_proj.weight.T).abs().max())
                attention.v_proj.weight *= by
                attention.o_proj.weight /= by
    tensors = {n: tiny.dense(p) for n, p in model.named_parameters()}
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(model)).encode()})
    with torch.no_grad():
        wanted = model(IDS).logits[0]
    engine = Engine.open(path, exact=True)
    together = engine.forward(IDS[0].tolist(), all_logits=True)
    engine.reset()
    # Small ones come first here and are in the cache when the first large one is stored.
    one_by_one = torch.stack([engine.forward([token]) for token in IDS[0].tolist()])
    for found in (together, one_by_one):
        assert bool(found.isfinite().all())
        assert float((found - wanted).abs().max()) < 2e-2 * float(wanted.abs().max())


def test_a_text_after_one_that_overflowed_is_as_if_it_were_the_first(
    tiny: ModuleType, tmp_path: Path
) -> None:
    model = tiny.new_model("LlamaForCausalLM")
    with torch.no_grad():
        model.model.embed_tokens.weight[9, 0] = 50.0
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[:, 0] *= 1e8
    tensors = {n: tiny.dense(p) for n, p in model.named_parameters()}
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(model)).encode()})
    fresh, used = Engine.open(path, exact=True), Engine.open(path, exact=True)
    used.forward([9, 9, 9])
    used.reset()
    assert torch.equal(used.forward([3, 5, 7]), fresh.forward([3, 5, 7]))


def test_a_copied_beginning_brings_what_its_keys_and_values_were_divided_by(
    tiny: ModuleType, tmp_path: Path
) -> None:
    model = tiny.new_model("LlamaForCausalLM")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight *= 1e6
            layer.self_attn.o_proj.weight /= 1e6
    tensors = {n: tiny.dense(p) for n, p in model.named_parameters()}
    path = tmp_path / "m.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(model)).encode()})
    batch = Batch(Engine.open(path, exact=True), 2, reproducible=True)
    ids = IDS[0].tolist()

    def last(sequence: int, first: int) -> list[float]:
        (address,) = batch.step([Part(sequence, first, ids[first:], prompt=True)])
        return (c_float * 100).from_address(address)[:100]

    expected = last(0, 0)
    batch.copy(0, 1, 12)
    assert last(1, 12) == expected
