"""One model, tokenizer and cache, from the options of the command line, and the actions on them."""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.describe import beyond_note, reading_now
from windlass.cache.merging import checked_merge
from windlass.cache.options import CacheOptions, half_of
from windlass.cache.recall import POSITIONS
from windlass.cache.state import CacheState
from windlass.cli.options import LoadOptions, number_or_word
from windlass.cli.terminal import (
    INTERRUPTED,
    Bar,
    as_interrupts,
    loading,
    note,
    part_of,
    per_s,
    say,
    speeds,
)
from windlass.core.errors import PromptCacheError, UsageError, WindlassError
from windlass.core.fields import Option, field_info
from windlass.core.files import check_regular
from windlass.core.parse import (
    AUTO,
    GGUF,
    HALF,
    MAX_NUMBER,
    SYSTEM,
    check_max_tokens,
    check_recall,
    did_you_mean,
    in_units,
    int_parser,
    parse_list,
)
from windlass.engine import generate as engine
from windlass.engine import templates
from windlass.engine.generate import Stream
from windlass.engine.sampling import Result, Sampling
from windlass.engine.speculate import check_drafts_name, load_drafts
from windlass.engine.templates import system_tokens
from windlass.engine.text import encode
from windlass.hf import prompt_cache
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load as load_model
from windlass.hf.load import load_tokenizer
from windlass.hf.prompt_cache_check import TensorSpec
from windlass.hf.prompt_cache_format import AGAIN, Header, InconsistentFile, shown
from windlass.hf.weights import labelled, name_of, parameter_count
from windlass.policies.base import OneShot
from windlass.policies.wrappers import find
from windlass.view.recording import Recorder


@contextmanager
def recording(path: Path | None, cache: CacheState, tokenizer: PreTrainedTokenizerBase) -> Iterator[Callable[[], None]]:
    """A block in which each call of its callback writes a frame to `path` (None: no recording).

    Raises: UsageError for a file that cannot be written.
    """
    if path is None:
        yield lambda: None
        return
    with Recorder(path, cache, tokenizer=tokenizer) as recorder:
        yield recorder.step
    note(f"{path} written. `windlass view {path}` shows it")


HALF_PRECISION = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


EVICTION_COST: Final = (
    "On SmolLM2-135M, KeyDiff found 10 of 96 facts in 1,000 tokens of novels with 250 slots, 82 with 130 slots and "
    "--recall 120, and the full cache 79. Behind 8,192 tokens of novels, in 256 slots, KeyDiff lost 0.218 nats a "
    "token to the full cache, and --policy snapkv 0.091 (docs/results/smollm2.md)"
)


class Choices:
    """Reports once how a text beyond its budget or the trained length is kept and read, and once the cost of eviction.

    `given` are the options that the user named, which are not reported again.
    """

    def __init__(self, cache: KVCache, given: Collection[str]) -> None:
        self.cache, self._given, self._is_told, self._is_cost_told = cache, given, False, False

    def tell(self) -> None:
        """To be called whenever tokens were read or written."""
        line = None if self._is_told else chosen(self.cache, self._given)
        if line is not None:
            self._is_told = True
            note(f"windlass: note: {line}")
        line = None if self._is_cost_told else eviction_cost(self.cache)
        if line is not None:
            self._is_cost_told = True
            note(f"windlass: note: {line}")


def eviction_cost(cache: KVCache) -> str | None:
    """The cost of evicting more than half of the tokens without recall or shares, as measured, or None before that."""
    tokens, budget, options = max(cache.tokens_seen), cache.budget, cache.options
    is_helped = options.recall or options.shares is not None or options.merge is not None
    if budget is None or tokens <= 2 * budget or is_helped:
        return None
    return f"{tokens - budget:,} of {tokens:,} tokens are evicted, and their facts with them. {EVICTION_COST}"


