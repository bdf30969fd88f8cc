"""A tokenizer.json that its library reads, and fails at later: with plain errors, or panics, which are no Exceptions."""

import base64
import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from small_llama import LLAMA, tensors

from nstf.errors import CorruptError, NstfError, UnsupportedError
from nstf.runtime import load, load_tokenizer, stream, tokenizer_files
from nstf.runtime.artifact import write_artifact
from nstf.runtime.engine_text import pieces
from nstf.runtime.engine_text import stream as engine_stream
from nstf.runtime.tokenizer_files import without_code
from nstf.runtime.tokenizer_growth import check_growth
from nstf.runtime.tokenizer_words import MOST_LINES, check_added, check_words
from nstf.runtime.tokenizing import encode

EXAMPLE = json.loads(
    (Path(__file__).parents[2] / "examples" / "tiny_llama" / "model" / "tokenizer.json").read_bytes()
)
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast"}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
# The words of a text, each of one token.
WORDS = {"type": "WordLevel", "unk_token": "x", "vocab": {"a": 0, "b": 1, "a" * 40 + "b": 2}}


def file_with(path: Path, settings: dict[str, Any] = SETTINGS, **parts: Any) -> Path:
    """An artifact with the example's tokenizer, of which these parts are others."""
    made = copy.deepcopy(EXAMPLE) | parts
    files = {"config": LLAMA, "tokenizer": made, "tokenizer_config": settings, "generation_config": {}}
    write_artifact(path, tensors(), {f"{k}.json": json.dumps(v).encode() for k, v in files.items()})
    return path


PANICS: dict[str, dict[str, Any]] = {
    "merges shorter than their prefix": {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "abcd"}
    },
    "a map of characters that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
}  # fmt: skip
LATER: dict[str, dict[str, Any]] = {
    "a regex that is given up": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a+)+$"}}},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "nothing put before": {"normalizer": {"type": "Prepend", "prepend": ""}},
    "no unknown token": {"model": WORDS},
}


@pytest.mark.parametrize("panic", PANICS)
def test_a_panic_while_a_tokenizer_is_built_is_one_line(tmp_path: Path, panic: str) -> None:
    path = file_with(tmp_path / "m.nstf", **PANICS[panic])
    for way in (lambda: load_tokenizer(path), lambda: list(engine_stream(path, "a", 2))):
        with pytest.raises(UnsupportedError):
            way()


@pytest.mark.parametrize("fault", LATER)
def test_what_fails_with_a_text_is_one_line(tmp_path: Path, fault: str) -> None:
    path = file_with(tmp_path / "m.nstf", **LATER[fault])
    text = "a" * 40 + "c"
    tokenizer, model = load_tokenizer(path), load(path)
    for way in (
        lambda: encode(tokenizer, text),
        lambda: list(stream(model, tokenizer, text, 2)),
        lambda: list(engine_stream(path, text, 2)),
    ):
        with pytest.raises(UnsupportedError, match="tokenizer cannot encode this text"):
            way()


LONG = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 1000}
TOKEN = {"id": "A", "ids": [3] * 300, "tokens": ["x"] * 300}
SPECIAL, TEXT = {"SpecialToken": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "pair": [TEXT], "special_tokens": {"A": TOKEN}}
TABLE = base64.b64encode(bytes(4) + b"x" * 70_000 + bytes(1)).decode()
GROWING: dict[str, dict[str, Any]] = {
    "letters that become words, twice": {"normalizer": {"type": "Sequence", "normalizers": [LONG, LONG]}},
    "a long text put before": {"normalizer": {"type": "Prepend", "prepend": "a" * 100_000}},
    "one letter that Unicode writes as 18": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "\ufdfa" * 4000}, {"type": "NFKC"}],
        }
    },
    "a template of many tokens": {"post_processor": {**TEMPLATE, "single": [*[SPECIAL] * 300, TEXT]}},
    "a template of many names of tokens": {
        "post_processor": {**TEMPLATE, "single": [*[SPECIAL] * 300, TEXT], "special_tokens": {"A": TOKEN | {"ids": []}}}
    },
    "a template that repeats the text": {"post_processor": {**TEMPLATE, "single": [TEXT] * 100_000}},
    "letters for bytes, again and again": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [EXAMPLE["pre_tokenizer"]] * 20}
    },
    "a map of characters with a long text": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": TABLE}},
    "tokens that become words": {
        "decoder": {"type": "Sequence", "decoders": [{**LONG, "pattern": {"String": "a"}}] * 2}
    },
    "spaces in the place of nothing": {
        "decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 20}
    },
    "spaces for a delimiter that is nothing": {
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": False}] * 20,
        }
    },
    "a template with the fields of another rule": {
        "post_processor": {**TEMPLATE, "single": [*[SPECIAL] * 300, TEXT], "pattern": "zz", "content": ""}
    },
    "a token of a long text": {"model": WORDS | {"vocab": {"x": 0, "a" * 70_000: 1}}},
    "a token of a long text, with a score": {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["x", 0.0], ["a" * 70_000, -1.0]]}
    },
    "an added token of a long text": {"added_tokens": [EXAMPLE["added_tokens"][0] | {"content": "a" * 70_000}]},
}  # fmt: skip


