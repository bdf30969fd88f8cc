"""Reading config.json: an allow-list, because its fields have made libraries load and run code.

CVE-2026-4372 (`_attn_implementation_internal` named a hub kernel) and CVE-2026-5241 (a nested
`trust_remote_code`) are the reasons. Numbers, booleans and lists of them are kept under any plain key: they
cannot name anything. Text is kept only under a key that the model's own config class declares (or a known older
spelling) and only when it looks like a single word, which may have `|` (DeBERTa's `p2c|c2p`) and `*` (Nemotron's `M-M*-`).
"""

import re
from collections.abc import Mapping
from typing import Any

from nstf.errors import CorruptError, UnsupportedError
from nstf.runtime.artifact.config import MAX_LABELS
from nstf.runtime.skeleton import ARGUMENTS_OF, is_private_flag, leads_away

MAX_DEPTH = 6
MAX_ITEMS = 200_000
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,79}")
WORD = re.compile(r"[A-Za-z0-9_.+\-|*]{0,160}")

DENIED = frozenset(
    "attn_implementation auto_map base_model_name_or_path cache_dir code_revision commit_hash "
    "compression_config "
    "custom_pipelines experts_implementation gguf_file kernel_config model_name_or_path name_or_path "
    "pretrained_model_name_or_path "
    "quantization_config revision rng_state task_specific_params tokenizer_file trust_remote_code "
    "use_kernels "
    "use_pretrained_backbone use_timm_backbone_pretrained".split()
)
# Text under these keys is kept for every model: older spellings, what names the architecture, and what modeling files read
# although no config class declares it (DeBERTa's norms and convolution, DBRX's activation, stages of a backbone, kinds of
# layers a letter each).
TEXT_KEYS = frozenset(
    "model_type architectures torch_dtype dtype hidden_act hidden_activation activation_function "
    "position_embedding_type "
    "rope_type type rope_scaling rope_parameters layer_types problem_type transformers_version "
    "tokenizer_class "
    "feed_forward_proj dense_act_fn scoring_func topk_method mlp_layer_types norm_type attention_type "
    "norm_rel_ebd conv_act ffn_act_fn summary_type summary_activation out_features stage_names "
    "hybrid_override_pattern mtp_hybrid_override_pattern index_topk_pattern".split()
)
LABELS = frozenset(("id2label", "label2id"))
LABEL_CHARS = 200
# The mark of a token in settings, with what it does to the text around it.
ADDED_TOKEN = "__type"


class CutLabels(str):
    """Among what was left out: whose labels were cut. By what it is, since a key of the file may read like it."""


def filter_config(raw: object, where: str) -> tuple[dict[str, Any], list[str]]:
    """The config that may be used, and what was left out (sorted, `a.b` for nested keys).

    Raises CorruptError, UnsupportedError.
    """
    if not isinstance(raw, dict):
        raise CorruptError(f"{where} is not a JSON object; download the checkpoint again")
    refuse_quantised(raw, where)
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    if not isinstance(model_type, str | None):
        raise CorruptError(f"{where}: model_type is {str(model_type)[:40]}, expected a name")
    if not isinstance(architectures, list | None) or not all(isinstance(a, str) for a in architectures or ()):
        raise CorruptError(f"{where}: architectures is {str(architectures)[:40]}, expected a list of names")
    dropped: list[str] = []
    known = known_fields(model_type)
    config = _filter(raw, known, where, "", 0, dropped)
    return config, sorted(dropped)


def refuse_quantised(raw: Mapping[str, Any], where: str) -> None:
    """Raises UnsupportedError when the config says that the weights are already quantised."""
    for key in ("quantization_config", "compression_config"):
        value = raw.get(key)
        if not value:
            continue
        method = str(value.get("quant_method", "unnamed"))[:40] if isinstance(value, dict) else "unnamed"
        if method == "nstf":
            hint = "it is an export of nstf: give the original model, or open the .nstf file"
        else:
            hint = "give the original (16- or 32-bit) model"
        raise UnsupportedError(f"{where} says the weights are already quantised ({method!r}); {hint}")
    for name, value in raw.items():
        if isinstance(value, dict) and name.endswith("_config"):
            refuse_quantised(value, where)


def known_fields(model_type: str | None) -> frozenset[str]:
    """The names that the config class of `model_type` and its sub-configs declare; none for an unknown one."""
    from transformers import CONFIG_MAPPING

    if model_type is None or model_type not in CONFIG_MAPPING:
        return frozenset()
    names: set[str] = set()
    pending, seen = [CONFIG_MAPPING[model_type]], set()
    while pending:
        cls = pending.pop()
        if cls in seen or not hasattr(cls, "model_type"):
            continue
        seen.add(cls)
        names |= set(getattr(cls, "__dataclass_fields__", ())) | set(getattr(cls, "attribute_map", {}))
        names |= set(getattr(cls.__init__, "__annotations__", ()))
        pending += [c for c in getattr(cls, "sub_configs", {}).values() if isinstance(c, type)]
    return frozenset(names)


