"""One model, tokenizer and cache, as the options of the command line ask for, and what is done with them."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.options import CacheOptions
from windlass.cli.cache_options import CacheArguments
from windlass.cli.choices import Choices, dtype_note
from windlass.cli.loading import INTERRUPTED, loading
from windlass.cli.options import LoadOptions
from windlass.cli.recording import recording
from windlass.cli.signals import as_interrupts
from windlass.cli.terminal import Bar, note, say, speeds
from windlass.core.errors import UsageError
from windlass.core.limits import SYSTEM
from windlass.engine import generate as engine
from windlass.engine import templates
from windlass.engine.generate import Stream
from windlass.engine.message_ends import system_tokens
from windlass.engine.result import Result
from windlass.engine.sampling import Sampling
from windlass.hf import prompt_cache
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load as load_model


class Shown(Enum):
    """What goes to stdout: the text, one JSON object at the end, or one for each piece as well."""

    TEXT = "text"
    JSON = "json"
    JSON_STREAM = "json-stream"


@dataclass(frozen=True)
class Asked:
    """What is wanted of a prompt. `is_begun`: it is read as the beginning of a message that goes on later."""

    system: str | None = None
    is_raw: bool = False
    is_begun: bool = False
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: list[str] | None = None


@dataclass(frozen=True)
class Session:
    """What a command works with, and how long it took to open."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: KVCache
    given: frozenset[str] = frozenset()
    """The options of the cache that the user named."""

    load_s: float = 0.0


def open_session(
    name: str,
    arguments: CacheArguments,
    load: LoadOptions,
    prompt_cache_file: Path | None = None,
    is_parallel: bool = False,
) -> Session:
    """Load the model and make its cache, or load that too; options are read before the model.

    `is_parallel`: together with the other processes that `torchrun` started.

    A prompt cache decides everything but `positions`, which may change at any time.

    Raises: WindlassError for whatever cannot be honoured.
    """
    given = arguments.given()
    path = prompt_cache_file
    numbers = {name: value for name, value in given.items() if isinstance(value, int)}
    # Numbers are checked together, and those that were not given are the file's, where there is one.
    asked = CacheOptions(**{name: value for name, value in given.items() if path is None or name not in numbers})
    if load.threads is not None:
        torch.set_num_threads(load.threads)
    started = time.perf_counter()
    with loading():
        model, tokenizer = load_model(name, load.dtype, load.device, load.weights, is_parallel)
    load_s = time.perf_counter() - started
    said = dtype_note(load.dtype, model.dtype, model.device)
    if said is not None:
        note(f"windlass: note: {said}")
    if path is None:
        return Session(model, tokenizer, KVCache.from_options(model, asked), frozenset(given), load_s)
    policy = asked.policy if "policy" in given else None
    cache = prompt_cache.load(path, model, policy, asked.recall_folder, tokenizer)
    wanted = {name: label for name, label in (asked.labels() | numbers).items() if name in given}
    _check_same(path, wanted, cache.options.labels())
    if "shares" in given and asked.shares != cache.options.shares:
        raise UsageError(f"--shares {asked.shares} are not those that {path} was made with; leave them out")
    if "positions" in given:
        cache.positions = asked.positions
    return Session(model, tokenizer, cache, frozenset(given), load_s)


def _check_same(path: Path, wanted: Mapping[str, object], made: Mapping[str, object]) -> None:
    """Raises: UsageError for an option that is another one than that of the prompt cache."""
    for name, label in wanted.items():
        if name not in ("policy", "positions", "recall_folder") and label != made[name]:
            raise UsageError(f"--{name} {label} contradicts {path}, made with {name} {made[name]}; leave it out")


