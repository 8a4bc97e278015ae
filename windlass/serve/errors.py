"""Errors as a client of OpenAI's API sees them."""

from typing import Any, Final

from starlette.responses import Response

from windlass.core.errors import UsageError
from windlass.engine.request import Failed
from windlass.engine.status import EngineDeadError, QueueFullError
from windlass.serve.wire import JsonAnswer

CHUNKS: Final = "chunks"  # begins what the engine says of a prompt with parts
INVALID: Final = "invalid_request_error"
KINDS: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with `status`. `param`: the field that is to blame; `code`: for programs.

    `retry_after`: seconds after which another try may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else INVALID)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def answer(self) -> Response:
        """The whole answer."""
        headers = {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JsonAnswer(self.document(), self.status, headers)


class BadField(ApiError):
    """A field that cannot be honoured; the message begins with its name."""

    def __init__(self, name: str, problem: str, code: str = "invalid_value") -> None:
        super().__init__(400, f"{name} {problem}", name, code)


def of_usage(error: UsageError, param: str | None = None) -> ApiError:
    """What the library refused."""
    return ApiError(400, str(error), param or _param_of(str(error)), "invalid_value")


def of_queue(error: QueueFullError) -> ApiError:
    """Too many requests wait already."""
    return ApiError(429, str(error), None, "queue_full", error.seconds)


def of_death(error: EngineDeadError) -> ApiError:
    """The engine does not run any more."""
    return ApiError(503, str(error), None, "engine_dead")


def of_failure(failed: Failed) -> ApiError:
    """A text that will not go on."""
    if failed.is_ours:
        return ApiError(500, failed.message, None, "engine_error")
    return ApiError(400, failed.message, _param_of(failed.message), "request_failed")


def _param_of(message: str) -> str | None:
    """The field that the engine's message blames."""
    return CHUNKS if message.startswith(f"{CHUNKS}:") else None


def stopping() -> ApiError:
    """The server ends."""
    return ApiError(503, "the server is about to end and takes no more requests", None, "stopping", 5.0)
