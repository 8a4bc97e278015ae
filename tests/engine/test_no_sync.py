"""A decode step waits for no device and takes nothing from the host: every policy, store, rule and position mode.

Tensors are on the device "meta": they have shapes but no numbers, so that whatever asks for a number, or has a shape
that depends on one, fails. It stands for a GPU: copies from and to other tensors are seen as they are called.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.models import Models
from tests.helpers.scorers import drawn
from windlass import KVCache
from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.cache.merging import MERGES, TARGETS, Merge, merge_of
from windlass.core.step import AttentionCall, Limits, Step
from windlass.policies import DMC, NAMES, WRAPPERS, KeyDiff, LinearScorer, Pairs, Policy, Recent, linear_scorer, pairs
from windlass.policies.pairs import PairTable
from windlass.positions.modes import PositionMode, Windowed, position_mode
from windlass.stores.formats import store_of

DEVICE = torch.device("meta")
BATCH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 15, 3, 8, 6
LIMITS = Limits(budget=40, sinks=2, window=3, chunk=33, rollback=1)
STEPS = (33, 33, 1, 1)  # tokens of each. The first decode step packs the slots, the last is watched
FORBIDDEN = ("lift_fresh", "_local_scalar_dense", "nonzero", "unique", "_linalg_check_errors", "bincount")
FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor, Tensor.numpy)


class NoWait(TorchDispatchMode):
    """Fails on operations that wait for the device, or move something between it and the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        assert not name.startswith(FORBIDDEN), f"{name} in a step"
        devices = {each.device for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)}
        assert devices <= {DEVICE}, f"{name} on {devices} in a step"
        return out


class NoHostData(TorchFunctionMode):
    """Fails where a tensor is made of Python's numbers, which is a copy that no operation shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in FROM_HOST, f"{func.__name__} in a step"
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[None]:
    """Nothing that is done meanwhile waits for the device."""
    with NoHostData(), NoWait():
        yield


@pytest.fixture
def run(attached_model: Models) -> Callable[..., None]:
    """Some steps of a layer with these options, the last of them watched."""
    rotary = copy.deepcopy(KVCache(attached_model("llama")).layers[0].rotary)

    def steps(
        policy: Policy | None = None,
        store: str = "plain",
        merge: str | Merge | None = None,
        positions: str | PositionMode = "original",
        sliding_window: int | None = None,
    ) -> None:
        layer = SlotLayer(0, LIMITS, policy or KeyDiff(), rotary, store_of(store), merge_of(merge))
        end = 0
        for number, tokens in enumerate(STEPS):
            queries, keys, values = (
                torch.empty(BATCH, heads, tokens, width, device=DEVICE)
                for heads, width in ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
            )
            places, ids = (torch.zeros(BATCH, tokens, dtype=each, device=DEVICE) for each in (torch.int32, torch.int64))
            end += tokens
            ends = torch.zeros(BATCH, dtype=torch.int64, device=DEVICE)
            step = Step(places, (tokens,) * BATCH, ends, ends, end, ids)
            call = AttentionCall(HEAD_DIM**-0.5, sliding_window)
            with watched() if number == len(STEPS) - 1 else nullcontext():
                # A prompt may ask, once a pass: auto does.
                mode = position_mode(positions if tokens == 1 else "original")
                layer.step(LayerCall(queries, keys, values, step, mode, call))
        assert layer.history.has_evicted

    return steps


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_waits(run: Callable[..., None], name: str) -> None:
    run(NAMES[name]())


@pytest.mark.parametrize("name", WRAPPERS)
def test_no_wrapper_waits(run: Callable[..., None], name: str) -> None:
    run(WRAPPERS[name](NAMES["snapkv"]()))


def test_a_pair_table_does_not_wait(run: Callable[..., None], tmp_path: Path) -> None:
    pairs.write(PairTable("any", "any", "mean_count(next)", 1, 0, [(3, 4, 1, 0.5)]), tmp_path / "pairs")
    run(Pairs(str(tmp_path / "pairs")), merge="mean_count(next)")


def test_a_scorer_does_not_wait(run: Callable[..., None], tmp_path: Path) -> None:
    linear_scorer.write(drawn(), tmp_path / "scorer")
    run(LinearScorer(str(tmp_path / "scorer")))


@pytest.mark.parametrize("store", ["plain", "int8", "int4", "int4(sinks=2, newest=5)"])
@pytest.mark.parametrize("positions", ["original", "compact", "self_extend(4, 9)", "clamp(20)"])
def test_no_store_and_no_position_mode_waits(run: Callable[..., None], store: str, positions: str) -> None:
    run(store=store, positions=positions)


@pytest.mark.parametrize("is_bounded", [True, False])
@pytest.mark.parametrize("trained", [9, 50, 99])
def test_no_auto_waits(run: Callable[..., None], trained: int, is_bounded: bool) -> None:
    run(positions=Windowed(trained, is_bounded))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MERGES)
def test_no_merge_rule_waits(run: Callable[..., None], name: str, target: str) -> None:
    run(DMC() if MERGES[name].weighs_by is not None else None, merge=MERGES[name](target))


def test_a_merge_with_a_threshold_does_not_wait(run: Callable[..., None]) -> None:
    run(merge="mean_count(threshold=0.5)")


def test_low_bit_merged_tokens_do_not_wait(run: Callable[..., None]) -> None:
    run(store="int4", merge="mean_count(threshold=0.2)")


@pytest.mark.parametrize("sliding_window", [38, 60])
def test_no_sliding_window_waits(run: Callable[..., None], sliding_window: int) -> None:
    run(Recent(), sliding_window=sliding_window)


FAULTS: dict[str, Callable[[Tensor], object]] = {
    "a branch": lambda x: bool((x > 0).any()),
    "a mask as an index": lambda x: x[x > 0],
    "a list": lambda x: x.tolist(),
    "a comparison": lambda x: x.equal(x),
    "a copy to the host": lambda x: x.sum().cpu(),
    "a copy from the host": lambda x: torch.ones(3).to(x.device),
    "numbers from the host": lambda x: x[..., :2] + torch.tensor([1.0, 2.0], device=x.device),
    "a checked factor": lambda x: torch.linalg.cholesky(x.new_ones(2, 2)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_waits_is_seen(fault: str) -> None:
    scores = torch.empty(2, 3, 5, device=DEVICE)
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)), watched():
        FAULTS[fault](scores)
