"""The options of the command line, each declared once. They are named as in the library."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer import Argument, BadParameter, Option

from windlass.core.errors import UsageError
from windlass.core.files import BYTE_ORDER_MARK
from windlass.core.parse import DEVICES as DEVICES
from windlass.core.parse import DTYPES as DTYPES
from windlass.core.parse import SYSTEM
from windlass.core.parse import WEIGHTS as WEIGHTS

PACKAGE: Final = Path(__file__).parents[1]
MODES: Final = ("auto", "original", "compact", "self_extend", "clamp")
STORES: Final = ("plain", "int8", "int4")
MERGES: Final = ("mean_count", "mean", "sum", "pick", "weighted")
NO_POLICIES: Final = ("base", "wrapper")  # what a policy is made of


def policies(incomplete: str) -> list[str]:
    """Names of policies, and file names are left to the shell."""
    tree = ast.parse((PACKAGE / "policies" / "__init__.py").read_text())
    modules = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [module.rpartition(".")[2] for module in modules if module.startswith("windlass.policies.")]
    return [name for name in dict.fromkeys(names) if name not in NO_POLICIES and name.startswith(incomplete)]


def names_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Completes to one of `known`."""
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Folders that hold a model, or lead to one."""
    folder, _, start = incomplete.rpartition("/")
    parent = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".").expanduser()
    if not parent.is_dir():
        return []
    found = sorted(each.name for each in parent.iterdir() if each.is_dir() and each.name.startswith(start))
    before = incomplete[: len(incomplete) - len(start)]
    return [f"{before}{name}" for name in found if not name.startswith(".")]


Budget = Annotated[
    int | None,
    Option(
        "--budget", "--max-kv-size", envvar="WINDLASS_BUDGET", help="Most tokens that a layer keeps; by default all."
    ),
]


def sinks_of(typed: str) -> int | str:
    """A number of sinks, or `system`. Raises: BadParameter."""
    try:
        return typed if typed == SYSTEM else int(typed)
    except ValueError:
        raise BadParameter(f"{typed!r} is neither a whole number nor {SYSTEM!r}") from None


Sinks = Annotated[
    Any,  # a parser's own type: a number, or `system`
    Option(
        "--sinks",
        metavar="INTEGER",
        parser=sinks_of,
        help="First tokens, never evicted; system: those of the system text. By default 4, in `serve` system.",
    ),
]
Window = Annotated[
    int | None, Option("--window", help="Newest tokens, never evicted; by default a quarter of the budget, at most 64.")
]
PolicySpec = Annotated[
    str | None,
    Option(
        "--policy",
        metavar="NAME",
        envvar="WINDLASS_POLICY",
        autocompletion=policies,
        help="Which tokens to keep: a name, SnapKV(pool=7), or file.py:Class; by default auto, which is key_diff.",
    ),
]
Positions = Annotated[
    str | None,
    Option(
        "--positions",
        metavar="MODE",
        envvar="WINDLASS_POSITIONS",
        autocompletion=names_of(MODES),
        help="Where kept tokens are read: auto, original, compact, self_extend(group, window) or clamp(limit); "
        "by default auto: as the model does, and so that a longer text stays within its trained length.",
    ),
]
StoreSpec = Annotated[
    str | None,
    Option(
        "--store",
        metavar="NAME",
        envvar="WINDLASS_STORE",
        autocompletion=names_of(STORES),
        help="How the cache is held: plain, int8, int4, or int4(sinks=4, newest=32), whose first and newest tokens "
        "are held in full precision; by default plain.",
    ),
]
MergeSpec = Annotated[
    str | None,
    Option(
        "--merge",
        metavar="RULE",
        envvar="WINDLASS_MERGE",
        autocompletion=names_of(MERGES),
        help="How evicted tokens are merged into kept ones: mean_count, mean, sum, pick or weighted, also as "
        "mean_count(next, threshold=0.5); by default they are dropped.",
    ),
]
SharesFile = Annotated[
    Path | None,
    Option(
        "--shares",
        metavar="FILE",
        envvar="WINDLASS_SHARES",
        help="How much of the budget each layer and each kv head gets, as `windlass calibrate --shares` measured it; "
        "by default all get as much.",
    ),
]
Recall = Annotated[
    int | None,
    Option(
        "--recall",
        envvar="WINDLASS_RECALL",
        help="Evicted tokens that each step reads again, those that matter most to it; all of them stay in the host's "
        "memory. A multiple of 8; by default 0.",
    ),
]
RecallStore = Annotated[
    str | None,
    Option(
        "--recall-store",
        metavar="NAME",
        envvar="WINDLASS_RECALL_STORE",
        autocompletion=names_of(STORES),
        help="How evicted tokens are held for --recall: plain, int8 or int4; by default int4.",
    ),
]
RecallFolder = Annotated[
    str | None,
    Option(
        "--recall-folder",
        metavar="FOLDER",
        envvar="WINDLASS_RECALL_FOLDER",
        help="Hold them in an unnamed file of this folder, for texts beyond the host's memory.",
    ),
]
Chunk = Annotated[
    int | None,
    Option("--chunk", envvar="WINDLASS_CHUNK", help="Most tokens taken in one step of the prompt; by default 512."),
]


@dataclass(frozen=True)
class CacheArguments:
    """What was asked of the cache; None where nothing was, so that the defaults or a prompt cache decide."""

    budget: Budget = None
    sinks: Sinks = None
    window: Window = None
    policy: PolicySpec = None
    positions: Positions = None
    chunk: Chunk = None
    store: StoreSpec = None
    merge: MergeSpec = None
    recall: Recall = None
    recall_store: RecallStore = None
    recall_folder: RecallFolder = None
    shares: SharesFile = None

    def given(self) -> dict[str, Any]:
        """What was asked, by the names of `CacheOptions`."""
        return {name: value for name, value in vars(self).items() if value is not None}


WHICH = "A model's folder, or its name on the hub."


def _show_version(is_asked: bool) -> bool:
    if is_asked:
        typer.echo(f"windlass {version('windlass')}")
        raise typer.Exit
    return is_asked


def _without_mark(text: str | None) -> str | None:
    return None if text is None else text.removeprefix(BYTE_ORDER_MARK)


Version = Annotated[
    bool, Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
]
Command = Annotated[str | None, Argument(metavar="COMMAND", help="Which command; by default all.")]

ModelName = Annotated[str, Argument(metavar="MODEL", help=WHICH, show_default=False, autocompletion=models)]
ModelArgument = Annotated[str | None, Argument(metavar="MODEL", help=WHICH, show_default=False, autocompletion=models)]
ModelOption = Annotated[
    str | None,
    Option(
        "--model",
        "-m",
        metavar="MODEL",
        envvar="WINDLASS_MODEL",
        help="The model, in place of the argument MODEL: a single argument is then the prompt.",
        show_default=False,
        autocompletion=models,
    ),
]
Prompt = Annotated[
    str | None,
    Argument(metavar="PROMPT", help="The text; - or nothing reads it from a pipe.", show_default=False),
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
IsRaw = Annotated[
    bool, Option("--raw", help="Read the prompt as it stands, without the model's chat template, if it has one.")
]
IsAppended = Annotated[
    bool, Option("--append", help="Go on in the file that is there; it is written anew as a whole, or stays as it is.")
]

IsQuiet = Annotated[bool, Option("--quiet", "-q", help="Only the text and errors: no notes, no progress.")]
IsVerbose = Annotated[
    bool, Option("--verbose", "-v", help="Say what was chosen, what each phase took, and what the cache holds.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
JsonStream = Annotated[
    bool,
    Option(
        "--json-stream",
        help='Print a line of JSON for each piece of text as it comes, {"text": ..., "done": false}, then the line '
        'of --json with "done": true.',
    ),
]

TableFormat = Annotated[
    str,
    Option(
        "--format",
        metavar="FORMAT",
        autocompletion=names_of(("table", "md", "json")),
        help="What is printed: a table for the eye, a Markdown table that holds everything, or a line of JSON per row.",
    ),
]
JsonLines = Annotated[bool, Option("--json", help="The same as --format json.")]
HasRatios = Annotated[
    bool, Option("--ratios", help="Also the speeds against the first value of each list, all else being equal.")
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
    model: ModelOption = None
    file: PromptFile = None


@dataclass(frozen=True)
class TemplateArguments:
    """How a prompt becomes a message to the model."""

    system: System = None
    is_raw: IsRaw = False


@dataclass(frozen=True)
class Verbosity:
    """How much is said on stderr."""

    is_quiet: IsQuiet = False
    is_verbose: IsVerbose = False

    def __post_init__(self) -> None:
        """Raises: UsageError for both."""
        if self.is_quiet and self.is_verbose:
            raise UsageError("--quiet and --verbose exclude each other; give one of them")


ESCAPES: Final = {"n": "\n", "t": "\t", "\\": "\\"}


def unescaped(typed: Sequence[str] | None) -> list[str] | None:
    """With `\\n`, `\\t` and `\\\\` as the signs that they stand for; None where nothing was typed."""
    return [re.sub(r"\\([nt\\])", lambda sign: ESCAPES[sign[1]], text) for text in typed or ()] or None


PromptCache = Annotated[
    Path | None,
    Option("--prompt-cache", metavar="FILE", help="Go on from this file, made by `windlass cache`; it stays as it is."),
]
PromptCacheOut = Annotated[Path | None, Option("--prompt-cache", metavar="FILE", help="The file to write.")]
Conversation = Annotated[Path | None, Option("--load", metavar="FILE", help="Go on with what /save wrote there.")]
KeepsSystem = Annotated[
    bool, Option("--keep-system", help="Never evict the system text and the head of the chat template.")
]
HasHistory = Annotated[
    bool, Option("--history/--no-history", envvar="WINDLASS_HISTORY", help="Keep lines and unfinished conversations.")
]

MaxTokens = Annotated[int, Option("--max-tokens", "-n", envvar="WINDLASS_MAX_TOKENS", help="Most tokens to write.")]
Temperature = Annotated[
    float, Option("--temperature", envvar="WINDLASS_TEMPERATURE", help="0 takes the likeliest token.")
]
TopK = Annotated[int, Option("--top-k", help="Draw from the k likeliest tokens; 0: off.")]
TopP = Annotated[float, Option("--top-p", help="Draw from the likeliest tokens that sum to p; 1: off.")]
MinP = Annotated[
    float, Option("--min-p", help="Leave out tokens less likely than this share of the likeliest; 0: off.")
]
RepetitionPenalty = Annotated[float, Option("--repetition-penalty", help="Above 1 discourages repeats; 1: off.")]
Stop = Annotated[
    list[str] | None,
    Option("--stop", metavar="TEXT", callback=unescaped, help="End before this text (\\n: a line break); repeatable."),
]
Seed = Annotated[int, Option("--seed", min=0, max=2**63 - 1, help="Same seed, same text.")]

Dtype = Annotated[
    str,
    Option(
        "--dtype",
        envvar="WINDLASS_DTYPE",
        autocompletion=names_of(DTYPES),
        help="auto (as the weights are), float32, bfloat16 or float16.",
    ),
]
Weights = Annotated[
    str,
    Option(
        "--weights",
        metavar="NAME",
        envvar="WINDLASS_WEIGHTS",
        autocompletion=names_of(WEIGHTS),
        help="auto (as they are), or int8 or int4 for those of linear layers, on a CPU; needs windlass[weights].",
    ),
]
Device = Annotated[
    str,
    Option(
        "--device",
        metavar="NAME",
        envvar="WINDLASS_DEVICE",
        autocompletion=names_of(DEVICES),
        help="Where the model and its cache are: cpu, cuda, cuda:1, mps; auto: the first there is of cuda, mps, cpu.",
    ),
]
Threads = Annotated[
    int | None,
    Option("--threads", min=1, max=1024, envvar="WINDLASS_THREADS", help="CPU threads; by default one per core."),
]
TensorParallel = Annotated[
    bool,
    Option(
        "--tensor-parallel",
        help="All processes that torchrun started hold the model together, each its heads; see docs/parallel.md.",
    ),
]
Shape = Annotated[
    str | None,
    Option("--shape", metavar="NAME", help="Instead of a model: random weights like 1b, 8b, 7b-mha, qwen3-next, dsv3."),
]
Layers = Annotated[int | None, Option("--layers", min=1, max=1024, help="Layers of the shape; by default its own.")]
PromptTokens = Annotated[str, Option("--prompt-tokens", "-p", metavar="LIST", help="Tokens to read; 0: none.")]
DecodeTokens = Annotated[str, Option("--decode-tokens", "-n", metavar="LIST", help="Tokens to write; 0: none.")]
Depths = Annotated[
    str,
    Option("--depth", "-d", metavar="LIST", help="Tokens that came before; random keys and values stand for them."),
]
Batches = Annotated[
    str, Option("--batch", metavar="LIST", help="Texts that are read or written at once; t/s counts all of them.")
]
Budgets = Annotated[str, Option("--budget", "--max-kv-size", metavar="LIST", help="Most tokens that a layer keeps.")]
PolicySpecs = Annotated[str, Option("--policy", metavar="LIST", help="Which tokens to keep, as in `generate`.")]
PositionModes = Annotated[str, Option("--positions", metavar="LIST", help="Where they are read, as in `generate`.")]
StoreSpecs = Annotated[str, Option("--store", metavar="LIST", help="How they are held: plain, int8, int4.")]
Storages = Annotated[
    str,
    Option(
        "--storage",
        metavar="LIST",
        help="unrotated, or rotated: the same kernels on keys that are stored rotated.",
    ),
]
Graphs = Annotated[
    str | None,
    Option(
        "--graph",
        metavar="LIST",
        help="on: a step of writing is recorded once and run again, and chooses its tokens; off: as it comes. "
        "By default on where there are graphs, on a GPU.",
    ),
]
ThreadCounts = Annotated[str | None, Option("--threads", metavar="LIST", help="CPU threads; by default one per core.")]
Repetitions = Annotated[int, Option("--repetitions", "-r", min=1, max=10_000, help="Runs of each row that count.")]
Output = Annotated[
    Path | None, Option("--output", "-o", metavar="FILE", help="Add a line of JSON per row to this file.")
]

Samples = Annotated[int, Option("--samples", min=1, max=1_000_000, help="Texts for each combination.")]
Results = Annotated[
    list[Path],
    Argument(metavar="RESULTS...", help="Files that `windlass eval` wrote, of one model.", show_default=False),
]
Page = Annotated[
    Path, Option("--output", "-o", metavar="FILE", help="The page; figures go to a folder beside it, named after it.")
]


@dataclass(frozen=True)
class SamplingArguments:
    """How the next token is chosen, by the names of `Sampling`."""

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed = 0


@dataclass(frozen=True)
class ChatArguments:
    """What a chat goes on with, and whether anything of it is kept."""

    conversation: Conversation = None
    has_history: HasHistory = True
    keeps_system: KeepsSystem = False


@dataclass(frozen=True)
class LoadOptions:
    """How the model is loaded, and what runs it."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    weights: Weights = "auto"


