"""The commands that read and write text: `generate`, `chat`, `cache`."""

from pathlib import Path

from windlass.cli import options, terminal
from windlass.cli.options import CacheValues, Unset, as_typed, expanded, file_of_info, model_and_prompt, resolve_model
from windlass.cli.serve import Record
from windlass.cli.terminal import loading
from windlass.core.errors import PromptCacheError, UsageError
from windlass.core.files import check_writable
from windlass.core.parse import SYSTEM
from windlass.engine.sampling import Sampling


@expanded
def generate(
    unset: Unset,
    words: options.TextArguments,
    limits: CacheValues,
    *,
    prompt_cache: options.PromptCache = None,
    template: options.TemplateArguments,
    max_tokens: options.MaxTokens = 256,
    sampling: Sampling,
    stop: options.Stop = None,
    speculate: options.Speculate = None,
    load: options.LoadOptions,
    verbosity: options.Verbosity,
    is_json: options.Json = False,
    is_json_stream: options.JsonStream = False,
    record: Record = None,
    is_parallel: options.TensorParallel = False,
) -> int:
    """Write the text that follows a prompt, or the reply to it where the model has a chat template.

    MODEL may be left out after -m or with WINDLASS_MODEL. A single argument is then the prompt.
    """
    model, prompt = _model_and_prompt(unset, words)
    launch = terminal.launch_of(is_parallel, prompt, words.file, record)
    is_quiet = terminal.is_quiet(launch, verbosity.is_quiet)
    if is_json and is_json_stream:
        raise UsageError("--json and --json-stream exclude each other. Give one of them")
    if record is not None:
        check_writable(record, "recording", (words.file, prompt_cache, Path(model)))
    text = terminal.read_prompt(prompt, words.file)
    with loading(is_quiet):
        from windlass.cli import session

    asked = session.PromptInput(
        system=template.system,
        is_raw=template.is_raw,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        speculate=speculate,
    )
    shown = session.OutputMode.of(is_json, is_json_stream)
    given = limits if prompt_cache is None else as_typed(limits, unset)
    with terminal.quiet(is_quiet), terminal.first_speaks(launch):
        opened = session.open_session(model, given, load, prompt_cache, is_parallel)
        if verbosity.is_verbose:
            session.say_chosen(opened, asked)
        code, result = session.generate(opened, text, asked, shown, record)
        if verbosity.is_verbose:
            session.say_done(opened, result)
        return terminal.leave_ranks(launch, code)


@expanded
def chat(
    unset: Unset,
    named: options.ModelArguments,
    limits: CacheValues,
    *,
    prompt_cache: options.PromptCache = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = 256,
    sampling: Sampling,
    stop: options.Stop = None,
    speculate: options.Speculate = None,
    kept: options.ChatArguments,
    load: options.LoadOptions,
    verbosity: options.Verbosity,
) -> int:
    """Talk to a model, many turns on one cache. Enter /help there for the list of commands."""
    model = resolve_model(named.name, named.model, "model" in unset)
    if kept.keeps_system:
        if "sinks" in limits:
            raise UsageError(f"--keep-system keeps the system text, and --sinks {limits['sinks']} a number. Use one")
        limits = limits | {"sinks": SYSTEM}
    with loading(verbosity.is_quiet):
        from windlass.cli import session
        from windlass.cli.chat import run

    asked = session.PromptInput(system=system, max_tokens=max_tokens, sampling=sampling, stop=stop, speculate=speculate)
    with terminal.quiet(verbosity.is_quiet):
        file = run.cache_to_load(kept, prompt_cache)
        given = limits if file is None else as_typed(limits, unset)
        try:
            opened = session.open_session(model, given, load, file)
        except PromptCacheError as error:
            if kept.conversation is None:
                raise
            terminal.note(f"windlass: note: {error}")
            opened = session.open_session(model, limits, load)  # the text is read again
        if verbosity.is_verbose:
            session.say_chosen(opened, asked)
        return run.chat(opened, asked, kept)


@expanded
def cache(
    unset: Unset,
    words: options.TextArguments,
    limits: CacheValues,
    *,
    prompt_cache: options.PromptCacheOut = None,
    is_appended: options.IsAppended = False,
    template: options.TemplateArguments,
    load: options.LoadOptions,
    verbosity: options.Verbosity,
    is_json: options.Json = False,
    is_parallel: options.TensorParallel = False,
) -> int:
    """Read a prompt once, into a file from which `generate` and `chat` continue.

    `windlass cache FILE info` shows the contents of the file.
    """
    if prompt_cache is None and (file := file_of_info(words.name, words.prompt)) is not None:
        from windlass.cli import session

        return session.show(file, words.model, is_json)
    model, prompt = _model_and_prompt(unset, words)
    launch = terminal.launch_of(is_parallel, prompt, words.file)
    is_quiet = terminal.is_quiet(launch, verbosity.is_quiet)
    if prompt_cache is None:
        raise UsageError("no file to write. Name it with --prompt-cache FILE")
    check_writable(prompt_cache, "prompt cache", (words.file, Path(model)))
    text = terminal.read_prompt(prompt, words.file)
    with loading(is_quiet):
        from windlass.cli import session

    asked = session.PromptInput(system=template.system, is_raw=template.is_raw, is_begun=True)
    given, before = (as_typed(limits, unset), prompt_cache) if is_appended else (limits, None)
    with terminal.quiet(is_quiet), terminal.first_speaks(launch):
        opened = session.open_session(model, given, load, before, is_parallel)
        if verbosity.is_verbose:
            session.say_chosen(opened, asked)
        code = session.save_cache(opened, text, asked, prompt_cache, is_json)
        if verbosity.is_verbose:
            terminal.note(opened.cache.describe())
        return terminal.leave_ranks(launch, code)


def _model_and_prompt(unset: Unset, words: options.TextArguments) -> tuple[str, str | None]:
    is_default = "model" in unset
    return model_and_prompt(words.name, words.prompt, words.model, words.file is not None, is_default)
