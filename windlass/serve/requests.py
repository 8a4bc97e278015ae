"""Requests of the engine, made from the fields of an HTTP request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.parse import AUTO, SYSTEM
from windlass.engine.recompute import recompute_of
from windlass.engine.request import Grammar, PromptParts, Request, Reuse, ReuseMode, tenant_of
from windlass.engine.scheduler import Service
from windlass.engine.sequence import is_alike
from windlass.engine.text import Stops
from windlass.serve.errors import ApiError, BadField, of_usage
from windlass.serve.forms import PLAIN, ReplyForm
from windlass.serve.prompts import Prompt, PromptTokenizer
from windlass.serve.schema import ChatRequest, CompletionRequest, Recompute, TextRequest

RECOMPUTE: Final = "first(16)"  # default of a request with chunks
LEGACY_MAX_TOKENS: Final = 16  # OpenAI's default for a completion
RESERVED_MAX_TOKENS: Final = 4096  # default for a text with a cache of its own, or recall: its memory is reserved


@dataclass(frozen=True)
class GenerationRequest:
    """One HTTP request: as many `requests` as there are texts, those of one prompt side by side, `choices` of each."""

    requests: tuple[Request, ...]
    choices: int
    is_streamed: bool
    has_usage: bool
    top_logprobs: int | None
    form: ReplyForm = PLAIN
    has_begun_thought: bool | None = None
    """See `Prompt`. None where a grammar leaves no room for a thought."""

    @property
    def options(self) -> CacheOptions:
        """The options of the row of every text."""
        return self.requests[0].options


def options_of(asked: Mapping[str, Any], default: CacheOptions, kinds: Sequence[CacheOptions] = ()) -> CacheOptions:
    """Return the options of the cache for a request that sets the options `asked`, or `default` if it sets none.

    If one of `kinds` has all options `asked`, the first such kind is returned. Otherwise the options `asked` replace
    those of `default`.

    Raises: ApiError for values that do not go together, with the option at fault.
    """
    own = dict(asked)
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
    """Return True if rows of a kind have all that a request asks for."""
    try:
        return CacheOptions(**(vars(kind) | own)).labels() == kind.labels()
    except UsageError:
        return False


def max_tokens_of(body: TextRequest, most: int, default: int) -> int:
    """The maximum number of tokens to write. Raises: BadField above the server's limit, or for two that differ."""
    asked = {"max_tokens": body.max_tokens}
    if isinstance(body, ChatRequest):
        asked["max_completion_tokens"] = body.max_completion_tokens
    given = {name: number for name, number in asked.items() if number is not None}
    for name, number in given.items():
        if number > most:
            raise BadField(name, f"must be at most {most} on this server, got {number}")
    if len(set(given.values())) > 1:
        raise BadField("max_tokens", "differs from max_completion_tokens. Give one of them")
    return next(iter(given.values()), min(default, most))


def max_seconds_of(body: TextRequest, most: float | None) -> float | None:
    """The timeout of a request. Raises: BadField for more than the server gives a request."""
    if body.max_seconds is not None and most is not None and body.max_seconds > most:
        raise BadField("max_seconds", f"must be at most {most:g} on this server, got {body.max_seconds:g}")
    return body.max_seconds


def parts_of(chunks: Recompute | None, prompt: Prompt) -> PromptParts | None:
    """Return the parts of a prompt that has chunks, or None for a prompt without chunks.

    Raises: BadField for an unknown mode, or for `chunks` of a prompt that has none.
    """
    if not prompt.spans:
        if chunks is not None:
            raise BadField("chunks", "needs parts of type chunk in messages")
        return None
    asked = RECOMPUTE if chunks is None or chunks.recompute is None else chunks.recompute
    try:
        return PromptParts(prompt.spans, recompute_of(asked))
    except UsageError as error:
        raise BadField("chunks.recompute", f"cannot be honoured: {error}") from error


def top_logprobs_of(body: ChatRequest | CompletionRequest) -> int | None:
    """Return the number of likeliest tokens to tell beside each token, or None for no log probabilities.

    Raises: BadField for `top_logprobs` without `logprobs`.
    """
    if isinstance(body, CompletionRequest):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise BadField("top_logprobs", "needs logprobs to be true")
    return body.top_logprobs if body.logprobs else None


