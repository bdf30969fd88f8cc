"""Planted structure is found and chosen at equal bytes, and in noise nothing is."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nstf
from nstf.analyzers.signatures import Signature
from nstf.proposals import Room, Target
from nstf.quantizers.stats import Stats, loss
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import Budget, convert, reporting
from nstf_convert.pipeline.machine import machine
from nstf_convert.pipeline.propose import candidates as cand
from nstf_convert.pipeline.propose import methods, structure
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.encoder import LOOKED_AT, Encoder
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Statistics, Unit
from nstf_convert.pipeline.store.workdir import WorkDir

NOISE = 0.05


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def factors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [normal(*shape, seed=i + 1) for i, shape in enumerate(shapes)]


def planted(kind: str) -> tuple[str, torch.Tensor]:
    """(name in a checkpoint, tensor of unit variance) with one structure and nothing else."""
    if kind == "svd":
        a, b = factors((127, 4), (4, 97))  # primes: there is no reshape of it
        return "layers.0.mlp.up_proj.weight", (a @ b) / 2
    if kind == "cp":
        found = torch.einsum("ir,jr,kr,lr->ijkl", *factors((64, 6), (48, 6), (3, 6), (3, 6)))
    elif kind == "tucker":
        # A train's middle, 8 x 112 x 8, takes far more than a core and a basis with their part of the header.
        found = torch.einsum("abc,ia,jb,kc->ijk", *factors((8, 6, 8), (16, 8), (112, 6), (96, 8)))
    elif kind == "add":
        found = normal(1, 64, 96, seed=1) + 0.1 * normal(8, 64, 96, seed=2)
    elif kind == "tensor_train":
        found = torch.einsum("aib,bjc,ckd->ijk", *factors((1, 16, 3), (3, 40, 8), (8, 48, 1)))
    else:
        found = normal(128, 96)
    name = {"cp": "stem.conv.weight", "noise": "layers.0.mlp.gate_proj.weight"}.get(
        kind, f"moe.experts.{kind}.weight"
    )
    return name, found / found.std()


def plain_forms(
    name: str,
    weight: torch.Tensor,
    hessian: torch.Tensor | None = None,
    bits: float | None = None,
    target: Target = Target(),
) -> tuple[Signature, list[tuple[int, float]], Room]:
    """(signature, (bytes of the arrays, expected loss) of each plain format, room) of one tensor."""
    role, lead = ("expert_stack", 2) if "experts" in name else ("conv", 1) if "conv" in name else ("up", 1)
    unit = Unit(name, tuple(weight.shape), "float32", role, lead)
    known = Signature(weight, Stats(hessian), lead, role)
    allowed = methods.method_families(None, target.timed)
    simple = cand.plain_recipes(known, allowed, few=False, timed=target.timed)
    plain = [
        (cand.arrays_bytes(unit, r), v) for r, v in zip(simple, cand.estimates(known, simple), strict=True)
    ]
    room = Room(frozenset(allowed), bits=bits, size_of=lambda recipe: cand.arrays_bytes(unit, recipe))
    return known, plain, room


def explored(
    name: str, weight: torch.Tensor, hessian: torch.Tensor | None = None, bits: float | None = None,
    target: Target = Target(),
):  # fmt: skip
    """(signature, plain formats, room, what was found, how a recipe is measured) of one tensor."""
    known, plain, room = plain_forms(name, weight, hessian, bits, target)

    def measure(recipe: Recipe) -> float:
        made = recipes.decode(recipes.encode(recipe, weight, known.stats, known.lead))
        return loss(weight, made.reshape(weight.shape), known.stats, known.lead)

    return known, plain, room, structure.explore(known, target, room, plain, measure), measure


@pytest.fixture
def few_forms(monkeypatch) -> None:
    """Half the forms of a tensor are made: what is planted is among the first. On one thread: the matrices are so small that
    several spend most of their time waiting for each other."""
    torch.set_num_threads(1)
    monkeypatch.setattr(structure, "MOST", 3)
    monkeypatch.setattr(structure, "MOST_STEPS", 1)


@pytest.mark.usefixtures("few_forms")
@pytest.mark.parametrize("kind", ["svd", "cp", "tucker", "tensor_train"])
def test_planted_structure_in_noise_is_found_and_beats_the_same_bytes_in_plain_formats(kind) -> None:
    name, weight = planted(kind)
    weight = weight + NOISE * normal(*weight.shape, seed=99)
    known, plain, room, found, _ = explored(name, weight)
    rival = structure.rival_of(plain, known.signal)
    own = [(r, v) for r, v in found.made if r.method == kind]
    assert min(v / rival(room.size_of(r)) for r, v in own) < 0.05
    for recipe, measured in found.made:
        assert measured >= 0.999 * recipe.least, "a bound from below is above what was measured"


@pytest.mark.parametrize("role", ["up", "conv", "experts"])
def test_in_noise_nothing_is_tried_and_the_bounds_say_why(role) -> None:
    shape = {"up": (128, 96), "conv": (64, 48, 3, 3), "experts": (8, 48, 64)}[role]
    known, plain, _, found, _ = explored(f"x.{role}.weight", normal(*shape))
    assert found.made == []
    assert {look.method for look in found.looks} == set(
        nstf.decomposers.METHODS
    )  # each has a bound or a reason
    looks = {look.method: look for look in found.looks if not look.reason}
    assert {"svd", "tucker", "tensor_train"} <= set(looks)
    rival = structure.rival_of(plain, known.signal)
    for look in looks.values():
        assert look.least >= look.rival == rival(look.size_bytes) > 0


@pytest.mark.usefixtures("few_forms")
def test_what_no_plan_of_these_bytes_can_take_is_not_made() -> None:
    """Few directions that leave a fifteenth of the energy are worth a look beside plans of three bits, not of eight."""
    name, weight = planted("svd")
    weight = weight + 0.3 * normal(*weight.shape, seed=99)
    for bits, tried in ((None, True), (3.0, True), (8.0, False)):
        *_, found, _ = explored(name, weight, bits=bits)
        assert bool(found.made) is tried
        if not tried:
            looks = [look for look in found.looks if look.method == "svd"]
            assert looks and looks[0].least >= looks[0].rival > 0
    # Beside the same plans a structure that loses next to nothing is made.
    *_, found, _ = explored(*planted("svd"), bits=8.0)
    assert "svd" in {recipe.method for recipe, _ in found.made}


@pytest.mark.usefixtures("few_forms")
def test_what_was_tried_for_one_budget_is_not_taken_for_another(tmp_path: Path, monkeypatch) -> None:
    name, weight = planted("svd")
    weight = weight + 0.3 * normal(*weight.shape, seed=99)
    unit, allowed = Unit(name, tuple(weight.shape), "float32", "up", 1), methods.method_families(None)
    known = machine("cpu", None, None, 1)
    made = {}
    with WorkDir(tmp_path / "work", {}) as work:
        for bits in (8.0, 3.0, 8.0):
            encoder = Encoder(work, lambda name: weight, Statistics(None), "x", None, known, bits=bits)
            found = {c.recipe.family for c in encoder.candidates(unit, allowed)}
            assert made.setdefault(bits, found) == found
            # The plain forms are those of every budget.
            monkeypatch.setattr(cand, "estimates", lambda *given: pytest.fail("they were estimated again"))
    assert "decomposed" in made[3.0] and "decomposed" not in made[8.0]


@pytest.mark.parametrize("bits", [1.0, 2.0, 4.0, 7.0])
def test_no_form_that_some_plan_of_these_bits_takes_is_ruled_out(bits: float) -> None:
    """At the price of a byte at any size that a plan may give the tensor the best plain form costs less than what is ruled
    out; and within these sizes the rival is what plain formats lose."""
    elements = 8000
    points = [(int(elements * b / 8), 4.0**-b) for b in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)]
    given = structure.given_bytes(elements, bits)
    plain, within = structure.rival_of(points, 1.0), structure.rival_of(points, 1.0, given)
    sizes = range(100, 10000, 100)
    for size in sizes:
        assert within(size) <= plain(size) + 1e-12
        if max(given[0], 1000) <= size <= given[1]:
            assert within(size) == pytest.approx(plain(size))
    inside = [p for p in points if given[0] <= p[0] <= given[1]]
    for one, two in pairwise(inside):
        price = (one[1] - two[1]) / (two[0] - one[0])
        best = min(loss + price * size for size, loss in points)
        for size in (s for s in sizes if s >= 1000 and within(s) > 0.0):
            assert within(size) + price * size >= best - 1e-12


@pytest.mark.parametrize(
    "weight", [torch.zeros(64, 64), torch.ones(64, 64), normal(64, 96).sign(), torch.zeros(64, 48, 3, 3)]
)
def test_weights_that_plain_formats_store_exactly_are_looked_at_in_vain(weight) -> None:
    known, plain, _, found, _ = explored("x.conv" if weight.dim() > 2 else "x.up", weight)
    assert min(loss for _, loss in plain) == pytest.approx(0.0, abs=1e-6 * max(1.0, known.signal))
    assert all(look.reason or look.rival > 0 for look in found.looks)


def test_no_matrix_of_a_rank_loses_less_than_the_bound_in_the_norm_of_its_inputs() -> None:
    inputs = normal(300, 97, seed=5) * torch.logspace(0, -1, 97)
    hessian = inputs.T @ inputs / 300
    name, weight = planted("svd")
    known, _, _, found, measure = explored(name, weight + 0.3 * normal(127, 97, seed=7), hessian)
    assert found.made
    for rank in (1, 4, 12):
        exact = Recipe("svd", {"rank": rank}, {"factor": Recipe("dense", {"dtype": "float32"})})
        bound = known.matrix.left_out(rank)
        assert bound <= measure(exact) <= 1.2 * bound


def test_a_rank_grows_while_it_buys_more_than_a_byte_elsewhere_and_shrinks_where_it_does_not() -> None:
    weight = normal(128, 40, seed=1) * torch.logspace(0, -2, 40) @ normal(40, 96, seed=2)
    known, _, room, _, measure = explored("layers.0.mlp.up_proj.weight", weight)
    factor = structure.factor_forms()[0].recipe
    middle = Recipe("svd", {"rank": 10}, {"factor": factor})
    start = middle, measure(middle)
    sizes = {}
    for price in (0.0, 1e9):
        made = structure.grow(known, Target(), room, start, price, measure)
        best = min([*made, start], key=lambda m: m[1] + price * room.size_of(m[0]))
        sizes[price] = room.size_of(best[0])
    assert sizes[1e9] < room.size_of(middle) < sizes[0.0]


def test_a_conversion_chooses_planted_structure_and_not_noise(tmp_path: Path, monkeypatch) -> None:
    kinds = {"svd": "low_rank", "cp": "cp", "tucker": "tucker", "tensor_train": "tensor_train", "add": "add"}
    checkpoint, output = tmp_path / "planted.safetensors", tmp_path / "out.nstf"
    tensors = {}
    for seed, (name, weight) in enumerate(map(planted, kinds), 99):
        tensors[name] = (weight + NOISE * normal(*weight.shape, seed=seed)).contiguous()
    name, weight = planted("noise")
    save_file({name: weight, **tensors}, checkpoint)
    runs, build = [], reporting.build
    monkeypatch.setattr(reporting, "build", lambda run, *rest: runs.append(run) or build(run, *rest))
    result = convert(
        ConvertOptions(
            model=str(checkpoint), budget=Budget("ratio", 0.03), output=output, threads=1, prefer="size"
        )
    )
    report = result.report
    chosen = {t["name"]: t for t in report["tensors"]}
    assert chosen[name]["method"] == "trellis"
    assert {kind: chosen[planted(kind)[0]]["method"] for kind in kinds} == kinds
    # Every method has candidates of a tensor or a reason in the report, a bound with its figure.
    for tensor in report["tensors"]:
        tried = {methods.name_of(c.recipe.method) for c in runs[0].table.candidates[tensor["name"]]}
        out = {n["method"]: n for n in tensor["not_tried"]}
        assert tried.isdisjoint(out)
        assert tried | set(out) == {methods.name_of(m) for m in methods.method_families(None)}
        assert all(n["reason"] for n in out.values())
        for look in (n for n in out.values() if n["reason"] == reporting.RULED_OUT):
            assert look["bound_ratio"] >= 1 and look["size_bytes"] > 0
    noise = {n["method"]: n for n in chosen[planted("noise")[0]]["not_tried"]}
    assert noise["low_rank"]["bound_ratio"] > 1 and noise["cp"]["bound_ratio"] is None
    file = nstf.open(output)
    for name, weight in tensors.items():
        known, plain, _ = plain_forms(name, weight)
        rival = structure.rival_of(plain, known.signal)(chosen[name]["size_bytes"])
        assert loss(weight, file.decode(name).float(), Stats(), known.lead) < 0.1 * rival, name
    assert any(
        f["family"] == "SVD" and f["ruled_out"] >= 1 and f["bound_ratio"] > 1 for f in report["families"]
    )


@pytest.mark.parametrize(("apart", "wins"), [(0.1, True), (3.0, False)])
def test_experts_share_a_matrix_where_they_are_alike(apart: float, wins: bool) -> None:
    """apart: what tells experts apart, as a share of what they have in common."""
    weight = normal(1, 64, 96, seed=1) + apart * normal(8, 64, 96, seed=2)
    known, plain, room, found, _ = explored("moe.experts.w", weight / weight.std())
    own = [(r, v) for r, v in found.made if r.method == "add"]
    rival = structure.rival_of(plain, known.signal)
    if not wins:
        assert own == [] and "add" in {look.method for look in found.looks}
        return
    shares = [v / rival(room.size_of(r)) for r, v in own]
    assert min(shares) < 0.35
    for recipe, measured in own:
        assert 0.5 * recipe.least < measured < 2 * recipe.least, "the estimate is far from what was measured"


@pytest.mark.usefixtures("few_forms")
def test_where_time_counts_sums_with_a_shared_matrix_come_in_faster_codes_too() -> None:
    alike = normal(1, 256, 64, seed=1) + 0.1 * normal(4, 256, 64, seed=2)
    for weight, timed in ((alike, True), (alike, False), (alike[:, :240], True)):
        known, plain, room, found, _ = explored("moe.experts.w", weight, target=Target(timed))
        own = {str(r): (r, v) for r, v in found.made if r.method == "add"}
        twins = [(r, v) for r, v in own.values() if r.parts["base"].method == "shuffle"]
        assert own and bool(twins) == (timed and weight is alike)  # 240 rows end within a path
        for twin, lost in twins:
            rate = twin.parts["base"].params["quarter_bits"]
            base = Recipe("trellis", {"quarter_bits": rate})
            _, other = own[str(replace(twin, parts={**twin.parts, "base": base}))]
            # What the codes lose more: 0.07 to 0.13 of a bit.
            assert other < lost < 1.4 * other
            assert lost < structure.rival_of(plain, known.signal)(room.size_of(twin))


def test_what_a_bound_left_over_is_not_said_to_be_ruled_out(monkeypatch) -> None:
    name, weight = planted("svd")
    weight = weight + 0.3 * normal(*weight.shape, seed=99)
    *_, found, _ = explored(name, weight)
    assert "svd" in {recipe.method for recipe, _ in found.made}
    monkeypatch.setattr(structure, "MOST", 1)  # one form is made: the others were possible and are not
    monkeypatch.setattr(structure, "SHORTFALL", 1e9)  # and nothing promises enough
    *_, found, _ = explored(name, weight)
    assert found.made == [] and {k.reason for k in found.looks if k.method == "svd"} == {structure.NOT_MADE}


def _asked_at(folder: Path, weight: torch.Tensor, of_file: float, planned: float) -> dict[Recipe, float]:
    unit, allowed = Unit("w", tuple(weight.shape), "float32", "up", 1), methods.method_families(None)
    with WorkDir(folder, {"tool": "1", "checkpoint": "2"}) as work:
        known = machine("cpu", None, None, 1)
        encoder = Encoder(work, lambda name: weight, Statistics(None), "x", None, known, bits=of_file)
        return {c.recipe: c.loss for c in encoder.at_few_bits(unit, allowed, planned)}


def test_what_a_budget_proposes_at_few_bits_does_not_depend_on_earlier_ones(tmp_path: Path) -> None:
    weight = normal(256, 24) @ normal(24, 256, seed=1) + normal(256, 256, seed=2)
    earlier = _asked_at(tmp_path / "shared", weight, 8.0, 3.0)
    fresh = _asked_at(tmp_path / "fresh", weight, 3.0, 3.05)
    assert fresh != earlier
    assert _asked_at(tmp_path / "shared", weight, 3.0, 2.95) == fresh


def test_what_was_looked_at_at_few_bits_is_not_said_to_be_ruled_out(tmp_path: Path) -> None:
    weight = normal(256, 256) + 0.4 * normal(256, 4, seed=1) @ normal(4, 256, seed=2)
    unit, allowed = Unit("w", (256, 256), "float32", "up", 1), methods.method_families(None)
    known = machine("cpu", None, None, 1)
    with WorkDir(tmp_path / "work", {}) as work:
        encoder = Encoder(work, lambda name: weight, Statistics(None), "x", None, known, bits=3.0)
        before = encoder.candidates(unit, allowed)
        assert any(look.method == "add" and "at most" in look.reason for look in encoder.looks(unit, allowed))
        found = before + encoder.at_few_bits(unit, allowed, 3.0)
        looks = encoder.looks(unit, allowed)
    assert "add" not in {c.recipe.method for c in found}
    assert {look.reason for look in looks if look.method == "add"} == {LOOKED_AT}
    # What had nothing to add to its candidates gives no reason.
    tried = {c.recipe.method for c in found}
    assert "trellis" in tried and not [look for look in looks if look.method == "trellis"]
