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
    return importlib.import_module("equal_bytes_forms")


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
        forms["shuffle"] = equal_bytes.shuffled
    for form in forms.values():
        found = form(unit, size)
        assert isinstance(found, Recipe)
        assert size - unit.elements / 32 <= arrays_bytes(unit, found) <= size
    assert equal_bytes.whole(unit, size) == equal_bytes.integers(3)
    assert equal_bytes.codes(unit, 100) is None and equal_bytes.whole(unit, 100) is None
    assert equal_bytes.shuffled(unit, 100) is None
    assert equal_bytes.shuffled(Unit("x", (8, 160, 128), "float32", "expert_stack", 2), 1 << 20) is None


def test_codes_alone_take_the_bytes_of_what_stands_beside_them(equal_bytes: ModuleType) -> None:
    units = [Unit(f"{i}.up_proj.weight", (256 << i % 2, 256), "float32", "up") for i in range(12)]
    codes = Recipe("trellis", {"quarter_bits": 6})
    for name, form in equal_bytes.matrix_forms(6).items():
        made = {u.name: form(u, 0) for u in units}
        lines = [r for r in made.values() if isinstance(r, equal_bytes.Lines)]
        assert len(lines) == (12 if "outlier" in name else 0)
        sizes = {u.name: made[u.name].size(u) if lines else arrays_bytes(u, made[u.name]) for u in units}
        assert all(sizes[u.name] > arrays_bytes(u, codes) for u in units)
        control = equal_bytes.in_rate(units, 6, sizes)
        rates = [r.params["quarter_bits"] for r in control.values()]
        total = sum(arrays_bytes(u, control[u.name]) for u in units)
        # Less than a quarter of a bit of the largest tensor is left over.
        assert 0 <= sum(sizes.values()) - total <= 512 * 256 / 32 + 64
        assert min(rates) >= 6 and max(rates) > 6
    line = equal_bytes.Lines(1, 4, codes)
    assert line.size(units[0]) == 4 * (256 + 4) + arrays_bytes(units[0], codes)
    with pytest.raises(ValueError, match=r"0\.up_proj\.weight: 10 bytes are fewer"):
        equal_bytes.in_rate(units[:1], 6, {units[0].name: 10})


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


def test_training_computes_what_the_mixture_does() -> None:
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
