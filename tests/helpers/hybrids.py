"""Tiny models that have recurrent layers beside attention layers, plain and attached."""

from functools import cache
from typing import Final

from transformers import PreTrainedModel

import windlass
from windlass.testing import tiny_hybrid

# One of each kind of recurrent layer: Gated DeltaNet, short convolution, Mamba-2 in the layer that attends, and beside
# layers that keep nothing.
KINDS: Final = ("qwen3_next", "lfm2", "falcon_h1", "nemotron_h")

plain = cache(tiny_hybrid)


@cache
def bound(family: str) -> PreTrainedModel:
    """An attached model, equal to `plain`'s. Not to be changed."""
    return windlass.attach(tiny_hybrid(family))
