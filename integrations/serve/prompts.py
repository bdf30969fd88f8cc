"""Prompts to token ids: the tokenizer of an artifact, its chat template, and the tokens that end a text or a turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from typing import Any

from nstf.errors import NstfError, UnsupportedError
from nstf.integrations.serve.errors import too_long, wrong
from nstf.runtime.artifact import Artifact
from nstf.runtime.tokenizer_files import load_tokenizer
from nstf.runtime.tokenizing import apply_template, encode, foreign_errors

# What chat models write at the end of a turn; many files name another token as the end of a text.
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|return|>",
)


class Prompts:
    """Raises UnsupportedError for a file without a tokenizer that gives token ids by the `tokenizers` library."""

    def __init__(self, artifact: Artifact, template: str | None = None) -> None:
        """template: a chat template (Jinja) in the place of the file's own."""
        self.own = load_tokenizer(artifact.path)
        self.fast: Any = getattr(self.own, "backend_tokenizer", None)
        if self.fast is None:
            raise UnsupportedError(
                f"{artifact.path}: its tokenizer has no tokenizer.json, which text in pieces needs"
            )
        if template is not None:
            self.own.chat_template = template
        # transformers changes the settings of what it calls, for the time of a call, so calls would wait for a large prompt.
        # Where it does nothing else, its tokenizer is asked directly, with settings that stay.
        self._direct = not _own_way(self.own)
        self._lock = Lock()
        if self._direct:
            self.fast.no_truncation()
            self.fast.no_padding()
            self.fast.encode_special_tokens = bool(getattr(self.own, "split_special_tokens", False))
        self.ends = self._ends(artifact)
        known = {t.content: i for i, t in self.fast.get_added_tokens_decoder().items()}
        self.turn_ends = self.ends | {known[t] for t in _TURN_ENDS if t in known}

    @cached_property
    def longest_token(self) -> int:
        """The most characters that one token stands for: an upper bound, marks of bytes counted as characters."""
        return max(map(len, self.fast.get_vocab()), default=1)

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.own, "chat_template", None))

    def text(self, text: str) -> list[int]:
        """Token ids of a text to continue. Raises ApiError (400): the tokenizer cannot encode it."""
        with _refusing("prompt"):
            return self._ids(text)

    def chat(self, messages: Sequence[dict[str, Any]], context: int) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. Raises ApiError (400): the template refuses it, or
        makes more of it than a context holds."""
        if not self.has_template:
            raise wrong(
                "messages",
                "this model has no chat template; use /v1/completions, or start the server with a template",
            )
        with _refusing("messages"):
            text = apply_template(self.own, list(messages))
        if len(text) > self.longest_token * context:
            raise too_long("messages", context)
        with _refusing("messages"):
            return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if not self._direct:
            with self._lock:
                return list(encode(self.own, text, add_special_tokens=add_special_tokens)["input_ids"])
        # Of a batch, since that alone lets other threads run meanwhile.
        with foreign_errors("the model's tokenizer cannot encode this text"):
            (found,) = self.fast.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def token_text(self, token: int) -> str:
        """The text of one token, for logprobs."""
        try:
            with foreign_errors("the model's tokenizer cannot decode a token"):
                return str(self.fast.decode([token], skip_special_tokens=False))
        except NstfError:
            return ""

    def _ends(self, artifact: Artifact) -> frozenset[int]:
        found: list[Any] = [getattr(self.own, "eos_token_id", None)]
        for name in ("generation_config.json", "config.json"):
            if name in artifact.file_names():
                end = artifact.object(name).get("eos_token_id")
                found += end if isinstance(end, list) else [end]
        return frozenset(t for t in found if type(t) is int)


def _own_way(tokenizer: Any) -> bool:
    """Whether a tokenizer's class does more to a text than the `tokenizers` library does."""
    from transformers import PreTrainedTokenizerFast

    names = (
        "__call__",
        "_call_one",
        "_encode_plus",
        "_batch_encode_plus",
        "encode",
        "prepare_for_tokenization",
    )
    kind = type(tokenizer)
    return any(
        getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name, None) for name in names
    )


@contextmanager
def _refusing(field: str) -> Iterator[None]:
    """What a tokenizer or a template raises as a 400 about a field, what memory does as a MemoryError."""
    try:
        yield
    except UnsupportedError as error:
        raise wrong(field, str(error)) from error
    except NstfError as error:
        raise MemoryError(str(error)) from error
