"""Snapshots in files: a hit is a miss to the bit, and an invalid file is not used."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.helpers.models import Models, Text
from tests.helpers.schedulers import options_of, request_of, rows_of, wait_for
from windlass import UsageError
from windlass.core.errors import PromptCacheError
from windlass.engine.disk import LOCK, NAME, SALT, DiskTier, salt_of
from windlass.engine.prefill import Reader
from windlass.engine.prefix_cache import PrefixCache, Snapshots
from windlass.engine.prefix_entry import EntrySelector
from windlass.engine.request import Reuse
from windlass.hf import prompt_cache

PLENTY = 1 << 30


@contextmanager
def opened(
    folder: Path, model: PreTrainedModel, limit: int = PLENTY, memory: int = PLENTY
) -> Iterator[tuple[Snapshots, DiskTier]]:
    """A server's prefix cache. At the end all is written."""
    disk = DiskTier(folder, limit, model)
    snapshots = Snapshots(PrefixCache(memory), disk)
    try:
        yield snapshots, disk
    finally:
        snapshots.close()


def read(model: PreTrainedModel, prompt: list[int], snapshots: Snapshots, **given: Any) -> Reader:
    reader = Reader(model, request_of(prompt, **given), snapshots)
    while not reader.is_done:
        reader.read()
    return reader


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


@pytest.fixture(scope="module")
def model(attached_model: Models) -> PreTrainedModel:
    return attached_model("llama")


