"""Commands of a chat: lines that begin with a slash."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from textwrap import shorten
from typing import Any, Final

from windlass.cli.chat.dialogue import Dialogue, kept
from windlass.cli.terminal import note, say
from windlass.core.errors import UsageError
from windlass.core.parse import check_max_tokens, did_you_mean

COMMAND: Final = re.compile(r"/([a-z]+|\?)(?:\s+(.*))?", re.DOTALL)
HINT: Final = "/help lists the commands"
KEYS: Final = (
    "A message that begins with a slash and a word has two slashes: //help. /etc/passwd needs none.",
    "Alt-Enter, or \\ at a line's end, begins a new line. A text that is pasted is one message.",
    "Ctrl-C clears the line, or ends a reply. On an empty line twice, or Ctrl-D, it ends the chat.",
)


class EndOfChat(Exception):
    """The user ends the chat."""


@dataclass(frozen=True)
class Command:
    """A command of a chat. `takes` is its argument, in brackets where optional, and `does` its line of help."""

    takes: str
    does: str
    run: Callable[["ChatCommands", str], int | None]


def command_of(line: str) -> tuple[str, str] | None:
    """Name and text of a command, or None for a message. `//` and `/etc/passwd` begin messages, `/word` a command."""
    found = COMMAND.fullmatch(line.strip())
    return None if found is None else (found[1], (found[2] or "").strip())


def message_of(line: str) -> str:
    """A line that is no command, without the slash that says so."""
    return line[1:] if line.startswith("//") else line


class ChatCommands:
    """The commands of one chat, by name. Each takes the text that follows its name."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue

    def obey(self, name: str, text: str) -> int:
        """Run a command. Returns an exit code where its reply was interrupted. An unknown one is reported.

        Raises: WindlassError when it cannot be done, EndOfChat at the end of the chat.
        """
        command = COMMANDS.get(SYNONYMS.get(name, name))
        if command is None:
            note(f"/{name} is no command. {did_you_mean(name, COMMANDS)}{HINT}. //{name} sends it to the model")
        elif text and not command.takes:
            note(f"/{name} takes nothing after it. //{name} ... sends it to the model")
        elif not text and command.takes and not command.takes.startswith("["):
            note(f"/{name} takes {command.takes}: {command.does}")
        else:
            return command.run(self, text) or 0
        return 0

    def help(self, text: str) -> None:
        width = max(len(f"/{name} {command.takes}") for name, command in COMMANDS.items())
        for name, command in COMMANDS.items():
            note(f"{f'/{name} {command.takes}':{width}}  {command.does}")
        note(f"Also {', '.join(f'/{name} for /{other}' for name, other in SYNONYMS.items())}.")
        for line in KEYS:
            note(line)

    def save(self, text: str) -> None:
        path = Path(text).expanduser()
        self._dialogue.save(path)
        note(f"{path} written. /load {path}, or --load {path}, continues from it")

    def load(self, text: str) -> None:
        note(self._dialogue.load(Path(text).expanduser()))

    def undo(self, text: str) -> None:
        note(self._dialogue.undo())

    def retry(self, text: str) -> int:
        return self._dialogue.retry()

    def system(self, text: str) -> None:
        if not text:
            told = self._dialogue.conversation.system
            note("there is no system text. /system TEXT sets one" if told is None else told)
            return
        is_read_again = self._dialogue.tell(None if text == "-" else text)
        note("the system text is changed" + (". The conversation was read again under it" if is_read_again else ""))

    def history(self, text: str) -> None:
        conversation = self._dialogue.conversation
        if conversation.system is not None:
            say(f"     system  {_gist(conversation.system)}\n")
        for number, message in enumerate(conversation.messages, 1):
            say(f"{number:4} {'you' if number % 2 else 'model':7} {_gist(message)}\n")

    def edit(self, text: str) -> None:
        digits, *rest = text.split(maxsplit=1)
        number = _number("/edit", "a message", digits)
        conversation = self._dialogue.conversation
        conversation.turn_of(number)
        if rest:
            note(self._dialogue.edit(number, rest[0]))
        else:
            self._dialogue.draft = f"/edit {number} {conversation.messages[number - 1]}"

    def rewind(self, text: str) -> int:
        return self._dialogue.rewind(_number("/rewind", "messages", text))

    def branch(self, text: str) -> None:
        if text:
            note(self._dialogue.branch(text))
            return
        here = self._dialogue.here
        branches = {**self._dialogue.branches, here.conversation.branch: here}
        for name, branch in sorted(branches.items()):
            say(f"{'*' if branch is here else ' '} {name:12} {branch.told}\n")

    def set(self, text: str) -> None:
        name, *values = re.split(r"[\s=]+", text, maxsplit=1)
        name, value = name.strip("-").replace("-", "_"), "".join(values)
        settings = self._settings()
        if name and name not in settings:
            raise UsageError(f"/set knows no {name!r}. {did_you_mean(name, settings)}It sets {', '.join(settings)}")
        if value:
            self._set(name, value)
        for each, now in self._settings().items():
            if name in ("", each):
                note(f"{each} {now}")

    def tokens(self, text: str) -> None:
        turns, cache = self._dialogue.conversation.turns, self._dialogue.cache
        say(f"seen   {cache.tokens_seen[0]:,} tokens, {len(turns):,} turn{'' if len(turns) == 1 else 's'}\n")
        budget = "no budget" if cache.budget is None else f"a budget of {cache.budget:,}"
        say(f"kept   {kept(cache):,} in a layer, under {budget}\n")
        if turns:
            say(f"latest {len(turns[-1].prompt):,} of the message, {len(turns[-1].tokens):,} of the reply\n")

    def cache(self, text: str) -> None:
        say(self._dialogue.cache.describe() + "\n")

    def reset(self, text: str) -> None:
        self._dialogue.reset()
        note("the cache is empty")

    def resume(self, text: str) -> None:
        if text not in ("", "no"):
            raise UsageError(f"/resume takes nothing, or no, got {text!r}")
        found = self._dialogue.journal.found()
        if found is None:
            note("there is no conversation to continue")
            return
        path, chat = found
        if not text:
            note(self._dialogue.take(chat))
            if chat.pending is not None:
                note(f"its last message has no reply, send it again: {chat.pending.line}")
        path.unlink(missing_ok=True)
        if text:
            note(f"the conversation of {len(chat.turns)} turns is deleted")

    def quit(self, text: str) -> None:
        raise EndOfChat

    def _numbers(self) -> dict[str, Any]:
        return {"max_tokens": self._dialogue.max_tokens, **vars(self._dialogue.sampling)}

    def _settings(self) -> dict[str, Any]:
        return {**self._numbers(), "positions": self._dialogue.cache.positions}

    def _set(self, name: str, value: str) -> None:
        """Set options. Raises: UsageError, and changes nothing, for a value out of range or of another kind."""
        if name == "positions":
            self._dialogue.cache.positions = value
            return
        kind = type(self._numbers()[name])
        try:
            number = kind(value)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise UsageError(f"{name} must be {wanted}, got {value!r}") from None
        if name == "max_tokens":
            self._dialogue.max_tokens = check_max_tokens(number)
        else:
            self._dialogue.sampling = replace(self._dialogue.sampling, **{name: number})


