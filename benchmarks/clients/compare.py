"""Comparison of an attached model with a `KVCache` and a plain one."""

import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

import windlass
from windlass import KVCache

ASSETS = Path(windlass.__file__).parent / "assets"
MODEL = ASSETS / "finder-3m"
READ, LONGER = 120, 400
WRITTEN = 24
BUDGET = 128
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Compared:
    """The result of one client, as it is written."""

    logits_error: float | None
    """The norm of the difference from plain, relative to plain's (None: no logits to compare)."""
    same_tokens: bool
    budget_runs: bool

    @property
    def result(self) -> str:
        """One word."""
        near = self.logits_error is None or self.logits_error <= TOLERANCE
        return "equal" if near and self.same_tokens and self.budget_runs else "differs"


def plain_model(**options: Any) -> PreTrainedModel:
    """The shipped small model, not attached, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, **{"dtype": torch.float32, **options})
    model.eval()
    return model


def text(tokens: int) -> Tensor:
    """The first tokens of the novel that is shipped."""
    novel = lzma.decompress((ASSETS / "three_men_in_a_boat.txt.xz").read_bytes()).decode()[: 40 * tokens]
    ids: Tensor = AutoTokenizer.from_pretrained(MODEL)(novel, return_tensors="pt").input_ids
    return ids[:, :tokens]


@torch.no_grad()
def compare(plain: Any, attached: Any, cache: Callable[..., KVCache]) -> Compared:
    """Two equal models, one of them attached. `cache` makes a cache for it, with these options."""
    # First: a compiler that gave up after many shapes would hide the effect of a budget.
    small = cache(budget=BUDGET, policy=windlass.policies.KeyDiff(), positions="compact", chunk=64)
    for piece in text(LONGER).split(64, 1):
        logits = attached(input_ids=piece, past_key_values=small).logits
    for _ in range(3):
        logits = attached(input_ids=logits[:, -1:].argmax(-1), past_key_values=small).logits
    runs = bool(logits.isfinite().all()) and max(layer.table.occupancy_bound for layer in small.layers) <= BUDGET
    ids = text(READ)
    # The same pieces: LLM.int8() decides for all tokens of a pass at once which channels it leaves in floating point.
    ours, theirs = (
        torch.cat([model(input_ids=piece, past_key_values=held).logits for piece in ids.split(50, 1)], 1)
        for model, held in ((attached, cache()), (plain, DynamicCache(config=plain.config)))
    )
    error = float((ours - theirs).norm() / theirs.norm())
    options = {"max_new_tokens": WRITTEN, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    same = torch.equal(
        attached.generate(input_ids=ids, past_key_values=cache(), **options),
        plain.generate(input_ids=ids, **options),
    )
    return Compared(error, same, runs)
