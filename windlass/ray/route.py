"""Which replica a request goes to: that of its session, or of how its prompt begins.

What a replica has kept of a session (the beginnings of its prompts) is of use to no other, so requests that share a key
go to one replica. Replicas are ranked by a hash of the key and their number (rendezvous hashing): where one is away,
its keys alone go elsewhere, and come back with it.

Source: Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates".
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

SESSION: Final = "x-session-id"
PREFIX: Final = 1024  # signs of a prompt that count


def key_of(headers: Mapping[str, str], body: bytes) -> str:
    """The key of a request: its header `X-Session-Id`, or its field `user`, or how its prompt begins.

    Of messages, those up to the first of a user count, so that the turns of a conversation have one key.
    """
    if headers.get(SESSION):
        return f"session {headers[SESSION]}"
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(given, dict):
        return ""
    if isinstance(given.get("user"), str) and given["user"]:
        return f"user {given['user']}"
    turns = next((given[name] for name in ("messages", "input") if isinstance(given.get(name), list)), None)
    begun = given.get("prompt", given.get("input", "")) if turns is None else _opening(turns)
    return "prompt " + (begun if isinstance(begun, str) else json.dumps(begun))[:PREFIX]


def ranked(key: str, numbers: Iterable[int]) -> list[int]:
    """These replicas, the one that the key belongs to first, and after it those that stand in for it."""
    return sorted(numbers, key=lambda number: hashlib.sha256(f"{number} {key}".encode("utf-8", "replace")).digest())


def _opening(messages: list[Any]) -> list[Any]:
    roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
    return messages[: roles.index("user") + 1] if "user" in roles else messages[:1]
