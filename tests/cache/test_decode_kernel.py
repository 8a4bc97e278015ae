"""Decode steps in one call of a kernel equal the four steps one by one, and are used where possible."""

import copy
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tests.helpers.caches import POLICIES, assert_same
from tests.helpers.models import Models, Text, read
from windlass import KVCache, attach, kernels
from windlass.core.inputs import DecodeInput, DecodeSlots
from windlass.core.types import Scores
from windlass.kernels import cpu
from windlass.policies import DMC, H2O, TOVA, KeyDiff, Pairs, Policy, Recent, Slots, SnapKV
from windlass.testing import tiny_model

if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

from windlass.kernels.cpu.decode import Decode, DecoderSteps, Planned

LIMITS: Final[dict[str, Any]] = {"sinks": 2, "window": 3, "chunk": 40}


class Watched:
    """`kernels.decode_of`, which counts its kernels and their steps. None are made while it is off."""

    def __init__(self) -> None:
        self.made, self.steps, self.is_on = 0, 0, True
        self._decode_of, self._planned, self._step = kernels.decode_of, Decode.planned, DecoderSteps.step

    def decode_of(self, slots: DecodeSlots, queries: Tensor) -> Decode | None:
        if not self.is_on:
            return None
        kernel = self._decode_of(slots, queries)
        assert kernel is not None
        self.made += 1
        return kernel

    def planned(self, kernel: Decode, new: DecodeInput) -> Planned:
        self.steps += 1
        return self._planned(kernel, new)

    def step(self, kernel: DecoderSteps, *given: Any) -> Tensor:
        """A step of all layers."""
        self.steps += len(kernel._layers)
        return self._step(kernel, *given)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watch = Watched()
    monkeypatch.setattr(kernels, "decode_of", watch.decode_of)
    monkeypatch.setattr(Decode, "planned", lambda kernel, new: watch.planned(kernel, new))
    monkeypatch.setattr(DecoderSteps, "step", lambda kernel, *given: watch.step(kernel, *given))
    return watch


def both(model: Any, ids: Tensor, watched: Watched, **options: Any) -> tuple[KVCache, KVCache, int]:
    """A prompt and 20 tokens one by one, with the kernel and without. Returns the caches and the kernel's steps."""
    logits, steps = [], []
    caches: list[KVCache] = []
    for watched.is_on in (True, False):
        cache = KVCache(model, **{**LIMITS, "batch": ids.shape[0], **options})
        prompt = read(model, cache, ids[:, :40], 40)  # before it the mean keys are measured, once for a model
        watched.steps = 0
        logits.append(torch.cat((prompt, read(model, cache, ids[:, 40:60], 1)), 1))
        caches.append(cache)
        steps.append(watched.steps)
    watched.is_on = True
    assert logits[0].equal(logits[1])
    assert_same(caches[0], caches[1])
    assert steps[1] == 0
    return caches[0], caches[1], steps[0]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize(
    ("budget", "store"), [(14, "plain"), (None, "plain"), (14, "int8"), (14, "int4"), (None, "int4")]
)
def test_every_policy(
    attached_model: Models, text: Text, policy: Policy, budget: int | None, store: str, watched: Watched
) -> None:
    model = attached_model("llama")
    ours, truth, steps = both(model, text(60, rows=2), watched, policy=policy, budget=budget, store=store)
    assert steps == (0 if isinstance(policy, DMC | Pairs) else 20 * len(ours.layers))
    for cache in (ours, truth):
        cache.rollback([5, 0])
    assert_same(ours, truth)


