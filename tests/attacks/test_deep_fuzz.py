"""Damage behind right digests: files that pass `verify` and reach the code that builds and runs models."""

import copy
import json
import os
import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Forged
from deep_cases import BATCH, SLOWEST_S, batch, check, counted, damaged, make_model, sign
from forked import Counts, Watch, run_batches
from small_llama import LLAMA, tensors
from test_fuzz import NASTY

from nstf.errors import NstfError
from nstf.runtime.artifact import verify, write_artifact


@pytest.fixture(scope="session")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Forged:
    return make_model(tmp_path_factory.mktemp("deep"))


def test_damage_behind_right_digests_is_refused_or_runs(whole_model: Forged, tmp_path: Path) -> None:
    def some(seed: int, watch: Watch) -> Counts:
        return batch(seed, watch, BATCH, whole_model, tmp_path)

    total = run_batches(some, [1], hang_s=SLOWEST_S)
    check(total)
    assert counted(total) == BATCH


def test_a_case_depends_on_no_case_before_it_but_for_its_random_numbers(whole_model: Forged) -> None:
    """Values of the list once went in as they are: the next mutation changed the list, and could put it into itself."""
    before = copy.deepcopy(NASTY)
    for seed in range(1, 11):
        rng = random.Random(seed)
        for _ in range(50):
            damaged(rng, whole_model)
    assert before == NASTY


@pytest.mark.fuzz
def test_200000_files_with_damage_behind_right_digests_are_refused_or_run(
    whole_model: Forged, tmp_path: Path
) -> None:
    """NSTF_FUZZ_SECONDS: for how long at most; NSTF_FUZZ_SEED: the first seed; NSTF_FUZZ_WORKERS: in how many processes."""
    first = int(os.environ.get("NSTF_FUZZ_SEED", "100"))
    until = time.monotonic() + float(os.environ.get("NSTF_FUZZ_SECONDS", "inf"))

    def some(seed: int, watch: Watch) -> Counts:
        return batch(seed, watch, BATCH, whole_model, tmp_path)

    workers = int(os.environ.get("NSTF_FUZZ_WORKERS", "1"))
    seeds = range(first, first + 200_000 // BATCH)
    total = run_batches(some, seeds, hang_s=SLOWEST_S, workers=workers, until=until)
    print(f"{counted(total)} files, {total.counts}, {total.wrong}")
    check(total)


def refused_flips(good_file: bytes, chosen: range, path: Path) -> int:
    """Every bit of the chosen bytes flipped, one at a time; how many of these files `verify` refused. path: where."""
    path.write_bytes(good_file)
    refused = 0
    with path.open("r+b", buffering=0) as file:
        for at in chosen:
            byte = good_file[at]
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), at)
                try:
                    verify(path)
                except NstfError:
                    refused += 1
            os.pwrite(file.fileno(), bytes([byte]), at)
    verify(path)
    return refused


def small_artifacts(folder: Path) -> dict[str, bytes]:
    """The golden files, a model with every kind of tree, a dense one of two layers: 1.1 million bits."""
    golden = Path(__file__).parents[1] / "golden"
    found = {name: (golden / f"{name}.nstf").read_bytes() for name in ("v1_trellis", "v1", "v1_shuffle")}
    write_artifact(folder / "dense.nstf", tensors(2), {"config.json": json.dumps(LLAMA).encode()})
    return found | {
        "whole model": sign(make_model(folder).copy()),
        "dense model": (folder / "dense.nstf").read_bytes(),
    }


def test_a_flipped_bit_of_an_artifact_is_refused(tmp_path: Path) -> None:
    for good_file in small_artifacts(tmp_path).values():
        chosen = range(5, len(good_file), len(good_file) // 50)
        assert refused_flips(good_file, chosen, tmp_path / "m.nstf") == 8 * len(chosen)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["v1_trellis", "v1", "v1_shuffle", "whole model", "dense model"])
def test_every_flipped_bit_of_an_artifact_is_refused(name: str, tmp_path: Path) -> None:
    """NSTF_FUZZ_STRIDE: every so many bytes only, from NSTF_FUZZ_OFFSET on."""
    stride, first = (int(os.environ.get(f"NSTF_FUZZ_{k}", v)) for k, v in (("STRIDE", "1"), ("OFFSET", "0")))
    good_file = small_artifacts(tmp_path)[name]
    chosen = range(first, len(good_file), stride)
    refused = refused_flips(good_file, chosen, tmp_path / "m.nstf")
    print(f"{name}: {refused} bits of {len(good_file)} bytes")
    assert refused == 8 * len(chosen)
