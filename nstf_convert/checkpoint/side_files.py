"""The small files beside the weights that an artifact carries: tokenizer and generation settings."""

import json
from pathlib import Path

from nstf_convert.checkpoint.config import strip_code
from nstf_convert.checkpoint.json_text import load_json
from nstf_convert.checkpoint.paths import member, read_small

MAX_BYTES = 256 << 20
SETTINGS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
)
CONTENT = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
)


def read_side_files(folder: Path) -> dict[str, bytes]:
    """Tokenizer and generation files of a folder by name; settings lose the keys that can lead to code.

    Raises CorruptError for a link that leaves the folder, an absurd size, or settings that are not JSON.
    """
    files = {}
    for name in (*SETTINGS, *CONTENT):
        if not (folder / name).exists():
            continue
        path = member(folder, name, str(folder))
        data = read_small(path, MAX_BYTES)
        if name in SETTINGS:
            data = (
                json.dumps(strip_code(load_json(data, str(path))), ensure_ascii=False, indent=2).encode()
                + b"\n"
            )
        files[name] = data
    return files
