"""Coverage-guided fuzzing of the readers, by atheris: `make fuzz` installs it. The seeds go through them in `make test`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import guided

# Some of libFuzzer's words for what went wrong.
CRASHES = ("ALARM", "ERROR:", "Uncaught Python exception", "Traceback")


@pytest.mark.parametrize("target", guided.TARGETS)
def test_the_seeds_are_read_or_refused(target: str) -> None:
    if target == "gguf":
        pytest.importorskip("gguf")
    run, seeds = guided.TARGETS[target]
    for seed in seeds():
        run(seed)
        for size in range(0, len(seed), 1 + len(seed) // 20):
            run(seed[:size])


@pytest.mark.fuzz
@pytest.mark.parametrize("target", guided.TARGETS)
def test_what_coverage_leads_to_is_read_or_refused(target: str, tmp_path: Path) -> None:
    """NSTF_GUIDED_SECONDS: for how long each (3,600; B.4 asks for an hour)."""
    pytest.importorskip("atheris")
    seconds = int(os.environ.get("NSTF_GUIDED_SECONDS", "3600"))
    (tmp_path / "corpus").mkdir()
    run = subprocess.run(
        [
            sys.executable,
            guided.__file__,
            target,
            f"-max_total_time={seconds}",
            "-print_final_stats=1",
            f"{tmp_path}/corpus",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    said = run.stdout + run.stderr
    assert run.returncode == 0 and not any(word in said for word in CRASHES), said[-3000:]
    covered = [int(found) for found in re.findall(r"cov: (\d+)", said)]
    executed = re.findall(r"number_of_executed_units: (\d+)", said)
    print(f"{target}: {executed[-1]} runs, {covered[0]} edges by the seeds, {covered[-1]} at the end")
    assert covered[-1] > 0
