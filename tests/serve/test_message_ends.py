"""A conversation is read on from the end of the last message that an earlier prompt had."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from transformers import PreTrainedModel

from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.models import MODEL
from tests.helpers.served_engine import engine_served
from tests.helpers.serving import ask, soon
from windlass.cache.options import CacheOptions
from windlass.engine.request import Request, Ticket
from windlass.engine.sampling import FinishReason
from windlass.engine.sequence import ActiveRequest
from windlass.engine.templates import MessageEnds, message_ends, rendered, renderer, system_tokens
from windlass.engine.text import PromptEncoder, encode
from windlass.hf.load import load

CHAT = "/v1/chat/completions"
MESSAGES = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "Who was sitting in the boat?"},
    {"role": "assistant", "content": "She"},
    {"role": "user", "content": "And who rowed it down the river, and how far, before the night had come?"},
    {"role": "assistant", "content": "He"},
    {"role": "user", "content": "Why?"},
]
REORDERED = TEMPLATE.replace("in messages", "in messages | reverse")
REFUSES = "{% if messages[-1].role == 'system' %}{{ raise_exception('no user') }}{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load(MODEL, "float32")[0]


@pytest.mark.parametrize(
    ("template", "ended"), [(TEMPLATE, {0, 1, 2, 3, 4, 5}), (REFUSES, {1, 2, 3, 4, 5}), (REORDERED, {5})]
)
def test_ends_are_those_of_the_text_before_them(template: str, ended: set[int]) -> None:
    tokenizer = with_template(template)
    text, form = rendered(tokenizer, MESSAGES)
    render = renderer(tokenizer, form)
    text = text.removeprefix(str(tokenizer.bos_token))
    tokens = PromptEncoder(tokenizer).tokenized(text)
    ends = message_ends(tokenizer, tokens, MessageEnds().of(render, "", MESSAGES, text))
    ids = encode(tokenizer, text, is_start=True)
    known = [encode(tokenizer, render(MESSAGES[: at + 1]), is_start=True) for at in sorted(ended)]
    assert [ids[:end] for end in ends if end < len(ids)] == [each for each in known if each != ids]


@pytest.mark.parametrize("start", [3, 240, 300])
def test_ends_of_a_longer_prompt_are_those_of_one_that_nobody_knows(start: int) -> None:
    """Behind 256 messages they follow from those near them, and are ends of the same text. Messages may change."""
    tokenizer, draw, known = with_template(), random.Random(start), MessageEnds()
    render, encoder = renderer(tokenizer, rendered(tokenizer, MESSAGES)[1]), PromptEncoder(tokenizer)
    talk = [{"role": ("user", "assistant")[at % 2], "content": "sea " * draw.randrange(9)} for at in range(start)]
    for turn in range(9):
        more = [{"role": role, "content": f"{turn} é " * draw.randrange(1, 30)} for role in ("user", "assistant")]
        talk = [*talk[: len(talk) - 2 * (turn == 5)], *more, {"role": "user", "content": "Why?"}]
        text = render(talk)
        found, fresh = known.of(render, "", talk, text), MessageEnds().of(render, "", talk, text)
        assert found == fresh
        is_checked = turn in (0, 5, 8)  # each end takes a rendering of all messages before it
        if is_checked:
            assert found == tuple(len(render(talk[: at + 1])) for at in range(len(talk)))
        tokens = encoder.tokenized(text)
        assert tokens == PromptEncoder(tokenizer).tokenized(text)
        assert encoder.tokenized(text) is tokens
        assert [*tokens.ids] == encode(tokenizer, text, is_start=True)
        ends = message_ends(tokenizer, tokens, found)
        if is_checked:
            assert [tuple(tokens.ids[:end]) for end in ends] == [
                tuple(encode(tokenizer, text[:end], is_start=True)) for end in found if end
            ]
        talk.append({"role": "assistant", "content": f"{turn}"})


@pytest.mark.parametrize("budget", [400, 40])  # the whole conversation, and less
@pytest.mark.parametrize("chunk", [512, 16])
def test_a_turn_reads_what_is_new(model: PreTrainedModel, budget: int, chunk: int) -> None:
    tokenizer = with_template()
    options = CacheOptions(budget=budget, policy="key_diff", chunk=chunk)

    def answers(reuse_bytes: int) -> list[tuple[str, int, int]]:
        found = []
        with engine_served(model, tokenizer, options, reuse_bytes=reuse_bytes) as (port, _):
            for count in (2, 2, 4, 6):
                given = {"messages": MESSAGES[:count], "max_tokens": 8, "temperature": 0}
                document = ask(port, CHAT, given).document
                took = document["usage"]
                text = document["choices"][0]["message"]["content"]
                found.append((text, took["prompt_tokens"], took["prompt_tokens_details"]["cached_tokens"]))
        return found

    kept, again = answers(1 << 26), answers(0)
    assert [text for text, _, _ in kept] == [text for text, _, _ in again]
    assert [cached for _, _, cached in again] == [0] * 4
    start = len(encode(tokenizer, "[assistant]", is_start=False))  # of a reply, behind the last message
    for (_, before, _), (_, _, cached) in pairwise(kept):
        assert cached >= before - start - 1


@pytest.mark.parametrize("mode", ["prefix", "exact"])
def test_a_turn_does_not_read_the_answer_again(model: PreTrainedModel, mode: str) -> None:
    """As the template shows it, with the end of its turn. Unless the request wants the bits of a prompt read anew."""
    tokenizer, messages, read = with_template(), MESSAGES[:2], list[int]()
    with engine_served(model, tokenizer, CacheOptions(budget=400, policy="key_diff"), reuse_bytes=1 << 26) as (port, _):
        for turn in range(10):
            given = {"messages": messages, "max_tokens": 12, "temperature": 0, "cache": {"reuse": mode}}
            document = ask(port, CHAT, given).document
            took, answer = document["usage"], document["choices"][0]["message"]["content"]
            read.append(took["prompt_tokens"] - took["prompt_tokens_details"]["cached_tokens"])
            messages = [
                *messages,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"And {turn}?"},
            ]
    new = len(encode(tokenizer, "[assistant]\n[user]And 9?\n[assistant]", is_start=False))
    if mode == "exact":
        assert min(read[1:]) > new  # with an answer of 12 tokens
    else:
        assert max(read[1:]) <= new + 4


def test_pinned_messages_are_kept_or_refused(model: PreTrainedModel) -> None:
    tokenizer = with_template()
    options = CacheOptions(budget=96, policy="recent", chunk=16, window=8, sinks="system")
    system = {"role": "system", "content": "Be short."}
    task, said = "The river is called Thames. ", {"role": "assistant", "content": "Yes."}
    long = {"role": "user", "content": "He was sitting in the boat. " * 40}
    pinned = [system, {"role": "user", "content": task, "pin": True}, said | {"pin": True}]
    with engine_served(model, tokenizer, options) as (port, engine):
        asked = list[int]()
        submit = engine.submit_all

        def noted(requests: Sequence[Request], notify: Callable[[], None] | None = None) -> list[Ticket]:
            asked.extend(request.head for request in requests)
            return submit(requests, notify)

        engine.submit_all = noted  # type: ignore[method-assign]
        for messages in ([*pinned, long], [*pinned[:2], said, long], [system, long], [system | {"pin": True}, long]):
            assert ask(port, CHAT, {"messages": messages, "max_tokens": 2}).status == 200
        anthropic = {"system": "Be short.", "messages": [*pinned[1:], long], "model": "finder-3m", "max_tokens": 2}
        assert ask(port, "/v1/messages", anthropic).status == 200
        heads = [f"<|bos|>[system]Be short.<|eos|>\n[user]{task.strip()}<|eos|>\n[assistant]Yes.<|eos|>\n"]
        heads += [heads[0].partition("[assistant]")[0], heads[0].partition("[user]")[0] + "[user]"]
        heads += [heads[2], heads[0]]
        assert asked == [len(encode(tokenizer, each.removeprefix("<|bos|>"), is_start=True)) for each in heads]
        chunk = {"role": "user", "content": [{"type": "chunk", "text": "a"}]}
        for refused, problem in (
            ({"messages": [*pinned, chunk]}, "pin and parts of type chunk exclude each other"),
            ({"messages": [*pinned, long], "sinks": 4, "budget": 64}, 'pin needs rows with sinks "system"'),
            ({"messages": [system, long | {"pin": True}]}, "the budget of 96 tokens has room for 87"),
            ({"messages": [system, said, long | {"pin": True}]}, "the budget of 96 tokens has room for 87"),
        ):
            answer = ask(port, CHAT, refused)
            assert answer.status == 400
            assert problem in answer.document["error"]["message"]


def test_a_pinned_message_in_the_middle_is_kept(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens, wherever they stand, also in the next turn, which reads only what is new."""
    tokenizer = with_template()
    options = CacheOptions(budget=96, policy="recent", chunk=16, window=8, sinks="system")
    long = {"role": "user", "content": "He was sitting in the boat. " * 20}
    said, note = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "The river is called Thames."}
    before = encode(tokenizer, f"[user]{long['content'].strip()}<|eos|>\n[assistant]Yes.<|eos|>\n", is_start=True)
    pin = encode(tokenizer, "[user]The river is called Thames.<|eos|>\n", is_start=False)
    wanted = {*range(len(before), len(before) + len(pin))}
    messages = [long, said, note | {"pin": True}, said, long]
    with engine_served(model, tokenizer, options, reuse_bytes=1 << 26) as (port, _):
        held = list[tuple[tuple[tuple[int, int], ...], set[int]]]()
        end = ActiveRequest._end

        def noted(task: ActiveRequest, reason: FinishReason) -> None:
            positions = {*task.cache.layers[0].positions[task.index].flatten().tolist()}
            held.append((task.ticket.request.pins, positions))
            end(task, reason)

        monkeypatch.setattr(ActiveRequest, "_end", noted)
        for turn, (pins, is_cached) in enumerate([(True, False), (True, True), (False, False)]):
            asked = messages if pins else [each | {"pin": False} for each in messages]
            answer = ask(port, CHAT, {"messages": asked, "max_tokens": 9, "temperature": 0})
            assert answer.status == 200, answer.body
            found, positions = held.pop()
            assert found == (((min(wanted), max(wanted) + 1),) if pins else ())
            assert (wanted <= positions) == pins
            cached = answer.document["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > len(before) + len(pin)) == is_cached
            if turn == 0:
                content = answer.document["choices"][0]["message"]["content"]
                messages = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "And?"}]


