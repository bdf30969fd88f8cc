"""transformers itself with a loaded model, and with the path of an .nstf file."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

import nstf.integrations.transformers
import nstf.runtime
from nstf.errors import UsageError


@pytest.mark.parametrize(
    ("name", "loader"),
    [
        ("AutoModelForCausalLM", "load"),
        ("AutoModel", "load"),
        ("LlamaForCausalLM", "load"),
        ("AutoConfig", "load"),
        ("AutoTokenizer", "load_tokenizer"),
        ("AutoProcessor", "load_tokenizer"),
    ],
)
def test_an_artifact_is_refused_at_once_with_the_call_that_loads_it(
    tiny: ModuleType, tmp_path: Path, name: str, loader: str
) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    for given in (path, str(path)):
        with pytest.raises(
            UsageError, match=rf"nstf\.runtime\.{loader}\('{path}'\).*nstf export {path} -o"
        ) as error:
            getattr(transformers, name).from_pretrained(given)
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="there is no such file"):
        getattr(transformers, name).from_pretrained(tmp_path / "none.nstf")


def test_classes_that_were_imported_before_refuse_it_too(tmp_path: Path) -> None:
    (tmp_path / "a.nstf").write_bytes(b"x")
    program = """
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
import nstf.integrations.transformers
from nstf.errors import UsageError
for kind in (AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM):
    try:
        kind.from_pretrained("a.nstf")
    except UsageError as error:
        print("nstf.runtime.load" in str(error))
"""
    # Without the guard transformers says, offline, that there is no such repository.
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * 3, done.stderr


def test_a_repository_of_that_name_is_left_to_transformers() -> None:
    nstf.integrations.transformers.refuse_artifact("someone/model.nstf", "load")
    nstf.integrations.transformers.refuse_artifact("someone/model", "load")
    nstf.integrations.transformers.refuse_artifact(None, "load")
    with pytest.raises(UsageError, match="no such file"):
        nstf.integrations.transformers.refuse_artifact("model.nstf", "load")


def test_folders_load_as_before(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.new_model("LlamaForCausalLM").save_pretrained(tmp_path / "folder.nstf")
    for folder in (str(tmp_path / "folder.nstf"), tmp_path / "folder.nstf"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert type(model).__name__ == "LlamaForCausalLM"
    found = transformers.LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path=folder)
    assert type(found).__name__ == "LlamaForCausalLM"
    # A folder without a tokenizer: transformers' own error, not ours.
    with pytest.raises((OSError, ValueError)):
        transformers.AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("engine", ["auto", "off"])
def test_a_pipeline_and_a_streamer_take_a_loaded_model(tiny: ModuleType, tmp_path: Path, engine: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")), engine=engine)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(torch.tensor([[5, 6, 7]]), pad_token_id=0, **options)[0, 3:]
    text = tokenizer.decode(expected, skip_special_tokens=True).split()
    pipe: Any = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (said,) = pipe("w5 w6 w7", return_full_text=False, **options)
    assert said["generated_text"].split() == text != []
    streamer: Any = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    given = {"input_ids": torch.tensor([[5, 6, 7]]), "streamer": streamer, "pad_token_id": 0, **options}
    thread = threading.Thread(target=model.generate, kwargs=given)
    thread.start()
    assert "".join(streamer).split() == text
    thread.join(60)
