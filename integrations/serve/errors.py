"""What a client is told when a request is not served: OpenAI's error JSON."""

from typing import Any


class ApiError(Exception):
    """A request that is refused: an HTTP status and OpenAI's error object. param: the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def to_json(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": _unicode(str(self)),
                "type": kinds.get(self.status, usual),
                "param": self.param and _unicode(self.param),
                "code": self.code,
            }
        }


def _unicode(text: str) -> str:
    """Without halves of characters, which a request can hold and an answer cannot."""
    return text.encode("utf-8", "replace").decode()


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 about one field of the request."""
    return ApiError(400, message, param, code)


def too_long(param: str, context: int) -> ApiError:
    """A 400 about a prompt that is longer than the context, before its tokens are counted."""
    message = f"the prompt is longer than this server's context of {context} tokens"
    return wrong(param, message, "context_length_exceeded")
