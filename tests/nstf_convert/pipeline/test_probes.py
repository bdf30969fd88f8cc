"""Measured sensitivities: how tensors are grouped, how ratios are shrunk, what a conversion learns from them."""

import math
from dataclasses import replace

import pytest

from nstf_convert.pipeline import convert
from nstf_convert.pipeline.choose import Table
from nstf_convert.pipeline.probes import MAX_PROBES, Probe, groups, paired, shrunk
from nstf_convert.pipeline.units import Unit

ROLES = ("q", "k", "v", "o", "gate", "up", "down")


def units(layers: int) -> list[Unit]:
    out = [Unit("model.embed_tokens.weight", (64, 8), "float32", "embedding", uses=("embedding",))]
    for layer in range(layers):
        out += [
            Unit(f"model.layers.{layer}.{r}.weight", (8, 8), "float32", r, uses=("linear",)) for r in ROLES
        ]
    return out


def probe(ratio: float, error: float) -> Probe:
    return Probe(f"ratio {ratio}", ("a",), "int2 g64", 0.02, 0.02 * ratio, error)


def test_few_tensors_are_probed_one_by_one_and_many_by_class_and_depth() -> None:
    assert all(len(m) == 1 for m in groups(units(2)).values())
    found = groups(units(30))
    assert len(found) <= MAX_PROBES
    assert found["q and k, layers 0-9"] == tuple(
        sorted(f"model.layers.{i}.{r}.weight" for i in range(10) for r in "qk")
    )
    assert found["embedding"] == ("model.embed_tokens.weight",)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7, 30, 80])
def test_every_tensor_is_in_exactly_one_group(layers: int) -> None:
    names = [n for m in groups(units(layers)).values() for n in m]
    assert sorted(names) == sorted(u.name for u in units(layers))


def test_a_noisy_ratio_moves_to_the_common_one_and_a_precise_one_stays() -> None:
    precise = shrunk([probe(1.0, 0.01), probe(2.0, 0.01), probe(1.4, 0.01)])
    assert [p.factor for p in precise] == pytest.approx([1.0, 2.0, 1.4], rel=0.01)
    noisy = shrunk([probe(1.0, 0.01), probe(2.0, 0.01), probe(4.0, 1.0)])
    assert noisy[0].factor == pytest.approx(1.0, rel=0.02)
    assert noisy[2].factor < 2.0


def test_windows_that_are_hard_for_every_group_are_not_noise() -> None:
    hard = (0.01, 0.01, 0.09, 0.01)
    same = [
        Probe(n, (n,), "", 0.03, 0.03 * s, 0.6, windows=tuple(v * s for v in hard))
        for n, s in (("a", 1), ("b", 2), ("c", 3))
    ]
    found = paired(same)
    assert [p.error for p in found] == pytest.approx([0.0] * 3, abs=1e-12)
    other = replace(same[2], windows=tuple(reversed(same[2].windows)))
    assert paired([*same[:2], other])[2].error > 0.3
    assert paired(same[:1]) == same[:1]


def test_ratios_that_differ_by_their_noise_alone_become_one() -> None:
    found = shrunk([probe(r, 0.2) for r in (1.3, 1.4, 1.5, 1.35)])
    assert len({round(p.factor, 6) for p in found}) == 1
    assert 1.3 < found[0].factor < 1.5
    assert shrunk([]) == ()
    assert shrunk([probe(1.7, 0.1)])[0].factor == pytest.approx(1.7)


def test_a_table_multiplies_estimates_and_true_losses_by_its_factor(options) -> None:
    from nstf.kernels.formats import Node, dense
    from nstf_convert.pipeline.candidates import Candidate
    from nstf_convert.pipeline.recipe import Recipe

    recipe = Recipe("svd", {"rank": 1})
    candidate = Candidate(recipe, Node("dense", dense.Params("float32")), 10, 0.5)
    table = Table({"a": [candidate], "b": [candidate]}).calibrated({"a": 2.0})
    assert [table.candidates[n][0].loss for n in "ab"] == [1.0, 0.5]
    table = table.replaced({"a": (recipe, 0.7)}).with_more("a", [candidate])
    assert [c.loss for c in table.candidates["a"]] == [1.4, 1.0]


def test_a_conversion_probes_its_tensors_and_says_so(options) -> None:
    report = convert(options(("ratio", 0.5), probes=True)).report["accuracy"]
    assert len(report["probes"]) == 15
    for found in report["probes"]:
        assert found["measured"] > 0 and found["expected"] > 0
        ratio, factor = math.log(found["ratio"]), math.log(found["factor"])
        assert abs(factor) <= max(abs(ratio), 2.0)
