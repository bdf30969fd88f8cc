"""The figures of `nstf bench --device cuda`, on a CPU where the step stands in the graph's place."""

from pathlib import Path
from types import ModuleType

import pytest

from nstf.errors import UnsupportedError, UsageError
from nstf.runtime.graph_bench import measure


def test_the_figures_are_those_of_the_run(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    found = measure(path, "cpu", 6, 4, 1, batch=2)
    assert found.prefill_rate > 0 and found.decode_rate > 0 and found.bandwidth > 1e8
    # Matrices of 4 bits and a scale for 32, the table as the head; keys and values of 8 positions, float32.
    matrices = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32) + 100 * 32
    padding = 2 * 32  # half a scale for each row of `down`: its last group has 16 columns
    assert found.bytes_per_token == matrices * 9 // 16 + padding + 2 * (2 * 8 * 2 * 2 * 8 * 4)
    assert found.share_of_bandwidth == found.bytes_per_token * found.decode_rate / 2 / found.bandwidth
    assert found.to_json()["batch"] == 2


def test_what_cannot_be_measured_is_said(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    with pytest.raises(UsageError, match="do not fit the model's context"):
        measure(path, "cpu", 1 << 20, 4)
    with pytest.raises(UsageError, match="takes 1 to 16"):
        measure(path, "cpu", 6, 4, batch=17)
    other = tiny.write(tmp_path, tiny.new_model("GPT2LMHeadModel"))
    with pytest.raises(UnsupportedError, match="architecture 'gpt2'"):
        measure(other, "cpu", 6, 4)
