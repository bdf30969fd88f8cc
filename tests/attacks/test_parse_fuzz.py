"""The parser of artifacts under many cases: our errors only, no signal, no hang, no growth.

python tests/attacks/test_parse_fuzz.py CASES [WORKERS]        from the shell; prints the counts as they come
"""

import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from forked import Counts, Total, Watch, peak_bytes, run_batches
from parse_cases import Cases, golden_bases, outcome, seal, whole

BATCH, HANG_S, MEMORY_BYTES = 100_000, 2.0, 64 << 20
ALL = 20_000_000


def batch(seed: int, watch: Watch, count: int = BATCH) -> Counts:
    """`count` cases of a seed."""
    gc.freeze()
    cases, seen, before = Cases(seed, golden_bases()), dict[str, int](), 0
    for number in range(count):
        watch.begin(number)
        text, size = cases.next()
        result = outcome(text, size)
        seen[result] = seen.get(result, 0) + 1
        if number % 2000 == 0:
            cases.renew()
        if number == count // 50:
            before = peak_bytes()
    return {**seen, "peak_grown_bytes": peak_bytes() - before}


def cases_of(total: Total) -> int:
    return sum(count for key, count in total.counts.items() if not key.startswith("peak_"))


def check(total: Total) -> None:
    assert total.wrong == []
    assert total.counts["peak_grown_bytes"] < MEMORY_BYTES
    seen = {key for key in total.counts if not key.startswith("peak_")}
    assert seen == {"loads", "CorruptError", "UnsupportedError"}


def test_good_bases_load_and_a_wrong_digest_does_not() -> None:
    for one in golden_bases():
        text = whole(one.manifest, one.arrays)
        size = 8 + len(text) + one.size
        assert (outcome(seal(text), size), outcome(text, size)) == ("loads", "CorruptError")
        assert outcome(seal(text), size + 1) == "CorruptError"


def test_10000_cases_load_or_are_refused() -> None:
    total = run_batches(lambda seed, watch: batch(seed, watch, 10_000), [1], hang_s=HANG_S)
    check(total)
    assert cases_of(total) == 10_000 and total.counts["loads"] > 500


def test_signals_hangs_and_errors_of_a_case_are_noticed() -> None:
    def bad(seed: int, watch: Watch) -> Counts:
        watch.begin(3)
        if seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == 2:
            sum(1 for _ in iter(int, 1))
        raise RuntimeError("foreign")

    total = run_batches(bad, [1, 2, 3], hang_s=0.1, workers=2)
    assert sorted(total.wrong) == [
        "case 3 of seed 1: ended by signal 9",
        "case 3 of seed 2: used too much time",
        "case 3 of seed 3: RuntimeError: foreign",
    ]


@pytest.mark.fuzz
def test_20000000_cases_load_or_are_refused() -> None:
    """NSTF_FUZZ_CASES: how many instead; NSTF_FUZZ_WORKERS: in how many processes."""
    count = int(os.environ.get("NSTF_FUZZ_CASES", str(ALL)))
    total = run_batches(
        batch,
        range(1000, 1000 + -(-count // BATCH)),
        hang_s=HANG_S,
        workers=int(os.environ.get("NSTF_FUZZ_WORKERS", "1")),
    )
    print(total.counts)
    check(total)


def _tell(total: Total) -> None:
    print(
        f"{time.strftime('%H:%M:%S')} {cases_of(total):,} cases {total.counts} wrong {total.wrong}",
        flush=True,
    )


if __name__ == "__main__":
    cases, workers = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    found = run_batches(
        batch, range(1000, 1000 + cases // BATCH), hang_s=HANG_S, workers=workers, report=_tell
    )
    check(found)
