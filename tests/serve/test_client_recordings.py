"""Ten-turn loops of real clients, replayed: each request is taken, read by its library, and adds to the one before."""

import pytest
from transformers import PreTrainedModel

from tests.helpers.chats import with_template
from tests.helpers.client_recordings import NAMES, TEMPLATE, DictatedService, Recording, Replayed, replayed
from tests.helpers.models import MODEL
from tests.helpers.served_engine import engine_served
from tests.helpers.serving import ScriptedService, says, serving
from windlass.cache.options import CacheOptions
from windlass.hf.load import load
from windlass.serve.prompts import PromptTokenizer

OPTIONS = CacheOptions(budget=16_384, policy="key_diff", chunk=256)
QUICK = ("openai_chat", "anthropic")  # with the others it takes a minute
# One sends calls back as text of its own, the other drops the text before a call.
REWRITING = ("smolagents 1.26.0", "crewai 1.15.30")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load(MODEL, "float32")[0]


@pytest.fixture(scope="module")
def words() -> PromptTokenizer:
    return PromptTokenizer(with_template(TEMPLATE), [1], 2048)


def check(recording: Recording, turns: list[Replayed]) -> None:
    """Each answer is the text that was written, and each prompt goes on from the row before it."""
    assert sum(bool(turn.reply.calls) for turn in turns) >= 10
    assert sum(turn.adds for turn in turns[1:]) >= 7
    for at, turn in enumerate(turns):
        assert (turn.reply.text, turn.reply.calls) == turn.written, at
        if turn.adds and at:
            before = turns[at - 1]
            assert turn.shared >= len(before.prompt if recording.client in REWRITING else before.row), (at, turn.shared)


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_is_answered(words: PromptTokenizer, name: str) -> None:
    recording = Recording.of(name)
    service = ScriptedService(says(""))

    def dictate(text: str) -> None:
        service.script = says(text)

    with serving(service, words) as served:
        check(recording, replayed(recording, served.port, DictatedService(service, words, dictate)))


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in NAMES]
)
def test_each_turn_reads_its_new_messages_only(model: PreTrainedModel, words: PromptTokenizer, name: str) -> None:
    """The last token of a prompt is always read. A stream tells of the cache only where its client asks for usage."""
    recording = Recording.of(name)
    with engine_served(model, words.tokenizer, OPTIONS, 1 << 28, max_tokens=32_768) as (port, engine):
        turns = replayed(recording, port, DictatedService(engine, words))
    check(recording, turns)
    told = [turn for turn in turns if turn.reply.cached is not None]
    assert told
    for turn in told:
        assert min(turn.shared, len(turn.prompt) - 1) <= turn.reply.cached <= turn.shared
