"""Every combination of options that a cache accepts: `load` takes the files of `save`, and texts continue alike."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.models import Models
from tests.helpers.policies import made_by_default
from tests.helpers.shares import ALIKE, APART
from windlass import KVCache, PromptCacheError, Shares, UsageError
from windlass.core.types import Scores
from windlass.policies import H2O, WRAPPERS, InChunks, InGroups, Policy, Pyramid, Slots, Smoothed, SnapKV, Wrapper
from windlass.testing import VOCABULARY

POLICIES = made_by_default() | {"nested": Smoothed(InGroups(InChunks(SnapKV(observed_queries=3), 4)))}
OPTIONS: dict[str, list[Any]] = {
    "family": ["llama", "gemma2", "deepseek_v3"],
    "policy": [*POLICIES],
    "store": ["plain", "int8", "int4", "int4(sinks=2, newest=5)"],
    "recall": [0, 8, 16],
    "recall_store": ["plain", "int8", "int4"],
    "is_in_file": [False, True],
    "shares": [None, APART, ALIKE],
    "merge": [None, "mean_count", "mean_count(next)"],
    "positions": ["auto", "original", "compact", "self_extend(4, 8)", "clamp(9)"],
    "budget": [20, 13, None],
    "rows": [(33,), (40, 2), (26, 0), (9, 31, 0), (0, 0)],
    "rollback": [0, 16],
    "edit": [],  # names of `EDITS` below
}
Case = dict[str, Any]


def _accepted(case: Case) -> Case:
    """The nearest case that a cache accepts."""
    case = dict(case)
    if case["family"] != "llama" or case["policy"] in ("pyramid", "composite"):
        case["shares"] = None
    if case["budget"] is None:
        case |= {"recall": 0, "merge": None}
    if "newest" in case["store"]:
        case["merge"] = None
    if not case["recall"]:
        case |= {"is_in_file": False, "recall_store": "plain"}
    if case["family"] == "deepseek_v3" and case["recall"]:
        case["recall_store"] = "plain"  # low-bit codes of values that are a part of keys can't be recalled yet
    if case["edit"].startswith("splice"):
        case |= {"recall": 0, "is_in_file": False, "recall_store": "plain"}  # the bound of slots is not per row yet
    if case["edit"] == "fit":
        case |= {"store": "plain", "recall": 0, "is_in_file": False, "budget": None, "merge": None}
    return case


def pairwise(options: dict[str, list[Any]], draws: int = 3000) -> list[Case]:
    """Cases among seeded draws that cover each pair of values that any of the draws has."""
    draw, seen, found = random.Random(36), set[tuple[tuple[str, str], ...]](), list[Case]()
    for _ in range(draws):
        case = _accepted({name: draw.choice(values) for name, values in options.items()})
        pairs = set(combinations([(name, repr(value)) for name, value in case.items()], 2))
        if not pairs <= seen:
            seen |= pairs
            found.append(case)
    return found


def _label(case: Case) -> str:
    return "-".join(f"{value}" for value in case.values()).replace(" ", "")


@dataclass(frozen=True)
class Made:
    """A model, the settings of its caches, and the place of evicted tokens in a file."""

    model: PreTrainedModel
    case: Case
    folder: Path

    def cache(self, batch: int) -> KVCache:
        case = self.case
        names = ("store", "recall", "merge", "positions", "budget", "rollback")
        options = {name: case[name] for name in names}
        if case["recall"]:
            options["recall_store"] = case["recall_store"]
        return KVCache(
            self.model, policy=POLICIES[case["policy"]], sinks=2, window=3, chunk=7, batch=batch,
            shares=None if case["shares"] is None else Shares(case["shares"]),
            recall_folder=self.folder if case["is_in_file"] else None, **options,
        )  # fmt: skip

    @torch.no_grad()
    def read(self, cache: KVCache, lengths: tuple[int, ...], seed: int = 0) -> Tensor:
        """Feed rows of these lengths, 7 tokens at a time. Returns the logits of the last column."""
        most, draw = max(lengths), torch.Generator().manual_seed(seed)
        mask = (torch.arange(most) < torch.tensor(lengths)[:, None]).long()
        ids, logits = torch.randint(VOCABULARY, mask.shape, generator=draw), torch.zeros(len(lengths), VOCABULARY)
        for start in range(0, most, 7):
            here = slice(start, start + 7)
            given = {"input_ids": ids[:, here], "attention_mask": mask[:, here]}
            logits = self.model(**given, past_key_values=cache).logits[:, -1]
        return logits

    @torch.no_grad()
    def write(self, cache: KVCache, logits: Tensor, tokens: int) -> Tensor:
        """Greedy decode. Returns the logits of each step."""
        steps = []
        for _ in range(tokens):
            logits = self.model(input_ids=logits.argmax(-1, keepdim=True), past_key_values=cache).logits[:, -1]
            steps.append(logits)
        return torch.stack(steps)

    def other(self) -> KVCache:
        """Another text, of one row."""
        cache = self.cache(1)
        self.read(cache, (11,), 7)
        return cache


def _several(made: Made, cache: KVCache, logits: Tensor) -> None:
    cache.drop(2, 6)
    cache.divide(6, cache.next_positions[0], 3, row=0)
    made.write(cache, logits, 2)
    cache.copy(0, cache.batch_size - 1)
    made.write(cache, logits, 2)


def _none(made: Made, cache: KVCache, logits: Tensor) -> None:
    """No edit."""


def _rollback_after_edit(made: Made, cache: KVCache, logits: Tensor) -> None:
    cache.drop(5, 9, row=0)
    made.write(cache, logits, 3)
    cache.rollback([1, 2, 2][: cache.batch_size])


Edit = Callable[[KVCache, Callable[[], KVCache]], object]  # of a cache. The function makes one of another text
SIMPLE: dict[str, Edit] = {
    "drop": lambda cache, _: cache.drop(5, 9, row=0),
    "keep": lambda cache, _: cache.keep(3, 20),
    "shift": lambda cache, _: (cache.drop(0, 4), cache.shift(4, max(cache.next_positions), -4)),
    "divide": lambda cache, _: cache.divide(4, cache.next_positions[0], 2, row=0),
    "copy": lambda cache, _: cache.copy(0, cache.batch_size - 1),
    "splice": lambda cache, other: cache.splice(other(), 0, cache.batch_size - 1),
    "splice_at": lambda cache, other: cache.splice(other(), 0, 0, at=5),
    "rollback": lambda cache, _: cache.rollback(2),
    "put_row": lambda cache, other: cache.put_row(cache.batch_size - 1, other()),
    "select_rows": lambda cache, _: cache.select_rows(torch.tensor([*range(1, cache.batch_size), 0])),
    "clear_row": lambda cache, _: cache.clear_row(0),
    "compress": lambda cache, _: cache.compress(11),
    "fit": lambda cache, _: cache.compress(11, fit=True),
}
WRITING = {"none": _none, "rollback_after_edit": _rollback_after_edit, "several": _several}
OPTIONS["edit"] += [*SIMPLE, *WRITING]
CASES = pairwise(OPTIONS)


def _is_quick() -> list[bool]:
    """Mark each case with a value that no earlier one has."""
    seen: set[tuple[str, str]] = set()
    quick = []
    for case in CASES:
        values = {(name, repr(value)) for name, value in case.items()}
        quick.append(not values <= seen)
        seen |= values
    return quick


PARAMETERS = [
    pytest.param(case, marks=[] if is_quick else pytest.mark.slow, id=_label(case))
    for case, is_quick in zip(CASES, _is_quick(), strict=True)
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_what_save_writes_load_takes(case: Case, attached_model: Models, tmp_path: Path) -> None:
    made = Made(attached_model(case["family"]), case, tmp_path)
    cache = made.cache(len(case["rows"]))
    logits = made.write(cache, made.read(cache, case["rows"]), 4)[-1]
    with suppress(UsageError):  # a refused edit changes nothing
        if case["edit"] in WRITING:
            WRITING[case["edit"]](made, cache, logits)
        else:
            SIMPLE[case["edit"]](cache, made.other)
    path = tmp_path / "cache"
    cache.save(path)
    loaded = KVCache.load(path, made.model, recall_folder=tmp_path if case["is_in_file"] else None)
    for tokens in (6, 3):
        expected, got = (made.write(each, logits, tokens) for each in (cache, loaded))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        logits, got = (made.read(each, (9, 4, 2)[: cache.batch_size], seed=50) for each in (cache, loaded))
        torch.testing.assert_close(got, logits, rtol=1e-3, atol=1e-3)
    assert (loaded.tokens, loaded.tokens_seen) == (cache.tokens, cache.tokens_seen)


@dataclass(frozen=True)
class Doubled(Wrapper):
    """A wrapper from elsewhere."""

    factor: float = 2.0

    def score(self, slots: Slots) -> Scores:
        return self.policy.score(slots) * self.factor


class Undescribed(Policy):
    """A policy whose `repr` has the address of the object."""

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float() % 7


@dataclass(frozen=True)
class Weighted(Policy):
    """A policy whose `repr` is longer than a header may have."""

    weights: tuple[float, ...]

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float() * self.weights[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Doubled(H2O()),
        lambda: Smoothed(Doubled(H2O())),
        lambda: Doubled(Pyramid(H2O())),
        Undescribed,
        lambda: InChunks(Undescribed()),
        lambda: Weighted(tuple(number / 7 for number in range(3000))),
    ],
)
def test_a_policy_from_elsewhere_is_given_again(
    make: Callable[[], Policy], attached_model: Models, tmp_path: Path
) -> None:
    made = Made(attached_model("llama"), {}, tmp_path)
    cache = KVCache(made.model, 20, make(), sinks=2, window=3)
    logits, path = made.read(cache, (33,)), tmp_path / "cache"
    cache.save(path)
    with pytest.raises(PromptCacheError, match="no prompt cache can make a policy of a file"):
        KVCache.load(path, made.model)
    with pytest.raises(PromptCacheError, match="not with"):
        KVCache.load(path, made.model, policy=H2O())
    loaded = KVCache.load(path, made.model, policy=make())
    expected, got = (made.write(each, logits, 6) for each in (cache, loaded))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_wrapper_of_a_file_is_that_of_the_cache(name: str, attached_model: Models, tmp_path: Path) -> None:
    policy, model = WRAPPERS[name](InChunks(SnapKV(observed_queries=5), 3)), attached_model("llama")
    KVCache(model, 20, policy).save(tmp_path / "cache")
    assert KVCache.load(tmp_path / "cache", model).policy == policy
    assert KVCache.load(tmp_path / "cache", model, policy=policy).policy == policy
