"""Rows of texts that have ended, in files: the next server goes on from them as if it were the same."""

import logging
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from safetensors import safe_open
from torch.testing import assert_close
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.conversations import LOOSE, PLENTY, WIDE, Conversation, chat
from tests.helpers.hybrids import bound
from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import options_of, request_of, rows_of, running, tokens_of, wait_for
from windlass import KVCache, prefill
from windlass.cache import cache as memory_of_cache
from windlass.cache import recall as memory_of_recall
from windlass.cache.recall import RecallMemory
from windlass.engine.disk import NAME, DiskTier
from windlass.engine.prefill import Reader
from windlass.engine.prefix_cache import PrefixCache, Snapshots, key_of, pack
from windlass.engine.prefix_entry import CacheEntry, EntrySelector
from windlass.engine.request import EXACT, PREFIX, Reuse
from windlass.engine.scheduler import Scheduler
from windlass.hf import prompt_cache


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


def tokens_in(folder: Path) -> list[int]:
    """The number of tokens of each file, as its name has it."""
    return sorted(int(path.name.split("-")[2]) for path in files(folder))


@pytest.mark.parametrize(
    "options",
    [
        {"budget": WIDE},
        {"budget": 40},
        {"budget": 40, "policy": "h2o", "store": "int8"},
        {"budget": 40, "policy": "snapkv", "store": "int4(sinks=2, newest=5)"},
        {"budget": WIDE, "sinks": "system"},
        {"budget": 40, "recall": 24},
        {"budget": WIDE, "recall": 24, "recall_store": "plain"},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_conversation_goes_on_in_the_next_server(
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    tmp_path: Path,
    options: dict[str, Any],
    rows: int,
) -> None:
    """Each turn in another one. The text is that of one cache, and each token is read once."""
    model, own = attached_model("llama"), options_of(**options)
    turns, read = rows_of(text, 21, 5, 37, 3, 9), list[int]()
    answers, ids, ends = list[list[int]](), list[int](), list[int]()
    for new in turns:
        disk = DiskTier(tmp_path, PLENTY, model)
        with running(model, tokenizer, kinds=[(rows, own)], reuse_bytes=PLENTY, disk=disk) as engine:
            talk = Conversation(engine, own)
            talk.ids, talk.ends = ids, ends
            answers.append(talk.turn(new))
            ids, ends = talk.ids, talk.ends
            read.append(talk.usages[0].prompt - talk.usages[0].cached)
    assert answers == chat(model, own, turns)
    assert read == [len(turns[0]), *(len(new) + 1 for new in turns[1:])]
    if options["budget"] == WIDE and "int4" not in str(options):
        assert tokens_in(tmp_path) == [len(ids) - 1]  # of which the shorter ones are beginnings


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 128 tokens."""
    monkeypatch.setattr(memory_of_cache, "RecallMemory", partial(RecallMemory, piece=128))
    monkeypatch.setattr(memory_of_recall, "LARGEST", 1)


def segments(folder: Path) -> dict[str, int]:
    """The files of evicted tokens, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.segment")}


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("is_restarted", [True, False])
def test_evicted_tokens_are_written_once(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, tmp_path: Path, is_restarted: bool
) -> None:
    """In segments, which the next server reads, and goes on to write. The text is that of one cache."""
    model, own = attached_model("llama"), options_of(budget=40, recall=24)
    turns, answers, known = rows_of(text, 150, 140, 9, 130, 260), list[list[int]](), dict[str, int]()
    ids, ends = list[int](), list[int]()

    def turn(new: list[int], engine: Scheduler, disk: DiskTier) -> None:
        nonlocal ids, ends
        talk = Conversation(engine, own)
        talk.ids, talk.ends = ids, ends
        answers.append(talk.turn(new))
        ids, ends = talk.ids, talk.ends
        assert talk.usages[0].prompt - talk.usages[0].cached <= len(new) + 1
        wait_for(lambda: len(ids) - 1 in {each.tokens for each in disk.stored(EntrySelector(""))})
        found = segments(tmp_path)
        assert known.items() <= found.items()
        known.update(found)
        sizes = sum(path.stat().st_size for path in tmp_path.iterdir() if path.suffix in (".safetensors", ".segment"))
        assert disk.bytes == sizes + sum(path.stat().st_size for path in tmp_path.glob("*.json"))

    if is_restarted:
        for new in turns:
            disk = DiskTier(tmp_path, PLENTY, model)
            with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY, disk=disk) as engine:
                turn(new, engine, disk)
    else:
        disk = DiskTier(tmp_path, PLENTY, model)
        with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY, disk=disk) as engine:
            for new in turns:
                turn(new, engine, disk)
    assert answers == chat(model, own, turns)
    assert len(known) == (len(ids) - 1) // 128 == 5
    disk = DiskTier(tmp_path, PLENTY, model)
    disk.forget(EntrySelector(""))
    assert not segments(tmp_path)
    disk.close()


