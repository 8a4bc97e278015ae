"""Prompts, pass by pass: whoever asks for the next one may do something else between two of them."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.core.step import PROMPT, Pass
from windlass.engine.feed import feed
from windlass.hf.kv_cache import KVCache
from windlass.policies.wrapper import scoring_chunk

Progress = Callable[[int, int], None]
Look = Callable[[int, Tensor], None]
"""Is told at which token a pass begins, and shown the (batch, tokens, vocabulary) logits of all of it."""
Passes = Generator[tuple[int, int], None, Tensor]
"""Tells after each pass how many tokens are done, of how many; returns the (batch, vocabulary) logits of each row's
last token. Nothing is left to do once all are done."""


def passes(
    model: PreTrainedModel,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    how: Pass = PROMPT,
    look: Look | None = None,
) -> Passes:
    """Feed the prompts in chunks; with a `look`, the logits of all tokens are computed."""
    longest = max(map(len, prompts))
    cache.reserve(longest + scoring_chunk(cache.policy))
    last: dict[int, Tensor] = {}
    for start, stop in _spans(cache, [*map(len, prompts)]):
        pieces = [list(prompt[start:stop]) for prompt in prompts]
        ends = {row: len(piece) - 1 for row, piece in enumerate(pieces) if 0 < len(prompts[row]) - start <= len(piece)}
        columns = sorted(set(ends.values())) if look is None else [*range(stop - start)]
        logits = feed(model, cache, pieces, columns, how)
        if look is not None:
            look(start, logits)
        for row, column in ends.items():
            last[row] = logits[row, columns.index(column)]
        yield stop, longest
    return torch.stack([last[row] for row in range(len(prompts))])


def whole_passes(
    model: PreTrainedModel,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    how: Pass,
    look: Look | None = None,
) -> Passes:
    """Feed the prompts in chunks to an empty cache, and a second time, its `scoring_chunk` at once, where the policy
    wants it; each is then half of the way. A `look` is shown the logits of the first time."""
    tokens = scoring_chunk(cache.policy)
    if not tokens:
        return (yield from passes(model, cache, prompts, how, look))
    first, longest, done = passes(model, cache, prompts, how, look), max(map(len, prompts)), 0
    while done < longest:
        done, _ = next(first)
        yield done // 2, longest
    logits = rest_of(first)
    for start in range(0, longest, tokens):
        pieces = [list(prompt[start : start + tokens]) for prompt in prompts]
        feed(model, cache, pieces, [], replace(how, is_second_pass=True))
        yield (longest + min(start + tokens, longest)) // 2, longest
    return logits


def rest_of(left: Passes, progress: Progress | None = None) -> Tensor:
    """Take all passes that are left; `progress` is told of each."""
    while True:
        try:
            told = next(left)
        except StopIteration as end:
            logits: Tensor = end.value
            return logits
        if progress is not None:
            progress(*told)


def _spans(cache: KVCache, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The columns [start, stop) of each pass over prompts of these lengths.

    With recurrent layers, which read no padding, no row ends in the middle of a pass: it idles in the next one.
    """
    longest = max(lengths)
    stops = {*range(cache.chunk, longest, cache.chunk), longest, *(lengths if cache.recurrent else ())}
    return list(pairwise([0, *sorted(stops)]))
