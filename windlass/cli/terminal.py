"""What the command line shows, and where prompts come from. Text goes to stdout, all else to stderr."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from windlass.cli.loading import CLEAR
from windlass.core.errors import UsageError
from windlass.core.files import decoded, read_limited, read_text
from windlass.core.units import in_units
from windlass.engine.result import Result

HUB_IS_QUIET = "HF_HUB_DISABLE_PROGRESS_BARS"  # read when huggingface_hub is imported, which is later
# A note is said from many places, to which how loud a command is would have to be told.
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quiet(is_quiet: bool) -> Iterator[None]:
    """A block without notes and progress, if `is_quiet`."""
    token, before = _QUIET.set(is_quiet), os.environ.get(HUB_IS_QUIET)
    if is_quiet:
        os.environ[HUB_IS_QUIET] = "1"
    try:
        yield
    finally:
        _QUIET.reset(token)
        if is_quiet and before is None:
            del os.environ[HUB_IS_QUIET]


def progress(unit: str, *, has_thread: bool = True, speed_s: float = 30.0) -> Progress:
    """A bar on stderr that counts `unit` and leaves the screen at its end.

    There is none when stderr is no terminal, or the command quiet. A thread of its own draws it, unless `has_thread`
    is False. The time left is told from the speed of the newest `speed_s` seconds.
    """
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        auto_refresh=has_thread,
        speed_estimate_period=speed_s,
        disable=_QUIET.get() or not console.is_terminal,
    )


class Bar:
    """A progress bar on stderr while `total` tokens are read; only counts when stderr is no terminal.

    Call it as the engine's `progress`. It leaves the screen when all is read.
    """

    def __init__(self, label: str, total: int, unit: str = "tokens") -> None:
        self.done, self._total, self._unit = 0, total, unit
        self._started = self._latest = time.perf_counter()
        self._progress = progress(unit)
        self._task = self._progress.add_task(label, total=total)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        self.done, self._total, self._latest = done, total, time.perf_counter()
        self._progress.update(self._task, completed=done, total=total)
        if done == total:
            # The text that follows must not be drawn over by the bar's own thread.
            self._progress.stop()

    @property
    def is_whole(self) -> bool:
        """Whether all is read."""
        return self.done == self._total

    @property
    def told(self) -> str:
        """How much is read."""
        return f"{self.done:,} of {self._total:,} {self._unit}"

    @property
    def tokens_per_s(self) -> float:
        """Tokens read a second until the last call."""
        return self.done / (self._latest - self._started) if self.done else 0.0


def speeds(result: Result, bar: Bar) -> str:
    """One line: what was read and written, how fast, and the bytes held."""
    read = f"{result.prompt_tokens:,}"
    if bar.done < result.prompt_tokens:
        read = f"{bar.done:,} of {read}"
    speed = result.prefill_tokens_per_s or bar.tokens_per_s
    return (
        f"prefill {read} tokens, {per_s(speed)}; "
        f"decode {len(result.tokens):,} tokens, {per_s(result.decode_tokens_per_s)}; "
        f"{in_units(result.bytes_held)} held"
    )


def per_s(speed: float) -> str:
    """Tokens per second with about three digits: `"1,025 tokens/s"`."""
    return f"{speed:,.0f} tokens/s" if speed >= 100 else f"{speed:.1f} tokens/s"


def note(line: str) -> None:
    """One line on stderr, after whatever is on stdout; none in a command that is quiet."""
    sys.stdout.flush()
    if not _QUIET.get():
        print(f"{_line_start()}{line}", file=sys.stderr, flush=True)


def _line_start() -> str:
    """What leads a terminal to the start of a line, where the reader of a pipe may have shown a part of the text there.

    A row of spaces ends in the next line, but for a cursor that stands at the start of one.
    """
    if sys.stdout.isatty() or not sys.stderr.isatty():
        return ""
    return " " * os.get_terminal_size(sys.stderr.fileno()).columns + CLEAR


def say(piece: str) -> None:
    """Text on stdout, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text of the argument, the file, or stdin; one line end at its end is not part of it.

    Raises: UsageError when there is none, more than one, or it is not UTF-8.
    """
    if prompt is not None and file is not None:
        raise UsageError("both a prompt and --file were given; use one of them")
    if file is not None and str(file) != "-":
        return read_text(file, f"prompt file {file}")
    if prompt is not None and prompt != "-":
        # What the shell passes is decoded with stand-ins for bytes that are not UTF-8.
        return decoded(prompt.encode("utf-8", "surrogateescape"), "the prompt")
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt; give it as an argument, with --file, or through a pipe")
    return decoded(read_limited(sys.stdin.buffer.read, "the prompt on stdin"), "the prompt on stdin")
