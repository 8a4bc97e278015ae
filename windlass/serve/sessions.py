"""Conversations that the server remembers: named sessions and stored responses. Each is a log of JSON lines.

With a folder, a line is on disk before its turn is answered, and the next server reads the logs. A last line that a
crash has torn is dropped.
"""

import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, Final, Literal, TypeVar, final

from pydantic import Field, TypeAdapter, ValidationError

from windlass.engine.request import owner_of
from windlass.serve.errors import ApiError, BadField, SessionLimits, short, to_json
from windlass.serve.prompts import conversation
from windlass.serve.schema import Body, Label, Message, Messages, Name, Object

LOG: Final = logging.getLogger("windlass.serve")
SUFFIX, DAMAGED = ".jsonl", ".damaged"
SESSION, RESPONSES = "session", "responses"
ALL_MESSAGES: Final = TypeAdapter(list[Message])
Sent = dict[str, Any]  # a message as clients send it


class SessionRequest(Body):
    """The body of `POST /v1/sessions`."""

    name: Name
    """Name of the session, unique for its API key and `user`."""
    messages: Messages | None = None
    """The first messages (default: none)."""
    user: Label = ""
    """Sessions belong to an API key and a `user`."""


class RewindRequest(Body):
    """The body of `POST /v1/sessions/NAME/rewind`."""

    messages: Annotated[int, Field(ge=0)]
    """Number of first messages that stay."""
    user: Label = ""


class BranchRequest(Body):
    """The body of `POST /v1/sessions/NAME/branch`."""

    name: Name
    """Name of the new session."""
    messages: Annotated[int, Field(ge=0)] | None = None
    """Number of first messages that it begins with (default: all)."""
    user: Label = ""


class UserQuery(Body):
    """The user whose session or response is meant."""

    user: Label = ""


class Head(Body):
    """The first line of a log."""

    kind: Literal["session", "responses"]
    tenant: str
    name: str = ""
    created: int = 0


class SessionLine(Body):
    """A turn, or a rewind to the first messages."""

    messages: Annotated[list[Message], Field(default_factory=list)]
    rewind: Annotated[int, Field(ge=0)] | None = None


class ResponseLine(Body):
    """A response with the messages of its turn, or the id of a deleted one."""

    id: str
    previous: str | None = None
    messages: Annotated[list[Message], Field(default_factory=list)]
    document: Object | None = None


Line = TypeVar("Line", SessionLine, ResponseLine)


class DamagedLog(Exception):
    """A log that no server has written."""


@final
class Log:
    """Lines of JSON, and their `bytes`. With a `path`, in a file, and on disk when a call returns."""

    def __init__(self, path: Path | None, size: int) -> None:
        self.path, self.bytes = path, size

    @classmethod
    def made(cls, path: Path | None, data: bytes) -> "Log":
        """A new log with these lines. Its file is there whole, or not at all. Raises: OSError."""
        if path is not None:
            temporary = path.with_name(f".windlass-{secrets.token_hex(8)}.tmp")
            try:
                _written(temporary, data, os.O_CREAT | os.O_EXCL)
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            _sync(path.parent)
        return cls(path, len(data))

    @classmethod
    def read(cls, path: Path) -> tuple["Log", list[Any]]:
        """A log, and its lines. Raises: DamagedLog, and OSError."""
        data, found, size = path.read_bytes(), list[Any](), 0
        lines = data.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError
                found.append(json.loads(line))
            except ValueError:
                if number < len(lines) or not found:
                    raise DamagedLog(f"line {number} is no JSON") from None
                os.truncate(path, size)
                break
            size += len(line)
        return cls(path, size), found

    def append(self, data: bytes) -> None:
        """Add lines, all or none. Raises: OSError."""
        if self.path is not None:
            try:
                _written(self.path, data, os.O_APPEND)
            except OSError:
                with suppress(OSError):
                    os.truncate(self.path, self.bytes)
                raise
        self.bytes += len(data)

    def delete(self) -> None:
        """Delete the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            _sync(self.path.parent)


def _written(path: Path, data: bytes, how: int) -> None:
    file = os.open(path, os.O_WRONLY | how, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def _sync(folder: Path) -> None:
    """Write the names of a folder to disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _encoded(*lines: Any) -> bytes:
    return b"".join(to_json(each) + b"\n" for each in lines)


