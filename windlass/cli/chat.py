"""Chat: lines from a terminal or a pipe, each a message to the model or a command."""

import shutil
import sys
from datetime import datetime
from pathlib import Path

from windlass.cli import chat_file, state
from windlass.cli.chat_file import Origin
from windlass.cli.commands import COMMANDS, HINT, Commands, Ended, command_of, message_of
from windlass.cli.dialogue import Dialogue, cache_beside
from windlass.cli.journal import Journal
from windlass.cli.keyboard import unechoed
from windlass.cli.loading import INTERRUPTED
from windlass.cli.options import ChatArguments
from windlass.cli.session import Session
from windlass.cli.terminal import note, say
from windlass.core.errors import UsageError, WindlassError
from windlass.core.files import BYTE_ORDER_MARK
from windlass.engine.generate import Stream
from windlass.engine.sampling import Sampling
from windlass.hf.fingerprint import fingerprint


def chat(
    session: Session,
    max_tokens: int,
    sampling: Sampling,
    arguments: ChatArguments,
    stop: list[str] | None = None,
    system: str | None = None,
) -> int:
    """Answer lines from the terminal or a pipe until /quit or their end; returns the exit code.

    At a terminal Ctrl-C clears the line or ends a reply, and what cannot be done is told; in a pipe either ends the
    chat. A pipe gets no editing, no colours and no journal.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    folder = _folder() if is_terminal and arguments.has_history else None
    source = Path(str(session.model.name_or_path))  # a folder, also one like `.`, or a name on the hub
    origin = Origin((source.resolve() if source.exists() else source).name, fingerprint(session.model))
    journal = Journal(None if folder is None else folder / "chats", origin)
    dialogue = Dialogue(session, max_tokens, sampling, journal, system, show_reply if is_terminal else None, stop)
    if arguments.conversation is not None:
        saved = chat_file.read(arguments.conversation)
        dialogue.check_own(saved, arguments.conversation)
        with unechoed():
            note(dialogue.take(saved, session.cache))
    if not dialogue.conversation.has_template:
        note("windlass: note: this model has no chat template: it goes on with your text, it does not answer")
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
        raise UsageError("both --load and --prompt-cache were given; a conversation has a cache of its own, use one")
    chat_file.read(arguments.conversation)
    beside = cache_beside(arguments.conversation)
    return beside if beside.exists() else None


def _from_pipe(dialogue: Dialogue) -> int:
    while (line := _next_line()) is not None:
        try:
            code = _do(dialogue, line)
        except Ended:
            break
        if code:
            return code
    return 0


def at_terminal(dialogue: Dialogue, folder: Path | None) -> int:
    """Answer what is typed, whose history is kept in `folder`; returns the exit code. What is wrong is told."""
    from windlass.cli.screen import Screen

    screen = Screen(_history(folder), [f"/{name}" for name in COMMANDS])
    note(f"{HINT}; Ctrl-D ends the chat")
    offer(dialogue.journal)
    while True:
        try:
            line = screen.ask(dialogue.status())
        except KeyboardInterrupt:
            return INTERRUPTED
        try:
            if line is None:
                return 0
            with unechoed():
                _do(dialogue, line)
        except Ended:
            return 0
        except KeyboardInterrupt:
            note("interrupted")
        except WindlassError as error:
            note(f"windlass: error: {' '.join(str(error).split())}")


def _do(dialogue: Dialogue, line: str) -> int:
    """Obey a command, or answer a message; returns an exit code where the reply was interrupted."""
    line = line.removeprefix(BYTE_ORDER_MARK)
    command = command_of(line)
    if command is not None:
        Commands(dialogue).obey(*command)
        return 0
    return dialogue.answer(message_of(line)) if line.strip() else 0


def show_reply(stream: Stream) -> int:
    """Show a reply with its words whole at the screen's edge; returns the exit code. Ctrl-C ends the reply alone."""
    from windlass.cli.page import Page

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
        turns = len(saved.turns) + (saved.pending is not None)
        note(
            f"an unfinished conversation of {turns} turn{'' if turns == 1 else 's'} from {since} is there; "
            "/resume goes on with it"
        )


def _folder() -> Path | None:
    try:
        return state.state_folder()
    except OSError as error:
        note(f"windlass: note: no history is kept: {error}")
        return None


def _history(folder: Path | None) -> Path | None:
    if folder is None:
        return None
    try:
        return state.private_file(folder / "history")
    except OSError as error:
        note(f"windlass: note: no history is kept in {folder}: {error.strerror}")
        return None


def _next_line() -> str | None:
    line = sys.stdin.buffer.readline()
    try:
        return line.decode("utf-8").removesuffix("\n").removesuffix("\r") if line else None
    except UnicodeDecodeError:
        raise UsageError("a line on stdin is not UTF-8 text; convert it first") from None
