"""The table of architectures, the roofline model that orders tilings, and the tuner that measures a few of them."""

import dataclasses
import json

import pytest

from nstf.errors import UsageError
from nstf.kernels.triton.architecture import ARCHITECTURES, architecture, occupancy
from nstf.kernels.triton.planner import (
    CACHE_VERSION,
    Problem,
    Tiling,
    TuningCache,
    candidates,
    lds_bytes,
    plan,
    predict,
    registers,
    tune,
)

ROWS = list(ARCHITECTURES.values())
INT4 = Problem(1, 14336, 4096, 4.25, 2.5, "int4")


def at(problem: Problem, **changes) -> Problem:
    return dataclasses.replace(problem, **changes)


def test_an_unknown_target_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        UsageError, match=r"unknown target 'gfx906': nstf compiles for gfx90a, gfx942"
    ) as caught:
        architecture("gfx906")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("target", "registers", "lds", "waves", "expected"),
    [
        # AMD's guide for the MI300: 512 // round up to 8, at most 8 waves a SIMD.
        ("gfx942", 76, 0, 4, (6.0, 6, "registers")),
        ("gfx942", 64, 0, 4, (8.0, 8, "waves")),
        ("gfx942", 32, 20480, 4, (3.0, 3, "lds")),
        ("gfx942", 512, 0, 8, (0.0, 0, "registers")),
        ("gfx942", 76, 0, 1, (6.0, 24, "registers")),
        # 160 KiB and granules of 1280 bytes.
        ("gfx950", 32, 20480, 4, (8.0, 8, "waves")),
        # 1536 registers in granules of 24, and 16 waves.
        ("gfx1100", 153, 0, 4, (9.0, 9, "registers")),
        ("gfx1201", 116, 0, 4, (12.0, 12, "registers")),
        # NVIDIA's occupancy calculator, compute capability 9.0.
        ("sm_90", 76, 8192, 4, (6.0, 6, "registers")),
        ("sm_90", 32, 100 * 1024, 4, (2.0, 2, "lds")),
        ("sm_90", 255, 0, 16, (0.0, 0, "registers")),
    ],
)
def test_occupancy_is_the_architectures(target, registers, lds, waves, expected) -> None:
    found = occupancy(architecture(target), registers, lds, waves)
    assert (found.waves_per_simd, found.groups_per_unit, found.limit) == expected


def test_too_much_local_memory_does_not_fit() -> None:
    assert occupancy(architecture("gfx1100"), 32, 65537, 4).groups_per_unit == 0
    assert occupancy(architecture("gfx950"), 32, 65537, 4).groups_per_unit == 2


def test_the_peaks_follow_from_units_clock_and_instruction_set() -> None:
    # 163.4 TFLOP/s in float32 on the MI300X, with packed products, and 66.9 on the H200: the data sheets.
    assert architecture("gfx942").vector_rate * 4 == pytest.approx(163.4e12, rel=0.01)
    assert architecture("sm_90").vector_rate * 2 == pytest.approx(66.9e12, rel=0.01)
    # In pairs 61.4 on the RX 7900 XTX and 48.7 on the RX 9070 XT.
    assert architecture("gfx1100").vector_rate * 4 == pytest.approx(61.4e12, rel=0.01)
    assert architecture("gfx1201").vector_rate * 4 == pytest.approx(48.7e12, rel=0.01)
    # 8192 operations a clock of a unit of the MI355X in 8 bits.
    assert architecture("gfx950").matrix_8bit == pytest.approx(8192 * 256 * 2.4e9, rel=0.01)
    for row in ROWS:
        assert row.matrix_8bit >= row.matrix_16bit > row.vector_rate
        assert row.wave == (64 if row.target.startswith("gfx9") else 32)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_no_prediction_beats_memory_or_matrix_cores(row) -> None:
    for m in (1, 16, 256, 4096):
        problem = at(INT4, m=m)
        for found in plan(problem, row):
            assert found.time_s > problem.weight_bytes / row.bandwidth
            assert found.time_s > 2.0 * m * problem.n * problem.k / row.matrix_16bit
            assert found.bytes_moved >= problem.weight_bytes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_every_proposal_fits_the_target(row) -> None:
    for m in (1, 3, 64, 1000):
        for found in plan(at(INT4, m=m), row):
            t = found.tiling
            assert lds_bytes(INT4, t, row) <= row.lds_bytes_per_group
            assert registers(INT4, t, row) <= row.registers_per_wave
            assert t.kpack == 1 or row.target in ("gfx90a", "gfx942")  # ignored or deprecated elsewhere
            assert t.nonkdim in ((16, 32) if row.wave == 64 and t.matrix else (0,))
            assert t.waves_per_eu == 0  # a request that is paid in spills