def chosen(cache: KVCache, given: Collection[str]) -> str | None:
    """The choices for a text longer than the budget or the trained length, or None before that."""
    tokens, end, trained = max(cache.tokens_seen), max(cache.next_positions), cache.trained_length
    parts = []
    if cache.budget is not None and tokens > cache.budget and "policy" not in given:
        again = (
            f", and of the others {cache.options.recall:,} are read again in each step" if cache.options.recall else ""
        )
        parts.append(f"{cache.budget:,} of them are kept, chosen by {cache.policy!r} (--policy){again}")
    if trained is not None and end > trained and str(cache.positions) == AUTO:
        parts.append(f"read as {reading_now(cache)} (--positions), because this model was trained on {trained:,}")
    if parts:
        return f"{tokens:,} tokens: " + ", and ".join(parts)
    return beyond_note(cache) or _idle_note(cache, given)


def _idle_note(cache: KVCache, given: Collection[str]) -> str | None:
    idle = [f"--{name}" for name in ("policy", "shares", "window") if name in given]
    if cache.budget is not None or not idle:
        return None
    return f"nothing is evicted without --budget, so {' and '.join(idle)} changed nothing"


def dtype_note(asked: str, dtype: torch.dtype, device: torch.device, weights: str | None = None) -> str | None:
    """A note that a CPU computes in half precision without being asked to, or None if not needed.

    `weights` names their types, as `Q4_K_M`, where they are not stored in that precision.
    """
    if asked != AUTO or device.type != "cpu" or dtype not in HALF_PRECISION:
        return None
    stored = ", as the weights are stored" if weights is None else f" from weights in {weights}"
    return f"computed in {HALF_PRECISION[dtype]}{stored}. --dtype float32 is more exact"


class OutputMode(Enum):
    """Output on stdout: the text, one JSON object at the end, or one for each piece as well."""

    TEXT = "text"
    JSON = "json"
    JSON_STREAM = "json-stream"

    @classmethod
    def of(cls, is_json: bool, is_stream: bool) -> "OutputMode":
        """The mode that `--json` and `--json-stream` ask for."""
        return cls.JSON_STREAM if is_stream else cls.JSON if is_json else cls.TEXT


@dataclass(frozen=True)
class PromptInput:
    """Options of a prompt. `is_begun`: it is read as the beginning of a message that continues later.

    Raises: UsageError for a number of tokens that cannot be written, an empty `stop`, or a system text left out.
    """

    system: str | None = None
    is_raw: bool = False
    is_begun: bool = False
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: list[str] | None = None
    speculate: str | None = None

    def __post_init__(self) -> None:
        check_max_tokens(self.max_tokens)
        check_drafts_name(self.speculate)
        if "" in (self.stop or ()):
            raise UsageError("--stop is an empty text, which every text begins with. Leave it out")
        if self.is_raw and self.system is not None:
            raise UsageError("--system is a message of the chat template, which --raw leaves out. Give one of them")


