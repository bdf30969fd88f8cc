"""The model card beside an export: README.md with what hubs and people ask first."""

import json
import re
from collections.abc import Mapping
from typing import Any

from nstf.runtime.artifact import Artifact
from nstf_convert import stated
from nstf_convert.export.plan import ExportPlan

_LOAD = {
    "hf": 'from transformers import {cls}\n\nmodel = {cls}.from_pretrained(".")',
    "transformers": "import nstf.integrations.transformers\n"
    'from transformers import {cls}\n\nmodel = {cls}.from_pretrained(".")',
    "compressed-tensors": "# pip install transformers compressed-tensors; vLLM: vllm serve <this folder>\n"
    'from transformers import {cls}\n\nmodel = {cls}.from_pretrained(".")',
    "gguf": "# pip install llama-cpp-python; or llama-cli -m {file}\nfrom llama_cpp import Llama\n\n"
    'model = Llama("{file}")',
    "onnx": '# pip install onnxruntime\nimport onnxruntime\n\nsession = onnxruntime.InferenceSession("{file}")',
}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_PLAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.+/-]| (?! )){0,198}")
_LIBRARY = {"gguf": "llama.cpp", "onnx": "onnxruntime", "hf": "transformers"}


def card(artifact: Artifact, plan: ExportPlan, config: Mapping[str, Any], file: str, command: str) -> str:
    """The text of README.md. file: the main file's name; command: as it was typed, without paths of folders."""
    facts = artifact.manifest.provenance
    base = _base(facts, config)
    lines = ["---", f"library_name: {_LIBRARY.get(plan.target, 'transformers')}"]
    if base and "/" in base:
        lines += [f"base_model: {_yaml(base)}", "base_model_relation: quantized"]
    licence = facts.get("license") or config.get("license")
    if isinstance(licence, str):
        lines.append(f"license: {_yaml(licence)}")
    lines += [
        "tags:",
        "- nstf",
        f"- {plan.target}",
        "---",
        "",
        f"# {_line(base or config.get('model_type', 'Model'))}, {plan.target}",
    ]
    lines += ["", f"Compressed with {_line(facts.get('tool', 'nstf'))} and written by `{command}`.", ""]
    if not isinstance(licence, str):
        lines += ["The source named no licence: that of the base model holds.", ""]
    lines += ["## Load it", "", "```python", _load(plan, config, file), "```", ""]
    lines += ["## Bytes", "", "| format | bytes |", "|---|---|"]
    lines += [f"| {word} | {size} |" for word, size in plan.types().items()]
    lines += ["", "| against the .nstf file | tensors | bytes there | bytes here |", "|---|---|---|---|"]
    for kind, total in plan.totals().items():
        lines.append(f"| {kind} | {total['tensors']} | {total['bytes_here']} | {total['bytes_there']} |")
    lines += ["", *_meaning(plan), *_loss(artifact, plan)]
    text = "\n".join(lines).rstrip() + "\n"
    return text.encode("utf-8", "backslashreplace").decode()  # names of files may be of other bytes


def _base(facts: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    name = config.get("base_model") or facts.get("base_model") or config.get("_name_or_path") or ""
    # A path of the machine that converted says nothing to a reader, and is nobody's business.
    return str(name) if name and not str(name).startswith((".", "/", "~")) else ""


def _load(plan: ExportPlan, config: Mapping[str, Any], file: str) -> str:
    return _LOAD[plan.target].format(cls=class_name(config), file=file)


def class_name(config: Mapping[str, Any]) -> str:
    """The class that a config names, where that is a name: it becomes part of code that people copy."""
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    return name if isinstance(name, str) and _NAME.fullmatch(name) else "AutoModel"


def _line(value: object) -> str:
    """A stranger's text as one line of Markdown, without tags."""
    text = "".join(c for c in " ".join(str(value).split()) if c.isprintable())[:200]
    return text.replace("<", "&lt;").replace("|", "\\|")


def _yaml(value: str) -> str:
    """A stranger's text as one value of YAML, quoted where it could be read as more."""
    return value if _PLAIN.fullmatch(value) else json.dumps(value)


def _meaning(plan: ExportPlan) -> list[str]:
    said = {
        "exact": "exact: the same values",
        "widened": "widened: the same values in more bits",
        "rounded": "rounded: decoded, then rounded to the type that the table names",
        "lossy": "lossy: rounded to what this format can hold (--allow-loss)",
    }
    out = [f"- {said[kind]}" for kind in plan.totals()]
    return [*out, *(f"- {note}" for note in plan.notes), ""]


def _loss(artifact: Artifact, plan: ExportPlan) -> list[str]:
    """The accuracy that the artifact holds: measured when it was converted, on the file this export was made from."""
    final = stated.accuracy(artifact.manifest.report)
    if not final:
        return []
    changed = " Tensors that are lossy or rounded here were not when it was measured." if any(
        kind in plan.totals() for kind in ("lossy", "rounded")
    ) else ""  # fmt: skip
    lines = [
        "## Loss",
        "",
        f"Measured at the conversion, of the .nstf file against the original.{changed}",
        "",
    ]
    lines += ["| measure | value |", "|---|---|"]
    return lines + [f"| {_line(key)} | {value} |" for key, value in final.items() if value is not None]
