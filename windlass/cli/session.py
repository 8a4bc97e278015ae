"""One model, tokenizer and cache, as the options of the command line ask for, and what is done with them."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.describe import in_units
from windlass.cli.options import CacheOptions
from windlass.cli.terminal import INTERRUPTED, Bar, note, per_s, say, speeds
from windlass.core.errors import UsageError
from windlass.engine import generate as engine
from windlass.engine.generate import Stream
from windlass.engine.sampling import Sampling
from windlass.engine.text import encode
from windlass.hf import prompt_cache
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import open_model
from windlass.merge import merge_of
from windlass.policies.load import load_policy
from windlass.positions.modes import position_mode
from windlass.stores.low_bit import store_of


@dataclass(frozen=True)
class Session:
    """What a command works with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: KVCache


def open_session(name: str, options: CacheOptions, dtype: str, threads: int | None, device: str = "cpu") -> Session:
    """Load the model and make its cache, or load that too; options are read before the model.

    A prompt cache decides everything but `positions`, which may change at any time.

    Raises: WindlassError for whatever cannot be honoured.
    """
    policy = None if options.policy is None else load_policy(options.policy)
    mode = None if options.positions is None else position_mode(options.positions)
    store = store_of(options.store or "plain")
    path = options.prompt_cache
    if path is not None and not path.is_file():
        raise UsageError(f"prompt cache {path} is not there; make it with `windlass cache`")
    if threads is not None:
        torch.set_num_threads(threads)
    model, tokenizer = open_model(name, dtype, device)
    limits = {"budget": options.budget, "sinks": options.sinks, "window": options.window, "chunk": options.chunk}
    given = {name: value for name, value in limits.items() if value is not None}
    if path is None:
        cache = KVCache(model, policy=policy, positions=mode or "original", store=store, merge=options.merge, **given)
        return Session(model, tokenizer, cache)
    cache = prompt_cache.load(path, model, policy)
    held = asdict(cache.limits)
    for name, value in given.items():
        if held[name] != value:
            raise UsageError(f"--{name} {value} contradicts {path}, made with {name} {held[name]}; leave it out")
    if options.store is not None and store.name != cache.store.name:
        raise UsageError(f"--store {store.name} contradicts {path}, made with store {cache.store.name}; leave it out")
    if options.merge is not None and merge_of(options.merge) != cache.merge:
        made = "without merging" if cache.merge is None else f"with merge {cache.merge}"
        raise UsageError(f"--merge {options.merge} contradicts {path}, made {made}; leave it out")
    if mode is not None:
        cache.positions = mode
    return Session(model, tokenizer, cache)


def generate(session: Session, prompt: str, max_tokens: int, sampling: Sampling, is_json: bool) -> int:
    """Write what follows `prompt` to stdout; returns the exit code."""
    with Bar("reading") as bar:
        stream = engine.stream(
            session.model, session.tokenizer, prompt, session.cache, max_tokens, sampling, progress=bar
        )
        code = write(stream, is_shown=not is_json)
    if is_json:
        say(json.dumps(asdict(stream.result) | labels(session.cache), ensure_ascii=False) + "\n")
    note(("interrupted; " if code else "") + speeds(stream.result, bar))
    return code


def write(stream: Stream, is_shown: bool) -> int:
    """Show the pieces of a stream as they come; returns the exit code. Ctrl-C ends the stream alone."""
    piece = "\n"
    code = 0
    try:
        for piece in stream:
            if is_shown:
                say(piece)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if is_shown and not piece.endswith("\n"):
        say("\n")
    return code


def save_cache(session: Session, prompt: str, path: Path, is_json: bool) -> int:
    """Read `prompt` into a prompt-cache file; returns the exit code. Nothing is written after Ctrl-C."""
    ids = encode(session.tokenizer, prompt, is_start=True)
    with Bar("reading") as bar:
        try:
            engine.prefill(session.model, session.cache, [ids], bar)
        except KeyboardInterrupt:
            note(f"interrupted; prefill {bar.done:,} of {len(ids):,} tokens; {path} was not written")
            return INTERRUPTED
    prompt_cache.save(session.cache, path, session.model)
    size = path.stat().st_size
    if is_json:
        numbers = {"path": str(path), "prompt_tokens": len(ids), "prefill_tokens_per_s": bar.tokens_per_s}
        say(json.dumps(numbers | {"file_bytes": size} | labels(session.cache), ensure_ascii=False) + "\n")
    note(f"prefill {len(ids):,} tokens, {per_s(bar.tokens_per_s)}; {path} written, {in_units(size)}")
    return 0


def check_writable(path: Path, what: str) -> None:
    """Raises: UsageError that calls `path` `what`, when it cannot be written: better now than after a long text."""
    folder = path.expanduser().resolve().parent
    if path.is_dir():
        raise UsageError(f"{what} {path} is a folder; give the name of a file")
    if not folder.is_dir():
        raise UsageError(f"{what} {path}: the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{what} {path}: the folder {folder} is not writable; save elsewhere")


def labels(cache: KVCache) -> dict[str, object]:
    """What a result was made with, for a JSON object."""
    return {
        "tokens_seen": cache.tokens_seen[0],
        "budget": cache.budget,
        "sinks": cache.limits.sinks,
        "window": cache.limits.window,
        "chunk": cache.chunk,
        "policy": repr(cache.policy),
        "positions": str(cache.positions),
        "store": cache.store.name,
    }
