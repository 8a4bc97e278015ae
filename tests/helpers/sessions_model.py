"""Random operations on sessions and stored responses, and on plain lists beside them."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.serve.errors import ApiError, SessionLimits
from windlass.serve.prompts import as_sent
from windlass.serve.sessions import Responses, Sessions

SALT = b"s" * 32
TENANTS = ("a/", "a/anna", "b/")
NAMES = ("one", "two", "three", "four")
WORDS = ("sea", "boat", "é", "☺", "\n", '"', "line\u2028break", "<|eos|>", "", "x" * 300)
LIMITS = SessionLimits(sessions=4, responses=10_000, bytes=1 << 30)


def said(draw: random.Random) -> list[Any]:
    """Messages of a turn, of all kinds."""
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 5)))
    call = {"name": "clock", "arguments": draw.choice(('{"a": 1.0, "b": ["é"]}', "no object", "{}"))}
    parts = [{"type": "text", "text": "a"}, {"type": "chunk", "text": f"b{text}"}]
    kinds: list[Any] = [
        {"role": "user", "content": text},
        {"role": "system", "content": text, "pin": True},
        {"role": "user", "name": "ben", "content": parts},
        {"role": "tool", "tool_call_id": "c1", "content": text},
        {"role": "assistant", "content": text, "reasoning_content": f"so {text}"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
    ]
    return draw.choices(kinds, k=draw.randint(1, 3))


def outcome(work: Callable[[], Any]) -> Any:
    """The result of `work`, or the code of its error."""
    try:
        return work()
    except ApiError as error:
        return error.code


class Fuzz:
    """Operations by one seed. `differences` has a line for each outcome that is not that of the lists."""

    def __init__(self, folder: Path | None, seed: int) -> None:
        self._folder, self._draw = folder, random.Random(seed)
        self._sessions, self._responses = self._opened()
        self._lists: dict[tuple[str, str], list[Any]] = {}
        self._stored: dict[str, tuple[str, list[Any]]] = {}  # the tenant, and all messages up to it
        self._ids = ["resp_none"]
        self.differences, self.counts = list[str](), Counter[str]()

    def _opened(self) -> tuple[Sessions, Responses]:
        return Sessions(self._folder, SALT, LIMITS), Responses(self._folder, LIMITS)

    def run(self, operations: int) -> None:
        """Do so many, and then compare all that is held."""
        names = ["create", "turn", "turn", "turn", "failed", "busy", "rewind", "branch", "delete", "get"]
        names += ["respond", "respond", "read", "forget"] + ["restart", "torn"] * (self._folder is not None)
        for at in range(operations):
            name, tenant, session = (self._draw.choice(each) for each in (names, TENANTS, NAMES))
            self.counts[name] += 1
            ours, theirs = getattr(self, f"_{name}")(tenant, session)
            if ours != theirs:
                self.differences.append(f"{at} {name} {tenant} {session}: {ours} in place of {theirs}"[:500])
        for tenant in TENANTS:
            told = {each["name"]: each["count"] for each in self._sessions.all(tenant)}
            if told != {name: len(held) for (owner, name), held in self._lists.items() if owner == tenant}:
                self.differences.append(f"at the end {tenant}: {told}")
            self.differences += [
                f"at the end {tenant} {name}" for name in NAMES if len({*map(str, self._get(tenant, name))}) > 1
            ]

    def _new(self, tenant: str, name: str, messages: list[Any]) -> Any:
        """The outcome of a new session. It is added to the lists if it is allowed."""
        if (tenant, name) in self._lists:
            return "session_exists"
        if sum(key[0][0] == tenant[0] for key in self._lists) >= LIMITS.sessions:
            return "session_limit"
        self._lists[tenant, name] = list(messages)
        return len(messages)

    def _create(self, tenant: str, name: str) -> tuple[Any, Any]:
        messages = self._draw.choice(([], said(self._draw)))
        ours = outcome(lambda: self._sessions.create(tenant, name, messages)["count"])
        return ours, self._new(tenant, name, messages)

    def _turn(self, tenant: str, name: str) -> tuple[Any, Any]:
        messages = said(self._draw)

        def turn() -> Any:
            begun = self._sessions.begin(tenant, name)
            begun.keep(messages, {})
            begun.close()
            return [as_sent(each) for each in begun.history]

        before = list(self._lists.get((tenant, name), []))
        if (tenant, name) in self._lists:
            self._lists[tenant, name] += messages
            return outcome(turn), before
        made = self._new(tenant, name, messages)
        return outcome(turn), made if isinstance(made, str) else before

    def _failed(self, tenant: str, name: str) -> tuple[Any, Any]:
        """A turn that does not end leaves nothing, twice."""
        for _ in range(2):
            if isinstance(begun := outcome(lambda: self._sessions.begin(tenant, name)), str):
                return begun, "session_limit" if self._is_full(tenant, name) else ""
            begun.close()
        begun.close()
        return self._get(tenant, name)

    def _is_full(self, tenant: str, name: str) -> bool:
        is_new = (tenant, name) not in self._lists
        return is_new and sum(key[0][0] == tenant[0] for key in self._lists) >= LIMITS.sessions

    def _busy(self, tenant: str, name: str) -> tuple[Any, Any]:
        """The outcome of other calls while a turn is under way."""
        if self._is_full(tenant, name):
            return "", ""
        begun, is_held = self._sessions.begin(tenant, name), (tenant, name) in self._lists
        ours = [
            outcome(lambda: self._sessions.begin(tenant, name)),
            outcome(lambda: self._sessions.delete(tenant, name)),
            outcome(lambda: self._sessions.rewind(tenant, name, 0)),
            outcome(lambda: self._sessions.create(tenant, name, [])),
        ]
        begun.close()
        rest = "session_busy" if is_held else "session_not_found"
        return ours, ["session_busy", rest, rest, "session_exists"]

    def _rewind(self, tenant: str, name: str) -> tuple[Any, Any]:
        held = self._lists.get((tenant, name))
        count = self._draw.randint(0, 12 if held is None else len(held) + 1)
        ours = outcome(lambda: self._sessions.rewind(tenant, name, count)["count"])
        if held is None:
            return ours, "session_not_found"
        if count > len(held):
            return ours, "invalid_value"
        del held[count:]
        return ours, count

    def _branch(self, tenant: str, name: str) -> tuple[Any, Any]:
        held, target = self._lists.get((tenant, name)), self._draw.choice(NAMES)
        count = self._draw.choice((None, self._draw.randint(0, 12)))
        ours = outcome(lambda: self._sessions.branch(tenant, name, count, target)["count"])
        if held is None:
            return ours, "session_not_found"
        if count is not None and count > len(held):
            return ours, "invalid_value"
        return ours, self._new(tenant, target, held[:count])

    def _delete(self, tenant: str, name: str) -> tuple[Any, Any]:
        ours = outcome(lambda: self._sessions.delete(tenant, name))
        return ours, None if self._lists.pop((tenant, name), None) is not None else "session_not_found"

    def _get(self, tenant: str, name: str) -> tuple[Any, Any]:
        ours = outcome(lambda: self._sessions.get(tenant, name)["messages"])
        return ours, self._lists.get((tenant, name), "session_not_found")

    def _respond(self, tenant: str, _: str) -> tuple[Any, Any]:
        previous = self._draw.choice((None, *self._ids[-8:]))
        messages, number = said(self._draw), f"resp_{len(self._ids)}"

        def respond() -> Any:
            begun = self._responses.begin(tenant, previous)
            begun.keep(messages, {"id": number, "said": len(messages)})
            return [as_sent(each) for each in begun.history]

        before: Any = []
        if previous is not None:
            owner, before = self._stored.get(previous, ("", []))
            if owner != tenant:
                return outcome(respond), "response_not_found"
        self._ids.append(number)
        self._stored[number] = (tenant, [*before, *messages])
        return outcome(respond), before

    def _read(self, tenant: str, _: str) -> tuple[Any, Any]:
        number = self._draw.choice(self._ids[-8:])
        ours = outcome(lambda: self._responses.get(tenant, number)["id"])
        return ours, number if self._stored.get(number, ("",))[0] == tenant else "response_not_found"

    def _forget(self, tenant: str, _: str) -> tuple[Any, Any]:
        number = self._draw.choice(self._ids[-8:])
        ours = outcome(lambda: self._responses.delete(tenant, number))
        if self._stored.get(number, ("",))[0] != tenant:
            return ours, "response_not_found"
        del self._stored[number]
        return ours, None

    def _restart(self, _: str, __: str) -> tuple[Any, Any]:
        self._sessions, self._responses = self._opened()
        return None, None

    def _torn(self, tenant: str, name: str) -> tuple[Any, Any]:
        """A crash in the middle of a line."""
        assert self._folder is not None
        for path in sorted(self._folder.glob("*.jsonl")):
            if self._draw.random() < 0.5:
                with path.open("ab") as file:
                    file.write(
                        self._draw.choice((b"{", b'{"messages": [{"role"', b'{"messages": ["x"]}'[:-1], b"\x00\n"))
                    )
        self._restart(tenant, name)
        return self._get(tenant, name)
