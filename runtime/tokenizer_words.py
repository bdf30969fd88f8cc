"""Words and numbers in a tokenizer's files whose cost is out of proportion: a few kilobytes, packed, that take gigabytes."""

from __future__ import annotations

from contextlib import suppress

from nstf.errors import UnsupportedError
from nstf.runtime.artifact.header import STRING, corrupt, marks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import Any

ADDED = "added_tokens.json"
# Values of a JSON file of words and merges, whatever its length: the largest known (514,000 merges of three marks, 256,000
# words) has two millions. Each may take a hundred bytes of memory.
MOST_VALUES = 1 << 22
# Objects of a tokenizer.json: rules, which take 1,300 bytes of memory each, and added tokens.
MOST_OBJECTS = 1 << 18
# Bytes of a word in files from which transformers works merges out, by the square of them.
MOST_WORD = 4096
# Lines of a list of words or merges: the longest known has half as many.
MOST_LINES = 1 << 20
# Bytes in the rules of MyT5's byte maps, each of which takes 370 bytes of memory. It has 4,096 rules at most for each of a
# hundred languages, of some 15 bytes.
BYTE_MAPS = "byte_maps.json"
MOST_MAPPED = 1 << 23
_MAPS = ("decompose_map", "merge_map")
# Letters of all tokens together that settings add: each takes 232 bytes in tokenizers of Python.
MOST_LETTERS_ADDED = 1 << 20
# Letters of added tokens times rules of a normalizer, each of which the library applies to every such token at loading.
MOST_CHANGED = 1 << 26
# The highest number of such a token, below which some tokenizers fill every place; and tokens, or places of a list or a
# text, that are made for a number (of T5, ByT5, Pegasus, M2M-100, MarkupLM, and of processors of Kosmos-2 and Gemma 3).
MOST_NUMBER = 1 << 19
MOST_MADE = 1 << 12
# Tokens that settings add to a tokenizer in Python, one without a tokenizer.json: they take time by their square, 10 seconds
# for so many. Known ones add some thousand (places in images).
MOST_ADDED = 1 << 13
_MADE = (
    *("extra_ids", "offset", "num_madeup_words", "max_depth", "num_patch_index_tokens", "num_image_tokens"),
    *("image_seq_length", "image_seq_len", "audio_seq_length"),
)
# Bytes of the words of a model that looks for the likeliest division (Unigram): its trie takes some 350 bytes for each.
MOST_BYTES_KNOWN = 1 << 22
# Letters of all divisions of each word of a GGUF file without merges, of which transformers makes merges as texts.
MOST_LETTERS_MERGED = 1 << 26
# Elements of a table that makes a spectrum of sound: bands by frequencies. Known ones have 65,000.
MOST_TABLE = 1 << 22
_BANDS = ("feature_size", "num_mel_bins", "num_mel_filters", "n_mels", "num_chroma", "num_dmel_bins")
_SAMPLES = ("filter_length", "fft_length", "fft_window_size", "n_fft", "win_length", "window_size")
# Bands and seconds of a window where settings state none: the most that an extractor takes then.
_USUAL_BANDS = 128
_USUAL_SECONDS = 0.064
# What a class of transformers takes by itself at most (Pop2Piano, with 512 bands): so 1,024 bands. And MusicgenMelody, with
# bands of a name of its own.
_MOST_USUAL_SAMPLES, _MUSICGEN_SAMPLES = 1 << 12, 1 << 14
_TEXT = bytes(range(32, 127)) + b"\t\n\r"  # what lists of words in base64 are made of
_TOKENS = ("_token", "_tokens")
_HUGE = 1e100  # an integer of more digits may be none that a float can hold


def check_vocabulary_values(content: bytes, name: str, where: object) -> None:
    """Raises CorruptError for a tokenizer's JSON file of so many values that they take far more memory than it does."""
    if holds_too_many_values(content):
        raise corrupt(where, f"its {name} holds {marks(content)} values, and {MOST_VALUES} at most are read")


def holds_too_many_values(content: bytes) -> bool:
    """Whether a tokenizer's JSON file holds more values than MOST_VALUES."""
    return len(content) > MOST_VALUES and marks(content) > MOST_VALUES


def check_objects(content: bytes, name: str, where: object) -> None:
    """Raises UnsupportedError for a tokenizer.json of too many rules. Braces in words count as well; there are few."""
    _refuse_above(MOST_OBJECTS, content.count(b"{"), f"objects in its {name}", where)


