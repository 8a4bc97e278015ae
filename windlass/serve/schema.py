"""The fields of each route, in tables: what is not in a table is refused by name."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final

from windlass.core.errors import shown
from windlass.core.parse import SYSTEM
from windlass.serve import responses
from windlass.serve.errors import (
    ApiError,
    BadField,
    CacheChoices,
    Check,
    RequestLimits,
    flag,
    listed,
    mapping,
    name_of,
    one_of,
    real,
    record,
    short,
    text,
    whole,
)
from windlass.serve.neutral import NEUTRAL
from windlass.serve.parsers import functions, without_inert
from windlass.serve.prompts import messages

MOST_TOKEN_ID: Final = 2**31 - 1
OWN = ("budget", "policy", "positions", "store", "recall", "sinks", "window")  # of the cache; see `CacheOptions`
MOST_SECONDS: Final = 1e6
MOST_VARIABLES: Final = 16


def table(limits: RequestLimits, cache: CacheChoices) -> dict[str, dict[str, Check]]:
    """The checks of every field, by route and name."""
    own = _own(cache)
    common = NEUTRAL | _common(limits) | own
    strings = text(limits.characters)
    logprobs = whole(0, limits.top_logprobs)
    return {
        "/v1/chat/completions": {
            **common,
            "messages": messages(limits),
            "chat_template_kwargs": _variables,
            "chunks": record({"recompute": text(64)}),
            "max_completion_tokens": whole(1, 2**30),
            "logprobs": flag,
            "top_logprobs": logprobs,
            "response_format": _response_format,
            "tools": functions(_tool, limits.tools),
            "tool_choice": _tool_choice,
            "parallel_tool_calls": flag,
        },
        "/v1/completions": {
            **common,
            "prompt": partial(_prompt, limits),
            "suffix": strings,
            "echo": flag,
            "max_tokens": whole(0, 2**30),
            "chunks": record(
                {"texts": listed(text(limits.characters, least=1), limits.chunks, least=1), "recompute": text(64)},
                needed=("texts",),
            ),
            "logprobs": logprobs,
        },
        "/v1/responses": responses.fields(limits, common, own | {"chat_template_kwargs": _variables}),
        "/tokenize": {
            "model": text(256),
            "prompt": strings,
            "messages": messages(limits),
            "chat_template_kwargs": _variables,
            "add_special_tokens": flag,
        },
        "/detokenize": {"model": text(256), "tokens": listed(whole(0, MOST_TOKEN_ID), limits.characters)},
    }


def checked(fields: Mapping[str, Check], body: Any, needed: Collection[str]) -> dict[str, Any]:
    """The fields of a request's body by name, without those that are null.

    Raises: ApiError for a body that is no object, a field that is not known, or a value that cannot be honoured.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shown(body)}", None, "invalid_body")
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in fields:
            raise _refused(name)
    for name in needed:
        if name not in given:
            raise BadField(name, "is missing", "missing_required_parameter")
    return {name: fields[name](name, value) for name, value in given.items()}


def _refused(name: str) -> BadField:
    return BadField(short(name), "is not supported by this server; leave it out", "unsupported_parameter")


def _variables(name: str, value: Any) -> dict[str, bool | int | float | str]:
    """Simple values of a template's variables, by name."""
    given = {field: one for field, one in mapping(name, value).items() if one is not None}
    if len(given) > MOST_VARIABLES:
        raise BadField(name, f"must have at most {MOST_VARIABLES} entries, got {len(given)}")
    for field, one in given.items():
        if not field.isidentifier() or len(field) > 64:
            raise BadField(name, f"must have names of variables, got {short(field)}")
        if not isinstance(one, bool | int | float) and not (isinstance(one, str) and len(one) <= 256):
            raise BadField(f"{name}.{field}", f"must be a number, a short string, true or false; got {shown(one)}")
    return given