def generate(
    session: Session, prompt: str, asked: Asked, shown: Shown, record: Path | None = None
) -> tuple[int, Result]:
    """Write what follows `prompt` to stdout; returns the exit code, and what was written.

    What the cache holds after each step goes to the file `record`.

    Raises: UsageError for a system prompt where it has no place, or a file that cannot be written.
    """
    text = fed(session, prompt, asked)
    with as_interrupts(session.cache.heads is None), recording(record, session.cache, session.tokenizer) as write_frame:

        def progress(done: int, total: int) -> None:
            bar(done, total)
            write_frame()

        stream = engine.stream(
            session.model,
            session.tokenizer,
            text,
            session.cache,
            asked.max_tokens,
            asked.sampling,
            asked.stop,
            progress,
        )
        with Bar("reading", stream.result.prompt_tokens) as bar:
            code = write(_each(stream, write_frame), shown is not Shown.JSON, shown is Shown.JSON_STREAM)
    if shown is not Shown.TEXT:
        done = {"done": True} if shown is Shown.JSON_STREAM else {}
        say(json.dumps(asdict(stream.result) | labels(session.cache) | done, ensure_ascii=False) + "\n")
    Choices(session.cache, session.given).tell()
    note(("interrupted; " if code else "") + speeds(stream.result, bar))
    return code, stream.result


def fed(session: Session, prompt: str, asked: Asked) -> str:
    """The text to read for `prompt`: with the model's chat template, if it has one and `asked` does not leave it out.

    After a prompt cache it goes on with the user's message that ends the text there, or begins the next one.

    Raises: UsageError for a system prompt where it has no place, or a template that fails.
    """
    system, tokenizer = asked.system, session.tokenizer
    if asked.is_raw and system is not None:
        raise UsageError("--system is a message of the chat template, which --raw leaves out; give one of them")
    keep_system(session.cache, tokenizer, None if asked.is_raw else templates.of_system(system))
    if asked.is_raw or (system is None and not templates.has_template(tokenizer)):
        return prompt
    opened = [*templates.of_system(system), templates.message("user", prompt)]
    if not any(session.cache.tokens_seen):
        return templates.begun(tokenizer, prompt, system) if asked.is_begun else templates.opening(tokenizer, opened)
    if system is not None:
        raise UsageError("--system comes before the text of a prompt cache; give it to `windlass cache` instead")
    standing, ended_with = templates.standing(tokenizer, (session.cache.tokens or [[]])[0])
    if standing == "user":
        return prompt if asked.is_begun else templates.rest(tokenizer, prompt)
    if asked.is_begun:
        return prompt
    if standing == "bare":
        return templates.opening(tokenizer, opened)
    earlier = [templates.message("user", ""), templates.message("assistant", "")]
    return templates.following(tokenizer, [*earlier, *opened], ended_with)


def keep_system(
    cache: KVCache, tokenizer: PreTrainedTokenizerBase, messages: Sequence[templates.Message] | None
) -> None:
    """Let an empty cache that asks for it never evict the head of a text with these messages of the system.

    `messages`: None where no template is used. Raises: UsageError for a head that the budget has no room for.
    """
    if cache.options.sinks != SYSTEM or any(cache.tokens_seen):
        return
    has_head = messages is not None and templates.has_template(tokenizer)
    cache.set_sinks(system_tokens(tokenizer, messages) if has_head and messages is not None else 0)


def _each(stream: Stream, write_frame: Callable[[], None]) -> Iterator[str]:
    """The pieces of a stream, each when the frame after it is written."""
    for piece in stream:
        write_frame()
        yield piece


def write(stream: Iterable[str], is_shown: bool, is_json: bool = False) -> int:
    """Show the pieces of a stream as they come, each as a line of JSON if `is_json`; returns the exit code.

    Ctrl-C ends the stream alone.
    """
    piece = "\n"
    code = 0
    try:
        for piece in stream:
            if is_shown:
                say(json.dumps({"text": piece, "done": False}, ensure_ascii=False) + "\n" if is_json else piece)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if is_shown and not is_json and not piece.endswith("\n"):
        say("\n")
    return code


def labels(cache: KVCache) -> dict[str, object]:
    """What a result was made with, for a JSON object."""
    return {"tokens_seen": cache.tokens_seen[0], **cache.options.labels()}
