"""`windlass cache`: a text read into a prompt-cache file, at once or in several runs."""

import json
from dataclasses import replace
from pathlib import Path

from windlass.cli.choices import Choices
from windlass.cli.loading import INTERRUPTED
from windlass.cli.session import Asked, Session, fed, labels
from windlass.cli.signals import as_interrupts
from windlass.cli.terminal import Bar, note, per_s, say
from windlass.cli.unfinished import part_of, unfinished
from windlass.core.errors import WindlassError
from windlass.core.units import in_units
from windlass.engine import generate as engine
from windlass.engine.text import encode
from windlass.hf import prompt_cache
from windlass.hf.kv_cache import KVCache
from windlass.policies.interfaces import OneShot
from windlass.policies.wrapper import find


def save_cache(session: Session, prompt: str, asked: Asked, path: Path, is_json: bool) -> int:
    """Read `prompt` into a prompt-cache file; returns the exit code.

    The session's cache may hold the beginning of the text. Ctrl-C and SIGTERM write what was read so far, but to no
    older file; the same command goes on from there.
    """
    before = session.cache.tokens_seen[0]
    ids = encode(session.tokenizer, fed(session, prompt, asked), is_start=before == 0)
    started = _started(session, ids, path)
    if started is not None:
        source, cache = started
        read = cache.tokens_seen[0] - before
        note(f"{source} holds the first {read:,} of {len(ids):,} tokens; going on from there")
        session, ids = replace(session, cache=cache), ids[read:]
    cache = session.cache
    held = cache.tokens_seen[0]
    with as_interrupts(cache.heads is None):
        try:
            with Bar("reading", len(ids)) as bar:
                if ids:
                    engine.prefill(session.model, cache, [ids], bar)
        except KeyboardInterrupt:
            note(_interrupted(session, path, None if started is None else started[0], before, held + len(ids) - before))
            return INTERRUPTED
    Choices(cache, session.given).tell()
    prompt_cache.save(cache, path, session.model, session.tokenizer)
    if started is not None and started[0] != path:
        started[0].unlink(missing_ok=True)
    size = path.stat().st_size
    if is_json:
        numbers = {"path": str(path), "prompt_tokens": len(ids), "prefill_tokens_per_s": bar.tokens_per_s}
        say(json.dumps(numbers | {"file_bytes": size} | labels(cache), ensure_ascii=False) + "\n")
    after = f" after {held:,}" if held else ""
    note(f"prefill {len(ids):,} tokens{after}, {per_s(bar.tokens_per_s)}; {path} written, {in_units(size)}")
    return 0


def _started(session: Session, ids: list[int], path: Path) -> tuple[Path, KVCache] | None:
    """The file in which an interrupted run left the beginning of this text, read under the same options, and its cache.

    Chunks must end where they would have ended, so that the result is that of one run.
    """
    cache, before = session.cache, session.cache.tokens_seen[0]
    if cache.heads is not None or cache.tokens is None or _chooses_at_the_end(cache):
        return None
    wanted = [*cache.tokens[0], *ids]
    for file in (part_of(path), path):
        try:
            found = prompt_cache.load(
                file, session.model, cache.options.policy, cache.options.recall_folder, session.tokenizer
            )
        except WindlassError:  # another file, which is written anew
            continue
        read = found.tokens_seen[0] - before
        is_alike = found.options.labels() == cache.options.labels() and found.options.shares == cache.options.shares
        if not is_alike or found.tokens != [wanted[: before + read]]:
            continue
        is_all = read == len(ids) and file != path
        if is_all or (0 < read < len(ids) and read % cache.chunk == 0):
            return file, found
    return None


def _interrupted(session: Session, path: Path, source: Path | None, before: int, total: int) -> str:
    """Write what was read of `total` tokens, where it is any; tells where it is, and how to go on.

    `source` is the file from which this run went on.
    """
    cache = session.cache
    read = cache.tokens_seen[0] - before
    if not read or cache.heads is not None:
        left = "stays as it was" if path.exists() else "was not written"
        return f"interrupted; prefill {read:,} of {total:,} tokens; {path} {left}"
    file = source or unfinished(path)
    prompt_cache.save(cache, file, session.model, session.tokenizer)
    again = "the same command goes on from there"
    if _chooses_at_the_end(cache):
        again = f"the same command reads all again, because {cache.policy!r} chooses at the end of a text"
    after = f" after {before:,}" if before else ""
    left = "" if file == path else f"{path} stays as it was; "
    return f"interrupted; {left}{file} holds the first {read:,} of {total:,} tokens{after}; {again}"


def _chooses_at_the_end(cache: KVCache) -> bool:
    return cache.budget is not None and find(cache.policy, OneShot) is not None
