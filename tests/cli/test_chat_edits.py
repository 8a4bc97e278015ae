"""Earlier messages that are changed, branches, and going back: the cache follows, and reads only new tokens."""

import random
from pathlib import Path
from typing import Any

import pytest

import windlass
from tests.helpers import chats, cli
from tests.helpers.chats import FIRST, SECOND, THIRD, Make, after, held
from windlass.cli.chat import conversation
from windlass.cli.chat.commands import ChatCommands
from windlass.cli.chat.conversation import Exchange
from windlass.cli.chat.dialogue import Dialogue, cache_beside
from windlass.engine.text import encode

model, dialogue = cli.model, chats.dialogue  # fixtures
Ids = list[int]
Read = list[int]
LONG = "The old man had a boat with a green sail, and in the morning he went down the river to look for his dog."
WORDS = ["the", "boat", "river", "dog", "old", "man", "went", "to", "see", "a", "tree"]
OTHER = "There was once a tall tree by the house."


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """The numbers of tokens of all passes from now on."""
    counts, begin = Read(), windlass.KVCache.begin

    def counted(cache: windlass.KVCache, *arguments: Any) -> None:
        begin(cache, *arguments)
        assert cache.text.pending is not None
        counts.append(sum(cache.text.pending.lengths))

    monkeypatch.setattr(windlass.KVCache, "begin", counted)
    return counts


def ids_of(talk: Dialogue, turns: list[Exchange]) -> Ids:
    """Ids of a conversation under the template of `chats`, spelled out. Replies have the ids that the model wrote."""
    tokenizer, found, end = talk.session.tokenizer, Ids(), ""
    for turn in turns:
        text = f"{end}[user]{turn.line.strip()}<|eos|>\n[assistant]"
        found += encode(tokenizer, text, is_start=not found) + turn.tokens
        end = "\n" if turn.ended_with else "<|eos|>\n"
    return found


def unshared(old: Ids, new: Ids) -> int:
    """The number of new tokens between the common beginning and a common end of 16 tokens or more."""
    most = min(len(old), len(new))
    head = next((at for at in range(most) if old[at] != new[at]), most)
    tail = next((at for at in range(most - head) if old[-1 - at] != new[-1 - at]), most - head)
    return len(new) - head - (tail if tail >= 16 else 0)


def assert_whole(talk: Dialogue) -> None:
    """The cache has all tokens of the conversation, at their positions."""
    ids = talk.conversation.ids
    assert (talk.cache.tokens or [[]]) == [ids]
    assert talk.cache.next_positions == [len(ids)]
    assert not ids or all(layer == [*range(len(ids))] for layer in held(talk.cache))


def obey(talk: Dialogue, line: str) -> None:
    name, _, text = line.removeprefix("/").partition(" ")
    ChatCommands(talk).obey(name, text)


def test_an_edited_message_is_all_that_is_read(dialogue: Make, read: Read, capsys: pytest.CaptureFixture[str]):
    talk = after(dialogue(), FIRST, LONG, SECOND, LONG, THIRD)
    before, turns = talk.conversation.ids, list(talk.conversation.turns)
    del read[:]
    obey(talk, f"/edit 3 {OTHER}")
    turns[1] = Exchange(OTHER, turns[1].reply, [], turns[1].tokens, turns[1].ended_with)
    assert talk.conversation.ids == ids_of(talk, turns)
    assert sum(read) == unshared(before, talk.conversation.ids) < 20
    assert f"message 3 is changed, {sum(read)} tokens read\n" in capsys.readouterr().err
    assert_whole(talk)
    del read[:]
    obey(talk, f"/edit 3 {LONG}")
    assert talk.conversation.ids == before
    assert sum(read) < 40
    obey(talk, "/edit 3 " + LONG)
    assert "message 3 is changed, nothing was read\n" in capsys.readouterr().err
    obey(talk, f"/edit 4 {OTHER}")
    assert talk.conversation.turns[1].reply == OTHER
    assert sum(read) < 60
    assert_whole(talk)


