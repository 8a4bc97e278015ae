"""Commands of a chat: lines that begin with a slash."""

import pytest

import windlass
from tests.helpers import chats, cli
from tests.helpers.chats import FIRST, SAMPLING, SECOND, Make, after
from windlass.cli.chat.commands import ChatCommands
from windlass.engine.sampling import Sampling

model, dialogue = cli.model, chats.dialogue  # fixtures


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("temperature 101", "temperature must be from 0 to 100, got 101.0"),
        ("top_k 2.5", "top_k must be a whole number, got '2.5'"),
        ("top-p warm", "top_p must be a number, got 'warm'"),
        ("max_tokens 0", "max_tokens must be from 1 to 1073741824, got 0"),
        ("heat 3", "/set knows no 'heat'. It sets max_tokens, temperature"),
        ("positions compcat", "positions='compcat' is not a position mode"),
    ],
)
def test_set_checks_values_as_the_options_do(dialogue: Make, text: str, says: str):
    talk = dialogue()
    with pytest.raises(windlass.UsageError) as refused:
        ChatCommands(talk).obey("set", text)
    assert says in str(refused.value)
    assert (talk.sampling, talk.max_tokens) == (Sampling(), 5)


def test_set_changes_the_next_reply(dialogue: Make, capsys: pytest.CaptureFixture[str]):
    talk = after(dialogue(), FIRST)
    for text in ("temperature=1.5", "seed 3", "--max-tokens 3", "positions compact"):
        ChatCommands(talk).obey("set", text)
    assert (talk.sampling, talk.max_tokens, str(talk.cache.positions)) == (SAMPLING, 3, "compact")
    capsys.readouterr()
    ChatCommands(talk).obey("set", "")
    assert "temperature 1.5\n" in capsys.readouterr().err
    assert len(after(talk, SECOND).conversation.turns[-1].tokens) == 3


def test_tokens_are_counted(dialogue: Make, capsys: pytest.CaptureFixture[str]):
    talk = after(dialogue(budget=20), FIRST, SECOND)
    capsys.readouterr()
    ChatCommands(talk).obey("tokens", "")
    last = talk.conversation.turns[-1]
    assert capsys.readouterr().out == (
        f"seen   {len(talk.conversation.ids)} tokens, 2 turns\n"
        "kept   20 in a layer, under a budget of 20\n"
        f"latest {len(last.prompt)} of the message, {len(last.tokens)} of the reply\n"
    )
    assert talk.status().startswith(f"{len(talk.conversation.ids)} tokens seen, 20 kept, ")


def test_a_command_whose_reply_is_interrupted(dialogue: Make, monkeypatch: pytest.MonkeyPatch):
    """Its exit code ends a chat in a pipe."""
    talk = dialogue()
    talk.answer(FIRST)
    monkeypatch.setattr(talk, "answer", lambda _: 130)
    commands = ChatCommands(talk)
    assert [commands.obey("retry", ""), commands.obey("rewind", "1"), commands.obey("tokens", "")] == [130, 130, 0]
