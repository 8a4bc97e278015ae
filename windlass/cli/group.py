"""How Typer runs our commands."""

from typing import Any

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """All commands. Ctrl-C that none of them takes for itself reaches whoever called."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Raises: Abort where it was interrupted; Typer itself would make a bare exit code of that."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None