@dataclass(frozen=True)
class Session:
    """Model, tokenizer and cache of a command, and the time that opening took."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: KVCache
    given: frozenset[str] = frozenset()
    """The options of the cache that the user named."""

    load_s: float = 0.0


def cache_options(given: Mapping[str, Any]) -> CacheOptions:
    """The options of a new cache. Raises: WindlassError for options that cannot be honoured."""
    options = CacheOptions(**given)
    check_recall(options.recall, options.budget, options.recall_folder is not None, "recall_store" in given)
    checked_merge(options.merge, options.budget, options.store, options.policy)
    return options


def open_session(
    name: str,
    given: Mapping[str, Any],
    load: LoadOptions,
    prompt_cache_file: Path | None = None,
    is_parallel: bool = False,
) -> Session:
    """Load the model and make its cache, or load the cache too. Options are read before the model.

    `given` are the cache's options that the user named. `is_parallel`: run together with the other processes of
    `torchrun`.

    A prompt cache decides everything but `positions`, which may change at any time.

    Raises: WindlassError for invalid options.
    """
    path = prompt_cache_file
    asked = cache_options(given) if path is None else _beside_file(path, given)
    if load.threads is not None:
        torch.set_num_threads(load.threads)
    started = time.perf_counter()
    with loading():
        model, tokenizer = load_model(name, load.dtype, load.device, load.weights, is_parallel)
    load_s = time.perf_counter() - started
    is_gguf = Path(model.name_or_path or "").suffix.lower() == GGUF
    said = dtype_note(load.dtype, model.dtype, model.device, name_of(model) or ("a GGUF file" if is_gguf else None))
    if said is not None:
        note(f"windlass: note: {said}")
    if path is None:
        return Session(model, tokenizer, KVCache.from_options(model, asked), frozenset(given), load_s)
    policy = asked.policy if "policy" in given else None
    cache = KVCache.load(path, model, policy=policy, recall_folder=asked.recall_folder, tokenizer=tokenizer)
    if "positions" in given:
        cache.positions = asked.positions
    return Session(model, tokenizer, cache, frozenset(given), load_s)


def _beside_file(path: Path, given: Mapping[str, Any]) -> CacheOptions:
    """The options that are named beside a prompt cache, which has numbers of its own.

    Raises: WindlassError for such an option or file, and for an option that is another one than that of the file.
    """
    if not path.exists():
        raise UsageError(f"prompt cache {path} is not there. Make it with `windlass cache`")
    check_regular(path, "prompt cache")
    numbers = {name: value for name, value in given.items() if isinstance(value, int) or value == HALF}
    asked = CacheOptions(**{name: value for name, value in given.items() if name not in numbers})
    made = prompt_cache.options_of(path, asked.policy if "policy" in given else None)
    if numbers.get("recall") == HALF:
        numbers["recall"] = half_of(made.budget)
    labels = made.labels()
    if "recall_store" in given:
        numbers["recall_store"] = CacheOptions(store=given["recall_store"]).labels()["store"]
    for name, label in (asked.labels() | numbers).items():
        if name in given and name not in ("policy", "positions", "recall_folder") and label != labels[name]:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {label} contradicts {path}, made with {flag} {labels[name]}. Leave it out")
    if "shares" in given and asked.shares != made.shares:
        raise UsageError(f"--shares {asked.shares} differs from the shares of {path}. Leave it out")
    return asked


def generate(
    session: Session, prompt: str, asked: PromptInput, shown: OutputMode, record: Path | None = None
) -> tuple[int, Result]:
    """Write the text after `prompt` to stdout. Returns the exit code and the written text.

    The contents of the cache after each step go to the file `record`.

    Raises: UsageError for a system prompt where it has no place, or a file that cannot be written.
    """
    text = prompt_text(session, prompt, asked)
    drafts = load_drafts(asked.speculate, session.model, session.tokenizer, session.cache.options)
    with as_interrupts(session.cache.heads is None), recording(record, session.cache, session.tokenizer) as write_frame:

        def progress(done: int, total: int) -> None:
            bar(done, total)
            write_frame()

        stream = engine.stream(
            session.model,
            session.tokenizer,
            text,
            session.cache,
            max_tokens=asked.max_tokens,
            sampling=asked.sampling,
            stop=asked.stop,
            progress=progress,
            speculate=drafts,
        )
        with Bar("reading", stream.result.prompt_tokens) as bar:
            code = write(_each(stream, write_frame), shown is not OutputMode.JSON, shown is OutputMode.JSON_STREAM)
    if shown is not OutputMode.TEXT:
        done = {"done": True} if shown is OutputMode.JSON_STREAM else {}
        say(json.dumps(asdict(stream.result) | labels(session.cache) | done, ensure_ascii=False) + "\n")
    Choices(session.cache, session.given).tell()
    note(("interrupted, " if code else "") + speeds(stream.result, bar))
    return code, stream.result


def prompt_text(session: Session, prompt: str, asked: PromptInput) -> str:
    """The text to read for `prompt`: with the model's chat template, if it has one and `asked` does not leave it out.

    After a prompt cache it goes on with the user's message that ends the text there, or begins the next one.

    Raises: UsageError for a system prompt where it has no place, or a template that fails.
    """
    system, tokenizer = asked.system, session.tokenizer
    keep_system(session.cache, tokenizer, None if asked.is_raw else templates.of_system(system))
    if asked.is_raw or (system is None and not templates.has_template(tokenizer)):
        return prompt
    opened = [*templates.of_system(system), templates.message("user", prompt)]
    if not any(session.cache.tokens_seen):
        if asked.is_begun:
            return templates.user_start(tokenizer, prompt, system)
        return templates.first_prompt(tokenizer, opened)
    if system is not None:
        raise UsageError(
            "--system begins a text, and this prompt cache holds one. Give it when the file is made: "
            "`windlass cache --system`, without --append"
        )
    end, ended_with = templates.text_end(tokenizer, (session.cache.tokens or [[]])[0])
    if end == "user":
        return prompt if asked.is_begun else templates.user_end(tokenizer, prompt)
    if asked.is_begun:
        return prompt
    if end == "no_message":
        return templates.first_prompt(tokenizer, opened)
    earlier = [templates.message("user", ""), templates.message("assistant", "")]
    return templates.next_prompt(tokenizer, [*earlier, *opened], ended_with)


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
    """Show the pieces of a stream as they come, each as a line of JSON if `is_json`. Returns the exit code.

    Ctrl-C ends only the stream.
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
    """Options that a result was made with, for a JSON object."""
    return {"tokens_seen": cache.tokens_seen[0], **cache.options.labels()}


