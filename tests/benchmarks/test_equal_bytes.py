"""Forms of equal bytes, and the mixture that they are compared on."""

import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nstf.proposals import Recipe
from nstf_convert.pipeline.propose.candidates import arrays_bytes
from nstf_convert.pipeline.propose.units import Unit

STACK = Unit("mlp.experts.down_proj", (8, 256, 128), "float32", "expert_stack", 2)
MATRIX = Unit("up_proj.weight", (256, 128), "float32", "up")


@pytest.fixture(autouse=True)
def benchmarks_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def equal_bytes() -> ModuleType:
    return importlib.import_module("equal_bytes")


def one_matrix(unit: Unit) -> Recipe:
    params = {"ranks": [1, *unit.inner_shape[1:]], "view": list(unit.inner_shape)}
    factor = Recipe("int_grid", {"bits": 4, "group": 64, "symmetric": True, "scale_bits": 8})
    return Recipe("tucker", params, {"factor": factor})


@pytest.mark.parametrize("unit", [STACK, MATRIX])
def test_forms_take_no_more_than_their_bytes_and_waste_less_than_a_step_of_the_rate(
    equal_bytes: ModuleType, unit: Unit
) -> None:
    size = arrays_bytes(unit, equal_bytes.integers(3))
    forms = {
        "codes": equal_bytes.codes,
        "sum": equal_bytes.summed(equal_bytes.low_rank(8), equal_bytes.codes),
    }
    if unit is STACK:
        forms["one matrix"] = equal_bytes.summed(one_matrix, equal_bytes.codes)
    for form in forms.values():
        found = form(unit, size)
        assert isinstance(found, Recipe)
        assert size - unit.elements / 32 <= arrays_bytes(unit, found) <= size
    assert equal_bytes.whole(unit, size) == equal_bytes.integers(3)
    assert equal_bytes.codes(unit, 100) is None and equal_bytes.whole(unit, 100) is None


def test_a_token_reads_its_experts_and_all_that_experts_share(equal_bytes: ModuleType) -> None:
    codes, shared = Recipe("trellis", {"quarter_bits": 8}), one_matrix(STACK)
    both = Recipe("add", {}, {"base": codes, "correction": shared})
    of_codes, of_shared = arrays_bytes(STACK, codes), arrays_bytes(STACK, shared)
    assert equal_bytes.read_bytes(STACK, codes, 0.25) == of_codes / 4
    assert equal_bytes.read_bytes(STACK, both, 0.25) == of_codes / 4 + of_shared
    # The core of whole experts is read for those of the token alone; of a stack's low rank the tall side.
    params = {"ranks": [8, 64, 32], "view": [8, 256, 128]}
    tucker = Recipe("tucker", params, {"factor": equal_bytes.integers(8)})
    core, bases = (8 * 64 * 32, 256 * 64 + 128 * 32)
    assert equal_bytes.read_bytes(STACK, tucker, 0.25) == pytest.approx(core / 4 + bases, rel=0.1)
    tall = Recipe("svd", {"rank": 16}, {"factor": equal_bytes.integers(8)})
    assert equal_bytes.read_bytes(STACK, tall, 0.25) == pytest.approx(8 * 256 * 16 / 4 + 16 * 128, rel=0.2)


def test_training_with_all_experts_is_what_the_mixture_computes() -> None:
    train_model = importlib.import_module("train_model")
    given = argparse.Namespace(hidden=64, ffn=32, layers=1, top=2)
    torch.manual_seed(0)
    dense = train_model.new_model(given, 1)
    model = train_model.upcycled(dense, train_model.new_model(given, 4))
    ids = torch.randint(8192, (2, 9))
    with torch.no_grad():
        # Equal experts are one, whatever the router says.
        assert torch.allclose(model(input_ids=ids).logits, dense(input_ids=ids).logits, atol=1e-5)
        for weight in model.model.layers[0].mlp.experts.parameters():
            weight.normal_(std=0.1)
        trained = model(input_ids=ids).logits
        del model.model.layers[0].mlp.__dict__["forward"]
        assert torch.allclose(model(input_ids=ids).logits, trained, atol=1e-5)
        assert not torch.allclose(trained, dense(input_ids=ids).logits, atol=1e-2)
