"""How much longer the rules of a tokenizer.json can make a text: a file of a few hundred bytes can turn one word into
gigabytes, which `tokenizers` makes before anything can be asked of it.

Rules that follow each other multiply, those of a decoder with the letters of the longest token. What is counted is the most
that one of them can do, whether a text lets it or not.
"""

from __future__ import annotations

import json
from contextlib import suppress

from nstf.errors import UnsupportedError
from nstf.runtime.artifact.header import check_nesting, corrupt, short, unique
from nstf.runtime.imports import uncollected
from nstf.runtime.tokenizer_words import check_known, check_objects, check_vocabulary_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

# Times the length of a text, and letters of a token as the decoder leaves it. Each rule of known tokenizers stays below 100,
# those of XLNet together come to 16,000; their longest tokens are rows of a thousand spaces or so.
MOST = 1 << 16
# Letters of all added tokens times what a normalizer's texts make of one: the library applies it to each at loading.
MOST_ADDED_TIMES = 1 << 22
# Letters that tables of characters in known files have in the place of one.
_USUAL_MAPPED = 64
# Letters of a word that WordPiece divides: it looks up every part of it. Known tokenizers have 100.
MOST_LETTERS = 1000
# Letters of all expressions: the library writes a class such as [\W] out, 26 KB for four letters. Known tokenizers have a
# few hundred.
MOST_EXPRESSIONS = 1 << 14
# Parts of the file whose rules a text goes through one after the other, and the names of what each may hold more of.
_BEFORE, _AFTER = ("normalizer", "pre_tokenizer"), ("post_processor", "decoder")
_SEVERAL = ("normalizers", "pretokenizers", "processors", "decoders")
# A character becomes the letters that stand for its bytes; a letter between two spaces, after its accents came apart; a word
# behind another letter, a token behind a space. Unicode's forms: 4 letters of U+1F82, 18 of U+FDFA; lower case: 2 of U+0130.
_FIXED = {
    "ByteLevel": 2.0, "BertNormalizer": 12.0, "Metaspace": 4.0, "NFC": 4.0, "NFD": 4.0, "NFKC": 18.0, "NFKD": 18.0,
    "Lowercase": 2.0, "WordPiece": 2.0,
}  # fmt: skip
# What decoders put a space in the place of: nothing stands between any two letters.
_SPACED = ("suffix", "word_delimiter_token")


def check_growth(content: bytes, where: object) -> None:
    """Raises UnsupportedError for a tokenizer.json whose rules can make more of a text than MOST times its length. One that
    has other parts than those known here is left to the library.

    Raises CorruptError for one that is not read here as the library reads it, of which nothing would be known: it takes
    nesting twice as deep, makes something of each of two like keys, and takes lists of values for objects.
    """
    check_vocabulary_values(content, "tokenizer.json", where)
    check_objects(content, "tokenizer.json", where)
    try:
        check_nesting(content, "the text")
        with uncollected():
            stated = json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique)
            _check_shape(stated)
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"its tokenizer.json is not JSON that can be read ({error})") from error
    check_rules(stated, where)
    check_known(stated, where)


def _check_shape(stated: Any) -> None:
    """Raises ValueError where something that is counted below is no object, list or text as `tokenizers` writes it."""
    parts = [_object(stated, "it").get(name) for name in (*_BEFORE, *_AFTER, "model")]
    parts += _objects(stated.get("added_tokens"), "added_tokens")
    while parts:
        rule = parts.pop()
        if rule is None:
            continue
        for name, value in _object(rule, "a rule").items():
            # The library takes {"ByteLevel": null} for "ByteLevel".
            if name == "type" and not isinstance(value, str | None):
                raise ValueError("the type of a rule is no text")
            if name in _SEVERAL:
                parts += _objects(value, name)
            elif name in ("single", "pair"):
                for piece in _objects(value, name):
                    parts += piece.values()
            elif name == "special_tokens":
                parts += _object(value, name).values()
            elif name in ("ids", "tokens"):
                _listed(value, name)
            elif name == "pattern" and not isinstance(value, str):
                parts.append(_object(value, name))


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no object")
    return value


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | None):
        raise ValueError(f"{name} is no list")
    return value or []


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    return [_object(item, f"what {name} holds") for item in _listed(value, name)]


def check_made(tokenizer: Any, where: object, words: bool = False) -> None:
    """The same for the rules of a tokenizer of transformers, which may have them from other files: a table of characters
    of a sentencepiece model, say, or tokens that settings add. words: its words are from other files, too."""
    own = getattr(tokenizer, "tokenizer", tokenizer)
    backend = getattr(own, "backend_tokenizer", None)
    stated = {name: _stated(getattr(backend, name, None)) for name in (*_BEFORE, *_AFTER)}
    if words:
        with suppress(NotImplementedError):
            stated["model"] = {"vocab": getattr(own, "get_vocab", dict)()}
    with suppress(NotImplementedError):
        plain = {t.content for t in getattr(own, "added_tokens_decoder", {}).values() if not t.normalized}
        there: dict[str, int] = getattr(own, "get_added_vocab", dict)()
        stated["added_tokens"] = [{"content": word, "normalized": word not in plain} for word in there]
    check_rules(stated, where)


def _stated(part: Any) -> Any:
    """A part of a tokenizer as its JSON; None where there is none, or one that transformers has written in Python."""
    try:
        return None if part is None else json.loads(part.__getstate__())
    except Exception:  # tokenizers raises no other class
        return None