@pytest.fixture
def ids(text: Text) -> list[int]:
    return rows_of(text, 60)[0]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"policy": "recent"}),
        ("llama", {"policy": "h2o"}),
        ("llama", {"policy": "key_diff", "recall": 16}),
        ("llama", {"policy": "snapkv", "store": "int4"}),
        ("llama", {"policy": "key_diff", "store": "int8(sinks=2, newest=5)"}),
        ("gemma2", {"policy": "tova", "positions": "compact"}),
        ("qwen3", {"policy": "key_diff", "merge": "mean_count"}),
    ],
)
def test_a_hit_equals_a_miss_bit_by_bit(
    attached_model: Models, text: Text, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """In another server, from the file alone, and in memory as it was on disk."""
    model, (ids, ends) = attached_model(family), rows_of(text, 70, 29)
    given = {"options": options_of(**options)}
    with opened(tmp_path, model) as (snapshots, _):
        misses = [read(model, ids[:60], snapshots, **given)]
        for prompt in (ids, ids[:53] + ends):
            alone = Snapshots(PrefixCache(0), snapshots._disk)
            misses.append(read(model, prompt, alone, reuse=Reuse(lookup=False), **given))
    with opened(tmp_path, model) as (snapshots, _):
        assert not snapshots.kept.bytes
        for prompt, miss in zip((ids[:60], ids, ids[:53] + ends), misses, strict=True):
            hit = read(model, prompt, snapshots, **given)
            assert (hit.cached, miss.cached) == (52, 0)
            assert hit.logits is not None
            assert miss.logits is not None
            assert hit.logits.equal(miss.logits)
            for own, other in zip(hit.cache.layers, miss.cache.layers, strict=True):
                assert own.positions.equal(other.positions)
        assert snapshots.kept.bytes > 0


def test_what_falls_out_of_memory_is_on_disk(model: PreTrainedModel, text: Text, tmp_path: Path) -> None:
    prompts = rows_of(text, 30, 31, 32, 33, 34)
    with opened(tmp_path, model) as (snapshots, _):
        size = read(model, prompts[0], snapshots).cache.bytes_held
    with opened(tmp_path, model, memory=2 * size + size // 2) as (snapshots, disk):
        with disk._writes:  # nothing is written yet, so that nothing may leave
            for prompt in prompts[1:]:
                read(model, prompt, snapshots)
                assert snapshots.kept.bytes <= 2 * size + size // 2
            assert len(snapshots.kept._held) == 2
            assert {*disk._pending} == {each.number for each in snapshots.kept._held}
        wait_for(lambda: not disk._pending)
        read(model, prompts[4], snapshots)  # and now they do
    with opened(tmp_path, model) as (snapshots, _):
        assert [read(model, prompt, snapshots).cached for prompt in prompts] == [26, 26, 26, 0, 26]


def test_the_limit_holds_while_files_are_written(model: PreTrainedModel, text: Text, tmp_path: Path) -> None:
    """Room for a file is made before it is written."""
    limit, most = 140_000, list[int]()

    with opened(tmp_path, model, limit) as (snapshots, disk):
        real = disk._write

        def watched(kept: Any) -> None:
            real(kept)
            most.append(sum(path.stat().st_size for path in (*files(tmp_path), *tmp_path.glob("*.json"))))
            assert disk.bytes == most[-1]

        disk._write = watched  # type: ignore[method-assign]
        for prompt in rows_of(text, *range(30, 42)):
            read(model, prompt, snapshots)
    assert len(most) >= 8
    assert limit / 3 < max(most) <= limit
    assert len(files(tmp_path)) < len(most)
    with opened(tmp_path, model, 30_000) as (_, disk):  # a smaller limit than the last server had
        assert 0 < disk.bytes <= 30_000


def damage(path: Path, what: str) -> None:
    content = path.read_bytes()
    if what == "flipped":
        path.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
    elif what == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif what == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(b"\xff" * 4096)


@pytest.mark.parametrize("what", ["flipped", "cut", "empty", "nonsense"])
def test_a_damaged_file_is_told_and_deleted(
    model: PreTrainedModel, ids: list[int], tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, model) as (snapshots, _):
        miss = read(model, ids, snapshots)
    [path] = files(tmp_path)
    damage(path, what)
    with opened(tmp_path, model) as (snapshots, _), caplog.at_level(logging.WARNING):
        again = read(model, ids, snapshots)
    assert again.cached == 0
    assert again.logits is not None
    assert miss.logits is not None
    assert again.logits.equal(miss.logits)
    assert "is not used, and was deleted" in caplog.text
    assert "Make it again" not in caplog.text


@pytest.mark.parametrize("other", ["model", "options", "text", "tenant"])
def test_a_file_under_the_name_of_another_is_not_used(
    attached_model: Models,
    model: PreTrainedModel,
    ids: list[int],
    tmp_path: Path,
    other: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A name is found by its owner alone. Renamed files are used for no other text."""
    with opened(tmp_path, model) as (snapshots, _):
        read(model, ids, snapshots)
    [name] = files(tmp_path)
    record = name.with_suffix(".json").read_bytes()
    name.unlink()
    foreign = attached_model("qwen3") if other == "model" else model
    with opened(tmp_path, foreign) as (snapshots, _):
        own: dict[str, dict[str, Any]] = {
            "options": {"options": options_of(budget=18)},
            "tenant": {"tenant": "another"},
        }
        read(foreign, [*ids[::-1]] if other == "text" else ids, snapshots, **own.get(other, {}))
    [path] = files(tmp_path)
    assert path.name != name.name
    path.rename(name)
    name.with_suffix(".json").write_bytes(record)
    with opened(tmp_path, model) as (snapshots, _), caplog.at_level(logging.WARNING):
        assert read(model, ids, snapshots).cached == (52 if other == "tenant" else 0)
    assert ("was deleted" in caplog.text) == (other != "tenant")


@pytest.mark.parametrize(
    "given",
    [{"tenant": "me/ben"}, {"tenant": "you/anna"}, {"reuse": Reuse(name="x")}, {"options": options_of(sinks=1)}],
)
def test_who_may_not_share_finds_nothing(
    model: PreTrainedModel, ids: list[int], tmp_path: Path, given: dict[str, Any]
) -> None:
    with opened(tmp_path, model) as (snapshots, _):
        read(model, ids, snapshots, tenant="me/anna")
    with opened(tmp_path, model) as (snapshots, _):
        assert read(model, ids, snapshots, **{"tenant": "me/anna"} | given).cached == 0
        assert read(model, ids, snapshots, tenant="me/anna").cached == 52
    with opened(tmp_path, model) as (_, disk):  # a name tells nothing without the secret
        assert {each.owner for each in disk._files.values()} <= {
            disk._hash("owner", name) for name in ("me", "you", "")
        }
        disk._salt = b"x" * 32
        assert not [each for each in disk._files.values() if each.owner == disk._hash("owner", "me")]


def test_an_owner_sees_and_deletes_files(model: PreTrainedModel, ids: list[int], tmp_path: Path) -> None:
    with opened(tmp_path, model) as (snapshots, _):
        for tenant, name in (("me/anna", "novel"), ("me/", ""), ("you/", "novel")):
            read(model, ids, snapshots, tenant=tenant, reuse=Reuse(name=name))
        told = snapshots.stored(EntrySelector("me"))
        assert [(each.place, each.name) for each in told] == [("memory", ""), ("memory", "novel")]
    with opened(tmp_path, model) as (snapshots, _):
        again = snapshots.stored(EntrySelector("me"))
        assert [(each.place, each.name, each.tokens) for each in again] == [("disk", None, 52)] * 2
        assert {each.id for each in again} == {each.id for each in told}
        assert [each.place for each in snapshots.stored(EntrySelector("me", name="novel"))] == ["disk"]
        assert len(snapshots.forget(EntrySelector("me", name="novel"))) == 1
        assert len(snapshots.forget(EntrySelector("me", id=again[0].id)) + snapshots.forget(EntrySelector("me"))) == 1
        assert read(model, ids, snapshots, tenant="me/").cached == 0
        assert read(model, ids, snapshots, tenant="you/", reuse=Reuse(name="novel")).cached == 52
        assert len(snapshots.forget(EntrySelector("me"))) == 1  # pending, or written by now
    assert len(files(tmp_path)) == 1


def test_a_folder_has_one_server(model: PreTrainedModel, ids: list[int], tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    (tmp_path / ".windlass-0.tmp").write_text("left by one that was killed")
    with opened(tmp_path, model) as (snapshots, _):
        with pytest.raises(UsageError, match="that of a server that runs"):
            DiskTier(tmp_path, PLENTY, model)
        read(model, ids, snapshots)
    assert {path.name for path in tmp_path.iterdir()} == {
        LOCK,
        SALT,
        "letters.txt",
        *(path.name for each in files(tmp_path) for path in (each, each.with_suffix(".json"))),
    }
    private = [tmp_path / SALT, *files(tmp_path), *tmp_path.glob("*.json")]
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    with pytest.raises(UsageError, match="is no folder"):
        DiskTier(tmp_path / "none", PLENTY, model)
    salt = salt_of(tmp_path)
    assert salt == salt_of(tmp_path)
    (tmp_path / SALT).write_bytes(salt[:9])
    with pytest.raises(UsageError, match=r"is damaged\. Delete it"):
        DiskTier(tmp_path, PLENTY, model)


def test_a_disk_that_fails_is_told_and_no_more(
    model: PreTrainedModel, ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(*_: Any) -> None:
        raise PromptCacheError("no space left")

    monkeypatch.setattr(prompt_cache, "save", full)
    with caplog.at_level(logging.WARNING), opened(tmp_path, model) as (snapshots, disk):
        read(model, ids, snapshots)
        assert read(model, ids, snapshots).cached == 52
    assert (files(tmp_path), disk.bytes, disk._pending) == ([], 0, {})
    assert "a cache was not written: no space left" in caplog.text
