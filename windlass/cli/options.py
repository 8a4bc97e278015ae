"""The options of the command line: how Typer takes those that the library declares, all others, and the words before.

A command's parameters are records. The environment gives options, too.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, get_args, get_origin

import typer
from typer import Argument, BadParameter, Context, Option
from typer.core import TyperCommand, TyperGroup

from windlass.cache.options import CacheOptions
from windlass.core import __version__
from windlass.core.errors import UsageError, WindlassError
from windlass.core.fields import Option as DeclaredOption
from windlass.core.fields import field_info
from windlass.core.files import BYTE_ORDER_MARK
from windlass.core.parse import DEVICES, DTYPES, WEIGHTS, check_dtype, check_weights, did_you_mean, gpu_number

Unset = frozenset[str]  # names of a command's parameters that came from the environment


def expanded(command: Callable[..., int]) -> Callable[..., int]:
    """`command` for Typer: in place of each parameter that is a record, the fields of it.

    A parameter of type `Annotated[dict[str, Any], Record]` takes those options of a record that were given, by name.
    A parameter `Unset` is told which options came from the environment. An error about such a value names the variable.
    """
    groups: dict[str, Any] = {}
    flat: list[Parameter] = []
    takers = []
    for parameter in signature(command).parameters.values():
        kind: Any = parameter.annotation
        if kind is Unset:
            takers.append(parameter.name)
        elif is_dataclass(_record_of(kind)):
            groups[parameter.name] = kind
            flat += _parameters(_record_of(kind), is_given=kind is not _record_of(kind))
        else:
            flat.append(_parameter(parameter.name, kind, parameter.default))

    def run(context: Any, **given: Any) -> int:
        variables = _of_environment(context)
        try:
            made = {name: _made(kind, given) for name, kind in groups.items()}
            return command(**given, **made, **dict.fromkeys(takers, frozenset(variables)))
        except WindlassError as error:
            values = {name: os.environ.get(variable, "") for name, variable in variables.items()}
            blamed = [
                f"{variables[name]}={value}"
                for name, value in values.items()
                if all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(error)) for word in (name, value))
            ]
            if not blamed:
                raise
            raise type(error)(f"{error} (set in the environment: {', '.join(blamed)})") from error

    flat.append(_parameter("context", Context, Parameter.empty))
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {each.name: each.annotation for each in flat}
    run.__signature__ = Signature(flat)  # type: ignore[attr-defined]  # where `inspect` looks first
    return run


def _record_of(kind: Any) -> Any:
    """The record whose fields a parameter of this annotation has."""
    return get_args(kind)[1] if get_origin(kind) is Annotated else kind


def _parameters(record: Any, is_given: bool) -> Iterator[Parameter]:
    """The fields of a record as parameters, without defaults if only given options are passed on."""
    options = field_info(record)
    if not options:
        yield from (_parameter(each.name, each.type, each.default) for each in fields(record))
    for option in options.values():
        if option.is_typed:
            kind: Any = option.kind | None if is_given else option.kind
            kind = Annotated[kind, typer_option(option)]
            yield _parameter(option.name, kind, None if is_given else option.default)


def _made(kind: Any, given: dict[str, Any]) -> Any:
    """The record, or the given ones of its options, out of all that a command was given."""
    record = _record_of(kind)
    options = field_info(record)
    names = [each.name for each in fields(record) if each.name not in options or options[each.name].is_typed]
    own = {name: given.pop(name) for name in names}
    return record(**own) if kind is record else {name: value for name, value in own.items() if value is not None}


def typer_option(option: DeclaredOption) -> Any:
    """A declared option as Typer has it. Its range is checked where the record is made."""
    return Option(
        f"--{option.name.replace('_', '-')}",
        *option.flags,
        envvar=option.variable,
        help=option.described,
        show_default=False,
        metavar=option.metavar or (("[INTEGER]" if option.alone else "INTEGER") if option.words else None),
        parser=number_or_word(option) if option.words else None,
        autocompletion=names_of(option.names) if option.names else None,
    )


def list_option(option: DeclaredOption, flag: str = "", note: str = "") -> Any:
    """A list of values of a declared option. `flag` replaces its name, and `note` follows its help."""
    flags = (flag,) if flag else (f"--{option.name.replace('_', '-')}", *option.flags)
    told = option.help.replace(", or no value on the command line", "")  # a list has values
    return Option(*flags, metavar="LIST", help=f"{told}{note}.")


def number_or_word(option: DeclaredOption) -> Callable[[str], int | str]:
    """A parser of a whole number, or one of the option's words. It raises: BadParameter."""

    def parse(typed: str) -> int | str:
        try:
            return typed if typed in option.words else int(typed)
        except ValueError:
            words = " nor ".join(map(repr, option.words))
            raise BadParameter(f"{typed!r} is neither a whole number nor {words}") from None

    return parse


