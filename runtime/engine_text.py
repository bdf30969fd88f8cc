"""Text from a file by the CPU engine and the `tokenizers` library alone: no torch, no transformers.

Importing those two takes ten times as long as the first token of a small model. What they would do differently from this
short way (special classes of tokenizers, settings that change what is chosen) is refused here and left to them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

from nstf.errors import UnsupportedError, UsageError
from nstf.runtime import byte_level
from nstf.runtime.artifact.digests import Verifying
from nstf.runtime.artifact.generation import check_generation
from nstf.runtime.artifact.reader import Artifact, open_artifact
from nstf.runtime.engine import Engine, may_repack
from nstf.runtime.stops import until_stop
from nstf.runtime.token_sampler import Settings, TokenSampler
from nstf.runtime.tokenizer_growth import check_growth
from nstf.runtime.tokenizing import check_length, foreign_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Classes of transformers that take tokenizer.json as it is, and the settings that change nothing then.
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_NEUTRAL = {
    "backend", "is_local", "local_files_only", "model_max_length", "tokenizer_class", "padding_side", "truncation_side",
    "model_input_names", "chat_template", "name_or_path", "special_tokens_map_file", "added_tokens_decoder",
    *_SPECIAL_TOKENS,
}  # fmt: skip
_NEUTRAL_OFF = {"clean_up_tokenization_spaces"}  # neutral where it is not on

# Settings of a GenerationConfig that do not change which token is the likeliest.
WITHOUT_EFFECT = frozenset(
    "transformers_version _from_model_config bos_token_id pad_token_id eos_token_id max_length max_new_tokens do_sample "
    "temperature top_k top_p use_cache decoder_start_token_id".split()
)


def stream(
    path: str | os.PathLike[str],
    prompt: str,
    max_new_tokens: int = 128,
    exact: bool = False,
    threads: int | None = None,
    verify: bool = True,
    kv_cache: str = "float16",
    sampling: Mapping[str, Any] | None = None,
    stops: Sequence[str] = (),
    attention: str = "full",
) -> Iterator[str]:
    """The continuation of `prompt` in pieces, each as soon as its characters are certain; the likeliest one by default.

    exact: no int8 activations. threads: None for as many as there are processors. verify: check every SHA-256 of the file
    before the first piece. kv_cache: what keys and values are kept as, `float16` or `int8`. sampling: values of
    `token_sampler.Settings`; of those that are not stated, all but the temperature are the file's, else top-k is 50 as in
    transformers and the others do nothing.
    stops: strings that the text ends before. attention: `full`, or `planned` as the file's attention plan says.

    Raises UsageError for a prompt without tokens or far too long and values out of range, CorruptError, and UnsupportedError
    before the first piece for a file that needs transformers: `nstf.runtime.load` runs it.
    """
    with (
        open_artifact(path) as artifact,
        Verifying(artifact, may_repack(artifact, exact)) if verify else nullcontext() as check,
    ):
        stop, usual = _generation(artifact)
        settings = Settings(**(usual | dict(sampling or {})))
        # The tokenizers library keeps Python for itself while it reads a vocabulary; panels are made meanwhile.
        engine = Engine(artifact, exact, threads, kv_cache, attention, copy_later=True)
        try:
            tokenizer, ids = _encoded(artifact, prompt, engine.context)
        finally:
            engine.finish()
        if check is not None:
            check.wait()
    if not ids:
        raise UsageError("the prompt has no tokens; give a text to continue")
    if len(ids) + max_new_tokens > engine.context:
        raise UnsupportedError("text beyond the model's context is left to transformers")
    sampler = None if settings.plain else TokenSampler(settings, ids)
    yield from until_stop(
        pieces(tokenizer, engine.generate(ids, max_new_tokens, stop, sampler=sampler)), stops
    )


def pieces(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens, bit by bit, as transformers' streamer gives it: line by line decoded together.

    Inside a line all up to the last space is certain, and all where the last character belongs to a script that has none
    between words; an unfinished character is kept back.
    """
    line: list[int] = []
    printed = 0
    for token in tokens:
        line.append(token)
        text = _decoded(tokenizer, line)
        if text.endswith("\n"):
            if text[printed:]:
                yield text[printed:]
            line, printed = [], 0
            continue
        spaceless = "\u2e80" <= text[-1:] < "\ud7ff"
        certain = len(text) if spaceless else text.rfind(" ") + 1
        if certain > printed and "\ufffd" not in text[printed:certain]:
            yield text[printed:certain]
            printed = certain
    rest = _decoded(tokenizer, line)[printed:]
    if rest:
        yield rest