@pytest.mark.parametrize("fault", GROWING)
def test_a_text_is_not_made_gigabytes(tmp_path: Path, fault: str) -> None:
    path = file_with(tmp_path / "m.nstf", **GROWING[fault])
    for way in (lambda: load_tokenizer(path), lambda: list(engine_stream(path, "ä", 2))):
        with pytest.raises(UnsupportedError, match="times as long by its"):
            way()


def test_what_is_not_walked_through_is_not_left_to_a_library_that_does(tmp_path: Path) -> None:
    """tokenizers passes over an unknown key with 100 lists in each other: with one in the file no limit was looked at, and
    91 KB took 4.5 GB."""
    path = file_with(tmp_path / "m.nstf")
    load_tokenizer(path)
    content = json.dumps(EXAMPLE | {"added_tokens": [EXAMPLE["added_tokens"][0] | {"odd": 0}]})
    odd = content.replace('"odd": 0', f'"odd": {"[" * 100 + "]" * 100}')
    tokenizers.Tokenizer.from_str(odd)
    files = {k: json.dumps(v).encode() for k, v in (("config.json", LLAMA), ("generation_config.json", {}))}
    settings = json.dumps(SETTINGS).encode()
    write_artifact(
        path, tensors(), {**files, "tokenizer.json": odd.encode(), "tokenizer_config.json": settings}
    )
    for way in (lambda: load_tokenizer(path), lambda: list(engine_stream(path, "ä", 2))):
        with pytest.raises(CorruptError, match=r"its tokenizer\.json is not JSON that can be read"):
            way()


@pytest.mark.parametrize(
    "part",
    [
        '"normalizer": [[{"String": "a"}, "aaaa"]]',
        '"normalizer": {"type": "Sequence", "normalizers": [["a"]]}',
        '"decoder": {"type": "Sequence", "decoders": {"a": 1}}',
        '"post_processor": {"single": [{"SpecialToken": ["x", 0]}], "pair": [], "special_tokens": {}}',
        '"post_processor": {"single": [], "pair": [], "special_tokens": {"A": ["A", [1], ["A"]]}}',
        '"normalizer": {"type": "Replace", "pattern": ["a"], "content": "b"}',
        '"added_tokens": [[0, "a"]]',
        '"model": {"type": "BPE", "vocab": {}, "merges": []}',
    ],
)
def test_what_is_counted_is_as_tokenizers_writes_it(part: str, tmp_path: Path) -> None:
    """It reads lists of values as objects, and makes something of each of two like keys: rules in them were not counted, and
    48 KB took 8 GB. The last of these is a second model."""
    path = file_with(tmp_path / "m.nstf")
    odd = json.dumps(EXAMPLE)
    key = part.split(":")[0]
    if key != '"model"':
        odd = json.dumps({k: v for k, v in EXAMPLE.items() if k != key.strip('"')})
    files = {k: json.dumps(v).encode() for k, v in (("config.json", LLAMA), ("generation_config.json", {}))}
    content = {
        "tokenizer.json": f"{{{part}, {odd[1:]}".encode(),
        "tokenizer_config.json": json.dumps(SETTINGS).encode(),
    }
    write_artifact(path, tensors(), files | content)
    for way in (lambda: load_tokenizer(path), lambda: list(engine_stream(path, "ä", 2))):
        with pytest.raises(
            CorruptError, match=r"tokenizer\.json is not JSON that can be read \(.*(is no|twice)"
        ):
            way()


