"""Output of the command line, and input of prompts. Text goes to stdout, all else to stderr."""

import io
import os
import re
import signal
import sys
import termios
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, NoReturn

import typer
from prompt_toolkit.utils import get_cwidth
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from windlass.core.errors import UsageError, WindlassError, WindlassWarning
from windlass.core.files import decoded, read_limited, read_text
from windlass.core.launch import Launch, end_with_starter
from windlass.core.parse import in_units
from windlass.engine.sampling import Result

CLEAR: Final = "\r\x1b[K"  # to the start of the line, and erase it
INTERRUPTED_LINE: Final = "windlass: interrupted"
INTERRUPTED: Final = 130  # the exit code that shells give to Ctrl-C


@contextmanager
def loading(is_quiet: bool = False) -> Iterator[None]:
    """Show `loading ...` on stderr while the block runs, then erase it.

    Nothing is shown if `is_quiet`, or where stderr is no terminal. After the block an interrupt raises
    KeyboardInterrupt, also where it ended the process before (`end_at_ctrl_c`).
    """
    is_shown = sys.stderr.isatty() and not is_quiet
    try:
        if is_shown:
            print("loading ...", end="", file=sys.stderr, flush=True)
        yield
    finally:
        if is_shown:
            print(CLEAR, end="", file=sys.stderr, flush=True)
        if signal.getsignal(signal.SIGINT) is _end and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_ctrl_c() -> None:
    """Let an interrupt end the process at once, until the first `loading` is over.

    Nothing but modules is loaded so far, and libraries do not bear a KeyboardInterrupt while they are: torch loses it,
    makes another error of it, or aborts. Does nothing where interrupts are ignored or another handler takes them.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001  # Python passes it
    start = CLEAR if os.isatty(2) else ""
    os.write(2, f"{start}{INTERRUPTED_LINE}\n".encode())  # the signal may have interrupted `print`
    os._exit(INTERRUPTED)


HUB_IS_QUIET = "HF_HUB_DISABLE_PROGRESS_BARS"  # read when huggingface_hub is imported, which is later
# A context variable, because notes come from many places.
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quiet(is_quiet: bool) -> Iterator[None]:
    """A block without notes, warnings and progress, if `is_quiet`."""
    token, before = _QUIET.set(is_quiet), os.environ.get(HUB_IS_QUIET)
    if is_quiet:
        os.environ[HUB_IS_QUIET] = "1"
    try:
        with warnings.catch_warnings() if is_quiet else nullcontext():
            if is_quiet:
                warnings.simplefilter("ignore", WindlassWarning)
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
    """A progress bar on stderr while `total` tokens are read. It only counts when stderr is no terminal.

    Call it as the engine's `progress`. It is erased when all tokens are read.
    """

    def __init__(self, label: str, total: int, unit: str = "tokens") -> None:
        self.done, self.total, self._unit = 0, total, unit
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
        self.done, self.total, self._latest = done, total, time.perf_counter()
        self._progress.update(self._task, completed=done, total=total)
        if done == total:
            # The bar's own thread must not overwrite the text that follows.
            self._progress.stop()

    @property
    def is_whole(self) -> bool:
        """Return True if all is read."""
        return self.done == self.total

    @property
    def told(self) -> str:
        """Tokens read, of all."""
        return f"{self.done:,} of {self.total:,} {self._unit}"

    @property
    def tokens_per_s(self) -> float:
        """Tokens read a second until the last call."""
        return self.done / (self._latest - self._started) if self.done else 0.0


def speeds(result: Result, bar: Bar) -> str:
    """One line: tokens read and written, speeds, and the bytes held."""
    read = f"{result.prompt_tokens:,}"
    if bar.done < result.prompt_tokens:
        read = f"{bar.done:,} of {read}"
    speed = result.prefill_tokens_per_s or bar.tokens_per_s
    return (
        f"prefill {read} tokens at {per_s(speed)}, "
        f"decode {len(result.tokens):,} tokens at {per_s(result.decode_tokens_per_s)}, "
        f"{in_units(result.bytes_held)} held"
    )


def per_s(speed: float) -> str:
    """Tokens per second with about three digits: `"1,025 tokens/s"`."""
    return f"{speed:,.0f} tokens/s" if speed >= 100 else f"{speed:.1f} tokens/s"


def note(line: str) -> None:
    """One line on stderr, after any text on stdout. Quiet commands print none."""
    sys.stdout.flush()
    if not _QUIET.get():
        print(f"{_line_start()}{line}", file=sys.stderr, flush=True)


def _line_start() -> str:
    """Characters that move a terminal to the start of a line, where the reader of a pipe may have shown text.

    A row of spaces ends in the next line, unless the cursor is at the start of a line.
    """
    if sys.stdout.isatty() or not sys.stderr.isatty():
        return ""
    return " " * os.get_terminal_size(sys.stderr.fileno()).columns + CLEAR


def say(piece: str) -> None:
    """Text on stdout, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text of the argument, the file, or stdin, without one line end at its end.

    Raises: UsageError when there is none, more than one, or it is not UTF-8.
    """
    if prompt is not None and file is not None:
        raise UsageError("both a prompt and --file were given. Use one of them")
    if file is not None and str(file) != "-":
        return read_text(file, f"prompt file {file}")
    if prompt is not None and prompt != "-":
        # Python decodes an argument with stand-ins for bytes that are not UTF-8.
        return decoded(prompt.encode("utf-8", "surrogateescape"), "the prompt")
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt. Give it as an argument, with --file, or through a pipe")
    return decoded(read_limited(sys.stdin.buffer.read, "the prompt on stdin"), "the prompt on stdin")


# Chinese and its neighbours are written without spaces: a line may end after each character.
ALONE: Final = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
PART: Final = re.compile(rf"[\s{ALONE}]|[^\s{ALONE}]+")


class Page:
    """Shows pieces of a text through `say`.

    A word waits until it is whole, and goes to the next line where it does not fit in the `width()` columns.
    """

    def __init__(self, say: Callable[[str], None], width: Callable[[], int]) -> None:
        self._say, self._width = say, width
        self._column, self._word = 0, ""

    def push(self, piece: str) -> None:
        """Show a piece, but for the word at its end, which may go on."""
        *parts, last = PART.findall(self._word + piece) or [""]
        self._word = ""
        if re.match(rf"[\s{ALONE}]", last) or len(last) >= self._width():
            parts.append(last)
        else:
            self._word = last
        shown = "".join(map(self._placed, parts))
        if shown:
            self._say(shown)

    def cut(self) -> None:
        """Show no more, and end the line: the word that waits is left out."""
        self._word = ""
        self.end()

    def end(self) -> None:
        """Show the rest, and end the line."""
        self._say(self._placed(self._word) + ("\n" if self._column else ""))
        self._column, self._word = 0, ""

    def _placed(self, part: str) -> str:
        """`part` with the line end that it needs before it, or instead of it."""
        if part == "\n":
            self._column = 0
            return part
        width, columns = self._width(), 8 - self._column % 8 if part == "\t" else get_cwidth(part)
        if self._column + columns <= width:
            self._column += columns
            return part
        if part.isspace():
            self._column = 0
            return "\n"
        # Longer than a line: the terminal itself breaks it.
        before = "\n" if self._column else ""
        self._column = columns % width
        return before + part


def state_folder() -> Path:
    """`windlass` in XDG_STATE_HOME where that is set, else where the platform keeps such things.

    Raises: OSError for a user without a home.
    """
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():
        return given / "windlass"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
    return home / ("Library/Application Support" if sys.platform == "darwin" else ".local/state") / "windlass"


def private_file(path: Path) -> Path:
    """`path`, which is now there and can be read and written by its user alone. Raises: OSError as the system does."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)
    return path


