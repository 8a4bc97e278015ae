"""What a request took, for its client: tokens, and what of them the cache still holds."""

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.engine.request import Usage

Options = Mapping[str, int | str | None]


def windlass_of(usages: Sequence[Usage], options: Options, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """The tokens that the cache read, keeps and has evicted, summed over texts, and its options.

    `left_out` has a note for each part of the request that the answer is without.
    """
    names = ("seen", "kept", "evicted", "recalled", "recomputed", "bytes")
    notes = {"left_out": [*left_out]} if left_out else {}
    return {name: sum(getattr(each, name) for each in usages) for name in names} | {"options": dict(options)} | notes


def usage_of(usages: Sequence[Usage], choices: int, options: Options, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """OpenAI's usage of an answer; `choices` texts share a prompt, which counts once."""
    firsts = usages[::choices]
    prompt, written = sum(each.prompt for each in firsts), sum(each.written for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached for each in firsts)},
        "windlass": windlass_of(usages, options, left_out),
    }