def test_a_token_of_a_long_text_is_not_decoded_again_and_again(tmp_path: Path) -> None:
    """30 tokens of an artifact of 5 MB were 100 MB of text: each number may stand for what takes a thousandth of its letters
    in the file. The short way for plain prompts has a decoder of its own."""
    vocab = {
        ("a" * 70_000 if number == 5 else word): number for word, number in EXAMPLE["model"]["vocab"].items()
    }
    parts = {"model": EXAMPLE["model"] | {"vocab": vocab, "merges": []}}
    path = file_with(tmp_path / "m.nstf", **parts)
    with pytest.raises(UnsupportedError, match="times as long by its longest token and its decoder"):
        list(engine_stream(path, "a", 2))


def test_words_from_another_file_are_counted_too(tmp_path: Path) -> None:
    path = tmp_path / "m.nstf"
    config = {"tokenizer_class": "BertTokenizer"}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    for last, good in (("b", True), ("a" * 70_000, False)):
        files = {
            f"{k}.json": json.dumps(v).encode() for k, v in (("config", LLAMA), ("tokenizer_config", config))
        }
        write_artifact(path, tensors(), files | {"vocab.txt": "\n".join([*words, last]).encode()})
        if good:
            load_tokenizer(path)
        else:
            with pytest.raises(UnsupportedError, match="70000 bytes of a word in its vocab"):
                load_tokenizer(path)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("tokenizer_config.json", {"extra_special_tokens": {"a_token": "x" * 70_000}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1000": {"content": "x" * 70_000}}}),
        ("special_tokens_map.json", {"sep_token": "x" * 70_000}),
        ("added_tokens.json", {"x" * 70_000: 1000}),
    ],
)
def test_a_long_token_of_the_settings_is_counted_too(
    tmp_path: Path, file: str, settings: dict[str, Any]
) -> None:
    folder = Path(__file__).parents[2] / "examples" / "tiny_llama" / "model"
    files = {
        name: (folder / name).read_bytes()
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json")
    }
    before = json.loads(files[file]) if file in files else {}
    with pytest.raises(UnsupportedError, match="longest token"):
        tokenizer_files.tokenizer_from_files(files | {file: json.dumps(before | settings).encode()}, "here")


def test_words_of_any_length_are_not_looked_through(tmp_path: Path) -> None:
    """8,000 letters took 14 s, and twice as many eight times as long."""
    model = {
        "type": "WordPiece",
        "unk_token": "u",
        "continuing_subword_prefix": "##",
        "vocab": {"u": 0, "a": 1, "##a": 2},
    }
    parts = {"pre_tokenizer": None, "decoder": None, "added_tokens": []}
    path = file_with(tmp_path / "m.nstf", model=model | {"max_input_chars_per_word": 10**9}, **parts)
    with pytest.raises(UnsupportedError, match="words of up to 1000000000 letters"):
        load_tokenizer(path)
    load_tokenizer(file_with(tmp_path / "n.nstf", model=model | {"max_input_chars_per_word": 100}, **parts))


def test_rules_from_another_file_are_counted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of characters of a sentencepiece model, where its package is installed."""
    made = load_tokenizer(file_with(tmp_path / "m.nstf"))
    made.backend_tokenizer.normalizer = tokenizers.normalizers.Replace("a", "b" * 70_000)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: made)
    with pytest.raises(UnsupportedError, match="times as long by its normalizer"):
        load_tokenizer(file_with(tmp_path / "m.nstf"))


def test_rules_of_known_tokenizers_pass() -> None:
    marks = [
        {"type": "Replace", "pattern": {"String": a}, "content": b}
        for a, b in (("…", "..."), ("“", '"'), ("—", "--"))
    ]
    spaces = [
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        {"type": "Prepend", "prepend": "▁"},
    ]
    check_growth(
        json.dumps(EXAMPLE | {"normalizer": {"type": "Sequence", "normalizers": marks + spaces}}).encode(),
        "x",
    )


def test_added_tokens_are_counted_as_a_normalizer_leaves_them() -> None:
    """The library applies it to each at loading: 1,500 of two letters, in 65 KB, took 3.5 GB."""
    added = [{"id": 500 + i, "content": f"{i}a", "normalized": True} for i in range(1500)]
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 32_000}
    with pytest.raises(UnsupportedError, match=r"can make \S+e\+08 letters of the tokens that are added"):
        check_growth(json.dumps(EXAMPLE | {"normalizer": longer, "added_tokens": added}).encode(), "x")
    special = [token | {"normalized": False} for token in added]
    check_growth(json.dumps(EXAMPLE | {"normalizer": longer, "added_tokens": special}).encode(), "x")
    # XLNet's, with as many tokens of a user.
    kinds = [{"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")]
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    known = {"type": "Sequence", "normalizers": [*kinds, spaces]}
    check_growth(json.dumps(EXAMPLE | {"normalizer": known, "added_tokens": added}).encode(), "x")


class _Broken:
    """A tokenizer that panics when it decodes."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *words: Any, **options: Any) -> Any:
        return self._tokenizer(*words, **options)

    def decode(self, *_: Any, **__: Any) -> str:
        raise PanicException("index out of bounds")


