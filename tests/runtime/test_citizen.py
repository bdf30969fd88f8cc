"""What libraries that take any transformers model call on a loaded one."""

import copy
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nstf.runtime
from nstf.errors import UnsupportedError
from nstf.runtime import citizen


def loaded(
    tiny: ModuleType, folder: Path, architecture: str = "LlamaForCausalLM", **changes: Any
) -> tuple[Any, Any]:
    """(dense model, loaded model)."""
    dense = tiny.new_model(architecture, **changes)
    return dense, nstf.runtime.load(tiny.write(folder, dense))


def test_saving_is_refused_with_the_way_that_works(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        citizen, "save_with", None
    )  # another test may have imported nstf.integrations.transformers
    _, model = loaded(tiny, tmp_path)
    with pytest.raises(UnsupportedError, match=rf"nstf export {tmp_path}/model.nstf -o {tmp_path}/saved"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    model.nstf_path = model.model.nstf_path = "/a b/m;1.nstf"
    with pytest.raises(UnsupportedError, match=r"nstf export '/a b/m;1.nstf' -o 'to here'"):
        model.save_pretrained("to here")
    with pytest.raises(UnsupportedError, match=r"nstf export '/a b/m;1.nstf' -o folder"):
        model.model.save_pretrained("to here")


@pytest.mark.parametrize("imported", [False, True])
def test_a_model_inside_is_not_saved_as_random_weights(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    dense, model = loaded(tiny, tmp_path)
    monkeypatch.setattr(citizen, "save_with", citizen.save_with if imported else None)
    if imported:
        importlib.import_module("nstf.integrations.transformers")
    for part in (model.model, model.base_model, model.get_decoder()):
        with pytest.raises(UnsupportedError, match=rf"nstf export {tmp_path}/model.nstf -o folder"):
            part.save_pretrained(tmp_path / "inner")
        assert part.num_parameters() == dense.model.num_parameters()
    assert not (tmp_path / "inner").exists()
    assert type(model.model).__name__ == "LlamaModel" and isinstance(model.model, type(dense.model))
    assert str(model).count("file=") == 1


def test_pickling_names_the_way_and_copies_compute_the_same(tiny: ModuleType, tmp_path: Path) -> None:
    _, model = loaded(tiny, tmp_path)
    with pytest.raises(UnsupportedError, match=r"nstf.runtime.load\('.*model.nstf'\)"):
        torch.save(model, tmp_path / "model.pt")
    inputs = tiny.inputs_of("LlamaForCausalLM")
    twin = copy.deepcopy(model)
    assert twin.model is not model.model and type(twin) is type(model)
    assert torch.equal(twin(**inputs).logits, model(**inputs).logits)


def test_a_shallow_copy_shares_the_modules_and_has_a_generate_of_its_own(
    tiny: ModuleType, tmp_path: Path
) -> None:
    _, model = loaded(tiny, tmp_path)
    twin, part = copy.copy(model), copy.copy(model.model)
    assert twin is not model and type(twin) is type(model) and twin.model is model.model
    assert type(part) is type(model.model) and part.embed_tokens is model.model.embed_tokens
    inputs = tiny.inputs_of("LlamaForCausalLM")
    assert torch.equal(twin(**inputs).logits, model(**inputs).logits)
    assert twin.generate.__self__ is twin and model.generate.__self__ is model
    twin.generation_config = copy.deepcopy(model.generation_config)
    twin.generation_config.max_new_tokens, model.generation_config.max_new_tokens = 1, 3
    ids = inputs["input_ids"][:1]
    given = {"do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    assert [m.generate(ids, **given).shape[1] - ids.shape[1] for m in (model, twin)] == [3, 1]


@pytest.mark.parametrize("tied", [True, False])
def test_tying_changes_nothing(tiny: ModuleType, tmp_path: Path, tied: bool) -> None:
    dense, model = loaded(tiny, tmp_path, tie_word_embeddings=tied)
    model.tie_weights()
    assert (model.lm_head.weight_encoded is model.model.embed_tokens.weight_encoded) == tied
    inputs = tiny.inputs_of("LlamaForCausalLM")
    assert torch.allclose(model(**inputs).logits, dense(**inputs).logits, atol=2e-4)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel", "ResNetForImageClassification"],
)
def test_parameters_are_counted_as_transformers_counts_them(
    tiny: ModuleType, tmp_path: Path, architecture: str
) -> None:
    dense, model = loaded(tiny, tmp_path, architecture)
    assert model.num_parameters() == dense.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == dense.num_parameters(exclude_embeddings=True)
    assert model.num_parameters(only_trainable=True) == 0


def test_tokens_cannot_be_added_to_an_encoded_embedding(tiny: ModuleType, tmp_path: Path) -> None:
    _, model = loaded(tiny, tmp_path)
    embedding = model.get_input_embeddings()
    assert model.resize_token_embeddings() is embedding and model.resize_token_embeddings(100) is embedding
    with pytest.raises(UnsupportedError, match=r"embedding of 100 tokens is encoded.*nstf export"):
        model.resize_token_embeddings(108)


def test_the_class_keeps_its_name_and_stays_usable(tiny: ModuleType, tmp_path: Path) -> None:
    dense, model = loaded(tiny, tmp_path)
    assert (
        isinstance(model, type(dense)) and type(model).__name__ == "LlamaForCausalLM" and model.can_generate()
    )
    ids = tiny.inputs_of("LlamaForCausalLM")
    twin = copy.deepcopy(model)
    assert torch.equal(twin(**ids).logits, model(**ids).logits)
    assert set(model.state_dict()) == set(twin.state_dict())
    assert not any(name.endswith(".like") for name in model.state_dict())
    twin.load_state_dict(model.state_dict())


def test_casting_there_and_back_keeps_the_engine(tiny: ModuleType, tmp_path: Path) -> None:
    _, model = loaded(tiny, tmp_path)
    stored = model.model.embed_tokens.weight_encoded
    before = stored.like
    model.to(torch.bfloat16)
    assert stored.dtype == torch.bfloat16 and stored.like is before and before.ds_numel == 3200


def test_printing_says_what_is_encoded_and_who_generates(tiny: ModuleType, tmp_path: Path) -> None:
    dense, model = loaded(tiny, tmp_path)
    text = repr(model)
    matrices = sum(p.numel() for p in dense.parameters() if p.dim() > 1)
    assert f"{matrices} weights encoded at " in text and "generate by the CPU engine where it knows" in text
    assert "EncodedParameter(int, shape=[100, 32], 4.50 bits per weight" in text
    model.generate(torch.tensor([[1, 5]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert "generate by the CPU engine\n" in repr(model) or "generate by transformers\n" in repr(model)
    plain = nstf.runtime.load(tmp_path / "model.nstf", engine="off")
    assert "generate by transformers" in repr(plain)
