"""The settings of a generation_config.json inside an artifact, as far as they can be used.

transformers looks at most of them when the first token is chosen, and raises errors of its own there; some it allocates by
(a cache for each of `num_beams`). So each is checked when the file is loaded.
"""

from __future__ import annotations

import math
from functools import lru_cache

from nstf.errors import CorruptError
from nstf.runtime.artifact.config import MAX_INTEGER, is_token
from nstf.runtime.artifact.header import short

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from nstf.runtime.artifact.config import Config

_LONGEST = 1 << 40
# Sequences that are decoded side by side, each with a cache of its own.
MAX_BEAMS = 1_024
# Tokens of an n-gram that is not to come again: transformers makes a list of as many texts.
MAX_NGRAM = 1_024
# A draw of so many is one of all: our samplers count in 32 bits.
_MOST_TOKENS = (1 << 31) - 1
# Whole numbers: the most that may stand there. -1 stands for "off" in some files, and 50.0 for 50.
_INTEGERS = dict.fromkeys(
    "max_length max_new_tokens min_length min_new_tokens top_k "
    "num_assistant_tokens prompt_lookup_num_tokens max_matching_ngram_size prefill_chunk_size".split(),
    _LONGEST,
)
_INTEGERS |= dict.fromkeys(("num_beams", "num_return_sequences"), MAX_BEAMS)
_INTEGERS |= dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), MAX_NGRAM)
# Numbers: the range of each. What is beyond float64 is an integer of hundreds of digits.
_ANY = (-1e300, 1e300)
_NUMBERS = {
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "max_time"), _ANY),
    "guidance_scale": (-1e6, 1e6),  # beyond, scores are no float32 any more, as with the penalties
    "length_penalty": (-25, 25),  # a power of the text's length, which is a float64 for the longest
    **dict.fromkeys(("temperature", "top_p", "typical_p"), (0, 1e300)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (0, 1e6)),
    **dict.fromkeys(("min_p", "top_h"), (0, 1)),
}
# A temperature below draws the likeliest token, and a penalty below makes scores that are no float32.
_LEAST = 1e-6
# Off where they are 0 (or, of whole numbers, below).
_ABOVE_ZERO = frozenset(
    "temperature top_p typical_p top_h repetition_penalty encoder_repetition_penalty num_beams num_return_sequences "
    "prefill_chunk_size prompt_lookup_num_tokens max_matching_ngram_size".split()
)
_SWITCHES = frozenset(
    "do_sample use_cache renormalize_logits remove_invalid_values return_dict_in_generate output_scores output_logits "
    "output_attentions output_hidden_states".split()
)
# transformers decodes by code from its hub for these, which is never run, or asks for the tokenizer in the middle of a text,
# or for a second model; and what it sets for itself, as the room of a static cache.
_LEFT_OUT = frozenset(
    "assistant_early_exit assistant_model auto_map compile_config constraints custom_generate diversity_penalty dola_layers "
    "force_words_ids is_assistant low_memory max_cache_len num_beam_groups penalty_alpha token_healing "
    "trust_remote_code use_mtp watermarking_config".split()
)
# Of those, what would not have changed a text.
_SAME_TEXT = frozenset(
    "assistant_early_exit assistant_model auto_map compile_config is_assistant low_memory max_cache_len trust_remote_code "
    "use_mtp".split()
)
# Caches that need a GPU or a package of their own, wherever the model is.
_CACHES = ("offloaded", "offloaded_static", "quantized")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e30


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(is_token(t) for t in value)


def _are_words(value: Any) -> bool:
    """Lists of tokens that a model has, whose scores are looked up: none is below 0."""
    return isinstance(value, list) and all(_are_tokens(word) and word and min(word) >= 0 for word in value)


def _is_bias(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and _are_words(pair[:1]) and _is_number(pair[1])
        for pair in value
    )


def _largest_token(key: str, value: Any) -> int:
    """Of the words in `bad_words_ids` and `sequence_bias`, each of its own form; -1 for other settings."""
    words = value if key == "bad_words_ids" else [pair[0] for pair in value] if key == "sequence_bias" else []
    return max(map(max, words), default=-1)


def _is_decay(value: Any) -> bool:
    """From which token on, and a factor whose powers change the score of the text's end."""
    good = isinstance(value, list) and len(value) == 2 and is_token(value[0]) and _is_number(value[1])
    return good and abs(value[1]) <= 100


def _are_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(t, str) for t in value))


# Settings with a form of their own; an empty list says nothing.
_FORMS = {
    "suppress_tokens": (_are_tokens, "a list of tokens"),
    "begin_suppress_tokens": (_are_tokens, "a list of tokens"),
    "bad_words_ids": (_are_words, "a list of lists of tokens"),
    "sequence_bias": (_is_bias, "a list of pairs, of tokens and a number"),
    "exponential_decay_length_penalty": (_is_decay, "a whole number and a number up to 100"),
    "stop_strings": (_are_texts, "a text, or a list of texts"),
}