class PanicException(BaseException):
    """As pyo3's, which cannot be imported."""


def test_a_panic_while_a_text_is_decoded_ends_it_with_one_line(tmp_path: Path) -> None:
    # The generating thread fell over it a second time while it said so, and the caller waited without end.
    path = file_with(tmp_path / "m.nstf")
    broken = _Broken(load_tokenizer(path))
    with pytest.raises(UnsupportedError, match="cannot decode its tokens: index out of bounds"):
        list(stream(load(path), broken, "!", 2))
    with pytest.raises(UnsupportedError, match="cannot decode its tokens"):
        list(pieces(broken, [1, 2]))


def test_a_setting_that_every_call_would_stumble_over_is_refused(tmp_path: Path) -> None:
    path = file_with(tmp_path / "m.nstf", {**SETTINGS, "model_max_length": "x"})
    with pytest.raises(UnsupportedError, match="model_max_length is 'x', expected a number"):
        load_tokenizer(path)


def test_no_memory_for_a_tokenizer_is_not_its_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    path = file_with(tmp_path / "m.nstf")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", full)
    with pytest.raises(NstfError, match="not enough memory for its tokenizer") as raised:
        load_tokenizer(path)
    assert raised.value.exit_code == 1


def test_a_keyboard_interrupt_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(_: Any) -> None:
        raise KeyboardInterrupt

    path = file_with(tmp_path / "m.nstf")
    monkeypatch.setattr(tokenizer_files, "_check_settings", pressed)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(path)


TEMPLATES = ["{{ 1 / 0 }}", "{{ range(10 ** 9) }}", "{{ raise_exception('no') }}",
             "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"]  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_a_chat_template_raises_is_one_line(tmp_path: Path, template: str) -> None:
    path = file_with(tmp_path / "m.nstf", {**SETTINGS, "chat_template": template})
    with pytest.raises(UnsupportedError, match="chat template refuses these messages: "):
        list(stream(load(path), load_tokenizer(path), "hello", 2, chat=True))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    from nstf.integrations.serve.prompts import Prompts
    from nstf.runtime.artifact import open_artifact

    folder = tmp_path_factory.mktemp("prompts")

    def of(**parts: Any) -> Any:
        settings = {**SETTINGS, "chat_template": parts.pop("template", "{{ messages[0].content }}")}
        with open_artifact(file_with(folder / "m.nstf", settings, **parts)) as artifact:
            return Prompts(artifact)

    return of


def test_what_a_template_writes_is_refused_where_it_is_too_long(prompts: Callable[..., Any]) -> None:
    """It was tokenised: 12 s and 1.1 GiB for five million letters of a template of 17."""
    from nstf.errors import UsageError
    from nstf.integrations.serve.errors import ApiError
    from nstf.runtime.generate import _inputs

    message = [{"role": "user", "content": "a"}]
    made = prompts(template='{{ "a" * 1000000 }}')
    with pytest.raises(ApiError, match="longer than this server's context of 16 tokens"):
        made.chat(message, 16)
    with pytest.raises(UsageError, match="the prompt has 1000000 characters"):
        _inputs(made.own, "a", True, 16)


def test_a_server_says_what_its_tokenizer_and_template_raise(prompts: Callable[..., Any]) -> None:
    from nstf.integrations.serve.errors import ApiError

    message = [{"role": "user", "content": "a" * 40 + "c"}]
    for template in TEMPLATES:
        with pytest.raises(ApiError, match="chat template refuses these messages"):
            prompts(template=template).chat(message, 512)
    for parts in LATER.values():
        made = prompts(**parts)
        for way in (lambda m=made: m.chat(message, 512), lambda m=made: m.text("a" * 40 + "c")):
            with pytest.raises(ApiError, match="tokenizer cannot encode this text"):
                way()


