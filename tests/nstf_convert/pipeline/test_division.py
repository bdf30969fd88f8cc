"""`--tp`: the plan takes only what every rank can hold a part of, and says what that costs."""

import json
from pathlib import Path

import pytest

from nstf.runtime.artifact import open_artifact
from nstf.runtime.tensor_parallel import tensor_parts
from nstf_convert.cli import run

SAMPLE = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"


def test_a_file_for_ranks_can_be_divided(tmp_path: Path) -> None:
    words = ["convert", str(SAMPLE), "--budget", "0.3", "--effort", "fast", "--samples", "4", "--seq-len", "128",
             "--dataset", str(SAMPLE.parents[1] / "data" / "prose.txt"), "--target", "avx512"]  # fmt: skip
    report = tmp_path / "report.json"
    divided = [*words, "--tp", "2,4", "-o", str(tmp_path / "tp.nstf"), "--report", str(report)]
    assert run(divided) == 0
    with open_artifact(tmp_path / "tp.nstf") as artifact:
        for ranks in (2, 4):
            assert [n for n, found in tensor_parts(artifact, ranks).items() if found.problem] == []
    cost = json.loads(report.read_text())["tensor_parallel"]
    assert cost["ranks"] == [2, 4]
    # Quick plans leave some bytes unspent: less is lost without the condition, but for that.
    assert cost["expected_loss"] >= 0.98 * cost["expected_loss_free"] > 0


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ("3", "1000 rows, padded to 1024 in steps of 64, cannot be divided by 3 ranks"),
        ("two", "numbers of ranks"),
        ("1", "numbers of ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_work(
    ranks: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "convert",
        str(SAMPLE),
        "--budget",
        "0.5",
        "--effort",
        "fast",
        "--samples",
        "2",
        "--seq-len",
        "64",
        "--tp",
        ranks,
    ]
    assert run([*words, "-o", str(tmp_path / "m.nstf")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "m.nstf").exists()
