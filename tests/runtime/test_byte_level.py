"""The short way to a prompt's tokens gives the `tokenizers` library's, or leaves the text to it."""

import copy
import json
import random
import string
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from nstf.runtime import byte_level

CORPUS = [
    "Once upon a time there were 1234 words, and it's said they'd 're-tell' the tale.\n\n  def f(x):\n\treturn x + 1\r\n",
    "THE END... of 2024's story!?  (a, b) <tag> `code` ~ http://x.y/z?q=1&r=2   ",
]


def split(expression: str) -> Any:
    from tokenizers import Regex

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def digits(one_by_one: bool) -> Any:
    own = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=one_by_one), own])


KINDS: dict[str, Any] = {
    "GPT-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "SmolLM": lambda: digits(True),
    "runs of digits": lambda: digits(False),
    "Llama 3": lambda: split(byte_level._LLAMA3),
    "Qwen": lambda: split(byte_level._LLAMA3.replace("{1,3}", "")),
}


def trained(kind: str = "GPT-2") -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = KINDS[kind]()
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 5, trainer)
    return made


def texts(count: int, seed: int) -> list[str]:
    """Of words of the corpus, spaces of all kinds and any ASCII characters."""
    draw = random.Random(seed)
    words = " ".join(CORPUS).split()
    pieces = [
        *words,
        *string.printable,
        "  ",
        "\n\n",
        "\t ",
        "'s",
        "'LL",
        "\x0b",
        "\x1c",
        "\x00",
        "12345",
        " 7",
    ]
    return ["".join(draw.choices(pieces, k=draw.randrange(1, 40))) for _ in range(count)]


def short_way(made: Tokenizer) -> byte_level.ByteLevel:
    found = byte_level.read(made.to_str().encode())
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_the_librarys(kind: str) -> None:
    made = trained(kind)
    short = short_way(made)
    for text in [*CORPUS, *texts(300, 1), ""]:
        assert short.encode(text) == made.encode(text).ids, repr(text)


@pytest.mark.parametrize("ignore", [False, True])
def test_merges_in_both_spellings_and_whole_words_first(ignore: bool) -> None:
    stated = json.loads(trained().to_str())
    stated["model"]["ignore_merges"] = ignore
    # A word that no merges lead to, which is found whole or not at all.
    stated["model"]["vocab"]["tale"] = len(stated["model"]["vocab"])
    pairs = [m if isinstance(m, list) else m.split(" ") for m in stated["model"]["merges"]]
    for merges in (pairs, [" ".join(p) for p in pairs]):
        stated["model"]["merges"] = merges
        content = json.dumps(stated)
        library, short = Tokenizer.from_str(content), byte_level.read(content.encode())
        assert short is not None
        for text in ("tale", "the tale tale", *texts(60, 2)):
            assert short.encode(text) == library.encode(text).ids, repr(text)


