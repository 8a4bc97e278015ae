"""From the fields of a request to what the engine is asked for."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.parse import AUTO
from windlass.engine.recompute import recompute_of
from windlass.engine.request import Grammar, PromptParts, Request, Reuse
from windlass.engine.sampling import Sampling
from windlass.engine.scheduler import Service
from windlass.engine.sequence import is_alike
from windlass.serve.errors import ApiError, BadField, of_usage
from windlass.serve.prompts import Prompt, PromptTokenizer
from windlass.serve.schema import OWN

RECOMPUTE: Final = "first(16)"  # where a request has chunks, and does not say what of them is read again
SEEDS: Final = 2**62
RANDOM: Final = -1  # a seed that stands for none
LEGACY_MAX_TOKENS: Final = 16  # what OpenAI writes after a prompt where nothing else is said
ALONE_MAX_TOKENS: Final = 4096  # by default, of a text with a cache of its own: its memory is counted by them
Given = Mapping[str, Any]


@dataclass(frozen=True)
class GenerationRequest:
    """One HTTP request: as many `requests` as there are texts, those of one prompt side by side, `choices` of each."""

    requests: tuple[Request, ...]
    choices: int
    is_streamed: bool
    has_usage: bool
    top_logprobs: int | None
    has_begun_thought: bool | None = None
    """See `Prompt`; None, too, where a grammar leaves no room for a thought."""

    @property
    def options(self) -> CacheOptions:
        """Those of every text's row."""
        return self.requests[0].options


def options_of(given: Given, default: CacheOptions, kinds: Sequence[CacheOptions] = ()) -> CacheOptions:
    """The options of the cache that a request asks for; `default` itself where it asks for none.

    Else those of the first of `kinds` that is as the request asks, or the `default` ones with what it asks for.

    Raises: ApiError for values that do not go together, saying which.
    """
    own = {name: given[name] for name in OWN if given.get(name) is not None}
    if not own:
        return default
    if (kind := next((kind for kind in kinds if _is_as_asked(kind, own)), None)) is not None:
        return kind
    if "budget" in own and "policy" not in own and default.budget is None:
        own["policy"] = AUTO  # without a budget nothing is evicted, and no policy was chosen
    try:
        return CacheOptions(**(vars(default) | own))
    except UsageError as error:
        blamed = next((name for name in own if name in str(error)), "positions" if "positions" in own else None)
        message = str(error) if blamed is None or blamed in str(error) else f"{blamed}={own[blamed]!r}: {error}"
        raise ApiError(400, message, blamed, "invalid_value") from error


def _is_as_asked(kind: CacheOptions, own: dict[str, Any]) -> bool:
    """Whether rows of a kind have all that a request asks for."""
    try:
        return CacheOptions(**(vars(kind) | own)).labels() == kind.labels()
    except UsageError:
        return False