def check_words(name: str, content: bytes, where: object) -> None:
    """Raises UnsupportedError for a word of more than MOST_WORD bytes in a file of words, JSON or sentencepiece's, or for a
    list of more than MOST_LINES; CorruptError for a model of sentencepiece's whose pieces are not found."""
    if name.endswith(".json"):
        longest = max((word.end() - word.start() - 2 for word in STRING.finditer(content)), default=0)
    # A long piece of sentencepiece's has a length above 127, which is no text.
    elif name.endswith((".model", ".spm")) and content.translate(None, _TEXT):
        try:
            longest = max(map(len, _pieces(content)), default=0)
        except (IndexError, KeyError) as error:
            raise corrupt(where, f"its {name} is no model of sentencepiece's that can be read") from error
    else:
        lines = content.count(b"\n") + content.count(b"\r") - content.count(b"\r\n")
        _refuse_above(MOST_LINES, lines, f"lines in its {name}", where)
        longest = max(map(len, content.splitlines()), default=0)
    _refuse_above(MOST_WORD, longest, f"bytes of a word in its {name}", where)


def check_byte_maps(stated: Any, where: object) -> None:
    """Raises UnsupportedError for the byte maps of a MyT5 that are no rules, or too many: in the place of rules transformers
    takes a text for the name of a file, and opens it."""
    maps = [stated.get(key) if isinstance(stated, dict) else None for key in _MAPS]
    rules = [rule for rules in maps if isinstance(rules, dict) for rule in rules.items()]
    if not all(isinstance(rules, dict) for rules in maps) or not all(isinstance(to, str) for _, to in rules):
        raise UnsupportedError(
            f"{where}: in its {BYTE_MAPS} {' and '.join(_MAPS)} must be objects of texts; use the original model's tokenizer"
        )
    mapped = sum(part.count(" ") + 1 for rule in rules for part in rule)
    _refuse_above(MOST_MAPPED, mapped, f"bytes in the rules of its {BYTE_MAPS}", where)


def check_added(stated: Any, name: str, where: object) -> list[str]:
    """The tokens that settings add. Raises UnsupportedError for more letters of them, or higher numbers, than a tokenizer
    bears."""
    if not isinstance(stated, dict):
        return []
    words: list[Any] = []
    numbers: list[Any] = []
    if name == ADDED:
        words, numbers = list(stated), list(stated.values())
    else:
        decoder = stated.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            words = list(decoder.values())
            for key in decoder:
                with suppress(ValueError):  # what is no number for Python is none for the library
                    numbers.append(int(key))
        for more in (value for key, value in stated.items() if key.endswith(_TOKENS)):
            # A token is a text, or an object with its `content`; some are a list of tokens, or have names.
            one = not isinstance(more, dict | list) or (isinstance(more, dict) and "content" in more)
            words += [more] if one else list(more.values()) if isinstance(more, dict) else more
        made = [stated[key] for key in _MADE if type(stated.get(key)) is int]
        _refuse_above(MOST_MADE, max(made, default=0), f"tokens made for a number in its {name}", where)
        _refuse_above(
            MOST_TABLE, _largest_table(stated), f"elements of a table of sound by its {name}", where
        )
    found = [word.get("content") if isinstance(word, dict) else word for word in words]
    texts = [text for text in found if isinstance(text, str)]
    check_letters_added(texts, f"its {name} adds", where)
    highest = max((number for number in numbers if type(number) is int), default=0)
    _refuse_above(MOST_NUMBER, highest, f"as the number of a token that its {name} adds", where)
    return texts


def check_added_to_python(tokens: Collection[str], where: object) -> None:
    """Raises UnsupportedError for more tokens than MOST_ADDED."""
    _refuse_above(MOST_ADDED, len(tokens), "tokens that its settings add without a tokenizer.json", where)


def check_letters_added(texts: Iterable[str], by: str, where: object) -> None:
    """Raises UnsupportedError for tokens to be added that have more letters together than MOST_LETTERS_ADDED."""
    _refuse_above(MOST_LETTERS_ADDED, sum(map(len, texts)), f"letters of tokens that {by}", where)