def test_merges_out_of_order_are_made_by_their_rank() -> None:
    """Of the pairs that a word has at a time the first of the list is made, though it needs one that comes later."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    words = [*sorted(letters), "ab", "abab", "ba", "bab", "aa"]
    merges = [("ab", "ab"), ("b", "ab"), ("a", "b"), ("b", "a"), ("a", "a")]
    made = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    made.pre_tokenizer, made.decoder = KINDS["GPT-2"](), decoders.ByteLevel()
    short = short_way(made)
    draw = random.Random(3)
    for _ in range(300):
        text = "".join(draw.choices("ab", k=draw.randrange(1, 14)))
        assert short.encode(text) == made.encode(text).ids, text


def test_the_tokens_around_a_text_are_those_of_the_template() -> None:
    made = trained()
    end = made.token_to_id("<|end|>")
    template = processors.TemplateProcessing(single="<|end|> $A <|end|>:0", special_tokens=[("<|end|>", end)])
    made.post_processor = processors.Sequence([processors.ByteLevel(), template])
    made.normalizer = normalizers.NFC()
    short = short_way(made)
    assert short.encode("a tale") == made.encode("a tale").ids
    assert short.encode("a tale")[0] == end  # type: ignore[index]


def test_any_tokens_are_decoded_as_by_the_library() -> None:
    made = trained()
    made.add_special_tokens(["<|more|>"])
    made.add_tokens([AddedToken("new\u00e9 word", special=False)])
    short = short_way(made)
    draw = random.Random(4)
    count = made.get_vocab_size()
    for _ in range(400):
        ids = [draw.randrange(count + 3) for _ in range(draw.randrange(12))]
        for skip in (True, False):
            assert short.decode(ids, skip) == made.decode(ids, skip_special_tokens=skip), ids


def test_bytes_that_are_no_text_are_replaced_as_by_the_library() -> None:
    made = trained()
    short, characters = short_way(made), byte_level._characters()
    draw = random.Random(5)
    leads = [0xC3, 0xE2, 0xF0, 0xF4, 0xED, 0xE0, 0xC0, 0xFF, 0x80, 0xA0, 0xBF, 0x9F, 0x41]
    for _ in range(600):
        ids = [made.token_to_id(characters[draw.choice(leads)]) for _ in range(draw.randrange(1, 7))]
        assert short.decode(ids) == made.decode(ids), ids


def test_texts_that_are_left_to_the_library() -> None:
    short = short_way(trained())
    for text in ("na\u00efve", "an <|end|> inside", "a" * (byte_level.MOST_IN_WORD + 1), "a " * 3000):
        assert short.encode(text) is None, text[:20]


def changed(stated: dict[str, Any], path: str, value: Any) -> bytes:
    found = copy.deepcopy(stated)
    at = found
    *parts, last = path.split(".")
    for part in parts:
        at = at[part]
    at[last] = value
    return json.dumps(found).encode()


def around(number: int) -> dict[str, Any]:
    """A template that puts a token of this number before a text."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"x": {"id": "x", "ids": [number], "tokens": ["x"]}},
    }


def test_tokenizers_that_are_left_to_the_library() -> None:
    stated = json.loads(trained().to_str())
    assert byte_level.read(json.dumps(stated).encode()) is not None
    prefix = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
    token = stated["added_tokens"][0]
    for path, value in (
        ("model.type", "Unigram"),
        ("model.dropout", 0.1),
        ("model.end_of_word_suffix", "</w>"),
        ("model.continuing_subword_prefix", "##"),
        ("model.vocab", ["a"]),
        ("model.merges", "a b"),
        ("model.merges", [["a", ["b"]]]),
        ("normalizer", {"type": "Lowercase"}),
        ("decoder", {"type": "Metaspace"}),
        ("decoder", None),
        ("pre_tokenizer", prefix),
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("pre_tokenizer", None),
        ("post_processor", {"type": "BertProcessing"}),
        ("added_tokens", [token | {"id": 7777}]),
        ("added_tokens", [token, token]),
        ("added_tokens", [token | {"content": ""}]),
        ("post_processor", around(10**30)),
        ("post_processor", around(-1)),
    ):
        assert byte_level.read(changed(stated, path, value)) is None, path
    for content in (b"", b"{]", b"[]", b"\xff", b'"' * 9, b"[" * 100_000, b"{" + b'"a":{' * 50_000):
        assert byte_level.read(content) is None, content[:10]
    unused = b'{"x": [' + b"[]," * (1 << 22) + b"[]],"  # values take far more memory than their text
    assert byte_level.read(unused + json.dumps(stated).encode()[1:]) is None


def test_bytes_that_the_vocabulary_lacks_are_left_to_the_library() -> None:
    stated = json.loads(trained().to_str())
    del stated["model"]["vocab"]["z"]
    stated["model"]["merges"] = []
    short = byte_level.read(json.dumps(stated).encode())
    assert short is not None
    assert short.encode("a") is not None
    assert short.encode("z") is None


@pytest.mark.parametrize("number", [10**30, 1 << 31, -5])
def test_words_of_numbers_that_no_token_has_are_left_to_the_library(number: int) -> None:
    stated = json.loads(trained().to_str())
    stated["model"]["vocab"]["z"] = number
    stated["model"]["merges"] = []
    short = byte_level.read(json.dumps(stated).encode())
    assert short is not None and short.encode("a") is not None and short.encode("z") is None
