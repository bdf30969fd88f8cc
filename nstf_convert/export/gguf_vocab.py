"""The tokenizer of an artifact as GGUF's arrays: tokens, their types, merges, special ids, chat template.

llama.cpp splits text by rules that it knows by name. The name follows here from the splitting patterns of
tokenizer.json; a tokenizer that follows none of the known ones is refused, since other tokens would be a silent loss. Of
older vocabularies (vocab.json with merges.txt, tokenizer.model) transformers makes what tokenizer.json would say.
"""

import json
import re
from pathlib import Path
from typing import Any

from nstf.errors import CorruptError, UnsupportedError
from nstf.runtime.artifact.side_names import CONTENT

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_GPT2 = ("ByteLevel",)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Splitting steps -> llama.cpp's name (src/llama-vocab.cpp).
PATTERNS = {
    _GPT2: "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_LLAMA3, "ByteLevel-"): "llama-bpe",
    (_QWEN2, "ByteLevel-"): "qwen2",
}


def write_vocabulary(writer: Any, folder: Path, vocab_size: int) -> None:
    """Adds the tokenizer of a Hugging Face folder, or says that there is none. Raises UnsupportedError."""
    found = _read(folder)
    if found is None:
        writer.add_tokenizer_model("no_vocab")
        return
    data, config = found
    model = data["model"]
    if model.get("type") != "BPE":
        raise UnsupportedError(
            f"target 'gguf': tokenizers of type {str(model.get('type'))[:40]!r} are not written (BPE is): use "
            "convert_hf_to_gguf.py of llama.cpp on an export to target 'hf'"
        )
    if model.get("byte_fallback"):
        _write_sentencepiece(writer, data, vocab_size)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(splitting(data.get("pre_tokenizer")))
        _write_tokens(writer, data, vocab_size, by_merge=None)
        writer.add_token_merges([_merge(m) for m in model["merges"]])
    _write_special(writer, folder, data, config)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What tokenizer.json says, or would say, and the tokenizer's settings. None without a vocabulary."""
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config = _object(settings) if settings.exists() else {}
    if file.exists():
        return _object(file), config
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    words = [name for name in CONTENT if name in files and not name.startswith("chat_template")]
    if not words:
        return None
    from nstf.runtime.skeleton import harmless
    from nstf.runtime.tokenizer_files import tokenizer_from_files

    if "config.json" in files:  # which can name the tokenizer's class
        files["config.json"] = json.dumps(harmless(json.loads(files["config.json"]))).encode()
    made = tokenizer_from_files(files, "target 'gguf'")
    fast = getattr(made, "backend_tokenizer", None)
    if fast is None:
        raise UnsupportedError(
            f"target 'gguf': of {', '.join(words)} transformers makes no tokenizer.json: use convert_hf_to_gguf.py of "
            "llama.cpp on an export to target 'hf'"
        )
    # Special tokens that no file states are those of the class.
    tokens = {
        kind: getattr(made, kind, None) for kind in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    return json.loads(fast.to_str()), config | {kind: str(t) for kind, t in tokens.items() if t is not None}


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{file.name} is not JSON that can be read ({str(error)[:100]}); convert it again"
        ) from error
    if not isinstance(found, dict):
        raise CorruptError(f"{file.name} is no object; convert it again")
    return found


