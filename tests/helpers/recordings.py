"""Recordings made up for the page: of any size, and with any text."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from windlass.view.recording import (
    HEADER,
    MAGIC,
    NOTHING,
    VERSION,
    Encoder,
    RecalledPlane,
    SlotGroup,
    Snapshot,
    end_record,
    json_record,
)
from windlass.view.server import RecordingServer

HEADER_OF: dict[str, Any] = {
    "version": VERSION,
    "number": 0,
    "model": "made up",
    "layers": 2,
    "trained_length": None,
    "budget": 12,
    "sinks": 2,
    "window": 3,
    "chunk": 8,
    "policy": "Recent()",
    "positions": "original",
    "store": "plain",
    "merge": "none",
    "recall": 0,
}


def tokenizer_of(words: Sequence[str]) -> PreTrainedTokenizerBase:
    """A tokenizer of these words, all different. Together they are the text."""
    model = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}))
    model.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def moment(
    seen: int,
    planes: Sequence[SlotGroup],
    held: Sequence[Sequence[int]],
    words: int = 1,
    told: int = 0,
    recalled: Sequence[tuple[RecalledPlane, Sequence[int]]] = (),
) -> Snapshot:
    """A row that has seen so many tokens, of so many words in turn, whose planes hold, and read, these positions."""
    rows = [NOTHING]
    rows += [np.array([*own, *[-1] * (plane.slots - len(own))]) for plane, own in zip(planes, held, strict=True)]
    return Snapshot(
        number=0,
        planes=tuple(planes),
        positions=np.concatenate(rows).astype(np.int32),
        numbers={},
        text_from=told,
        tokens=[token % words for token in range(told, seen)],
        seen=seen,
        next_position=seen,
        mode="original",
        is_edited=False,
        bytes_held=1000 + seen,
        rows=1,
        formula=("made up", 1000),
        seconds=seen / 10,
        recalled_planes=tuple(plane for plane, _ in recalled),
        recalled=np.array([position for _, own in recalled for position in own], np.int32),
    )


def write(path: Path, moments: Sequence[Snapshot], words: Sequence[str], **header: object) -> None:
    """A recording of these moments."""
    encoder = Encoder(tokenizer_of(words))
    frames = [encoder.frame(each) for each in moments]
    start = json_record(HEADER, HEADER_OF | header)
    path.write_bytes(b"".join([MAGIC, start, *frames, end_record(len(frames) + 1)]))


@contextmanager
def serving(path: Path) -> Iterator[RecordingServer]:
    """A server of the page with this recording."""
    with RecordingServer(path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