def _number(command: str, of: str, text: str) -> int:
    """A number of messages. Raises: UsageError for other text."""
    if not re.fullmatch(r"\d{1,9}", text):
        raise UsageError(f"{command} takes the number of {of}, got {text!r}. /history lists the messages")
    return int(text)


def _gist(text: str) -> str:
    """The beginning of a text, in one line."""
    return shorten(text, max(get_terminal_size().columns - 14, 20), placeholder=" ...")


COMMANDS: Final = {
    "help": Command("", "lists the commands", ChatCommands.help),
    "save": Command("FILE", "saves the conversation", ChatCommands.save),
    "load": Command("FILE", "continues a saved conversation instead of this one", ChatCommands.load),
    "history": Command("", "lists the messages by number", ChatCommands.history),
    "edit": Command(
        "N [TEXT]", "gives message N another text, and reads only that (no TEXT: offers the old one)", ChatCommands.edit
    ),
    "rewind": Command("N", "goes back to the first N messages, answers the last if it is yours", ChatCommands.rewind),
    "branch": Command(
        "[NAME]", "goes on in a copy, or in branch NAME where it exists, or lists all", ChatCommands.branch
    ),
    "undo": Command("", "takes back the last message and its reply", ChatCommands.undo),
    "retry": Command("", "writes the last reply again, with another seed", ChatCommands.retry),
    "system": Command("[TEXT]", "changes the system text (-: none) and reads the rest again", ChatCommands.system),
    "set": Command(
        "[NAME VALUE]", "changes temperature, max_tokens and others, without arguments lists them", ChatCommands.set
    ),
    "tokens": Command("", "counts tokens: seen, kept, of the latest turn", ChatCommands.tokens),
    "cache": Command("", "describes the cache", ChatCommands.cache),
    "reset": Command("", "forgets everything but the system text", ChatCommands.reset),
    "resume": Command(
        "[no]", "continues an unfinished conversation, or the last one (no: deletes it)", ChatCommands.resume
    ),
    "quit": Command("", "ends the chat", ChatCommands.quit),
}
SYNONYMS: Final = {"?": "help", "describe": "cache", "exit": "quit"}