def say_chosen(session: Session, asked: PromptInput) -> None:
    """Report the model and its device, the cache's options, and how a prompt is read."""
    model = session.model
    name = labelled(Path(str(model.config.name_or_path)).name or "model", model)
    dtype, device = str(model.dtype).removeprefix("torch."), model.device
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count > 1)}" if device.type == "cpu" else ""
    millions = parameter_count(model) / 1e6
    labels = session.cache.options.labels().items()
    note(f"model: {name}, {type(model).__name__}, {millions:,.2f} M parameters, {dtype} on {device}{threads}")
    note("cache: " + ", ".join(f"{option} {'all' if value is None else value}" for option, value in labels))
    if not templates.has_template(session.tokenizer):
        note("prompt: unchanged, as this model has no chat template")
    else:
        note(f"prompt: {'unchanged (--raw)' if asked.is_raw else 'in the chat template of the model'}")


def say_done(session: Session, result: Result) -> None:
    """Report the seconds of each phase, and the contents of the cache."""
    read, written = result.prompt_tokens, len(result.tokens)
    phases = [f"load {session.load_s:.2f} s"]
    if result.prefill_tokens_per_s:
        phases.append(f"prefill {read / result.prefill_tokens_per_s:.2f} s")
    if result.decode_tokens_per_s:
        phases.append(f"decode {written / result.decode_tokens_per_s:.2f} s")
    note(f"times: {', '.join(phases)}. Ended by {result.finish_reason}")
    note(session.cache.describe())


