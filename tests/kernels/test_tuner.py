"""The short list of tiles of a packed product, the measurement of it, and what is remembered."""

import json
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nstf.kernels.triton import hopper, tuner
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.packed import Layout, layout_of
from nstf.kernels.triton.spec import KernelSpec, hollow
from nstf.kernels.triton.tuner import NAMES, TuningCache, key, short_list, specs_with, tune_gemm, use_measured


def layout(samples: ModuleType, shape: tuple[int, int] = (4096, 4096), **params: Any) -> Layout:
    found = layout_of(hollow(samples.leaf("int", **({"bits": 4, "group": 128} | params)), shape))
    assert found is not None
    return found


@pytest.mark.parametrize("target", ARCHITECTURES)
def test_the_short_list_is_short_begins_with_what_runs_unmeasured_and_names_different_launches(
    target: str, samples: ModuleType
) -> None:
    for shape in ((4096, 4096), (28672, 8192), (512, 512)):
        for rows in (20, 64, 256):
            made = layout(samples, shape)
            names = short_list(made, rows, torch.float16, target)
            assert 2 <= len(names) <= len(NAMES)
            assert names[0] == tuner.chosen(made, rows, torch.float16, target)
            launches = [
                str([(s.name, s.grid) for s in specs_with(made, rows, torch.float16, target, n)])
                for n in names
            ]
            assert len(set(launches)) == len(launches), (shape, rows, names)
            assert ("wgmma" in names) == (target == "sm_90" and hopper.available())


def test_the_first_choice_on_an_h200_is_the_one_that_was_fastest_there(samples: ModuleType) -> None:
    if not hopper.available():
        pytest.skip("this Triton has no Gluon")
    # Best of 15 to 17 tiles each; docs/gpu_speed.md has the times.
    fastest = {
        (4096, 32): "gemm",
        (4096, 64): "gemm",
        (4096, 128): "wgmma",
        (14336, 32): "gemm",
        (14336, 128): "wgmma",
    }
    for (rows, batch), name in fastest.items():
        assert tuner.first_choice(layout(samples, (rows, 4096)), batch, torch.bfloat16, "sm_90") == name


def test_the_short_list_is_measured_once(samples: ModuleType) -> None:
    made, cache, timed = layout(samples), TuningCache(), []

    def seconds(name: str, specs: list[KernelSpec]) -> float:
        timed.append(name)
        if len(timed) == 1:
            raise RuntimeError("out of local memory")
        return 1.0 / len(timed)

    best = tune_gemm(made, 60, torch.float16, "gfx942", cache, seconds)
    assert timed == short_list(made, 60, torch.float16, "gfx942") and best == timed[-1]
    # Sixty rows and forty count as 64: nothing is measured again, not even after a way through JSON.
    again = TuningCache.from_json(cache.to_json())
    count = len(timed)
    assert tune_gemm(made, 40, torch.float16, "gfx942", again, seconds) == best and len(timed) == count
    assert cache.to_json() == again.to_json()
    others = {key(made, 65, "gfx942"), key(made, 60, "gfx950"), key(layout(samples, bits=3), 60, "gfx942")}
    assert not others & set(again.entries) and len(others) == 3


def test_a_card_on_which_nothing_runs_says_so(samples: ModuleType) -> None:
    def fails(name: str, specs: list[KernelSpec]) -> float:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no tile for gfx942/64x4096x4096/int4g128 ran"):
        tune_gemm(layout(samples), 64, torch.float16, "gfx942", TuningCache(), fails)


def test_a_measured_tile_is_launched_and_another_dtype_is_not_touched(
    samples: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layout(samples)
    monkeypatch.setattr(tuner, "_MEASURED", TuningCache())
    cache = TuningCache({key(made, 64, "gfx942"): ("narrower", 1e-5), key(made, 64, "sm_90"): ("gemm", 1e-5)})
    assert use_measured(cache, "gfx942") == 1
    assert tuner.chosen(made, 50, torch.float16, "gfx942") == "narrower"
    assert tuner.chosen(made, 50, torch.float32, "gfx942") == "gemm"
    assert tuner.chosen(made, 65, torch.float16, "gfx942") == "gemm"
    before = tuner.measured_version()
    use_measured(TuningCache({key(made, 64, "gfx942"): ("fewer parts", 1e-5)}), "gfx942")
    assert tuner.measured_version() != before, "measured anew: as many tiles as before, and another one"
    use_measured(cache, "gfx942")
    wide, narrow = (specs_with(made, 50, torch.float16, "gfx942", n)[0] for n in ("gemm", "narrower"))
    assert narrow.constants["BN"] * 2 == wide.constants["BN"]
    # Of a kernel that the target does not have, nothing is taken.
    use_measured(TuningCache({key(made, 256, "gfx942"): ("wgmma", 1e-5)}), "gfx942")
    assert tuner.chosen(made, 256, torch.float16, "gfx942") == "gemm"
    with pytest.raises(ValueError, match="has no tile 'wgmma' on gfx942"):
        specs_with(made, 256, torch.float16, "gfx942", "wgmma")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.update(version=1), "version 1; this nstf reads 2"),
        (lambda d: d.pop("entries"), "keys must be version and entries"),
        (lambda d: d.update(entries=[]), "entries must be an object"),
        (lambda d: d["entries"]["k"].update(time_s="1"), "time that is not positive"),
        (lambda d: d["entries"]["k"].update(time_s=-1.0), "time that is not positive"),
        (lambda d: d["entries"]["k"].update(tile="block_m 48"), "no tile of these kernels"),
        (lambda d: d["entries"]["k"].update(code="x"), "keys must be tile and time_s"),
    ],
)
def test_a_damaged_cache_is_refused(damage: Any, message: str) -> None:
    data = {"version": tuner.CACHE_VERSION, "entries": {"k": {"tile": "gemm", "time_s": 1e-5}}}
    TuningCache.from_json(json.dumps(data))
    damage(data)
    with pytest.raises(ValueError, match=message):
        TuningCache.from_json(json.dumps(data))