def launch_of(
    is_parallel: bool, prompt: str | None = None, file: Path | None = None, record: Path | None = None
) -> Launch | None:
    """This process among the other ranks, or None without ranks.

    Raises: UsageError where `torchrun` did not start it, for a prompt that would come through a pipe, and a recording.
    """
    if not is_parallel:
        return None
    launch = Launch.of(os.environ)
    if (prompt is None and file is None) or prompt == "-" or str(file) == "-":
        raise UsageError("--tensor-parallel: processes share one stdin. Give the prompt as an argument, or with --file")
    if record is not None:
        raise UsageError("--record: each of the processes of --tensor-parallel has some heads only. Leave it out")
    return launch


@contextmanager
def first_speaks(launch: Launch | None) -> Iterator[None]:
    """Silence the output and the option errors of all processes but the first.

    The first one finds the same errors and prints them. All of them end when `torchrun` has ended.
    """
    if launch is None:
        yield
        return
    end_with_starter(os.environ)
    with ExitStack() as stack:
        if not launch.is_first:
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        try:
            yield
        except UsageError:
            if launch.is_first:
                raise
            raise typer.Exit(2) from None
        except RuntimeError as error:
            from windlass.core.ranks import is_lost

            if not is_lost(error):
                raise
            raise WindlassError(
                f"rank {launch.number} of {launch.size} has lost another one, which has ended or does not answer. "
                "The written text is all there is. Start all of them again"
            ) from error


def leave_ranks(launch: Launch | None, code: int) -> int:
    """Return `code` once all processes are done. An interrupted one waits for nobody."""
    if launch is not None and code == 0:
        from windlass.core.ranks import leave

        leave()
    return code


def is_quiet(launch: Launch | None, is_asked: bool) -> bool:
    """Return True if a command says nothing beside its text: it was asked to, or another process says it."""
    return is_asked or (launch is not None and not launch.is_first)


@contextmanager
def hide_keys() -> Iterator[None]:
    """Hide typed keys during a block and keep them for the next input. Ctrl-C works.

    Does nothing where stdin is no terminal.
    """
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (io.UnsupportedOperation, termios.error):
        yield
        return
    input_flags, output_flags, control_flags, local_flags, *rest = before
    local_flags &= ~(termios.ECHO | termios.ICANON)
    # Enter stays Enter: the next line is read key by key.
    waiting = [input_flags & ~termios.ICRNL, output_flags, control_flags, local_flags, *rest]
    termios.tcsetattr(terminal, termios.TCSANOW, waiting)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def as_interrupts(is_wanted: bool = True) -> Iterator[None]:
    """A block in which SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, unless they are handled already."""
    if not is_wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [each for each in ENDING if signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, _interrupt)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001  # Python passes it
    raise KeyboardInterrupt


def part_of(path: Path) -> Path:
    """The file of an unfinished result beside `path`."""
    return path.with_name(path.name + ".part")


def unfinished(path: Path) -> Path:
    """The file for an unfinished result: `path`, or one beside it, where an older file is there to stay."""
    return part_of(path) if path.exists() else path