def _read_logs(
    folder: Path | None, kind: str, line: type[Line], check: Callable[[list[Line]], None] | None = None
) -> Iterator[tuple[Log, Head, list[Line], list[Any]]]:
    """The logs of a kind, the one used last at the end: each with its head, and its lines as models and as they are.

    A damaged log, for whose lines `check` may raise DamagedLog, is told, and gets another name.
    """
    if folder is None:
        return
    for path in sorted(folder.glob(f"{kind}-*{SUFFIX}"), key=lambda each: each.stat().st_mtime_ns):
        try:
            log, (first, *rest) = Log.read(path)
            head, lines = Head.model_validate(first), [line.model_validate(each) for each in rest]
            if check is not None:
                check(lines)
        except (DamagedLog, ValidationError, ValueError) as error:
            LOG.warning("%s is damaged, and was renamed to %s: %s", path.name, DAMAGED, type(error).__name__)
            path.rename(path.with_suffix(DAMAGED))
        else:
            yield log, head, lines, rest


def _check_turn(messages: Sequence[Sent]) -> None:
    """Raises: ApiError for messages that no client could send again, as an answer with too many calls."""
    try:
        ALL_MESSAGES.validate_python(messages)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        message = f"the turn is not kept, as its messages could not be sent again: {where}. Ask for a shorter answer"
        raise ApiError(400, message, SESSION, "not_kept") from None


def _unwritten(error: OSError, param: str) -> ApiError:
    message = f"the {param} was not written: {error.strerror}. It is as it was. Free some space"
    return ApiError(500, message, param, "not_written")


