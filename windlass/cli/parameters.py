"""Commands whose parameters are records, as Typer takes them; and options that the environment gives."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_origin

import typer
from typer import BadParameter, Context
from typer.core import TyperGroup

from windlass.core.errors import UsageError, WindlassError
from windlass.core.fields import Option, field_info
from windlass.core.parse import did_you_mean

Unset = frozenset[str]  # of a command: the names of its parameters that nobody typed, but the environment gave


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
    """The fields of a record as parameters; without defaults if only those that are given are told."""
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


def typer_option(option: Option) -> Any:
    """A declared option as Typer has it. Its range is checked where the record is made."""
    return typer.Option(
        f"--{option.name.replace('_', '-')}",
        *option.flags,
        envvar=option.variable,
        help=option.described,
        show_default=False,
        metavar=option.metavar or ("INTEGER" if option.words else None),
        parser=number_or_word(option) if option.words else None,
        autocompletion=names_of(option.names) if option.names else None,
    )


def list_option(option: Option, flag: str = "", note: str = "") -> Any:
    """A list of values of a declared option; `flag` where it is not called like the option, `note` after its help."""
    flags = (flag,) if flag else (f"--{option.name.replace('_', '-')}", *option.flags)
    return typer.Option(*flags, metavar="LIST", help=f"{option.help}{note}.")


def number_or_word(option: Option) -> Callable[[str], int | str]:
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
                f"No such command {args[0]!r}; {did_you_mean(args[0], names)}the commands are {', '.join(names)}"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Raises: Abort where it was interrupted; Typer itself would make a bare exit code of that."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None
