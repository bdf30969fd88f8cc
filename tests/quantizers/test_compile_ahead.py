"""Kernels compiled by a process of their own (nstf.quantizers.rounding.compile_ahead)."""

import sys

import pytest
import torch

from nstf.quantizers.rounding import compile_ahead


def test_the_process_runs_every_kernel_once(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")  # nothing is taken from where the user is
    process = compile_ahead.started(torch.device("cpu"), 1)
    assert process is not None and process.wait(120) == 0


def test_no_process_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert compile_ahead.started(torch.device("cpu"), 1) is None
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert compile_ahead.started(torch.device("cpu"), 1) is None


def test_all_of_what_it_launches_runs() -> None:
    for work in compile_ahead.rounding(torch.device("cpu")):
        work()