def check_generation(
    stated: Config, where: object, source: str = "generation_config.json", vocab: int | None = None
) -> dict[str, Any]:
    """The settings that say something: whole numbers as such, none that are off, none that need foreign code.

    source: the file inside that states them. vocab: tokens of the model, where they are known: those that a text is forced
    to begin or end with, and those of words with a bias, must be among them. What changes a text and is left out is named
    in one warning. Raises CorruptError for values that `generate` cannot use.
    """
    found: dict[str, Any] = {}
    left_out = []
    for key, value in stated.items():
        if value is None:
            continue
        if key in _LEFT_OUT:
            if _says_something(key, value, stated):
                left_out.append(key)
            continue
        if wanted := _wanted(key, value, vocab):
            raise CorruptError(
                f"{where}: its {source} says {key} is {short(value)}, expected {wanted}; "
                "the file is damaged, fetch or convert it again"
            )
        if key in _FORMS and value in ([], ""):
            continue
        if (key == "exponential_decay_length_penalty" and not _has_end(stated, vocab)) or (
            # `generate` looks for them in the tokenizer, which it has not.
            key == "stop_strings" or (key == "cache_implementation" and value in _CACHES)
        ):
            left_out.append(key)
            continue
        if key.startswith("forced_") and value == -1:
            continue
        if key in _ABOVE_ZERO and value <= (_LEAST if key == "temperature" else 0):
            if key == "temperature":  # the likeliest token, that is
                found["do_sample"] = False
        elif key == "top_p" and value >= 1:  # of all tokens, as if nothing stood there
            continue
        elif key not in _INTEGERS:
            # 2 in the place of 2.0 is no positive number to transformers, or one whose power has hundreds of digits.
            found.setdefault(key, _as_float(key, value))
        elif value >= 0:
            found[key] = min(int(value), _MOST_TOKENS) if key == "top_k" else int(value)
    if found.get("do_sample") is False and found.get("num_beams", 1) == 1 and _draws_nothing(stated):
        if found.pop("num_return_sequences", 1) > 1:  # one and the same text, that often
            left_out.append("num_return_sequences")
    if vocab is not None and len(_never_written(found)) >= vocab:
        raise CorruptError(f"{where}: its {source} forbids every token; the file is damaged, fetch it again")
    if left_out:
        _warn_once(
            f"{where}: its {source} says {', '.join(sorted(left_out))}: left out, the model decodes without"
        )
    return found


def _says_something(key: str, value: Any, stated: Config) -> bool:
    """Whether a setting that is left out would have changed a text; files of older versions state all, most of them off."""
    groups = stated.get("num_beam_groups")
    if key in ("num_beam_groups", "diversity_penalty"):
        return groups not in (None, 0, 1) and bool(value)
    if key == "penalty_alpha":  # draws, and the likeliest token alone, know nothing of it
        return bool(value) and stated.get("do_sample") is not True and stated.get("top_k") not in (0, 1)
    return key not in _SAME_TEXT and bool(value)


def _as_float(key: str, value: Any) -> Any:
    """A setting with its numbers as transformers asks for them."""
    if key == "sequence_bias":
        return [[words, float(bias)] for words, bias in value]
    return float(value) if key in _NUMBERS else value


def _never_written(found: Config) -> set[int]:
    """Tokens that may not be written, not as the first at least."""
    words = [word[0] for word in found.get("bad_words_ids") or () if len(word) == 1]
    lists = (found.get(key) or () for key in ("suppress_tokens", "begin_suppress_tokens"))
    return {token for tokens in (words, *lists) for token in tokens if token >= 0}


def _has_end(stated: Config, vocab: int | None) -> bool:
    """Whether there is a token whose score can be raised to end a text."""
    end = stated.get("eos_token_id")
    tokens = end if isinstance(end, list) else [end]
    most = MAX_INTEGER if vocab is None else vocab - 1
    return all(type(t) is int and 0 <= t <= most for t in tokens)


def _draws_nothing(stated: Config) -> bool:
    temperature = stated.get("temperature")
    return temperature is not None and temperature <= 0


@lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    """A file is looked at more than once on its way to a text: by the engine, and by transformers where that has to."""
    import logging

    logging.getLogger("nstf").warning("%s", message)


def _wanted(key: str, value: Any, vocab: int | None) -> str:
    """What should stand there instead; "" where the value will do."""
    if key.endswith(("_token_id", "_tokens_id")):
        tokens = value if isinstance(value, list) else [value]
        most = MAX_INTEGER if vocab is None or not key.startswith("forced_") else vocab - 1
        least = 0 if key.startswith("forced_") and value != -1 else -1
        good = bool(tokens) and all(is_token(t) and least <= t <= most for t in tokens)
        return "" if good else "a token, or a list of tokens"
    if key in _INTEGERS:
        good = type(value) in (int, float) and -1 <= value <= _INTEGERS[key] and value == int(value)
        return "" if good else f"a whole number up to {_INTEGERS[key]}"
    if key in _NUMBERS:
        low, high = _NUMBERS[key]
        if type(value) not in (int, float) or not abs(value) < math.inf:
            return "a number"
        if key.endswith("repetition_penalty") and 0 < value < _LEAST:
            return f"a number from {_LEAST:g} to {high:g}"
        return "" if low <= value <= high else f"a number from {low:g} to {high:g}"
    if key in _SWITCHES:
        return "" if type(value) is bool else "true or false"
    good_form, form = _FORMS.get(key, (None, ""))
    if good_form is not None and value != [] and not good_form(value):
        return form
    return "" if vocab is None or _largest_token(key, value) < vocab else f"tokens up to {vocab - 1}"
