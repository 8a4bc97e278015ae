"""A conversation on one cache: every turn feeds only what is new."""

import sys
from contextlib import suppress

from transformers import PreTrainedTokenizerBase

from windlass.cli.session import Session, write
from windlass.cli.terminal import INTERRUPTED, Bar, note, say, speeds
from windlass.core.errors import UsageError
from windlass.engine import generate as engine
from windlass.engine.sampling import Sampling

HELP = "/reset forgets everything, /describe shows the cache, /quit ends"
REPLY = "\u2042reply\u2042"  # stands for a reply in a template; no text has it


class Conversation:
    """Turns a user's lines into the text that the cache is still missing.

    With a chat template, that is the template from the end of the last reply up to the start of the
    next; without one, the line itself, begun on a new line.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._has_template = bool(tokenizer.chat_template)
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self._lines: list[str] = []
        self._ended_with: str = ""

    def replied(self, ended_with: str) -> None:
        """The reply to the last line is in the cache, and so is the text `ended_with` of its last token."""
        self._ended_with = ended_with

    def missing(self, line: str) -> str:
        """The text to feed for `line`.

        Raises: UsageError for a chat template that does not show earlier replies as they were.
        """
        earlier, self._lines = self._lines, [*self._lines, line]
        if not self._has_template:
            return f"\n{line}" if earlier else line
        messages = [message for each in earlier for message in (_message("user", each), _message("assistant", REPLY))]
        text = str(
            self._tokenizer.apply_chat_template(
                [*messages, _message("user", line)], tokenize=False, add_generation_prompt=True
            )
        )
        if not earlier:
            return self._without_start(text)
        _, found, rest = text.rpartition(REPLY)
        if not found:
            raise UsageError("this model's chat template leaves earlier replies out; use `windlass generate`")
        return rest.removeprefix(self._ended_with) if self._ended_with else rest

    def _without_start(self, text: str) -> str:
        """Without the first special token, where the tokenizer adds it by itself."""
        start = self._tokenizer.bos_token
        if start and self._tokenizer("")["input_ids"][:1] == [self._tokenizer.bos_token_id]:
            return text.removeprefix(str(start))
        return text


def chat(session: Session, max_tokens: int, sampling: Sampling) -> int:
    """Answer lines from the terminal or a pipe until /quit or their end; returns the exit code.

    At a terminal Ctrl-C ends a reply, and at an empty line the program; in a pipe it always does.
    """
    is_terminal = sys.stdin.isatty()
    read = _ask if is_terminal else _next_line
    conversation = Conversation(session.tokenizer)
    if is_terminal:
        note(HELP)
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            say("\n")
            return INTERRUPTED
        if line is None or line.strip() == "/quit":
            return 0
        if line.startswith("/"):
            _command(line.strip(), session, conversation)
        elif line.strip():
            code = _turn(session, conversation, line, max_tokens, sampling)
            if code and not is_terminal:
                return code


def _turn(session: Session, conversation: Conversation, line: str, max_tokens: int, sampling: Sampling) -> int:
    prompt = conversation.missing(line)
    with Bar("reading") as bar:
        stream = engine.stream(
            session.model, session.tokenizer, prompt, session.cache, max_tokens, sampling, progress=bar
        )
        code = write(stream, is_shown=True)
    result = stream.result
    is_stopped = result.finish_reason == "stop"
    conversation.replied(str(session.tokenizer.decode(result.tokens[-1:])) if is_stopped else "")
    note(("interrupted; " if code else "") + speeds(result, bar))
    return code


def _command(command: str, session: Session, conversation: Conversation) -> None:
    if command == "/reset":
        session.cache.reset()
        conversation.reset()
        note("the cache is empty")
    elif command == "/describe":
        say(session.cache.describe() + "\n")
    else:
        note(f"{command} is no command; {HELP}")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _ask() -> str | None:
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` its line editing, where there is one
    try:
        return input("> ")
    except EOFError:
        say("\n")
        return None


def _next_line() -> str | None:
    line = sys.stdin.buffer.readline()
    try:
        return line.decode("utf-8").removesuffix("\n").removesuffix("\r") if line else None
    except UnicodeDecodeError:
        raise UsageError("a line on stdin is not UTF-8 text; convert it first") from None