def test_a_panic_does_not_end_the_thread_that_decodes() -> None:
    from nstf.integrations.serve.output import Answer
    from nstf.runtime.token_sampler import Settings

    sent: list[Any] = []
    answer = Answer([1], 2, Settings(0.0), frozenset(), (), None, sent.append)

    class Stream:
        def step(self, *_: Any) -> str:
            raise PanicException

    for _ in range(2):
        answer._stream = Stream()
        answer.take(1)
    assert [p.reason for p in sent] == ["length"]


def test_a_panic_that_nobody_expected_is_one_line_of_the_command() -> None:
    from nstf_convert.cli.messages import explain

    code, said = explain(PanicException("index\nout of bounds"), ["convert", "m"])
    assert code == 6 and said == "a library gives up on a file of the model: index out of bounds"


@pytest.mark.parametrize("name", ["tokenizer.json", "byte_maps.json", "vocab.json"])
def test_a_file_of_words_holds_no_more_values_than_memory_bears(name: str) -> None:
    """200 MB of empty lists, packed into an artifact of 252 KB, took six gigabytes; a mark for every 16 bytes still four."""
    content = b"[" + b"[              ]," * (1 << 21) + b"[]]"
    with pytest.raises(CorruptError, match=f"its {name} holds [0-9]+ values, and 4194304 at most"):
        check_growth(content, "m") if name == "tokenizer.json" else without_code(name, content, "m")


def piece(text: bytes) -> bytes:
    """A piece of a model of sentencepiece: field 1 of the file, whose field 1 is its text."""
    inner = b"\x0a" + varint(len(text)) + text
    return b"\x0a" + varint(len(inner)) + inner


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.json", json.dumps({"x": 0, "a" * 5000: 1}).encode()),
        ("vocab.json", json.dumps({"x": 0, 'a"' * 2500: 1}).encode()),
        ("byte_maps.json", json.dumps({"x": 0, "aa " * 2000: "61"}).encode()),
        ("tokenizer.model", piece(b"x") + piece(b"a\n" * 3000)),
        ("source.spm", piece(b"x") + piece(b"a\n" * 3000)),
        ("merges.txt", b"#version: 0.2\n" + b"a b\n" * (MOST_LINES + 1)),
        ("vocab.txt", b"#version: 0.2\n" + b"a b\r" * (MOST_LINES + 1)),
        ("tokenizer.model", b"YQ== 0\n" * (MOST_LINES + 1)),
        ("vocab.txt", b"x\n" + b"a" * 5000),
    ],
)
def test_words_that_take_time_by_their_square_are_refused(name: str, content: bytes) -> None:
    """48 KB of an artifact took 100 s; a merge that stands there eight million times took gigabytes."""
    check_words(name, piece(b"x") if name.endswith((".model", ".spm")) else content[:20], "m")
    with pytest.raises(UnsupportedError, match=f"in its {name}, more than"):
        check_words(name, content, "m")


@pytest.mark.parametrize(
    "between",
    [b"\x7b\x7c", b"\x8a\x80\x80\x80\x10\x00", b"\x0a\xff\x01"],
    ids=["a group", "a field of a number of 33 bits", "a piece that ends behind the file"],
)
def test_pieces_of_a_model_are_all_found_or_it_is_refused(between: bytes) -> None:
    """protobuf passes over an empty group, behind which a piece of 100,000 letters was not seen."""
    check_words("tokenizer.model", piece(b"x") + piece(b"y"), "m")
    with pytest.raises(CorruptError, match=r"its tokenizer\.model is no model of sentencepiece's"):
        check_words("tokenizer.model", piece(b"x") + between + piece(b"a"), "m")


@pytest.mark.parametrize(
    ("name", "tokenizer"), [("prophetnet.tokenizer", "ProphetNet"), ("byte_maps.json", "MyT5")]
)
def test_every_list_of_words_is_looked_at(name: str, tokenizer: str) -> None:
    """145 KB of lines took 1.1 GB, 77 KB of one rule 3.7 GB: names that nothing was known of."""
    content = b"\n" * (MOST_LINES + 1) if name.endswith("tokenizer") else b'{"' + b"aa " * 2000 + b'": 0}'
    files = {
        name: content,
        "tokenizer_config.json": b'{"tokenizer_class": "%sTokenizer"}' % tokenizer.encode(),
    }
    with pytest.raises(UnsupportedError, match=f"in its {name}, more than"):
        tokenizer_files.tokenizer_from_files(files, "m")


RULES = {"decompose_map": {"41": "61 41"}, "merge_map": {"61 62 63 64": "05 90 00"}}


