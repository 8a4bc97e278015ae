"""Reading prompts and writing text: prefill, decode, stream, batches.

After any of these functions, also after one that was interrupted, the cache holds the prompt and
every token that was yielded, so that the next call continues the text.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.compress import cut_to_budget
from windlass.core.errors import UsageError
from windlass.core.step import PROMPT, Pass
from windlass.engine.decode import Decoder
from windlass.engine.graph import graph_for, wait_for
from windlass.engine.result import FinishReason, Result
from windlass.engine.sampling import Sampler, Sampling
from windlass.engine.text import TextStream, encode
from windlass.hf.forward import forward, vocabulary_of
from windlass.hf.kv_cache import KVCache
from windlass.policies.interfaces import OneShot
from windlass.policies.wrapper import find, scoring_chunk

Progress = Callable[[int, int], None]


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> Tensor:
    """Read one prompt of token ids per row, `cache.chunk` at a time; returns (batch, vocabulary) logits.

    The logits are those of each row's last token, and no others are computed. Prompts may differ in
    length. `progress` is called with (tokens done, tokens of the longest prompt) after each chunk.

    For a policy that is `OneShot`, prompts to an empty cache are held whole, read a second time if it has a
    `scoring_chunk`, and then cut to the budget, if there is one; after an interrupt, too.

    Raises: UsageError for an empty prompt, ids outside the vocabulary, or another number of rows;
    nothing is then written.
    """
    _check_prompts(model, cache, prompts)
    if find(cache.policy, OneShot) is None or any(cache.tokens_seen):
        return _read(model, cache, prompts, progress)
    how = replace(PROMPT, defer_eviction=cache.budget is not None)
    try:
        tokens = scoring_chunk(cache.policy)
        if not tokens:
            return _read(model, cache, prompts, progress, how)
        read, again = _halves(progress)
        logits = _read(model, cache, prompts, read, how)
        longest = max(map(len, prompts))
        for start in range(0, longest, tokens):
            pieces = [list(prompt[start : start + tokens]) for prompt in prompts]
            _feed(model, cache, pieces, [], replace(how, is_second_pass=True))
            again(min(start + tokens, longest), longest)
        return logits
    finally:
        if cache.budget is not None:
            cut_to_budget(cache)


def _halves(progress: Progress | None) -> tuple[Progress, Progress]:
    """Progress of a first and of a second pass over the prompts, each half of the way."""

    def at(before: int) -> Progress:
        return lambda done, total: None if progress is None else progress((before * total + done) // 2, total)

    return at(0), at(1)


def _read(
    model: PreTrainedModel,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    progress: Progress | None,
    how: Pass = PROMPT,
) -> Tensor:
    """Feed the prompts in chunks; the logits of each row's last token."""
    longest = max(map(len, prompts))
    cache.reserve(longest + scoring_chunk(cache.policy))
    last: dict[int, Tensor] = {}
    for start in range(0, longest, cache.chunk):
        pieces = [list(prompt[start : start + cache.chunk]) for prompt in prompts]
        ends = {row: len(piece) - 1 for row, piece in enumerate(pieces) if 0 < len(prompts[row]) - start <= len(piece)}
        columns = sorted(set(ends.values()))
        logits = _feed(model, cache, pieces, columns, how)
        for row, column in ends.items():
            last[row] = logits[row, columns.index(column)]
        if progress is not None:
            progress(min(start + cache.chunk, longest), longest)
    return torch.stack([last[row] for row in range(len(prompts))])


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    cache: KVCache,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> "Stream":
    """The text that follows `prompt`, piece by piece; see `Stream`.

    The prompt continues what the cache holds; special tokens such as `<s>` are added at the start of
    a text only. Ends at a token of `stop`, by default the model's end-of-text tokens.

    Raises: UsageError for an empty prompt or a cache of several rows.
    """
    if cache.batch_size != 1:
        raise UsageError(f"stream writes one text, but the cache has batch={cache.batch_size}; use windlass.generate")
    return Stream(_Run(model, tokenizer, [prompt], cache, max_tokens, sampling, stop, progress))


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    cache: KVCache | None = None,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """The texts that follow `prompts`, one per row of the cache (by default a new one without budget).

    Each row ends by itself, at a token of `stop` (by default the model's end-of-text tokens) or at
    `max_tokens`; a row that has ended leaves the others as they are.

    Raises: UsageError for an empty prompt or another number of rows.
    """
    if isinstance(prompts, str):
        raise UsageError("generate takes a list of prompts, one per row; for one text use [prompt]")
    if cache is None:
        cache = KVCache(model, batch=len(prompts))
    run = _Run(model, tokenizer, prompts, cache, max_tokens, sampling, stop, progress)
    for _ in run:
        pass
    return run.results()


class Stream:
    """An iterator over pieces of text, and the result so far.

    Stopping early is fine: the cache then holds what was given out.
    """

    def __init__(self, run: "_Run") -> None:
        self._run = run
        self._pieces = (pieces[0] for pieces in run if pieces[0])

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def result(self) -> Result:
        """What was written until now, and the speeds."""
        return self._run.results()[0]