def save_cache(session: Session, prompt: str, asked: PromptInput, path: Path, is_json: bool) -> int:
    """Read `prompt` into a prompt-cache file. Returns the exit code.

    The session's cache may hold the beginning of the text. Ctrl-C and SIGTERM write the tokens read so far into
    a file beside it. The same command continues from there.
    """
    before = session.cache.tokens_seen[0]
    ids = encode(session.tokenizer, prompt_text(session, prompt, asked), is_start=before == 0)
    started = _started(session, ids, path)
    if started is not None:
        source, cache = started
        read = cache.tokens_seen[0] - before
        note(f"{source} holds the first {read:,} of {len(ids):,} tokens. Continuing from there")
        session, ids = replace(session, cache=cache), ids[read:]
    cache = session.cache
    held = cache.tokens_seen[0]
    with as_interrupts(cache.heads is None):
        try:
            with Bar("reading", len(ids)) as bar:
                if ids:
                    engine.prefill(session.model, cache, [ids], bar)
        except KeyboardInterrupt:
            note(_interrupted(session, path, before, held + len(ids) - before))
            return INTERRUPTED
    Choices(cache, session.given).tell()
    cache.save(path, tokenizer=session.tokenizer)
    if started is not None and started[0] != path:
        started[0].unlink(missing_ok=True)
    size = path.stat().st_size
    if is_json:
        numbers = {"path": str(path), "prompt_tokens": len(ids), "prefill_tokens_per_s": bar.tokens_per_s}
        say(json.dumps(numbers | {"file_bytes": size} | labels(cache), ensure_ascii=False) + "\n")
    after = f" after {held:,}" if held else ""
    note(f"prefill {len(ids):,} tokens{after} at {per_s(bar.tokens_per_s)}, {path} written, {in_units(size)}")
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
            found = KVCache.load(
                file,
                session.model,
                policy=cache.options.policy,
                recall_folder=cache.options.recall_folder,
                tokenizer=session.tokenizer,
            )
        except WindlassError:  # another file, which will be replaced
            continue
        read = found.tokens_seen[0] - before
        is_alike = found.options.labels() == cache.options.labels() and found.options.shares == cache.options.shares
        if not is_alike or found.tokens != [wanted[: before + read]]:
            continue
        is_all = read == len(ids) and file != path
        if is_all or (0 < read < len(ids) and read % cache.chunk == 0):
            return file, found
    return None


def _interrupted(session: Session, path: Path, before: int, total: int) -> str:
    """Write the tokens read of `total`, if any, beside the file, and report where they are and how to continue."""
    cache = session.cache
    read = cache.tokens_seen[0] - before
    if not read or cache.heads is not None:
        left = "stays as it was" if path.exists() else "was not written"
        return f"interrupted, prefill {read:,} of {total:,} tokens. {path} {left}"
    file = part_of(path)  # a part under the file's own name would pass for the whole text
    cache.save(file, tokenizer=session.tokenizer)
    again = "The same command continues from there"
    if _chooses_at_the_end(cache):
        again = f"The same command reads all again, because {cache.policy!r} chooses at the end of a text"
    after = f" after {before:,}" if before else ""
    left = f"{path} stays as it was. " if path.exists() else ""
    return f"interrupted. {left}{file} holds the first {read:,} of {total:,} tokens{after}. {again}"


def _chooses_at_the_end(cache: KVCache) -> bool:
    return cache.budget is not None and find(cache.policy, OneShot) is not None


IDS = "tokens.0"
SHOWN_TOKENS = 12  # at the beginning of the text, and at its end


def show(path: Path, tokenizer: str | None, is_json: bool) -> int:
    """Print the contents of the file, or one JSON object of it. Returns the exit code.

    `tokenizer` is the model whose tokenizer turns the ids in the file into words (None: no words).

    Raises: PromptCacheError for a file that is missing, damaged or no prompt cache. UsageError for a model without
    tokenizer.
    """
    try:
        header, tensors = prompt_cache.read(path, _checked)
        told = facts(path, header, tensors)
    except InconsistentFile as error:
        raise PromptCacheError(f"{path} is damaged: {error}. {AGAIN}") from None
    if tokenizer is not None and IDS in tensors:
        ids, decode = tensors[IDS].clamp(min=0).tolist(), load_tokenizer(tokenizer).decode
        first, last = decode(ids[:SHOWN_TOKENS]), decode(ids[-SHOWN_TOKENS:])
        told |= {"tokenizer": tokenizer, "first words": str(first), "last words": str(last)}
    if is_json:
        say(json.dumps({name.replace(" ", "_"): value for name, value in told.items()}, ensure_ascii=False) + "\n")
        return 0
    for name, value in told.items():
        say(f"{name:14}{_text(name, value)}\n")
    if tokenizer is None:
        say("words         for the words of the text, name the model with -m\n")
    return 0