@pytest.mark.parametrize("policy", [Recent(), H2O(), TOVA(), SnapKV(observed_queries=3), KeyDiff()], ids=repr)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_policy_that_says_how_is_not_asked(
    attached_model: Models, text: Text, policy: Policy, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in a pass of several tokens, which is taken one by one, nor after a rollback."""
    model, ids = attached_model("llama"), text(60, rows=rows)
    cache = KVCache(model, policy=policy, batch=rows, budget=14, rollback=4, **LIMITS)
    read(model, cache, ids[:, :40], 40)
    for method in ("observe", "score"):
        monkeypatch.setattr(type(policy), method, None)
    read(model, cache, ids[:, 40:50], 1)
    read(model, cache, ids[:, 50:54], 4)
    cache.rollback([4] * rows)
    read(model, cache, ids[:, 50:60], 1)


@dataclass(frozen=True)
class Newest(H2O):
    """Observes as H2O does, and scores otherwise."""

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float()


def test_a_policy_that_inherits_from_one_is_asked(attached_model: Models, text: Text, watched: Watched) -> None:
    _, _, steps = both(attached_model("llama"), text(60, rows=2), watched, policy=Newest(), budget=14)
    assert steps > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "phi3", "glm4", "llama_dynamic", "olmo2"])
def test_families(attached_model: Models, text: Text, family: str, watched: Watched) -> None:
    """Norms of heads, sliding windows beside full attention, partial rotation."""
    _, _, steps = both(attached_model(family), text(60), watched, budget=30)
    assert steps > 0


@pytest.mark.parametrize(
    ("options", "is_served"),
    [
        ({}, True),
        ({"positions": "original"}, True),
        ({"positions": "compact"}, True),
        ({"positions": "compact", "recall": 16, "policy": SnapKV(observed_queries=3)}, True),
        ({"positions": "self_extend(3, 5)"}, True),
        ({"positions": "clamp(7)", "policy": Recent()}, True),
        ({"positions": "self_extend(2, 5)", "budget": None}, True),
        ({"merge": "mean_count"}, False),
        ({"rollback": 9}, True),
        ({"store": "int8"}, True),
        ({"store": "int4", "positions": "original"}, True),
        ({"store": "int4", "positions": "compact"}, True),
        ({"store": "int4", "merge": "mean_count"}, False),
        ({"store": "int4", "recall": 16}, True),
        ({"store": "int8", "recall": 16, "recall_store": "plain", "rollback": 9}, True),
        ({"store": "int4", "recall": 16, "recall_store": "int8"}, True),
    ],
)
def test_what_is_served(
    attached_model: Models, text: Text, options: dict[str, Any], is_served: bool, watched: Watched
) -> None:
    _, _, steps = both(attached_model("llama"), text(60), watched, **{"budget": 14, **options})
    assert (steps > 0) == is_served


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 14},
        {"budget": 14, "recall": 16, "store": "int8"},
        {"budget": 38, "policy": Recent()},
        {"budget": None},
        {"budget": None, "store": "int4"},
    ],
    ids=str,
)
def test_rows_within_and_beyond_the_trained_length(text: Text, options: dict[str, Any], watched: Watched) -> None:
    """At ranks, or in steps of 1, 2 and 4, and at different lengths of text in the rows of one step."""
    model, ids = tiny_model("llama"), text(110, rows=2)
    model.config.max_position_embeddings = 23
    attach(model)
    caches, logits = list[KVCache](), list[Tensor]()
    for watched.is_on in (True, False):
        cache = KVCache(model, **{**LIMITS, "batch": 2, "rollback": 9, **options})
        read(model, cache, ids[:, :7], 7)  # before it the mean keys are measured
        watched.steps = 0
        pieces = [read(model, cache, ids[:, 7:27], 1)]
        cache.rollback([0, 9])
        pieces += [read(model, cache, ids[:, 27:80], 1), read(model, cache, ids[:, 80:83], 3)]
        pieces.append(read(model, cache, ids[:, 83:], 1))
        assert watched.is_on == (watched.steps >= 100 * len(cache.layers))
        caches.append(cache)
        logits.append(torch.cat(pieces, 1))
    assert logits[0].equal(logits[1])
    assert_same(*caches)


@pytest.mark.parametrize(("store", "kernels_of_a_layer"), [("int8(newest=4)", 0), ("int4(sinks=2)", 1)])
def test_the_first_tokens_at_full_precision_beside_codes_are_served_and_the_newest_are_not(
    attached_model: Models, text: Text, store: str, kernels_of_a_layer: int, watched: Watched
) -> None:
    model, ids = attached_model("llama"), text(50)
    cache = KVCache(model, store=store, **LIMITS)
    read(model, cache, ids[:, :20], 20)  # which measures the mean keys with a cache of its own
    watched.made = 0
    read(model, cache, ids[:, 20:], 1)
    assert watched.made == kernels_of_a_layer * len(cache.layers)


@pytest.mark.parametrize("store", ["plain", "int4"])
def test_one_kernel_serves_until_something_changes(text: Text, store: str, watched: Watched) -> None:
    model, ids = attach(tiny_model("llama")), text(400)  # one whose tables of angles nobody else has made longer
    cache = KVCache(model, store=store, **LIMITS)
    layers = len(cache.layers)

    def made(first: int, count: int) -> int:
        watched.made = 0
        read(model, cache, ids[:, first : first + count], 1)
        assert watched.made % layers == 0
        return watched.made // layers

    read(model, cache, ids[:, :40], 40)
    assert made(40, 10) == 1
    assert made(50, 10) == 0
    assert made(60, 40) == 1  # the layers grew from 64 slots to 128
    cache.positions = "compact"
    assert made(100, 5) == 1
    cache.positions = "original"
    assert made(105, 5) == 1
    twin = copy.deepcopy(cache)
    assert made(110, 5) == 0
    read(model, twin, ids[:, 110:115], 1)
    assert_same(cache, twin)
    assert made(115, 142) == 3  # to 192 slots, to 320, and to longer tables of angles
    cache.compress(100)
    assert made(257, 20) == 1


@pytest.mark.parametrize("store", ["plain", "int8"])
def test_a_kernel_keeps_no_memory_alive(attached_model: Models, text: Text, store: str) -> None:
    model, ids = attached_model("llama"), text(90)
    cache = KVCache(model, store=store, **LIMITS)
    read(model, cache, ids[:, :40], 40)
    read(model, cache, ids[:, 40:50], 1)
    address = next(iter(cache.layers[0].store.tensors().values())).untyped_storage()._weak_ref()
    read(model, cache, ids[:, 50:90], 40)
    assert torch.UntypedStorage._expired(address)
