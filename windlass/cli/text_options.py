"""The options that name the model and the text, and those that say what is shown; each declared once."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from windlass.cli.complete import models, names_of
from windlass.core.errors import UsageError
from windlass.core.files import BYTE_ORDER_MARK

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
class Loudness:
    """How much is said on stderr."""

    is_quiet: IsQuiet = False
    is_verbose: IsVerbose = False

    def __post_init__(self) -> None:
        """Raises: UsageError for both."""
        if self.is_quiet and self.is_verbose:
            raise UsageError("--quiet and --verbose exclude each other; give one of them")
