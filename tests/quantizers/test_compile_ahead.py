"""Kernels compiled by a process of their own (nstf.quantizers.rounding.compile_ahead)."""

import torch

from nstf.quantizers.rounding import compile_ahead


def test_all_of_what_it_launches_runs() -> None:
    for work in compile_ahead.rounding(torch.device("cpu")):
        work()
