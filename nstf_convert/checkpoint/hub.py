"""Models by name on the Hugging Face hub, where the network allows."""

import re
from pathlib import Path

from nstf.errors import NstfError, UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.\-]{0,95}")
PATTERNS = [
    "*.safetensors", "*.json", "tokenizer*", "*.tokenizer", "*.model", "*.spm", "bpe.codes", "merges.txt", "vocab.txt",
    "dict.txt", "*.jinja",
]  # fmt: skip
DATA_PATTERNS = ["*.txt", "*.md", "*.jsonl", "*.parquet"]


def is_hub_name(text: str) -> bool:
    """Whether `text` has the form `org/model`."""
    return NAME.fullmatch(text) is not None and ".." not in text


def download(name: str) -> Path:
    """The local folder of a hub model, downloaded if needed; safetensors only.

    Raises NstfError or UsageError.
    """
    return _snapshot(name, "model", PATTERNS)


def download_dataset(name: str) -> Path:
    """The local folder of a hub dataset's text files. Raises NstfError or UsageError."""
    return _snapshot(name, "dataset", DATA_PATTERNS)


def _snapshot(name: str, kind: str, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
    except ImportError as error:
        raise NstfError(
            f"{name!r} is no local path, and huggingface_hub is not installed to look it up"
        ) from error
    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=patterns))
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{name!r} is neither a local path nor a {kind} on the hub (or it needs a login)"
        ) from error
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())[:120]
        raise UsageError(
            f"{name!r} is no local path, and the hub cannot be reached ({type(error).__name__}: {text}); "
            f"download the {kind} elsewhere and give its folder"
        ) from error