def test_byte_maps_are_rules_and_no_names_of_files(tmp_path: Path) -> None:
    """transformers opened the file of that name: a pipe, /dev/zero."""
    settings = {"tokenizer_config.json": b'{"tokenizer_class": "MyT5Tokenizer"}'}

    def made(maps: Any) -> Any:
        return tokenizer_files.tokenizer_from_files(
            {**settings, "byte_maps.json": json.dumps(maps).encode()}, "m"
        )

    assert made(RULES).tokenize("abcd") == ["05", "90", "00"]
    os.mkfifo(tmp_path / "pipe")
    for key in RULES:
        for value in (str(tmp_path / "pipe"), None, [], {"61": ["62"]}):
            with pytest.raises(
                UnsupportedError, match="decompose_map and merge_map must be objects of texts"
            ):
                made(RULES | {key: value})
    with pytest.raises(UnsupportedError, match="must be objects of texts"):
        made([])
    with pytest.raises(CorruptError, match="not JSON that can be read"):
        without_code("byte_maps.json", b"{", "m")


def test_rules_of_byte_maps_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf.runtime import tokenizer_words

    monkeypatch.setattr(tokenizer_words, "MOST_MAPPED", 10)
    without_code("byte_maps.json", json.dumps(RULES).encode(), "m")
    more = RULES | {"merge_map": {"61 62 63 64": "05 90 00 00"}}
    with pytest.raises(UnsupportedError, match=r"11 bytes in the rules of its byte_maps\.json, more than 10"):
        without_code("byte_maps.json", json.dumps(more).encode(), "m")


@pytest.mark.parametrize(
    ("name", "stated", "said"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"20000000": {"content": "<x>"}}},
            "as the number of a token",
        ),
        *(
            ("tokenizer_config.json", {"added_tokens_decoder": {key: {}}}, "as the number of a token")
            for key in ("+20000000", "2_0000000", " 20000000", "0" * 20 + "20000000", "9" * 400)
        ),
        ("added_tokens.json", {"<x>": 20_000_000}, "as the number of a token"),
        ("added_tokens.json", {"<x>": 10**400}, "as the number of a token"),
        ("preprocessor_config.json", {"sampling_rate": 10**400}, "elements of a table"),
        ("tokenizer_config.json", {"extra_special_tokens": ["a" * 2000] * 600}, "letters of tokens"),
        ("added_tokens.json", {"a" * 2_000_000: 5}, "letters of tokens"),
        *(
            (name, {key: 1 << 28}, "tokens made for a number")
            for name, key in (
                ("tokenizer_config.json", "extra_ids"),
                ("tokenizer_config.json", "max_depth"),
                ("tokenizer_config.json", "num_madeup_words"),
                ("processor_config.json", "num_patch_index_tokens"),
                ("processor_config.json", "image_seq_length"),
            )
        ),
        ("processor_config.json", {"num_dmel_bins": 1 << 20}, "elements of a table"),
        ("tokenizer_config.json", {"bos_token": "a" * 2_000_000}, "letters of tokens"),
        ("special_tokens_map.json", {"pad_token": {"content": "a" * 2_000_000}}, "letters of tokens"),
        (
            "tokenizer_config.json",
            {"model_specific_special_tokens": {"image_token": "a" * 2_000_000}},
            "letters",
        ),
    ],
)
def test_tokens_that_settings_add_have_limits(name: str, stated: dict[str, Any], said: str) -> None:
    """Each letter takes 232 bytes in tokenizers of Python, and some fill every number below a token's."""
    check_added({"added_tokens_decoder": {"5": {"content": "<x>"}}}, "tokenizer_config.json", "m")
    with pytest.raises(UnsupportedError, match=said):
        without_code(name, json.dumps(stated).encode(), "m")


def test_tokens_of_several_settings_are_counted_together() -> None:
    """Three files of a million letters each were taken. The same tokens in each are there once."""
    several = {letter: [f"{letter}{i:02d}" + letter * 30_000 for i in range(20)] for letter in ("a", "b")}
    settings = {"tokenizer_class": "ByT5Tokenizer"}

    def files(first: str, second: str) -> dict[str, bytes]:
        stated = {
            "tokenizer_config.json": {**settings, "extra_special_tokens": several[first]},
            "added_tokens.json": {word: 300 + i for i, word in enumerate(several[second])},
        }
        return {name: json.dumps(value).encode() for name, value in stated.items()}

    with pytest.raises(UnsupportedError, match="letters of tokens that its settings add, more than 1048576"):
        tokenizer_files.tokenizer_from_files(files("a", "b"), "m")
    assert tokenizer_files.tokenizer_from_files(files("a", "a"), "m") is not None


