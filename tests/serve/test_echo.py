"""Completions that begin with their prompt, against transformers' own model and the text itself."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import MODEL
from tests.helpers.served_engine import engine_served
from tests.helpers.serving import NAME, ask, complete
from windlass.cache.options import CacheOptions

OPTIONS = CacheOptions(budget=160, policy="recent", chunk=16)
TEXTS = ["It was a dark night, and", "Où est le naïf — 你好? \n  He said: <|eos|> no."]


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def port(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    model, _ = windlass.load(MODEL, "float32")
    with engine_served(model, tokenizer, OPTIONS) as (port, _):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as made:
        yield made


def values_of(plain: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return plain(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def whole(client: openai.OpenAI, is_streamed: bool, **given: Any) -> tuple[list[str], list[dict[str, list[Any]]], Any]:
    """The text and the log probabilities of each choice, by its index, and the last document's reasons to end."""
    answer: Any = client.completions.create(model=NAME, echo=True, stream=is_streamed, **given)
    texts, found, reasons = dict[int, str](), dict[int, dict[str, list[Any]]](), dict[int, str]()
    for document in answer if is_streamed else [answer]:
        for choice in document.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                mine = found.setdefault(choice.index, {})
                for name, values in vars(choice.logprobs).items():
                    mine[name] = mine.get(name, []) + values
    return [texts[at] for at in sorted(texts)], [found[at] for at in sorted(found)], reasons


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("most", [0, 1, 7])
def test_a_prompt_has_the_models_own_log_probabilities(
    client: openai.OpenAI, plain: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, most: int, is_streamed: bool
) -> None:
    """Echo of texts and of token ids, several at once, with the text that follows."""
    ids = [tokenizer(each)["input_ids"] for each in TEXTS]
    for prompts in (TEXTS, ids, TEXTS[:1], ids[1]):
        texts, found, reasons = whole(
            client, is_streamed, prompt=prompts, max_tokens=most, logprobs=2, temperature=0.0, stop=["never"]
        )
        assert len(texts) == len(found) == (2 if len(prompts) == 2 else 1)
        for text, logprobs, one in zip(texts, found, [ids[1]] if prompts is ids[1] else ids, strict=False):
            assert text.startswith(tokenizer.decode(one, skip_special_tokens=False).removeprefix("<|bos|>"))
            values = values_of(plain, one)
            own = logprobs["token_logprobs"]
            assert own[0] is None
            assert logprobs["top_logprobs"][0] is None
            assert own[1 : len(one)] == pytest.approx(
                [float(values[at, token]) for at, token in enumerate(one[1:])], abs=2e-4
            )
            greedy = [float(row.max()) for row in values[:-1]]
            tops = [max(each.values()) for each in logprobs["top_logprobs"][1 : len(one)]]
            assert tops == pytest.approx(greedy, abs=2e-4)
            assert len(own) == len(logprobs["tokens"]) == len(logprobs["text_offset"]) <= len(one) + most
            assert logprobs["tokens"][0] == "<|bos|>"
        assert {*reasons.values()} <= {"length", "stop"}
        assert most or {*reasons.values()} == {"length"}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_offsets_are_where_tokens_stand_in_the_text(client: openai.OpenAI, is_streamed: bool) -> None:
    for text in TEXTS:
        (shown,), (found,), _ = whole(client, is_streamed, prompt=text, max_tokens=9, logprobs=0, temperature=0.0)
        assert shown.startswith(text)
        tokens, offsets = found["tokens"], found["text_offset"]
        assert offsets[0] == offsets[1] == 0  # the first token is no part of the text
        assert offsets == sorted(offsets)
        for (token, start), (_, stop) in pairwise(zip(tokens[1:], offsets[1:], strict=True)):
            if not token.startswith("bytes:"):
                assert shown[start:stop] == token


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("most", [0, 5])
def test_an_echo_without_log_probabilities(client: openai.OpenAI, most: int, is_streamed: bool) -> None:
    plain: Any = client.completions.create(model=NAME, prompt=TEXTS, max_tokens=max(most, 1), temperature=0.0)
    texts, found, _ = whole(client, is_streamed, prompt=TEXTS, max_tokens=most, temperature=0.0)
    after = [choice.text for choice in plain.choices] if most else ["", ""]
    assert texts == [text + more for text, more in zip(TEXTS, after, strict=True)]
    assert found == []


def test_a_prompt_counts_as_a_prompt(client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase) -> None:
    answer = client.completions.create(model=NAME, prompt=TEXTS[0], max_tokens=0, echo=True, logprobs=1, n=2)
    took = answer.usage
    assert took is not None
    assert (took.prompt_tokens, took.completion_tokens) == (len(tokenizer(TEXTS[0])["input_ids"]), 0)
    assert [each.index for each in answer.choices] == [0, 1]


def test_the_offset_behind_a_broken_character(client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase) -> None:
    first, *_ = tokenizer("😀", add_special_tokens=False)["input_ids"]
    words = tokenizer("sea and sea", add_special_tokens=False)["input_ids"]
    (shown,), (found,), _ = whole(client, False, prompt=[first, *words], max_tokens=0, logprobs=0)
    assert shown == "\ufffd" + tokenizer.decode(words)
    assert found["text_offset"][:2] == [0, 1]
    assert [shown[start:stop] for start, stop in pairwise([*found["text_offset"][1:], None])] == found["tokens"][1:]


def test_a_prompt_cut_in_a_character_is_shown_up_to_it(
    client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = tokenizer("He saw 😀", add_special_tokens=False)["input_ids"]
    texts, (found,), _ = whole(client, False, prompt=ids[:-1], max_tokens=0, logprobs=0)
    assert texts[0].rstrip() == "He saw"
    assert found["tokens"][-1].startswith("bytes:\\x")


def test_what_an_echo_excludes(port: int) -> None:
    for given, blamed in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "chunks": {"texts": ["a"]}}, "echo"),
    ):
        answer = ask(port, "/v1/completions", complete(**given))
        assert (answer.status, answer.document["error"]["param"]) == (400, blamed)
    answer = ask(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "echo": True})
    assert (answer.status, answer.document["error"]["param"]) == (400, "echo")
