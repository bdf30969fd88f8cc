"""`--tensor-parallel`: processes for the ranks, one voice, and one line when one fails."""

import os
import subprocess
import sys

import pytest

from nstf.errors import NstfError, UsageError
from nstf_convert.cli import options
from nstf_convert.cli.ranks import as_ranks


def test_only_the_first_rank_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    as_ranks(2, print, "said once")
    assert capfd.readouterr().out == "said once\n"


def test_the_error_of_a_rank_is_raised_and_the_others_end() -> None:
    with pytest.raises(UsageError, match="--stop is empty"):
        as_ranks(2, options.check_stops, [""])


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(NstfError, match=r"rank [01] ended without a word"):
        as_ranks(2, os._exit, 3)


def test_started_by_torchrun_a_process_is_a_rank_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    as_ranks(2, print, "here")
    assert capsys.readouterr().out == "here\n"


@pytest.mark.parametrize(("words", "message"), [
    (("--exact",), "do not go with --tensor-parallel"),
    (("--device", "cuda:1"), "with --tensor-parallel give cpu, or cuda for a GPU each"),
    (("--device", "cuda"), "there are 0 GPUs"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(nstf, tiny, words, message, monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = nstf("generate", tiny.same, "the", "--tensor-parallel", 2, *words)
    assert result.code == 2 and message in result.err


@pytest.mark.slow
def test_two_ranks_generate_what_one_process_does(nstf, tiny) -> None:
    words = ("generate", tiny.same, "the cat", "--max-new-tokens", 5)
    command = [sys.executable, "-m", "nstf_convert", *map(str, words), "--tensor-parallel", "2"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout == nstf(*words, "--exact").out
