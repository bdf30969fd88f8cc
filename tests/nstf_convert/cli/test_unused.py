"""Commands on a language model do without the libraries that transformers would import for images."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from nstf.runtime.imports import NOT_FOR_TEXT, distributions_ahead
from nstf_convert import cli
from nstf_convert.cli import unused

OPEN = """
import sys
from nstf_convert import cli
from nstf_convert.cli.unused import leave_out_unused
cli.OWN_PROCESS = True
if sys.argv[1]:
    leave_out_unused(sys.argv[1])
from nstf.runtime.skeleton import build_skeleton
config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
build_skeleton(config)
"""


def written(folder, config) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# False: that they would be imported.
@pytest.mark.parametrize("leaves_out", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_language_model_is_opened_without_them(leaves_out, tmp_path) -> None:
    model = written(tmp_path / "model", {"architectures": ["LlamaForCausalLM"]})
    for name in NOT_FOR_TEXT:  # each says that it is imported, and that it is not to be had after all
        (tmp_path / "libraries" / name).mkdir(parents=True)
        said = f"print('imported', {name!r})\nraise ImportError"
        (tmp_path / "libraries" / name / "__init__.py").write_text(said)
    paths = os.pathsep.join([str(tmp_path / "libraries"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", OPEN, model if leaves_out else ""]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert (ran.returncode == 0) or not leaves_out, ran.stderr
    assert ("imported" in ran.stdout) is not leaves_out


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, True),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, False),
        ({"architectures": ["OddForCausalLM"], "vision_config": {}}, False),
        ({"architectures": ["TimmWrapperForImageClassification"]}, False),
        ({"architectures": []}, False),
        ({"architectures": [["LlamaForCausalLM"]]}, False),
        ([], False),
    ],
)
def test_only_where_the_config_names_a_language_model(config, left_out, tmp_path, monkeypatch) -> None:
    found = []
    monkeypatch.setattr(unused, "leave_out", found.extend)
    monkeypatch.setattr(unused, "distributions_ahead", lambda: None)
    monkeypatch.setattr(cli, "OWN_PROCESS", True)
    unused.leave_out_unused(written(tmp_path / "model", config))
    assert bool(found) is left_out


def test_a_folder_without_a_config_is_left_to_those_who_open_it(tmp_path, monkeypatch) -> None:
    found = []
    monkeypatch.setattr(unused, "leave_out", found.extend)
    monkeypatch.setattr(unused, "distributions_ahead", lambda: None)
    monkeypatch.setattr(cli, "OWN_PROCESS", True)
    unused.leave_out_unused(str(tmp_path))
    unused.leave_out_unused(str(tmp_path / "none.gguf"))
    (tmp_path / "config.json").write_bytes(b"\xff" + b"[" * 100000)
    unused.leave_out_unused(str(tmp_path))
    assert not found


def test_a_command_in_another_process_leaves_them_to_it(nstf, tmp_path) -> None:
    model = written(tmp_path / "model", {"architectures": ["LlamaForCausalLM"]})
    assert nstf("plan", model, "--budget", "0.5").code != 0
    assert not [name for name in NOT_FOR_TEXT if sys.modules.get(name, sys) is None]


def test_the_distributions_that_a_thread_looks_for_are_those_that_there_are(monkeypatch) -> None:
    find = importlib.metadata.packages_distributions
    wanted, calls = find(), []
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: calls.append(1) or find())
    distributions_ahead()
    assert importlib.metadata.packages_distributions() == wanted
    assert importlib.metadata.packages_distributions() == wanted
    assert calls == [1]
