"""The tokenizer of a GGUF file as tokenizer.json and friends, through transformers' own converters."""

import json
import logging
import tempfile
from array import array
from pathlib import Path
from typing import Any

from nstf.errors import UnsupportedError
from nstf.runtime.artifact.side_names import CONTENT, SETTINGS
from nstf.runtime.offline import without_hub
from nstf.runtime.tokenizer_words import MOST_BYTES_KNOWN, MOST_LETTERS_MERGED, bytes_of
from nstf.runtime.tokenizing import foreign_errors
from nstf_convert.checkpoint.gguf_check import GgufHeader
from nstf_convert.checkpoint.gguf_reader import header_for_transformers
from nstf_convert.checkpoint.side_files import without_code

log = logging.getLogger(__name__)

# Of a token: merges are made of all places where one can be divided, in time that grows with the square.
MOST_LETTERS = 4096
# Of all arrays of numbers, and four for each token besides: transformers makes lists of them.
MOST_NUMBERS = 1 << 20
# Rules of splitting that come with a first token in llama.cpp (llama-vocab.cpp).
BEGINNING = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken")
# Rules that take each digit by itself and split as GPT-2 does, and rules of GPT-2 alone. transformers splits as GPT-2 does
# by every rule that it does not know.
DIGITS = ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b")
AS_GPT2 = (
    "gpt-2",
    "phi-2",
    "mpt",
    "olmo",
    "jais",
    "trillion",
    "gigachat",
    "mellum",
    "modern-bert",
    "jina-es",
    "jina-de",
    "jina-v1-en",
    "jina-v2-es",
    "jina-v2-de",
    "jina-v2-code",
    "a.x-4.0",
    "roberta-bpe",
)


def tokenizer_files(path: Path, header: GgufHeader) -> dict[str, bytes]:
    """The tokenizer's files by name; empty when the GGUF carries no tokenizer.

    path: the file of that header, which has passed `gguf_check` (transformers' reader trusts the counts in the file).
    Raises UnsupportedError for a tokenizer that transformers cannot rebuild.
    """
    if "tokenizer.ggml.tokens" not in header.metadata:
        return {}
    tokens = header.metadata["tokenizer.ggml.tokens"]
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UnsupportedError(
            f"{path}: its tokenizer.ggml.tokens is no list of texts, so it has no tokenizer"
        )
    for key in ("scores", "token_type"):
        beside = header.metadata.get(f"tokenizer.ggml.{key}", tokens)
        if not isinstance(beside, list | array) or len(beside) != len(tokens):
            raise UnsupportedError(
                f"{path}: its tokenizer.ggml.{key} is no list of one for each of {len(tokens)} tokens: its tokenizer is "
                "damaged"
            )
    if any(len(token) > MOST_LETTERS for token in tokens):
        raise UnsupportedError(
            f"{path} has a token of more than {MOST_LETTERS} letters: its tokenizer is damaged"
        )
    merges = header.metadata.get("tokenizer.ggml.merges", ())
    if isinstance(merges, list) and any(isinstance(m, str) and len(m) > 2 * MOST_LETTERS + 1 for m in merges):
        raise UnsupportedError(
            f"{path} has a merge of more letters than two tokens: its tokenizer is damaged"
        )
    merged, scored = (f"tokenizer.ggml.{key}" in header.metadata for key in ("merges", "scores"))
    # Merges are looked up; without them trees are made of the bytes.
    if (together := sum(map(len if merged else bytes_of, tokens))) > MOST_BYTES_KNOWN:
        raise UnsupportedError(
            f"{path} has tokens of {together} letters or bytes, more than {MOST_BYTES_KNOWN}: its tokenizer is damaged"
        )
    if not merged and not scored and header.metadata.get("tokenizer.ggml.model") in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{path}: its tokenizer has neither merges nor scores, which say how words are divided"
        )
    if not merged and (letters := sum(len(token) ** 2 for token in tokens)) > MOST_LETTERS_MERGED:
        raise UnsupportedError(
            f"{path} has tokens whose divisions have {letters} letters, more than {MOST_LETTERS_MERGED}: its tokenizer is "
            "damaged"
        )
    numbers = sum(len(value) for value in header.metadata.values() if isinstance(value, array))
    if numbers > MOST_NUMBERS + 4 * len(tokens):
        raise UnsupportedError(
            f"{path} has {numbers} numbers in arrays beside {len(tokens)} tokens, more than {MOST_NUMBERS} and four for "
            "each: its tokenizer is damaged"
        )
    from transformers import AutoTokenizer

    with (
        foreign_errors(f"{path}: its tokenizer cannot be rebuilt"),
        header_for_transformers(header),
        tempfile.TemporaryDirectory(prefix="nstf-", ignore_cleanup_errors=True) as folder,
        without_hub(),
    ):
        # Alone: a tokenizer.json beside the file, another model's maybe, would be taken instead, unchecked.
        alone, saved = Path(folder, "alone"), Path(folder, "saved")
        alone.mkdir()
        (alone / "model.gguf").symlink_to(path.resolve())
        begins = {"add_bos_token": True} if _begins_unasked(header) else {}
        tokenizer = AutoTokenizer.from_pretrained(
            str(alone), gguf_file="model.gguf", local_files_only=True, trust_remote_code=False, **begins
        )
        _split_as_stated(tokenizer, header, path)
        tokenizer.save_pretrained(saved)
        found = {p.name: p.read_bytes() for p in saved.iterdir() if p.name in (*SETTINGS, *CONTENT)}
    for name in SETTINGS:
        if name in found:
            data = without_code(name, json.loads(found[name]))
            found[name] = json.dumps(data, ensure_ascii=False, indent=2, sort_keys=True).encode() + b"\n"
    if "tokenizer.json" in found:
        found["tokenizer.json"] = compact(found["tokenizer.json"])
    return found


def _begins_unasked(header: GgufHeader) -> bool:
    """Whether llama.cpp begins a text with the first token although the file does not say so; transformers does not."""
    stated = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
    usual = stated.get("model") == "gpt2" and stated.get("pre") in BEGINNING
    return usual and "add_bos_token" not in stated and type(stated.get("bos_token_id")) is int


def _split_as_stated(tokenizer: Any, header: GgufHeader, path: Path) -> None:
    """Gives the tokenizer the rule by which llama.cpp splits text, or says that it has another one."""
    rule, model = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("pre", "model"))
    if model != "gpt2" or not isinstance(rule, str):
        return
    from tokenizers import pre_tokenizers

    if rule in DIGITS:
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif rule not in AS_GPT2 and not _is_known(rule):
        log.warning(
            "%s: its tokenizer splits text by the rule %s, which is not known here: GPT-2's is taken, which may give "
            "other tokens",
            path,
            rule[:40],
        )


def _is_known(rule: str) -> bool:
    """Whether transformers splits by a rule. A version that has no list of them chooses by architecture."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return True
    return rule in GGUF_PRE_TOKENIZER_SPLITS


def compact(content: bytes) -> bytes:
    """The same tokenizer.json, read in half the time: no blanks, merges as texts where no token has one."""
    data = json.loads(content)
    merges = data["model"].get("merges")
    if merges and not any(" " in part for merge in merges for part in merge):
        data["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
