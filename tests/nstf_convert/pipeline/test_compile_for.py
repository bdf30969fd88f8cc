"""Searches are compiled once a mix is known, those that it needs (nstf_convert.pipeline.session.Session.compile_for)."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from nstf_convert.pipeline import session
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.recipe import Recipe, trellis_rates

MIX = {
    "a": Recipe("trellis", {"quarter_bits": 12}),
    "b": Recipe("trellis", {"sections": [[16, 64], [8, 64]]}),
    "c": Recipe(
        "add",
        {},
        {
            "base": Recipe("trellis", {"quarter_bits": 6}),
            "correction": Recipe("svd", {"rank": 8}, {"factor": Recipe("int_grid", {"bits": 4})}),
        },
    ),
    "d": Recipe("int_grid", {"bits": 4}),
    "e": Recipe("shuffle", {"quarter_bits": 13}),
}


def test_rates_of_recipes() -> None:
    assert [trellis_rates(MIX[n]) for n in "abcde"] == [{12}, {8, 16}, {6}, set(), set()]


def test_only_what_a_mix_needs_is_compiled_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(session, "warm_up", lambda device, book, rates, workers: asked.append(rates))
    ahead = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    machine = SimpleNamespace(on_gpu=True, compilers=2)
    fake = SimpleNamespace(
        machine=machine, device=torch.device("cpu"), stages=Stages(), _compiler=ahead, _compiled=set()
    )
    session.Session.compile_for(fake, {"a": MIX["a"], "d": MIX["d"]})  # type: ignore[arg-type]
    assert ahead.returncode is not None and fake._compiler is None
    session.Session.compile_for(fake, MIX)  # type: ignore[arg-type]
    session.Session.compile_for(fake, MIX)  # type: ignore[arg-type]
    assert asked == [[12], [6, 8, 16]]
    machine.on_gpu = False
    session.Session.compile_for(fake, {"x": Recipe("trellis", {"quarter_bits": 20})})  # type: ignore[arg-type]
    assert len(asked) == 2


def test_equal_recipes_have_equal_keys_and_hashes() -> None:
    a, b = (
        Recipe("int_grid", {"bits": 4, "group": 32}),
        Recipe("int_grid", {"group": 32, "bits": 4}, least=1.0),
    )
    assert a == b and hash(a) == hash(b) and a.key == b.key
    assert len({*MIX.values(), Recipe("trellis", {"quarter_bits": 12})}) == len(MIX)
