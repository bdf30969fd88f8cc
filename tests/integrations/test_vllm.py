"""Exported folders run by vLLM on the CPU, in an environment of its own: make vllm."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from export_models import TEXTS, mixture, sample

import nstf.runtime
from nstf_convert.cli import run

PYTHON = os.environ.get("NSTF_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="vLLM needs an environment of its own: make vllm"),
]
NEW = 12
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, texts, new, options = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    llm = LLM(folder, max_model_len=128, gpu_memory_utilization=0.1, **options)
    found = llm.generate(texts, SamplingParams(temperature=0, max_tokens=new))
    print("TOKENS", json.dumps([list(f.prompt_token_ids) + list(f.outputs[0].token_ids) for f in found]))
"""


def vllm_tokens(folder: Path, program: Path, **options: Any) -> Any:
    """Prompt and greedy tokens of TEXTS. options: of vLLM's LLM."""
    program.write_text(PROGRAM)  # a file: vLLM starts processes that read it again
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if options.get("tensor_parallel_size") == 2:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    made = subprocess.run([str(PYTHON), str(program), str(folder), json.dumps(TEXTS), str(NEW), json.dumps(options)],
                          env=env, capture_output=True, text=True, timeout=1200)  # fmt: skip
    lines = [line for line in made.stdout.splitlines() if line.startswith("TOKENS ")]
    if made.returncode or not lines:
        sys.stderr.write(made.stdout[-3000:] + made.stderr[-3000:])
        pytest.fail(f"vLLM ended with {made.returncode}")
    return json.loads(lines[0].removeprefix("TOKENS "))


@pytest.mark.parametrize(
    "form",
    [(4, 128, True), (4, 32, True), (4, 32, False)],
    ids=["groups of 128", "groups of 32", "zero points"],
)
def test_vllm_writes_the_same_greedy_tokens(tmp_path: Path, form: tuple[int, int, bool]) -> None:
    bits, group, symmetric = form
    layer = {"kind": "int_grid", "bits": bits, "group": group, "symmetric": symmetric, "scale_bits": 16}
    artifact, folder = sample(tmp_path / "m.nstf", {"kind": "dense"}, layer), tmp_path / "folder"
    # The table is bfloat16 in the sample: float16 loses its smallest values.
    words = ["export", str(artifact), "--to", "compressed-tensors", "-o", str(folder), "--allow-loss"]
    assert run(words) == 0
    found = vllm_tokens(folder, tmp_path / "program.py", dtype="float16", enforce_eager=True)
    assert found == our_tokens(artifact)


def our_tokens(artifact: Path) -> list[list[int]]:
    model: Any = nstf.runtime.load(artifact, engine="off")
    tokenizer: Any = nstf.runtime.load_tokenizer(artifact)
    found = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        found.append(model.generate(ids, max_new_tokens=NEW, do_sample=False)[0].tolist())
    return found


WAYS = pytest.mark.parametrize(
    ("eager", "ranks"), [(True, 1), (False, 1), (True, 2)], ids=["eager", "compiled", "two ranks"]
)


@WAYS
def test_vllm_runs_experts_from_encoded_stacks(tmp_path: Path, eager: bool, ranks: int) -> None:
    artifact, folder = mixture(tmp_path / "m.nstf"), tmp_path / "folder"
    assert run(["export", str(artifact), "--to", "transformers", "-o", str(folder)]) == 0
    names = json.loads((folder / "config.json").read_text())["quantization_config"]["tensors"]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    options = {
        "dtype": "float32",
        "load_format": "nstf",
        "enforce_eager": eager,
        "tensor_parallel_size": ranks,
    }
    assert vllm_tokens(folder, tmp_path / "program.py", **options) == our_tokens(artifact)


@WAYS
def test_vllm_runs_the_encoded_folder(tmp_path: Path, eager: bool, ranks: int) -> None:
    layers = (
        {"kind": "int_grid", "bits": 4, "group": 32, "symmetric": False, "scale_bits": 16},
        {"kind": "grid16", "group": 64},
        {"kind": "trellis", "quarter_bits": 14, "block": 32},
        {"kind": "int_grid", "bits": 3, "group": 128, "symmetric": True, "scale_bits": 8},
    )
    table = {"kind": "int_grid", "bits": 8, "group": 0, "symmetric": True, "scale_bits": 16}
    artifact, folder = sample(tmp_path / "m.nstf", table, *layers), tmp_path / "folder"
    assert run(["export", str(artifact), "--to", "transformers", "-o", str(folder)]) == 0
    options = {
        "dtype": "float32",
        "load_format": "nstf",
        "enforce_eager": eager,
        "tensor_parallel_size": ranks,
    }
    assert vllm_tokens(folder, tmp_path / "program.py", **options) == our_tokens(artifact)