class _Run:
    """One call of the engine: reads the prompts, then iterates over steps, a piece of text per row."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[str],
        cache: KVCache,
        max_tokens: int,
        sampling: Sampling | None,
        stop: Sequence[int] | None,
        progress: Progress | None,
    ) -> None:
        if max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, got {max_tokens}")
        self._model, self._cache, self._progress = model, cache, progress
        self._max_tokens = max_tokens
        self._stop = frozenset(_end_of_text(model) if stop is None else stop)
        self._prompts = [
            encode(tokenizer, prompt, at == 0)
            for prompt, at in zip(prompts, _padded(cache.tokens_seen, prompts), strict=True)
        ]
        _check_prompts(model, cache, self._prompts)
        self._sampling = Sampling() if sampling is None else sampling
        self._texts = [TextStream(tokenizer, prompt) for prompt in self._prompts]
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._reasons: list[FinishReason] = ["interrupted" for _ in prompts]
        self._prefill_s = self._decode_s = 0.0

    def __iter__(self) -> Iterator[list[str]]:
        return self._written()

    def results(self) -> list[Result]:
        """One result per row."""
        return [
            Result(
                tokens=list(tokens),
                text=text.text,
                finish_reason=reason,
                prompt_tokens=len(prompt),
                prefill_tokens_per_s=len(prompt) / self._prefill_s if self._prefill_s else 0.0,
                decode_tokens_per_s=len(tokens) / self._decode_s if self._decode_s else 0.0,
                bytes_held=self._cache.nbytes(),
            )
            for tokens, text, reason, prompt in zip(
                self._tokens, self._texts, self._reasons, self._prompts, strict=True
            )
        ]

    def _written(self) -> Iterator[list[str]]:
        started = time.perf_counter()
        logits = prefill(self._model, self._cache, self._prompts, self._progress)
        wait_for(logits.device)
        self._prefill_s = time.perf_counter() - started
        sampler = Sampler(self._sampling, self._prompts, logits.device)
        decoder = Decoder(self._model, self._cache, sampler, logits, graph_for(logits.device))
        while True:
            started = time.perf_counter()
            tokens = decoder.next_tokens()
            pairs = zip(tokens, self._reasons, strict=True)
            chosen = [token if reason == "interrupted" else None for token, reason in pairs]
            reasons = [self._reason(row, token) for row, token in enumerate(chosen)]
            is_last = "interrupted" not in reasons
            # Fed before it is yielded: a caller that stops here finds the token in the cache.
            decoder.advance([reason == "interrupted" for reason in reasons], is_last)
            self._decode_s += time.perf_counter() - started
            self._reasons = reasons
            yield [self._pushed(row, token) for row, token in enumerate(chosen)]
            if is_last:
                return

    def _reason(self, row: int, token: int | None) -> FinishReason:
        """Why row `row` has ended after `token`; "interrupted" while it goes on."""
        if token is None:
            return self._reasons[row]
        if token in self._stop:
            return "stop"
        return "length" if len(self._tokens[row]) + 1 == self._max_tokens else "interrupted"

    def _pushed(self, row: int, token: int | None) -> str:
        """Add a token to its row; returns the new piece of text."""
        if token is None:
            return ""
        self._tokens[row].append(token)
        piece = "" if self._reasons[row] == "stop" else self._texts[row].push(token)
        return piece if self._reasons[row] == "interrupted" else piece + self._texts[row].end()


@torch.no_grad()
def _feed(model: PreTrainedModel, cache: KVCache, pieces: list[list[int]], columns: list[int], how: Pass) -> Tensor:
    """One step of the model over rows of different lengths; logits of `columns` only."""
    width = max(map(len, pieces))
    ids = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], device=cache.device)
    mask = None
    if any(len(piece) < width for piece in pieces):
        mask = torch.tensor([[1] * len(piece) + [0] * (width - len(piece)) for piece in pieces], device=cache.device)
    return forward(model, ids, mask, cache, columns, how=how)


def _check_prompts(model: PreTrainedModel, cache: KVCache, prompts: Sequence[Sequence[int]]) -> None:
    if len(prompts) != cache.batch_size:
        raise UsageError(f"{len(prompts)} prompts for a cache of batch={cache.batch_size}; give one prompt per row")
    vocabulary = vocabulary_of(model)
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise UsageError(f"the prompt of row {row} is empty; give at least one token")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise UsageError(f"token id {wrong} in row {row} is outside the model's vocabulary, 0 to {vocabulary - 1}")


def _end_of_text(model: PreTrainedModel) -> list[int]:
    config = model.generation_config
    ends = None if config is None else config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _padded(tokens_seen: list[int], prompts: Sequence[str]) -> list[int]:
    """`tokens_seen` for as many rows as there are prompts; a wrong number is reported once tokens are known."""
    return (tokens_seen + [0] * len(prompts))[: len(prompts)]
