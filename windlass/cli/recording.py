"""What `windlass generate --record` writes beside the text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from windlass.cache.state import CacheState
from windlass.cli.terminal import note
from windlass.view.recording import Recorder


@contextmanager
def recording(path: Path | None, cache: CacheState, tokenizer: PreTrainedTokenizerBase) -> Iterator[Callable[[], None]]:
    """A block in which each call of what it is given writes a frame to `path`; None: nothing is written.

    Raises: UsageError for a file that cannot be written.
    """
    if path is None:
        yield lambda: None
        return
    with Recorder(path, cache, tokenizer=tokenizer) as recorder:
        yield recorder.step
    note(f"{path} written; `windlass view {path}` shows it")
