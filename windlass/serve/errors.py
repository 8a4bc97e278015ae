"""Errors as a client of OpenAI's API sees them, JSON on the wire, and the settings of a server."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastapi import HTTPException, Response

from windlass.core.errors import UsageError, shown
from windlass.engine.request import PREFIX, EngineDeadError, Failure, QueueFullError, ReuseMode
from windlass.serve.metrics import ModelFacts

DONE: Final = b"data: [DONE]\n\n"
MOST_DEPTH: Final = 64


def to_json(document: Any) -> bytes:
    """JSON in ASCII. Raises: ValueError for NaN and infinity, which JSON has not."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def from_json(body: bytes) -> Any:
    """Return the document of `body`. Raises: ValueError for text that is no JSON, and for half a pair of surrogates."""
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_refused)
        if not _is_flat(document):
            raise RecursionError
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None
    except UnicodeEncodeError:
        raise ValueError("a string has half of a surrogate pair") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    return document


def _is_flat(document: Any) -> bool:
    level = [document]
    for _ in range(MOST_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [one for each in inner for one in each if isinstance(one, dict | list)]
    return not level


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


class JsonAnswer(Response):
    """A whole answer."""

    media_type = "application/json"

    def __init__(self, document: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(to_json(document), status, headers)


def event(document: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + to_json(document) + b"\n\n"


def named_event(name: str, document: Any) -> bytes:
    """One event of a stream whose events have names."""
    return b"event: " + name.encode() + b"\n" + event(document)


def comment(text: str) -> bytes:
    """A line that readers of a stream skip. It shows that the connection is alive."""
    return b": " + text.encode() + b"\n\n"


BLAMED: Final = ("chunks", "sinks")  # prefixes of the engine's errors about these fields
INVALID: Final = "invalid_request_error"
KINDS: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
MESSAGES: Final = "/v1/messages"  # the routes of Anthropic's API
MESSAGE_KINDS: Final = KINDS | {413: "request_too_large", 503: "overloaded_error"}


MISSING: Final = "missing_required_parameter"
UNSUPPORTED: Final = "unsupported_parameter"


class ApiError(HTTPException):
    """A request that is answered with `status`. `param` names the field at fault, and `code` is for programs.

    `retry_after`: seconds after which another try may succeed. `details`: facts for clients of Anthropic's API.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(status, message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.details = retry_after, details

    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else INVALID)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def document_of_message(self) -> dict[str, Any]:
        """The body of the answer to a client of Anthropic's API."""
        kind = MESSAGE_KINDS.get(self.status, "api_error" if self.status >= 500 else INVALID)
        details = {} if self.details is None else {"details": dict(self.details)}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}}

    def answer(self, path: str = "") -> Response:
        """The whole answer, in the form of the route of this path."""
        headers = {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        is_message = path.startswith(MESSAGES)
        return JsonAnswer(self.document_of_message() if is_message else self.document(), self.status, headers)


class BadField(ApiError):
    """A field that cannot be honoured. The message begins with the field's name."""

    def __init__(self, name: str, problem: str, code: str = "invalid_value") -> None:
        super().__init__(400, f"{name} {problem}", name, code)


NO_OBJECT: Final = ("dict_type", "model_type", "model_attributes_type")
SIZES: Final = ("too_long", "too_short", "string_too_long", "string_too_short")


class FieldError(NamedTuple):
    """An error that pydantic found. `of_validation` reports the field whose error has the lowest `rank`."""

    rank: tuple[int, int]
    name: str
    problem: str
    code: str = "invalid_value"
    got: str = ""


def of_validation(errors: Sequence[Mapping[str, Any]], document: Any) -> ApiError:
    """One error for all that pydantic found: an unknown field before a missing one, and that before a wrong value."""
    found = sorted((_field_error(each, document) for each in errors), key=lambda each: each.rank)
    first = found[0]
    if not first.name:
        return ApiError(400, f"the body must be a JSON object, got {shown(document)}", None, "invalid_body")
    # A value that fits none of several types has an error of each.
    others = [each.problem for each in found if (each.rank, each.name) == (first.rank, first.name)]
    problems = [first.problem, *(each.removeprefix("must be ") for each in others if each != first.problem)]
    return BadField(first.name, " or ".join(dict.fromkeys(problems)) + first.got, first.code)


def _field_error(error: Mapping[str, Any], document: Any) -> FieldError:
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    path = list[str]()
    for each in error["loc"][1:]:  # an entry that leads to no value is the name of a type
        is_key = isinstance(document, dict) and document.get(each) is not None
        if is_key or (isinstance(document, list) and isinstance(each, int) and each < len(document)):
            path.append(short(str(each)))
            document = document[each]
    if kind == "missing":
        path += error["loc"][1:][-1:]
    if field := context.get("discriminator", context.get("field")):
        path.append(field.strip("'"))
    name = ".".join(path)
    if kind == "extra_forbidden" and len(path) == 1:
        return FieldError((0, 0), name, "is not supported by this server. Leave it out", UNSUPPORTED)
    if kind == "extra_forbidden":
        return FieldError((3, 0), name, "is not supported. Leave it out", "unknown_parameter")
    if kind in ("missing", "union_tag_not_found"):
        return FieldError((2, 0), name, "is missing", MISSING)
    problem = re.sub(r"^\w+ should |( after validation)?, not .*$", "", error["msg"])
    if kind in NO_OBJECT:
        problem = "be an object"
    elif kind == "union_tag_invalid":
        problem, value = f"be one of {context['expected_tags']}", context["tag"]
    problem = problem if problem == error["msg"] else f"must {problem}"
    got = f", got {len(value or ()) if kind in SIZES else shown(value)}" if problem.startswith("must ") else ""
    if kind == UNSUPPORTED:
        return FieldError((1, 0), name, problem, UNSUPPORTED, got)
    return FieldError((4, -len(path)), name, problem, got=got)


def of_usage(error: UsageError, param: str | None = None) -> ApiError:
    """The error for a value that the library refused."""
    return ApiError(400, str(error), param or _param_of(str(error)), "invalid_value")


def of_queue(error: QueueFullError) -> ApiError:
    """The error for a full queue."""
    return ApiError(429, str(error), None, "queue_full", error.seconds)


def of_death(error: EngineDeadError) -> ApiError:
    """The error for an engine that has stopped."""
    return ApiError(503, str(error), None, "engine_dead")


def of_failure(failed: Failure) -> ApiError:
    """The error for a text that failed."""
    if failed.is_ours:
        return ApiError(500, failed.message, None, "engine_error")
    return ApiError(400, failed.message, _param_of(failed.message), "request_failed")


def _param_of(message: str) -> str | None:
    """The field that the engine's message blames."""
    name = message.partition(":")[0]
    return name if name in BLAMED else None


def stopping() -> ApiError:
    """The error for a server that stops."""
    return ApiError(503, "the server is about to end and takes no more requests", None, "stopping", 5.0)


def short(name: str) -> str:
    """A name that a client made up, as an error may repeat it."""
    return name if len(name) <= 64 and name.isprintable() else repr(name[:32]) + "..."


MEGABYTE: Final = 1 << 20


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request beside those of its fields. `texts`: of all its prompts, times `n`. `characters`: of all
    its prompts. `grammar_bytes`: of a JSON schema, and of tools. The body must arrive within `body_seconds`."""

    body_bytes: int = 8 * MEGABYTE
    body_seconds: float = 60.0
    characters: int = 4_000_000
    texts: int = 16
    grammar_bytes: int = 64 << 10
    grammar_depth: int = 32


@dataclass(frozen=True)
class SessionLimits:
    """Limits of stored sessions and responses: `sessions` of an API key, `responses` of all, and the `bytes` of all
    sessions, and of all responses. 0 sessions and responses: it remembers none."""

    sessions: int = 1000
    responses: int = 10_000
    bytes: int = 256 * MEGABYTE


NO_SESSIONS: Final = SessionLimits(sessions=0, responses=0)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    `name` is the model's name for clients. If there are `keys`, a request must bring one, unless its path is public.
    After `ping_seconds` of silence, a stream sends a comment.
    """

    name: str
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    """Names under which the server may be called, or None for any. Pages in a browser may give any name to it."""
    request: RequestLimits = RequestLimits()
    ping_seconds: float = 10.0
    stop_seconds: float = 10.0
    origins: tuple[str, ...] = ()
    """Pages that a browser may let read answers, as `https://app.example`, or `*` for any."""
    facts: ModelFacts = field(default_factory=ModelFacts)
    reuse: ReuseMode = PREFIX
    """The cached tokens that requests take, where they name no mode."""
    salt: bytes | None = None
    """Salt that turns keys into names of owners (default: another one each time the server starts)."""
    folder: Path | None = None
    """Folder of the logs of sessions and responses (default: they stay in memory)."""
    sessions: SessionLimits = SessionLimits()
