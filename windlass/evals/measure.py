"""One case: the text is read into a cache, then the questions are asked, or the text itself is predicted."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.core.step import PROMPT
from windlass.engine import generate as engine
from windlass.engine.text import encode
from windlass.evals.fit import Fitted, task_errors
from windlass.evals.grid import Settings
from windlass.evals.task import Task, Turn
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache

CHUNK = 128  # tokens of a text with questions per step, or the budget where that is less
STRIDE = 16  # tokens per step of a text that is predicted: what a token sees beyond the budget


@dataclass(frozen=True)
class Outcome:
    """What came of one question, or of a text without questions (`turn` and `score` None).

    `slots_held` counts the slots in use per layer once the text was read, `bytes_held` all that is
    allocated afterwards, at rest.
    """

    turn: Turn | None
    output: str
    score: float | None
    measures: dict[str, float | None]
    slots_held: int
    bytes_held: int
    seconds: float


def cache_of(
    model: PreTrainedModel, settings: Settings, budget: int | None, has_questions: bool, batch: int = 1
) -> KVCache:
    """An empty cache of `budget` slots for each of `batch` texts.

    Raises: UsageError for a budget that leaves no room beside sinks and window.
    """
    chunk = (CHUNK if budget is None else min(CHUNK, budget)) if has_questions else STRIDE
    options = replace(settings.options, budget=budget, chunk=chunk, batch=batch, rollback=0)
    return KVCache.from_options(model, options)


def answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: KVCache,
    label: str,
    task: Task,
    fitted: Sequence[Fitted],
    is_aware: bool,
) -> list[list[Outcome]]:
    """The model's answers, greedy, to every question on each text; one text per row of the cache.

    Aware, the first question is read with the text. Each question finds the cache as the text left it.
    Bytes and seconds are those of all rows, divided by their number.
    """
    started = time.perf_counter()
    prompts = [encode(tokenizer, each.sample.context, is_start=True) for each in fitted]
    if is_aware:
        for each, prompt in zip(fitted, prompts, strict=True):
            prompt += encode(tokenizer, each.sample.turns[0].question, is_start=False)
    engine.prefill(model, cache, prompts)
    slots_held = _slots_held(cache)
    outcomes: list[list[Outcome]] = [[] for _ in fitted]
    for number, turns in enumerate(zip(*(each.sample.turns for each in fitted), strict=True)):
        asked = copy.deepcopy(cache) if len(fitted[0].sample.turns) > 1 else cache
        asking = [turn.prefix if is_aware and number == 0 else turn.question + turn.prefix for turn in turns]
        results = engine.generate(model, tokenizer, asking, asked, task.answer_tokens)
        with task_errors(label):
            scores = [float(task.score(turn, result.text)) for turn, result in zip(turns, results, strict=True)]
        now = time.perf_counter()
        bytes_held, seconds = round(asked.bytes_held / len(fitted)), (now - started) / len(fitted)
        for row, (turn, result, score) in enumerate(zip(turns, results, scores, strict=True)):
            outcomes[row].append(Outcome(turn, result.text, score, {}, slots_held[row], bytes_held, seconds))
        started = now
    return outcomes


def _slots_held(cache: KVCache) -> list[int]:
    """Per row, the slots in use in the layer and head that has most."""
    held = [(layer.positions >= 0).sum(-1).amax(-1) for layer in cache.layers]
    counts: list[int] = torch.stack(held).amax(0).tolist()
    return counts


@torch.no_grad()
def predicted(model: PreTrainedModel, cache: KVCache, ids: list[int], full: KVCache | None) -> Outcome:
    """How well every token but the first is predicted from those before it, as far as the cache has kept them.

    `nll` is the mean negative log-likelihood, `kl` the mean divergence of what `full` (a cache without
    budget) predicts from what `cache` does; both in nats per token.
    """
    started = time.perf_counter()
    nll = kl = 0.0
    tokens = len(ids) - 1
    for each in (cache,) if full is None else (cache, full):
        each.reserve(tokens)
    for start in range(0, tokens, STRIDE):
        piece = torch.tensor([ids[start : min(start + STRIDE, tokens)]], device=model.device)
        targets = torch.tensor(ids[start + 1 : start + 1 + piece.shape[1]], device=model.device)
        ours = _log_probabilities(model, cache, piece)
        nll -= float(ours.gather(-1, targets[:, None]).sum())
        if full is not None:
            wanted = _log_probabilities(model, full, piece)
            kl += float((wanted.exp() * (wanted - ours)).sum())
    measures = {"nll": nll / tokens, "kl": None if full is None else kl / tokens}
    slots_held = max(layer.table.occupancy_bound for layer in cache.layers)
    return Outcome(None, "", None, measures, slots_held, cache.bytes_held, time.perf_counter() - started)


def _log_probabilities(model: PreTrainedModel, cache: KVCache, piece: Tensor) -> Tensor:
    """(tokens, vocabulary) of the token after each one of the piece, which is read."""
    logits = forward(model, piece, None, cache, list(range(piece.shape[1])), how=PROMPT)
    return logits[0].double().log_softmax(-1)
