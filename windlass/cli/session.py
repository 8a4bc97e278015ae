"""One model, tokenizer and cache, as the options of the command line ask for, and what is done with them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.describe import in_units
from windlass.cache.options import CacheOptions
from windlass.cli.options import CacheArguments, LoadOptions
from windlass.cli.terminal import INTERRUPTED, Bar, note, per_s, say, speeds
from windlass.core.errors import UsageError
from windlass.core.files import check_regular
from windlass.engine import generate as engine
from windlass.engine.generate import Stream
from windlass.engine.sampling import Sampling
from windlass.engine.text import encode
from windlass.evals.load_policy import load_policy
from windlass.hf import prompt_cache
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load as load_model


@dataclass(frozen=True)
class Session:
    """What a command works with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: KVCache


def open_session(
    name: str, arguments: CacheArguments, load: LoadOptions, prompt_cache_file: Path | None = None
) -> Session:
    """Load the model and make its cache, or load that too; options are read before the model.

    A prompt cache decides everything but `positions`, which may change at any time.

    Raises: WindlassError for whatever cannot be honoured.
    """
    given = arguments.given()
    if "policy" in given:
        given["policy"] = load_policy(given["policy"])
    path = prompt_cache_file
    numbers = {name: value for name, value in given.items() if isinstance(value, int)}
    # Numbers are checked together, and those that were not given are the file's, where there is one.
    asked = CacheOptions(**{name: value for name, value in given.items() if path is None or name not in numbers})
    if path is not None and not path.exists():
        raise UsageError(f"prompt cache {path} is not there; make it with `windlass cache`")
    if path is not None:
        check_regular(path, "prompt cache")
    if load.threads is not None:
        torch.set_num_threads(load.threads)
    model, tokenizer = load_model(name, load.dtype, load.device)
    if path is None:
        return Session(model, tokenizer, KVCache.from_options(model, asked))
    cache = prompt_cache.load(path, model, given.get("policy"))
    wanted = {name: label for name, label in (asked.labels() | numbers).items() if name in given}
    _check_same(path, wanted, cache.options.labels())
    if "positions" in given:
        cache.positions = asked.positions
    return Session(model, tokenizer, cache)


def _check_same(path: Path, wanted: Mapping[str, object], made: Mapping[str, object]) -> None:
    """Raises: UsageError for an option that is another one than that of the prompt cache."""
    for name, label in wanted.items():
        if name not in ("policy", "positions") and label != made[name]:
            raise UsageError(f"--{name} {label} contradicts {path}, made with {name} {made[name]}; leave it out")


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


def labels(cache: KVCache) -> dict[str, object]:
    """What a result was made with, for a JSON object."""
    return {"tokens_seen": cache.tokens_seen[0], **cache.options.labels()}