def test_tokens_that_a_tokenizer_in_python_adds_have_a_limit() -> None:
    """They take time by their square: 8,000, in 65 KB, 10 s."""
    stated = {"tokenizer_class": "ByT5Tokenizer", "extra_special_tokens": [f"<{i}>" for i in range(8193)]}
    files = {"tokenizer_config.json": json.dumps(stated).encode()}
    with pytest.raises(
        UnsupportedError, match=r"8193 tokens that its settings add without a tokenizer\.json"
    ):
        tokenizer_files.tokenizer_from_files(files, "m")


def test_rules_that_change_added_tokens_have_a_limit_together() -> None:
    """Each is applied to each when a tokenizer is loaded: 8,000 of both, in 100 KB, took 18 s."""
    tokens = [{"id": i, "content": "letters"} for i in range(1000)]
    stated = {"normalizer": {"type": "Sequence", "normalizers": [{"type": "StripAccents"}] * 30}}
    check_growth(json.dumps({**stated, "added_tokens": tokens}).encode(), "m")
    stated["normalizer"]["normalizers"] *= 400
    with pytest.raises(UnsupportedError, match="letters of added tokens that the rules"):
        check_growth(json.dumps({**stated, "added_tokens": tokens}).encode(), "m")


@pytest.mark.parametrize("key", ["continuing_subword_prefix", "end_of_word_suffix", "unk_token"])
def test_what_a_model_puts_around_its_pieces_has_a_limit(key: str) -> None:
    """A prefix of 100 MB, packed into 145 KB, took 0.05 s for each letter of a text."""
    stated = {"model": {"type": "WordPiece", "vocab": {"a": 0}, key: "##"}}
    check_growth(json.dumps(stated).encode(), "m")
    stated["model"][key] = "#" * 5000
    with pytest.raises(UnsupportedError, match=r"letters of a word in its tokenizer\.json"):
        check_growth(json.dumps(stated).encode(), "m")


