"""A row of a cache as plain transformers reads it alone: for `benchmarks/fuzz_models.py`."""

import copy
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from families.passes import narrowed
from torch import Tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent.parent))  # helpers of the tests

import windlass
from tests.helpers.axes import plain_reader
from windlass.testing import HYBRIDS, tiny_hybrid, tiny_model

SINKS = 2


@cache
def plain(family: str) -> PreTrainedModel:
    if family in HYBRIDS:
        return tiny_hybrid(family)
    return plain_reader(family) if family.endswith("_vl") else tiny_model(family)


@cache
def bound(family: str) -> PreTrainedModel:
    return windlass.attach(copy.deepcopy(plain(family)))


@dataclass
class Row:
    """A text: its ids; from which query on each is gone; and how far back each query's budget reached."""

    ids: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    reach: list[int] = field(default_factory=list)
    fixed: int = 0  # tokens before its last edit, which can't be rolled back

    def cut(self, tokens: int) -> None:
        for each in (self.ids, self.gone, self.reach):
            del each[len(each) - tokens :]

    def truth(self, family: str) -> Tensor:
        gone, reach = torch.tensor(self.gone), torch.tensor(self.reach)

        def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query < gone[key]) & ((key < SINKS) | (query - key <= reach[query]))

        with narrowed(seen) as uses, torch.no_grad():
            logits: Tensor = plain(family)(input_ids=torch.tensor([self.ids]), use_cache=False).logits
        assert uses, "a model that makes its own masks"
        return logits
