"""Turns of a conversation with an engine, and the same turns of one cache."""

from typing import Any

from transformers import PreTrainedModel

from tests.helpers.schedulers import events_of, request_of
from windlass import KVCache
from windlass.cache.options import CacheOptions
from windlass.core.step import PROMPT
from windlass.engine import prefill
from windlass.engine.request import PREFIX, Finish, Piece, Reuse
from windlass.engine.scheduler import Scheduler

WIDE, PLENTY = 400, 1 << 28  # a budget above all tokens of a conversation, and memory for any
LOOSE = Reuse(mode=PREFIX)


class Conversation:
    """Turns of one conversation with an engine. `fed` are the tokens that it has read of prompts, turn by turn."""

    def __init__(self, engine: Scheduler, options: CacheOptions, **given: Any) -> None:
        self._engine, self._given = engine, {"reuse": LOOSE, **given, "options": options}
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.usages = list[Any]()

    def turn(self, new: list[int], count: int = 7) -> list[int]:
        """Say something. Returns the answer, whose tokens then belong to the conversation."""
        self.ids += new
        self.ends.append(len(self.ids))
        events = events_of(self._engine.submit(request_of(self.ids, count, ends=tuple(self.ends[:-1]), **self._given)))
        assert isinstance(events[-1], Finish), events[-1]
        self.usages.append(events[-1].usage)
        answer = [each.token for each in events if isinstance(each, Piece)]
        self.ids += answer
        return answer


def chat(model: PreTrainedModel, options: CacheOptions, turns: list[list[int]], count: int = 7) -> list[list[int]]:
    """The answers of one cache that lives through a whole conversation, read in the passes of an engine."""
    cache, ids, ends, found = KVCache.from_options(model, options), list[int](), list[int](), list[list[int]]()
    if options.sinks == "system":
        cache.set_sinks(0)
    for new in turns:
        ids += new
        passes, answer = request_of(ids, options=options, ends=tuple(ends)).pass_ends, list[int]()
        ends.append(len(ids))
        for stop in passes:
            if (done := cache.tokens_seen[0]) < stop:
                logits = prefill.feed(model, cache, [ids[done:stop]], [stop - done - 1], PROMPT)[0, -1]
        while len(answer) < count - 1:
            answer.append(int(logits.argmax()))
            logits = prefill.feed_tokens(model, cache, {0: answer[-1]})[0]
        found.append([*answer, int(logits.argmax())])
        ids += found[-1]
    return found
