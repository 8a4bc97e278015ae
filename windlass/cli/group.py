"""How Typer runs our commands."""

from typing import Any

import typer
from typer.core import TyperGroup

from windlass.core.close_names import did_you_mean
from windlass.core.errors import UsageError


class Commands(TyperGroup):
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