@pytest.mark.usefixtures("pieces")
def test_a_file_that_leaves_takes_no_segment_of_the_new_one_with_it(
    attached_model: Models, text: Text, tmp_path: Path
) -> None:
    """Each text ends behind a segment of its own, and from the tenth on a shorter one leaves."""
    model, own, done = attached_model("llama"), options_of(budget=40, recall=24), 0
    (ids,) = rows_of(text, 1500)
    for size in range(135, 1500, 129):
        disk = DiskTier(tmp_path, PLENTY, model)
        snapshots = Snapshots(PrefixCache(PLENTY), disk)
        reader = Reader(model, request_of(ids[:size], options=own, reuse=Reuse(store=False, mode=PREFIX)), snapshots)
        assert reader.cached == done
        while not reader.is_done:
            reader.read()
        snapshots.keep(reader.entry)
        snapshots.close()
        done = size
    assert len(tokens_in(tmp_path)) == 9


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("damage", ["lost", "cut", "changed"])
def test_a_damaged_segment_is_told(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, tmp_path: Path, damage: str
) -> None:
    model, own = attached_model("llama"), options_of(budget=40, recall=24)
    (ids,) = rows_of(text, 300)
    answers = list[list[int]]()
    for turn in range(2):
        disk = DiskTier(tmp_path, PLENTY, model)
        with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY, disk=disk) as engine:
            answers.append(tokens_of(engine.submit(request_of(ids, options=own, reuse=LOOSE))))
            wait_for(lambda: 305 in tokens_in(tmp_path))
        first = min(tmp_path.glob("*.segment"), key=lambda path: path.stat().st_mtime_ns)
        if turn == 0 and damage == "lost":
            first.unlink()
        elif turn == 0 and damage == "cut":
            first.write_bytes(first.read_bytes()[:-9])
        elif turn == 0:
            first.write_bytes(first.read_bytes()[:-1] + b"x")
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("is_edited", [False, True])
def test_a_file_has_the_positions_of_its_own_tokens_alone(
    attached_model: Models, text: Text, tmp_path: Path, is_edited: bool
) -> None:
    """Unless an edit has moved tokens of the segments before them."""
    model = attached_model("llama")
    cache = KVCache.from_options(model, options_of(budget=40, recall=24))
    prefill(model, cache, rows_of(text, 300))
    if is_edited:
        cache.drop(5, 9)
    pack(cache)
    segments, own = prompt_cache.settled(cache), tmp_path / "own"
    paths = [tmp_path / number for _, number in segments]
    assert [end for end, _ in segments] == [128, 256]
    for start, (end, _), path in zip((0, 128), segments, paths, strict=True):
        prompt_cache.save_segment(cache, path, start, end)
    prompt_cache.save(cache, own, model, None, segments)
    with safe_open(own, "pt") as file:
        names = [name for name in file.keys() if name.endswith("recall.positions")]  # noqa: SIM118  # it is no dict
        sizes = {file.get_slice(name).get_shape()[1] for name in names}
    assert sizes == ({300} if is_edited else {44})
    before = prompt_cache.read_segments(segments, paths)
    loaded = prompt_cache.load(own, model, KVCache.from_options, None, None, None, before)
    for ours, its in zip(loaded.layers, cache.layers, strict=True):
        assert ours.table.recall is not None
        assert its.table.recall is not None
        assert_close(ours.table.recall.positions[:, :300], its.table.recall.positions[:, :300], rtol=0, atol=0)
    more = rows_of(text, 309)[0][300:]
    assert_close(prefill(model, loaded, [more]), prefill(model, cache, [more]), rtol=0, atol=0)


