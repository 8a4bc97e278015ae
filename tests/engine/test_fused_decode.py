"""Tokens that the engine feeds take all layers in one call each, and nothing makes the layers record them early."""

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import MODEL
from tests.helpers.schedulers import options_of, request_of
from windlass import KVCache, kernels
from windlass.cache.fused import FusedDecode
from windlass.engine import row_bytes
from windlass.engine.scheduler import Scheduler

if not kernels.has_linear("cpu"):
    pytest.skip("no kernel for linear layers on this CPU", allow_module_level=True)

TOKENS = 20
PROMPT = "There were four of us--George, and William Samuel Harris, and myself, and Montmorency."
Ways = Callable[[PreTrainedModel, PreTrainedTokenizerBase], Iterator[None]]


class Counts:
    """Decoders of all layers that were made, steps that they took, and how often the layers were told of these."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made = self.steps = self.told = 0
        make, run, settle = FusedDecode.__init__, FusedDecode.run, FusedDecode.settle

        def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
            def call(*given: object) -> object:
                setattr(self, name, getattr(self, name) + 1)
                return function(*given)

            return call

        patch.setattr(FusedDecode, "__init__", counted("made", make))
        patch.setattr(FusedDecode, "run", counted("steps", run))
        patch.setattr(FusedDecode, "settle", counted("told", settle))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return windlass.attach(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def plain_loop(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    cache = KVCache(model, budget=24)
    with torch.no_grad():
        model(**tokenizer(PROMPT, return_tensors="pt"), past_key_values=cache)
        while True:
            yield
            model(torch.tensor([[5]]), past_key_values=cache)


def single_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """As `windlass bench` feeds them, to rows without a budget."""
    cache = KVCache(model, batch=2)
    windlass.prefill(model, cache, [tokenizer(PROMPT)["input_ids"]] * 2)
    while True:
        yield
        windlass.prefill(model, cache, [[5], [7]])


def stream(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """With the result so far, which tells the bytes that are held, after each piece."""
    cache = KVCache(model, budget=24, policy="h2o", rollback=3)
    pieces = windlass.stream(model, tokenizer, PROMPT, cache, max_tokens=200, stop=[])
    while True:
        yield
        next(pieces)
        assert pieces.result.bytes_held > 0


def scheduler(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Three texts in turns of the engine, in this thread."""
    engine = Scheduler(model, tokenizer, [(4, options_of(policy="tova", budget=24))])
    ids = tokenizer(PROMPT)["input_ids"]
    for length in (5, 17, 11):
        engine.submit(request_of(ids[:length], 200, options=engine.options))
    while any(task.reader is not None for task in engine._tasks) or len(engine._tasks) < 3:
        engine._iterate(engine._next_iteration())
    while True:
        yield
        engine._iterate(engine._next_iteration())
        engine._status = engine._told()


@pytest.mark.parametrize("way", [plain_loop, single_tokens, stream, scheduler])
def test_a_token_leaves_all_layers_in_one_call(
    way: Ways, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_bytes, "SECONDS", 1e9)  # bytes of a server are counted anew ten times a second
    steps = way(model, tokenizer)
    for _ in range(4):  # the first token after a prompt packs the slots
        next(steps)
    counts = Counts(monkeypatch)
    for _ in range(TOKENS):
        next(steps)
    assert counts.steps >= TOKENS
    assert counts.made == 0
    assert counts.told == 0 or way is stream


def test_generate_makes_one_decoder_of_all_layers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts(monkeypatch)
    windlass.generate(model, tokenizer, [PROMPT] * 2, KVCache(model, batch=2, budget=24), TOKENS, stop=[])
    assert counts.steps >= TOKENS - 2
    assert counts.made == 1
