"""The small files beside the weights that an artifact carries: tokenizer and generation settings."""

import json
import logging
from pathlib import Path
from typing import Any

from nstf.errors import CorruptError
from nstf.runtime.artifact.header import short
from nstf.runtime.artifact.side_names import CONTENT, PROCESSORS, SETTINGS, TOKENS
from nstf.runtime.tokenizer_files import MAX_SETTINGS_BYTES
from nstf_convert.checkpoint.config import no_token, strip_code
from nstf_convert.checkpoint.json_text import load_json
from nstf_convert.checkpoint.paths import allowed_root, is_listed, member, names_in, read_small

MAX_BYTES = 256 << 20
MOST_BYTES = 512 << 20  # of all together
log = logging.getLogger(__name__)

# Where transformers 5 keeps the templates of a tokenizer that has several, but for the default one.
TEMPLATES, DEFAULT_TEMPLATE = "additional_chat_templates", "chat_template.jinja"


def read_side_files(folder: Path) -> dict[str, bytes]:
    """Tokenizer and generation files of a folder by name; settings lose the keys that can lead to code.

    Raises CorruptError for a link that leaves the folder, an absurd size, settings that are not JSON, and generation
    settings of which `load` could make nothing.
    """
    files = {}
    for name in (*SETTINGS, *CONTENT):
        if not is_listed(folder, name):
            continue
        path = member(folder, name, str(folder))
        data = read_small(path, MAX_SETTINGS_BYTES if name in SETTINGS else MAX_BYTES)
        if name in SETTINGS:
            settings = without_code(name, load_json(data, str(path)))
            if name == "generation_config.json":
                settings = _generation(settings, path)
            data = _encoded(settings, path)
        files[name] = data
        # Links inside the folder may give one file many names.
        if sum(map(len, files.values())) > MOST_BYTES:
            raise CorruptError(
                f"{folder}: its tokenizer and settings have more than {MOST_BYTES} bytes together"
            )
    return _with_named_templates(folder, files)


def _with_named_templates(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """The files with all templates in the tokenizer's settings, as transformers 4 wrote several: an artifact has no folders.
    Not beside a processor, which reads the default one from its file: the others are left out, with a warning."""
    named = folder / TEMPLATES
    if not named.is_dir() or "tokenizer_config.json" not in files:
        return files
    if files.keys() & PROCESSORS:
        if left := sorted(name for name in names_in(named) if name.endswith(".jinja")):
            log.warning("beside a processor the default chat template alone is kept, not %s", short(left))
        return files
    found = {"default": files[DEFAULT_TEMPLATE]} if DEFAULT_TEMPLATE in files else {}
    for name in (name for name in names_in(named) if name.endswith(".jinja")):
        if not (named / name).resolve().is_relative_to(allowed_root(folder)):
            raise CorruptError(
                f"{named / name} is a link that leaves the checkpoint's folder; copy the file into it"
            )
        found[name.removesuffix(".jinja")] = read_small(named / name, MAX_SETTINGS_BYTES)
        if sum(map(len, found.values())) > MAX_SETTINGS_BYTES:
            raise CorruptError(f"{named}: its templates have more than {MAX_SETTINGS_BYTES} bytes together")
    if found.keys() <= {"default"}:
        return files
    try:
        # Ends of lines as transformers reads them from a file.
        templates = [
            {"name": name, "template": text.decode().replace("\r\n", "\n")} for name, text in found.items()
        ]
    except UnicodeDecodeError as error:
        raise CorruptError(
            f"{named} holds a template that is not UTF-8; download the checkpoint again"
        ) from error
    settings = json.loads(files["tokenizer_config.json"])
    if not isinstance(settings, dict):
        return files
    kept = {name: data for name, data in files.items() if name != DEFAULT_TEMPLATE}
    return {**kept, "tokenizer_config.json": _encoded({**settings, "chat_template": templates}, named)}


def without_code(name: str, settings: Any) -> Any:
    """Settings of a file without the keys that can lead to code. A table of tokens has none: every key is a token."""
    is_table = isinstance(settings, dict) and all(type(number) is int for number in settings.values())
    return settings if name == TOKENS and is_table else strip_code(settings)


def _encoded(settings: Any, path: Path) -> bytes:
    try:
        return json.dumps(settings, ensure_ascii=False, indent=2).encode() + b"\n"
    except UnicodeEncodeError as error:  # half of a pair of surrogates, escaped
        raise CorruptError(f"{path} holds text that is not Unicode; download the checkpoint again") from error


def _generation(settings: Any, path: Path) -> dict[str, Any]:
    """Generation settings that a loaded model can use: better refused here than after the conversion."""
    from transformers import GenerationConfig

    from nstf.runtime.artifact.generation import check_generation

    if not isinstance(settings, dict):
        raise CorruptError(f"{path} is not a JSON object; download the checkpoint again")
    cleaned = {key: no_token(key, value) for key, value in settings.items()}
    stated = check_generation(cleaned, path.parent)
    try:
        GenerationConfig.from_dict(stated)
    except MemoryError:  # not the file's fault
        raise
    except Exception as error:  # a value that transformers has none of
        reason = " ".join(str(error).split())[:200]
        raise CorruptError(
            f"{path} cannot be used ({reason}): correct that setting, or take it out"
        ) from error
    return cleaned
