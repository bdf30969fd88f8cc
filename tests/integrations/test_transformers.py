"""The path of an .nstf file given to transformers itself."""

from pathlib import Path
from types import ModuleType

import pytest
import transformers

import nstf.integrations.transformers
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
