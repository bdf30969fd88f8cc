"""Exported folders run by vLLM on the CPU, in an environment of its own: make vllm."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from export_models import SAMPLE, TEXTS, mixture, sample

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
    env = environment(options.get("tensor_parallel_size", 1))
    made = subprocess.run([str(PYTHON), str(program), str(folder), json.dumps(TEXTS), str(NEW), json.dumps(options)],
                          env=env, capture_output=True, text=True, timeout=1200)  # fmt: skip
    lines = [line for line in made.stdout.splitlines() if line.startswith("TOKENS ")]
    if made.returncode or not lines:
        sys.stderr.write(made.stdout[-3000:] + made.stderr[-3000:])
        pytest.fail(f"vLLM ended with {made.returncode}")
    return json.loads(lines[0].removeprefix("TOKENS "))


def environment(ranks: int) -> dict[str, str]:
    """What a CPU's vLLM is told besides its arguments: little cache, no network, a processor for each rank."""
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return env | ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {})


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


CLIENT = """
import json, sys, time
from openai import APIConnectionError, OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
texts, new = json.loads(sys.argv[2]), int(sys.argv[3])
until = time.monotonic() + 1000
while True:
    try:
        (model,) = client.models.list().data
        break
    except APIConnectionError:
        if time.monotonic() > until:
            raise
        time.sleep(1)
more = {"return_token_ids": True}
made = [client.completions.create(model=model.id, prompt=t, max_tokens=new, temperature=0, extra_body=more) for t in texts]
print("TOKENS", json.dumps([m.choices[0].prompt_token_ids + m.choices[0].token_ids for m in made]))
"""


def test_vllm_serves_a_converted_file_as_the_guide_says(tmp_path: Path) -> None:
    artifact = tmp_path / "model.nstf"
    words = [
        "convert",
        str(SAMPLE),
        "--budget",
        "0.5",
        "-o",
        str(artifact),
        "--effort",
        "fast",
        "--samples",
        "4",
    ]
    assert run([*words, "--quiet"]) == 0
    assert (
        run(["export", str(artifact), "--to", "transformers", "-o", str(tmp_path / "encoded"), "--quiet"])
        == 0
    )
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text("utf-8")
    (line,) = re.findall(r"^(vllm serve [^#\n]*)", guide, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    program = [str(Path(str(PYTHON)).parent / "vllm"), *shlex.split(line)[1:], "--port", str(port)]
    # vllm-cpu's command asks for the version of a package `vllm`, which it is not itself (0.32.0).
    known = tmp_path / "names" / "vllm-0.32.0+cpu.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    env = environment(2)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(known.parent)]))
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(program, cwd=tmp_path, env=env, stdout=log, stderr=log)
        try:
            client = [str(PYTHON), "-c", CLIENT, f"http://127.0.0.1:{port}/v1", json.dumps(TEXTS), str(NEW)]
            asked = subprocess.Popen(client, stdout=subprocess.PIPE, text=True)
            while asked.poll() is None and server.poll() is None:
                time.sleep(0.2)
            if server.poll() is not None:
                asked.kill()
            answer = asked.communicate()[0]
        finally:
            server.terminate()
            server.wait(60)
    if not answer.startswith("TOKENS "):
        sys.stderr.write((tmp_path / "log").read_text()[-5000:])
        pytest.fail("vllm serve gave no answer")
    assert json.loads(answer.removeprefix("TOKENS ")) == our_tokens(artifact)
