"""Prices in time: trees cut into leaves, measured once and kept, modelled where the target is not here."""

import json

import pytest
import torch

from nstf.errors import UsageError
from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import available
from nstf.kernels.formats import Node, dense, fp8, integer, mxfp4, trellis
from nstf_convert.pipeline.propose.recipe import Recipe, tree_of
from nstf_convert.speed import cache, measure, model, targets, token
from nstf_convert.speed.atoms import LARGEST, atoms_of
from nstf_convert.speed.prices import Prices

INT4 = Recipe("int_grid", {"bits": 4, "group": 32, "symmetric": True, "scale_bits": 8})
TRELLIS = Recipe("trellis", {"quarter_bits": 16})
SHUFFLE = Recipe("shuffle", {"quarter_bits": 16})
SHAPE = (64, 128)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Counts what is measured instead of timing it; the cache is the test's own."""
    calls = []

    def fake(atoms, isa, threads, size_bytes, batch=1):
        calls.append([a.key for a in atoms])
        return {a: 1e-6 * a.rows for a in atoms}

    monkeypatch.setattr(measure, "measure", fake)
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    return calls


def here(name: str = "cpu") -> targets.Target:
    return targets.Target(name, "portable", True)


def price(recipe: Recipe, **changes) -> float:
    settings = {"threads": 1, "size_bytes": 1 << 20} | changes
    prices = Prices([here()], **settings)
    return prices.seconds((tree_of(recipe, SHAPE, 1), SHAPE, 1))[0]


def test_a_price_is_measured_once_and_found_by_the_next_conversion(measured) -> None:
    assert price(INT4) == pytest.approx(64e-6)
    assert price(INT4) == pytest.approx(64e-6)
    assert len(measured) == 1
    price(SHUFFLE)
    assert len(measured) == 2


class Folder:
    """A work directory, as far as prices know it."""

    def __init__(self) -> None:
        self.kept = {}

    def find_metadata(self, key):
        return self.kept.get(key)

    def put(self, key, tensors, metadata) -> None:
        assert key not in self.kept and not tensors
        self.kept[key] = json.loads(json.dumps(metadata))


def test_a_conversion_that_is_resumed_has_its_prices_again_without_the_cache(
    measured, monkeypatch, tmp_path
) -> None:
    """Measured anew they differ a little, and so did the file: in a container, say, whose cache is gone."""
    work = Folder()
    first = price(INT4, own=work), price(SHUFFLE, own=work)
    assert len(measured) == 2 == len(work.kept)

    def slower(atoms, isa, threads, size_bytes, batch=1):
        measured.append(atoms)
        return {a: 3e-6 * a.rows for a in atoms}

    monkeypatch.setattr(measure, "measure", slower)
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "new")
    assert (price(INT4, own=work), price(SHUFFLE, own=work)) == first
    assert len(measured) == 2
    # Another conversion measures, and so does this one what it has not asked for.
    assert price(INT4, own=Folder()) == pytest.approx(3 * first[0])
    assert price(INT4, own=work, threads=2) == pytest.approx(3 * first[0])


def test_a_conversion_keeps_prices_that_the_cache_had(measured, monkeypatch, tmp_path) -> None:
    known, work = price(INT4), Folder()
    assert price(INT4, own=work) == known and len(measured) == 1
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "new")
    assert price(INT4, own=work) == known and len(measured) == 1


@pytest.mark.parametrize("change", [{"threads": 2}, {"size_bytes": 1 << 24}])
def test_other_threads_and_other_caches_have_prices_of_their_own(measured, change) -> None:
    price(INT4)
    price(INT4, **change)
    assert len(measured) == 2


def test_other_kernels_are_measured_again(measured, monkeypatch) -> None:
    price(INT4)
    monkeypatch.setattr(cache, "_kernels", lambda: "another build")
    price(INT4)
    assert len(measured) == 2


def _rewrite(path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("[]"),
        lambda path: _rewrite(path, lambda c: c["identity"].update(processor="another")),
        lambda path: _rewrite(path, lambda c: c["seconds"].update(dict.fromkeys(c["seconds"], -1.0))),
        lambda path: _rewrite(path, lambda c: c["seconds"].update(dict.fromkeys(c["seconds"], "1"))),
        lambda path: _rewrite(path, lambda c: c.update(version=0)),
    ],
)
def test_a_cache_that_is_damaged_or_foreign_is_measured_again(measured, tmp_path, caplog, damage) -> None:
    price(INT4)
    (path,) = tmp_path.iterdir()
    damage(path)
    assert price(INT4) == pytest.approx(64e-6)
    assert len(measured) == 2
    assert "speeds are measured again" in caplog.text
    price(INT4)
    assert len(measured) == 2


