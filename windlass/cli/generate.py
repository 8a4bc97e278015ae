"""The commands that read and write text: `generate`, `chat`, `cache`."""

from dataclasses import replace

from windlass.cli import options
from windlass.cli import terminal as parallel
from windlass.cli.options import CacheArguments, file_of_info, model_and_prompt, the_model
from windlass.cli.parameters import Unset, as_typed, expanded
from windlass.cli.serve import Record
from windlass.cli.terminal import loading
from windlass.core.errors import UsageError
from windlass.core.parse import SYSTEM


@expanded
def generate(
    unset: Unset,
    words: options.TextArguments,
    limits: CacheArguments,
    *,
    prompt_cache: options.PromptCache = None,
    template: options.TemplateArguments,
    max_tokens: options.MaxTokens = 256,
    sampling: options.SamplingArguments,
    stop: options.Stop = None,
    load: options.LoadOptions,
    loudness: options.Verbosity,
    is_json: options.Json = False,
    is_json_stream: options.JsonStream = False,
    record: Record = None,
    is_parallel: options.TensorParallel = False,
) -> int:
    """Write the text that follows a prompt, or the reply to it where the model has a chat template.

    MODEL may be left out after -m or with WINDLASS_MODEL; a single argument is then the prompt.
    """
    model, prompt = _model_and_prompt(unset, words)
    launch = parallel.launch_of(is_parallel, prompt, words.file, record)
    is_quiet = parallel.is_quiet(launch, loudness.is_quiet)
    if is_json and is_json_stream:
        raise UsageError("--json and --json-stream exclude each other; give one of them")
    from windlass.cli import checks, terminal
    from windlass.engine.sampling import Sampling

    how = Sampling(**vars(sampling))
    given_cache = limits if prompt_cache is None else as_typed(limits, unset)
    checks.check_session(model, load, given_cache, prompt_cache, max_tokens)
    checks.check_prompt(prompt, words.file)
    if record is not None:
        checks.check_writable(record, "recording")
    given = terminal.read_prompt(prompt, words.file)
    with loading(is_quiet):
        from windlass.cli import session
        from windlass.cli import session as detail

    asked = session.PromptInput(template.system, template.is_raw, False, max_tokens, how, stop)
    shown = (
        session.OutputMode.JSON_STREAM
        if is_json_stream
        else session.OutputMode.JSON
        if is_json
        else session.OutputMode.TEXT
    )
    with terminal.quiet(is_quiet), parallel.first_speaks(launch):
        opened = session.open_session(model, given_cache, load, prompt_cache, is_parallel)
        if loudness.is_verbose:
            detail.say_chosen(opened, asked)
        code, result = session.generate(opened, given, asked, shown, record)
        if loudness.is_verbose:
            detail.say_done(opened, result)
        return parallel.parted(launch, code)


@expanded
def chat(
    unset: Unset,
    named: options.ModelArguments,
    limits: CacheArguments,
    *,
    prompt_cache: options.PromptCache = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = 256,
    sampling: options.SamplingArguments,
    stop: options.Stop = None,
    kept: options.ChatArguments,
    load: options.LoadOptions,
    loudness: options.Verbosity,
) -> int:
    """Talk to a model, many turns on one cache; /help there lists what else can be done."""
    model = the_model(named.name, named.model, "model" in unset)
    from windlass.cli import checks, terminal
    from windlass.engine.sampling import Sampling

    how = Sampling(**vars(sampling))
    if kept.keeps_system:
        if limits.sinks is not None:
            raise UsageError(f"--keep-system keeps the system text, and --sinks {limits.sinks} a number; use one")
        limits = replace(limits, sinks=SYSTEM)
    checks.check_session(
        model, load, limits if prompt_cache is None else as_typed(limits, unset), prompt_cache, max_tokens
    )
    with loading(loudness.is_quiet):
        from windlass.cli import session
        from windlass.cli import session as detail
        from windlass.cli.chat import run as run

    with terminal.quiet(loudness.is_quiet):
        file = run.cache_to_load(kept, prompt_cache)
        given_cache = limits if file is None else as_typed(limits, unset)
        opened = session.open_session(model, given_cache, load, file)
        if loudness.is_verbose:
            detail.say_chosen(opened, session.PromptInput())
        return run.chat(opened, max_tokens, how, kept, stop, system)


@expanded
def cache(
    unset: Unset,
    words: options.TextArguments,
    limits: CacheArguments,
    *,
    prompt_cache: options.PromptCacheOut = None,
    is_appended: options.IsAppended = False,
    template: options.TemplateArguments,
    load: options.LoadOptions,
    loudness: options.Verbosity,
    is_json: options.Json = False,
    is_parallel: options.TensorParallel = False,
) -> int:
    """Read a prompt once, into a file that `generate` and `chat` go on from.

    `windlass cache FILE info` tells what is in such a file.
    """
    if prompt_cache is None and (file := file_of_info(words.name, words.prompt)) is not None:
        from windlass.cli import session as cache_info

        return cache_info.show(file, words.model, is_json)
    model, prompt = _model_and_prompt(unset, words)
    launch = parallel.launch_of(is_parallel, prompt, words.file)
    is_quiet = parallel.is_quiet(launch, loudness.is_quiet)
    if prompt_cache is None:
        raise UsageError("no file to write; name it with --prompt-cache FILE")
    from windlass.cli import checks, terminal

    checks.check_writable(prompt_cache, "prompt cache")
    given_cache = as_typed(limits, unset) if is_appended else limits
    checks.check_session(model, load, given_cache, prompt_cache if is_appended else None)
    checks.check_prompt(prompt, words.file)
    given = terminal.read_prompt(prompt, words.file)
    with loading(is_quiet):
        from windlass.cli import session
        from windlass.cli import session as caching
        from windlass.cli import session as detail

    asked = session.PromptInput(template.system, template.is_raw, is_begun=True)
    with terminal.quiet(is_quiet), parallel.first_speaks(launch):
        opened = session.open_session(model, given_cache, load, prompt_cache if is_appended else None, is_parallel)
        if loudness.is_verbose:
            detail.say_chosen(opened, asked)
        code = caching.save_cache(opened, given, asked, prompt_cache, is_json)
        if loudness.is_verbose:
            terminal.note(opened.cache.describe())
        return parallel.parted(launch, code)


def _model_and_prompt(unset: Unset, words: options.TextArguments) -> tuple[str, str | None]:
    is_default = "model" in unset
    return model_and_prompt(words.name, words.prompt, words.model, words.file is not None, is_default)