def check_known(stated: Mapping[str, Any], where: object) -> None:
    """Raises UnsupportedError for the words of a tokenizer.json that are as check_words and check_added refuse them, or too
    many bytes together for what looks them up."""
    model, added = stated.get("model"), stated.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    words = vocab if isinstance(vocab, dict) else [pair[0] for pair in _lists(vocab) if pair]
    lengths = [len(word) for word in words if isinstance(word, str)]
    # A model's texts of its own are put before, behind or in the place of each piece of a word.
    lengths += (
        [len(text) for text in model.values() if isinstance(text, str)] if isinstance(model, dict) else []
    )
    _refuse_above(MOST_WORD, max(lengths, default=0), "letters of a word in its tokenizer.json", where)
    if not isinstance(vocab, dict):
        together = sum(bytes_of(word) for word in words if isinstance(word, str))
        _refuse_above(MOST_BYTES_KNOWN, together, "bytes of words in its tokenizer.json", where)
    texts = [t.get("content") for t in added if isinstance(t, dict)] if isinstance(added, list) else []
    tokens = [text for text in texts if isinstance(text, str)]
    check_letters_added(tokens, "its tokenizer.json adds", where)
    changed = sum(map(len, tokens)) * _rules(stated.get("normalizer"))
    _refuse_above(
        MOST_CHANGED, changed, "letters of added tokens that the rules of its tokenizer.json change", where
    )


def bytes_of(word: str) -> int:
    """In UTF-8, of which the trees are made that words are looked up in. Half of a pair of surrogates has three."""
    return len(word) if word.isascii() else len(word.encode("utf-8", "surrogatepass"))


def _rules(normalizer: Any) -> int:
    """How many rules a normalizer has, those inside of others too."""
    if isinstance(normalizer, list):
        return sum(map(_rules, normalizer))
    return 1 + _rules(list(normalizer.values())) if isinstance(normalizer, dict) else 0


def _lists(value: Any) -> list[list[Any]]:
    return [v for v in value if isinstance(v, list)] if isinstance(value, list) else []


def _largest_table(stated: Any) -> float:
    """Elements of the largest table that settings, or those inside of them, make for sound.

    Windows are stated in samples, or in milliseconds or seconds; SpeechT5's `win_length` in milliseconds. Of a window the
    next power of two is taken, by some twice, and half as many frequencies.
    """
    if isinstance(stated, list):
        return max(map(_largest_table, stated), default=0)
    if not isinstance(stated, dict):
        return 0

    def largest(*names: str) -> float:
        found = [abs(stated[n]) for n in names if type(stated.get(n)) in (int, float)]
        return max((min(n, _HUGE) if type(n) is int else n for n in found), default=0)

    milliseconds = largest(*(n for n in stated if n.endswith("_ms")), "win_length")
    spoken = largest("audio_token_duration_s") * max(1, largest("window_size_multiplier"))
    seconds = max(milliseconds / 1000, spoken) or _USUAL_SECONDS
    samples, bands = max(largest(*_SAMPLES), largest("sampling_rate") * seconds), largest(*_BANDS)
    if bands:  # those of a class may stand under another name than is stated
        samples = max(samples, _MUSICGEN_SAMPLES if largest("num_chroma") else _MOST_USUAL_SAMPLES)
    return max(samples * (bands or _USUAL_BANDS), *map(_largest_table, stated.values()), 0)


def _refuse_above(most: int, found: float, what: str, where: object) -> None:
    if not found <= most:  # NaN
        raise UnsupportedError(
            f"{where}: {min(found, _HUGE):.15g} {what}, more than {most}; use the original model's tokenizer"
        )


def _pieces(content: bytes) -> list[bytes]:
    """Of a model of sentencepiece, whose first field is a piece that begins with its text. Raises IndexError or KeyError for
    what is none, or holds more than its fields (a group): the library may find pieces behind that."""
    at, found = 0, []
    while at < len(content):
        key, at = _varint(content, at)
        if key >> 32:
            raise KeyError("no field of protobuf")
        if key & 7 == 2:
            size, at = _varint(content, at)
            if key >> 3 == 1:
                found.append(content[at : at + size])
            at += size
        else:
            at = at + {1: 8, 5: 4}[key & 7] if key & 7 else _varint(content, at)[1]
    if at > len(content):
        raise IndexError("a field that ends behind the file")
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(a number of protobuf, the place behind it)."""
    value = shift = 0
    while True:
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise KeyError("no number of protobuf")
