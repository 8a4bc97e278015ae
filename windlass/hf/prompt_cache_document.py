"""The JSON document of a prompt-cache file: what is written, and how it is read by someone who does not trust it."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from windlass.cache.recall_options import DEFAULT_RECALL_STORE
from windlass.core.limits import SYSTEM
from windlass.core.places import MAX_PLACE
from windlass.core.spec import AUTO
from windlass.hf.policy_note import MAX_WRAPPED, PolicyNote
from windlass.hf.prompt_cache_fields import Fields, InconsistentFile, constant, is_whole, object_of, shown

# What an older windlass could not read raises the number; the first one reads files of plain stores.
PLAIN_VERSION, STORE_VERSION, MERGE_VERSION, BUDGETS_VERSION, AUTO_VERSION = 1, 2, 3, 4, 5
STATES_VERSION, PLACES_VERSION, RECALL_VERSION = 6, 7, 8  # the last has shares, too
WRAPPER_VERSION: Final = 9  # it has the hash of the chat template, too
SINKS_VERSION: Final = 10  # those of each row
VERSION: Final = SINKS_VERSION


@dataclass(frozen=True)
class LayerNote:
    """What a layer knows beside its tensors; `budget` only where it is not what the policy gives it at the start."""

    sliding_window: int | None
    has_evicted: bool
    budget: int | None = None


@dataclass(frozen=True)
class Contents:
    """The document, with the options beside the other fields. A layer without tokens has no note.

    `has_states`: whether there are states of recurrent layers. `has_places`: whether the text has pictures, so that it
    is kept where tokens are read. `chat_template` is the hash of the tokenizer's; None where nobody gave it.
    """

    model: str
    dtype: str
    fingerprint: str
    policy: PolicyNote
    standing: dict[str, Any]  # see `RowTable.to_json`; files have called it so since version 1
    has_tokens: bool
    layers: list[LayerNote | None]
    options: dict[str, Any]  # see `CacheOptions.document`
    has_states: bool = False
    has_places: bool = False
    chat_template: str | None = None


def next_places(contents: Contents) -> list[int]:
    """Per row, where the next token of text is read."""
    rows = zip(contents.standing["next_positions"], contents.standing["pictures"], strict=True)
    return [end + (pictures[-1][2] if pictures else 0) for end, pictures in rows]


def to_document(contents: Contents) -> tuple[dict[str, Any], int]:
    """What goes into the file, and the oldest format version that can say it."""
    document = asdict(contents)
    document |= document.pop("options")
    if document["limits"]["sinks"] == SYSTEM:
        return document, SINKS_VERSION
    del document["standing"]["sinks"]
    if contents.chat_template is not None or contents.policy.wrapped:
        return document, WRAPPER_VERSION
    del document["chat_template"]
    if document["recall"] or document["shares"] is not None:
        return document, RECALL_VERSION
    del document["recall"], document["recall_store"], document["shares"]
    if contents.has_places:
        return document, PLACES_VERSION
    del document["has_places"], document["standing"]["pictures"]
    if contents.has_states:
        return document, STATES_VERSION
    del document["has_states"]
    if document["positions"] == AUTO:
        return document, AUTO_VERSION
    if any(note is not None and note.budget is not None for note in contents.layers):
        return document, BUDGETS_VERSION
    for note in document["layers"]:
        if note is not None:
            del note["budget"]
    if document["merge"] is not None:
        return document, MERGE_VERSION
    del document["merge"]
    if document["store"] != "plain":
        return document, STORE_VERSION
    del document["store"]
    return document, PLAIN_VERSION


def parsed(text: str, version: int) -> Contents:
    """The document of a file of this version. Every field has its type and range; none is missing, none is unknown.

    Raises: InconsistentFile.
    """
    try:
        data = json.loads(text, object_pairs_hook=object_of, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise InconsistentFile(f"its header is no JSON that can be read ({shown(str(error))})") from None
    given = Fields(data, "its header")
    policy = _policy(given.inner("policy"), MAX_WRAPPED if version >= WRAPPER_VERSION else 1)
    limits = given.inner("limits")
    batch = given.whole("batch", 1)
    options = {
        "batch": batch,
        "positions": given.text("positions"),
        "limits": {
            "budget": limits.whole_or_none("budget", 1),
            "sinks": limits.text("sinks") if version >= SINKS_VERSION else limits.whole("sinks"),
            "window": limits.whole_or_none("window", 1),
            "chunk": limits.whole("chunk", 1),
            "rollback": limits.whole("rollback"),
        },
        "store": given.text("store") if version >= STORE_VERSION else "plain",
        "merge": given.text_or_none("merge") if version >= MERGE_VERSION else None,
        "recall": given.whole("recall") if version >= RECALL_VERSION else 0,
        "recall_store": given.text("recall_store") if version >= RECALL_VERSION else DEFAULT_RECALL_STORE,
        "shares": given.any("shares") if version >= RECALL_VERSION else None,  # `Shares` checks it
    }
    limits.end()
    contents = Contents(
        model=given.text("model"),
        dtype=given.text("dtype"),
        fingerprint=given.text("fingerprint"),
        policy=policy,
        standing=_rows(given.inner("standing"), batch, version),
        has_tokens=given.flag("has_tokens"),
        layers=[_layer(each, index, version) for index, each in enumerate(given.items("layers"))],
        options=options,
        has_states=version >= STATES_VERSION and given.flag("has_states"),
        has_places=version >= PLACES_VERSION and given.flag("has_places"),
        chat_template=given.text_or_none("chat_template") if version >= WRAPPER_VERSION else None,
    )
    given.end()
    if version < AUTO_VERSION and options["positions"] == AUTO:
        raise InconsistentFile(f"positions in its header is {AUTO!r}, which version {version} does not know")
    return contents


def _policy(given: Fields, depth: int) -> PolicyNote:
    """A policy with at most `depth` policies inside one another, itself among them."""
    name, inner = given.text_or_none("name"), given.inner("fields")
    fields: dict[str, float | int | bool | PolicyNote | None] = {
        key: _policy(inner.inner(key), depth - 1) for key in inner.objects() if depth > 1
    }
    fields.update(inner.numbers())
    note = PolicyNote(name, fields, given.text("label"))
    given.end()
    return note


def _layer(data: object, index: int, version: int) -> LayerNote | None:
    if data is None:
        return None
    given = Fields(data, f"the note of layer {index}")
    budget = given.whole_or_none("budget", 1) if version >= BUDGETS_VERSION else None
    note = LayerNote(given.whole_or_none("sliding_window", 1), given.flag("has_evicted"), budget)
    given.end()
    return note


def _rows(given: Fields, batch: int, version: int) -> dict[str, Any]:
    """The standing of `batch` rows, each of which is as `Row` says that it may be."""
    rows: dict[str, Any] = {
        "tokens_seen": given.wholes("tokens_seen", batch),
        "next_positions": given.wholes("next_positions", batch),
        "prompts": [[_span(pair, row) for pair in spans] for row, spans in enumerate(given.lists("prompts", batch))],
        "columns_seen": given.whole("columns_seen"),
        "tokens": given.null("tokens"),
        "since_edit": given.wholes("since_edit", batch),
        "pictures": given.lists("pictures", batch) if version >= PLACES_VERSION else [[]] * batch,
        "sinks": given.wholes("sinks", batch) if version >= SINKS_VERSION else [0] * batch,
    }
    given.end()
    for row in range(batch):
        seen, end, since = (rows[name][row] for name in ("tokens_seen", "next_positions", "since_edit"))
        if since > min(seen, end) or (since == seen and end != seen):
            raise InconsistentFile(
                f"row {row} has seen {seen} tokens, {since} of them since its last edit, and goes on at position {end}"
            )
        last = -1
        for start, stop in rows["prompts"][row]:
            if not last < start < stop <= end:
                raise InconsistentFile(f"the prompts of row {row} are not in order up to its end at {end}")
            last = stop
        _check_pictures(rows["pictures"][row], row, end)
    return rows


def _check_pictures(pictures: list[Any], row: int, end: int) -> None:
    """Of `row`, which goes on at position `end`: each [start, stop, offset], see `Picture`."""
    last = 0
    for each in pictures:
        is_three = isinstance(each, list) and len(each) == 3 and all(type(number) is int for number in each)
        if not (is_three and last <= each[0] <= each[1] <= end and 0 <= end + each[2] < MAX_PLACE):
            raise InconsistentFile(f"a picture of row {row} is {shown(each)}, not in order up to its end at {end}")
        last = each[1]


def _span(pair: object, row: int) -> list[int]:
    if isinstance(pair, list) and len(pair) == 2 and all(is_whole(each) for each in pair):
        return pair
    raise InconsistentFile(f"a prompt of row {row} is {shown(pair)}, not [start, end]")
