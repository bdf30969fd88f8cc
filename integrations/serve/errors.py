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
                "message": str(self),
                "type": kinds.get(self.status, usual),
                "param": self.param and self.param.encode("utf-8", "replace").decode(),
                "code": self.code,
            }
        }


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 about one field of the request."""
    return ApiError(400, message, param, code)
