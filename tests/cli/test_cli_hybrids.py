"""Commands on a model with recurrent layers, in a folder: the text of the library, on and on."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import windlass
from tests.helpers import cli, models
from tests.helpers.cli import PROMPT, Ran
from windlass.engine.text import encode
from windlass.testing import tiny_hybrid

run, tokenizer = cli.run, models.tokenizer  # fixtures
OPTIONS = ("--dtype", "float32", "--max-tokens", "12")


@pytest.fixture(scope="module", params=["qwen3_next", "lfm2"])
def folder(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp(request.param)
    tiny_hybrid(request.param, len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def texts_of(folder: str, prompts: list[str], budget: int | None) -> list[str]:
    """The library's text after each of `prompts`, which go on in one cache."""
    model, tokenizer = windlass.load(folder, dtype="float32")
    cache = windlass.KVCache(model, budget)
    return ["".join(windlass.stream(model, tokenizer, prompt, cache, 12)) for prompt in prompts]


@pytest.mark.parametrize("budget", [None, 24])
def test_generate_writes_what_transformers_writes(run: Callable[..., Ran], folder: str, budget: int | None) -> None:
    options = () if budget is None else ("--budget", str(budget))
    ran = run("generate", folder, PROMPT, *OPTIONS, *options)
    assert (ran.code, ran.out) == (0, texts_of(folder, [PROMPT], budget)[0] + "\n")
    if budget is None:
        model, tokenizer = windlass.load(folder, dtype="float32")
        ids = torch.tensor([encode(tokenizer, PROMPT, True)])
        mask = torch.ones_like(ids)  # else it is told from the id of padding
        written = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert ran.out == tokenizer.decode(written, skip_special_tokens=True) + "\n"


def test_chat_goes_on_and_describes_states(run: Callable[..., Ran], folder: str) -> None:
    lines = [PROMPT, "Then he", "/describe", "/quit"]
    ran = run("chat", folder, *OPTIONS, "--budget", "24", stdin="\n".join(lines).encode())
    assert ran.code == 0
    for text in texts_of(folder, [PROMPT, "\nThen he"], 24):
        assert text in ran.out
    assert "  states   " in ran.out


def test_a_turn_of_chat_is_taken_back(run: Callable[..., Ran], folder: str) -> None:
    """Further back than a state remembers: the text is read again."""
    ran = run("chat", folder, *OPTIONS, stdin="\n".join([PROMPT, "/undo", PROMPT, "/quit"]).encode())
    once = run("chat", folder, *OPTIONS, stdin="\n".join([PROMPT, "/quit"]).encode())
    assert ran.code == once.code == 0
    assert ran.out.count(once.out.strip()) == 2


def test_a_hybrid_reads_edits_again_and_a_branch_not(run: Callable[..., Ran], folder: str) -> None:
    """With a budget the last message is taken back at once, from a copy of the states."""
    lines = [PROMPT, "Then he", "/undo", "Then he", "/branch b", "/branch main", "/edit 1 The boat", "/edit 3", "/quit"]
    ran = run("chat", folder, *OPTIONS, "--budget", "24", stdin="\n".join(lines).encode())
    assert ran.code == 2
    assert "the last turn is taken back: rolled back, 1 turn left\n" in ran.err
    assert ran.out.count(texts_of(folder, [PROMPT, "\nThen he"], 24)[1]) == 2
    assert ran.err.count("read again") == 1
    assert "tokens were read again, because this model, or an option of the cache, takes no edits\n" in ran.err
    assert "branch b copied: 4 messages, " in ran.err
    assert "branch main goes on: 4 messages, " in ran.err
    assert "/edit needs the new text here: /edit 3 TEXT. At a terminal it offers the old one\n" in ran.err


def test_a_saved_cache_goes_on(run: Callable[..., Ran], folder: str, tmp_path: Path) -> None:
    file = str(tmp_path / "text.cache")
    assert run("cache", folder, PROMPT, "--prompt-cache", file, "--dtype", "float32").code == 0
    assert run("cache", file, "info").code == 0
    ran = run("generate", folder, " and then", "--prompt-cache", file, *OPTIONS)
    assert (ran.code, ran.out) == (0, texts_of(folder, [PROMPT + " and then"], None)[0] + "\n")
