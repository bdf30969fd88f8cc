"""Sums over GPUs that write into each other's memory: interpreted in one process, and what is compiled for a card."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from nstf.kernels.triton.aot import compile_spec
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.ending import Ending
from nstf.kernels.triton.peer_rows import met_norm_spec
from nstf.kernels.triton.peers import peer_sum_spec
from nstf.kernels.triton.sums import ending_spec


def test_interpreted_sums_are_right_and_the_same_on_all_ranks() -> None:
    program = Path(__file__).parent / "peer_cases.py"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert len(found) == 10 and [name for name, right in found.items() if not right] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_wait_is_a_loop_over_one_word_and_ends(ranks: int) -> None:
    """Words go out before the first is waited for; a poll reads memory anew each time, and gives up in the end."""
    for spec in (
        peer_sum_spec(8192, torch.float32, 0, ranks, "sm_90"),
        ending_spec(1, 8192, 14336, 14, torch.bfloat16, Ending(adds=True, rank=1, ranks=ranks), "sm_90"),
    ):
        code = compile_spec(spec, ARCHITECTURES["sm_90"]).stages["ptx"]
        text = code if isinstance(code, str) else code.decode()
        others = ranks - 1
        assert text.count("st.volatile.global.b64") == text.count("ld.volatile.global.b64") == others
        assert text.index("ld.volatile.global.b64") > text.rindex("st.volatile.global.b64")
        assert text.count("@late trap;") == others


def test_rows_say_that_they_arrived_before_they_wait() -> None:
    """And read the other's rows after that, past the first-level cache; the wait ends."""
    spec = met_norm_spec(512, 8192, torch.bfloat16, False, "sm_90")
    code = compile_spec(spec, ARCHITECTURES["sm_90"]).stages["ptx"]
    text = code if isinstance(code, str) else code.decode()
    said, heard = text.index("st.release.sys.global.u32"), text.index("ld.acquire.sys.global.u32")
    assert text.index("griddepcontrol.wait") < said < heard < text.index("ld.global.cg")
    assert text.count("@late trap;") == 1