def splitting(pre_tokenizer: dict[str, Any] | None) -> str:
    """llama.cpp's name of the rules by which text is split. Raises UnsupportedError."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    seen = []
    for step in steps:
        kind = str(step.get("type"))
        if kind == "Split":
            seen.append(str(step["pattern"].get("Regex")))
        elif kind == "ByteLevel":
            seen.append("ByteLevel" if step.get("use_regex", True) else "ByteLevel-")
        elif kind == "Digits" and step.get("individual_digits"):
            seen.append("Digits")
        else:
            seen.append(f"{kind}?")
    found = PATTERNS.get(tuple(seen))
    if found is None:
        raise UnsupportedError(
            f"target 'gguf': the tokenizer splits text by {str(seen)[:120]}, which is none of the rules known here "
            f"({', '.join(PATTERNS.values())}): target 'hf' and llama.cpp's convert_hf_to_gguf.py may know it"
        )
    return found


def _write_tokens(
    writer: Any, data: dict[str, Any], vocab_size: int, by_merge: dict[str, int] | None
) -> None:
    """Tokens and types; by_merge: ranks of merged tokens, for tokenizers whose scores say the order of merges."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [5] * vocab_size  # unused
    for token, i in data["model"]["vocab"].items():
        if not 0 <= i < vocab_size:
            raise UnsupportedError(
                f"target 'gguf': token {token[:40]!r} has id {i}, the table {vocab_size} rows"
            )
        tokens[i] = token
        is_byte = by_merge is not None and len(token) == 6 and token.startswith("<0x") and token[-1] == ">"
        types[i] = BYTE if is_byte else NORMAL
    for entry in data.get("added_tokens", []):
        if not 0 <= entry["id"] < vocab_size:
            continue  # no row of the table: the model cannot read it
        tokens[entry["id"]] = entry["content"]
        types[entry["id"]] = CONTROL if entry.get("special") else USER_DEFINED
    unknown = data["model"].get("unk_token")
    if unknown is not None and unknown in data["model"]["vocab"]:
        types[data["model"]["vocab"][unknown]] = UNKNOWN
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if by_merge is not None:
        writer.add_token_scores([-float(by_merge.get(t, len(by_merge))) for t in tokens])


def _write_sentencepiece(writer: Any, data: dict[str, Any], vocab_size: int) -> None:
    """A tokenizer that came from SentencePiece: its merges become the scores that llama.cpp merges by."""
    prepends = any(map(_prepends, [*_steps(data.get("normalizer")), *_steps(data.get("pre_tokenizer"))]))
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(data["model"]["merges"]):
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        ranks.setdefault(left + right, rank)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    _write_tokens(writer, data, vocab_size, ranks)
    writer.add_add_space_prefix(prepends)


def _steps(stage: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences taken apart."""
    if not isinstance(stage, dict):
        return []
    inner = stage.get("normalizers") or stage.get("pretokenizers")
    return [step for part in inner for step in _steps(part)] if inner else [stage]


def _prepends(step: dict[str, Any]) -> bool:
    """Whether a step puts a blank before the text."""
    if step.get("type") == "Metaspace":
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        return bool(scheme != "never")
    return step.get("type") == "Prepend"


def _merge(merge: Any) -> str:
    """A merge as text; a blank inside a part is written as in llama.cpp's converter."""
    parts = merge if isinstance(merge, list) else merge.split(" ", 1)
    return " ".join("".join(chr(ord(c) + 256) if c == " " else c for c in part) for part in parts)


def _write_special(writer: Any, folder: Path, data: dict[str, Any], config: dict[str, Any]) -> None:
    ids = {**data["model"]["vocab"], **{e["content"]: e["id"] for e in data.get("added_tokens", [])}}
    for kind, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("unk", writer.add_unk_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        token = config.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            add(int(ids[token]))
    writer.add_add_bos_token(adds_first(data, config, ids))
    template = config.get("chat_template")
    separate = folder / "chat_template.jinja"
    if separate.exists():
        template = separate.read_text(encoding="utf-8")
    _write_templates(writer, template)


def _write_templates(writer: Any, templates: Any) -> None:
    """One template, or several by name. Not by gguf's own function, whose order of names changes from run to run."""
    if isinstance(templates, str):
        templates = [{"name": "default", "template": templates}]
    found: dict[str, str] = {}
    for each in templates if isinstance(templates, list) else ():
        name, text = (each.get(key) if isinstance(each, dict) else None for key in ("name", "template"))
        if name and isinstance(name, str) and isinstance(text, str):
            found.setdefault(re.sub(r"[^A-Za-z0-9]", "_", name), text)
    if "default" in found:
        writer.add_chat_template(found.pop("default"))
    for name, text in found.items():
        writer.add_string(f"tokenizer.chat_template.{name}", text)
    if found:
        writer.add_array("tokenizer.chat_templates", sorted(found))


def adds_first(data: dict[str, Any], config: dict[str, Any], ids: dict[str, int]) -> bool:
    """Whether the tokenizer puts its first token before every text."""
    token = config.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    processor = data.get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        first = (step.get("single") or [{}])[0]
        if first.get("SpecialToken", {}).get("id") == token and token is not None:
            return True
    return False