def test_nothing_behind_the_edit_is_a_fresh_conversation(dialogue: Make, read: Read):
    """A reply that was changed, and a message that is answered anew once it was changed."""
    talk = after(dialogue(), FIRST, LONG)
    obey(talk, f"/edit 4 {OTHER}")
    fresh = dialogue()
    fresh.conversation.turns = list(talk.conversation.turns)
    fresh.catch_up()
    assert_whole(talk)
    for each in (talk, fresh):
        after(each, THIRD)
    assert talk.conversation.turns == fresh.conversation.turns
    obey(talk, f"/edit 5 {SECOND}")
    del read[:]
    obey(talk, "/rewind 5")
    twin = dialogue()
    twin.conversation.turns = talk.conversation.turns[:2]
    twin.catch_up()
    after(twin, SECOND)
    assert talk.conversation.turns == twin.conversation.turns
    assert_whole(talk)


@pytest.mark.parametrize("messages", [0, 2, 3, 6])
def test_rewind_is_as_if_no_more_was_said(dialogue: Make, read: Read, messages: int):
    talk = after(dialogue(), FIRST, SECOND, THIRD)
    del read[:]
    obey(talk, f"/rewind {messages}")
    if messages % 2 == 0:
        assert read == []
    said = [FIRST, SECOND, THIRD][: (messages + 1) // 2]
    twin = after(dialogue(), *said)
    assert talk.conversation.turns == twin.conversation.turns
    assert_whole(talk)
    for each in (talk, twin):
        after(each, LONG)
    assert talk.conversation.turns == twin.conversation.turns


@pytest.mark.parametrize("policy", ["key_diff", "h2o", "expected_attention"])
def test_undo_past_the_budget_is_exact(dialogue: Make, read: Read, policy: str):
    """Bit by bit that of a conversation without the message, once. What is before that is read again."""
    talk, twin = after(dialogue(budget=20, policy=policy), FIRST, SECOND, THIRD), dialogue(budget=20, policy=policy)
    after(twin, FIRST, SECOND)
    del read[:]
    assert talk.undo() == "the last turn is taken back: rolled back, 2 turns left"
    assert read == []
    assert (talk.cache.tokens, held(talk.cache)) == (twin.cache.tokens, held(twin.cache))
    for each in (talk, twin):
        after(each, LONG)
    assert talk.conversation.turns == twin.conversation.turns
    for name, tensor in talk.cache.layers[1].tensors().items():
        assert tensor.equal(twin.cache.layers[1].tensors()[name]), name
    talk.undo()
    del read[:]
    told = talk.undo()
    left = len(talk.conversation.ids)
    assert told.endswith(f"all {left} tokens were read again, because the cache has evicted some, 1 turn left")
    assert sum(read) == left


def test_undo_with_recall_reads_nothing(dialogue: Make, read: Read):
    talk = after(dialogue(budget=40, recall=16), FIRST, LONG, SECOND, THIRD)
    for turns in (3, 2, 1):
        del read[:]
        talk.undo()
        assert (read, len(talk.conversation.turns)) == ([], turns)
        assert talk.cache.tokens == [talk.conversation.ids]
        store = talk.cache.layers[0].table.recall
        assert store is not None
        assert store.positions[0, : store.lengths[0]].sort().values.tolist() == [*range(len(talk.conversation.ids))]


def test_an_edit_leaves_what_was_evicted(dialogue: Make, read: Read):
    talk = after(dialogue(budget=48), FIRST, LONG, SECOND, LONG, THIRD)
    before, was = talk.conversation.ids, held(talk.cache)
    del read[:]
    obey(talk, f"/edit 3 {OTHER}")
    new = talk.conversation.ids
    assert sum(read) == unshared(before, new) < 20
    end, by = len(new) - 100, len(new) - len(before)
    for old, now in zip(was, held(talk.cache), strict=True):
        assert len(now) <= 48
        assert {at for at in now if at >= end} <= {at + by for at in old}
    after(talk, SECOND)
    assert talk.cache.tokens == [talk.conversation.ids]


REFUSED: list[dict[str, Any]] = [{"budget": 60, "merge": "mean_count"}, {"store": "int4(sinks=2, newest=5)"}]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_options_without_edits_read_again(dialogue: Make, read: Read, options: dict[str, Any]):
    talk = after(dialogue(**options), FIRST, LONG)
    del read[:]
    told = talk.edit(1, OTHER)
    assert "tokens were read again, because this model, or an option of the cache, takes no edits" in told
    assert sum(read) == len(talk.conversation.ids)
    assert talk.cache.tokens == [talk.conversation.ids]


def test_a_branch_of_recalled_tokens_on_disk(dialogue: Make, tmp_path: Path):
    options = {"budget": 40, "recall": 16, "recall_folder": tmp_path}
    talk, twin = (after(dialogue(**options), FIRST, LONG) for _ in "ab")
    talk.branch("sea")
    after(talk, SECOND)
    talk.branch("main")
    for each in (talk, twin):
        after(each, THIRD)
    assert talk.conversation.turns == twin.conversation.turns
    assert held(talk.cache) == held(twin.cache)


def test_branches_go_on_apart(dialogue: Make, read: Read, capsys: pytest.CaptureFixture[str]):
    talk = after(dialogue(budget=40), FIRST, LONG)
    obey(talk, "/branch sea")
    after(talk, SECOND)
    del read[:]
    obey(talk, "/branch main")
    assert read == []
    after(talk, THIRD)
    twins = [after(dialogue(budget=40), FIRST, LONG, line) for line in (THIRD, SECOND)]
    for name, twin in zip(("main", "sea"), twins, strict=True):
        obey(talk, f"/branch {name}")
        assert talk.conversation.turns == twin.conversation.turns
        assert held(talk.cache) == held(twin.cache)
    capsys.readouterr()
    obey(talk, "/branch")
    size = len(talk.conversation.ids)
    out = capsys.readouterr().out
    assert [line.split()[:4] for line in out.splitlines()] == [
        ["main", "6", "messages,", str(len(twins[0].conversation.ids))],
        ["*", "sea", "6", "messages,"],
    ]
    assert f"{size} tokens, " in out
    assert "KiB" in out
    talk.undo()
    assert read.count(0) == 0
    assert held(talk.cache) == held(after(dialogue(budget=40), FIRST, LONG).cache)


def test_branches_are_saved_and_survive_a_crash(dialogue: Make, read: Read, tmp_path: Path):
    talk = after(dialogue(budget=30), FIRST)
    talk.branch("sea")
    after(talk, SECOND)
    talk.branch("main")
    after(talk, THIRD)
    talk.save(tmp_path / "talk")
    assert {each.name for each in tmp_path.glob("talk*")} == {"talk", "talk.cache", "talk.sea.cache"}
    journal = conversation.read(next((tmp_path / "chats").glob("*")))
    assert (journal.branch, [each.branch for each in journal.others]) == ("main", ["sea"])
    for chat, path in ((conversation.read(tmp_path / "talk"), tmp_path / "talk"), (journal, None)):
        del read[:]
        other = dialogue(budget=30)
        cache = None if path is None else windlass.KVCache.load(cache_beside(path), other.session.model)
        assert ", branch main beside sea" in other.take(chat, cache, path)
        assert other.conversation.turns == talk.conversation.turns
        written = max((tmp_path / "chats").glob("*"), key=lambda each: each.stat().st_mtime_ns)
        left = conversation.read(written)
        assert (left.branch, [each.branch for each in left.others]) == ("main", ["sea"])
        other.branch("sea")
        assert other.conversation.turns == talk.branches["sea"].conversation.turns
        assert other.cache.tokens == [other.conversation.ids]
        assert bool(read) == (path is None)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/edit 5 x", "message 5 is not there: this conversation has the messages 1 to 2"),
        ("/edit 0 x", "message 0 is not there"),
        ("/edit x y", "/edit takes the number of a message, got 'x'. /history lists the messages"),
        ("/edit -1 y", "got '-1'"),
        ("/rewind 3", "message 3 is not there"),
        ("/rewind all", "/rewind takes the number of messages, got 'all'"),
        ("/branch a/b", "branch 'a/b' is no name"),
    ],
)
def test_a_bad_argument_changes_nothing(dialogue: Make, line: str, says: str):
    talk = after(dialogue(), FIRST)
    turns = list(talk.conversation.turns)
    with pytest.raises(windlass.UsageError) as refused:
        obey(talk, line)
    assert says in str(refused.value)
    assert (talk.conversation.turns, talk.branches) == (turns, {})
    assert_whole(talk)