def _common(limits: RequestLimits) -> dict[str, Check]:
    return {
        "model": text(256),
        "max_tokens": whole(1, 2**30),
        "max_seconds": real(0.0, MOST_SECONDS, is_open=True),
        "temperature": real(0.0, 2.0),
        "top_p": real(0.0, 1.0),
        "top_k": whole(-1, 2**20),
        "min_p": real(0.0, 1.0),
        "repetition_penalty": real(0.0, 100.0, is_open=True),
        "seed": whole(-(2**63), 2**64 - 1),
        "stop": partial(_stop, limits),
        "presence_penalty": real(-2.0, 2.0),
        "frequency_penalty": real(-2.0, 2.0),
        "logit_bias": partial(_biases, limits),
        "n": whole(1, limits.choices),
        "stream": flag,
        "stream_options": record({"include_usage": flag, "include_obfuscation": flag}),
        "user": text(256),
    }


def _own(cache: CacheChoices) -> dict[str, Check]:
    numbers: dict[str, Check] = {
        "budget": whole(1, cache.budget),
        "sinks": lambda name, value: value if value == SYSTEM else whole(0, cache.sinks)(name, value),
        "window": whole(1, cache.window),
        "recall": whole(0, cache.recall),
    }
    return numbers | {
        "policy": one_of(cache.policy),
        "positions": partial(_positions, cache.positions),
        "store": partial(_store, cache.store),
        "cache": record({"lookup": flag, "store": flag, "name": name_of(cache.name)}),
    }


def _positions(names: tuple[str, ...], name: str, value: Any) -> str:
    """A mode, perhaps with numbers, which are checked where the mode is made."""
    given: str = text(64)(name, value)
    one_of(names)(name, given.partition("(")[0].strip())
    return given


def _store(names: tuple[str, ...], name: str, value: Any) -> str | None:
    """A store. OpenAI's clients say `false` where an answer is not to be stored: none is."""
    return None if value is False else one_of(names)(name, value)


def _stop(limits: RequestLimits, name: str, value: Any) -> list[str]:
    each = text(limits.stop_characters, least=1)
    return [each(name, value)] if isinstance(value, str) else listed(each, limits.stops)(name, value)


def _biases(limits: RequestLimits, name: str, value: Any) -> dict[int, float]:
    given = mapping(name, value)
    if len(given) > limits.biases:
        raise BadField(name, f"must have at most {limits.biases} entries, got {len(given)}")
    found = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise BadField(f"{name}.{short(key)}", "must be a token id, written as a string")
        found[int(key)] = real(-100.0, 100.0)(f"{name}.{key}", bias)
    return found


def _prompt(limits: RequestLimits, name: str, value: Any) -> list[str | list[int]]:
    """One or more prompts: a string, a list of them, token ids, or a list of lists of these."""
    string, ids = text(limits.characters), listed(whole(0, MOST_TOKEN_ID), limits.characters, least=1)
    if isinstance(value, str):
        return [string(name, value)]
    if not isinstance(value, list) or not value:
        raise BadField(name, f"must be a string, a list of strings or token ids, got {shown(value)}")
    if isinstance(value[0], int):
        return [ids(name, value)]
    found: list[str | list[int]] = listed(string if isinstance(value[0], str) else ids, limits.prompts)(name, value)
    return found


def _response_format(name: str, value: Any) -> dict[str, Any]:
    kind = one_of(("text", "json_object", "json_schema"))(f"{name}.type", mapping(name, value).get("type"))
    if kind != "json_schema":
        return record({"type": text(32)})(name, value)  # type: ignore[no-any-return]
    schema = record(
        {"name": text(64), "description": text(4096), "schema": mapping, "strict": flag}, needed=("name", "schema")
    )
    return record({"type": text(32), "json_schema": schema}, needed=("json_schema",))(name, value)  # type: ignore[no-any-return]


def _tool(name: str, value: Any) -> dict[str, Any]:
    own = record(
        {"name": name_of(64), "description": text(65_536), "parameters": mapping, "strict": flag}, needed=("name",)
    )

    def function(name: str, value: Any) -> Any:
        return own(name, without_inert(mapping(name, value)))

    return record({"type": text(64), "function": function}, needed=("function",))(name, value)  # type: ignore[no-any-return]


def _tool_choice(name: str, value: Any) -> str:
    """`none`, `auto`, `required`, or `=` and the name of a function."""
    if isinstance(value, str):
        return one_of(("none", "auto", "required"))(name, value)  # type: ignore[no-any-return]
    function = record({"name": name_of(64)}, needed=("name",))
    given = record({"type": one_of(("function",)), "function": function}, needed=("type", "function"))(name, value)
    return "=" + str(given["function"]["name"])
