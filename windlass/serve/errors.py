"""Errors as a client of OpenAI's API sees them, JSON on the wire, and checks of fields."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.responses import Response

from windlass.core.errors import UsageError, shown
from windlass.core.parse import AUTO
from windlass.engine.request import EngineDeadError, Failure, QueueFullError
from windlass.policies import NAMES
from windlass.positions.modes import MODES
from windlass.serve.metrics import ModelFacts
from windlass.stores.formats import STORES

DONE: Final = b"data: [DONE]\n\n"
MOST_DEPTH: Final = 64


def to_json(document: Any) -> bytes:
    """JSON in ASCII. Raises: ValueError for NaN and infinity, which JSON has not."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def from_json(body: bytes) -> Any:
    """What `body` says. Raises: ValueError for what is no JSON, and for half a pair of surrogates."""
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
    """A line that readers of a stream leave out; it shows that the connection lives."""
    return b": " + text.encode() + b"\n\n"


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


def of_failure(failed: Failure) -> ApiError:
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


Check = Callable[[str, Any], Any]


def whole(least: int, most: int) -> Check:
    """A whole number in a range; `true` and 4.0 are none."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadField(name, f"must be a whole number from {least} to {most}, got {shown(value)}")
        if not least <= value <= most:
            raise BadField(name, f"must be from {least} to {most}, got {shown(value)}")
        return value

    return check


def real(least: float, most: float, is_open: bool = False) -> Check:
    """A number in a range, without `least` if it `is_open` there."""
    wanted = f"{'above' if is_open else 'from'} {least:g} {'and at most' if is_open else 'to'} {most:g}"

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadField(name, f"must be a number {wanted}, got {shown(value)}")
        if not least <= value <= most or not math.isfinite(value) or (is_open and value == least):
            raise BadField(name, f"must be {wanted}, got {shown(value)}")
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise BadField(name, f"must be true or false, got {shown(value)}")
    return value


def text(most: int, least: int = 0) -> Check:
    """A string of so many characters."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise BadField(name, f"must be a string, got {shown(value)}")
        if not least <= len(value) <= most:
            raise BadField(name, f"must have from {least} to {most} characters, got {len(value)}")
        return value

    return check


def name_of(most: int) -> Check:
    """A word that somebody made up, of so many characters."""

    def check(name: str, value: Any) -> str:
        given = str(text(most, least=1)(name, value))
        if not all(sign.isascii() and (sign.isalnum() or sign in "_-.") for sign in given):
            raise BadField(name, f"may have letters, digits, _, - and . only, got {shown(given)}")
        return given

    return check


def one_of(names: Collection[str]) -> Check:
    """One of some words."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise BadField(name, f"must be one of {', '.join(names)}; got {shown(value)}")
        return value

    return check


def listed(each: Check, most: int, least: int = 0) -> Check:
    """A list of so many values."""

    def check(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise BadField(name, f"must be a list, got {shown(value)}")
        if not least <= len(value) <= most:
            raise BadField(name, f"must have from {least} to {most} entries, got {len(value)}")
        return [each(f"{name}.{at}", one) for at, one in enumerate(value)]

    return check


def record(checks: Mapping[str, Check], needed: Collection[str] = ()) -> Check:
    """An object with some of these fields, and all of those `needed`; null stands for a field that is not there."""

    def check(name: str, value: Any) -> dict[str, Any]:
        given = mapping(name, value)
        for key in needed:
            if given.get(key) is None:
                raise BadField(f"{name}.{key}", "is missing", "missing_required_parameter")
        for key, one in given.items():
            if key not in checks and one is not None:
                raise BadField(f"{name}.{short(key)}", "is not supported", "unknown_parameter")
        return {key: checks[key](f"{name}.{key}", one) for key, one in given.items() if one is not None}

    return check


def mapping(name: str, value: Any) -> dict[str, Any]:
    """An object of any fields."""
    if not isinstance(value, dict):
        raise BadField(name, f"must be an object, got {shown(value)}")
    return value


def short(name: str) -> str:
    """A name that a client made up, as an error may repeat it."""
    return name if len(name) <= 64 and name.isprintable() else repr(name[:32]) + "..."


MEGABYTE: Final = 1 << 20


@dataclass(frozen=True)
class RequestLimits:
    """Hard limits of one request. `texts`: of all its prompts, times `n`. `characters`: of all its prompts, before they
    become tokens; `grammar_bytes` of a JSON schema, and of tools. A body must have come after `body_seconds`."""

    body_bytes: int = 8 * MEGABYTE
    body_seconds: float = 60.0
    characters: int = 4_000_000
    messages: int = 4096
    chunks: int = 256
    prompts: int = 16
    choices: int = 8
    texts: int = 16
    stops: int = 16
    stop_characters: int = 256
    biases: int = 1024
    top_logprobs: int = 20
    tools: int = 128
    grammar_bytes: int = 64 << 10
    grammar_depth: int = 32


@dataclass(frozen=True)
class CacheChoices:
    """What a request may choose of its cache: numbers up to these, and these names; `name`: signs of one that it makes
    up. Arguments of a policy, and files, are for whoever starts the server."""

    budget: int = 1 << 20
    sinks: int = 4096
    window: int = 1 << 16
    recall: int = 1 << 16
    name: int = 64
    policy: tuple[str, ...] = (AUTO, *sorted(NAMES))
    positions: tuple[str, ...] = tuple(MODES)
    store: tuple[str, ...] = tuple(STORES)


@dataclass(frozen=True)
class ServerSettings:
    """How a server behaves. `name`: the model's, for clients; `keys`: one of them must come with each request, none:
    no key is asked for. A comment goes to a silent stream after `ping_seconds`."""

    name: str
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    """Names under which the server may be called; None: any. A page in a browser may give any name to this machine."""
    request: RequestLimits = RequestLimits()
    cache: CacheChoices = CacheChoices()
    ping_seconds: float = 10.0
    stop_seconds: float = 10.0
    origins: tuple[str, ...] = ()
    """Pages that a browser may let read answers, as `https://app.example`; `*`: any."""
    facts: ModelFacts = field(default_factory=ModelFacts)
    salt: bytes | None = None
    """Makes names of owners out of their keys; None: another one each time the server starts."""
