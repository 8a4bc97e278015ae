"""Actions of a chat between turns, against conversations that never needed them."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import windlass
from tests.helpers import chats, cli
from tests.helpers.chats import FIRST, SAMPLING, SECOND, THIRD, Make, after, held
from windlass.cli import session
from windlass.cli.chat import conversation
from windlass.cli.chat.dialogue import Dialogue, Show, cache_beside
from windlass.cli.chat.run import at_terminal, show_reply
from windlass.cli.terminal import INTERRUPTED

model, dialogue = cli.model, chats.dialogue  # fixtures


def replies(talk: Dialogue) -> list[str]:
    return [turn.reply for turn in talk.conversation.turns]


def assert_same_text(talk: Dialogue, other: Dialogue) -> None:
    assert replies(talk) == replies(other)
    assert talk.cache.tokens == other.cache.tokens == [talk.conversation.ids]
    assert held(talk.cache) == held(other.cache)


@pytest.mark.parametrize("template", [chats.TEMPLATE, None])
def test_undo_leaves_no_trace(dialogue: Make, template: str | None):
    talk = after(dialogue(template), FIRST, SECOND)
    assert talk.undo() == "the last turn is taken back: rolled back, 1 turn left"
    assert_same_text(talk, after(dialogue(template), FIRST))
    assert_same_text(after(talk, THIRD), after(dialogue(template), FIRST, THIRD))


def test_undo_of_everything_is_an_empty_cache(dialogue: Make):
    talk = after(dialogue(), FIRST)
    talk.undo()
    assert talk.cache.tokens_seen == [0]
    with pytest.raises(windlass.UsageError, match="no turn to take back"):
        talk.undo()
    assert_same_text(after(talk, SECOND), after(dialogue(), SECOND))


def test_retry_draws_another_reply(dialogue: Make):
    talk = after(dialogue(sampling=SAMPLING), FIRST, SECOND)
    before = replies(talk)
    assert talk.retry() == 0
    twin = after(dialogue(sampling=SAMPLING), FIRST)
    twin.sampling = replace(SAMPLING, seed=SAMPLING.seed + 1)
    assert_same_text(talk, after(twin, SECOND))
    assert replies(talk)[1] != before[1]
    talk.retry()
    assert talk.sampling.seed == SAMPLING.seed + 2


def test_retry_without_drawing_says_that_nothing_changes(dialogue: Make, capsys: pytest.CaptureFixture[str]):
    talk = after(dialogue(), FIRST, SECOND)
    before = replies(talk)
    talk.retry()
    assert replies(talk) == before
    assert "temperature 0 writes the same reply again" in capsys.readouterr().err


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets an interrupt come at the pass of this number, counted from now."""

    def at(number: int) -> None:
        count, begin = iter(range(number)), windlass.KVCache.begin

        def counted(cache: windlass.KVCache, *arguments: Any) -> None:
            if next(count, None) is None:
                monkeypatch.setattr(windlass.KVCache, "begin", begin)
                raise KeyboardInterrupt
            begin(cache, *arguments)

        monkeypatch.setattr(windlass.KVCache, "begin", counted)

    return at


def test_an_interrupt_before_the_reply_takes_the_message_back(dialogue: Make, interrupted: Callable[[int], None]):
    talk = after(dialogue(chunk=4), FIRST)
    interrupted(2)
    assert talk.answer(SECOND) == INTERRUPTED
    assert len(talk.conversation.turns) == 1
    assert talk.cache.tokens != [talk.conversation.ids], "nothing was left behind: the test is too easy"
    assert_same_text(after(talk, THIRD), after(dialogue(chunk=4), FIRST, THIRD))


@pytest.mark.parametrize("show", [None, show_reply])
def test_an_interrupted_reply_counts_as_far_as_it_came(
    dialogue: Make, interrupted: Callable[[int], None], show: Show | None, capsys: pytest.CaptureFixture[str]
):
    talk = after(dialogue(show=show), FIRST)
    capsys.readouterr()
    interrupted(4)
    assert talk.answer(SECOND) == INTERRUPTED
    last = talk.conversation.turns[-1]
    assert (len(last.tokens), last.ended_with) == (3, "")
    assert talk.cache.tokens == [talk.conversation.ids]
    assert talk.session.tokenizer.decode(last.tokens) == last.reply
    out, err = capsys.readouterr()
    # At a terminal the word at the end, which may have gone on, is never shown.
    shown = last.reply if show is None else last.reply.rpartition(" ")[0] + " "
    assert out.removesuffix("\n") == shown
    assert err.startswith("interrupted")


def test_a_terminal_tells_what_is_wrong_and_goes_on(dialogue: Make, capsys: pytest.CaptureFixture[str]):
    alternate = "{% if messages|length > 1 %}{{ raise_exception('no second') }}{% endif %}" + chats.TEMPLATE
    talk = dialogue(alternate, show=show_reply)
    typed = [FIRST, SECOND, "/undo", THIRD, "/load none", "/set top_p 2", "/what"]
    with create_pipe_input() as keys, create_app_session(keys, DummyOutput()):
        keys.send_text("".join(line + "\r" for line in typed) + "\x04")
        assert at_terminal(talk, None) == 0
        keys.send_text("abc\x03\x03\x03")
        assert at_terminal(talk, None) == INTERRUPTED
    err = capsys.readouterr().err
    errors = [line for line in err.splitlines() if line.startswith("windlass: error: ")]
    assert [line.split()[2] for line in errors] == ["this", "conversation", "top_p"]
    assert errors[0].startswith("windlass: error: this model's chat template fails: no second")
    assert "/what is no command" in err
    assert_same_text(talk, after(dialogue(alternate), THIRD))


