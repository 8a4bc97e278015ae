"""A draft model's tokens are its own greedy ones, and change no text of the model that verifies them."""

import copy
import random
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import events_of, options_of, request_of, tokens_of
from windlass import KVCache, Sampling, UsageError
from windlass.cache.options import CacheOptions
from windlass.engine import speculate
from windlass.engine.prefill import feed_tokens
from windlass.engine.request import Piece
from windlass.engine.scheduler import Scheduler
from windlass.engine.speculate import LONGEST, DraftModel, drafter_of
from windlass.testing.models import tiny_hybrid


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def finder() -> PreTrainedModel:
    model, _ = windlass.load(MODEL, dtype="float32")
    return model


@pytest.fixture(scope="module")
def noisy(finder: PreTrainedModel) -> PreTrainedModel:
    """A model that mostly agrees with `finder`."""
    windlass.detach(finder)
    twin = copy.deepcopy(finder)
    windlass.attach(finder)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in twin.parameters():
            weights.add_(torch.randn(weights.shape, generator=draw), alpha=0.12 * float(weights.std()))
    return windlass.attach(twin)


def greedy(model: PreTrainedModel, text: list[int], most: int) -> list[int]:
    """The most likely tokens, each by one pass of the whole text without a cache."""
    found = [*text]
    with torch.no_grad():
        for _ in range(most):
            found.append(int(model(torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
    return found[len(text) :]


def test_drafts_are_the_models_own_whatever_the_text_does(attached_model: Models, text: Text) -> None:
    """A text goes on with all, some or none of the drafts, is drafted twice, or is another one from a place on."""
    model, draw = attached_model("llama"), random.Random(2)
    drafts, now = DraftModel(model, CacheOptions(chunk=7)), text(23)[0].tolist()
    for turn in range(40):
        most = draw.choice([1, 2, 5, LONGEST])
        found = drafts.following(array("i", now), most, vocabulary=97)
        assert found == greedy(model, now, most)
        match turn % 5:
            case 0:
                now += [*found, draw.randrange(97)]
            case 1:
                now += [*found[: most // 2], draw.randrange(97)]
            case 2:
                pass
            case 3:
                del now[-draw.randrange(1, 20) :]
            case 4:
                now += [draw.randrange(97) for _ in range(11)]
        assert len(now) > 1
    assert all(token < 30 for token in drafts.following(array("i", now), 5, vocabulary=30))


def test_an_error_leaves_an_empty_cache(monkeypatch: pytest.MonkeyPatch, attached_model: Models, text: Text) -> None:
    model, ids, calls = attached_model("llama"), text(19)[0].tolist(), list[int]()
    drafts, own = DraftModel(model), feed_tokens

    def stops(*given: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return own(*given)

    monkeypatch.setattr("windlass.engine.speculate.feed_tokens", stops)
    with pytest.raises(KeyboardInterrupt):
        drafts.following(array("i", ids), 9, vocabulary=97)
    assert drafts.following(array("i", ids), 4, vocabulary=97) == greedy(model, ids, 4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{}, {"budget": 40}], ids=str)
def test_a_text_is_the_same_in_fewer_passes(
    monkeypatch: pytest.MonkeyPatch,
    finder: PreTrainedModel,
    noisy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    options: dict[str, Any],
) -> None:
    """Two turns, with drafts of a model that is right always, and of one that is right mostly."""
    outcomes, note = list[tuple[int, int]](), speculate.Drafter.note

    def noted(own: speculate.Drafter, drafted: int, accepted: int) -> None:
        outcomes.append((drafted, accepted))
        note(own, drafted, accepted)

    monkeypatch.setattr(speculate.Drafter, "note", noted)
    monkeypatch.setattr("windlass.engine.speculate.weight_bytes", lambda model: 100 if model is finder else 7)
    windlass.detach(finder)
    twin = copy.deepcopy(finder)
    windlass.attach(finder)
    for model in (windlass.attach(twin), noisy) if sampling == Sampling() else (noisy,):
        caches = [KVCache(finder, chunk=9, **options) for _ in range(2)]
        drafts = DraftModel(model, CacheOptions(chunk=11, **options))
        outcomes.clear()
        for prompt in ("There were four of us--George, and William Samuel Harris, and", " Then we"):
            (truth,) = windlass.generate(finder, tokenizer, [prompt], caches[0], 40, sampling)
            (result,) = windlass.generate(finder, tokenizer, [prompt], caches[1], 40, sampling, speculate=drafts)
            assert result.tokens == truth.tokens
            assert caches[1].tokens == caches[0].tokens
        tried = [(drafted, accepted) for drafted, accepted in outcomes if drafted]
        assert any(accepted > 0 for _, accepted in tried), outcomes
        if model is not noisy:
            assert any(accepted == drafted > 4 for drafted, accepted in tried), outcomes
        if model is noisy and not options:
            assert any(accepted < drafted for drafted, accepted in tried), outcomes
    assert drafter_of(DraftModel(noisy), finder)._draft_cost == speculate.DRAFT_COST + 0.07


def test_a_server_drafts_for_requests_that_do_not_say(
    finder: PreTrainedModel, noisy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """Requests of two texts in turn, of which one goes on."""
    kinds, first, second = [(1, options_of(budget=48))], text(30)[0].tolist(), text(33, seed=5)[0].tolist()
    found = []
    for drafts in (None, DraftModel(noisy, CacheOptions(budget=48))):
        engine = Scheduler(finder, tokenizer, kinds, speculate=drafts)
        engine.start()
        written, asked = list[list[int]](), [first, second, first]
        for prompt in asked:
            events = events_of(engine.submit(request_of(prompt, 25, options=kinds[0][1])))
            written.append([event.token for event in events if isinstance(event, Piece)])
            asked[2] = first + written[0] + [3, 1]
        assert tokens_of(engine.submit(request_of(first, 5, options=kinds[0][1], speculate="off"))) == written[0][:5]
        engine.stop()
        found.append(written)
    assert found[0] == found[1]


def test_refusals(finder: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UsageError, match="drafts one text, but its options have batch=2"):
        DraftModel(finder, CacheOptions(batch=2))
    with pytest.raises(UsageError, match=r"Qwen3NextForCausalLM takes single drafts back, and layer 0"):
        DraftModel(windlass.attach(tiny_hybrid("qwen3_next")))
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<other>"])
    with pytest.raises(UsageError, match=r"--speculate .* reads other tokens than the model. Use a smaller model"):
        speculate.load_drafts(str(MODEL), finder, other, CacheOptions(budget=40))
    drafts = speculate.load_drafts(str(MODEL), finder, tokenizer, CacheOptions(budget=40, chunk=16))
    assert isinstance(drafts, DraftModel)
    assert [speculate.load_drafts(name, finder, tokenizer, CacheOptions()) for name in ("lookup", "off", None)] == [
        "lookup",
        "off",
        None,
    ]


def test_a_token_that_the_draft_model_cannot_read_ends_its_drafts(
    finder: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Models of one tokenizer may have embeddings of different sizes."""
    windlass.detach(finder)
    large, size = copy.deepcopy(finder), finder.config.vocab_size
    windlass.attach(finder)
    large.resize_token_embeddings(size + 32)
    windlass.attach(large)
    for prompt, has_drafts in (([5, size - 1], True), ([5, size], False), ([size + 31, 5], False)):
        assert bool(drafter_of(DraftModel(finder), large, prompt).draft(4)) == has_drafts
        found = []
        for drafts in (None, DraftModel(finder)):
            cache = KVCache(large)
            windlass.prefill(large, cache, [prompt])
            [result] = windlass.generate(large, tokenizer, [" once"], cache, max_tokens=9, speculate=drafts)
            found.append(result.tokens)
        assert found[0] == found[1]