@dataclass(frozen=True)
class RequestBuilder:
    """Makes requests of the engine. `most_texts`: of one HTTP request. `reuse`: the mode of one that names none."""

    service: Service
    tokenizer: PromptTokenizer
    most_texts: int
    reuse: ReuseMode

    def built(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Prompt],
        grammars: Sequence[Grammar],
        default_tokens: int,
        owner: str,
        arrived: float,
    ) -> GenerationRequest:
        """Return a request for each text of each prompt. `grammars` has one for each text, or none.

        Raises: ApiError for a field that cannot be honoured.
        """
        self._check(body, prompts)
        options = options_of(body.cache_options, self.service.options, self.service.kinds)
        if prompts[0].pins and options.sinks != SYSTEM:
            raise BadField(
                "pin", f'needs rows with sinks "system", and these have {options.sinks}. Send "sinks": "system"'
            )
        is_of_rows = any(is_alike(options, kind) for kind in self.service.kinds)
        is_reserved = bool(options.recall) or not is_of_rows
        default = min(default_tokens, RESERVED_MAX_TOKENS) if is_reserved else default_tokens
        most, has_echo = max_tokens_of(body, self.service.limits.max_tokens, default), _has_echo(body)
        if not most and not has_echo:
            raise BadField("max_tokens", "must be at least 1 (0 is for a completion with echo)")
        top, form = top_logprobs_of(body), prompts[0].form
        stops = self._stops(body, form)
        marks = form.marks(isinstance(body, ChatRequest) and bool(body.callable))
        hidden = self.tokenizer.hidden(marks) if isinstance(body, ChatRequest) else None
        requests = tuple(
            Request(
                prompt=prompt.ids,
                options=options,
                max_tokens=most,
                stops=stops,
                sampling=body.sampling(at % body.n),
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
                top_logprobs=top,
                scores_prompt=has_echo and top is not None,
                grammar=grammars[at] if grammars else None,
                tenant=tenant_of(owner, body.user),
                seconds=max_seconds_of(body, self.service.limits.seconds),
                arrived=arrived,
                reuse=Reuse(
                    lookup=body.cache.lookup,
                    store=body.cache.store,
                    name=body.cache.name,
                    mode=self._mode(body.cache.reuse),
                ),
                parts=parts_of(body.chunks, prompt),
                ends=prompt.ends,
                head=prompt.head,
                pins=prompt.pinned,
                hidden=hidden,
                speculate=body.speculate,
            )
            for at, prompt in enumerate(prompt for prompt in prompts for _ in range(body.n))
        )
        return GenerationRequest(
            requests=requests,
            choices=body.n,
            is_streamed=body.stream,
            has_usage=body.stream_options is not None and body.stream_options.include_usage,
            top_logprobs=top,
            form=form,
            has_begun_thought=None if grammars else prompts[0].has_begun_thought,
        )

    def _check(self, body: TextRequest, prompts: Sequence[Prompt]) -> None:
        if body.n * len(prompts) > self.most_texts:
            raise BadField("n", f"times {len(prompts)} prompts must be at most {self.most_texts} texts")
        if body.stream_options is not None and not body.stream:
            raise BadField("stream_options", "requires `stream: true`")
        self.tokenizer.check("logit_bias", [*map(int, body.logit_bias)])
        for prompt in prompts:
            self.tokenizer.check("prompt", prompt.ids)
            if not prompt.ids:
                raise ApiError(400, "the prompt is empty. Give at least one token", "prompt", "invalid_value")

    def _mode(self, spec: str | None) -> ReuseMode:
        try:
            return self.reuse if spec is None else ReuseMode.of(spec)
        except UsageError as error:
            raise BadField("cache.reuse", f"cannot be honoured: {error}") from error

    def _stops(self, body: TextRequest, form: ReplyForm) -> Stops:
        try:
            stops = self.tokenizer.stops(body.stop)
        except UsageError as error:
            raise of_usage(error, "stop") from error
        if isinstance(body, ChatRequest):
            stops = replace(stops, ids=stops.ids | {*self.tokenizer.marks("".join(form.calls.ends)).values()})
        if body.suffix and self.tokenizer.infill is not None:
            return replace(stops, ids=stops.ids | self.tokenizer.infill.ends)
        return stops


def _has_echo(body: ChatRequest | CompletionRequest) -> bool:
    """Return True if the prompt is echoed. Raises: BadField where the prompt is in parts, or around a gap."""
    if not body.echo:
        return False
    for name, given in (("suffix", body.suffix), ("chunks", body.chunks)):
        if given:
            raise BadField("echo", f"and {name} exclude each other. Leave one of them out")
    return True
