"""Reading prompts and writing text: prefill, decode, stream, batches.

After any of these functions, also after one that was interrupted, the cache holds the prompt and
every token that was yielded, so that the next call continues the text.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.compress import cut_to_budget
from windlass.core.errors import UsageError, check_kind, shown
from windlass.core.parse import check_max_tokens
from windlass.core.step import PROMPT, Pass
from windlass.engine.decode import Decoder, Sampler, graph_for, wait_for
from windlass.engine.prefill import Progress, end_of_text, passes, rest_of, whole_passes
from windlass.engine.sampling import FinishReason, Result, Sampling
from windlass.engine.speculate import Drafter, Speculate, drafter_of, is_drafted, most_drafts, read_drafted, take_back
from windlass.engine.text import TextStream, encode, stops_of
from windlass.hf.forward import vocabulary_of
from windlass.hf.kv_cache import KVCache
from windlass.hf.passes import check_model
from windlass.policies.base import OneShot
from windlass.policies.wrappers import find


def check_reading(model: object, cache: object, progress: object) -> None:
    """Raises: UsageError for arguments that are not a model, a cache, and a callable or None."""
    check_model(model)
    check_kind("cache", cache, KVCache, "a KVCache", "Make one with windlass.KVCache(model)")
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function of (tokens done, tokens in all), or None, got {shown(progress)}")


def check_writing(tokenizer: object, prompts: Sequence[object], sampling: object, max_tokens: int) -> int:
    """Return `max_tokens` as an int. Raises: UsageError for an argument of another type or a negative number."""
    kind, way_out = PreTrainedTokenizerBase, "Pass it after the model"
    check_kind("tokenizer", tokenizer, kind, "the model's tokenizer", way_out)
    check_kind("sampling", sampling, (Sampling, type(None)), "a windlass.Sampling", "Write Sampling(temperature=0.7)")
    for row, prompt in enumerate(prompts):
        check_kind(f"the prompt of row {row}", prompt, str, "a text", "For token ids use windlass.prefill")
    return check_max_tokens(max_tokens)


def checked_prompts(
    model: PreTrainedModel, cache: KVCache, prompts: Sequence[Sequence[int]] | Tensor
) -> list[list[int]]:
    """Return the token ids of each row.

    Raises: UsageError for an empty row, a value that is no id of the vocabulary, or another number of rows.
    """
    check_kind("prompts", prompts, (list, tuple, Tensor), "a list of token ids for each row")
    if len(prompts) != cache.batch_size:
        raise UsageError(f"{len(prompts)} prompts for a cache of batch={cache.batch_size}. Give one prompt per row")
    vocabulary = vocabulary_of(model)
    rows = [_ids(row, prompt) for row, prompt in enumerate(prompts)]
    for row, ids in enumerate(rows):
        if not ids:
            raise UsageError(f"the prompt of row {row} is empty. Give at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise UsageError(f"token id {wrong} in row {row} is outside the model's vocabulary, 0 to {vocabulary - 1}")
    return rows


def _ids(row: int, prompt: object) -> list[int]:
    way_out = 'Use tokenizer(text)["input_ids"]'
    given = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UsageError(f"the prompt of row {row} must be a list of token ids, got {shown(prompt)}. {way_out}")
    wrong = [kind for kind in set(map(type, given)) if kind is bool or not issubclass(kind, Integral)]
    if wrong:
        first = next(each for each in given if type(each) in wrong)
        raise UsageError(f"the prompt of row {row} must be a list of token ids, and has {shown(first)}. {way_out}")
    return list(map(int, given))


@dataclass(frozen=True)
class RowStep:
    """One more token of a row. Once the row has ended, `token` is None and the rest is unchanged."""

    token: int | None
    stream: TextStream
    reason: FinishReason


class RowText:
    """The tokens and the text of a row. `reason` is "interrupted" while it goes on."""

    def __init__(self, stream: TextStream, max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.reason: FinishReason = "interrupted"
        self._pieces: list[str] = []
        self._stream, self._max_tokens = stream, max_tokens

    @property
    def left(self) -> int:
        """The most tokens that may follow."""
        return self._max_tokens - len(self.tokens)

    @property
    def text(self) -> str:
        """Everything given out."""
        return "".join(self._pieces)

    @property
    def length(self) -> int:
        """Characters of the text, those that are held back among them."""
        return self._stream.length

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text. None: there was none."""
        return self._stream.stopped_by

    def step(self, token: int) -> RowStep:
        """The row after `token`. `taken` records it once the cache has the token."""
        if self.reason != "interrupted":
            return RowStep(None, self._stream, self.reason)
        if token in self._stream.stops.ids:
            return RowStep(token, self._stream.ended(), "stop")
        is_last = len(self.tokens) + 1 == self._max_tokens
        stream = self._stream.pushed(token, is_last)
        return RowStep(token, stream, "stop" if stream.is_stopped else "length" if is_last else "interrupted")

    def taken(self, step: RowStep) -> str:
        """Record a step and return its piece of text."""
        if step.token is None:
            return ""
        self.tokens.append(step.token)
        self._pieces.append(step.stream.piece)
        self._stream, self.reason = step.stream, step.reason
        return step.stream.piece


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> Tensor:
    """Read one prompt of token ids per row, `cache.chunk` at a time, and return (batch, vocabulary) logits.

    The logits are those of each row's last token, and no others are computed. Prompts may differ in
    length. `progress` is called with (tokens done, tokens of the longest prompt) after each chunk.

    With a `OneShot` policy and an empty cache, eviction waits until the whole prompts were read, and read a second
    time if the policy has a `scoring_chunk`. An interrupted call evicts too.

    Raises: UsageError for an empty prompt, ids outside the vocabulary, or another number of rows. The cache is
    unchanged then.
    """
    check_reading(model, cache, progress)
    prompts = checked_prompts(model, cache, prompts)
    if find(cache.policy, OneShot) is None or any(cache.tokens_seen):
        return rest_of(passes(model, cache, prompts), progress)
    how = replace(PROMPT, defer_eviction=cache.budget is not None)
    try:
        return read_whole(model, cache, prompts, progress, how)
    finally:
        if cache.budget is not None:
            cut_to_budget(cache)


