"""What a command does before it imports large libraries: some it leaves out, which the model that it opens does not need."""

import json
from pathlib import Path

from nstf.runtime.imports import NOT_FOR_TEXT, distributions_ahead, leave_out
from nstf_convert import cli, processes
from nstf_convert.options import ConvertOptions

# Configs are kilobytes; what is larger is read, and refused, by those who open the model.
MOST_BYTES = 1 << 20
OTHER_INPUTS = ("vision", "image", "video", "audio")


def before_imports(model: str, chosen: ConvertOptions) -> None:
    """For a command that makes a plan: other processes that it may want import beside this one."""
    leave_out_unused(model)
    if cli.OWN_PROCESS:
        processes.begin(model, chosen.device, chosen.threads, chosen.memory is not None)


def leave_out_unused(model: str) -> None:
    """transformers does not find what it imports for images where the model is a language model. Not where the
    command is a call in another's process."""
    if cli.OWN_PROCESS and _reads_text_alone(Path(model)):
        leave_out(NOT_FOR_TEXT)
    if cli.OWN_PROCESS:
        distributions_ahead()


def _reads_text_alone(model: Path) -> bool:
    if model.suffix == ".gguf":
        return model.is_file()
    try:
        if not (model / "config.json").is_file():  # opening a pipe would wait for ever
            return False
        with (model / "config.json").open("rb") as file:
            config = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(config, dict) or not isinstance(names := config.get("architectures"), list):
        return False
    causal = names and all(isinstance(n, str) and n.endswith("ForCausalLM") for n in names)
    return bool(causal) and not any(word in key for key in config for word in OTHER_INPUTS)