@pytest.mark.parametrize(
    ("part", "several"),
    [
        ("normalizer", "normalizers"),
        ("pre_tokenizer", "pretokenizers"),
        ("decoder", "decoders"),
        ("post_processor", "processors"),
        ("model", ""),
    ],
)
def test_types_of_rules_are_texts(part: str, several: str) -> None:
    """The library takes an object with one key for its key: 28 rules that double a text ended the process at 12 GB."""
    rule = {"type": {"ByteLevel": None}}
    for stated in ({part: rule}, *([{part: {"type": "Sequence", several: [rule]}}] if several else [])):
        with pytest.raises(CorruptError, match="the type of a rule is no text"):
            check_growth(json.dumps(stated).encode(), "m")


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer", "decoder"])
def test_expressions_have_a_limit(part: str) -> None:
    """A class of them takes 26 KB: 400,000 in 60 KB took 9.6 GB."""
    inner = {"type": "Split", "behavior": "Isolated", "invert": False}
    if part != "pre_tokenizer":
        inner = {"type": "Replace", "content": "x"}
    several = {"pre_tokenizer": "pretokenizers", "normalizer": "normalizers", "decoder": "decoders"}[part]
    for count, refused in ((4_000, False), (5_000, True)):
        rules = [{**inner, "pattern": {"Regex": "[\\W]" * (count // 2)}}] * 2
        content = json.dumps({part: {"type": "Sequence", several: rules}}).encode()
        if not refused:
            check_growth(content, "m")
            continue
        with pytest.raises(UnsupportedError, match="expressions of 20000 letters, more than 16384"):
            check_growth(content, "m")


def test_a_table_of_sound_has_a_limit() -> None:
    """Whisper's bands by frequencies took 5.9 GB for one number in 47 KB."""
    known = {"feature_size": 128, "n_fft": 400, "sampling_rate": 16000, "chunk_length": 30}
    check_added(known, "preprocessor_config.json", "m")
    with pytest.raises(UnsupportedError, match="elements of a table of sound"):
        check_added(known | {"feature_size": 12000, "n_fft": 12000}, "preprocessor_config.json", "m")


@pytest.mark.parametrize(
    "stated",
    [
        {"feature_extractor": {"feature_size": 12000, "n_fft": 24000}},
        {"feature_extractor_type": "Gemma3nAudioFeatureExtractor", "sampling_rate": 64_000_000},
        {
            "feature_extractor_type": "Gemma3nAudioFeatureExtractor",
            "frame_length_ms": 4.0e6,
            "sampling_rate": 16000,
        },
        {"feature_extractor_type": "SpeechT5FeatureExtractor", "win_length": 50_000, "sampling_rate": 16000},
        {
            "feature_extractor_type": "UnivNetFeatureExtractor",
            "filter_length": 1_000_000,
            "num_mel_bins": 500,
        },
        {"melspec_kwargs": {"n_fft": 400_000, "n_mels": 500}},
        {"feature_size": float("inf")},
        # A class takes samples of its own where none are stated, or others: 9.7 GB in 48 KB.
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 3_000_000},
        {
            "feature_extractor_type": "ClapFeatureExtractor",
            "feature_size": 100_000,
            "n_fft": 1,
            "sampling_rate": 1,
        },
        {"feature_extractor_type": "MusicgenMelodyFeatureExtractor", "num_chroma": 2000},
    ],
)
def test_tables_of_sound_are_found_inside_of_settings_and_by_their_times(stated: dict[str, Any]) -> None:
    """A processor's settings hold those of its extractor; Gemma 3n and SpeechT5 state windows by time: 10.7 GB in 55 KB."""
    with pytest.raises(UnsupportedError, match="elements of a table of sound"):
        check_added(stated, "processor_config.json", "m")


def test_the_extractors_of_transformers_stay_far_below_the_limit() -> None:
    import transformers

    seen = 0
    for name in sorted(n for n in dir(transformers) if n.endswith("FeatureExtractor")):
        try:
            made = getattr(transformers, name)()
        except (
            ImportError,
            TypeError,
            ValueError,
            OSError,
        ):  # another package, arguments, AutoFeatureExtractor
            continue
        check_added({"feature_extractor": made.to_dict()}, "processor_config.json", name)
        seen += 1
    assert seen > 25
    check_added({"feature_size": 640, "sampling_rate": 16000}, "preprocessor_config.json", "Gemma 4's")
    check_added(
        {"n_fft": 16384, "num_chroma": 12, "feature_size": 12}, "preprocessor_config.json", "Musicgen"
    )


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"model": {"type": "Unigram", "vocab": [["a" * 5000, 0.0]]}}, "letters of a word"),
        ({"model": {"type": "BPE", "vocab": {"a" * 5000: 0}}}, "letters of a word"),
        (
            {"model": {"type": "Unigram", "vocab": [[f"{i:04d}" * 1000, 0.0] for i in range(1100)]}},
            "bytes of words",
        ),
        # Of four bytes each, of which the tree is made: 6.2 GB in 160 KB.
        (
            {"model": {"type": "Unigram", "vocab": [[chr(0x1F600 + i) * 4000, 0.0] for i in range(300)]}},
            "bytes of words",
        ),
        ({"added_tokens": [{"id": 0, "content": "a" * 2000}] * 600}, "letters of tokens"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 280_000}}, "objects"),
    ],
)
def test_words_of_a_tokenizer_json_have_limits(stated: dict[str, Any], said: str) -> None:
    """A trie takes 340 bytes for a letter: 71 KB, packed, took 6.8 GB, tokens that the file adds 8.2 GB and an abort."""
    with pytest.raises(UnsupportedError, match=said):
        check_growth(json.dumps(stated).encode(), "m")


def test_settings_have_limits_in_an_artifact_too() -> None:
    """630 KB of an artifact, packed, took 2.9 GB and 70 s: blanks were counted as if they held values."""
    blanks = b"[" + b"[]," * 1_400_000 + b"[]" + b" " * (24 << 20) + b"]"
    with pytest.raises(CorruptError, match="holds more than 1310720 values"):
        without_code("tokenizer_config.json", b'{"a": ' + blanks + b"}", "m")
    tokens = {str(i): {"content": f"<{i}>", "lstrip": False, "special": True} for i in range(90_000)}
    many = json.dumps({"added_tokens_decoder": tokens}).encode()
    assert without_code("tokenizer_config.json", many, "m") == many
    template = json.dumps({"chat_template": "a, [b], " * 200_000}).encode()
    assert without_code("tokenizer_config.json", template, "m") == template
    with pytest.raises(CorruptError, match=r"special_tokens_map\.json has 33554436 bytes, above 33554432"):
        without_code("special_tokens_map.json", b"{}" + b" " * ((32 << 20) + 2), "m")