def read_whole(
    model: PreTrainedModel, cache: KVCache, prompts: Sequence[Sequence[int]], progress: Progress | None, how: Pass
) -> Tensor:
    """Read prompts into an empty cache, twice if the policy needs it, and return the logits of each last token."""
    return rest_of(whole_passes(model, cache, prompts, how), progress)


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    cache: KVCache,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[str | int] | None = None,
    progress: Progress | None = None,
    speculate: Speculate = None,
) -> "Stream":
    """Generate the text that follows `prompt`, piece by piece, see `Stream`.

    The prompt continues the cached text. Special tokens such as `<s>` are added at the start of a text only. The text
    ends before a string of `stop`, or at one of its token ids, as in `generate`. Text that may still become a stop
    string is held back until that is decided.

    `speculate="lookup"` drafts the tokens that followed the last ones earlier in the text, and verifies several in one
    pass. A `DraftModel` drafts by a smaller model with the same tokenizer. The text is the same, also under the same
    seed, but for near ties that bfloat16 rounds otherwise. A piece may have several tokens.

    Raises: UsageError for an empty prompt, a cache of several rows, an argument of another type, or `speculate` with a
    model that cannot take drafts back.
    """
    check_reading(model, cache, progress)
    if cache.batch_size != 1:
        raise UsageError(f"stream writes one text, but the cache has batch={cache.batch_size}. Use windlass.generate")
    run = _Run(
        model,
        tokenizer,
        [prompt],
        cache,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        progress=progress,
        speculate=speculate,
    )
    return Stream(run)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    cache: KVCache | None = None,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[str | int] | None = None,
    progress: Progress | None = None,
    speculate: Speculate = None,
) -> list[Result]:
    """Generate the texts that follow `prompts`, one per row of the cache (default: a new cache without a budget).

    Each row ends independently: before a string of `stop`, even within a token, at a token id of `stop`, or at
    `max_tokens`. Other rows continue unchanged. Strings are used in addition to the model's end-of-text tokens, and
    ids replace those. With an empty list only `max_tokens` ends a row.

    The cache has then read every token of each `Result`, including the end-of-text token or the whole tokens of the
    stop string. The next prompt continues after them. `speculate` is that of `stream`, for one prompt.

    Raises: UsageError for an empty prompt, another number of rows, or an argument of another type.
    """
    if isinstance(prompts, str):
        raise UsageError("generate takes a list of prompts, one per row. For one text use [prompt]")
    check_kind("prompts", prompts, (list, tuple), "a list of texts, one per row")
    if cache is None:
        cache = KVCache(model, batch=len(prompts))
    run = _Run(
        model,
        tokenizer,
        prompts,
        cache,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        progress=progress,
        speculate=speculate,
    )
    for _ in run:
        pass
    return run.results()