def _filter(
    raw: Mapping[str, Any],
    known: frozenset[str],
    where: str,
    path: str,
    depth: int,
    dropped: list[str],
) -> dict[str, Any]:
    if depth > MAX_DEPTH or len(raw) > MAX_ITEMS:
        raise CorruptError(f"{where}: {path or 'the object'} is nested too deeply or has too many entries")
    kept = {}
    for key, value in raw.items():
        name = f"{path}.{key}" if path else key
        if key in LABELS and isinstance(value, dict):
            kept[key], cut = _labels(key, value, where)
            if cut:
                dropped.append(CutLabels(f"{name} (the end of {cut} long label{'s' * (cut != 1)})"))
        elif is_private_flag(key, value):
            kept[key] = value
        elif not KEY.fullmatch(key) or key in DENIED or key.startswith("_"):
            dropped.append(name[:120])
        elif isinstance(value, dict):
            kept[key] = _filter(value, _fields_inside(value, known), where, name, depth + 1, dropped)
        elif _allowed(value, _text_allowed(key, path, known), known, depth):
            _check_number(key, value, where)
            kept[key] = no_token(key, value)
            if kept[key] is None and value is not None:
                dropped.append(f"{name} (an empty list)")
        else:
            dropped.append(name[:120])
    return kept


def _fields_inside(value: Mapping[str, Any], known: frozenset[str]) -> frozenset[str]:
    """The names that may have text in a sub-config: of its own class, too, where the outer one takes any (a backbone, a
    speech encoder). Not those of a wrapper of timm, which builds what it names."""
    kind = value.get("model_type")
    return known if not isinstance(kind, str) or kind.startswith("timm") else known | known_fields(kind)


def _text_allowed(key: str, path: str, known: frozenset[str]) -> bool:
    return key in TEXT_KEYS or key in known or (key == "name" and path.endswith("ffn_act_fn"))  # DBRX


def _allowed(value: Any, text: bool, known: frozenset[str], depth: int) -> bool:
    if value is None or isinstance(value, bool | int | float):
        return True
    if isinstance(value, str):
        return text and WORD.fullmatch(value) is not None
    if isinstance(value, list):
        return (
            depth <= MAX_DEPTH
            and len(value) <= MAX_ITEMS
            and all(_allowed(v, text, known, depth + 1) for v in value)
        )
    if isinstance(value, dict):
        return depth <= MAX_DEPTH and all(
            KEY.fullmatch(k)
            and k not in DENIED
            and _allowed(v, text and _text_allowed(k, "", known), known, depth + 1)
            for k, v in value.items()
        )
    return False


def _check_number(key: str, value: Any, where: str) -> None:
    if key in ("num_labels", "num_classes") and isinstance(value, int) and not 0 <= value <= MAX_LABELS:
        raise CorruptError(f"{where}: {key} is {value}; at most {MAX_LABELS} are accepted")


def no_token(key: str, value: Any) -> Any:
    """A setting's value; null, which says the same and is read everywhere, for an empty list of tokens."""
    return None if value == [] and key.endswith("_token_id") else value


def _labels(key: str, value: Mapping[str, Any], where: str) -> tuple[dict[str, Any], int]:
    """The labels with text of at most LABEL_CHARS, and how many were cut."""
    if len(value) > MAX_LABELS:
        raise CorruptError(f"{where}: more than {MAX_LABELS} labels")
    whole = {k: v if isinstance(v, int) else str(v) for k, v in value.items()}
    kept = {k[:LABEL_CHARS]: v if isinstance(v, int) else v[:LABEL_CHARS] for k, v in whole.items()}
    merged = [
        len(set(map(str, after))) < len(set(map(str, before)))
        for after, before in ((kept, whole), (kept.values(), whole.values()))
    ]
    if any(merged):
        raise UnsupportedError(
            f"{where}: two names in {key} are alike in their first {LABEL_CHARS} letters; shorten them"
        )
    texts = [text for pair in whole.items() for text in pair if isinstance(text, str)]
    return kept, sum(len(text) > LABEL_CHARS for text in texts)


def strip_code(value: Any, depth: int = 0, arguments: bool = True) -> Any:
    """A tokenizer, generation or processor config without the keys that can lead to code or to another file; text is kept.

    arguments: whether the keys of a dictionary become arguments of a class, not words or tokens.
    """
    if depth > MAX_DEPTH * 4:
        return None
    if isinstance(value, dict):
        return {
            k: strip_code(v, depth + 1, k.endswith(ARGUMENTS_OF)) if type(v) in (dict, list) else v
            for k, v in value.items()
            if k == ADDED_TOKEN
            # Files that are null or empty lead nowhere.
            or not (k in DENIED or k.startswith("_") or (v and leads_away(k, arguments)))
        }
    return [strip_code(v, depth + 1, False) for v in value] if isinstance(value, list) else value
