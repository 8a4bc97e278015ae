"""Lines from a terminal: editing, several lines in one message, history over sessions, and a line of status."""

import os
from collections.abc import Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.styles import Style

STYLE = Style.from_dict({"": "ansigreen", "prompt": "ansigreen bold", "bottom-toolbar": "noreverse ansibrightblack"})
AGAIN = "Ctrl-C again, or Ctrl-D, ends the chat"


class Screen:
    """Asks for messages: Enter sends one, Alt-Enter or a backslash at its end begins a new line.

    A text that is pasted comes as one message, whatever lines it has. `history` is a file, None keeps no history;
    `commands` complete with Tab. Without `input` and `output` the terminal is used.
    """

    def __init__(
        self,
        history: Path | None,
        commands: Sequence[str] = (),
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        self._status = ""
        self._is_warned = False
        kept: History = InMemoryHistory() if history is None else FileHistory(str(history))
        self._session: PromptSession[str] = PromptSession(
            FormattedText([("class:prompt", "> ")]),
            multiline=True,
            prompt_continuation="  ",
            history=kept,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            enable_suspend=True,
            key_bindings=self._keys(),
            bottom_toolbar=lambda: AGAIN if self._is_warned else self._status,
            style=STYLE,
            color_depth=ColorDepth.MONOCHROME if os.environ.get("NO_COLOR") else None,
            input=input,
            output=output,
        )
        self._session.default_buffer.on_text_changed += self._typed

    def ask(self, status: str, default: str = "") -> str | None:
        """The next message; None at Ctrl-D. `status` is shown below it, `default` is there to be edited.

        Raises: KeyboardInterrupt at the second Ctrl-C on an empty line.
        """
        self._status, self._is_warned = status, False
        try:
            return self._session.prompt(default=default)
        except EOFError:
            return None

    def _typed(self, buffer: Buffer) -> None:
        self._is_warned = False

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def send(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
                buffer.delete_before_cursor()
                buffer.newline(copy_margin=False)
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def newline(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        @keys.add("c-c")
        @keys.add("<sigint>")
        def clear(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            elif self._is_warned:
                event.app.exit(exception=KeyboardInterrupt, style="class:aborting")
            else:
                self._is_warned = True

        return keys