def names_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A function that completes to one of `known`."""
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]


def as_typed(given: Mapping[str, Any], unset: Unset) -> dict[str, Any]:
    """Options without those that came from the environment."""
    return {name: value for name, value in given.items() if name not in unset}


def _of_environment(context: Any) -> dict[str, str]:
    """The parameters that were not typed but taken from a variable, each with its variable."""
    sources = [(each, context.get_parameter_source(each.name)) for each in context.command.params if each.envvar]
    return {each.name: each.envvar for each, source in sources if source is not None and source.name == "ENVIRONMENT"}


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


class CommandGroup(TyperGroup):
    """All commands. Ctrl-C that none of them takes for itself reaches whoever called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is typed. Raises: UsageError for an unknown one, with the names that there are."""
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            raise UsageError(
                f"No such command {args[0]!r}. {did_you_mean(args[0], names)}The commands are {', '.join(names)}"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Raises: Abort where it was interrupted, which Typer itself would turn into an exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


CACHE: Final = field_info(CacheOptions)


class BareOptionCommand(TyperCommand):
    """A command with options that may stand without a value, which Typer has no word for.

    A number that follows is the value of such an option, another text only if it is one of the option's words.
    """

    alone: ClassVar[Mapping[str, str]] = {f"--{name}": each.alone for name, each in CACHE.items() if each.alone}
    """The value of each option where none follows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, in which the missing values are filled in."""
        end = args.index("--") if "--" in args else len(args)
        filled = []
        for flag, following in zip(args[:end], [*args[1:end], ""], strict=False):
            filled.append(flag)
            if flag in self.alone and not self.is_value(flag, following):
                filled.append(self.alone[flag])
        return super().parse_args(ctx, [*filled, *args[end:]])

    def is_value(self, flag: str, following: str) -> bool:
        """Return True if `following`, which is empty at the end, is the value of `flag`."""
        return re.match(r"-?\d", following) is not None or following in CACHE[flag.removeprefix("--")].words


CacheValues = Annotated[dict[str, Any], CacheOptions]
"""The options of a cache that were given, by name: all else is decided by the defaults, or a prompt cache."""


def models(incomplete: str) -> list[str]:
    """Folders that hold a model, or lead to one."""
    folder, _, start = incomplete.rpartition("/")
    parent = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".").expanduser()
    if not parent.is_dir():
        return []
    found = sorted(each.name for each in parent.iterdir() if each.is_dir() and each.name.startswith(start))
    before = incomplete[: len(incomplete) - len(start)]
    return [f"{before}{name}" for name in found if not name.startswith(".")]


Chunk = Annotated[int | None, typer_option(CACHE["chunk"])]
MODEL_HELP = "A model's folder, its GGUF file, or its name on the hub."


def _show_version(is_asked: bool) -> bool:
    if is_asked:
        typer.echo(f"windlass {__version__}")
        raise typer.Exit
    return is_asked


def _without_mark(text: str | None) -> str | None:
    return None if text is None else text.removeprefix(BYTE_ORDER_MARK)


Version = Annotated[
    bool, Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
]
Command = Annotated[str | None, Argument(metavar="COMMAND", help="Name of a command (default: all).")]

ModelName = Annotated[str, Argument(metavar="MODEL", help=MODEL_HELP, show_default=False, autocompletion=models)]
ModelArgument = Annotated[
    str | None, Argument(metavar="MODEL", help=MODEL_HELP, show_default=False, autocompletion=models)
]


def _model_option(note: str = "") -> Any:
    return Option(
        "--model",
        "-m",
        metavar="MODEL",
        envvar="WINDLASS_MODEL",
        help=f"The model, instead of the argument MODEL.{note}",
        show_default=False,
        autocompletion=models,
    )


ModelOption = Annotated[str | None, _model_option()]
PromptModelOption = Annotated[str | None, _model_option(" A single argument is then the prompt.")]
Prompt = Annotated[
    str | None,
    Argument(metavar="PROMPT", help="The text. - or no text reads it from a pipe.", show_default=False),
]
PromptFile = Annotated[Path | None, Option("--file", "-f", metavar="FILE", help="Read the text from a UTF-8 file.")]
System = Annotated[
    str | None,
    Option(
        "--system",
        metavar="TEXT",
        callback=_without_mark,
        help="A system prompt, for a model with a chat template.",
        show_default=False,
    ),
]
IsRaw = Annotated[bool, Option("--raw", help="Read the prompt unchanged, without the model's chat template.")]
IsAppended = Annotated[
    bool, Option("--append", help="Extend an existing file. It is replaced as a whole, or left unchanged.")
]

IsQuiet = Annotated[bool, Option("--quiet", "-q", help="Print only the text and errors, without notes and progress.")]
IsVerbose = Annotated[
    bool, Option("--verbose", "-v", help="Print the choices made, the time of each phase, and the state of the cache.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
JsonStream = Annotated[
    bool,
    Option(
        "--json-stream",
        help='Print a line of JSON for each piece of text, {"text": ..., "done": false}, then the line '
        'of --json with "done": true.',
    ),
]

TableFormat = Annotated[
    str,
    Option(
        "--format",
        metavar="FORMAT",
        autocompletion=names_of(("table", "md", "json")),
        help="Output: a table for the terminal, a Markdown table with all values, or one JSON line per row.",
    ),
]
JsonLines = Annotated[bool, Option("--json", help="The same as --format json.")]
HasRatios = Annotated[
    bool, Option("--ratios", help="Add speeds relative to the first value of each list, all else being equal.")
]


@dataclass(frozen=True)
class ModelArguments:
    """The model, by its argument or its option."""

    name: ModelArgument = None
    model: ModelOption = None


@dataclass(frozen=True)
class TextArguments:
    """The model, and where the prompt comes from."""

    name: ModelArgument = None
    prompt: Prompt = None
    model: PromptModelOption = None
    file: PromptFile = None


@dataclass(frozen=True)
class TemplateArguments:
    """Conversion of a prompt to a message."""

    system: System = None
    is_raw: IsRaw = False


@dataclass(frozen=True)
class Verbosity:
    """Amount of output on stderr."""

    is_quiet: IsQuiet = False
    is_verbose: IsVerbose = False

    def __post_init__(self) -> None:
        """Raises: UsageError for both."""
        if self.is_quiet and self.is_verbose:
            raise UsageError("--quiet and --verbose exclude each other. Give one of them")


ESCAPES: Final = {"n": "\n", "t": "\t", "\\": "\\"}


def unescaped(typed: Sequence[str] | None) -> list[str] | None:
    """A text with `\\n`, `\\t` and `\\\\` replaced by their characters, or None where nothing was typed."""
    return [re.sub(r"\\([nt\\])", lambda sign: ESCAPES[sign[1]], text) for text in typed or ()] or None


PromptCache = Annotated[
    Path | None,
    Option("--prompt-cache", metavar="FILE", help="Start from this file of `windlass cache`, which is not changed."),
]
PromptCacheOut = Annotated[Path | None, Option("--prompt-cache", metavar="FILE", help="The file to write.")]
Conversation = Annotated[
    Path | None, Option("--load", metavar="FILE", help="Continue a conversation saved with /save.")
]
KeepsSystem = Annotated[
    bool, Option("--keep-system", help="Never evict the system text and the head of the chat template.")
]
HasHistory = Annotated[
    bool,
    Option("--history/--no-history", envvar="WINDLASS_HISTORY", help="Save input lines and unfinished conversations."),
]

MaxTokens = Annotated[
    int, Option("--max-tokens", "-n", envvar="WINDLASS_MAX_TOKENS", help="Maximum number of tokens to write.")
]
Stop = Annotated[
    list[str] | None,
    Option("--stop", metavar="TEXT", callback=unescaped, help="Stop before this text (\\n: a line break). Repeatable."),
]
Speculate = Annotated[
    str | None,
    Option(
        "--speculate",
        metavar="lookup|MODEL",
        autocompletion=names_of(("lookup", "off")),
        help="Draft tokens, and verify them together: lookup takes those that followed the last ones earlier in the "
        "text, and is faster where it repeats. A smaller MODEL with the same tokenizer writes its own. The text is the "
        "same (default: off).",
    ),
]
Seed = Annotated[int, Option("--seed", min=0, max=2**63 - 1, help="Same seed, same text.")]

Dtype = Annotated[
    str,
    Option(
        "--dtype",
        envvar="WINDLASS_DTYPE",
        autocompletion=names_of(DTYPES),
        help="auto (as the weights are stored, bfloat16 for those in fewer bits), float32, bfloat16 or float16.",
    ),
]
Weights = Annotated[
    str,
    Option(
        "--weights",
        metavar="NAME",
        envvar="WINDLASS_WEIGHTS",
        autocompletion=names_of(WEIGHTS),
        help="auto (as stored), or int8 or int4 for weights of linear layers, on a CPU. Requires windlass\\[weights].",
    ),
]
Device = Annotated[
    str,
    Option(
        "--device",
        metavar="NAME",
        envvar="WINDLASS_DEVICE",
        autocompletion=names_of(DEVICES),
        help="Device of the model and its cache: cpu, cuda, cuda:1, mps, or auto (CUDA, then MPS, then CPU).",
    ),
]
Threads = Annotated[
    int | None,
    Option("--threads", min=1, max=1024, envvar="WINDLASS_THREADS", help="CPU threads (default: one per core)."),
]
TensorParallel = Annotated[
    bool,
    Option(
        "--tensor-parallel",
        help="Split the heads of the model over the processes of torchrun. See docs/parallel.md.",
    ),
]
Shape = Annotated[
    str | None,
    Option("--shape", metavar="NAME", help="Instead of a model: random weights like 1b, 8b, 7b-mha, qwen3-next, dsv3."),
]
Layers = Annotated[
    int | None, Option("--layers", min=1, max=1024, help="Layers of the shape (default: its own number).")
]
PromptTokens = Annotated[str, Option("--prompt-tokens", "-p", metavar="LIST", help="Tokens to read (0: none).")]
DecodeTokens = Annotated[str, Option("--decode-tokens", "-n", metavar="LIST", help="Tokens to write (0: none).")]
Depths = Annotated[
    str,
    Option("--depth", "-d", metavar="LIST", help="Tokens already cached, with random keys and values."),
]
Batches = Annotated[
    str, Option("--batch", metavar="LIST", help="Texts that are read or written at once. t/s counts all of them.")
]
PositionModes = Annotated[str, list_option(CACHE["positions"])]
StoreSpecs = Annotated[str, list_option(CACHE["store"])]
Storages = Annotated[
    str,
    Option(
        "--storage",
        metavar="LIST",
        help="unrotated, or rotated: the same kernels on keys stored after RoPE.",
    ),
]
Graphs = Annotated[
    str | None,
    Option(
        "--graph",
        metavar="LIST",
        help="on records a decode step with its sampling once and replays it, off runs each step eagerly "
        "(default: on for a GPU with graphs).",
    ),
]
ThreadCounts = Annotated[str | None, Option("--threads", metavar="LIST", help="CPU threads (default: one per core).")]
Repetitions = Annotated[int, Option("--repetitions", "-r", min=1, max=10_000, help="Timed runs of each row.")]
Output = Annotated[
    Path | None, Option("--output", "-o", metavar="FILE", help="Append one JSON line per row to this file.")
]

Samples = Annotated[int, Option("--samples", min=1, max=1_000_000, help="Texts for each combination.")]
Results = Annotated[
    list[Path],
    Argument(metavar="RESULTS...", help="Files that `windlass eval` wrote, of one model.", show_default=False),
]
Page = Annotated[
    Path,
    Option("--output", "-o", metavar="FILE", help="The page. Its figures go to a folder with the same name beside it."),
]


@dataclass(frozen=True)
class ChatArguments:
    """Options of a chat: the saved conversation to continue, and the journal."""

    conversation: Conversation = None
    has_history: HasHistory = True
    keeps_system: KeepsSystem = False


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading a model, and its device."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    weights: Weights = "auto"

    def __post_init__(self) -> None:
        """Raises: UsageError for an unknown dtype, device or kind of weights."""
        check_dtype(self.dtype)
        check_weights(self.weights)
        gpu_number(self.device)


@dataclass(frozen=True)
class BenchCacheLists:
    """Lists of values of the cache's options, by their names."""

    budget: Annotated[str, list_option(CACHE["budget"])] = "all"
    policy: Annotated[str, list_option(CACHE["policy"])] = "recent"
    positions: PositionModes = "original"
    store: StoreSpecs = "plain"


HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NO_MODEL = "no model. Name one first, with -m, or in WINDLASS_MODEL (`windlass demo` brings its own)"


def resolve_model(name: str | None, model: str | None, is_default: bool) -> str:
    """The model of a command that takes nothing else: `name` was typed alone, `model` with -m.

    `is_default`: `model` is that of WINDLASS_MODEL, before which one that was typed goes.

    Raises: UsageError when there is none, or two were typed.
    """
    if name is not None and model is not None and not is_default:
        raise UsageError(f"two models, {name} and -m {model}. Give one of them")
    chosen = model if name is None else name
    if chosen is None:
        raise UsageError(NO_MODEL)
    return chosen


def model_and_prompt(
    first: str | None, second: str | None, model: str | None, has_file: bool, is_default: bool
) -> tuple[str, str | None]:
    """The model and the prompt out of up to two words, where `model` is as in `resolve_model`.

    Two words are a model and a prompt. A single word is the prompt after -m, and the model where no other is known.
    Beside the default of WINDLASS_MODEL it is the prompt, unless the prompt comes from a file or the word is a path or
    a folder.

    Raises: UsageError when there is no model, and for a single word that can be meant as either.
    """
    if first is None or second is not None:
        if second is not None and model is not None and not is_default:
            raise UsageError(f"-m {model}, and two words more, {first!r} and {second!r}. Quote a prompt of many words")
        return resolve_model(first, model, is_default), second
    if model is None:
        if any(map(str.isspace, first)) and not Path(first).exists():
            raise UsageError(f"{NO_MODEL}. {_short(first)} looks like a prompt")
        return first, None
    if not is_default:
        return model, first
    if has_file or _is_folder(first):
        return first, None
    if HUB_NAME.fullmatch(first):
        raise UsageError(f"{first} can be a model or a prompt. Write -m {first}, or -m {model} {first}")
    return model, first


def file_of_info(first: str | None, second: str | None) -> Path | None:
    """The FILE of `windlass cache FILE info`, or of `windlass cache info FILE`, or None for other words."""
    if first is None or second is None or "info" not in (first, second):
        return None
    return Path(first if second == "info" else second)


def _is_folder(word: str) -> bool:
    is_path = word.startswith(("./", "../", "~/", "/")) and not any(map(str.isspace, word))
    return is_path or Path(word).is_dir()


def _short(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[: most - 3] + "...")