@dataclass(frozen=True)
class Turn:
    """A request under way. `history`: the messages before it. `keep` is called with the messages of the turn and the
    answer's document, once that has ended. `close` is called in any case, and may be repeated."""

    history: Sequence[dict[str, Any]]
    keep: Callable[[Sequence[Sent], dict[str, Any]], None]
    close: Callable[[], None]

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """Close the turn at the end of the block, if that ends with an error."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _nothing(*_: Any) -> None:
    pass


NO_TURN: Final = Turn((), _nothing, _nothing)


@dataclass
class Session:
    """A named conversation."""

    name: str
    created: int
    log: Log
    messages: list[Sent]
    read: list[dict[str, Any]] = field(default_factory=list)
    """The first messages as prompts are made of them."""

    def history(self) -> list[dict[str, Any]]:
        """All messages as prompts are made of them. Those of earlier turns are not read again."""
        self.read += conversation(ALL_MESSAGES.validate_python(self.messages[len(self.read) :]))
        return [*self.read]

    @property
    def document(self) -> dict[str, Any]:
        """Facts about it for its owner."""
        told = {"object": SESSION, "name": self.name, "created": self.created}
        return {**told, "count": len(self.messages), "bytes": self.log.bytes}


Key = tuple[str, str]  # tenant and name


@final
class Sessions:
    """Named conversations of tenants, in the logs of a `folder`, or in memory alone. Safe in any thread.

    `salt` turns tenants and names into names of files.
    """

    def __init__(self, folder: Path | None, salt: bytes, limits: SessionLimits) -> None:
        self._folder, self._salt, self._limits = folder, salt, limits
        self._lock, self._busy = RLock(), dict[Key, int]()
        self._turns = 0
        self._held: dict[Key, Session] = {}
        for log, head, lines, raw in _read_logs(folder, SESSION, SessionLine):
            messages = list[Sent]()
            for line, as_read in zip(lines, raw, strict=True):
                messages = messages[: line.rewind] + as_read.get("messages", [])
            self._held[head.tenant, head.name] = Session(head.name, head.created, log, messages)

    def create(self, tenant: str, name: str, messages: Sequence[Sent]) -> dict[str, Any]:
        """A new session with these messages. Raises: ApiError for one that is there, and beyond the limits."""
        with self._lock:
            self._check_new((tenant, name))
            return self._made((tenant, name), messages).document

    def all(self, tenant: str) -> list[dict[str, Any]]:
        """Facts about a tenant's sessions, by name."""
        with self._lock:
            return [self._held[key].document for key in sorted(self._held) if key[0] == tenant]

    def get(self, tenant: str, name: str) -> dict[str, Any]:
        """A session with its messages. Raises: ApiError where there is none."""
        with self._lock:
            session = self._session((tenant, name))
            return {**session.document, "messages": list(session.messages)}

    def delete(self, tenant: str, name: str) -> None:
        """Delete a session. Raises: ApiError where there is none, and for one that answers a request."""
        with self._lock:
            session = self._session((tenant, name))
            self._check_free((tenant, name))
            session.log.delete()
            del self._held[tenant, name]

    def rewind(self, tenant: str, name: str, count: int) -> dict[str, Any]:
        """Leave the first messages. Raises: ApiError as `delete` does, and for more messages than there are."""
        with self._lock:
            session = self._session((tenant, name))
            self._check_free((tenant, name))
            _check_count(session, count)
            self._append(session, {"rewind": count})
            del session.messages[count:], session.read[count:]
            return session.document

    def branch(self, tenant: str, name: str, count: int | None, target: str) -> dict[str, Any]:
        """A new session with the first messages of another one. Raises: ApiError as `rewind` and `create` do."""
        with self._lock:
            session = self._session((tenant, name))
            if count is not None:
                _check_count(session, count)
            return self.create(tenant, target, session.messages[:count])

    def begin(self, tenant: str, name: str) -> Turn:
        """A turn of a session, which is made by its first turn. Raises: ApiError for one that answers a request."""
        key = tenant, name
        with self._lock:
            self._check_free(key)
            if key not in self._held:
                self._check_new(key)
            history = self._held[key].history() if key in self._held else []
            number = self._turns = self._turns + 1
            self._busy[key] = number
        return Turn(history, partial(self._keep, key), partial(self._close, key, number))

    def _close(self, key: Key, number: int) -> None:
        with self._lock:
            if self._busy.get(key) == number:
                del self._busy[key]

    def _keep(self, key: Key, messages: Sequence[Sent], _: dict[str, Any]) -> None:
        _check_turn(messages)
        with self._lock:
            if key in self._held:
                self._append(self._held[key], {"messages": messages})
                self._held[key].messages += messages
            else:
                self._made(key, messages)

    def _made(self, key: Key, messages: Sequence[Sent]) -> Session:
        created = int(time.time())
        head = {"kind": SESSION, "tenant": key[0], "name": key[1], "created": created}
        data = _encoded(head, *([{"messages": messages}] if messages else []))
        self._check_bytes(data)
        name = hmac.new(self._salt, json.dumps(key).encode(), hashlib.sha256).hexdigest()[:32]
        path = None if self._folder is None else self._folder / f"{SESSION}-{name}{SUFFIX}"
        try:
            log = Log.made(path, data)
        except OSError as error:
            raise _unwritten(error, SESSION) from error
        self._held[key] = Session(key[1], created, log, list(messages))
        return self._held[key]

    def _append(self, session: Session, line: Any) -> None:
        data = _encoded(line)
        self._check_bytes(data)
        try:
            session.log.append(data)
        except OSError as error:
            raise _unwritten(error, SESSION) from error

    def _session(self, key: Key) -> Session:
        if key not in self._held:
            message = f"there is no session {key[1]!r} of this key and user. GET /v1/sessions lists them"
            raise ApiError(404, message, SESSION, "session_not_found")
        return self._held[key]

    def _check_free(self, key: Key) -> None:
        if key in self._busy:
            message = f"the session {key[1]!r} answers another request. Wait for its end, or branch the session"
            raise ApiError(409, message, SESSION, "session_busy")

    def _check_new(self, key: Key) -> None:
        if key in self._held or key in self._busy:
            message = f"there is a session {key[1]!r} already. Delete it, or choose another name"
            raise ApiError(409, message, "name", "session_exists")
        if not self._limits.sessions:
            message = "session: this server is one of several, and remembers none. Start it without --replicas"
            raise ApiError(400, message, SESSION, "session_limit")
        own = {each for each in {*self._held, *self._busy} if owner_of(each[0]) == owner_of(key[0])}
        if len(own) >= self._limits.sessions:
            most = self._limits.sessions
            message = f"session: this API key has {len(own)} sessions, and may have {most}. Delete one of them"
            raise ApiError(400, message, SESSION, "session_limit")

    def _check_bytes(self, data: bytes) -> None:
        held, most = sum(each.log.bytes for each in self._held.values()), self._limits.bytes
        if held + len(data) > most:
            message = (
                f"session: all sessions hold {held:,} bytes, {len(data):,} come, and {most:,} are the most. Delete one"
            )
            raise ApiError(400, message, SESSION, "session_limit")