def test_a_retry_that_is_interrupted_keeps_the_reply(dialogue: Make, interrupted: Callable[[int], None]):
    talk = after(dialogue(sampling=SAMPLING), FIRST, SECOND)
    twin = after(dialogue(sampling=SAMPLING), FIRST, SECOND)
    interrupted(0)
    assert talk.retry() == INTERRUPTED
    assert replies(talk) == replies(twin)
    twin.sampling = talk.sampling
    assert_same_text(after(talk, THIRD), after(twin, THIRD))


def test_saved_and_loaded_goes_on_exactly(dialogue: Make, tmp_path: Path):
    options = {"budget": 20, "policy": windlass.policies.H2O()}
    talk = after(dialogue(**options), FIRST, SECOND)
    talk.save(tmp_path / "talk")
    other = dialogue()
    assert other.load(tmp_path / "talk") == f"2 turns, {len(talk.conversation.ids)} tokens"
    assert other.cache.options.labels() == talk.cache.options.labels()
    assert_same_text(after(other, THIRD), after(talk, THIRD))
    # From the text alone the cache would hold other tokens: it is the file that goes on exactly.
    cache_beside(tmp_path / "talk").unlink()
    again = dialogue(**options)
    assert again.load(tmp_path / "talk").endswith("its text was read again")
    assert again.cache.tokens == [again.conversation.ids]
    assert held(after(again, THIRD).cache) != held(talk.cache)


def test_the_cost_of_eviction_is_told_of_a_loaded_cache(
    dialogue: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "long.json"
    after(dialogue(budget=20), FIRST, SECOND, THIRD).save(path)
    loaded = dialogue(budget=20)
    assert loaded.load(path).endswith("tokens")  # its cache is taken
    capsys.readouterr()
    after(loaded, FIRST, SECOND)
    assert capsys.readouterr().err.count(session.EVICTION_COST) == 1


@pytest.mark.parametrize("damage", ["cut", "another"])
def test_a_cache_that_does_not_fit_is_made_again(
    dialogue: Make, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
):
    talk = after(dialogue(), FIRST)
    talk.save(tmp_path / "talk")
    beside = cache_beside(tmp_path / "talk")
    if damage == "cut":
        beside.write_bytes(beside.read_bytes()[:500])
    else:
        after(talk, SECOND).save(tmp_path / "longer")
        cache_beside(tmp_path / "longer").replace(beside)
    other = dialogue()
    assert other.load(tmp_path / "talk").endswith("its text was read again")
    assert ("damaged" in capsys.readouterr().err) == (damage == "cut")
    assert_same_text(after(other, SECOND), after(dialogue(), FIRST, SECOND))


def test_only_a_conversation_with_this_model_is_loaded(dialogue: Make, tmp_path: Path):
    talk = after(dialogue(), FIRST)
    talk.save(tmp_path / "talk")
    text = (tmp_path / "talk").read_text()
    other = after(dialogue(), SECOND)
    (tmp_path / "talk").write_text(text.replace(talk.journal.origin.fingerprint, "0123"))
    with pytest.raises(windlass.UsageError, match="was held with finder-3m, this is finder-3m: config, weights"):
        other.load(tmp_path / "talk")
    (tmp_path / "talk").write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(windlass.UsageError, match="format version 2"):
        other.load(tmp_path / "talk")
    assert_same_text(other, after(dialogue(), SECOND))


def test_saving_replaces_conversations_only(dialogue: Make, tmp_path: Path):
    talk = after(dialogue(), FIRST)
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n")
    with pytest.raises(windlass.UsageError, match="is not one that windlass saved"):
        talk.save(notes)
    assert notes.read_text() == "my notes\n"
    assert not cache_beside(notes).exists()
    talk.save(tmp_path / "talk")
    after(talk, SECOND).save(tmp_path / "talk")
    assert len(conversation.read(tmp_path / "talk").turns) == 2
    with pytest.raises(windlass.UsageError, match=r"does not exist\. Make it first"):
        talk.save(tmp_path / "none" / "talk")


def test_ids_that_the_model_lacks_are_made_from_the_text(dialogue: Make, tmp_path: Path):
    talk = after(dialogue(), FIRST)
    talk.save(tmp_path / "talk")
    saved = conversation.read(tmp_path / "talk")
    turn = replace(saved.turns[0], tokens=[10**9])
    other = dialogue()
    other.take(replace(saved, turns=[turn]))
    assert_same_text(after(other, SECOND), after(talk, SECOND))


def test_another_system_text_is_as_if_told_from_the_start(dialogue: Make):
    talk = after(dialogue(), FIRST)
    assert talk.tell("Speak of the sea.") is True
    twin = dialogue(system="Speak of the sea.")
    twin.conversation.turns = copy.copy(talk.conversation.turns)
    twin.conversation.encode_again()
    twin.catch_up()
    assert_same_text(after(talk, SECOND), after(twin, SECOND))
    talk.reset()
    assert_same_text(after(talk, FIRST), after(dialogue(system="Speak of the sea."), FIRST))


def test_any_error_takes_the_message_back(dialogue: Make, monkeypatch: pytest.MonkeyPatch):
    talk = after(dialogue(), FIRST)

    with monkeypatch.context() as patch:
        patch.setattr(session, "say", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            talk.answer(SECOND)
    assert_same_text(after(talk, THIRD), after(dialogue(), FIRST, THIRD))


def test_a_cut_by_max_tokens_is_told_once(dialogue: Make, capsys: pytest.CaptureFixture[str]):
    talk = after(dialogue(show=show_reply), FIRST, SECOND, THIRD)
    assert [turn.ended_with for turn in talk.conversation.turns] == ["", "", ""]
    assert capsys.readouterr().err.count("ended at max_tokens 5 (/set max_tokens 10") == 1
