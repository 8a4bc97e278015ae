"""Memory that the engine returns to the system."""

import platform
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers.models import MODEL, Models
from tests.helpers.schedulers import events_of, request_of, running, wait_for
from windlass.engine.row_bytes import FreedMemory

BLOCK, BLOCKS = 1 << 18, 200  # bytes, and how many of them are freed between as many others
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no other C library can return memory")


def resident() -> int:
    """Bytes in the system's memory that no file has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def holes() -> list[torch.Tensor]:
    """Blocks of memory with freed ones of the same size between them."""
    torch.ones(64 * BLOCK, dtype=torch.uint8)  # once it is freed, the library maps no smaller blocks
    blocks = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(2 * BLOCKS)]
    return blocks[::2]


@needs_glibc
def test_freed_memory_goes_back_to_the_system_once_in_a_while() -> None:
    freed, kept = FreedMemory(), holes()
    before = resident()
    freed.give_back()
    assert before - resident() >= BLOCK * BLOCKS * 0.9
    kept += holes()
    before = resident()
    freed.give_back()
    assert before - resident() < BLOCK * BLOCKS * 0.1


def test_an_engine_without_work_gives_memory_back(attached_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    monkeypatch.setattr(FreedMemory, "give_back", lambda _: calls.append(1))
    with running(attached_model("llama"), AutoTokenizer.from_pretrained(MODEL)) as engine:
        wait_for(lambda: len(calls) == 1)
        events_of(engine.submit(request_of([5, 6, 7])))
        wait_for(lambda: len(calls) == 2)