def max_tokens_of(given: Given, most: int, default: int) -> int:
    """Raises: BadField for more than the server writes, or two numbers that differ."""
    asked = {name: given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    for name, number in asked.items():
        if number > most:
            raise BadField(name, f"must be at most {most} on this server, got {number}")
    if len(set(asked.values())) > 1:
        raise BadField("max_tokens", "differs from max_completion_tokens; give one of them")
    return next(iter(asked.values()), min(default, most))


def max_seconds_of(given: Given, most: float | None) -> float | None:
    """Raises: BadField for more than the server gives a request."""
    asked: float | None = given.get("max_seconds")
    if asked is not None and most is not None and asked > most:
        raise BadField("max_seconds", f"must be at most {most:g} on this server, got {asked:g}")
    return asked


def sampling_of(given: Given, at: int) -> Sampling:
    """How text number `at` of a prompt is drawn; without a seed, or with -1, by one that nobody knows."""
    seed, top_p = given.get("seed", RANDOM), given.get("top_p", 1.0)
    if seed == RANDOM:
        seed = secrets.randbelow(SEEDS)
    return Sampling(
        temperature=given.get("temperature", 1.0) if top_p else 0.0,  # none but the likeliest token is in top_p=0
        top_k=max(0, given.get("top_k", 0)),
        top_p=top_p or 1.0,
        min_p=given.get("min_p", 0.0),
        repetition_penalty=given.get("repetition_penalty", 1.0),
        seed=(seed + at) % SEEDS,
    )


def parts_of(given: Given, prompt: Prompt) -> PromptParts | None:
    """What is asked of the chunks of a prompt; None where it has none.

    Raises: BadField for a mode that there is not, or one that nothing asks for.
    """
    asked = given.get("chunks")
    if not prompt.spans:
        if asked is not None:
            raise BadField("chunks", "needs parts of type chunk in messages")
        return None
    try:
        return PromptParts(prompt.spans, recompute_of((asked or {}).get("recompute", RECOMPUTE)))
    except UsageError as error:
        raise BadField("chunks.recompute", f"cannot be honoured: {error}") from error


def asked_of(
    given: Given,
    prompts: Sequence[Prompt],
    grammars: Sequence[Grammar],
    service: Service,
    words: PromptTokenizer,
    default_tokens: int,
    tenant: str,
    most_texts: int,
) -> GenerationRequest:
    """All of it. `grammars`: one for each text, or none.

    Raises: ApiError for what cannot be honoured.
    """
    choices = given.get("n", 1)
    if choices * len(prompts) > most_texts:
        raise BadField("n", f"times {len(prompts)} prompts must be at most {most_texts} texts")
    if "stream_options" in given and not given.get("stream", False):
        raise BadField("stream_options", "is for streams; set stream, or leave it out")
    words.check("logit_bias", list(given.get("logit_bias", {})))
    for prompt in prompts:
        words.check("prompt", prompt.ids)
        if not prompt.ids:
            raise ApiError(400, "the prompt is empty; give at least one token", "prompt", "invalid_value")
    try:
        stops = words.stops(given.get("stop", []))
    except UsageError as error:
        raise of_usage(error, "stop") from error
    if given.get("suffix") and words.infill is not None:
        stops = replace(stops, ids=stops.ids | words.infill.ends)
    top, has_echo = _top_logprobs(given), _has_echo(given)
    options = options_of(given, service.options, service.kinds)
    is_of_rows = any(is_alike(options, kind) for kind in service.kinds)
    default = default_tokens if is_of_rows else min(default_tokens, ALONE_MAX_TOKENS)
    most = max_tokens_of(given, service.limits.max_tokens, default)
    if not most and not has_echo:
        raise BadField("max_tokens", "must be at least 1; 0 is for a completion with echo")
    reuse = Reuse(**given.get("cache", {}))
    requests = tuple(
        Request(
            prompt=prompt.ids,
            options=options,
            max_tokens=most,
            stops=stops,
            sampling=sampling_of(given, at % choices),
            presence_penalty=given.get("presence_penalty", 0.0),
            frequency_penalty=given.get("frequency_penalty", 0.0),
            logit_bias=given.get("logit_bias", {}),
            top_logprobs=top,
            scores_prompt=has_echo and top is not None,
            grammar=grammars[at] if grammars else None,
            # Texts of one key share what was read before; those of its `user`s do not.
            tenant=f"{tenant}/{given.get('user', '')}",
            seconds=max_seconds_of(given, service.limits.seconds),
            reuse=reuse,
            parts=parts_of(given, prompt),
            ends=prompt.ends,
            head=prompt.head,
        )
        for at, prompt in enumerate(prompt for prompt in prompts for _ in range(choices))
    )
    return GenerationRequest(
        requests,
        choices,
        given.get("stream", False),
        given.get("stream_options", {}).get("include_usage", False),
        top,
        None if grammars else prompts[0].has_begun_thought,
    )


def _has_echo(given: Given) -> bool:
    """Raises: BadField for an echo of a prompt that is in parts, or around a gap."""
    if not given.get("echo"):
        return False
    for name in ("suffix", "chunks"):
        if given.get(name):
            raise BadField("echo", f"and {name} exclude each other; leave one of them out")
    return True


def _top_logprobs(given: Given) -> int | None:
    """How many are asked for beside a token's own: a number for completions, true and another field for chats."""
    asked = given.get("logprobs")
    if asked is None or asked is False:
        if given.get("top_logprobs"):
            raise BadField("top_logprobs", "needs logprobs to be true")
        return None
    return int(given.get("top_logprobs", 0)) if asked is True else int(asked)
