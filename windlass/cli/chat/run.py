"""Chat: lines from a terminal or a pipe, each a message to the model or a command."""

import os
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
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

from windlass.cli import terminal
from windlass.cli.chat import conversation
from windlass.cli.chat.commands import COMMANDS, HINT, ChatCommands, EndOfChat, command_of, message_of
from windlass.cli.chat.conversation import Journal, Origin
from windlass.cli.chat.dialogue import Dialogue, cache_beside
from windlass.cli.options import ChatArguments
from windlass.cli.session import PromptInput, Session
from windlass.cli.terminal import INTERRUPTED, hide_keys, note, say
from windlass.core.errors import UsageError, WindlassError
from windlass.core.files import BYTE_ORDER_MARK
from windlass.engine.generate import Stream
from windlass.engine.speculate import load_drafts
from windlass.hf.model_facts import shown_name
from windlass.hf.weights import fingerprint


def chat(session: Session, asked: PromptInput, arguments: ChatArguments) -> int:
    """Answer lines from the terminal or a pipe until /quit or their end. Returns the exit code.

    At a terminal, Ctrl-C clears the line or ends a reply, and an error is reported. In a pipe, either ends the chat. A
    pipe gets no editing, no colours and no journal.
    """
    if arguments.conversation is not None and asked.system is not None:
        raise UsageError("both --load and --system were given. A conversation has its own, and /system changes it")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    folder = _folder() if is_terminal and arguments.has_history else None
    origin = Origin(Path(shown_name(str(session.model.name_or_path))).name, fingerprint(session.model))
    journal = Journal(None if folder is None else folder / "chats", origin)
    dialogue = Dialogue(
        session=session,
        max_tokens=asked.max_tokens,
        sampling=asked.sampling,
        journal=journal,
        system=asked.system,
        show=show_reply if is_terminal else None,
        stop=asked.stop,
        speculate=load_drafts(asked.speculate, session.model, session.tokenizer, session.cache.options),
    )
    if arguments.conversation is not None:
        saved = conversation.read(arguments.conversation)
        dialogue.check_own(saved, arguments.conversation)
        with hide_keys():
            note(dialogue.take(saved, session.cache, arguments.conversation))
    if not dialogue.conversation.has_template:
        note("windlass: note: this model has no chat template: it continues your text and does not answer")
    code = at_terminal(dialogue, folder) if is_terminal else _from_pipe(dialogue)
    journal.close()
    return code


def cache_to_load(arguments: ChatArguments, prompt_cache: Path | None) -> Path | None:
    """The prompt cache that a chat begins with: the one given, or that of the conversation.

    Raises: UsageError for both, or a conversation that cannot be read.
    """
    if arguments.conversation is None:
        return prompt_cache
    if prompt_cache is not None:
        raise UsageError("both --load and --prompt-cache were given. A conversation has a cache of its own, use one")
    conversation.read(arguments.conversation)
    beside = cache_beside(arguments.conversation)
    return beside if beside.exists() else None


def _from_pipe(dialogue: Dialogue) -> int:
    while (line := _next_line()) is not None:
        try:
            code = _do(dialogue, line)
        except EndOfChat:
            break
        if code:
            return code
        if dialogue.draft:
            raise UsageError("/edit needs the new text here: /edit 3 TEXT. At a terminal it offers the old one")
    return 0


def at_terminal(dialogue: Dialogue, folder: Path | None) -> int:
    """Answer typed lines, with their history in `folder`. Returns the exit code. Errors are reported."""

    screen = Screen(_history(folder), [f"/{name}" for name in COMMANDS])
    note(f"{HINT}. Ctrl-D ends the chat")
    offer(dialogue.journal)
    while True:
        try:
            draft, dialogue.draft = dialogue.draft, ""
            line = screen.ask(dialogue.status(), draft)
        except KeyboardInterrupt:
            return INTERRUPTED
        try:
            if line is None:
                return 0
            with hide_keys():
                _do(dialogue, line)
        except EndOfChat:
            return 0
        except KeyboardInterrupt:
            note("interrupted")
        except WindlassError as error:
            note(f"windlass: error: {' '.join(str(error).split())}")


def _do(dialogue: Dialogue, line: str) -> int:
    """Obey a command, or answer a message. Returns an exit code where the reply was interrupted."""
    line = line.removeprefix(BYTE_ORDER_MARK)
    command = command_of(line)
    if command is not None:
        return ChatCommands(dialogue).obey(*command)
    return dialogue.answer(message_of(line)) if line.strip() else 0


def show_reply(stream: Stream) -> int:
    """Show a reply, wrapped at whole words. Returns the exit code. Ctrl-C ends only the reply."""
    from windlass.cli.terminal import Page

    page = Page(say, lambda: shutil.get_terminal_size().columns)
    try:
        for piece in stream:
            page.push(piece)
    except KeyboardInterrupt:
        page.cut()
        return INTERRUPTED
    page.end()
    return 0


def offer(journal: Journal) -> None:
    """Tell of a conversation that a crash has ended, where there is one."""
    found = journal.unfinished()
    if found is not None:
        _, saved = found
        is_today = saved.time.date() == datetime.now().date()
        since = saved.time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M")
        turns = max(len(each.turns) + (each.pending is not None) for each in (saved, *saved.others))
        note(
            f"an unfinished conversation of {turns} turn{'' if turns == 1 else 's'} from {since} exists. "
            "/resume continues it"
        )


def _folder() -> Path | None:
    try:
        return terminal.state_folder()
    except OSError as error:
        note(f"windlass: note: no history is kept: {error}")
        return None


def _history(folder: Path | None) -> Path | None:
    if folder is None:
        return None
    try:
        return terminal.private_file(folder / "history")
    except OSError as error:
        note(f"windlass: note: no history is kept in {folder}: {error.strerror}")
        return None


def _next_line() -> str | None:
    line = sys.stdin.buffer.readline()
    try:
        return line.decode("utf-8").removesuffix("\n").removesuffix("\r") if line else None
    except UnicodeDecodeError:
        raise UsageError("a line on stdin is not UTF-8 text. Convert it first") from None


STYLE = Style.from_dict({"": "ansigreen", "prompt": "ansigreen bold", "bottom-toolbar": "noreverse ansibrightblack"})
AGAIN = "Ctrl-C again, or Ctrl-D, ends the chat"


class Screen:
    """Asks for messages. Enter sends one, Alt-Enter or a backslash at the end begins a new line.

    Pasted text is one message, whatever lines it has. `history` is a file (None: no history). `commands` complete with
    Tab. Without `input` and `output` the terminal is used.
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
        """The next message, or None at Ctrl-D. The line begins as `default`, above `status`.

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
