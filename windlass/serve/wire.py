"""Bytes on the wire: JSON that any parser reads, and server-sent events."""

import json
from typing import Any, Final

from starlette.responses import Response

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
