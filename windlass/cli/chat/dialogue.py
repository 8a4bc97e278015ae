"""A conversation with a model on one cache. Turns and edits of earlier messages feed only new tokens."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from windlass.cache.edits import holds_all
from windlass.cli.chat import conversation as chat_file
from windlass.cli.chat.conversation import UNDO, Conversation, Exchange, Journal, SavedChat, checked_branch
from windlass.cli.session import Choices, Session, keep_system, write
from windlass.cli.terminal import Bar, note, per_s, speeds
from windlass.core.errors import UsageError, WindlassError
from windlass.core.files import check_writable, replacing
from windlass.core.parse import in_units
from windlass.engine import generate
from windlass.engine.generate import Stream
from windlass.engine.prefill import revise
from windlass.engine.sampling import Result, Sampling
from windlass.engine.speculate import Speculate
from windlass.engine.templates import of_system
from windlass.hf.forward import vocabulary_of
from windlass.hf.kv_cache import KVCache

Show = Callable[[Stream], int]
MAX_SEED: Final = 2**62


@dataclass(frozen=True)
class Reading:
    """The number of tokens that a cache read to hold a conversation. `is_anew`: all of them, once it was emptied.

    `has_lost`: because it has evicted some of them, and not because it takes no edits.
    """

    tokens: int = 0
    is_anew: bool = False
    has_lost: bool = False

    @property
    def told(self) -> str:
        """A report for the user."""
        if not self.is_anew:
            return f"{self.tokens:,} token{'' if self.tokens == 1 else 's'} read" if self.tokens else "nothing was read"
        why = "the cache has evicted some" if self.has_lost else "this model, or an option of the cache, takes no edits"
        return f"all {self.tokens:,} tokens were read again, because {why}"


@dataclass
class Branch:
    """A conversation that is left for now, with its cache, and the cache as it was before its last message."""

    conversation: Conversation
    cache: KVCache | None = None
    before: KVCache | None = None

    @property
    def told(self) -> str:
        """A line of a list of branches."""
        caches = [each for each in (self.cache, self.before) if each is not None]
        size = sum(each.bytes_held + each.recall_bytes for each in caches)
        messages = 2 * len(self.conversation.turns)
        return f"{messages:,} messages, {len(self.conversation.ids):,} tokens, {in_units(size)}"


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
        speculate: Speculate = None,
    ) -> None:
        self.session, self.max_tokens, self.sampling, self._stop = session, max_tokens, sampling, stop
        self._speculate = speculate
        self._choices = Choices(session.cache, session.given)
        self.journal, self._show = journal, show
        self.latest: Result | None = None
        self.draft = ""
        """A text that the next line begins with, for the user to change."""
        self.branches: dict[str, Branch] = {}
        """Branches that are left for now, by name."""
        self._before: KVCache | None = None  # the cache before the last message, where that cannot be rolled back
        self._is_cut_told = False
        if session.cache.tokens is None:
            raise UsageError("the token ids of this prompt cache are not known. Use it with `windlass generate`")
        self.conversation = Conversation(session.tokenizer, session.cache.tokens[0], system)
        self.conversation.missing("?")

    @property
    def cache(self) -> KVCache:
        """The cache that holds the text."""
        return self.session.cache

    @property
    def here(self) -> Branch:
        """The branch that goes on."""
        return Branch(self.conversation, self.cache, self._before)

    def answer(self, line: str) -> int:
        """Write the reply to `line`. Returns an exit code where it was interrupted.

        An interrupted reply is kept up to the interrupt. Before its first token, an interrupt or an error removes the
        message.
        """
        text, prompt = self.conversation.encoded(line)
        before = self.conversation.ids
        self.catch_up()
        self._keep_before(len(prompt) + self.max_tokens)
        asked = Exchange(line, "", prompt)
        self.journal.add(self.conversation, chat_file.asked(asked))
        try:
            with Bar("reading", len(prompt)) as bar:
                stream = generate.stream(
                    self.session.model,
                    self.session.tokenizer,
                    text,
                    self.cache,
                    max_tokens=self.max_tokens,
                    sampling=self.sampling,
                    stop=self._stop,
                    progress=bar,
                    speculate=self._speculate,
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
        reading = self.catch_up()
        left = _turns(len(self.conversation.turns))
        return f"the last turn is taken back: {reading.told if reading.tokens else 'rolled back'}, {left} left"

    def rewind(self, messages: int) -> int:
        """Go back to the first `messages`, and answer the last of them if it is of the user.

        Returns an exit code where the reply was interrupted. Raises: UsageError where there are fewer.
        """
        turns, at = self.conversation.turns, messages // 2
        if messages:
            self.conversation.turn_of(messages)
        line = turns[at].line if messages % 2 else None
        del turns[at:]
        self.journal.begin(self.conversation)
        note(f"{_turns(at)} left, {self.catch_up().told}")
        return 0 if line is None else self.answer(line)

    def edit(self, message: int, text: str) -> str:
        """Replace the text of a message, and move the tokens behind it. Returns a report.

        Raises: UsageError, and changes nothing, for a message that is not there, or a chat template that fails.
        """
        self.conversation.edit(message, text)
        self.journal.begin(self.conversation)
        return f"message {message} is changed, {self.catch_up().told}"

    def branch(self, name: str) -> str:
        """Go on in a copy of the conversation, or in the branch that has this name. Returns a report.

        Raises: UsageError for a name that a file could not have.
        """
        checked_branch(name)
        if name == self.conversation.branch:
            return f"this is branch {name}"
        left = self.here
        found = self.branches.pop(name, None)
        if found is None:
            self.catch_up()
            cache, before = copy.deepcopy((self.cache, self._before))
            entered = Branch(self.conversation.copied(name), cache, before)
        else:
            entered = found
        self.branches[left.conversation.branch] = left
        self._enter(entered)
        self.journal.begin(self.conversation)
        reading, how = self.catch_up(), "copied" if found is None else "goes on"
        read = f", {reading.told}" if reading.tokens else ""
        return f"branch {name} {how}: {entered.told}{read}. /branch {left.conversation.branch} goes back"

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
        """Forget everything but the system text, and other branches."""
        self.cache.reset()
        self._before = None
        system, branch = self.conversation.system, self.conversation.branch
        self.conversation = Conversation(self.session.tokenizer, system=system, branch=branch)
        self.journal.begin(self.conversation)

    def tell(self, system: str | None) -> bool:
        """Change the system text. Returns True if the conversation was read again, as all of it follows that text.

        Raises: UsageError, and changes nothing.
        """
        self.conversation.tell(system)
        self.journal.begin(self.conversation)
        return self.catch_up(is_edit=False).tokens > 0

    def save(self, path: Path) -> None:
        """Write the conversation to `path`, and the cache beside it.

        Raises: UsageError where another file exists, and WindlassError when one cannot be written.
        """
        check_writable(path, "conversation")
        if path.exists() and path.stat().st_size:
            chat_file.read(path)  # another kind of file is not replaced
        self.catch_up()
        others = {cache_beside(path, name): each.cache for name, each in self.branches.items()}
        for beside, cache in {cache_beside(path): self.cache, **others}.items():
            if cache is not None and any(cache.tokens_seen):
                cache.save(beside, tokenizer=self.session.tokenizer)
        conversations = [*(each.conversation for each in self.branches.values()), self.conversation]
        try:
            with replacing(path) as temporary:
                lines = "".join(chat_file.lines_of(self.journal.origin, each) for each in conversations)
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
        return self.take(chat, self._cache_in(cache_beside(path)), path)

    def take(self, chat: SavedChat, cache: KVCache | None = None, path: Path | None = None) -> str:
        """Continue a saved conversation, on `cache` where that holds its text. Returns a report.

        `path` is its file, which may have the caches of its branches beside it.
        """
        conversation, branches = self._restored(chat), [Branch(self._restored(other)) for other in chat.others]
        for each in branches:
            found = None if path is None else self._cache_in(cache_beside(path, each.conversation.branch))
            each.cache = found if found is not None and found.tokens == [each.conversation.ids] else None
        self.branches = {each.conversation.branch: each for each in branches}
        is_held = cache is not None and cache.tokens == [conversation.ids]
        self._enter(Branch(conversation, cache if is_held else self.cache))
        for each in (*branches, self.here):
            self.journal.begin(each.conversation)
        reading = self.catch_up(is_edit=False)
        told = f"{_turns(len(conversation.turns))}, {len(conversation.ids):,} tokens"
        if self.branches:
            told += f", branch {chat.branch} beside {', '.join(sorted(self.branches))}"
        if chat.skipped:
            told += f", {chat.skipped} line{'s' * (chat.skipped > 1)} of the file could not be read"
        return told + (", its text was read again" if reading.tokens else "")

    def catch_up(self, is_edit: bool = True) -> Reading:
        """Make the cache hold exactly the conversation, and read no token again where the cache permits.

        `is_edit`: its tokens may be moved, as the text in the cache is that of the conversation before a change.
        """
        wanted, held = self.conversation.ids, self._held()
        if not wanted:
            self.cache.reset()
            keep_system(self.cache, self.session.tokenizer, of_system(self.conversation.system))
            return Reading()
        is_begun = held == wanted[: len(held)]
        is_cut = not is_begun and held[: len(wanted)] == wanted
        has_lost = is_cut and not self._can_cut
        if not is_begun and is_edit and not (is_cut and self._rolled_back(wanted)) and not has_lost:
            with Bar("reading", 0) as bar:
                tokens = revise(self.session.model, self.cache, wanted, bar)
            if tokens is not None:
                return Reading(tokens)
        is_anew = self._held() != wanted[: len(self._held())]
        if is_anew:
            self.cache.reset()
        keep_system(self.cache, self.session.tokenizer, of_system(self.conversation.system))
        rest = wanted[len(self._held()) :]
        if rest:
            with Bar("reading again", len(rest)) as bar:
                generate.prefill(self.session.model, self.cache, [rest], bar)
        return Reading(len(rest), is_anew and bool(rest), has_lost)

    def status(self) -> str:
        """One line: tokens seen and kept, bytes, and the speed of the latest reply."""
        cache = self.cache
        told = f"{cache.tokens_seen[0]:,} tokens seen, {kept(cache):,} kept, {in_units(cache.bytes_held)}"
        return told if self.latest is None else f"{told}, {per_s(self.latest.decode_tokens_per_s)}"

    def _rolled_back(self, wanted: list[int]) -> bool:
        """Roll the end of the cached text back, with its evictions. Returns False where nothing can."""
        with suppress(UsageError):  # more than the cache can roll back
            self.cache.rollback(len(self._held()) - len(wanted))
            return True
        if self._before is None or self._before.tokens != [wanted]:
            return False
        self._use(self._before)
        self._before = None
        return True

    @property
    def _can_cut(self) -> bool:
        """Return True if the cache lacks none of the tokens before its newest."""
        is_whole = not any(layer.history.has_evicted for layer in self.cache.layers_to_read)
        return is_whole or self.cache.options.recall > 0

    def _keep_before(self, tokens: int) -> None:
        """Copy the cache before so many tokens come, where it could not be rolled back after them.

        A cache without a budget is not copied, as it grows with the text. One with recall need not be.
        """
        cache = self.cache
        is_copied = cache.budget is not None and not cache.options.recall
        is_copied = is_copied and holds_all(cache) < cache.tokens_seen[0] + tokens
        self._before = copy.deepcopy(cache) if is_copied else None

    def _held(self) -> list[int]:
        """The ids of the text in the cache. A text of unknown ids is forgotten."""
        if self.cache.tokens is None:
            self.cache.reset()
        return (self.cache.tokens or [[]])[0]

    def _use(self, cache: KVCache) -> None:
        self.session = replace(self.session, cache=cache)
        self._choices.cache = cache

    def _enter(self, branch: Branch) -> None:
        self.conversation, self._before = branch.conversation, branch.before
        cache = branch.cache
        self._use(KVCache.from_options(self.session.model, self.cache.options) if cache is None else cache)

    def _cache_in(self, file: Path) -> KVCache | None:
        """The cache in a file, or None where there is none, or one that does not fit, which is reported."""
        if not file.exists():
            return None
        try:
            return KVCache.load(file, self.session.model, tokenizer=self.session.tokenizer)
        except WindlassError as error:
            note(f"windlass: note: {error}")
            return None

    def _restored(self, chat: SavedChat) -> Conversation:
        """A saved conversation, whose ids are made from its texts where they are not all there."""
        conversation = Conversation(self.session.tokenizer, chat.start, chat.system, chat.branch)
        conversation.turns = list(chat.turns)
        if not chat.is_exact or max(conversation.ids, default=0) >= vocabulary_of(self.session.model):
            conversation.turns = [replace(turn, prompt=[], tokens=[]) for turn in chat.turns]
            conversation.encode_again()
        return conversation

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


def cache_beside(path: Path, branch: str | None = None) -> Path:
    """Where the cache of a conversation that is saved in `path` is, or that of another of its branches."""
    return path.with_name(f"{path.name}{'' if branch is None else f'.{branch}'}.cache")


def kept(cache: KVCache) -> int:
    """Most tokens that a layer holds now."""
    return max((layer.table.occupancy_bound for layer in cache.layers_to_read if not layer.is_empty), default=0)


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"