def _check_count(session: Session, count: int) -> None:
    if count > len(session.messages):
        raise BadField("messages", f"must be at most {len(session.messages)}, as the session has no more, got {count}")


@dataclass
class StoredResponse:
    """A response, and the messages of its turn. A deleted one has no `document`."""

    tenant: str
    tree: str
    previous: str | None
    messages: list[Sent]
    document: dict[str, Any] | None


@dataclass
class ResponseTree:
    """Responses that go on from one another, in one log."""

    log: Log
    ids: list[str] = field(default_factory=list)


@final
class Responses:
    """Stored responses of tenants. Each is a point to go on from. Safe in any thread.

    They are bounded in number and bytes: the tree that was used least recently is deleted.
    """

    def __init__(self, folder: Path | None, limits: SessionLimits) -> None:
        self._folder, self._limits, self._lock = folder, limits, RLock()
        self._held: dict[str, StoredResponse] = {}
        self._trees: dict[str, ResponseTree] = {}  # least recently used first
        for log, head, lines, raw in _read_logs(folder, RESPONSES, ResponseLine, self._check_lines):
            self._trees[head.name] = ResponseTree(log)
            for line, as_read in zip(lines, raw, strict=True):
                if line.document is None:
                    self._held[line.id].document = None
                else:
                    self._note(head.tenant, head.name, as_read)

    def _check_lines(self, lines: Sequence[ResponseLine]) -> None:
        """Raises: DamagedLog for a response that is there already, and for a line about one that no line before has."""
        known = set[str]()
        for line in lines:
            is_new = line.document is not None
            named = line.previous if is_new else line.id
            if (is_new and line.id in (self._held.keys() | known)) or (named is not None and named not in known):
                raise DamagedLog
            known.add(line.id)

    @property
    def is_on(self) -> bool:
        """Return True if responses are stored."""
        return bool(self._limits.responses)

    def begin(self, tenant: str, previous: str | None) -> Turn:
        """A turn after a `previous` response, if there is one. Raises: ApiError where that is unknown."""
        with self._lock:
            sent = [] if previous is None else self._history(tenant, previous)
            history = conversation(ALL_MESSAGES.validate_python(sent))
        return Turn(history, partial(self._keep, tenant, previous, sent), _nothing)

    def get(self, tenant: str, number: str) -> dict[str, Any]:
        """The document of a response. Raises: ApiError where there is none."""
        with self._lock:
            document = self._response(tenant, number, "id").document
            assert document is not None, "a response that was deleted"
            return document

    def item(self, tenant: str, number: str) -> dict[str, Any]:
        """An item of the output of a response, by its id. Raises: ApiError where there is none."""
        response = self._held.get(f"resp_{number.partition('_')[2].partition('_')[0]}")
        document = None if response is None or response.tenant != tenant else response.document
        found = [each for each in document["output"] if each["id"] == number] if document is not None else []
        if not found:
            message = f"Item with id {short(number)!r} not found. Send the item itself in the input"
            raise ApiError(404, message, "input", "item_not_found")
        return dict(found[0])

    def delete(self, tenant: str, number: str) -> None:
        """Delete a response. Others that went on from it stay. Raises: ApiError where there is none."""
        with self._lock:
            response = self._response(tenant, number, "id")
            tree = self._trees[response.tree]
            if all(self._held[each].document is None for each in tree.ids if each != number):
                self._drop(response.tree)
                return
            try:
                tree.log.append(_encoded({"id": number}))
            except OSError as error:
                raise _unwritten(error, "response") from error
            response.document = None

    def _keep(
        self,
        tenant: str,
        previous: str | None,
        history: Sequence[Sent],
        messages: Sequence[Sent],
        document: dict[str, Any],
    ) -> None:
        _check_turn(messages)
        number = document["id"]
        with self._lock:
            parent = None if previous is None else self._held.get(previous)
            name = number if parent is None else parent.tree
            if parent is None:  # there was none, or its tree is gone meanwhile
                previous, messages = None, [*history, *messages]
            line = {"id": number, "previous": previous, "messages": messages, "document": document}
            head = {"kind": RESPONSES, "tenant": tenant, "name": name, "created": int(time.time())}
            data = _encoded(*([head] if parent is None else []), line)
            self._make_room(len(data), name)
            try:
                if parent is not None:
                    self._trees[name].log.append(data)
                else:
                    path = None if self._folder is None else self._folder / f"{RESPONSES}-{name}{SUFFIX}"
                    self._trees[name] = ResponseTree(Log.made(path, data))
            except OSError as error:
                raise _unwritten(error, "response") from error
            self._note(tenant, name, line)

    def _note(self, tenant: str, tree: str, line: dict[str, Any]) -> None:
        response = StoredResponse(tenant, tree, line.get("previous"), list(line.get("messages", [])), line["document"])
        self._held[line["id"]] = response
        self._trees[tree].ids.append(line["id"])

    def _history(self, tenant: str, number: str) -> list[Sent]:
        """All messages up to a response, and with those of its own turn."""
        response, turns = self._response(tenant, number, "previous_response_id"), list[list[Sent]]()
        self._trees[response.tree] = self._trees.pop(response.tree)
        while True:
            turns.append(response.messages)
            if response.previous is None:
                return [message for turn in reversed(turns) for message in turn]
            response = self._held[response.previous]

    def _response(self, tenant: str, number: str, param: str) -> StoredResponse:
        response = self._held.get(number)
        if response is None or response.tenant != tenant or response.document is None:
            message = f"Response with id {number!r} not found. Send the whole conversation as input"
            raise ApiError(404, message, param, "response_not_found")
        return response

    def _make_room(self, size: int, wanted: str) -> None:
        """Delete trees, but not the `wanted` one. Raises: ApiError where that would not be enough."""
        limits = self._limits
        for name in [*self._trees]:
            held = sum(each.log.bytes for each in self._trees.values())
            if held + size <= limits.bytes and len(self._held) < limits.responses:
                return
            if name != wanted:
                self._drop(name)
        held = sum(each.log.bytes for each in self._trees.values())
        if held + size > limits.bytes or len(self._held) >= limits.responses:
            message = f"store: a conversation may hold {limits.bytes:,} bytes and {limits.responses:,} responses here. "
            raise ApiError(400, f"{message}Begin another one, or send store: false", "store", "store_limit")

    def _drop(self, tree: str) -> None:
        for each in self._trees[tree].ids:
            del self._held[each]
        self._trees.pop(tree).log.delete()
