"""The longest time between two tokens of a text while prompts are read, by a clock that counts tokens."""

from itertools import groupby, pairwise

import pytest
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import OPTIONS, events_of, options_of, request_of, rows_of, wait_for
from windlass.cache.cache import TextCache
from windlass.core.step import READ, Pass
from windlass.engine import prefill
from windlass.engine.request import Piece, Ticket
from windlass.engine.scheduler import Scheduler
from windlass.hf.forward import forward


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def took(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of each pass so far."""
    found = list[int]()

    def counted(
        model: PreTrainedModel,
        ids: Tensor,
        mask: Tensor | None,
        cache: TextCache,
        columns: list[int],
        how: Pass = READ,
    ) -> Tensor:
        found.append(ids.shape[1])
        return forward(model, ids, mask, cache, columns, how)

    monkeypatch.setattr(prefill, "forward", counted)
    return found


def test_writers_wait_for_one_chunk_at_most(
    took: list[int], attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """Two lanes write three texts, and five prompts of other lengths come at once, two of which are read in turn.

    A pass takes as long as its columns. The bound is two chunks, and a turn is one chunk and a step of each lane.
    """
    one, other = options_of(), options_of(policy="h2o")
    engine = Scheduler(attached_model("llama"), tokenizer, [(5, one), (3, other)])
    times: list[list[int]] = [[], [], []]
    kinds = (one, one, other)
    requests = [request_of(ids, 150, options=kind) for ids, kind in zip(rows_of(text, 9, 7, 5), kinds, strict=True)]
    notes = [lambda own=own: own.append(sum(took)) for own in times]
    writing = [engine.submit(asked, note) for asked, note in zip(requests, notes, strict=True)]
    engine.start()
    wait_for(lambda: all(len(own) > 3 for own in times))
    prompts = rows_of(text, 391, 117, 40, 205, 14)
    reading = engine.submit_all([request_of(ids, 2, options=one) for ids in prompts[:4]])
    reading += engine.submit_all([request_of(prompts[4], 2, options=other)])
    for ticket in (*reading, *writing):
        assert isinstance(events_of(ticket)[-2], Piece)
    engine.stop()
    chunk = OPTIONS["chunk"]
    assert took.count(chunk) > sum(map(len, prompts)) // chunk - len(prompts)
    gaps = [after - before for own in times for before, after in pairwise(own[3:-1])]  # pieces, but for the prompt's
    assert max(gaps) <= chunk + len((one, other)) < 2 * chunk
    assert gaps.count(chunk + 2) > 30


def test_short_prompts_are_read_together_within_a_chunk(
    took: list[int], attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """A text is written, and seven prompts come at once.

    Those of 4, 5 and 3 tokens fit in a chunk of 13, and those of 6 and 7. Of 12 and 2 one does not.
    """
    engine = Scheduler(attached_model("llama"), tokenizer, [(8, options_of())])
    [first] = rows_of(text, 9)
    writing = engine.submit(request_of(first, 150))
    engine.start()
    wait_for(lambda: len(took) > 3)
    sizes = 4, 5, 3, 6, 7, 12, 2
    reading = engine.submit_all([request_of(ids, 1) for ids in rows_of(text, *sizes)])
    for ticket in (*reading, writing):
        events_of(ticket)
    engine.stop()
    turns = [[*turn] for is_step, turn in groupby(took, lambda columns: columns == 1) if not is_step]
    assert turns[-4:] == [[4, 5, 3], [6, 7], [12], [2]]


def test_clients_are_woken_once_a_step(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    """Three texts of one client: it is woken once the tokens of all three are there."""
    engine, found = Scheduler(attached_model("llama"), tokenizer, [(3, options_of())]), list[int]()
    tickets: list[Ticket] = []

    def note() -> None:
        found.append(sum(isinstance(event, Piece) for ticket in tickets for event in ticket.take()))

    tickets += engine.submit_all([request_of(ids, 40) for ids in rows_of(text, 9, 7, 5)], note)
    engine.start()
    wait_for(lambda: all(ticket.is_over for ticket in tickets))
    engine.stop()
    assert sum(found) == 120
    assert found.count(3) > 30
