"""One case: the text is read into a cache, then the questions are asked, or the text itself is predicted."""

import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.engine import generate as engine
from windlass.engine.text import encode
from windlass.evals.fit import Fitted, task_errors
from windlass.evals.grid import Settings
from windlass.evals.task import Task, Turn
from windlass.hf.attach import forward
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


def cache_of(model: PreTrainedModel, settings: Settings, budget: int | None, has_questions: bool) -> KVCache:
    """An empty cache of `budget` slots.

    Raises: UsageError for a budget that leaves no room beside sinks and window.
    """
    chunk = (CHUNK if budget is None else min(CHUNK, budget)) if has_questions else STRIDE
    return KVCache(
        model,
        budget=budget,
        policy=settings.policy,
        chunk=chunk,
        positions=settings.positions,
        rollback=0,
        store=settings.store,
        merge=settings.merge,
    )


def answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: KVCache,
    label: str,
    task: Task,
    fitted: Fitted,
    is_aware: bool,
) -> list[Outcome]:
    """The model's answers, greedy, to every question on the text.

    Aware, the first question is read with the text. Each question finds the cache as the text left it.
    """
    started = time.perf_counter()
    turns = fitted.sample.turns
    ids = encode(tokenizer, fitted.sample.context, is_start=True)
    if is_aware:
        ids = ids + encode(tokenizer, turns[0].question, is_start=False)
    engine.prefill(model, cache, [ids])
    slots_held = max(layer.most_held for layer in cache.layers)
    outcomes = []
    for number, turn in enumerate(turns):
        asked = copy.deepcopy(cache) if len(turns) > 1 else cache
        prompt = turn.prefix if is_aware and number == 0 else turn.question + turn.prefix
        result = engine.generate(model, tokenizer, [prompt], asked, task.answer_tokens)[0]
        with task_errors(label):
            score = task.score(turn, result.text)
        now = time.perf_counter()
        outcomes.append(Outcome(turn, result.text, score, {}, slots_held, result.bytes_held, now - started))
        started = now
    return outcomes


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
    slots_held = max(layer.most_held for layer in cache.layers)
    return Outcome(None, "", None, measures, slots_held, cache.nbytes(), time.perf_counter() - started)


def _log_probabilities(model: PreTrainedModel, cache: KVCache, piece: Tensor) -> Tensor:
    """(tokens, vocabulary) of the token after each one of the piece, which is read."""
    logits = forward(model, piece, None, cache, list(range(piece.shape[1])))
    return logits[0].double().log_softmax(-1)