def _decoded(tokenizer: Any, tokens: list[int]) -> str:
    with foreign_errors("the model's tokenizer cannot decode its tokens"):
        return str(tokenizer.decode(tokens, skip_special_tokens=True))


def _encoded(artifact: Artifact, prompt: str, context: int) -> tuple[Any, list[int]]:
    """(what decodes tokens as transformers' tokenizer of this file would, the tokens of the prompt)."""
    settings, content = _checked(artifact), artifact.file("tokenizer.json")
    quick = byte_level.read(content) if byte_level.suits(prompt) else None
    ids = None if quick is None else quick.encode(prompt)
    if quick is not None and ids is not None:
        _check_tokens(artifact, settings, quick.added)
        return quick, ids
    tokenizer = _library(artifact, settings, content)
    check_length(prompt, context, tokenizer.get_vocab)
    with foreign_errors(f"{artifact.where}: its tokenizer cannot encode this text"):
        return tokenizer, list(tokenizer.encode(prompt).ids)


def _checked(artifact: Artifact) -> dict[str, Any]:
    """The tokenizer_config.json of a file whose tokenizer.json is all there is to its tokenizer. Raises UnsupportedError."""
    names = artifact.file_names()
    if "tokenizer.json" not in names or "tokenizer_config.json" not in names:
        raise UnsupportedError(f"{artifact.where}: no tokenizer.json with its settings inside")
    settings = artifact.object("tokenizer_config.json")
    unknown = sorted(
        k for k in set(settings) - _NEUTRAL if k not in _NEUTRAL_OFF or settings[k] not in (None, False)
    )
    if unknown or settings.get("tokenizer_class") not in _CLASSES:
        what = f"setting {unknown[0]!r}" if unknown else f"class {settings.get('tokenizer_class')!r}"
        raise UnsupportedError(f"{artifact.where}: a tokenizer of {what} is left to transformers")
    return settings


def _library(artifact: Artifact, settings: Mapping[str, Any], content: bytes) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json."""
    from tokenizers import Tokenizer

    check_growth(content, artifact.where)
    with foreign_errors(f"{artifact.where}: its tokenizer.json cannot be read"):
        tokenizer = Tokenizer.from_buffer(content)
    added = tokenizer.get_added_tokens_decoder()
    _check_tokens(artifact, settings, {n: (token.content, token.special) for n, token in added.items()})
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_tokens(
    artifact: Artifact, settings: Mapping[str, Any], added: Mapping[int, tuple[str, bool]]
) -> None:
    """Raises UnsupportedError unless the tokens that the settings name are the tokenizer's. added: id -> (content, whether
    it is special)."""
    special = [content for content, is_special in added.values() if is_special]
    stated = settings.get("added_tokens_decoder") or {}
    known = {str(number): token for number, token in added.items()}
    same = isinstance(stated, dict) and all(
        isinstance(token, dict) and known.get(number) == (token.get("content"), token.get("special"))
        for number, token in stated.items()
    )
    if not same or any(settings.get(k) is not None and settings[k] not in special for k in _SPECIAL_TOKENS):
        raise UnsupportedError(f"{artifact.where}: special tokens that tokenizer.json lacks")


def _generation(artifact: Artifact) -> tuple[frozenset[int], dict[str, Any]]:
    """The tokens that end a text, and the file's settings of a draw, with transformers' in the place of missing ones."""
    source = "generation_config.json"
    if source in artifact.file_names():
        stated = artifact.object(source)
    else:  # as transformers: what the model's config says of a text's end
        config, source = artifact.config(), "config.json"
        if "eos_token_id" not in config:  # its class has one
            raise UnsupportedError(
                f"{artifact.where}: no generation_config.json inside, and no end of text stated"
            )
        stated = {"eos_token_id": config["eos_token_id"]}
    settings = check_generation(stated, artifact.where, source)
    usual: dict[str, Any] = {"top_k": 50, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    others = sorted(k for k, v in settings.items() if k not in WITHOUT_EFFECT | set(usual) and v is not None)
    if others:
        raise UnsupportedError(f"{artifact.where}: setting {others[0]!r} is left to transformers")
    end = settings.get("eos_token_id")
    found = end if isinstance(end, list) else [] if end is None else [end]
    usual |= {k: settings[k] for k in usual if settings.get(k) is not None}
    return frozenset(found), usual