def test_the_system_text_is_kept_or_refused(model: PreTrainedModel) -> None:
    tokenizer, system = with_template(), {"role": "system", "content": "The river is called Thames, and so it is. " * 3}
    options = CacheOptions(budget=96, policy="recent", chunk=16, window=8, sinks="system")
    head = system_tokens(tokenizer, [system])
    long = {"role": "user", "content": "He was sitting in the boat. " * 40}
    with engine_served(model, tokenizer, options) as (port, engine):
        held = list[set[int]]()
        before = engine._retire

        def noted() -> None:
            held.extend(
                {*task.cache.layers[0].positions[task.index].flatten().tolist()}
                for task in engine._tasks
                if task.is_over
            )
            before()

        engine._retire = noted  # type: ignore[method-assign]
        for messages, sinks in (([system, long], head), ([long], system_tokens(tokenizer, []))):
            answer = ask(port, CHAT, {"messages": messages, "max_tokens": 9, "temperature": 0})
            assert answer.status == 200, answer.body
            assert soon(lambda: bool(held))  # the answer may come before its row is cleared
            assert held.pop() >= {*range(max(sinks, 4))}
        assert ask(port, "/v1/completions", {"prompt": long["content"], "max_tokens": 3}).status == 200
        refused = ask(port, CHAT, {"messages": [system | {"content": str(long["content"])}, long]})
        assert refused.status == 400
        message = refused.document["error"]["message"]
        assert "the budget of 96 tokens has room for 87" in message
        assert str(system_tokens(tokenizer, [system | {"content": str(long["content"])}])) in message
