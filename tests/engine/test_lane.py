"""A lane's step computes the rows that write, rounded up, and moves them seldom. Their text stays the same."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.hybrids import KINDS, bound
from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import alone, events_of, options_of, request_of, rows_of, running, tokens_of, wait_for
from windlass import KVCache
from windlass.cache.edits import arrange_rows, clear_row, select_rows
from windlass.cache.options import CacheOptions
from windlass.cache.state import CacheState
from windlass.core.positions import EMPTY
from windlass.engine.request import Failure
from windlass.engine.row_bytes import RowBytes, Sizes, replace_batch
from windlass.engine.sequence import PATIENCE, Lane
from windlass.hf.attach import attached

ROWS, MOVER = 6, "windlass.engine.sequence.arrange_rows"


class Driven:
    """A lane whose texts a test begins, continues and ends. `computed` has the rows of each step of the model."""

    def __init__(self, model: PreTrainedModel, options: CacheOptions, rows: int = ROWS) -> None:
        self._model, self._options = model, options
        self.lane = Lane(model, replace_batch(options, rows))
        self.texts: dict[int, list[int]] = {}
        self.computed: list[int] = []
        self.hook = attached(model).decoder.outer.register_forward_pre_hook(self._count, with_kwargs=True)

    def begin(self, prompt: list[int]) -> int:
        """Read a prompt. Returns its row."""
        row = self.lane.take()
        assert row is not None
        cache = KVCache.from_options(self._model, self._options)
        logits = windlass.prefill(self._model, cache, [prompt])[0]
        self.lane.put(row, cache)
        self.texts[row] = [int(logits.argmax())]
        return row

    def step(self, count: int = 1) -> list[int]:
        """Write so many tokens. Returns the number of computed rows of each step."""
        self.computed.clear()
        for _ in range(count):
            for row, logits in self.lane.step({row: text[-1:] for row, text in self.texts.items()}).items():
                self.texts[row].append(int(logits.argmax()))
        return list(self.computed)

    def end(self, row: int) -> list[int]:
        """The written tokens."""
        self.lane.release(row)
        return self.texts.pop(row)

    def _count(self, _: object, args: tuple[object, ...], kwargs: dict[str, Tensor]) -> None:
        self.computed.append(len(kwargs["input_ids"]))


Drive = Callable[[PreTrainedModel, CacheOptions], Driven]


@pytest.fixture
def drive() -> Iterator[Drive]:
    """Make driven lanes, and restore the models afterwards."""
    made = list[Driven]()

    def make(model: PreTrainedModel, options: CacheOptions) -> Driven:
        made.append(Driven(model, options))
        return made[-1]

    yield make
    for driven in made:
        driven.hook.remove()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("store", ["plain", "int4(sinks=1, newest=5)"])
def test_a_step_computes_the_rows_that_write(drive: Drive, attached_model: Models, text: Text, store: str) -> None:
    model, options = attached_model("llama"), options_of(policy="h2o", store=store)
    prompts, driven = rows_of(text, 41, 7, 30, 52, 19), drive(model, options)
    rows = [driven.begin(prompts[0])]
    assert driven.step(3) == [1, 1, 1]
    rows.append(driven.begin(prompts[1]))
    assert driven.step(2) == [2, 2]
    rows.append(driven.begin(prompts[2]))
    assert driven.step(2) == [4, 4]
    rows += [driven.begin(prompts[3]), driven.begin(prompts[4])]
    assert driven.step(2) == [ROWS, ROWS]
    found = {0: driven.end(rows[0]), 2: driven.end(rows[2]), 3: driven.end(rows[3])}
    assert driven.step(PATIENCE + 2) == [ROWS] * PATIENCE + [2, 2]
    found |= {1: driven.end(rows[1])}
    assert driven.step(PATIENCE + 1) == [2] * PATIENCE + [1]
    found |= {4: driven.end(rows[4])}
    for number, tokens in found.items():
        assert tokens == alone(model, prompts[number], options, len(tokens)), number
    assert driven.lane.free == list(range(ROWS))


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3"])
def test_rows_of_other_layers_are_moved_as_well(
    monkeypatch: pytest.MonkeyPatch, drive: Drive, attached_model: Models, text: Text, family: str
) -> None:
    monkeypatch.setattr("windlass.engine.sequence.PATIENCE", 1)
    model, options = bound(family) if family in KINDS else attached_model(family), options_of()
    prompts, driven = rows_of(text, 41, 7, 30), drive(model, options)
    first, second = driven.begin(prompts[0]), driven.begin(prompts[1])
    driven.step(3)
    gone = driven.end(first)
    third = driven.begin(prompts[2])  # it stands where the first one did
    driven.step(2)
    assert driven.end(third) == alone(model, prompts[2], options, 3)
    assert driven.step(4) == [2, 1, 1, 1]
    assert driven.end(second) == alone(model, prompts[1], options, 10)
    assert gone == alone(model, prompts[0], options, 4)


def test_rows_are_moved_seldom(
    monkeypatch: pytest.MonkeyPatch, drive: Drive, attached_model: Models, text: Text
) -> None:
    """One text goes on while others come and go beside it, now and then."""
    moves = list[int]()

    def noted(cache: CacheState, rows: Sequence[int | None]) -> None:
        moves.append(len(rows))
        arrange_rows(cache, rows)

    monkeypatch.setattr(MOVER, noted)
    driven = drive(attached_model("llama"), options_of())
    stays, short = rows_of(text, 15, 6)
    driven.begin(stays)
    for _ in range(8):
        other = driven.begin(short)
        driven.step(2)
        driven.end(other)
        driven.step(PATIENCE - 1)
    assert moves == [2]
    driven.step(2)
    assert moves == [2, 1]


def test_no_row_has_anything_of_another(drive: Drive, attached_model: Models, text: Text) -> None:
    driven = drive(attached_model("llama"), options_of(policy="h2o", store="int4(sinks=1, newest=5)"))
    first = driven.begin(rows_of(text, 50)[0])
    driven.step(2)
    for prompt in rows_of(text, 21, 33):
        driven.begin(prompt)  # so that there are four rows, one of which nobody has
    for layer in driven.lane.cache.layers:
        constants = {*layer.store.constant_names}
        for name, tensor in layer.tensors().items():
            if name not in constants:
                assert set(tensor[3].unique().tolist()) <= {0, EMPTY}, name
    assert driven.lane.cache.tokens_seen == [52, 21, 33, 0]
    driven.end(first)
    assert driven.lane.cache.tokens_seen == [0, 21, 33, 0]


def test_bytes_are_those_of_the_rows_there_are(drive: Drive, attached_model: Models, text: Text) -> None:
    model, options = attached_model("llama"), replace_batch(options_of(policy="h2o", store="int8"))
    driven, formula = drive(model, options), RowBytes.of(model, options).writing(100)
    held = []
    for prompt in rows_of(text, 41, 7, 30, 52, 19):
        driven.begin(prompt)
        driven.step(2)
        held.append(driven.lane.cache.bytes_held)
        assert held[-1] <= driven.lane.cache.batch_size * formula
    assert held[0] < 0.6 * held[1] < 0.4 * held[3]


def test_bytes_are_counted_anew_once_there_are_more_rows(drive: Drive, attached_model: Models, text: Text) -> None:
    driven, sizes = drive(attached_model("llama"), options_of()), Sizes()
    for prompt in rows_of(text, 41, 7, 30):
        driven.begin(prompt)
        assert sizes.of([driven.lane.cache], is_exact=False) == [driven.lane.cache.bytes_held]


def test_rows_that_are_lost_while_they_are_moved_are_told(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """The new row, for which there was no memory, and the row that wrote. The next begins on clean rows."""
    model = attached_model("llama")
    one, other, third = rows_of(text, 20, 31, 25)

    def half(cache: CacheState, _: Sequence[int | None]) -> None:
        clear_row(cache, 0)
        raise MemoryError

    with running(model, tokenizer) as engine:
        first = engine.submit(request_of(one, 300))
        wait_for(lambda: [row.phase for row in engine.status().rows] == ["writing"])
        monkeypatch.setattr(MOVER, half)
        second = engine.submit(request_of(other, 300))
        for ticket in (first, second):
            last = events_of(ticket)[-1]
            assert isinstance(last, Failure)
            assert last.is_ours
        monkeypatch.setattr(MOVER, arrange_rows)
        tickets = [engine.submit(request_of(ids, 7)) for ids in (third, one)]
        assert [tokens_of(each) for each in tickets] == [alone(model, ids, options_of(), 7) for ids in (third, one)]
        wait_for(lambda: engine.status().free_rows == 3)
        assert engine.status().errors_total == 2


def test_rows_that_are_lost_while_there_are_to_be_fewer(
    monkeypatch: pytest.MonkeyPatch, drive: Drive, attached_model: Models, text: Text
) -> None:
    model, (one, other) = attached_model("llama"), rows_of(text, 20, 31)
    driven = drive(model, options_of())
    first, second = driven.begin(one), driven.begin(other)
    driven.end(first)

    def half(cache: CacheState, _: Sequence[int | None]) -> None:
        select_rows(cache, torch.tensor([1]))
        raise MemoryError

    monkeypatch.setattr(MOVER, half)
    with pytest.raises(MemoryError):
        driven.step(PATIENCE + 1)
    with pytest.raises(RuntimeError, match="lost"):
        driven.step()
    monkeypatch.setattr(MOVER, arrange_rows)
    driven.lane.reset()  # as the scheduler does, and lets the request go
    driven.end(second)
    assert driven.lane.free == list(range(ROWS))
    driven.begin(other)
    driven.step(4)
    assert driven.texts == {0: alone(model, other, options_of(), 5)}
