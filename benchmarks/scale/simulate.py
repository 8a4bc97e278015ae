"""The scheduler as a simulation of events: the turns of `windlass/engine/scheduler.py`, with seconds in place of work.

A turn is one step of all rows that write, and then one chunk of one prompt. Fixed rows hold a budget each, so a request
that has a row has all that it can need. Paged memory holds whole texts: a request is admitted when its prompt fits, and
where the memory runs out the newest one is sent back, to read all that it had once more.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scale.arrivals import Arrival

READING = 2  # prompts that are read in turn
PAGE = 16  # tokens


@dataclass(frozen=True)
class Costs:
    """Seconds: of a step and of each row in it; of a chunk and of each token in it; of reading a token that is held."""

    step: float
    row: float
    chunk: float
    token: float
    held: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Either `rows` of `budget` tokens, or, where `budget` is None, pages for `tokens` in all, for at most `rows`."""

    rows: int
    budget: int | None = None
    tokens: int = 0


@dataclass
class Text:
    """A request under way. `read` of its prompt, and of what it had written before it was sent back."""

    arrival: Arrival
    read: int = 0
    written: int = 0
    first: float | None = None
    to_read: int = 0

    @property
    def is_reading(self) -> bool:
        return self.read < self.to_read

    @property
    def seen(self) -> int:
        """Tokens that its cache has been shown."""
        return self.read + max(0, self.written - (self.to_read - self.arrival.prompt) - 1)


@dataclass
class Told:
    """Of each request that was served: seconds to its first token, and to its end. What was refused, and sent back."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    written: int = 0
    refused: int = 0
    sent_back: int = 0
    seconds: float = 0.0
    most_rows: int = 0
    turns: list[tuple[int, int]] = field(default_factory=list)
    """Of each turn: rows that wrote, tokens that were read."""

    def quantile(self, part: float) -> float:
        """Of the seconds to a first token."""
        return float(np.quantile(self.first, part)) if self.first else float("inf")

    @property
    def tokens_per_s(self) -> float:
        """Tokens written a second, from the first arrival to the last end."""
        return self.written / self.seconds if self.seconds else 0.0


def simulated(arrivals: Sequence[Arrival], costs: Costs, memory: Memory, chunk: int = 512, queue: int = 64) -> Told:
    """Serve `arrivals`; more than `queue` that wait are refused."""
    engine = _Engine(costs, memory, chunk)
    coming, told, now = deque(arrivals), Told(), 0.0
    while coming or engine.waiting or engine.texts:
        if not (engine.waiting or engine.texts):
            now = max(now, coming[0].at)
        while coming and coming[0].at <= now:
            arrival = coming.popleft()
            if len(engine.waiting) >= queue or not engine.can_ever_hold(arrival):
                told.refused += 1
            else:
                engine.waiting.append(Text(arrival, to_read=arrival.prompt))
        now += engine.turn(now, told)
    told.seconds = now - arrivals[0].at
    return told


class _Engine:
    def __init__(self, costs: Costs, memory: Memory, chunk: int) -> None:
        self._costs, self._memory, self._chunk = costs, memory, chunk
        self.waiting: deque[Text] = deque()
        self.texts: list[Text] = []
        self._reading: deque[Text] = deque()

    def can_ever_hold(self, arrival: Arrival) -> bool:
        return self._memory.budget is not None or _pages(arrival.prompt + arrival.written) <= self._memory.tokens

    def turn(self, now: float, told: Told) -> float:
        """Seconds that it takes."""
        costs, seconds, tokens = self._costs, 0.0, 0
        self._admit()
        told.most_rows = max(told.most_rows, len(self.texts))
        writing = [text for text in self.texts if not text.is_reading]
        if writing:
            held = sum(self._held(text) for text in writing)
            seconds += costs.step + costs.row * len(writing) + costs.held * held
            for text in writing:
                text.written += 1
        if self._reading:
            text = self._reading.popleft()
            tokens = min(self._chunk, text.to_read - text.read)
            seconds += costs.chunk + tokens * costs.token
            text.read += tokens
            if text.is_reading:
                self._reading.append(text)
            else:
                text.written += 1
        told.turns.append((len(writing), tokens))
        for text in [text for text in self.texts if not text.is_reading]:
            if text.first is None:
                text.first = now + seconds
            if text.written >= text.arrival.written:
                told.first.append(text.first - text.arrival.at)
                told.whole.append(now + seconds - text.arrival.at)
                told.written += text.written
                self.texts.remove(text)
        if self._memory.budget is None:
            self._send_back(told)
        return seconds

    def _held(self, text: Text) -> int:
        return text.seen if self._memory.budget is None else min(text.seen, self._memory.budget)

    def _admit(self) -> None:
        while self.waiting and len(self._reading) < READING and len(self.texts) < self._memory.rows:
            if self._memory.budget is None and self._free < _pages(self.waiting[0].to_read + 1):
                return
            text = self.waiting.popleft()
            self.texts.append(text)
            self._reading.append(text)

    @property
    def _free(self) -> int:
        return self._memory.tokens - sum(_pages(max(text.seen, text.to_read) + 1) for text in self.texts)

    def _send_back(self, told: Told) -> None:
        while self._free < 0:
            text = self.texts.pop()
            if text in self._reading:
                self._reading.remove(text)
            text.to_read, text.read = text.arrival.prompt + text.written, 0
            self.waiting.appendleft(text)
            told.sent_back += 1


def _pages(tokens: int) -> int:
    """Tokens that the pages of a text of so many take."""
    return -(-tokens // PAGE) * PAGE