def test_decoding_is_bound_by_memory_and_a_prompt_by_the_matrix_cores() -> None:
    row = architecture("gfx942")
    assert plan(INT4, row)[0].bound == "memory"
    assert plan(at(INT4, m=2048), row)[0].bound == "matrix"
    assert not plan(INT4, row)[0].tiling.matrix and plan(at(INT4, m=2048), row)[0].tiling.matrix


def test_a_dear_decoder_makes_weights_stationary_and_a_cheap_one_does_not() -> None:
    row = architecture("gfx950")
    batch = at(INT4, m=256)
    assert plan(batch, row)[0].tiling.dataflow == "output"
    best = plan(at(batch, decode=20), row)[0]
    assert best.tiling.dataflow == "weight"
    assert best.tiling.walked(batch) * best.tiling.block_m == 256
    # The sums of a prompt do not fit registers: its weights are decoded to memory.
    assert all(t.dataflow == "output" for t in candidates(at(batch, m=257, decode=60), row))


def test_walked_rows_are_decoded_once() -> None:
    row, batch = architecture("gfx942"), at(INT4, m=256, decode=20)
    walks = Tiling("weight", True, 64, 64, 128, waves=4, stages=1, nonkdim=16)
    found, plain = (
        predict(batch, walks, row),
        predict(batch, dataclasses.replace(walks, dataflow="output"), row),
    )
    assert found is not None and plain is not None
    assert plain.groups == 4 * found.groups and plain.waves_per_simd > found.waves_per_simd
    # Four times the work, on four times the workgroups: 224 of them leave a quarter of 304 units idle.
    assert plain.vector_s == pytest.approx(4 * found.vector_s * (224 / 304) / (896 / 912))


def test_an_encoding_that_leaves_no_choice_of_depth_has_tilings_of_that_depth() -> None:
    for row in ROWS:
        for depth in (160, 512):
            found = plan(at(INT4, m=64, depth=depth), row, suits=lambda t: t.matrix)
            assert {x.tiling.block_k for x in found} == {depth}


def test_few_tiles_are_split_over_depth() -> None:
    # 1024 x 16384 in tiles of 64 columns is 16 workgroups for 304 units.
    few = Problem(16, 1024, 16384, 4.25, 2.5, "int4")
    best = plan(few, architecture("gfx942"))[0]
    assert best.tiling.split_k > 1 and best.groups > 100


def test_dies_are_dealt_neighbouring_tiles() -> None:
    row = architecture("gfx942")
    tiling = Tiling("output", True, 128, 128, 64, waves=4, nonkdim=16, group=4, xcds=8)
    problem = at(INT4, m=4096)
    dealt, plain = predict(problem, tiling, row), predict(problem, dataclasses.replace(tiling, xcds=1), row)
    assert dealt is not None and plain is not None and dealt.bytes_moved < plain.bytes_moved
    # Of a split depth a die reads only its part of the activations, when its programs are neighbours.
    tiling = Tiling("output", True, 16, 64, 128, 4, waves=4, nonkdim=16, xcds=8)
    problem = at(INT4, m=16)
    dealt, plain = predict(problem, tiling, row), predict(problem, dataclasses.replace(tiling, xcds=1), row)
    assert dealt is not None and plain is not None
    assert plain.bytes_moved - dealt.bytes_moved == (8 - 2) * 16 * 4096 * 2
    for m in (16, 256):
        for tiling in candidates(at(INT4, m=m), row):
            shares = tiling.split_k > 1 or (tiling.dataflow == "output" and tiling.block_m < m)
            assert tiling.xcds == (8 if shares and tiling.matrix else 1)
    assert all(t.xcds == 1 for t in candidates(at(INT4, m=256), architecture("gfx90a")))


