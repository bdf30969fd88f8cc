"""The table of architectures and the occupancy that follows from it."""

import pytest

from nstf.errors import UsageError
from nstf.kernels.triton.architecture import ARCHITECTURES, architecture, occupancy

ROWS = list(ARCHITECTURES.values())


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
