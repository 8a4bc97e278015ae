"""Conversations with the shipped model, without a terminal."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import MODEL
from windlass.cli.chat.conversation import Journal, Origin
from windlass.cli.chat.dialogue import Dialogue, Show
from windlass.cli.session import Session
from windlass.engine.sampling import Sampling
from windlass.hf.weights import fingerprint

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FIRST, SECOND, THIRD = "He was sitting in the boat.", "And the river?", "She said that it was late"
SAMPLING = Sampling(temperature=1.5, seed=3)
Make = Callable[..., Dialogue]


def with_template(template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    """The shipped model's tokenizer under a chat template."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def dialogue(model: PreTrainedModel, tmp_path: Path) -> Iterator[Make]:
    """Make conversations, each with a new cache of the options given. They keep their journals in one folder.

    Shapes are not checked meanwhile: a reply would take ten times as long, and has none that other tests do not see.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    origin, made = Origin("finder-3m", fingerprint(model)), []

    def make(
        template: str | None = TEMPLATE,
        sampling: Sampling | None = None,
        system: str | None = None,
        show: Show | None = None,
        **options: Any,
    ) -> Dialogue:
        session = Session(model, with_template(template), windlass.KVCache(model, **options))
        journal = Journal(tmp_path / "chats", origin)
        made.append(Dialogue(session, 5, sampling or Sampling(), journal, system, show))
        return made[-1]

    yield make
    for each in made:
        each.journal.close()


def held(cache: windlass.KVCache) -> list[list[int]]:
    """Per layer the positions that are held, in the text's order."""
    return [sorted(each for each in layer.positions[0, 0].tolist() if each >= 0) for layer in cache.layers]


def after(talk: Dialogue, *lines: str) -> Dialogue:
    """The chat after these messages and their replies."""
    for line in lines:
        assert talk.answer(line) == 0
    return talk