def test_a_hybrid_goes_on_in_the_next_server(tokenizer: PreTrainedTokenizerBase, text: Text, tmp_path: Path) -> None:
    model, own = bound("qwen3_next"), options_of(budget=WIDE)
    turns, answers = rows_of(text, 21, 5), list[list[int]]()
    ids, ends = list[int](), list[int]()
    for new in turns:
        disk = DiskTier(tmp_path, PLENTY, model)
        with running(model, tokenizer, kinds=[(2, own)], reuse_bytes=PLENTY, disk=disk) as engine:
            talk = Conversation(engine, own)
            talk.ids, talk.ends = ids, ends
            answers.append(talk.turn(new))
            ids, ends = talk.ids, talk.ends
    assert answers == chat(model, own, turns)
    assert talk.usages[0].cached == 27


@pytest.mark.parametrize("options", [{"budget": WIDE}, {"budget": 40}, {"budget": 40, "recall": 24}], ids=str)
def test_a_row_is_read_back_to_the_bit(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, tmp_path: Path, options: dict[str, Any]
) -> None:
    """As it lies in memory, slot by slot."""
    model, own = attached_model("llama"), options_of(**options)
    disk = DiskTier(tmp_path, PLENTY, model)
    with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY, disk=disk) as engine:
        talk = Conversation(engine, own)
        for new in rows_of(text, 61, 5):
            talk.turn(new)
        [kept] = [each for each in engine._snapshots.kept._held if len(each.tokens) == len(talk.ids) - 1]
    disk = DiskTier(tmp_path, PLENTY, model)
    request = request_of([*talk.ids, 7], options=own, reuse=LOOSE)
    found = disk.longest(request, key_of(request), 0)
    disk.close()
    assert found is not None
    names = ("tokens", "passes", "holds_all", "exact_tokens", "is_text", "number", "key")
    assert [getattr(found, name) for name in names] == [getattr(kept, name) for name in names]
    for one, other in zip(found.cache.layers, kept.cache.layers, strict=True):
        ours, theirs = one.table.packed().tensors(), other.table.packed().tensors()
        ours, theirs = ours | one.table.recalled_tensors(), theirs | other.table.recalled_tensors()
        assert {*ours} == {*theirs}
        assert all(ours[name].equal(theirs[name]) for name in ours)
        if options["budget"] != WIDE:  # where tokens lie decides how sums round
            assert one.positions.equal(other.positions)


def test_a_turn_that_is_exact_takes_only_passes_of_the_prompt(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, tmp_path: Path
) -> None:
    model, own = attached_model("llama"), options_of(budget=WIDE)
    turns = rows_of(text, 21, 5, 17)

    def answers(folder: Path | None) -> list[tuple[list[int], int]]:
        ids, ends, found = list[int](), list[int](), []
        for new in turns:
            disk = None if folder is None else DiskTier(folder, PLENTY, model)
            reuse_bytes = 0 if disk is None else PLENTY
            with running(model, tokenizer, kinds=[(2, own)], reuse_bytes=reuse_bytes, disk=disk) as engine:
                talk = Conversation(engine, own, reuse=Reuse(mode=EXACT))
                talk.ids, talk.ends = ids, ends
                found.append((talk.turn(new), talk.usages[0].cached))
                ids, ends = talk.ids, talk.ends
        return found

    again, ours = answers(None), answers(tmp_path)
    assert [text for text, _ in ours] == [text for text, _ in again]
    assert [cached for _, cached in ours] == [0, 21, 21 + 7 + 5]


def test_a_branch_leaves_the_file_of_the_other(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, tmp_path: Path
) -> None:
    """Two texts that part in the middle of a row, each in a server of its own."""
    model, own = attached_model("llama"), options_of(budget=WIDE)
    first, one, other = rows_of(text, 30, 34, 25)
    with running(model, tokenizer, kinds=[(1, own)]) as engine:
        alone = [Conversation(engine, own).turn(first + end) for end in (one, other, one)]
    answers, cached = list[list[int]](), list[int]()
    for end in (one, other, one):
        disk = DiskTier(tmp_path, PLENTY, model)
        with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY, disk=disk) as engine:
            talk = Conversation(engine, own)
            answers.append(talk.turn(first + end))
            cached.append(talk.usages[0].cached)
    assert answers == alone
    assert cached == [0, 30, 63]
    assert tokens_in(tmp_path) == [30 + 25 + 6, 30 + 34 + 6]