def test_without_a_folder_prices_are_measured_and_not_kept(measured, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for where in (None, tmp_path / "file"):
        monkeypatch.setattr(cache, "folder", lambda where=where: where)
        assert price(INT4) == pytest.approx(64e-6)
    assert len(measured) == 2


@pytest.mark.parametrize(("load", "warned"), [(0.5, False), (40.0, True)])
def test_timing_on_a_busy_machine_is_said_once(measured, monkeypatch, caplog, load, warned) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    prices = Prices([here()], 1, 1 << 20)
    for recipe in (INT4, SHUFFLE):
        prices.seconds((tree_of(recipe, SHAPE, 1), SHAPE, 1))
    assert caplog.text.count("kernels are timed on a busy machine (a load of 40.0 on 2 cores)") == warned


def test_a_trellis_of_several_rates_costs_what_its_sections_cost() -> None:
    recipe = Recipe("trellis", {"sections": [[8, 48], [16, 16]]})
    parts = list(atoms_of(tree_of(recipe, SHAPE, 1), SHAPE, 1))
    assert [list(a.leaf.params.quarter_bits) for a, _ in parts] == [[8], [16]]
    assert [times for _, times in parts] == [0.75, 0.25]


def test_sums_and_factors_cost_what_their_parts_cost() -> None:
    low_rank = Recipe("svd", {"rank": 16}, {"factor": INT4})
    both = Recipe("add", {}, {"base": INT4, "correction": low_rank})
    parts = list(atoms_of(tree_of(both, SHAPE, 1), SHAPE, 1))
    # The base whole; a factor of 64 x 16 and one of 16 x 128 by their shares of 64 x 128 weights.
    assert [times for _, times in parts] == [1.0, 0.125, 0.25]


def test_what_experts_share_costs_as_much_for_each_of_them() -> None:
    shape = (4, 64, 128)
    shared = {"ranks": [1, 64, 128], "view": list(shape), "iterations": 0}
    recipe = Recipe("add", {}, {"base": TRELLIS, "correction": Recipe("tucker", shared, {"factor": INT4})})
    parts = list(atoms_of(tree_of(recipe, shape, 2), shape, 2))
    assert [times for _, times in parts] == [1.0, 1.0] and {(a.rows, a.cols) for a, _ in parts} == {
        (256, 128)
    }
    low_rank = Recipe("svd", {"rank": 16}, {"factor": INT4})
    parts = list(atoms_of(tree_of(low_rank, shape, 2), shape, 2))
    # An expert's 64 x 16 is its own, 16 x 128 is multiplied with for each of the four.
    assert [times for _, times in parts] == [16 / 128, 4 * 16 / 256]


def test_a_large_matrix_is_timed_on_some_of_its_rows(measured) -> None:
    shape = (4 * LARGEST // 128, 128)
    ((atom, times),) = atoms_of(tree_of(INT4, shape, 1), shape, 1)
    assert (atom.rows, atom.cols) == shape and times == 1.0
    assert atom.sample.rows * atom.sample.cols == LARGEST
    assert Prices([here()], 1, 1 << 20).seconds((tree_of(INT4, shape, 1), shape, 1))[0] == pytest.approx(
        1e-6 * shape[0], rel=1e-2
    )
    assert measured == [[atom.sample.key]]


def test_a_transposed_matrix_and_stacked_experts_are_priced_as_they_are_stored() -> None:
    tree = Node("permute", type("P", (), {"dims": (1, 0)})(), {"x": tree_of(INT4, SHAPE, 1)})
    ((atom, _),) = atoms_of(tree, (128, 64), 1)
    assert (atom.rows, atom.cols) == SHAPE
    ((atom, _),) = atoms_of(tree_of(INT4, (2, 32, 128), 2), (2, 32, 128), 2)
    assert (atom.rows, atom.cols) == SHAPE


@pytest.mark.skipif(not available(), reason="the extension was not built")
@pytest.mark.parametrize("recipe", [INT4, TRELLIS, SHUFFLE, Recipe("fp8", {"variant": "e4m3fn", "group": 0})])
def test_every_instruction_set_here_is_timed_and_left_as_it_was(recipe) -> None:
    before = ext.isa()
    ((atom, _),) = atoms_of(tree_of(recipe, SHAPE, 1), SHAPE, 1)
    for isa in ext.isas():
        found = measure.measure([atom], isa, 1, 1 << 18)
        assert 0.0 < found[atom] < 1.0
    assert ext.isa() == before


@pytest.mark.parametrize("name", [n for n in targets.known() if n != "cpu"])
def test_models_know_every_target_and_rank_formats_as_measured(name) -> None:
    target = targets.Target(name, "" if name in targets.ARCHITECTURES else name, False)
    shape = (4096, 4096)

    def seconds(recipe: Recipe) -> float:
        return Prices([target], 1, 1 << 20).seconds((tree_of(recipe, shape, 1), shape, 1))[0]

    plain = Recipe("dense", {"dtype": "bfloat16"})
    assert seconds(INT4) < seconds(SHUFFLE) * 1.2 + 1e-9
    assert seconds(SHUFFLE) < seconds(TRELLIS)
    assert seconds(INT4) < seconds(plain)


def test_the_model_of_the_h200_agrees_with_what_was_measured() -> None:
    shape, target = (28672, 8192), targets.Target("sm_90", "", False)
    # Microseconds of docs/gpu_speed.md, 28672 x 8192, one row.
    wide = {4: 36.0, 5: 59.6, 6: 62.2, 7: 73.5, 8: 60.6}
    steps = {3: 34.0, 4: 37.1}
    cases = {integer.Params(bits=bits, group=128): micro for bits, micro in wide.items()}
    cases |= {integer.Params(bits=bits, group=64, scale_bits=8): micro for bits, micro in steps.items()}
    for params, micro in cases.items():
        predicted = Prices([target], 1, 1 << 20).seconds((Node("int", params), shape, 1))[0]
        assert predicted == pytest.approx(1e-6 * micro, rel=0.1), params


def test_targets_hold_their_own_formats() -> None:
    ocp, fnuz = (Node("fp8", fp8.Params(variant=v)) for v in ("e4m3fn", "e4m3fnuz"))
    four = Node("mxfp4", mxfp4.Params())
    plain = Node("dense", dense.Params("bfloat16"))
    held = {
        name: [targets.Target(name, "", False).holds(t) for t in (ocp, fnuz, four, plain)]
        for name in targets.ARCHITECTURES
    }
    assert held == {
        "gfx90a": [False, False, False, True],
        "gfx942": [False, True, False, True],
        "gfx950": [True, False, True, True],
        "gfx1100": [False, False, False, True],
        "gfx1201": [True, False, False, True],
        "sm_90": [True, False, False, True],
    }
    assert all(here().holds(t) for t in (ocp, fnuz, four, plain))


def test_names_of_targets() -> None:
    with pytest.raises(
        UsageError, match="unknown target 'gfx12': choose from cpu, avx2, avx2-vnni, avx512, neon, gfx90a"
    ):
        targets.parse(["cpu", "gfx12"], False)
    assert [t.name for t in targets.parse([], False)] == ["cpu"]
    assert [t.name for t in targets.parse(["sm_90", "avx2", "sm_90"], False)] == ["sm_90", "avx2"]
    # What every processor with AVX2 runs, also where this one has AVX-VNNI.
    assert targets.parse(["avx2"], False)[0].isa == "avx2"
    other = "neon" if not available() or "avx2" in ext.isas() else "avx2"
    assert not targets.parse([other], False)[0].here
    assert (
        model.seconds(targets.parse([other], False)[0], next(atoms_of(tree_of(INT4, SHAPE, 1), SHAPE, 1))[0])
        > 0
    )


def test_random_bytes_that_stand_for_a_trellis_of_several_rates_are_one() -> None:
    # Else the engine refuses the plan's matrices, and the speed of a plan is never measured.
    leaf = Node(trellis.KIND, trellis.Params((12, 16, 20), (16, 32, 16)))
    filled = measure.Pool(1 << 20).filled(leaf, SHAPE)
    assert any(name.endswith("section") for name in filled.arrays)
    if available():
        measure.compile_matrix(filled)


def test_passing_by_the_other_weights_wakes_no_thread_that_a_timed_product_meets(monkeypatch) -> None:
    pool, used, largest = measure.Pool(1 << 20), [], torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda x: used.append(torch.get_num_threads()) or largest(x))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pool.pass_by()
        assert used == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_passes_by_lies_behind_what_was_handed_out(monkeypatch) -> None:
    pool, read, largest = measure.Pool(1 << 20), [], torch.Tensor.max
    base = pool.filled(Node("int", integer.Params(8, 0, True, 16)), (64, 1024)).arrays["codes"].data_ptr()
    monkeypatch.setattr(
        torch.Tensor, "max", lambda x: read.append((x.data_ptr() - base, x.nbytes)) or largest(x)
    )
    pool.pass_by(1 << 16)
    assert read == [(1 << 16, 1 << 16)]
    read.clear()
    pool.pass_by((1 << 20) - (1 << 15))
    assert read == [(1 << 16, (1 << 20) - (1 << 16)), (0, 1 << 15)]
    read.clear()
    pool.pass_by(-5)
    assert read == []


def test_matrices_that_take_turns_have_no_more_bytes_than_the_model() -> None:
    leaves = [Node("int", integer.Params(bits, 32, True, 8)) for bits in (2, 3, 4, 5, 6, 8)]
    atoms = [atom for leaf in leaves for atom, _ in atoms_of(leaf, (512, 512), 1)]
    for size in (1 << 18, 1 << 20, 1 << 23):
        pool = measure.Pool(size)
        groups = list(measure._groups(atoms, pool, 1))
        assert [a for group in groups for a in group] == atoms
        for group in groups:
            held = sum(a.size_bytes * n for a, n in group.items())
            assert held <= pool.size_bytes or len(group) == 1
    assert [n for group in measure._groups(atoms, pool, 128) for n in group.values()] == [1] * len(atoms)


def test_a_format_that_was_held_up_is_timed_again(monkeypatch) -> None:
    leaves = [Node("int", integer.Params(bits, 32, True, 8)) for bits in (2, 4, 8)]
    atoms = [atom for leaf in leaves for atom, _ in atoms_of(leaf, (64, 64), 1)]
    alone = dict(zip(atoms, (1.0, 2.0, 4.0), strict=True))
    asked: list[tuple[int, list[int]]] = []
    answers = iter([(0.5, 9.0, 2.0), alone.values(), (8.0,), (1.1,)])

    def timed(of, pool, threads, batch, panels):
        asked.append((threads, [atoms.index(a) for a in of]))
        return dict(zip(of, next(answers), strict=True))

    monkeypatch.setattr(measure, "_measure", timed)
    found = measure._steady(atoms, measure.Pool(1 << 18), 2, 1, 2)
    assert list(found.values()) == [0.5, 1.1, 2.0]
    assert asked == [(2, [0, 1, 2]), (1, [0, 1, 2]), (2, [1]), (2, [1])]


@pytest.mark.skipif(not available(), reason="the engine is not built here")
def test_what_a_token_takes_beside_its_products_is_kept_with_the_prices(measured, monkeypatch) -> None:
    """Plans for a number of tokens a second go by it: measured anew, each conversion wrote another file."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    timed = iter([3e-3, 4e-3, 5e-3])
    monkeypatch.setattr(token, "seconds_of_token", lambda *given: next(timed))

    def products(own=None, **changes) -> float:
        prices = Prices([here()], threads=1, size_bytes=1 << 20, own=own)
        return token.Token({**config, **changes}, 1, prices).products(here(), 100.0)

    folder = Folder()
    first = products(folder)
    assert first == products() and first > 0
    assert products(vocab_size=128) != first, "another model's"
    for kept in cache.folder().glob("speed-*.json"):
        kept.unlink()
    assert products(folder) == first, "a conversion that goes on has the numbers it began with"
    assert products() != first


def test_of_two_that_measure_at_once_the_first_to_keep_it_counts(tmp_path) -> None:
    """What is written last stayed, so that the other's file could never be made again."""
    of = cache.identity("portable", 1)
    first, second = (cache.SpeedCache(of, tmp_path) for _ in range(2))
    first.add({"a": 1e-3})
    second.add({"a": 2e-3, "b": 3e-3})
    assert second.seconds == {"a": 1e-3, "b": 3e-3} == cache.SpeedCache(of, tmp_path).seconds