def _checked(header: Header, found: Mapping[str, TensorSpec]) -> Header:
    """The header, when the tensors that are looked at are of their kind: a file need not come from a friend."""
    for name, layout in found.items():
        kind = (1, torch.int32) if name == IDS else (3, torch.int32) if _is_positions(name) else None
        if kind is not None and ((len(layout.shape), layout.dtype) != kind or 0 in layout.shape):
            raise InconsistentFile(f"tensor {shown(name)} is {layout}")
    return header


def _is_positions(name: str) -> bool:
    return name.startswith("layers.") and name.split(".")[2:] == [POSITIONS]


def facts(path: Path, header: Header, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """The facts of a file, by the names that are shown. Counts of a batch are those of its first row."""
    options, first = header.options.model_dump(), header.rows[0]
    limits, texts = options.pop("limits"), options.pop("batch")
    if not options["recall"]:
        del options["recall"], options["recall_store"]
    shares = options.pop("shares")
    if shares is not None:
        options["shares"] = shares.get("name") or "of its own"
    held = [tensor for name, tensor in tensors.items() if _is_positions(name)]
    kept = [int((positions[0] >= 0).sum(-1).max()) for positions in held]
    places = [positions[0][positions[0] >= 0] for positions in held]
    return {
        "model": header.model,
        "dtype": header.dtype,
        "fingerprint": header.fingerprint[:12],
        "policy": header.policy.label,
        **options,
        **limits,
        "texts": texts,
        "tokens seen": first.tokens_seen,
        "tokens kept": max(kept, default=0),
        "next position": first.next_position,
        "first kept": min((int(each.min()) for each in places if len(each)), default=None),
        "last kept": max((int(each.max()) for each in places if len(each)), default=None),
        "file bytes": path.stat().st_size,
    }


def _text(name: str, value: object) -> str:
    if value is None:
        return "all" if name == "budget" else "by default" if name == "window" else "none"
    if name == "file bytes" and isinstance(value, int):
        return in_units(value)
    return f"{value:,}" if isinstance(value, int) else repr(value) if name.endswith("words") else str(value)


KIND: Final = "--kind"
MAX_ROWS: Final = 1024


def kinds_of(typed: Sequence[str], first: Mapping[str, Any]) -> tuple[tuple[int, CacheOptions], ...]:
    """The number of rows and the options of each of `typed`. Options that one does not name are those of `first`.

    Raises: UsageError for another name, one given twice, no number of rows, or invalid options.
    """
    options = field_info(CacheOptions).values()
    parsers = {"rows": int_parser(f"{KIND} rows", 1, MAX_ROWS)}
    parsers |= {each.name: _parser(each) for each in options if each.is_typed}
    return tuple(_kind(each, first, parsers) for each in typed)


def _parser(option: Option) -> Callable[[str], Any]:
    """The parser of an option's value."""
    if option.words:
        return number_or_word(option)
    return int_parser(f"{KIND} {option.name}", 0, MAX_NUMBER) if option.kind is int else option.kind


def _kind(
    typed: str, first: Mapping[str, Any], parsers: Mapping[str, Callable[[str], Any]]
) -> tuple[int, CacheOptions]:
    given: dict[str, Any] = {}
    for part in parse_list(KIND, typed, str):
        name, sign, value = (each.strip() for each in part.partition("="))
        make = parsers.get(name)
        if make is None or not sign or name in given:
            near = did_you_mean(name, parsers) if make is None else ""
            raise UsageError(
                f"{KIND} {typed!r}: {part!r} is not one of {', '.join(parsers)}, each once and with a value. {near}"
                "Write rows=2,budget=4096,policy=snapkv"
            )
        given[name] = make(value)
    if "rows" not in given:
        raise UsageError(f"{KIND} {typed!r} gives no number of rows. Write rows=2,budget=4096,policy=snapkv")
    rows = given.pop("rows")
    try:
        return rows, cache_options({**first, **given})
    except WindlassError as error:
        raise UsageError(f"{KIND} {typed!r}: {error}") from error