def check_rules(stated: Mapping[str, Any], where: object) -> None:
    """Raises UnsupportedError as `check_growth` does, for what a tokenizer.json states."""
    model = stated.get("model")
    longest = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    if isinstance(longest, int) and longest > MOST_LETTERS:
        raise UnsupportedError(
            f"{where}: its tokenizer.json looks through words of up to {short(longest)} letters, which takes time by the "
            f"cube of them, more than {MOST_LETTERS}; use the original model's tokenizer"
        )
    letters = sum(_expressions(stated.get(part)) for part in (*_BEFORE, *_AFTER))
    if letters > MOST_EXPRESSIONS:
        raise UnsupportedError(
            f"{where}: its tokenizer.json has expressions of {letters} letters, more than {MOST_EXPRESSIONS}; use the "
            "original model's tokenizer"
        )
    for parts in (_BEFORE, *((part,) for part in _AFTER)):
        times = float(longest_token(stated)) if parts == ("decoder",) else 1.0
        for part in parts:
            times = min(times * _times(stated.get(part)), 1e300)
        if times > MOST:
            named = "longest token and its decoder" if parts == ("decoder",) else " and ".join(parts)
            raise UnsupportedError(
                f"{where}: its tokenizer can make a text {times:.3g} times as long by its {named}, "
                f"more than {MOST}; use the original model's tokenizer"
            )
    tokens = [token for token in _list_of(stated.get("added_tokens")) if isinstance(token, dict)]
    added = [token.get("content") for token in tokens if token.get("normalized") is not False]
    times = _times(stated.get("normalizer"), own=True)
    together = sum(len(text) for text in added if isinstance(text, str)) * times
    if together > MOST_ADDED_TIMES:
        raise UnsupportedError(
            f"{where}: its tokenizer's normalizer can make {together:.3g} letters of the tokens that are added, more than "
            f"{MOST_ADDED_TIMES}; use the original model's tokenizer"
        )


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _expressions(rule: Any) -> int:
    """Letters of the expressions of a rule and of those in it."""
    if not isinstance(rule, dict):
        return 0
    letters = 0
    for name in _SEVERAL:
        letters += sum(map(_expressions, rule[name] if isinstance(rule.get(name), list) else ()))
    pattern = rule.get("pattern")
    if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        letters += len(pattern["Regex"])
    return letters


def longest_token(stated: Mapping[str, Any]) -> int:
    """Letters of the longest token that a tokenizer.json states: each number that a model chooses may become so many."""
    model, added = stated.get("model"), stated.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    longest = max(map(len, vocab), default=1) if isinstance(vocab, dict) else 1
    words: list[Any] = []
    if isinstance(vocab, list):  # of Unigram: pairs of a word and its score
        words += [pair[0] for pair in vocab if isinstance(pair, list) and pair]
    if isinstance(added, list):
        words += [token.get("content") for token in added if isinstance(token, dict)]
    return max(longest, *(len(word) for word in words if isinstance(word, str)), 1)


def _times(rule: Any, own: bool = False) -> float:
    """The most by which a rule, or the rules in it, make a text longer. own: only by texts that the file states. The
    library's own rules (NFKD, byte level) lengthen a few rare characters alone."""
    if not isinstance(rule, dict):
        return 1.0
    times = 1.0
    for name in _SEVERAL:
        for inner in rule[name] if isinstance(rule.get(name), list) else ():
            times = min(times * _times(inner, own), 1e300)
    # By their fields as well: older files do not name the types of rules, and a type may have fields of another.
    ways = [1.0 if own else _FIXED.get(str(rule.get("type")), 1.0)]
    if "pattern" in rule and "content" in rule:
        ways.append(_replaced(rule["pattern"], _length(rule["content"])))
    if "prepend" in rule:
        ways.append(1.0 + _length(rule["prepend"]))
    if "precompiled_charsmap" in rule:
        mapped = _mapped(rule["precompiled_charsmap"])
        ways.append(1.0 if own and mapped <= _USUAL_MAPPED else mapped)
    ways += [_laid_out(rule, rule[name]) for name in ("single", "pair") if name in rule]
    ways += [_replaced(rule[name], 1) for name in _SPACED if name in rule]
    return times * max(ways)


def _replaced(pattern: Any, size: int) -> float:
    """By another text of `size` bytes: a text as often as it fits, an expression between any two letters."""
    text = pattern.get("String") if isinstance(pattern, dict) else pattern
    length = _length(text)
    return max(1.0, size / length) if length else 1.0 + size


def _mapped(table: Any) -> float:
    """By the longest text of a table of sentencepiece: a trie behind its size, then texts that end with a zero."""
    import base64

    try:
        raw = base64.b64decode(table)
    except (TypeError, ValueError):
        return 1.0
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return float(max(1, max(map(len, texts.split(b"\0")))))


def _laid_out(rule: dict[str, Any], pieces: Any) -> float:
    """By a template: each text in it as often as it stands there, and the tokens besides."""
    special = rule.get("special_tokens")
    known = special if isinstance(special, dict) else {}
    total = 0
    for piece in pieces if isinstance(pieces, list) else ():
        name = (piece.get("SpecialToken") or {}).get("id") if isinstance(piece, dict) else None
        token = known.get(name) if isinstance(name, str) else None
        # There should be as many numbers as names.
        both = [token.get(key) for key in ("ids", "tokens")] if isinstance(token, dict) else []
        total += max((len(found) for found in both if isinstance(found, list)), default=1)
    return float(max(1, total))


def _length(text: Any) -> int:
    return len(text.encode("utf-8", errors="replace")) if isinstance(text, str) else 0
