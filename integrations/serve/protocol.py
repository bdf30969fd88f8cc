"""Requests of OpenAI's API, checked field by field: what is wrong is named, what is unknown is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nstf.errors import UsageError
from nstf.integrations.serve.errors import ApiError, wrong
from nstf.runtime.token_sampler import Settings

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_MESSAGES = 2048
ROLES = ("system", "developer", "user", "assistant", "tool")

# Fields of OpenAI's that change nothing here or only say who asks; and those that must have the value that changes nothing.
_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1), "best_of": (None, 1), "frequency_penalty": (None, 0), "presence_penalty": (None, 0),
    "logit_bias": (None, {}), "suffix": (None, ""), "echo": (None, False), "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []), "function_call": (None, "none", "auto"), "modalities": (None, ["text"]), "audio": (None,),
    "prediction": (None,), "reasoning_effort": (None, "none"), "verbosity": (None,), "web_search_options": (None,),
}  # fmt: skip
_COMMON = {
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "stream",
    "stream_options", "logprobs", "response_format",
}  # fmt: skip
_CHAT = _COMMON | {"messages", "max_completion_tokens", "top_logprobs"}
_TEXT = _COMMON | {"prompt"}


@dataclass(frozen=True)
class Request:
    """What a client asks for. messages: of a chat, else None; prompt: the text to continue, or its token ids.

    most: tokens, None for as many as the server allows. logprobs: alternatives, None for none. schema: a JSON schema,
    True for any object, or None.
    """

    messages: list[dict[str, Any]] | None
    prompt: str | list[int]
    most: int | None
    settings: Settings
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool
    logprobs: int | None
    schema: Any


def parse(body: bytes, chat: bool, model: str) -> Request:
    """The request of a body. model: the name this server answers to; any other is refused. Raises ApiError."""
    data = _object(body)
    known = _CHAT if chat else _TEXT
    for name in data:
        if name in _NEUTRAL:
            allowed = _NEUTRAL[name]
            flag = isinstance(data[name], bool) and not any(isinstance(v, bool) for v in allowed)
            if flag or data[name] not in allowed:
                raise wrong(name, f"{name} is not supported here; leave it out")
        elif name not in known | _IGNORED:
            raise wrong(name, f"unknown field {name[:60]!r}", "unknown_parameter")
    if data.get("model") not in (None, "", model):
        raise ApiError(
            404,
            f"there is no model {str(data['model'])[:100]!r} here; this server has {model!r}",
            "model",
            "model_not_found",
        )
    options = _typed(data, "stream_options", dict, {})
    unknown = set(options) - {"include_usage", "include_obfuscation"}
    if unknown:
        raise wrong("stream_options", f"unknown field stream_options.{min(unknown)[:60]}")
    stream = _typed(data, "stream", bool, False)
    if options and not stream:
        raise wrong("stream_options", "stream_options is for stream: true")
    return Request(
        _messages(data) if chat else None,
        "" if chat else _prompt(data),
        _most(data, chat),
        _settings(data),
        _stops(data),
        stream,
        _typed(options, "include_usage", bool, False),
        _logprobs(data, chat),
        _schema(data),
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise wrong(None, f"the body is not JSON ({str(error)[:100]})") from error
    if not isinstance(data, dict):
        raise wrong(None, "the body is not a JSON object")
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def _typed(data: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """data[name], or the default where it is missing or null."""
    value = data.get(name)
    if value is None:
        return default
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise wrong(name, f"{name} must be {_NAMES[kind]}")
    return value


def _float(data: dict[str, Any], name: str, default: float) -> float:
    value = _typed(data, name, float, default)
    try:
        return float(value)
    except OverflowError as error:
        raise wrong(name, f"{name} is too large a number") from error


def _settings(data: dict[str, Any]) -> Settings:
    seed = _typed(data, "seed", int, None)
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise wrong("seed", "seed must fit 64 bits")
    temperature = _float(data, "temperature", 1.0)
    top_k = _typed(data, "top_k", int, 0)
    try:
        settings = Settings(
            temperature,
            max(top_k, 0) if top_k == -1 else top_k,  # -1 says "all" to vLLM
            _float(data, "top_p", 1.0),
            _float(data, "min_p", 0.0),
            _float(data, "repetition_penalty", 1.0),
            seed,
        )
    except UsageError as error:
        raise wrong(str(error).partition(" ")[0], str(error)) from error
    if temperature > 2:
        raise wrong("temperature", f"temperature is {temperature}; it must be 0 to 2")
    return settings


def _most(data: dict[str, Any], chat: bool) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    for name in names:
        most = _typed(data, name, int, None)
        if most is not None:
            if most < 1:
                raise wrong(name, f"{name} is {most}; it must be at least 1")
            return int(most)
    return None


def _stops(data: dict[str, Any]) -> tuple[str, ...]:
    stop = data.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise wrong("stop", "stop must be a string or an array of strings, none of them empty")
    if len(stops) > MAX_STOPS or any(len(s) > 1000 for s in stops):
        raise wrong("stop", f"stop takes at most {MAX_STOPS} strings of at most 1000 characters")
    return tuple(stops)


def _logprobs(data: dict[str, Any], chat: bool) -> int | None:
    if not chat:
        count: int | None = _typed(data, "logprobs", int, None)
    elif not _typed(data, "logprobs", bool, False):
        if data.get("top_logprobs"):
            raise wrong("top_logprobs", "top_logprobs needs logprobs: true")
        return None
    else:
        count = _typed(data, "top_logprobs", int, 0)
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise wrong(
            "top_logprobs" if chat else "logprobs",
            f"at most {MAX_LOGPROBS} alternatives of a token can be had",
        )
    return count


def _schema(data: dict[str, Any]) -> Any:
    stated = _typed(data, "response_format", dict, None)
    if stated is None or stated.get("type") == "text":
        return None
    if stated.get("type") == "json_object":
        return True
    if stated.get("type") != "json_schema":
        raise wrong("response_format", "response_format.type must be text, json_object or json_schema")
    inner = stated.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise wrong("response_format", "response_format.json_schema.schema must be a JSON schema")
    return inner["schema"]


def _prompt(data: dict[str, Any]) -> str | list[int]:
    if data.get("prompt") is None:
        raise wrong("prompt", "prompt is missing")
    prompt = data["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _text(prompt, "prompt")
    if isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt):
        return prompt
    raise wrong("prompt", "prompt must be one string or one array of token ids, not empty")


def _messages(data: dict[str, Any]) -> list[dict[str, Any]]:
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "messages must be an array of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise wrong("messages", f"at most {MAX_MESSAGES} messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise wrong(where, f"{where} must be an object")
    unknown = sorted(
        k for k in set(message) - {"role", "content", "name", "refusal"} if message[k] is not None
    )
    if unknown:
        raise wrong(f"{where}.{unknown[0][:60]}", f"{where}: {unknown[0][:60]!r} is not supported")
    if message.get("role") not in ROLES:
        raise wrong(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise wrong(f"{where}.content", f"{where}.content may have parts of type text only")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise wrong(f"{where}.content", f"{where}.content must be a string")
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": _text(content, f"{where}.content")}


def _text(text: str, where: str) -> str:
    """Refuses halves of characters, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(where, f"{where} is not Unicode text") from error
    return text