@dataclass(frozen=True)
class BenchCacheLists:
    """Lists of values of the cache's options, by their names."""

    budget: Budgets = "all"
    policy: PolicySpecs = "recent"
    positions: PositionModes = "original"
    store: StoreSpecs = "plain"


HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NO_MODEL = "no model; name one first, with -m, or in WINDLASS_MODEL (`windlass demo` brings its own)"


def the_model(name: str | None, model: str | None, is_default: bool) -> str:
    """The model of a command that takes nothing else: `name` was typed alone, `model` with -m.

    `is_default`: `model` is that of WINDLASS_MODEL, before which one that was typed goes.

    Raises: UsageError when there is none, or two were typed.
    """
    if name is not None and model is not None and not is_default:
        raise UsageError(f"two models, {name} and -m {model}; give one of them")
    chosen = model if name is None else name
    if chosen is None:
        raise UsageError(NO_MODEL)
    return chosen


def model_and_prompt(
    first: str | None, second: str | None, model: str | None, has_file: bool, is_default: bool
) -> tuple[str, str | None]:
    """The model and the prompt out of up to two words, where `model` is as in `the_model`.

    Two words are a model and a prompt. A single word is the prompt after -m, and the model where no other is known.
    Beside the default of WINDLASS_MODEL it is the prompt, unless the prompt comes from a file or the word is a path or
    a folder.

    Raises: UsageError when there is no model, and for a single word that can be meant as either.
    """
    if first is None or (first is not None and second is not None):
        if second is not None and model is not None and not is_default:
            raise UsageError(f"-m {model}, and two words more, {first!r} and {second!r}; quote a prompt of many words")
        return the_model(first, model, is_default), second
    if model is None:
        if any(map(str.isspace, first)) and not Path(first).exists():
            raise UsageError(f"{NO_MODEL}; {_short(first)} looks like a prompt")
        return first, None
    if not is_default:
        return model, first
    if has_file or _is_folder(first):
        return first, None
    if HUB_NAME.fullmatch(first):
        raise UsageError(f"{first} can be a model or a prompt; write -m {first}, or -m {model} {first}")
    return model, first


def file_of_info(first: str | None, second: str | None) -> Path | None:
    """The FILE of `windlass cache FILE info`, or of `windlass cache info FILE`; None for other words."""
    if first is None or second is None or "info" not in (first, second):
        return None
    return Path(first if second == "info" else second)


def _is_folder(word: str) -> bool:
    is_path = word.startswith(("./", "../", "~/", "/")) and not any(map(str.isspace, word))
    return is_path or Path(word).is_dir()


def _short(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[: most - 3] + "...")
