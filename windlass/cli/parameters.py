"""Commands whose parameters are groups of options, as Typer takes them; and options that the environment gives."""

import os
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

import typer
from typer import Context
from typer.core import TyperGroup

from windlass.core.errors import UsageError, WindlassError
from windlass.core.parse import did_you_mean

Group = TypeVar("Group")
Unset = frozenset[str]  # of a command: the names of its parameters that nobody typed, but the environment gave


def expanded(command: Callable[..., int]) -> Callable[..., int]:
    """`command` for Typer: in place of each parameter that is a dataclass, the fields of it.

    A parameter `Unset` of the command is told which others came from the environment. An error about such a value
    names the variable.
    """
    groups: dict[str, Any] = {}
    flat: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        kind: Any = parameter.annotation
        if is_dataclass(kind):
            groups[parameter.name] = kind
            flat += [_parameter(each.name, each.type, each.default) for each in fields(kind)]
        else:
            flat.append(_parameter(parameter.name, kind, parameter.default))
    takers = [parameter.name for parameter in signature(command).parameters.values() if parameter.annotation is Unset]
    flat = [each for each in flat if each.name not in takers]

    def run(context: Any, **given: Any) -> int:
        made = {
            name: group(**{each.name: given.pop(each.name) for each in fields(group)}) for name, group in groups.items()
        }
        variables = _of_environment(context)
        made |= dict.fromkeys(takers, frozenset(variables))
        try:
            return command(**given, **made)
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


def as_typed(group: Group, unset: Unset) -> Group:
    """A group of options without those that came from the environment: None stands for each."""
    none: dict[str, Any] = {name: None for name in vars(group) if name in unset}
    return replace(group, **none)  # type: ignore[type-var]  # a dataclass, as `expanded` makes it


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
