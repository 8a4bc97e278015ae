"""Log probabilities of a prompt, and the repetition penalty, against transformers' own model."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, RepetitionPenaltyLogitsProcessor

from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import events_of, options_of, request_of, rows_of, running, wait_for
from windlass import KVCache, Sampling, UsageError
from windlass.cache.options import CacheOptions
from windlass.engine.recompute import Nothing
from windlass.engine.request import Event, Finish, Piece, PromptLogprobs, PromptParts
from windlass.engine.scheduler import Scheduler
from windlass.policies import KVzip

WIDE = options_of(budget=64)
FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3",
    "mistral",
    "gpt_oss",
    "minicpm3",
    "deepseek_v3",
    "llama4",
    "granite",
    "cohere",
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def scores_of(logits: Tensor, ids: Sequence[int]) -> list[float]:
    """The log probability of each token but the first by (tokens, vocabulary) logits."""
    values = logits[:-1].float().log_softmax(-1)
    return values.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def told(events: list[Event], top: int) -> list[float]:
    """The prompt's own log probabilities, and the `top` likeliest ones, best first."""
    (found,) = (each.logprobs for each in events if isinstance(each, PromptLogprobs))
    assert {len(each) for each in found} == {top + 1}
    for _, *others in found:
        assert [each.value for each in others] == sorted((each.value for each in others), reverse=True)
    return [own.value for own, *_ in found]


def asked(engine: Scheduler, ids: list[int], options: CacheOptions, max_tokens: int = 0) -> list[Event]:
    return events_of(engine.submit(request_of(ids, max_tokens, options=options, top_logprobs=2, scores_prompt=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_those_of_a_prompt_that_is_held_are_the_models_own(
    attached_model: Models, plain_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, family: str
) -> None:
    (ids,) = rows_of(text, 37)
    with torch.no_grad():
        wanted = scores_of(plain_model(family)(torch.tensor([ids])).logits[0], ids)
    with running(attached_model(family), tokenizer, kinds=[(2, WIDE)]) as engine:
        events = asked(engine, ids, WIDE)
        assert told(events, top=2) == pytest.approx(wanted, abs=2e-4)
        assert not any(isinstance(each, Piece) for each in events)
        last = events[-1]
        assert isinstance(last, Finish)
        assert (last.reason, last.usage.prompt, last.usage.written, last.usage.seen) == ("length", 37, 0, 37)
        wait_for(lambda: engine.status().free_rows == 2)
        more = asked(engine, ids, WIDE, max_tokens=3)
        assert told(more, top=2) == told(events, top=2)
        assert sum(isinstance(each, Piece) for each in more) == 3


def by_chunks(model: PreTrainedModel, ids: list[int], options: CacheOptions) -> list[float]:
    """As the library's own passes read a prompt in chunks, which evict between them."""
    cache, found = KVCache.from_options(model, options), list[Tensor]()
    for start in range(0, len(ids), options.chunk):
        with torch.no_grad():
            found.append(model(torch.tensor([ids[start : start + options.chunk]]), past_key_values=cache).logits[0])
    return scores_of(torch.cat(found), ids)


def test_those_of_a_prompt_beyond_the_budget_are_of_what_is_still_held(
    attached_model: Models, plain_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids,), options = attached_model("llama"), rows_of(text, 60), options_of(policy="recent")
    with torch.no_grad():
        whole = scores_of(plain_model("llama")(torch.tensor([ids])).logits[0], ids)
    with running(model, tokenizer, kinds=[(1, options)]) as engine:
        found = told(asked(engine, ids, options), top=2)
    assert found == pytest.approx(by_chunks(model, ids, options), abs=2e-4)
    assert found[:16] == pytest.approx(whole[:16], abs=2e-4)  # until something is evicted
    assert found != pytest.approx(whole, abs=1e-2)


def test_a_policy_that_holds_a_prompt_whole_sees_all_of_it(
    attached_model: Models, plain_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    (ids,), options = rows_of(text, 60), options_of(policy=KVzip())
    with torch.no_grad():
        wanted = scores_of(plain_model("llama")(torch.tensor([ids])).logits[0], ids)
    with running(attached_model("llama"), tokenizer, kinds=[(1, options)]) as engine:
        assert told(asked(engine, ids, options), top=2) == pytest.approx(wanted, abs=2e-4)


def test_a_prompt_that_is_kept_is_read_again(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    (ids,) = rows_of(text, 37)
    with running(attached_model("llama"), tokenizer, kinds=[(1, WIDE)], reuse_bytes=1 << 24) as engine:
        first = told(asked(engine, ids, WIDE), top=2)
        plain = events_of(engine.submit(request_of(ids, 1, options=WIDE)))[-1]
        assert isinstance(plain, Finish)
        assert plain.usage.cached > 0
        assert told(asked(engine, ids, WIDE), top=2) == first


def test_parts_have_none(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    (ids,) = rows_of(text, 37)
    request = request_of(ids, 1, options=WIDE, scores_prompt=True, parts=PromptParts(((1, 9),), Nothing()))
    with (
        running(attached_model("llama"), tokenizer, kinds=[(1, WIDE)], reuse_bytes=1 << 24) as engine,
        pytest.raises(UsageError, match="chunks: log probabilities of a prompt"),
    ):
        engine.submit(request)


@pytest.mark.parametrize("penalty", [1.3, 0.6, 40.0])
def test_a_repetition_penalty_is_that_of_transformers(
    attached_model: Models, plain_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, penalty: float
) -> None:
    (ids,), plain = rows_of(text, 23), plain_model("llama")
    processor, wanted, values = RepetitionPenaltyLogitsProcessor(penalty), list(ids), list[float]()
    for _ in range(12):
        seen = torch.tensor([wanted])
        with torch.no_grad():
            scores = processor(seen, plain(seen).logits[:, -1].float())[0]
        wanted.append(int(scores.argmax()))
        values.append(float(scores.log_softmax(-1).max()))
    request = request_of(ids, 12, options=WIDE, top_logprobs=0, sampling=Sampling(repetition_penalty=penalty))
    with running(attached_model("llama"), tokenizer, kinds=[(2, WIDE)]) as engine:
        others = [engine.submit(replace(request, sampling=Sampling(repetition_penalty=each))) for each in (1.0, 2.0)]
        pieces = [each for each in events_of(engine.submit(request)) if isinstance(each, Piece)]
        assert [each.token for each in pieces] == wanted[23:]
        assert [each.logprobs[0].value for each in pieces] == pytest.approx(values, abs=2e-4)
        assert all(events_of(each) for each in others)
