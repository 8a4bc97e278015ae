"""An engine on several ranks, or on one process: the same requests, as clients send them to rank 0."""

import os
import signal
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from tests.helpers.models import MODEL
from tests.helpers.schedulers import events_of, options_of, request_of, wait_for
from windlass.engine.request import Failure, Grammar, Piece, Request
from windlass.engine.sampling import Sampling
from windlass.engine.scheduler import Scheduler
from windlass.hf.attach import attached

ALIKE = options_of(policy="snapkv")


class OneAfterTheOther(Grammar):
    """Allows one token after the other, and after these none."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = list(tokens)

    def allowed(self) -> Tensor:
        found = torch.zeros(97, dtype=torch.bool)
        found[self._left[:1]] = True
        return found

    def accept(self, token: int) -> None:
        assert self._left.pop(0) == token


def requests(prompt: Sequence[int]) -> list[Request]:
    """Requests: greedy, drawn, with penalties, a grammar that ends too early, and with options of its own."""
    own = list(prompt)
    grammar = OneAfterTheOther([5, 61, 9])
    return [
        request_of(own, 9, options=ALIKE),
        request_of(own[:5], 12, options=ALIKE, sampling=Sampling(temperature=1.5, seed=4)),
        request_of(own + own[3:], 7, options=ALIKE, frequency_penalty=0.8, logit_bias={11: 4.0}, top_logprobs=2),
        request_of(own[2:], 6, options=ALIKE, grammar=grammar),
        request_of(own, 5, options=options_of(policy="tova", budget=12)),
        request_of(own[1:], 4, options=ALIKE, sampling=Sampling(temperature=1.0, seed=9)),
    ]


def served(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """The tokens of all requests, each list ended by -1, by -2 where it failed, or on a rank that follows by -3.

    Before them one is cancelled as it writes.
    """
    engine = _engine(model)
    if not _is_first(model):
        engine.run()
        return [-4 if engine.has_failed else -3]
    engine.start()
    gone = engine.submit(request_of(list(prompt), 10**3, options=ALIKE))
    while not any(isinstance(event, Piece) for event in gone.take(10.0)):
        pass
    engine.cancel(gone)
    tickets = [engine.submit(each) for each in requests(prompt)]
    found: list[int] = []
    for ticket in tickets:
        events = events_of(ticket)
        found += [event.token for event in events if isinstance(event, Piece)]
        found.append(-2 if isinstance(events[-1], Failure) else -1)
    wait_for(lambda: engine.status().free_rows == 2)
    engine.stop()
    return found


def lost(model: PreTrainedModel, prompt: Sequence[int]) -> str:
    """Events of a request on rank 0, once the other rank has died while the engine had nothing to do."""
    engine = _engine(model)
    if not _is_first(model):
        os.kill(os.getpid(), signal.SIGKILL)
    engine.start()
    engine.wait()
    assert engine.has_failed
    assert not engine.status().is_alive
    try:
        engine.submit(request_of(list(prompt), options=ALIKE))
    except Exception as error:
        return str(error)
    return "taken"


def _engine(model: PreTrainedModel) -> Scheduler:
    return Scheduler(model, AutoTokenizer.from_pretrained(MODEL), [(2, ALIKE)], reuse_bytes=1 << 20)


def _is_first(model: PreTrainedModel) -> bool:
    heads = attached(model).heads
    return heads is None or heads.ranks.is_first