class Stream:
    """An iterator over pieces of text, and the result so far.

    You can stop early: the cache then holds the text given out so far and the text held back.
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
        """The text written until now, and the speeds."""
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
        stop: Sequence[str | int] | None,
        progress: Progress | None,
        speculate: Speculate,
    ) -> None:
        check_reading(model, cache, progress)
        most = check_writing(tokenizer, prompts, sampling, max_tokens)
        self._model, self._cache, self._progress = model, cache, progress
        self._speculate = speculate if is_drafted(speculate, cache) else None
        if self._speculate is not None and cache.batch_size > 1:
            raise UsageError(
                f"speculate drafts one text, but the cache has batch={cache.batch_size}. Leave speculate out"
            )
        stops = stops_of(stop, tokenizer, end_of_text(model), vocabulary_of(model))
        self._prompts = [
            encode(tokenizer, prompt, at == 0)
            for prompt, at in zip(prompts, _padded(cache.tokens_seen, prompts), strict=True)
        ]
        checked_prompts(model, cache, self._prompts)
        self._sampling = Sampling() if sampling is None else sampling
        self._rows = [RowText(TextStream.after(tokenizer, prompt, stops), most) for prompt in self._prompts]
        self._prefill_s = self._decode_s = 0.0

    def __iter__(self) -> Iterator[list[str]]:
        return self._written()

    def results(self) -> list[Result]:
        """One result per row."""
        return [
            Result(
                tokens=list(row.tokens),
                text=row.text,
                finish_reason=row.reason,
                prompt_tokens=len(prompt),
                prefill_tokens_per_s=len(prompt) / self._prefill_s if self._prefill_s else 0.0,
                decode_tokens_per_s=len(row.tokens) / self._decode_s if self._decode_s else 0.0,
                bytes_held=self._cache.bytes_held,
            )
            for row, prompt in zip(self._rows, self._prompts, strict=True)
        ]

    def _written(self) -> Iterator[list[str]]:
        started = time.perf_counter()
        logits = prefill(self._model, self._cache, self._prompts, self._progress)
        wait_for(logits.device)
        self._prefill_s = time.perf_counter() - started
        heads = self._cache.heads
        sampler = Sampler(self._sampling, self._texts(), logits.device, None if heads is None else heads.ranks)
        if self._speculate is not None:
            yield from self._speculated(sampler, logits, self._drafter())
            return
        # Communication between ranks is untested inside of a graph.
        decoder = Decoder(
            self._model, self._cache, sampler, logits, graph_for(logits.device) if heads is None else None
        )
        while True:
            started = time.perf_counter()
            steps = [row.step(token) for row, token in zip(self._rows, decoder.next_tokens(), strict=True)]
            goes_on = [step.reason == "interrupted" for step in steps]
            # Fed before it is yielded: a caller that stops here finds the token in the cache.
            decoder.advance(goes_on, is_last=not any(goes_on))
            self._decode_s += time.perf_counter() - started
            yield [row.taken(step) for row, step in zip(self._rows, steps, strict=True)]
            if not any(goes_on):
                return

    def _texts(self) -> Sequence[Sequence[int]]:
        """The text of each row up to here, or its prompt where the cache does not know all ids."""
        return self._prompts if (texts := self._cache.tokens) is None else texts

    def _drafter(self) -> Drafter:
        return drafter_of(self._speculate, self._model, self._texts()[0])

    def _speculated(self, sampler: Sampler, logits: Tensor, drafter: Drafter) -> Iterator[list[str]]:
        """Steps of one row, each of a token and the drafts behind it that the model has chosen."""
        model, cache, [row] = self._model, self._cache, self._rows
        token, goes_on = sampler.next_token(logits[0]), True
        while goes_on:
            started, before = time.perf_counter(), len(row.tokens)
            drafter.push(token)
            step = row.step(token)
            goes_on = step.reason == "interrupted"
            drafts = drafter.draft(most_drafts(cache, row.left - 1)) if goes_on else []
            read, pieces = read_drafted(model, cache, [token, *drafts]), list[str]()
            try:
                pieces.append(row.taken(step))
                for scores, draft in zip(read, [*drafts, None], strict=True):
                    if not goes_on or (token := sampler.next_token(scores)) != draft:
                        break
                    drafter.push(token)
                    step = row.step(token)
                    goes_on = step.reason == "interrupted"
                    pieces.append(row.taken(step))
            finally:  # also where an interrupt ends the step
                written = len(row.tokens) - before
                take_back(cache, 1 + len(drafts) - written)
            drafter.note(len(drafts), written - 1)
            self._decode_s += time.perf_counter() - started
            yield ["".join(pieces)]


def _padded(tokens_seen: list[int], prompts: Sequence[str]) -> list[int]:
    """Return `tokens_seen`, padded or cut to one per prompt. A wrong number of rows is reported later, with the ids."""
    return (tokens_seen + [0] * len(prompts))[: len(prompts)]