def test_too_large_a_tile_is_no_candidate() -> None:
    tiling = Tiling("output", True, 256, 256, 256, waves=2)
    assert predict(at(INT4, m=256), tiling, architecture("gfx1100")) is None


def test_the_short_list_is_short_and_the_same_every_time() -> None:
    row, problem = architecture("sm_90"), at(INT4, m=32)
    found = plan(problem, row, 5)
    assert len(found) == 5 and found == plan(problem, row, 5)
    assert [x.time_s for x in found] == sorted(x.time_s for x in found)
    assert len(list(candidates(problem, row))) > 20 * len(found)
    assert len({(x.tiling.block_m, x.tiling.block_n, x.tiling.block_k, x.tiling.split_k) for x in found}) >= 3


def test_a_tiny_matrix_has_a_plan_and_nonsense_has_none() -> None:
    for row in ROWS:
        assert plan(Problem(1, 1, 8, 4.5, 2.5, "int4"), row)
        assert plan(Problem(7, 3, 40, 2.1, 10, "trellis"), row)
    with pytest.raises(ValueError, match="no such product"):
        Problem(0, 1, 1, 4, 1, "int4")


def test_the_tuner_measures_the_short_list_once() -> None:
    row, cache, measured = architecture("gfx942"), TuningCache(), []

    def measure(tiling: Tiling) -> float:
        measured.append(tiling)
        if len(measured) == 1:
            raise RuntimeError("out of local memory")
        return 1.0 / len(measured)

    best = tune(at(INT4, m=12), row, measure, cache, 4)
    assert len(measured) == 4 and best == measured[-1]
    # Ten rows and twelve count as sixteen: nothing is measured again, not even after a way through JSON.
    again = TuningCache.from_json(cache.to_json())
    assert tune(at(INT4, m=10), row, measure, again, 4) == best and len(measured) == 4
    assert again.get(at(INT4, m=17), row.target) is None
    assert again.get(at(INT4, m=12, format="int3"), row.target) is None
    assert again.get(at(INT4, m=12), "gfx950") is None
    assert cache.to_json() == again.to_json()


def test_a_card_on_which_nothing_runs_says_so() -> None:
    def fails(tiling: Tiling) -> float:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="none of 3 tilings ran"):
        tune(INT4, architecture("sm_90"), fails, TuningCache(), 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.update(version=9), "version 9; this nstf reads 1"),
        (lambda d: d.pop("entries"), "keys must be version and entries"),
        (lambda d: d.update(entries=[]), "entries must be an object"),
        (lambda d: d["entries"]["k"].update(time_s="1"), "time that is not positive"),
        (lambda d: d["entries"]["k"].update(time_s=-1.0), "time that is not positive"),
        (lambda d: d["entries"]["k"]["tiling"].update(block_m=1e3), "block_m is 1000.0"),
        (lambda d: d["entries"]["k"]["tiling"].update(waves=True), "waves is True"),
        (lambda d: d["entries"]["k"]["tiling"].update(code="x"), "a tiling has the keys"),
        (lambda d: d["entries"]["k"]["tiling"].update(dataflow="x"), "no such dataflow"),
    ],
)
def test_a_damaged_cache_is_refused(damage, message) -> None:
    tiling = Tiling("output", True, 16, 16, 32)
    data = {"version": CACHE_VERSION, "entries": {"k": {"tiling": tiling.to_json(), "time_s": 1e-5}}}
    TuningCache.from_json(json.dumps(data))
    damage(data)
    with pytest.raises(ValueError, match=message):
        TuningCache.from_json(json.dumps(data))
