"""What a client sends to `/v1/responses`, as the fields of a chat."""

from collections.abc import Mapping
from typing import Any, Final

from windlass.serve.errors import BadField
from windlass.serve.fields import Check, flag, mapping, name_of, one_of, record, text
from windlass.serve.messages import messages
from windlass.serve.settings import RequestLimits

TEXTS: Final = ("input_text", "output_text")  # what chats call text
DROPPED: Final = {"item": ("type", "id", "status"), "part": ("annotations", "logprobs")}  # of answers that come back
SHARED: Final = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "stream", "user"),
)  # fields that are those of a chat


def fields(limits: RequestLimits, common: Mapping[str, Check], own: Mapping[str, Check]) -> dict[str, Check]:
    """The checks of every field, by name; `common` and `own` are those of all routes that write."""
    form = record(
        {"type": one_of(("text", "json_object", "json_schema")), "name": name_of(64), "schema": mapping, "strict": flag}
        | {"description": text(4096)},
        needed=("type",),
    )
    return {
        **{name: common[name] for name in SHARED},
        **own,
        "input": _input(limits),
        "instructions": text(limits.characters),
        "max_output_tokens": common["max_tokens"],
        "text": record({"format": form}),
        "truncation": one_of(("disabled",)),
        "store": _store(own["store"]),
        "previous_response_id": _no_answer,
        "chunks": record({"recompute": text(64)}),
    }


def as_chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checked fields under the names that a chat has for them.

    Raises: BadField for a schema that is asked for, and not there.
    """
    before = [{"role": "system", "content": (given["instructions"],)}] if given.get("instructions") else []
    form = given.get("text", {}).get("format", {"type": "text"})
    if form["type"] == "json_schema":
        if "schema" not in form:
            raise BadField("text.format.schema", "is missing", "missing_required_parameter")
        form = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    names = {*SHARED, "chunks", "cache", "budget", "policy", "positions", "store", "recall", "sinks", "window"}
    chat = {name: value for name, value in given.items() if name in names}
    most = {"max_tokens": given["max_output_tokens"]} if "max_output_tokens" in given else {}
    return {**chat, **most, "messages": before + given["input"], "response_format": form}


def _input(limits: RequestLimits) -> Check:
    """A string, or a list of messages, among them answers of before as they were sent."""
    check = messages(limits)

    def checked(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return check(name, [{"role": "user", "content": value}])
        if not isinstance(value, list):
            raise BadField(name, "must be a string or a list of messages")
        return check(name, [_message(f"{name}.{at}", each) for at, each in enumerate(value)])

    return checked


def _message(name: str, value: Any) -> dict[str, Any]:
    given = mapping(name, value)
    if given.get("type", "message") != "message":
        raise BadField(f"{name}.type", "must be message: no other items are known here", "unsupported_parameter")
    kept = {field: each for field, each in given.items() if field not in DROPPED["item"]}
    if isinstance(kept.get("content"), list):
        kept["content"] = [_part(f"{name}.content.{at}", each) for at, each in enumerate(kept["content"])]
    return kept


def _part(name: str, value: Any) -> dict[str, Any]:
    given = {field: each for field, each in mapping(name, value).items() if field not in DROPPED["part"]}
    return {**given, "type": "text"} if given.get("type") in TEXTS else given


def _store(own: Check) -> Check:
    """How a cache holds keys; OpenAI's name for keeping an answer is the same."""

    def check(name: str, value: Any) -> Any:
        if value is True:
            raise BadField(name, "must be false: this server keeps no answers; or a store of the cache, such as int8")
        return own(name, value)

    return check


def _no_answer(name: str, _: Any) -> Any:
    raise BadField(
        name,
        "needs an answer that was kept, and this server keeps none; send the whole conversation as input",
        "unsupported_parameter",
    )
