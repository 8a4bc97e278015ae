"""Frames for whoever looks at an engine: nothing is copied while nobody does."""

from collections.abc import Callable
from threading import Condition, Lock
from time import monotonic
from typing import Any, Final, NamedTuple, final

from windlass.cache.state import CacheState
from windlass.engine.service import Watcher
from windlass.view.snapshot import Camera, Snapshot, about

INTERVAL: Final = 0.2  # seconds between two frames of a viewer
COST: Final = 0.01  # the share of time that copying may take
GONE: Final = 2.0  # seconds without a step after which a viewer of the newest text looks at another one
TEXTS: Final = 64  # that are remembered


class Seen(NamedTuple):
    """What a viewer is given: the header of the text, and what its row holds."""

    header: dict[str, Any]
    snapshot: Snapshot


class Viewer:
    """One who looks at a text of this `number`, or, with None, at the newest one. `known`: tokens that were told.

    `notify` is called by the engine's thread when there is something to `take`.
    """

    def __init__(self, number: int | None, notify: Callable[[], None] | None) -> None:
        self.number, self.known = number, 0
        self._notify, self._changed = notify, Condition()
        self._latest: Seen | None = None
        self._current, self._given, self._due = -1, 0.0, 0.0

    def wants(self, number: int, now: float, is_last: bool) -> bool:
        """Whether a step of this text is to be shown."""
        if self.number is not None:
            is_asked = number == self.number
        else:
            is_asked = number >= self._current or now - self._given > GONE
        return is_asked and (is_last or now >= self._due)

    def put(self, seen: Seen, now: float, due: float) -> None:
        """Have something new to take, in place of what was not taken; nothing more before `due`."""
        with self._changed:
            if seen.snapshot.number != self._current:
                self.known = 0
            self._latest, self._current = seen, seen.snapshot.number
            self._given, self._due = now, due
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    def take(self, timeout: float = 0.0) -> Seen | None:
        """The newest frame that was not taken; None where none comes within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest is not None, timeout)
            taken, self._latest = self._latest, None
            return taken

    @property
    def current(self) -> int:
        """The number of the text that is shown, -1 before the first."""
        return self._current


@final
class Watch(Watcher):
    """What a scheduler shows of its rows. `if watch.is_watched: watch.step(...)` is all that it calls, after a step.

    A viewer gets at most five frames a second, fewer where copying one takes more than a hundredth of the time.
    """

    def __init__(self) -> None:
        self.is_watched = False
        self._viewers: list[Viewer] = []
        self._lock = Lock()
        self._texts: dict[int, _Watched] = {}

    def attach(self, number: int | None = None, notify: Callable[[], None] | None = None) -> Viewer:
        """Begin to look; from any thread. `detach` ends it."""
        viewer = Viewer(number, notify)
        with self._lock:
            self._viewers = [*self._viewers, viewer]
            self.is_watched = True
        return viewer

    def detach(self, viewer: Viewer) -> None:
        """Look no more; may be repeated."""
        with self._lock:
            self._viewers = [each for each in self._viewers if each is not viewer]
            self.is_watched = bool(self._viewers)
            if not self._viewers:
                self._texts = {}  # a cache that only we know would stay alive

    def step(self, cache: CacheState, row: int = 0, number: int = 0, is_last: bool = False) -> None:
        """Show what a row holds, to those who look at the text of this number, where one of them is due.

        By the thread of the engine, between two passes. The state after the last step is shown in any case.
        """
        now = monotonic()
        wanting = [viewer for viewer in self._viewers if viewer.wants(number, now, is_last)]
        if wanting:
            self._show(cache, row, number, wanting, now)
        if is_last:
            self._texts.pop(number, None)
        if not self.is_watched:  # the last viewer may have left meanwhile
            self._texts = {}

    def _show(self, cache: CacheState, row: int, number: int, wanting: list[Viewer], now: float) -> None:
        known = min(viewer.known if viewer.current == number else 0 for viewer in wanting)
        text = self._text(cache, row, number)
        seen = Seen(text.header, text.camera.snapshot(known))
        took = monotonic() - now
        for viewer in wanting:
            viewer.put(seen, now, now + max(INTERVAL, took / COST))

    def _text(self, cache: CacheState, row: int, number: int) -> "_Watched":
        text = self._texts.get(number)
        if text is None or text.cache is not cache or text.row != row:
            if len(self._texts) >= TEXTS:
                del self._texts[next(iter(self._texts))]
            text = self._texts[number] = _Watched(cache, row, about(cache, number), Camera(cache, row, number))
        return text


class _Watched(NamedTuple):
    """A text that somebody looks at: where it stands, and what is made of it once."""

    cache: CacheState
    row: int
    header: dict[str, Any]
    camera: Camera