def test_a_row_that_is_being_written_is_copied_and_one_that_waits_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    tmp_path: Path,
) -> None:
    model, own = attached_model("llama"), options_of(budget=WIDE)
    turns = rows_of(text, 21, 5, 17, 3)
    disk, begun, goes_on = DiskTier(tmp_path, PLENTY, model), Event(), Event()
    saved, real = list[int](), prompt_cache.save

    def slow(cache: KVCache, path: Path, *rest: Any) -> None:
        begun.set()
        assert goes_on.wait(30)
        saved.append(cache.tokens_seen[0])
        real(cache, path, *rest)

    monkeypatch.setattr(prompt_cache, "save", slow)
    with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY, disk=disk) as engine:
        talk = Conversation(engine, own)
        answers = [talk.turn(turns[0])]
        assert begun.wait(30)
        answers += [talk.turn(new) for new in turns[1:]]
        held = sorted(len(each.tokens) for each in engine._snapshots.kept._held)
        goes_on.set()
    assert answers == chat(model, own, turns)
    assert held == [27, len(talk.ids) - 1]
    assert saved == [27, len(talk.ids) - 1]
    assert tokens_in(tmp_path) == [len(talk.ids) - 1]


def test_a_half_of_a_pair_is_deleted_at_the_start(
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a server leaves it that is killed between two steps."""
    model, own = attached_model("llama"), options_of(budget=WIDE)
    disk = DiskTier(tmp_path, PLENTY, model)
    with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY, disk=disk) as engine:
        for at, new in enumerate(rows_of(text, 21, 22, 23, 24)):
            Conversation(engine, own).turn([at, *new])
    whole, no_record, no_file, damaged = files(tmp_path)
    no_record.with_suffix(".json").unlink()
    no_file.unlink()
    record = damaged.with_suffix(".json")
    record.write_text(record.read_text().replace('"passes":[13,', '"passes":[12,'))
    (tmp_path / ".windlass-1.tmp").write_text("half")
    other = tmp_path / "letters.json"
    other.write_text("{}")
    with caplog.at_level(logging.WARNING):
        disk = DiskTier(tmp_path, PLENTY, model)
    assert files(tmp_path) == [whole]
    assert sorted(tmp_path.glob("*.json")) == sorted([whole.with_suffix(".json"), other])
    assert not list(tmp_path.glob(".windlass-*.tmp"))
    assert disk.bytes == whole.stat().st_size + whole.with_suffix(".json").stat().st_size
    assert caplog.text.count("has no record, or a damaged one, and was deleted") == 2
    disk.close()


@pytest.mark.parametrize("budget", [WIDE, 40])
def test_the_limit_of_the_disk_holds(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, tmp_path: Path, budget: int
) -> None:
    """The conversation used last stays, where it fits. One that does not fit is not written."""
    model, own = attached_model("llama"), options_of(budget=budget)
    disk = DiskTier(tmp_path, limit := 300_000, model)
    most = list[int]()
    with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY, disk=disk) as engine:
        for at in range(12):
            Conversation(engine, own).turn([at, *rows_of(text, 60)[0]])
            wait_for(lambda: not disk._pending)
            most.append(sum(path.stat().st_size for path in (*files(tmp_path), *tmp_path.glob("*.json"))))
            assert disk.bytes == most[-1]
        stored = {each.tokens for each in disk.stored(EntrySelector(""))}
    assert limit // 3 < max(most) <= limit
    assert 61 + 6 in stored
    disk = DiskTier(tmp_path, 8_000, model)
    assert disk.bytes == 0
    with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY, disk=disk) as engine:
        Conversation(engine, own).turn(rows_of(text, 61)[0])
    assert files(tmp_path) == []


def test_a_deleted_row_is_gone_from_the_disk(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, tmp_path: Path
) -> None:
    model, own = attached_model("llama"), options_of(budget=WIDE)
    disk = DiskTier(tmp_path, PLENTY, model)
    with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY, disk=disk) as engine:
        for tenant in ("a/x", "b/x"):
            Conversation(engine, own, tenant=tenant).turn(rows_of(text, 21)[0])
        assert len(engine.forget(EntrySelector("a"))) == 1
        assert engine.stored(EntrySelector("a")) == []
    assert len(files(tmp_path)) == len(list(tmp_path.glob("*.json"))) == 1
    disk = DiskTier(tmp_path, PLENTY, model)
    assert [each.tokens for each in disk.stored(EntrySelector("b"))] == [27]
    request = request_of(rows_of(text, 21)[0], options=own, tenant="a/x", reuse=LOOSE)
    found: CacheEntry | None = disk.longest(request, key_of(request), 0)
    assert found is None
    disk.close()
