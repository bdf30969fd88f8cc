"""The tokenizer (or, for a model without text, the processor) of the files an artifact holds, by transformers.

No code of the checkpoint's author is run, and no other file read than those inside.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nstf.errors import NstfError, UnsupportedError, out_of_memory
from nstf.runtime.artifact import Artifact, open_artifact
from nstf.runtime.artifact.atomic_file import disk_errors, disk_fault
from nstf.runtime.artifact.header import ALWAYS_VALUES, check_nesting, check_values, corrupt, short
from nstf.runtime.artifact.side_names import CONTENT
from nstf.runtime.offline import without_hub
from nstf.runtime.skeleton import ARGUMENTS_OF, exported, harmless, leads_away
from nstf.runtime.tokenizer_growth import check_growth, check_made
from nstf.runtime.tokenizer_words import (
    ADDED,
    BYTE_MAPS,
    check_added,
    check_added_to_python,
    check_byte_maps,
    check_letters_added,
    check_vocabulary_values,
    check_words,
)
from nstf.runtime.tokenizing import is_panic

_NOT_TOKENIZER = ("config.json", "generation_config.json")
# Of all files of a tokenizer together, unpacked: they are in memory, and in a temporary folder, at the same time.
MAX_TOKENIZER_BYTES = 1 << 29
# Of a file of settings, unpacked, which are read, walked through and copied: 180 bytes for each of 150,000 added tokens.
MAX_SETTINGS_BYTES = 32 << 20
# Values of it: seven for each of 150,000 added tokens, and some more.
MAX_SETTINGS_VALUES = 5 << 18
# Of a tokenizer or a processor, whose keys become arguments of a class (so do all of the last, over the files that were
# found); the others are vocabularies, with words for keys.
_SETTINGS, _SPECIAL_TOKENS = "_config.json", "special_tokens_map.json"
# How the modules of transformers are called that make a model's inputs, and those that stand for missing libraries.
_OF_INPUTS = (
    "tokenization_",
    "processing_",
    "feature_extraction_",
    "image_processing_",
    "video_processing_",
    "dummy_",
)


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer (or, for a model without text, the processor) whose files the artifact holds.

    The files are written to a private temporary folder for the time of the call. Never runs remote code.
    Raises UnsupportedError when there are no such files or transformers cannot read them, CorruptError for a config that the
    tensors do not bear out and for JSON that cannot be read.
    """
    with open_artifact(path) as artifact, _enough_memory(os.fspath(path)):
        names = tokenizer_names(artifact)
        if not names:
            raise UnsupportedError(f"{os.fspath(path)}: no tokenizer inside")
        files = {name: artifact.file(name) for name in names}
        if "config.json" in artifact.file_names():
            # transformers makes the model's config to find the tokenizer's class: a label for each of num_labels, say.
            files["config.json"] = json.dumps(harmless(artifact.config())).encode()
        return tokenizer_from_files(files, os.fspath(path))


def tokenizer_names(artifact: Artifact) -> list[str]:
    """The names of its tokenizer's files. Raises CorruptError where they unpack to more than MAX_TOKENIZER_BYTES."""
    names = [name for name in artifact.handed_on() if name not in _NOT_TOKENIZER]
    if (size := sum(artifact.manifest.files[name].size for name in names)) > MAX_TOKENIZER_BYTES:
        raise corrupt(
            artifact.where, f"its tokenizer's files unpack to {size} bytes, above {MAX_TOKENIZER_BYTES}"
        )
    return names


