"""With the real engine: a client that leaves costs no pass more, whatever its text is at, and however it leaves."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.chats import with_template
from tests.helpers.gates import Gate, Told, listening
from tests.helpers.models import MODEL
from tests.helpers.serving import NAME, VOCABULARY, RawClient, ask, complete, soon
from windlass.cache.options import CacheOptions
from windlass.engine.scheduler import Scheduler
from windlass.hf.load import load

OPTIONS: Final[dict[str, Any]] = {"budget": 24, "policy": "recent", "chunk": 16}
PROMPT, TOKENS = list(range(200, 240)), 5  # three chunks, of which the last gives the first token, then four steps
NEXT = list(range(300, 323))


class Phase(NamedTuple):
    """Where the engine stands when the client leaves: in the pass of this number, or after it."""

    place: str
    number: int
    passes: int  # that the request takes in all


PHASES = {
    "first chunk": Phase("inside", 1, 1),
    "between chunks": Phase("after", 2, 2),
    "first token": Phase("after", 3, 3),
    "between tokens": Phase("after", 5, 5),
    "last token": Phase("inside", 7, 7),
    "all written": Phase("after", 7, 7),
}


class Real(NamedTuple):
    """A server of one row, and its parts."""

    port: int
    service: Told
    engine: Scheduler
    gate: Gate
    idle_bytes: int
    after_prompt: str
    """Text that the library writes after `PROMPT`."""
    after_next: str

    def is_idle(self) -> bool:
        """Return True if nothing is under way, and no byte more is held than before anything was."""
        status = self.engine.status()
        is_free = status.free_rows == status.total_rows and not status.rows and not status.queued
        return is_free and status.bytes_held == self.idle_bytes


def asked(prompt: list[int], **fields: Any) -> dict[str, Any]:
    """A request for so many tokens, none of which ends the text."""
    return complete(prompt=prompt, max_tokens=TOKENS, temperature=0, logit_bias={"1": -100}, **fields)


def alone(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> str:
    """The library's text after a prompt."""
    cache = windlass.KVCache(model, **OPTIONS)
    logits, found = windlass.prefill(model, cache, [prompt]), list[int]()
    while len(found) < TOKENS:
        logits[0, 1] -= 100
        found.append(int(logits.argmax()))
        logits = windlass.prefill(model, cache, [found[-1:]])
    return str(tokenizer.decode(prompt + found))[len(str(tokenizer.decode(prompt))) :]


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    model, tokenizer = load(MODEL, "float32")[0], with_template()
    twins = [alone(model, tokenizer, prompt) for prompt in (PROMPT, NEXT)]
    gate = Gate(model)
    engine = Scheduler(model, tokenizer, [(1, CacheOptions(**OPTIONS))], watcher=gate)
    engine.start()
    service = Told(engine)
    with listening(service, tokenizer, VOCABULARY, NAME) as port:
        ask(port, "/v1/completions", complete(prompt=NEXT, max_tokens=2))  # the row takes its memory once
        assert soon(lambda: engine.status().free_rows == 1)
        yield Real(port, service, engine, gate, engine.status().bytes_held, *twins)
        gate.remove()


@pytest.mark.parametrize("is_reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
def test_a_client_leaves(real: Real, phase: Phase, is_streamed: bool, is_reset: bool) -> None:
    gate, service = real.gate, real.service
    before = service.cancelled
    gate.arm(phase.place, phase.number)
    client = RawClient(real.port)
    client.post("/v1/completions", asked(PROMPT, stream=is_streamed))
    gate.wait()
    client.close(is_reset)
    assert soon(lambda: service.cancelled == before + 1)
    gate.open()
    assert soon(real.is_idle)
    assert gate.passes == phase.passes
    assert service.cancelled == before + 1
    answer = ask(real.port, "/v1/completions", asked(NEXT)).document
    assert answer["choices"][0]["text"] == real.after_next
    assert soon(real.is_idle)


@pytest.mark.parametrize("is_reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_a_client_leaves_the_queue(real: Real, is_streamed: bool, is_reset: bool) -> None:
    """The only row is another's, whose text goes on as it would have, and who waits behind it is next."""
    gate, service = real.gate, real.service
    before, cancelled = service.submitted, service.cancelled
    gate.arm("inside", 4)
    writer, client, behind = RawClient(real.port), RawClient(real.port), RawClient(real.port)
    for number, (each, prompt) in enumerate(((writer, PROMPT), (client, NEXT), (behind, NEXT)), 1):
        each.post("/v1/completions", asked(prompt, stream=is_streamed and each is client))
        assert soon(partial(service.has_taken, before + number))
    gate.wait()
    client.close(is_reset)
    assert soon(lambda: service.cancelled == cancelled + 1)
    gate.open()
    for each, text in ((writer, real.after_prompt), (behind, real.after_next)):
        assert each.answer().document["choices"][0]["text"] == text
        each.close()
    assert soon(real.is_idle)
    assert gate.passes == 7 + 6  # of the two that stayed