def test_history_numbers_messages_and_edit_offers_the_old_text(dialogue: Make, capsys: pytest.CaptureFixture[str]):
    talk = after(dialogue(system="Be brief."), FIRST, LONG)
    capsys.readouterr()
    obey(talk, "/history")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["     system  Be brief.", f"   1 you     {FIRST}"]
    assert lines[3].startswith("   3 you     The old man had a boat")
    assert lines[3].endswith(" ...")
    obey(talk, "/edit 3")
    assert talk.draft == f"/edit 3 {LONG}"


def test_an_interrupted_edit_is_read_at_the_next_message(dialogue: Make, monkeypatch: pytest.MonkeyPatch):
    talk = after(dialogue(chunk=4), FIRST, LONG, SECOND, LONG)
    begin, count = windlass.KVCache.begin, iter(range(1))

    def interrupted(cache: windlass.KVCache, *arguments: Any) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt
        begin(cache, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(windlass.KVCache, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            talk.edit(3, OTHER)
    assert talk.cache.tokens == [[]]
    fresh = dialogue(chunk=4)
    fresh.conversation.turns = list(talk.conversation.turns)
    for each in (talk, fresh):
        after(each, THIRD)
    assert talk.conversation.turns == fresh.conversation.turns
    assert_whole(talk)


OPTIONS: list[dict[str, Any]] = [{}, {"budget": 400}, {"budget": 48}, {"budget": 48, "recall": 16}, {"store": "int8"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_random_commands_against_a_list(dialogue: Make, read: Read, options: dict[str, Any]):
    """Branches are lists of (message, reply, ids of the reply, its end). The cache always has the ids of one."""
    draw, talk = random.Random(len(str(options))), dialogue(**options)
    talk.max_tokens, branches, name = 3, {"main": list[Exchange]()}, "main"
    is_whole, moved = "budget" not in options, 0
    for _ in range(70):
        turns, ids = branches[name], talk.conversation.ids
        what = draw.choice(["say", "say", "say", "edit", "edit", "rewind", "undo", "branch", "retry"])
        text = " ".join(draw.choices(WORDS, k=draw.randrange(1, 25)))
        del read[:]
        what = what if turns else "say"
        if what == "say":
            after(talk, text)
            turns.append(talk.conversation.turns[-1])
            assert turns[-1].line == text
        elif what == "edit":
            number = draw.randrange(1, 2 * len(turns) + 1)
            talk.edit(number, text)
            old, now = turns[(number - 1) // 2], talk.conversation.turns[(number - 1) // 2]
            assert (now.line, now.reply) == ((text, old.reply) if number % 2 else (old.line, text))
            new = encode(talk.session.tokenizer, text + old.ended_with, is_start=False)
            assert now.tokens == (old.tokens if number % 2 else new)
            turns[(number - 1) // 2] = now
            assert sum(read) <= unshared(ids, talk.conversation.ids)
            moved += len(talk.conversation.ids) - sum(read)
        elif what == "rewind":
            left = draw.randrange(max(0, len(turns) - 2), len(turns) + 1)
            talk.rewind(2 * left)
            del turns[left:]
        elif what == "undo":
            talk.undo()
            turns.pop()
        elif what == "retry":
            talk.retry()
            turns[-1] = talk.conversation.turns[-1]
        else:
            other = draw.choice("abc")
            branches.setdefault(other, list(turns))
            talk.branch(other)
            name = other
        assert not read or what not in ("rewind", "undo", "branch") or (not is_whole and what != "branch")
        assert talk.conversation.turns == branches[name]
        assert talk.conversation.ids == ids_of(talk, branches[name])
        assert (talk.cache.tokens or [[]])[0] == talk.conversation.ids
        if is_whole:
            assert_whole(talk)
        size = len(talk.conversation.ids)
        for layer in held(talk.cache) if size else ():
            assert layer == sorted(set(layer))
            assert [at for at in layer if at < 4] == [*range(min(size, 4))]
            assert len(layer) <= (options.get("budget") or size)
            assert not layer or layer[-1] < size
    assert moved > 500