@contextmanager
def _enough_memory(where: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise NstfError(
            f"{where}: not enough memory for its tokenizer; free some, or raise its limit"
        ) from error


def tokenizer_from_files(files: Mapping[str, bytes], where: str) -> Any:
    """The tokenizer a folder of these files (config.json among them) would give. `where` names it in errors."""
    from transformers import AutoTokenizer

    added: set[str] = set()
    # What cannot be removed from a folder for temporary files is no reason to fail.
    with tempfile.TemporaryDirectory(prefix="nstf-", ignore_cleanup_errors=True) as folder:
        with disk_errors(Path(folder)):
            for name, content in files.items():
                if name.startswith("tokenizer") and not name.endswith((_SETTINGS, ".model")):
                    check_growth(content, where)
                elif name in CONTENT and not name.startswith("chat_template"):
                    check_words(name, content, where)
                kept, tokens = _kept(name, content, where)
                # Several files may add the same ones, which are there once.
                added.update(tokens)
                check_letters_added(added, "its settings add", where)
                if "tokenizer.json" not in files:
                    check_added_to_python(added, where)
                Path(folder, name).write_bytes(kept)
        try:
            with without_hub():
                made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            _check_settings(made)
            _check_vocabulary(made, files)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            if out_of_memory(error):
                raise NstfError(
                    f"{where}: not enough memory for its tokenizer; free some, or raise its limit"
                ) from error
            if fault := disk_fault(error):
                raise NstfError(f"{folder}: cannot be read ({fault.strerror}); check the disk") from error
            reason = " ".join(str(error).split()).replace(folder, where)[:300]
            names = ", ".join(sorted(set(files) - set(_NOT_TOKENIZER))) or "no files"
            # transformers tries that for every .model where this is missing, and asks for the wrong one.
            if "tiktoken" in reason and ".model" in names and find_spec("sentencepiece") is None:
                reason = "a .model file needs the package sentencepiece; run `pip install sentencepiece`"
            raise UnsupportedError(
                f"{where}: transformers cannot build a tokenizer of {names}: {reason}"
            ) from error
    check_made(made, where, words="tokenizer.json" not in files)
    return made


def _check_settings(tokenizer: Any) -> None:
    """Raises ValueError for a setting that every call would stumble over."""
    longest = getattr(tokenizer, "model_max_length", 0)
    if type(longest) not in (int, float):
        raise ValueError(f"model_max_length is {short(longest)}, expected a number")


def _check_vocabulary(made: Any, files: Mapping[str, bytes]) -> None:
    """Raises ValueError for a tokenizer whose words are in none of its files: transformers makes an empty one, which takes
    every word for an unknown one. Those of bytes and letters need no file."""
    kinds = getattr(getattr(made, "tokenizer", made), "vocab_files_names", None)
    settings = (
        _SETTINGS,
        _SPECIAL_TOKENS,
        "config.json",
        "added_tokens.json",
        "chat_template.json",
        ".jinja",
    )
    if kinds and all(name.endswith(settings) for name in files):
        raise ValueError(f"its vocabulary is missing ({' or '.join(sorted(set(kinds.values())))})")


def without_code(name: str, content: bytes, where: str) -> bytes:
    """A tokenizer's file, where it holds settings without those that lead to code or to another file. One of which nothing
    goes stays byte for byte.

    Raises CorruptError for settings that cannot be read here: transformers may read them all the same.
    """
    return _kept(name, content, where)[0]


def _kept(name: str, content: bytes, where: str) -> tuple[bytes, list[str]]:
    """(what `without_code` gives back, the tokens that the file adds as settings)."""
    added: list[str] = []
    if not name.endswith(_SETTINGS) and name not in (_SPECIAL_TOKENS, "config.json"):
        if name.endswith(".json"):
            check_vocabulary_values(content, name, where)
        if name == ADDED:
            with suppress(ValueError, RecursionError):  # the library says so
                added = check_added(json.loads(content.decode("utf-8-sig")), name, where)
        elif name == BYTE_MAPS:
            check_byte_maps(_object(name, content, where), where)
        return content, added
    if len(content) > MAX_SETTINGS_BYTES:
        raise corrupt(where, f"its {name} has {len(content)} bytes, above {MAX_SETTINGS_BYTES}")
    found = _object(name, content, where, packed=True)
    if isinstance(found, dict) and name != _SPECIAL_TOKENS:
        _check_class(found.get("tokenizer_class"), name, where)
    added = check_added(found, name, where)
    if name != _SPECIAL_TOKENS:
        _check_named(set(_classes_in(found)), name, where)
    if name == "config.json":
        return content, added
    kept = found
    if name == _SPECIAL_TOKENS and isinstance(found, dict):
        kept = {key: value for key, value in found.items() if key.endswith(("_token", "_tokens"))}
    kept = _stripped(kept)
    return content if kept == found else json.dumps(kept).encode(), added


def _object(name: str, content: bytes, where: str, packed: bool = False) -> Any:
    """What a JSON file holds. Raises CorruptError where Python cannot read it, or nothing could walk through it. packed: as
    `check_values`."""
    try:
        check_nesting(content, "the text")
        text = content.decode("utf-8-sig")
        check_values(text, "the text", MAX_SETTINGS_VALUES if packed else ALWAYS_VALUES, packed)
        return json.loads(text)
    except ValueError as error:
        raise corrupt(where, f"its {name} is not JSON that can be read ({error})") from error


def _classes_in(settings: Any) -> Iterator[str]:
    """What settings, and those inside of them, state under keys that may name a class: `tokenizer_class`,
    `image_processor_type`."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key.endswith(("_class", "_type")):
                yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str))
            yield from _classes_in(value)
    elif isinstance(settings, list):
        for value in settings:
            yield from _classes_in(value)


def _check_named(stated: Iterable[str], source: str, where: str) -> None:
    """Raises UnsupportedError for the name of something of transformers that lies in no module of tokenizers or processors:
    asking for it imports the module, its trainer say. Nothing is imported to tell."""
    import transformers as library

    modules, own = getattr(library, "_class_to_module", {}), getattr(library, "_modules", ())
    for name in sorted(stated):
        module = modules.get(name, "").split(".")[-1]
        if name in own or (module and not module.startswith(_OF_INPUTS)):
            raise _not_of_inputs(name, source, where)


def _not_of_inputs(name: str, source: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: its {source} names {short(name)}, which is no class of a tokenizer or a processor"
    )


def _check_class(stated: object, source: str, where: str) -> None:
    """Raises UnsupportedError for a class that is none of a tokenizer or a processor: transformers would make of the files
    whatever of its own objects has that name, a model say. One that it lacks is left to it."""
    if not isinstance(stated, str):
        return
    import transformers as library

    there = {*dir(library), *dir(type(library)), *getattr(library, "_objects", ())}
    for name in (stated, stated.removesuffix("Fast"), f"{stated}Fast"):
        try:
            found = exported(name)
        except (ImportError, RuntimeError):
            continue
        if name not in there or (isinstance(found, type) and _makes_inputs(found)):
            continue
        raise _not_of_inputs(stated, source, where)


def _makes_inputs(found: type) -> bool:
    """Whether a class of transformers is one of tokenizers or processors, or stands for one whose libraries are missing."""
    import transformers as library

    if "requires_backends" in vars(found) or hasattr(found, "_backends"):
        return True
    # The others are asked for after it: importing them takes two seconds.
    bases = (library.ProcessorMixin, library.FeatureExtractionMixin, library.ImageProcessingMixin)
    return found not in bases and issubclass(found, (library.PreTrainedTokenizerBase, *bases))


def _stripped(value: Any, arguments: bool = True) -> Any:
    """arguments: whether the keys of a dictionary become arguments of a class, not words or tokens."""
    if isinstance(value, dict):
        return {
            k: _stripped(v, k.endswith(ARGUMENTS_OF))
            for k, v in value.items()
            if not leads_away(k, arguments)
        }
    return [_stripped(v, False) for v in value] if isinstance(value, list) else value
