"""A conversation with a model on one cache. Every turn feeds only new tokens, and the newest can be undone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from windlass.cli.chat import conversation as chat_file
from windlass.cli.chat.conversation import UNDO, Conversation, Exchange, Journal, SavedChat
from windlass.cli.session import Choices, Session, keep_system, write
from windlass.cli.terminal import Bar, note, per_s, speeds
from windlass.core.errors import UsageError, WindlassError
from windlass.core.files import check_writable, replacing
from windlass.core.parse import in_units
from windlass.engine import generate
from windlass.engine.generate import Stream
from windlass.engine.sampling import Result, Sampling
from windlass.engine.templates import of_system
from windlass.hf.forward import vocabulary_of
from windlass.hf.kv_cache import KVCache

Show = Callable[[Stream], int]
MAX_SEED: Final = 2**62


class Dialogue:
    """Actions of the lines and commands of a chat. The cache is made to hold the conversation's ids before a turn.

    `show` shows the pieces of a reply on a screen with a status line, and returns an exit code where it was
    interrupted. Without it they go to stdout unchanged, and a line to stderr after each reply.

    Raises: UsageError for a cache without known token ids, or a chat template that fails, or has no place for `system`.
    """

    def __init__(
        self,
        session: Session,
        max_tokens: int,
        sampling: Sampling,
        journal: Journal,
        system: str | None = None,
        show: Show | None = None,
        stop: list[str] | None = None,
        speculate: str | None = None,
    ) -> None:
        self.session, self.max_tokens, self.sampling, self._stop = session, max_tokens, sampling, stop
        self._speculate = speculate
        self._choices = Choices(session.cache, session.given)
        self.journal, self._show = journal, show
        self.latest: Result | None = None
        self._is_cut_told = False
        if session.cache.tokens is None:
            raise UsageError("the token ids of this prompt cache are not known. Use it with `windlass generate`")
        self.conversation = Conversation(session.tokenizer, session.cache.tokens[0], system)
        self.conversation.missing("?")

    @property
    def cache(self) -> KVCache:
        """The cache that holds the text."""
        return self.session.cache

    def answer(self, line: str) -> int:
        """Write the reply to `line`. Returns an exit code where it was interrupted.

        An interrupted reply is kept up to the interrupt. Before its first token, an interrupt or an error removes the
        message.
        """
        text, prompt = self.conversation.encoded(line)
        before = self.conversation.ids
        self.catch_up()
        asked = Exchange(line, "", prompt)
        self.journal.add(self.conversation, chat_file.asked(asked))
        try:
            with Bar("reading", len(prompt)) as bar:
                stream = generate.stream(
                    self.session.model,
                    self.session.tokenizer,
                    text,
                    self.cache,
                    self.max_tokens,
                    self.sampling,
                    self._stop,
                    bar,
                    self._speculate,
                )
                code = write(stream, is_shown=True) if self._show is None else self._show(stream)
        except BaseException:
            self.journal.add(self.conversation, UNDO)
            raise
        result = stream.result
        tokens = self._held()[len(before) + len(prompt) :]
        if tokens:
            is_stopped = result.finish_reason == "stop"
            ended_with = str(self.session.tokenizer.decode(tokens[-1:])) if is_stopped else ""
            self.latest = result
            self.conversation.turns.append(replace(asked, reply=result.text, tokens=tokens, ended_with=ended_with))
            self.journal.add(self.conversation, chat_file.replied(self.conversation.turns[-1]))
        else:
            self.journal.add(self.conversation, UNDO)
        notes = ["interrupted"] * bool(code)
        if self._show is None:
            notes.append(speeds(result, bar))
        elif result.finish_reason == "length" and not self._is_cut_told:
            self._is_cut_told = True
            notes.append(
                f"ended at max_tokens {self.max_tokens} (/set max_tokens {2 * self.max_tokens} lets it write more)"
            )
        if not tokens:
            notes.append("the message was taken back")
        if notes:
            note(", ".join(notes))
        self._choices.tell()
        return code

    def undo(self) -> str:
        """Undo the last message and its reply. Returns a report. Raises: UsageError when there is none."""
        self._take_last()
        self.journal.add(self.conversation, UNDO)
        is_read_again = self.catch_up()
        left = _turns(len(self.conversation.turns))
        how = "the text before it was read again" if is_read_again else "rolled back"
        return f"the last turn is taken back: {how}, {left} left"

    def retry(self) -> int:
        """Write the last reply anew, under another seed where it is drawn. Raises: UsageError when there is none."""
        last = self._take_last()
        self.journal.add(self.conversation, UNDO)
        if self.sampling.temperature == 0.0:
            note("windlass: note: temperature 0 writes the same reply again. Try /set temperature 0.8")
        else:
            self.sampling = replace(self.sampling, seed=(self.sampling.seed + 1) % MAX_SEED)
        turns = len(self.conversation.turns)
        try:
            return self.answer(last.line)
        finally:
            if len(self.conversation.turns) == turns:  # no other turn replaced it
                self.conversation.turns.append(last)
                self.journal.begin(self.conversation)

    def reset(self) -> None:
        """Forget everything but the system text."""
        self.cache.reset()
        system = self.conversation.system
        self.conversation = Conversation(self.session.tokenizer, system=system)
        self.journal.begin(self.conversation)

    def tell(self, system: str | None) -> bool:
        """Change the system text. Returns True if the conversation was read again.

        Raises: UsageError, and changes nothing.
        """
        self.conversation.tell(system)
        self.journal.begin(self.conversation)
        return self.catch_up()

    def save(self, path: Path) -> None:
        """Write the conversation to `path`, and the cache beside it.

        Raises: UsageError where another file exists, and WindlassError when one cannot be written.
        """
        beside = cache_beside(path)
        check_writable(path, "conversation")
        if path.exists() and path.stat().st_size:
            chat_file.read(path)  # another kind of file is not replaced
        self.catch_up()
        if self.conversation.ids:
            self.cache.save(beside, tokenizer=self.session.tokenizer)
        try:
            with replacing(path) as temporary:
                lines = chat_file.lines_of(self.journal.origin, self.conversation)
                temporary.write_bytes(lines.encode("utf-8", "replace"))
        except OSError as error:
            raise UsageError(f"conversation {path} cannot be written: {error.strerror}. Save elsewhere") from None

    def load(self, path: Path) -> str:
        """Continue the conversation that `save` wrote to `path`. Returns a report.

        The text is read again where the cache beside it does not hold it.

        Raises: UsageError, and changes nothing, for a file of another model or without a conversation.
        """
        chat = chat_file.read(path)
        self.check_own(chat, path)
        beside, cache = cache_beside(path), None
        if beside.exists():
            try:
                cache = KVCache.load(beside, self.session.model, tokenizer=self.session.tokenizer)
            except WindlassError as error:
                note(f"windlass: note: {error}")
        return self.take(chat, cache)

    def take(self, chat: SavedChat, cache: KVCache | None = None) -> str:
        """Continue a saved conversation, on `cache` where that holds its text. Returns a report."""
        conversation = Conversation(self.session.tokenizer, chat.start, chat.system)
        conversation.turns = list(chat.turns)
        if not chat.is_exact or max(conversation.ids, default=0) >= vocabulary_of(self.session.model):
            conversation.turns = [replace(turn, prompt=[], tokens=[]) for turn in chat.turns]
            conversation.encode_again()
        if cache is not None and cache.tokens == [conversation.ids]:
            self.session = replace(self.session, cache=cache)
            self._choices.cache = cache
        self.conversation = conversation
        self.journal.begin(conversation)
        is_read_again = self.catch_up()
        told = f"{_turns(len(conversation.turns))}, {len(conversation.ids):,} tokens"
        if chat.skipped:
            told += f", {chat.skipped} line{'s' * (chat.skipped > 1)} of the file could not be read"
        return told + (", its text was read again" if is_read_again else "")

    def catch_up(self) -> bool:
        """Make the cache hold exactly the conversation. Returns True if any of it was read again."""
        wanted, held = self.conversation.ids, self._held()
        if held[: len(wanted)] == wanted and len(held) > len(wanted) > 0:
            try:
                self.cache.rollback(len(held) - len(wanted))
                return False
            except UsageError:  # more than the cache can roll back
                self.cache.reset()
        elif held != wanted[: len(held)]:
            self.cache.reset()
        keep_system(self.cache, self.session.tokenizer, of_system(self.conversation.system))
        rest = wanted[len(self._held()) :]
        if rest:
            with Bar("reading again", len(rest)) as bar:
                generate.prefill(self.session.model, self.cache, [rest], bar)
        return bool(rest)

    def status(self) -> str:
        """One line: tokens seen and kept, bytes, and the speed of the latest reply."""
        cache = self.cache
        told = f"{cache.tokens_seen[0]:,} tokens seen, {kept(cache):,} kept, {in_units(cache.bytes_held)}"
        return told if self.latest is None else f"{told}, {per_s(self.latest.decode_tokens_per_s)}"

    def _held(self) -> list[int]:
        """The ids of the text in the cache."""
        return (self.cache.tokens or [[]])[0]

    def _take_last(self) -> Exchange:
        if not self.conversation.turns:
            raise UsageError("there is no turn to take back. The conversation has not begun")
        return self.conversation.turns.pop()

    def check_own(self, chat: SavedChat, path: Path) -> None:
        """Raises: UsageError for a conversation with another model."""
        ours = self.journal.origin
        if chat.origin.fingerprint != ours.fingerprint:
            raise UsageError(
                f"conversation {path} was held with {chat.origin.model}, this is {ours.model}: config, weights or "
                "dtype differ. Load it with that model"
            )


def cache_beside(path: Path) -> Path:
    """Where the cache of a conversation that is saved in `path` is."""
    return path.with_name(path.name + ".cache")


def kept(cache: KVCache) -> int:
    """Most tokens that a layer holds now."""
    return max((layer.table.occupancy_bound for layer in cache.layers_to_read if not layer.is_empty), default=0)


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"
